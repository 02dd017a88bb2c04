"""Weights that make a mean of token losses.

Every denominator of the loss is data: each token carries its share of the mean it belongs to, computed over the whole
batch of all processes. A loss is then a plain sum, and neither microbatches, nor shards, nor padding can change it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from agentr1_jax.learner.config import AGGREGATES, Aggregate


class TokenUnits(NamedTuple):
    """Units of each token, over all processes.

    Attributes:
      step, trajectory, group: index of the unit, from 0.
    """

    step: Int[np.ndarray, "tokens"]
    trajectory: Int[np.ndarray, "tokens"]
    group: Int[np.ndarray, "tokens"]


def loss_weights(
    aggregate: Aggregate,
    units: TokenUnits,
    trained: Bool[np.ndarray, "tokens"],
    *,
    fixed_denominator: float = 1.0,
    minibatch: Int[np.ndarray, "tokens"] | None = None,
) -> Float[np.ndarray, "tokens"]:
    """Return the weight of each token in the loss Σₖ wₖ·lₖ.

    `token`: mean over trained tokens. `step`: mean over steps of the mean over their tokens. `trajectory`: mean over
    trajectories of the mean over their tokens. `group`: mean over groups of the mean over their trajectories.
    `fixed`: sum over tokens divided by a constant (Dr.GRPO).

    Args:
      aggregate: kind of mean.
      units: of all tokens.
      trained: tokens that take part.
      fixed_denominator: the constant of `fixed`.
      minibatch: index of each token's minibatch, each of which has a mean of its own; None for one.

    Returns:
      float32 weights, 0 where not trained.

    Raises:
      ValueError: unknown aggregate.
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"unknown aggregate {aggregate!r}; choose one of {', '.join(AGGREGATES)}")
    if minibatch is None:
        return _weights(aggregate, units, trained, fixed_denominator)
    weights = np.zeros(len(trained), np.float32)
    for i in np.unique(minibatch):
        weights += _weights(aggregate, units, trained & (minibatch == i), fixed_denominator)
    return weights


def _weights(aggregate: Aggregate, units: TokenUnits, trained: np.ndarray, fixed_denominator: float) -> np.ndarray:
    """Weights of one minibatch."""
    ones = trained.astype(np.float64)
    if not trained.any():
        return ones.astype(np.float32)
    if aggregate == "fixed":
        return (ones / fixed_denominator).astype(np.float32)
    if aggregate == "token":
        return (ones / ones.sum()).astype(np.float32)

    def unit_size(unit: np.ndarray) -> np.ndarray:
        return np.bincount(unit, weights=ones)[unit]

    def unit_count(unit: np.ndarray) -> int:
        return len(np.unique(unit[trained]))

    if aggregate in ("step", "trajectory"):
        unit = units.step if aggregate == "step" else units.trajectory
        weights = ones / np.maximum(unit_size(unit), 1) / unit_count(unit)
    else:
        first = np.unique(units.trajectory[trained], return_index=True)[1]
        trajectory_group = units.group[trained][first]
        members = np.bincount(trajectory_group, minlength=units.group.max() + 1)[units.group]
        share = np.maximum(unit_size(units.trajectory), 1) * np.maximum(members, 1)
        weights = ones / share / unit_count(units.group)
    return weights.astype(np.float32)
