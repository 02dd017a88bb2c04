"""KL to the reference policy: estimates from sampled tokens, as a loss or as a reward, and the adaptive coefficient."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
from jaxtyping import Float

from agentr1_jax.learner.config import KLEstimate

KL_ESTIMATES: tuple[KLEstimate, ...] = get_args(KLEstimate)


def kl_estimate(
    kind: KLEstimate, logprob: Float[Any, "*shape"], ref_logprob: Float[Any, "*shape"]
) -> Float[Any, "*shape"]:
    """Estimate KL(π‖π_ref) from each sampled token; x = log π − log π_ref (http://joschu.net/blog/kl-approx.html).

    `k1` = x; `k2` = x²/2; `k3` = e⁻ˣ + x − 1. On samples of π: as a loss, k2 has the gradient of the KL in
    expectation and k1 none; as a reward, k1 has it.

    Args:
      kind: the estimate.
      logprob, ref_logprob: both numpy or both JAX arrays, and so is the result.

    Raises:
      ValueError: unknown kind.
    """
    x = logprob - ref_logprob
    if kind == "k1":
        return x
    if kind == "k2":
        return x**2 / 2
    if kind == "k3":
        # Nearly all tokens have a small x, where e⁻ˣ − 1 would lose its digits.
        return x.__array_namespace__().expm1(-x) + x
    raise ValueError(f"unknown KL estimate {kind!r}; choose one of {', '.join(KL_ESTIMATES)}")


def kl_rewards(
    kind: KLEstimate, old_logprob: Float[np.ndarray, "tokens"], ref_logprob: Float[np.ndarray, "tokens"], coef: float
) -> Float[np.ndarray, "tokens"]:
    """Return the reward −coef·KL of each token, float32, where the KL is in the reward and not in the loss.

    Raises:
      ValueError: unknown kind.
    """
    kl = kl_estimate(kind, old_logprob.astype(np.float64), ref_logprob.astype(np.float64))
    return (-coef * kl).astype(np.float32)


def next_kl_coef(coef: float, kl: float, trajectories: int, *, target: float, horizon: float) -> float:
    """Return the next coefficient of the KL reward: coef·(1 + clip(kl/target − 1, ±0.2)·trajectories/horizon).

    From Ziegler et al. 2019 (arXiv 1909.08593). A KL that is not a number leaves the coefficient as it is.

    Args:
      coef: the present coefficient.
      kl: mean KL of the batch that it was used for, nats.
      trajectories: of that batch.
      target: KL aimed at, nats.
      horizon: trajectories in which the coefficient changes by at most 20 %.

    Raises:
      ValueError: a target or horizon that is not positive, or a horizon so short that the coefficient may reach 0.
    """
    if not target > 0:
        raise ValueError(f"the target of the adaptive KL is {target}; it must be above 0")
    if not horizon > trajectories / 5:
        raise ValueError(
            f"the horizon of the adaptive KL is {horizon}, with {trajectories} trajectories a batch; "
            "it must be above a fifth of them, or the coefficient falls to 0"
        )
    if math.isnan(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * trajectories / horizon)
