"""Every scheme with all its hyper-parameters against plain loops."""

from __future__ import annotations

import credit_reference
import numpy as np
import pytest
from builders import rollouts
from credits import NAMES, NUMBERS, every_option, own_numbers, quick
from hypothesis import given


@pytest.mark.parametrize("name", NAMES)
@quick
@given(rollouts(), NUMBERS)
def test_a_scheme_equals_the_loops(name, data, numbers):
    own = own_numbers(name, numbers)
    for option, credit in every_option(name, data, **numbers):
        advantages, targets = getattr(credit_reference, name)(data, **own, **option)
        np.testing.assert_allclose(credit.advantages, advantages, atol=1e-9, rtol=1e-9, err_msg=f"{option}")
        np.testing.assert_array_equal(np.flatnonzero(credit.value_mask), sorted(targets))
        expected = [targets[k] for k in sorted(targets)]
        np.testing.assert_allclose(credit.value_targets[credit.value_mask], expected, atol=1e-9)
        assert not credit.value_targets[~credit.value_mask].any()
