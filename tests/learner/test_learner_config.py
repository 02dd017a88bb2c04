"""Settings of learner and policy: sections of the base config fit them, and nonsense is refused with its key."""

from __future__ import annotations

import dataclasses

import pytest

from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import (
    CorrectionConfig,
    KLConfig,
    LearnerConfig,
    LossConfig,
    Objective,
    OptimizerConfig,
)
from agentr1_jax.policy.config import LoraConfig, PolicyConfig
from agentr1_jax.policy.presets import PRESETS, decoder_config
from agentr1_jax.train.defaults import complete
from agentr1_jax.validation import from_section
from configs import base

SECTIONS = {
    "loss": LossConfig,
    "kl": KLConfig,
    "correction": CorrectionConfig,
    "learner": LearnerConfig,
    "optimizer": OptimizerConfig,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_of_the_base_config_is_the_default(section):
    values = base.get_config()[section].to_dict()
    assert set(values) == {f.name for f in dataclasses.fields(SECTIONS[section])}
    set_here = {key: value for key, value in values.items() if value is not None}  # The others follow from elsewhere.
    assert from_section(SECTIONS[section], section, set_here) == SECTIONS[section]()


def test_the_policy_section_makes_the_shape_of_its_preset_with_changes():
    values = complete(base.get_config().to_dict())["policy"]
    assert set(values) == {f.name for f in dataclasses.fields(PolicyConfig)}
    changes = {"preset": "tiny", "layers": 2, "dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8.0}}
    shape = decoder_config(from_section(PolicyConfig, "policy", values | changes), vocab_size=256)
    expected = dataclasses.replace(PRESETS["tiny"], layers=2, dtype="bfloat16", vocab_size=256, lora=LoraConfig(4, 8.0))
    assert shape == expected
    assert decoder_config(PolicyConfig(preset="qwen2.5-0.5b"), vocab_size=256).vocab_size == 151_936


@pytest.mark.parametrize(
    ("section", "key", "wrong"),
    [
        ("loss", "ratio", "turn"),
        ("loss", "clip_low", 1.0),
        ("loss", "clip_high", float("nan")),
        ("loss", "dual_c", 1.0),
        ("kl", "target", 0.0),
        ("learner", "row_tokens", 0),
        ("learner", "loss_mask", 1),
        ("optimizer", "b2", 1.0),
        ("optimizer", "schedule", "cosin"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(section, key, wrong):
    with pytest.raises(UserError, match=rf"^{section}\.{key} is {wrong!r}; it must be "):
        from_section(SECTIONS[section], section, {key: wrong})


def test_bounds_out_of_order_are_refused():
    with pytest.raises(UserError, match=r"^correction: low \(1\.5\) exceeds high \(0\.5\)"):
        from_section(CorrectionConfig, "correction", {"low": 1.5, "high": 0.5})


def test_imitation_has_neither_ratio_nor_kl():
    objective = Objective(LossConfig(clip="dual", entropy_coef=0.1), KLConfig("k3"), temperature=0.8)
    imitation = objective.imitation()
    assert (imitation.loss.clip, imitation.kl_in_loss, imitation.temperature) == ("none", "none", 0.8)
    assert imitation.loss.entropy_coef == 0.1 and objective.kl_in_loss == "k3"
    assert Objective(kl=KLConfig("k3", "reward")).kl_in_loss == "none"
