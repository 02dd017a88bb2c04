"""Settings of rollouts: values out of range are refused with the key at fault, and every key belongs to one class."""

from __future__ import annotations

import dataclasses

import pytest

from agentr1_jax.errors import UserError
from agentr1_jax.rollout.config import AttemptLimits, EngineConfig, RolloutConfig, SamplingConfig
from agentr1_jax.validation import from_section
from configs import quickstart

SECTION = quickstart.get_config().rollout.to_dict()


def names(cls):
    return {field.name for field in dataclasses.fields(cls)}


def settings_of(cls, **changes):
    return from_section(cls, "rollout", {k: v for k, v in SECTION.items() if k in names(cls)} | changes)


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (EngineConfig, {"slots": 0}, r"rollout\.slots is 0; it must be greater than or equal to 1"),
        (EngineConfig, {"decode_chunk": 2.5}, r"rollout\.decode_chunk is 2\.5; it must be a valid integer"),
        (EngineConfig, {"swap_slots": -1}, r"rollout\.swap_slots is -1; it must be greater than or equal to 0"),
        (EngineConfig, {"fetch_lag": 2}, r"rollout\.fetch_lag is 2; it must be 0 or 1"),
        (EngineConfig, {"prefix_reuse": "some"}, r"rollout\.prefix_reuse is 'some'; it must be 'all', 'own' or 'none'"),
        (EngineConfig, {"prefill_width": 0}, r"rollout\.prefill_width is 0"),
        (EngineConfig, {"prefill_width": 321}, r"rollout: prefill_width \(321\) exceeds slot_tokens \(320\)"),
        (EngineConfig, {"attention_block": 48}, r"rollout: attention_block \(48\) must divide slot_tokens"),
        (EngineConfig, {"prefill_rows": (4, 4)}, r"rollout: prefill_rows is \(4, 4\); it must be .* ascending"),
        (EngineConfig, {"prefill_rows": ()}, r"rollout: prefill_rows is \(\)"),
        (
            EngineConfig,
            {"prefill_rows": (0, 4)},
            r"rollout\.prefill_rows\.0 is 0; it must be greater than or equal to 1",
        ),
        (
            SamplingConfig,
            {"temperature": -0.5},
            r"rollout\.temperature is -0\.5; it must be greater than or equal to 0",
        ),
        (SamplingConfig, {"temperature": float("nan")}, r"rollout\.temperature is nan"),
        (SamplingConfig, {"temperature": float("inf")}, r"rollout\.temperature is inf; it must be a finite number"),
        (SamplingConfig, {"top_p": 0.0}, r"rollout\.top_p is 0\.0; it must be greater than 0"),
        (SamplingConfig, {"top_p": 1.5}, r"rollout\.top_p is 1\.5; it must be less than or equal to 1"),
        (SamplingConfig, {"top_k": -1}, r"rollout\.top_k is -1"),
        (RolloutConfig, {"groups": 0}, r"rollout\.groups is 0"),
        (RolloutConfig, {"staleness": -1}, r"rollout\.staleness is -1"),
        (
            RolloutConfig,
            {"samples": 1, "dynamic_sampling_groups": 4},
            "rollout: dynamic_sampling_groups replaces groups",
        ),
        (RolloutConfig, {"staleness": 1, "dynamic_sampling_groups": 4}, "set one of them only"),
        (AttemptLimits, {"attempts": 0}, r"rollout\.attempts is 0"),
        (AttemptLimits, {"seconds": 0.0}, r"rollout\.seconds is 0\.0; it must be greater than 0"),
    ],
)
def test_settings_out_of_range_are_refused(cls, changes, message):
    with pytest.raises(UserError, match=message):
        settings_of(cls, **changes)


def test_every_key_of_the_section_is_a_field_of_one_class():
    classes = [EngineConfig, RolloutConfig, SamplingConfig]
    for cls in classes:
        settings_of(cls)
    fields = [name for cls in classes for name in names(cls)]
    assert len(fields) == len(set(fields))
    assert set(SECTION) == set(fields) - {"stop_sequences", "stop_width"}
