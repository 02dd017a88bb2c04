"""Rows that the learner's programs consume: packed tokens (computed) and loss tokens (trained), in microbatches."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int


@flax.struct.dataclass
class PackedTokens:
    """Tokens to run through the decoder, each once. Numpy arrays on the host, JAX arrays in the programs.

    Token i of a row sees token j iff j ≤ i < subtree_end[j]: its ancestors in the tree of shared prefixes.

    Attributes:
      tokens: ids.
      position: rotary position, the token's place in its own sequence.
      subtree_end: end of the tokens that see this one.
    """

    tokens: Int[Any, "*rows length"]
    position: Int[Any, "*rows length"]
    subtree_end: Int[Any, "*rows length"]


@flax.struct.dataclass
class LossTokens:
    """Tokens of the loss, each predicted at position `logit_index` of its own row. Padding has weight 0 and step -1.

    A token is trained where its weight is positive, be it an action or (in an ablation) of an observation.

    Attributes:
      logit_index: position in the row whose hidden state predicts the token.
      target: the token's id.
      step, trajectory, group: index of the token's unit; -1 for padding.
      is_action: True if the policy sampled it.
      old_logprob: log π_old, the centre of ratio and clip; 0 for an observation token until it is set.
      advantage: A_k.
      weight: share of the policy loss; all weights of a minibatch sum to 1 (except with aggregate `fixed`).
      old_value, value_target, value_weight: of the critic; None without one.
      ref_logprob: log-prob under the reference policy; None without a KL term in the loss.
      correction_weight: constant factor of the policy loss that corrects for the gap between sampler and learner; None
        for 1.
      log_ratio: value of log ρ where it takes a pass over the whole minibatch (`MINIBATCH_RATIOS`); else None.
    """

    logit_index: Int[Any, "*rows tokens"]
    target: Int[Any, "*rows tokens"]
    step: Int[Any, "*rows tokens"]
    trajectory: Int[Any, "*rows tokens"]
    group: Int[Any, "*rows tokens"]
    is_action: Bool[Any, "*rows tokens"]
    old_logprob: Float[Any, "*rows tokens"]
    advantage: Float[Any, "*rows tokens"]
    weight: Float[Any, "*rows tokens"]
    old_value: Float[Any, "*rows tokens"] | None = None
    value_target: Float[Any, "*rows tokens"] | None = None
    value_weight: Float[Any, "*rows tokens"] | None = None
    ref_logprob: Float[Any, "*rows tokens"] | None = None
    correction_weight: Float[Any, "*rows tokens"] | None = None
    log_ratio: Float[Any, "*rows tokens"] | None = None


OPTIONAL_FIELDS = tuple(f.name for f in dataclasses.fields(LossTokens) if f.default is None)
"""Fields of `LossTokens` that are absent where no term of the run needs them."""
CRITIC_FIELDS = ("old_value", "value_target", "value_weight")


@flax.struct.dataclass
class Batch:
    """Leaves of shape [microbatches, rows, ...]."""

    packed_tokens: PackedTokens
    loss_tokens: LossTokens


def empty_packed_tokens(rows: int, length: int) -> PackedTokens:
    """Rows of padding. A padding token sees itself alone, so that its softmax is defined."""
    zeros = np.zeros((rows, length), np.int32)
    return PackedTokens(
        tokens=zeros, position=zeros.copy(), subtree_end=zeros + np.arange(1, length + 1, dtype=np.int32)
    )


def empty_loss_tokens(rows: int, count: int, present: tuple[str, ...] = ()) -> LossTokens:
    """Rows of padding with `count` loss tokens each, and the `OPTIONAL_FIELDS` that are `present`."""

    def full(value: int, dtype: type = np.float32) -> np.ndarray:
        return np.full((rows, count), value, dtype)

    integers = {"logit_index": 0, "target": 0, "step": -1, "trajectory": -1, "group": -1}
    return LossTokens(
        **{name: full(value, np.int32) for name, value in integers.items()},
        is_action=full(0, bool),
        **{name: full(0) for name in ("old_logprob", "advantage", "weight", *present)},
    )


def batch_shapes(
    *, microbatches: int, rows: int, row_tokens: int, row_loss_tokens: int, present: tuple[str, ...] = ()
) -> Batch:
    """Shape structs of a batch as `to_microbatches` makes it, with the named `OPTIONAL_FIELDS`."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((microbatches, rows, *x.shape[1:]), x.dtype),
        Batch(empty_packed_tokens(1, row_tokens), empty_loss_tokens(1, row_loss_tokens, present)),
    )


def to_microbatches(packed_tokens: PackedTokens, loss_tokens: LossTokens, *, microbatches: int, rows: int) -> Batch:
    """Pad B rows with rows of zero weight and split them into [microbatches, rows, ...].

    Raises:
      ValueError: B exceeds microbatches · rows.
    """
    have, capacity = packed_tokens.tokens.shape[0], microbatches * rows
    if have > capacity:
        raise ValueError(
            f"{have} rows exceed the {microbatches} microbatches of {rows} rows of this run; "
            "an agent of its own that branches more than its context rule says needs a larger capacity"
        )
    present = tuple(name for name in OPTIONAL_FIELDS if getattr(loss_tokens, name) is not None)
    padding = Batch(
        empty_packed_tokens(capacity - have, packed_tokens.tokens.shape[1]),
        empty_loss_tokens(capacity - have, loss_tokens.logit_index.shape[1], present),
    )
    return jax.tree.map(
        lambda x, pad: np.concatenate([x, pad]).reshape(microbatches, rows, *x.shape[1:]),
        Batch(packed_tokens, loss_tokens),
        padding,
    )


def with_process_indices(loss_tokens: LossTokens, index: int, count: int) -> LossTokens:
    """Renumber the steps and trajectories of process `index` of `count`, so that they differ from all others."""

    def spread(unit: np.ndarray) -> np.ndarray:
        return np.where(unit < 0, unit, unit * count + index).astype(np.int32)

    return dataclasses.replace(loss_tokens, step=spread(loss_tokens.step), trajectory=spread(loss_tokens.trajectory))
