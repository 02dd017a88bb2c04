"""What score and update consume: rows of nodes (tokens to compute) and reads (tokens to train), in microbatches."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int


@flax.struct.dataclass
class Nodes:
    """Tokens to run through the decoder, each once; written as numpy arrays, seen as JAX arrays by the programs.

    Node i of a row sees node j iff j ≤ i < subtree_end[j]: its ancestors in the tree of shared prefixes.
    """

    tokens: Int[Any, "*rows length"]
    position: Int[Any, "*rows length"]
    subtree_end: Int[Any, "*rows length"]


@flax.struct.dataclass
class Reads:
    """Tokens to train, each predicted at the node `src` of its own row. Padding has weight 0 and step -1.

    A read is trained where its weight is positive, be it an action or (in an ablation) of an observation.

    Attributes:
      src: node whose hidden state predicts the token.
      target: its id.
      step, trajectory, group: number of its unit; -1 for padding.
      is_action: True if the policy sampled it.
      old_logprob: log π_old, the centre of ratio and clip; of a read that is no action 0 until it is filled.
      advantage: A_k.
      weight: its share of the policy loss; all weights of a batch sum to 1 (aggregate `fixed` apart).
      old_value, value_target, value_weight: of the critic; None without one.
      ref_logprob: log-prob under the reference policy; None without a KL term in the loss.
      rollout_weight: constant factor of the policy loss that corrects for the gap between sampler and learner; None
        for 1.
      log_ratio: value of log ρ where it takes a pass over the whole minibatch (`trajectory`, `capo`); else None.
    """

    src: Int[Any, "*rows reads"]
    target: Int[Any, "*rows reads"]
    step: Int[Any, "*rows reads"]
    trajectory: Int[Any, "*rows reads"]
    group: Int[Any, "*rows reads"]
    is_action: Bool[Any, "*rows reads"]
    old_logprob: Float[Any, "*rows reads"]
    advantage: Float[Any, "*rows reads"]
    weight: Float[Any, "*rows reads"]
    old_value: Float[Any, "*rows reads"] | None = None
    value_target: Float[Any, "*rows reads"] | None = None
    value_weight: Float[Any, "*rows reads"] | None = None
    ref_logprob: Float[Any, "*rows reads"] | None = None
    rollout_weight: Float[Any, "*rows reads"] | None = None
    log_ratio: Float[Any, "*rows reads"] | None = None


OPTIONAL = tuple(f.name for f in dataclasses.fields(Reads) if f.default is None)
"""Fields of `Reads` that are absent where no term of the run needs them."""
CRITIC = ("old_value", "value_target", "value_weight")
"""Those of the critic."""


@flax.struct.dataclass
class Batch:
    """Leaves of shape [microbatches, rows, ...]."""

    nodes: Nodes
    reads: Reads


def empty_nodes(rows: int, length: int) -> Nodes:
    """Padding. A node of it sees itself alone, so that its softmax is defined."""
    alone = np.broadcast_to(np.arange(1, length + 1, dtype=np.int32), (rows, length)).copy()
    return Nodes(
        tokens=np.zeros((rows, length), np.int32),
        position=np.zeros((rows, length), np.int32),
        subtree_end=alone,
    )


def empty_reads(rows: int, reads: int, present: tuple[str, ...] = ()) -> Reads:
    """Padding, with the named ones of the `OPTIONAL` fields."""

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full((rows, reads), value, dtype)

    return Reads(
        src=full(0, np.int32),
        target=full(0, np.int32),
        step=full(-1, np.int32),
        trajectory=full(-1, np.int32),
        group=full(-1, np.int32),
        is_action=full(False, bool),
        old_logprob=full(0, np.float32),
        advantage=full(0, np.float32),
        weight=full(0, np.float32),
        **{name: full(0, np.float32) for name in present},
    )


def batch_shapes(
    *, microbatches: int, rows: int, row_tokens: int, row_reads: int, present: tuple[str, ...] = ()
) -> Batch:
    """The shape structs of a batch, as `to_microbatches` makes it, with the named `OPTIONAL` fields."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((microbatches, rows, *x.shape[1:]), x.dtype),
        Batch(empty_nodes(1, row_tokens), empty_reads(1, row_reads, present)),
    )


def to_microbatches(nodes: Nodes, reads: Reads, *, microbatches: int, rows: int) -> Batch:
    """Pads B rows with rows of zero weight to [microbatches, rows, ...].

    Raises:
      ValueError: B exceeds microbatches · rows.
    """
    have, capacity = nodes.tokens.shape[0], microbatches * rows
    if have > capacity:
        raise ValueError(
            f"{have} rows exceed the {microbatches} microbatches of {rows} rows of this run; "
            "an agent of its own that branches more than its context rule says needs a larger capacity"
        )
    present = tuple(name for name in OPTIONAL if getattr(reads, name) is not None)
    empty = Batch(
        empty_nodes(capacity - have, nodes.tokens.shape[1]),
        empty_reads(capacity - have, reads.src.shape[1], present),
    )
    return jax.tree.map(
        lambda x, pad: np.concatenate([x, pad]).reshape(microbatches, rows, *x.shape[1:]), Batch(nodes, reads), empty
    )
