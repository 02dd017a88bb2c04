"""Weights of loss tokens, made on the host: shares of a mean, and corrections for the gap between sampler and learner.

Every denominator of the loss is data: each token carries its share of the mean it belongs to, computed over the whole
batch of all processes. A loss is then a plain sum, and neither microbatches, nor shards, nor padding can change it.

The sampler and the learner give one token two probabilities. π_b is the behaviour policy, the distribution that the
sampler really sampled from; π_old is the learner's own evaluation of the same weights. Arrays [K] hold the sampled
tokens in (trajectory, step, token) order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from agentr1_jax.learner.config import Aggregate, CorrectionConfig

MAX_LOG_RATIO = 20.0


class TokenUnits(NamedTuple):
    """Index of each token's units over all processes, from 0."""

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
    """Return the weight of each token in the loss Σₖ wₖ·lₖ, float32; 0 where not trained.

    `token`: mean over trained tokens. `step`: mean over steps of the mean over their tokens. `trajectory`: mean over
    trajectories of the mean over their tokens. `group`: mean over groups of the mean over their trajectories.
    `fixed`: sum over tokens divided by a constant (Dr.GRPO).

    Args:
      aggregate: kind of mean.
      units: of all tokens.
      trained: tokens that take part.
      fixed_denominator: the constant of `fixed`.
      minibatch: index of each token's minibatch, each of which has a mean of its own; None for one.
    """
    weights = np.zeros(len(trained), np.float32)
    for i in (None,) if minibatch is None else np.unique(minibatch):
        own = trained if i is None else trained & (minibatch == i)
        if own.any():
            weights += _shares(aggregate, units, own, fixed_denominator).astype(np.float32)
    return weights


def _shares(aggregate: Aggregate, units: TokenUnits, trained: np.ndarray, fixed_denominator: float) -> np.ndarray:
    """Weights of one minibatch, in which something is trained."""
    ones = trained.astype(np.float64)

    def size(unit: np.ndarray) -> np.ndarray:
        return np.maximum(np.bincount(unit, weights=ones), 1)[unit]

    def count(unit: np.ndarray) -> int:
        return len(np.unique(unit[trained]))

    if aggregate == "fixed":
        return ones / fixed_denominator
    if aggregate == "token":
        return ones / ones.sum()
    if aggregate == "step":
        return ones / size(units.step) / count(units.step)
    if aggregate == "trajectory":
        return ones / size(units.trajectory) / count(units.trajectory)
    first = np.unique(units.trajectory[trained], return_index=True)[1]
    trajectories = np.bincount(units.group[trained][first], minlength=units.group.max() + 1)
    return ones / (size(units.trajectory) * np.maximum(trajectories, 1)[units.group]) / count(units.group)


def correction_weights(
    config: CorrectionConfig,
    old_logprob: Float[np.ndarray, "tokens"],
    behaviour_logprob: Float[np.ndarray, "tokens"],
    sequence: Int[np.ndarray, "tokens"],
) -> Float[np.ndarray, "tokens"]:
    """Return the constant factor of each token's policy loss, from w = exp(clip(log π_old − log π_b, ±20)).

    `none`: 1. `tis_token`: min(w, cap). `tis_sequence`: the same of the whole sequence, its log-ratios summed and then
    clipped. `icepop`: w where low ≤ w ≤ high, else 0 (arXiv 2510.18855). `icepop_sequence`: the same of the w of
    `tis_sequence`. `mask_sequence`: 1, or 0 for all tokens of a sequence whose GEOMETRIC MEAN ratio, exp of the mean of
    its log-ratios, lies outside [low, high].

    `sequence` is the index of each token's step or trajectory, as `config.unit` says. A log-prob that is not finite
    gives its token (its whole sequence, where that is the unit) weight 0, unless the kind is `none`. Weights are
    float32.
    """
    kind, low, high = config.kind, config.low, config.high
    if kind == "none":
        return np.ones(len(sequence), np.float32)
    log_ratio, finite = _log_ratio(old_logprob, behaviour_logprob)
    if kind in ("tis_sequence", "icepop_sequence", "mask_sequence"):
        unit = np.unique(sequence, return_inverse=True)[1]
        log_ratio = np.bincount(unit, log_ratio)[unit]
        finite = (np.bincount(unit, ~finite) == 0)[unit]
        if kind == "mask_sequence":
            log_ratio = log_ratio / np.bincount(unit)[unit]
    w = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    inside = (low <= w) & (w <= high)
    if kind == "mask_sequence":
        w = inside
    else:
        w = w * inside if kind.startswith("icepop") else np.minimum(w, config.cap)
    return np.where(finite, w, 0).astype(np.float32)


def gap_metrics(
    learner_logprob: Float[np.ndarray, "tokens"],
    behaviour_logprob: Float[np.ndarray, "tokens"],
    sequence: Int[np.ndarray, "tokens"],
) -> dict[str, float]:
    """Return measures of the gap between sampler and learner, by name.

    With d = log π − log π_b of a token (nats) and, for a sequence, its sum D and the log-perplexities ℓ = −mean log π
    and ℓ_b = −mean log π_b, each kept within ±20 in an exponent:
      mean, max: |d|.
      k1, k3: estimates of KL(π_b‖π), the means of −d and of eᵈ − d − 1.
      chi2_token, chi2_sequence: estimates of χ², the means of e²ᵈ − 1 over tokens and e²ᴰ − 1 over sequences.
      learner_log_perplexity, sampler_log_perplexity: means of ℓ and ℓ_b over sequences.
      learner_perplexity, sampler_perplexity, perplexity_ratio: means of e^ℓ, e^ℓ_b and their quotient e^(ℓ − ℓ_b).
      log_perplexity_difference, and its _abs, _max, _min: of ℓ − ℓ_b.
      nonfinite: number of tokens with a log-prob that is not finite; all other measures leave them out, and there are
        none where no token is finite.
    """
    d, finite = _log_ratio(learner_logprob, behaviour_logprob)
    nonfinite = {"nonfinite": float(np.sum(~finite))}
    if not finite.any():
        return nonfinite
    d, unit = d[finite], np.unique(sequence[finite], return_inverse=True)[1]
    length = np.bincount(unit)
    near = np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    near_sequence = np.clip(np.bincount(unit, d), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    learner, sampler = (-np.bincount(unit, x[finite]) / length for x in (learner_logprob, behaviour_logprob))
    difference = learner - sampler
    values = {
        "mean": np.mean(np.abs(d)),
        "max": np.max(np.abs(d)),
        "k1": -np.mean(d),
        "k3": np.mean(np.expm1(near) - near),
        "chi2_token": np.mean(np.expm1(2 * near)),
        "chi2_sequence": np.mean(np.expm1(2 * near_sequence)),
        "learner_log_perplexity": np.mean(learner),
        "sampler_log_perplexity": np.mean(sampler),
        "learner_perplexity": np.mean(_exp(learner)),
        "sampler_perplexity": np.mean(_exp(sampler)),
        "perplexity_ratio": np.mean(_exp(difference)),
        "log_perplexity_difference": np.mean(difference),
        "log_perplexity_difference_abs": np.mean(np.abs(difference)),
        "log_perplexity_difference_max": np.max(difference),
        "log_perplexity_difference_min": np.min(difference),
    }
    return {name: float(x) for name, x in values.items()} | nonfinite


def _log_ratio(above: np.ndarray, below: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Difference of two log-probs in float64, 0 where one is not finite; and where both are finite."""
    finite = np.isfinite(above) & np.isfinite(below)
    above, below = (np.where(finite, x, 0).astype(np.float64) for x in (above, below))
    return above - below, finite


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))
