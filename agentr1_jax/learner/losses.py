"""Policy and value losses on reads: ratio × clip, both chosen by name. The aggregate is in the weights (`fill.py`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentr1_jax.learner.packing import Reads

RATIOS = ("token", "step")
CLIPS = ("ppo", "asymmetric", "dual", "cispo", "none")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The choices of the loss.

    Attributes:
      ratio: `token`: ρ_k = π/π_old; `step`: its geometric mean over a step (GSPO on a step).
      clip: `ppo`, `asymmetric` (DAPO), `dual`, `cispo`, or `none` (−A·log π, no ratio).
      clip_low, clip_high: ρ is clipped to [1 − low, 1 + high].
      dual_c: bound of `dual` for negative advantages.
      value_coef: weight of the value loss.
      value_clip: the new value moves at most this far from the old one before its loss stops to fall.
      entropy_coef: weight of the entropy bonus.
      temperature: of sampling.
      chunk: reads per chunk of logits.
    """

    ratio: str
    clip: str
    clip_low: float
    clip_high: float
    dual_c: float
    value_coef: float
    value_clip: float
    entropy_coef: float
    temperature: float
    chunk: int

    def __post_init__(self) -> None:
        for name, choices in (("ratio", RATIOS), ("clip", CLIPS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown loss.{name} {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        if self.temperature <= 0:
            raise ValueError(f"rollout.temperature is {self.temperature}; training needs a positive temperature")


def log_ratio(kind: str, logprob: Float[Array, "rows reads"], reads: Reads) -> Float[Array, "rows reads"]:
    """log ρ of each read.

    `token`: log π − log π_old.
    `step`: log s = sg[mean over the step's tokens of log π − log π_old] + log π − sg[log π], clamped to ≤ 10, so
    that the value is the step's and the gradient flows through each token (GSPO, arXiv 2507.18071).
    """
    difference = jnp.where(reads.is_action, logprob - reads.old_logprob, 0)
    if kind == "token":
        return difference
    mean = jax.lax.stop_gradient(_mean_over_steps(difference, reads.is_action, reads.step))
    through = logprob - jax.lax.stop_gradient(logprob)
    return jnp.where(reads.is_action, jnp.minimum(mean + through, 10.0), 0)


def _mean_over_steps(
    x: Float[Array, "rows reads"], mask: Array, step: Int[Array, "rows reads"]
) -> Float[Array, "rows reads"]:
    """Mean of x over the masked reads of each step; a step is never split over rows."""
    changes = jnp.pad(step[:, 1:] != step[:, :-1], ((0, 0), (1, 0)))
    local = jnp.cumsum(changes, axis=1)

    def one_row(x: Array, mask: Array, local: Array) -> Array:
        n = x.shape[0]
        total = jax.ops.segment_sum(jnp.where(mask, x, 0), local, n)
        count = jax.ops.segment_sum(mask.astype(x.dtype), local, n)
        return (total / jnp.maximum(count, 1))[local]

    return jax.vmap(one_row)(x, mask, local)


def policy_loss(
    config: LossConfig, logprob: Float[Array, "rows reads"], reads: Reads
) -> tuple[Float[Array, "rows reads"], Float[Array, "rows reads"], Float[Array, "rows reads"]]:
    """The loss of each read, before weighting.

    `ppo`/`asymmetric`: max(−Aρ, −A·clip(ρ)); `dual`: as `asymmetric`, and for A < 0 at most −A·c;
    `cispo`: −sg(clip ρ)·A·log π; `none`: −A·log π.

    Returns:
      loss, log ρ, and whether the clip was active (0 or 1).
    """
    advantage = reads.advantage
    if config.clip == "none":
        return -advantage * logprob, jnp.zeros_like(logprob), jnp.zeros_like(logprob)
    log_rho = log_ratio(config.ratio, logprob, reads)
    rho = jnp.exp(log_rho)
    clipped = jnp.clip(rho, 1 - config.clip_low, 1 + config.clip_high)
    active = (-advantage * clipped > -advantage * rho).astype(logprob.dtype)
    if config.clip == "cispo":
        return -jax.lax.stop_gradient(clipped) * advantage * logprob, log_rho, active
    loss = jnp.maximum(-advantage * rho, -advantage * clipped)
    if config.clip == "dual":
        loss = jnp.where(advantage < 0, jnp.minimum(loss, -advantage * config.dual_c), loss)
    return loss, log_rho, active


def value_loss(config: LossConfig, value: Float[Array, "rows reads"], reads: Reads) -> Float[Array, "rows reads"]:
    """½·max((V − R)², (clip(V, V_old ± c) − R)²) of each read, before weighting."""
    old, target = reads.old_value, reads.value_target
    assert old is not None and target is not None, "these reads were not filled for a critic"
    near = jnp.clip(value, old - config.value_clip, old + config.value_clip)
    return 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2)
