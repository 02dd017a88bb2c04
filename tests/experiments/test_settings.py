"""Every key of a config has a type and a range: a mutated value is read, or refused by name, and never crashes."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from typing import Annotated, Any

import pytest
from changes import changed

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.config import flatten
from agentr1_jax.train import defaults
from agentr1_jax.train.settings import RunConfig, Settings
from configs import base, quickstart
from experiments.checks import check_placement
from experiments.setup import complete, read_settings

TASKS = sorted(base.TASK_MODULES)
MUTATIONS: tuple[Any, ...] = (
    -1,
    0,
    1,
    2**40,
    -1.0,
    0.0,
    0.5,
    1.5,
    1e30,
    math.nan,
    math.inf,
    "",
    "nonsense",
    True,
    None,
)
REQUIRED = {
    "gymnasium": {"id": "CartPole-v1"},
    "http": {"url": "http://localhost:8100"},
    "verifiers": {"source": "env"},
}
"""Keys without which a task cannot run."""
LISTS: tuple[Any, ...] = ((), ("nonsense(",), (-1,), ("a", "b"), (0, 0), [3.5])


def mutate(config: Any, key: str, value: Any) -> Any:
    """The config with another value of one key, whatever its type."""
    config = config.copy_and_resolve_references()
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = section[part]
    with config.unlocked(), section.ignore_type():
        section[name] = value
    return config


def leaves(config: Any) -> list[str]:
    return [key for key, _ in flatten(config.to_dict())]


@pytest.mark.parametrize("key", leaves(quickstart.get_config()))
def test_a_mutated_key_is_read_or_refused_by_name(key):
    config = quickstart.get_config()
    for value in (*MUTATIONS, *LISTS):
        try:
            settings = read_settings(mutate(config, key, value))
        except UserError as error:
            assert key.rpartition(".")[2] in str(error), (value, str(error))
        else:
            assert isinstance(settings, Settings), value


@pytest.mark.contrib
@pytest.mark.parametrize("task", TASKS)
def test_mutated_keys_of_a_task_are_read_or_refused_by_name(task):
    config = base.get_config(task)
    config.policy.preset, config.credit.name = "tiny", "reinforce"
    if task in config.task:
        config.task[task].update(REQUIRED.get(task, {}))
    for key in leaves(config.task[task]) if task in config.task else ():
        for value in (*MUTATIONS, *LISTS):
            try:
                read_settings(mutate(config, f"task.{task}.{key}", value))
            except UserError as error:
                assert key.split(".")[0] in str(error), (key, value, str(error))


def numbers_without_range(hint: Any, *, ranged: bool = False) -> bool:
    """Whether a type has a number that may be anything."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return numbers_without_range(typing.get_args(hint)[0], ranged=True)
    if origin in (typing.Union, types.UnionType, tuple):
        return any(numbers_without_range(part, ranged=ranged) for part in typing.get_args(hint))
    return hint in (int, float) and not ranged


def settings_classes(cls: type, seen: set[type]) -> set[type]:
    """All dataclasses of settings below one."""
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and part not in seen and part.__name__.endswith(("Config", "Budget")):
                settings_classes(part, seen | {part})
                seen.add(part)
    return seen


def test_every_number_has_a_range():
    entries = [base.find_task(name).config for name in TASKS]
    classes = settings_classes(Settings, {entry for entry in entries if entry})
    assert len(classes) > 25
    open_ended = [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, hint in typing.get_type_hints(cls, include_extras=True).items()
        if numbers_without_range(hint)
    ]
    assert not open_ended


def test_integers_have_32_bits():
    """Larger ones once failed in the middle of a run, or came out of a compiled program as other numbers."""
    integers = [key for key, value in flatten(quickstart.get_config().to_dict()) if type(value) is int]
    assert {"updates", "budget.max_steps", "rollout.groups", "learner.row_loss_tokens"} < set(integers)
    for key in {*integers, "rollout.slots", "policy.layers"} - {"seed", "mesh.data"}:
        with pytest.raises(UserError, match=rf"^{re.escape(key)} is 2147483648; it must be less than 2147483648$"):
            read_settings(mutate(quickstart.get_config(), key, 2**31))
    for key in ("budget.max_steps", "rollout.groups", "rollout.samples"):
        with pytest.raises(UserError, match=rf"{re.escape(key)} \(10000000\)"):
            read_settings(mutate(quickstart.get_config(), key, 10_000_000))


def filled(devices=None, **changes):
    """A config with only these keys, completed."""
    config = changed(base.get_config("hopworld"), policy__preset="tiny", **changes)
    return complete(config, devices), config


def test_the_length_of_a_context_is_one_key():
    for tokens, block in ((512, 64), (8192, 64), (320, 64), (1000, 64)):
        config, _ = filled(budget__context_tokens=tokens)
        settings = read_settings(config)
        up = -(-tokens // block) * block
        assert (settings.engine.slot_tokens, settings.engine.attention_block) == (up, block)
        assert settings.learner.row_tokens == tokens and settings.budget.trajectory_tokens == max(8 * tokens, 4096)
        assert settings == read_settings(complete(config))  # What is set stays.
    config, _ = filled(budget__context_tokens=8192, budget__response_tokens=1024, budget__final_answer_step=True)
    assert config.learner.row_loss_tokens == 6 * 1024 + 8  # Every step in full, and one more, in eights.
    config, _ = filled(learner__loss_mask=False)
    assert config.learner.row_loss_tokens == config.budget.context_tokens
    config, _ = filled(rollout__slot_tokens=1000, learner__row_tokens=777, learner__row_loss_tokens=99)
    assert (config.rollout.slot_tokens, config.rollout.attention_block) == (1000, 8)
    assert (config.learner.row_tokens, config.learner.row_loss_tokens) == (777, 99)
    with pytest.raises(UserError, match=r"learner.row_tokens \(64\) is less than .*; learner.row_tokens=None makes it"):
        read_settings(filled(learner__row_tokens=64)[0])


def devices_of(kind, count, platform="tpu", processes=1):
    return [
        types.SimpleNamespace(device_kind=kind, platform=platform, process_index=i * processes // count)
        for i in range(count)
    ]


def test_hardware_fills_what_is_unset():
    cpu, before = filled()
    assert all(value is None for key, value in flatten(before.to_dict()) if key in defaults.BY_HARDWARE)
    assert all(value is not None for key, value in flatten(cpu.to_dict()) if key in defaults.BY_HARDWARE)
    assert (cpu.policy.dtype, cpu.mesh.fsdp, cpu.learner.rows) == ("float32", 1, 8)
    tpu, _ = filled(hardware="v5e-16", policy__remat="dots", rollout__slots=96)
    assert (tpu.policy.dtype, tpu.policy.attention, tpu.mesh.fsdp, tpu.learner.rows) == ("bfloat16", "splash", 16, 16)
    assert (tpu.policy.remat, tpu.rollout.slots) == ("dots", 96)  # As they were set.
    assert tpu.loss.chunk == 512
    assert typing.get_args(typing.get_type_hints(RunConfig)["hardware"]) == (*defaults.HARDWARE, defaults.AUTO)
    for mesh, fsdp in (({"mesh__tensor": 4}, 4), ({"mesh__data": 2}, 8), ({"mesh__data": 2, "mesh__tensor": 2}, 4)):
        assert filled(hardware="v5e-16", **mesh)[0].mesh.fsdp == fsdp
    assert filled(hardware="v5e-8", learner__packing="prefix_tree")[0].policy.attention == "splash_tree"
    assert filled(hardware="v5e-8", learner__row_tokens=520)[0].policy.attention == "xla"
    assert filled(hardware="v5e-8", budget__context_tokens=520)[0].learner.row_tokens == 640
    assert filled(hardware="v5e-8", rollout__slot_tokens=320)[0].rollout.attention_block == 64


@pytest.mark.parametrize(
    ("devices", "dtype", "attention", "fsdp"),
    [
        (devices_of("cpu", 8, "cpu"), "float32", "xla", 1),
        (devices_of("TPU v5 lite", 8), "bfloat16", "splash", 8),
        (devices_of("TPU v6 lite", 4), "bfloat16", "splash", 4),
        (devices_of("TPU v5p", 4), "bfloat16", "splash", 4),
        (devices_of("TPU v9", 2), "bfloat16", "splash", 2),
        (devices_of("NVIDIA H200", 1, "gpu"), "bfloat16", "cudnn", 1),
        (devices_of("NVIDIA H100 80GB HBM3", 8, "gpu"), "bfloat16", "cudnn", 8),
    ],
)
def test_auto_is_what_the_devices_are(devices, dtype, attention, fsdp):
    config, _ = filled(devices, hardware="auto")
    assert (config.policy.dtype, config.policy.attention, config.mesh.fsdp) == (dtype, attention, fsdp)
    check_placement(read_settings(config), devices)


def test_auto_leaves_devices_to_rollouts():
    devices = devices_of("TPU v5 lite", 16, processes=4)
    config, _ = filled(devices, hardware="auto", mesh__rollout_devices=2, rollout__slots=64)
    assert (config.mesh.fsdp, config.learner.rows) == (8, 8)
    check_placement(read_settings(config), devices)


def test_a_time_limit_of_a_step_bounds_a_trajectory_whose_environment_ignores_it():
    def seconds(**budget):
        return read_settings(changed(quickstart, **{f"budget__{key}": x for key, x in budget.items()})).attempt_limits

    steps = read_settings(quickstart.get_config()).most_steps
    assert seconds().seconds is None and seconds(trajectory_seconds=3.0, step_seconds=1.0).seconds == 6
    assert seconds(step_seconds=1.5).seconds == 3 * (steps + 1)


def test_nonsense_that_once_trained_is_refused():
    negative = ("optimizer.lr", "optimizer.eps", "optimizer.max_grad_norm", "policy.norm_eps", "warm_start.lr")
    negative += ("warm_start.control_seconds", "correction.cap", "updates", "seed")
    zero = ("policy.rope_theta", "policy.heads", "warm_start.demonstrations", "checkpoint.every", "checkpoint.keep")
    zero += ("rollout.groups", "rollout.samples", "learner.minibatches", "learner.epochs", "loss.fixed_denominator")
    values = dict.fromkeys(negative, -1) | dict.fromkeys(zero, 0) | {"run_dir": "", "optimizer.b1": 1.5}
    for key, value in values.items():
        with pytest.raises(UserError, match=key.rpartition(".")[2]):
            read_settings(mutate(quickstart.get_config(), key, value))
