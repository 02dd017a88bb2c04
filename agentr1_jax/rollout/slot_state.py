"""State of the decode slots on the device, and the single array by which the host updates it."""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from agentr1_jax.rollout.config import EngineConfig
from agentr1_jax.rollout.sampling import NO_TOKEN


@flax.struct.dataclass
class SlotState:
    """State of each decode slot. It stays on the device; the host sends only the rows that it changes.

    Attributes:
      token: id to feed next: the last of the prompt, or the last one sampled.
      position: position of that token in the KV slot.
      sampled: number of tokens of the response so far; also the index that keys their random numbers.
      budget: number of tokens that may still be sampled.
      temperature, top_k, top_p: see `SamplingConfig`.
      key: raw threefry key of the response.
      active: whether the slot is decoding a response.
      tail: last ids of the response, right-aligned, `NO_TOKEN` before its start.
      stops: stop sequences, right-aligned, padded on the left with `NO_TOKEN`.
    """

    token: Int[Any, "slots"]
    position: Int[Any, "slots"]
    sampled: Int[Any, "slots"]
    budget: Int[Any, "slots"]
    temperature: Float[Any, "slots"]
    top_k: Int[Any, "slots"]
    top_p: Float[Any, "slots"]
    key: UInt32[Any, "slots 2"]
    active: Bool[Any, "slots"]
    tail: Int[Any, "slots width"]
    stops: Int[Any, "slots stops width"]


def idle_slot_state(config: EngineConfig) -> SlotState:
    """State of slots that decode nothing, as numpy arrays."""
    n, c = config.slots, config
    return SlotState(
        token=np.zeros(n, np.int32),
        position=np.zeros(n, np.int32),
        sampled=np.zeros(n, np.int32),
        budget=np.zeros(n, np.int32),
        temperature=np.ones(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        key=np.zeros((n, 2), np.uint32),
        active=np.zeros(n, bool),
        tail=np.full((n, c.stop_width), NO_TOKEN, np.int32),
        stops=np.full((n, c.stop_sequences, c.stop_width), NO_TOKEN, np.int32),
    )


def encode_updates(state: SlotState, changed: np.ndarray) -> np.ndarray:
    """Lay all fields side by side as 32-bit words, followed by one word that says whether the slot changes.

    One array, because each array that is sent to the device has a fixed cost.

    Args:
      state: new state, as numpy arrays.
      changed: bool [slots], the slots that take the new state.

    Returns:
      uint32 [slots, words].
    """
    fields = [*jax.tree.leaves(state), changed]
    words = [x.astype(np.uint32) if x.dtype == bool else x.view(np.uint32) for x in fields]
    return np.concatenate([x.reshape(len(changed), -1) for x in words], axis=1)


def apply_updates(updates: UInt32[Array, "slots words"], state: SlotState) -> SlotState:
    """Return the state with the rows that `encode_updates` marks as changed replaced by those it encodes."""
    fields, structure = jax.tree.flatten(state)
    changed, at, out = updates[:, -1] != 0, 0, []
    for old in fields:
        size = math.prod(old.shape[1:])
        new = updates[:, at : at + size].reshape(old.shape)
        new = new != 0 if old.dtype == bool else jax.lax.bitcast_convert_type(new, old.dtype)
        out.append(jnp.where(changed.reshape(-1, *[1] * (old.ndim - 1)), new, old))
        at += size
    return jax.tree.unflatten(structure, out)
