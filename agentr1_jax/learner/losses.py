"""Policy and value losses on reads: ratio × clip, both chosen by name. The aggregate is in the weights (`fill.py`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentr1_jax.learner.batch import Reads
from agentr1_jax.learner.kl import KL_ESTIMATES
from agentr1_jax.learner.ratios import RATIOS, log_ratio

CLIPS = ("ppo", "asymmetric", "dual", "cispo", "sapo", "none")
KLS = ("none", *KL_ESTIMATES)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The choices of the loss.

    Attributes:
      ratio: `token`: ρ_k = π/π_old; `step`: its geometric mean over a step (GSPO on a step); `trajectory`: that over a
        trajectory; `capo`: a step's, centred over the minibatch.
      clip: `ppo`, `asymmetric` (DAPO), `dual`, `cispo`, `sapo` (a sigmoid), or `none` (−A·log π, no ratio).
      clip_low, clip_high: ρ is clipped to [1 − low, 1 + high].
      dual_c: bound of `dual` for negative advantages.
      value_coef: weight of the value loss.
      value_clip: the new value moves at most this far from the old one before its loss stops to fall.
      entropy_coef: weight of the entropy bonus.
      temperature: of sampling.
      chunk: reads per chunk of logits.
      kl: estimate of the KL to the reference policy in the loss: `none`, `k1`, `k2` or `k3`.
      kl_coef: its weight.
      sapo_positive, sapo_negative: τ of `sapo` for positive and for other advantages.

    Raises:
      ValueError: an unknown name, or a number out of its range.
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
    kl: str = "none"
    kl_coef: float = 0.001
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05

    def __post_init__(self) -> None:
        for name, choices in (("ratio", RATIOS), ("clip", CLIPS), ("kl", KLS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown loss.{name} {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for name, valid, wanted in (
            ("clip_low", 0 <= self.clip_low < 1, "at least 0 and below 1"),
            ("clip_high", self.clip_high >= 0, "at least 0"),
            ("dual_c", self.dual_c > 1, "above 1"),
            ("value_coef", self.value_coef >= 0, "at least 0"),
            ("value_clip", self.value_clip > 0, "above 0"),
            ("entropy_coef", self.entropy_coef >= 0, "at least 0"),
            ("kl_coef", self.kl_coef >= 0, "at least 0"),
            ("sapo_positive", self.sapo_positive > 0, "above 0"),
            ("sapo_negative", self.sapo_negative > 0, "above 0"),
            ("chunk", self.chunk >= 1, "at least 1"),
        ):
            if not valid:
                raise ValueError(f"loss.{name} is {getattr(self, name)}; it must be {wanted}")
        if not self.temperature > 0:
            raise ValueError(f"rollout.temperature is {self.temperature}; training needs a positive temperature")


def policy_loss(
    config: LossConfig, logprob: Float[Array, "rows reads"], reads: Reads
) -> tuple[Float[Array, "rows reads"], Float[Array, "rows reads"], Float[Array, "rows reads"]]:
    """The loss of each read, before weighting.

    `ppo`/`asymmetric`: max(−Aρ, −A·clip(ρ)); `dual`: as `asymmetric`, and for A < 0 at most −A·c;
    `cispo`: −sg(clip ρ)·A·log π; `sapo`: −(4/τ)·σ(τ(ρ − 1))·A, τ by the sign of A (arXiv 2511.20347); `none`: −A·log π.

    Returns:
      loss, log ρ, and whether the clip was active (0 or 1; `sapo` has none).

    Raises:
      ValueError: reads without the `log_ratio` that the ratio needs; when traced.
    """
    advantage = reads.advantage
    if config.clip == "none":
        return -advantage * logprob, jnp.zeros_like(logprob), jnp.zeros_like(logprob)
    log_rho = log_ratio(config.ratio, logprob, reads)
    if config.clip == "sapo":
        # Far below this bound the gate has reached 1; an infinite ρ would make its gradient NaN.
        rho = jnp.exp(jnp.minimum(log_rho, 20.0))
        tau = jnp.where(advantage > 0, config.sapo_positive, config.sapo_negative).astype(rho.dtype)
        return -4 / tau * jax.nn.sigmoid(tau * (rho - 1)) * advantage, log_rho, jnp.zeros_like(logprob)
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
