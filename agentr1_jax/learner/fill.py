"""Filling packed reads with what credit assignment found, and the weights that make an aggregate of token losses.

Every denominator of the loss is data: each token carries its share of the mean it belongs to, computed over the whole
batch of all processes. A loss is then a plain sum, and neither microbatches, nor shards, nor padding can change it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int

from agentr1_jax.learner.batch import Reads
from agentr1_jax.learner.packing import Packing

AGGREGATES = ("token", "step", "trajectory", "group", "fixed")


def aggregate_weights(
    aggregate: str,
    token_step: Int[np.ndarray, "tokens"],
    token_trajectory: Int[np.ndarray, "tokens"],
    token_group: Int[np.ndarray, "tokens"],
    trained: Bool[np.ndarray, "tokens"],
    *,
    fixed_denominator: float = 1.0,
) -> Float[np.ndarray, "tokens"]:
    """The weight of each token in the loss Σₖ wₖ·lₖ.

    `token`: mean over trained tokens. `step`: mean over steps of the mean over their tokens. `trajectory`: mean over
    trajectories of the mean over their tokens. `group`: mean over groups of the mean over their trajectories.
    `fixed`: sum over tokens divided by a constant (Dr.GRPO).

    Args:
      aggregate: one of `AGGREGATES`.
      token_step, token_trajectory, token_group: unit of each token, over all processes.
      trained: tokens that take part.
      fixed_denominator: the constant of `fixed`.

    Returns:
      float32 weights, 0 where not trained.
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"unknown aggregate {aggregate!r}; choose one of {', '.join(AGGREGATES)}")
    ones = trained.astype(np.float64)
    if not trained.any():
        return ones.astype(np.float32)
    if aggregate == "fixed":
        return (ones / fixed_denominator).astype(np.float32)
    if aggregate == "token":
        return (ones / ones.sum()).astype(np.float32)

    def size_of_unit(unit: np.ndarray) -> np.ndarray:
        return np.bincount(unit, weights=ones)[unit]

    def units(unit: np.ndarray) -> int:
        return len(np.unique(unit[trained]))

    if aggregate == "step":
        weights = ones / np.maximum(size_of_unit(token_step), 1) / units(token_step)
    elif aggregate == "trajectory":
        weights = ones / np.maximum(size_of_unit(token_trajectory), 1) / units(token_trajectory)
    else:
        first = np.unique(token_trajectory[trained], return_index=True)[1]
        group_of = token_group[trained][first]
        members = np.bincount(group_of, minlength=token_group.max() + 1)[token_group]
        share = np.maximum(size_of_unit(token_trajectory), 1) * np.maximum(members, 1)
        weights = ones / share / units(token_group)
    return weights.astype(np.float32)


def place(packing: Packing, per_token: np.ndarray) -> np.ndarray:
    """A value per token that is read, in stream order (see `Packing.token_read`): [K] -> [B, M]; 0 elsewhere."""
    out = np.zeros(packing.reads.src.shape, per_token.dtype)
    out[packing.token_read[:, 0], packing.token_read[:, 1]] = per_token
    return out


def fill(packing: Packing, per_token: Mapping[str, np.ndarray]) -> Reads:
    """Reads with further fields, each given as values [K] of the tokens that are read, in stream order.

    Args:
      packing: the layout.
      per_token: by name of the field: `advantage` and `weight`; with a critic `old_value`, `value_target` and
        `value_weight`; where a run needs them `old_logprob` of other than the sampler, `ref_logprob`, `rollout_weight`.
        Where observation tokens are read and trained, their `old_logprob` must be among them.
    """
    return dataclasses.replace(packing.reads, **{name: place(packing, x) for name, x in per_token.items()})


def gather_tokens(packing: Packing, per_read: np.ndarray) -> np.ndarray:
    """The inverse of `place`: [B, M] -> [K]."""
    return per_read[packing.token_read[:, 0], packing.token_read[:, 1]]


def gather_final(packing: Packing, per_read: np.ndarray) -> np.ndarray:
    """Values at `final_prompt_ids`: [B, M] -> [N], 0 where a trajectory has none."""
    row, column = packing.final_read[:, 0], packing.final_read[:, 1]
    return np.where(row >= 0, per_read[row, column], 0).astype(np.float32)
