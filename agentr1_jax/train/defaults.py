"""Values of the keys that a config leaves open: what follows from the hardware, and from other keys.

`HARDWARE` is the only table of what depends on devices. A key that a config file or the command line sets stays as it
is; `complete` fills the others, and the config that a run stores has them all.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from agentr1_jax.agents.context import RULES, ContextConfig, ContextRule
from agentr1_jax.errors import UserError, user_error
from agentr1_jax.policy.attention import SPLASH_BLOCK, for_trees
from agentr1_jax.runtime.mesh import MeshConfig
from agentr1_jax.trajectory import Budget
from agentr1_jax.validation import from_section

AUTO = "auto"
"""Name of the hardware that the devices decide."""
LEAST_TRAJECTORY_TOKENS = 4096
"""Least `budget.trajectory_tokens` where it is unset."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a run needs to know of its devices.

    Attributes:
      chips: devices of the whole run; 0 for any number.
      values: dotted key -> value.
      rows_per_shard: `learner.rows` for each shard of a batch; in all where any number of chips goes.
      loss_chunk: `loss.chunk`, which is that of each device.
    """

    chips: int
    values: Mapping[str, Any]
    rows_per_shard: int
    loss_chunk: int


_CPU = {
    "policy.dtype": "float32",
    "policy.attention": "xla",
    "policy.remat": "none",
    "rollout.slots": 64,
    "rollout.swap_slots": 16,
    "rollout.decode_chunk": 8,
    "rollout.early_exit_after": 1,
    "rollout.fetch_lag": 0,
    "rollout.prefill_width": 16,
    "rollout.prefill_rows": (8, 32),
    "rollout.attention_block": 64,
    "rollout.attention_group": 8,
    "rollout.page_tokens": 16,
    "mesh.tensor": 1,
}
_ACCELERATOR = {
    "policy.dtype": "bfloat16",
    "policy.attention": "splash",
    "policy.remat": "full",
    "rollout.slots": 64,
    "rollout.swap_slots": 16,
    "rollout.decode_chunk": 16,
    "rollout.early_exit_after": 4,
    "rollout.fetch_lag": 1,
    "rollout.prefill_width": 128,
    "rollout.prefill_rows": (4, 16),
    "rollout.attention_block": 1024,
    "rollout.attention_group": 32,
    "rollout.page_tokens": 64,
    "mesh.tensor": 1,
}
_LARGE = _ACCELERATOR | {
    "rollout.slots": 256,
    "rollout.swap_slots": 64,
    "rollout.attention_group": 128,
    "rollout.early_exit_after": 16,
}
_GPU = _LARGE | {"policy.attention": "cudnn", "rollout.attention_group": 64}

HARDWARE: Mapping[str, Hardware] = types.MappingProxyType(
    {
        "cpu": Hardware(0, _CPU, 8, 1024),
        "v5e-8": Hardware(8, _ACCELERATOR, 1, 512),  # 16 GiB a chip.
        "v5e-16": Hardware(16, _ACCELERATOR, 1, 512),
        "v6e-8": Hardware(
            8, _ACCELERATOR | {"rollout.slots": 128, "rollout.swap_slots": 32, "rollout.early_exit_after": 8}, 2, 512
        ),  # 32 GiB.
        "v5p-8": Hardware(4, _LARGE, 2, 1024),  # 8 cores are 4 chips of 95 GiB.
        "h100x8": Hardware(8, _GPU, 2, 1024),  # 80 GiB.
        "h200": Hardware(1, _GPU, 4, 1024),  # 141 GB.
    }
)
"""`hardware` of a config -> what it sets."""
KINDS: Mapping[str, str] = types.MappingProxyType(
    {"TPU v5 lite": "v5e-8", "TPU v5e": "v5e-8", "TPU v6 lite": "v6e-8", "TPU v6e": "v6e-8", "TPU v5p": "v5p-8"}
    | {"TPU v5": "v5p-8"}
)
"""`device_kind` of JAX -> row of the table; other TPUs have that of v5e-8, GPUs but the H200 that of h100x8."""
BY_HARDWARE = (*_CPU, "mesh.fsdp", "learner.rows", "loss.chunk")
"""Keys that the hardware decides where they are unset."""
DERIVED: Mapping[str, str] = types.MappingProxyType(
    {
        "budget.trajectory_tokens": "8 contexts, at least 4096",
        "rollout.slot_tokens": "budget.context_tokens, rounded up to a multiple of rollout.attention_block",
        "learner.row_tokens": "budget.context_tokens",
        "learner.row_loss_tokens": "the longest responses of all steps, at most a row",
        "loss.fixed_denominator": "trajectories of a minibatch: rollout.groups * rollout.samples / learner.minibatches",
    }
)
"""Keys that follow from the lengths of `budget`, or the size of a batch, where they are unset -> how."""


def find_hardware(name: Any, devices: Sequence[jax.Device] | None) -> Hardware | None:
    """Return the row of `HARDWARE` of a name; of `auto` that of the devices, with as many chips as there are.

    Args:
      name: key `hardware` of a config.
      devices: of all processes; None where they are not known yet: then `auto` has no row.

    Raises:
      UserError: the table has no such name.
    """
    if name in tuple(HARDWARE):  # It may be anything.
        return HARDWARE[str(name)]
    if name != AUTO:
        raise UserError(f"hardware is {name!r}; choose one of {', '.join(HARDWARE)}, {AUTO}")
    if devices is None:
        return None
    first = devices[0]
    if first.platform == "cpu":
        return HARDWARE["cpu"]
    if first.platform == "gpu":
        row = HARDWARE["h200" if "H200" in first.device_kind else "h100x8"]
    else:
        row = HARDWARE[KINDS.get(first.device_kind, "v5e-8")]
    return dataclasses.replace(row, chips=len(devices))


def check_chips(name: str, devices: Sequence[jax.Device]) -> None:
    """Raise UserError if the named hardware has more chips than there are."""
    chips = HARDWARE[name].chips if name in HARDWARE else 0
    if chips > len(devices):
        raise UserError(
            f"hardware is {name}, which has {chips} chips, and there are {len(devices)} devices "
            f"({devices[0].platform}); choose hardware={AUTO}, or start it on that hardware"
        )


def most_steps(budget: Budget, rule: ContextRule) -> int:
    """Return the most steps of a trajectory. A rule with summaries adds one between two steps."""
    return rule.most_steps(budget.max_steps + budget.final_answer_step)


def most_response_tokens(budget: Budget, context: ContextConfig, rule: ContextRule) -> int:
    """Return the most tokens that one step samples."""
    return max(budget.response_tokens, context.summary_tokens if rule.makes_summaries else 0)


def complete(values: Mapping[str, Any], devices: Sequence[jax.Device] | None = None) -> dict[str, Any]:
    """Return nested values of a config in which every key that is unset or missing has the value that follows.

    Published weights bring their tokenizer: an empty `tokenizer.path` becomes `policy.weights`.

    Args:
      values: section -> key -> value, and the keys at the top; not changed. A user's context rules are loaded.
      devices: of all processes, for `hardware=auto`; None where they are not known yet, which stands for a CPU.

    Raises:
      UserError: `hardware`, or a key of `budget`, `context` or `mesh`, has a value that cannot be.
    """
    filled = {key: dict(x) if isinstance(x, Mapping) else x for key, x in values.items()}
    _fill_tokenizer(filled)
    row = find_hardware(filled.get("hardware", "cpu"), devices) or HARDWARE["cpu"]
    _fill(filled, "budget.trajectory_tokens", LEAST_TRAJECTORY_TOKENS)  # Raised below, once the context is checked.
    budget = from_section(Budget, "budget", filled["budget"])
    if _get(values, "budget.trajectory_tokens") is None:
        filled["budget"]["trajectory_tokens"] = max(8 * budget.context_tokens, LEAST_TRAJECTORY_TOKENS)
    file = _get(filled, "context.file")
    if file and isinstance(file, str):  # Before the rule is looked up.
        with user_error():
            RULES.load(file)
    context = from_section(ContextConfig, "context", filled.get("context", {}))
    _fill_attention(filled, row, budget)
    for key, value in row.values.items():
        _fill(filled, key, value)
    _fill_rows(filled, budget, context)
    _fill_mesh(filled, row, len({d.process_index for d in devices}) if devices else 1)
    _fill_denominator(filled)
    return filled


def _fill_tokenizer(filled: dict[str, Any]) -> None:
    weights = _get(filled, "policy.weights")
    if weights and isinstance(weights, str) and not _get(filled, "tokenizer.path"):
        filled.setdefault("tokenizer", {})["path"] = weights


def _fill_attention(filled: dict[str, Any], row: Hardware, budget: Budget) -> None:
    """Fill the attention of the learner, and the length of slots and of their attention blocks."""
    own, slot_tokens = row.values["rollout.attention_block"], _get(filled, "rollout.slot_tokens")
    if isinstance(slot_tokens, int) and slot_tokens > 0:
        _fill(filled, "rollout.attention_block", math.gcd(own, slot_tokens))
    quarter = 2 ** int(math.log2(max(budget.context_tokens // 4, 1)))  # Little of a short context may be padding.
    block = _fill(filled, "rollout.attention_block", min(own, max(quarter, 64)))
    if isinstance(block, int) and block > 0:
        _fill(filled, "rollout.page_tokens", math.gcd(row.values["rollout.page_tokens"], block))
    _fill(filled, "rollout.slot_tokens", _round_up(budget.context_tokens, block))
    row_tokens = _get(filled, "learner.row_tokens")
    if _get(filled, "learner.packing") == "prefix_tree":
        _fill(filled, "policy.attention", for_trees(row.values["policy.attention"]))
    if row.values["policy.attention"] == "splash" and isinstance(row_tokens, int) and row_tokens % SPLASH_BLOCK:
        _fill(filled, "policy.attention", "xla")


def _fill_rows(filled: dict[str, Any], budget: Budget, context: ContextConfig) -> None:
    """Fill the length of packed rows and their number of loss tokens."""
    splash = str(_get(filled, "policy.attention")).startswith("splash")
    own = _round_up(budget.context_tokens, SPLASH_BLOCK if splash else 1)
    row_tokens = _fill(filled, "learner.row_tokens", own)
    rule = context.bound_rule
    loss_tokens = most_steps(budget, rule) * most_response_tokens(budget, context, rule) + 1  # 1 for the critic.
    if _get(filled, "learner.loss_mask") is False or _get(filled, "learner.advantage_mask") is False:
        loss_tokens = row_tokens
    least = min(_round_up(loss_tokens, 8), row_tokens) if isinstance(row_tokens, int) else loss_tokens
    _fill(filled, "learner.row_loss_tokens", least)


def _fill_mesh(filled: dict[str, Any], row: Hardware, processes: int) -> None:
    """Fill the learner's mesh, its rows per microbatch, and the chunk of logits."""
    shards = 1
    if row.chips:
        keys = {key: x for key, x in filled.get("mesh", {}).items() if x is not None}
        mesh = from_section(MeshConfig, "mesh", keys)
        shards = max((row.chips - processes * mesh.rollout_devices) // mesh.tensor, 1)
        _fill(filled, "mesh.fsdp", max(shards // max(mesh.data, 1), 1))
    _fill(filled, "mesh.fsdp", 1)
    _fill(filled, "learner.rows", row.rows_per_shard * shards)
    _fill(filled, "loss.chunk", row.loss_chunk)


def _fill_denominator(filled: dict[str, Any]) -> None:
    """Fill the divisor of sums over tokens; 1 for sizes that are no positive numbers, which are refused elsewhere."""
    sizes = [_get(filled, key) for key in ("rollout.groups", "rollout.samples", "learner.minibatches")]
    groups, samples, minibatches = sizes if all(isinstance(x, int) and x > 0 for x in sizes) else (1, 1, 1)
    _fill(filled, "loss.fixed_denominator", groups * samples / minibatches)


def _get(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None where it or its section is missing."""
    section, name = key.split(".")
    return values.get(section, {}).get(name)


def _fill(filled: dict[str, Any], key: str, value: Any) -> Any:
    """Give a dotted key a value where it has none; return the value that it has now."""
    section, name = key.split(".")
    keys = filled.setdefault(section, {})
    if keys.get(name) is None:
        keys[name] = value
    return keys[name]


def _round_up(count: int, multiple: Any) -> int:
    """Round a count up to a multiple; one that is no positive number is refused elsewhere, and rounds nothing."""
    return -(-count // multiple) * multiple if isinstance(multiple, int) and multiple > 0 else count
