"""What the decode loop knows of its slots, and how the host tells it of new responses in one array."""

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
class Slots:
    """What the decode loop knows of each slot. It stays on the device; the host sends the rows that it changes.

    Attributes:
      token: the id to feed next: the last of the prompt, or the last one sampled.
      position: where it goes in the cache.
      sampled: tokens of the open response so far; also the index that keys their random numbers.
      budget: tokens the response may still get.
      temperature, top_k, top_p: see `Sampling`.
      key: raw threefry key of the open response.
      active: False for slots that hold no open response.
      tail: the last ids of the open response, right-aligned, `NO_TOKEN` before its start.
      stops: id sequences that end the response, right-aligned, padded on the left with `NO_TOKEN`.
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


def idle_slots(config: EngineConfig) -> Slots:
    """Slots that hold no response, as numpy arrays."""
    n, c = config.slots, config
    return Slots(
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


def to_words(slots: Slots, told: np.ndarray) -> np.ndarray:
    """All fields side by side in 32-bit words, and a last one for whether the slot is told anything at all.

    One array, since each that travels to the device has a price of its own.

    Args:
      slots: numpy arrays.
      told: bool [slots].

    Returns:
      uint32 [slots, words].
    """
    fields = [*jax.tree.leaves(slots), told]
    words = [x.astype(np.uint32) if x.dtype == bool else x.view(np.uint32) for x in fields]
    return np.concatenate([x.reshape(len(told), -1) for x in words], axis=1)


def take_over(words: UInt32[Array, "slots words"], slots: Slots) -> Slots:
    """The slots, where those that `to_words` tells of are as it says."""
    fields, structure = jax.tree.flatten(slots)
    told, at, out = words[:, -1] != 0, 0, []
    for old in fields:
        size = math.prod(old.shape[1:])
        new = words[:, at : at + size].reshape(old.shape)
        new = new != 0 if old.dtype == bool else jax.lax.bitcast_convert_type(new, old.dtype)
        out.append(jnp.where(told.reshape(-1, *[1] * (old.ndim - 1)), new, old))
        at += size
    return jax.tree.unflatten(structure, out)
