"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864) and their scaling."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from agentr1_jax.policy.config import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Return the angle per position of each pair of dimensions, float64 [head_dim / 2]: θ^(−2i/d), then scaled.

    `llama3` leaves waves shorter than original/high_frequency positions as they are, stretches those longer than
    original/low_frequency by `factor`, and interpolates linearly (in the number of waves that fit) between the two.
    """
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain
    stretched = plain / scaling.factor
    if scaling.kind == "linear":
        return stretched
    waves = scaling.original_positions * plain / (2 * np.pi)
    share = np.clip((waves - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0, 1)
    return share * plain + (1 - share) * stretched


def rotate(
    x: Float[Array, "rows length heads dim"], position: Int[Array, "rows length"], frequency: np.ndarray
) -> Float[Array, "rows length heads dim"]:
    """Rotate dimensions (i, i + dim/2) by position · frequency[i]: the half-split layout of Hugging Face weights."""
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angle = position[..., None, None].astype(wide) * jnp.asarray(frequency, wide)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
