"""GiGPO: outcomes in their group, and returns among the steps that start in the same state (arXiv 2505.10978).

    python -m experiments.train --config=configs/presets/gigpo.py[:keydoor]

The argument names the config of `configs/` that it is applied to.
"""

from __future__ import annotations

import ml_collections

from configs import presets


def get_config(task: str = "quickstart") -> ml_collections.ConfigDict:
    """The preset on a task config of `configs/`."""
    c = presets.on(task, "gigpo")
    c.credit.name = "gigpo"
    c.kl.kind = "k3"
    c.kl.coef = 0.01
    return c
