"""Credit schemes on one batch: advantages and gradients at the same parameters, and both under resampled groups.

The gradient of a loss Σₖ wₖ·Aₖ·lₖ is linear in A, so one program serves all schemes, group by group. A resampled batch
needs no gradient of its own: resampling changes the advantages of a group by a scale and a shift at most (whitening),
so its gradient is a weighted sum of those of the groups, for A and for A = 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from agentr1_jax.credit import Scheme, TokenBatch
from agentr1_jax.credit.batch import FlatTrajectories, concatenate, to_token_batch
from agentr1_jax.learner.config import Aggregate
from agentr1_jax.learner.loss_weights import TokenUnits, loss_weights
from agentr1_jax.learner.update import batch_gradient
from agentr1_jax.policy.decoder import Params
from agentr1_jax.report import credit as stats
from agentr1_jax.runtime.monitoring import progress_bar
from agentr1_jax.train.build import Setup
from agentr1_jax.trajectory import Trajectory
from experiments.credit.recording import Part, microbatches, to_device

Schemes = Mapping[str, Scheme]
"""Schemes by label."""
Assign = Callable[[Sequence[Part]], np.ndarray]
"""Groups of a batch, perhaps some twice -> advantages [schemes, K]."""


@dataclasses.dataclass(frozen=True)
class Effects:
    """Advantages and gradients of all schemes on one batch; schemes are the first axis.

    Attributes:
      schemes: names of the schemes.
      trajectories: trajectories of the batch, in order of group.
      advantages: advantage of each token.
      steps: advantage of each step, the mean over its tokens.
      gram: inner products of the schemes' gradients.
      noise: signal and noise of each gradient under resampling of groups.
      batch_effect: standard deviation of a step's advantage when the other groups are resampled, over the root mean
        square of all advantages.
      misfit: largest share of a resampled batch's advantages that is neither a scale nor a shift of the original.
    """

    schemes: Sequence[str]
    trajectories: Sequence[Trajectory]
    advantages: Float[np.ndarray, "schemes tokens"]
    steps: Float[np.ndarray, "schemes steps"]
    gram: Float[np.ndarray, "schemes schemes"]
    noise: Sequence[stats.Noise]
    batch_effect: Float[np.ndarray, "schemes"]
    misfit: Float[np.ndarray, "schemes"]


def effects(
    setup: Setup,
    params: Params,
    parts: Sequence[Part],
    schemes: Schemes,
    *,
    aggregate: str,
    resamples: int,
    baselines: tuple[float, float] = (0.0, 0.0),
) -> Effects:
    """Assign credit to the batch by every scheme, and compare advantages and gradients.

    Args:
      setup: settings, policy, frozen parameters and learner mesh are used.
      params: trained parameters at which the gradients are taken.
      parts: the groups.
      schemes: label -> scheme.
      aggregate: aggregate of the loss over tokens.
      resamples: number of bootstrap samples of the groups.
      baselines: fallback baseline of a state for schemes [without, with] a critic.
    """
    streams = concatenate([part.streams for part in parts])
    assign = make_assign(schemes, parts, baselines=baselines)
    advantages = assign(parts)
    weights = token_weights(setup, streams, cast(Aggregate, aggregate))
    edges = token_edges(parts)
    factors, moved, misfit = resample(assign, parts, advantages, resamples)
    # Means are taken anew in a resampled batch: their denominators change with the groups drawn.
    share = np.array([weights[a:b].sum() for a, b in itertools.pairwise(edges)])
    denominators = factors[0, :, 2] @ share if aggregate != "fixed" else np.ones(resamples)
    factors = factors[:, :, :2] / denominators[:, None, None]

    vectors = group_gradients(setup, params, parts, weights)
    shift = vectors(np.ones_like(advantages[0]))
    totals, noise = [], []
    with progress_bar("gradients", 0, len(schemes), True) as show:
        for i, (name, of_scheme) in enumerate(zip(schemes, advantages, strict=True)):
            own = vectors(of_scheme)
            both = np.concatenate([own, shift])
            gram = (both @ both.T).astype(np.float64)
            whole = np.repeat([1.0, 0.0], len(parts))
            noise.append(stats.gradient_noise(gram, whole, factors[i].reshape(resamples, -1), len(parts)))
            totals.append(own.sum(0))
            show(i + 1, name)
    stacked = np.stack(totals)
    steps = stats.step_means(advantages, streams.step_tokens)
    size = np.sqrt((steps**2).mean(1))
    return Effects(
        schemes=list(schemes),
        trajectories=[t for part in parts for t in part.trajectories],
        advantages=advantages,
        steps=steps,
        gram=(stacked @ stacked.T).astype(np.float64),
        noise=noise,
        batch_effect=np.divide(moved, size, out=np.zeros_like(moved), where=size > 0),
        misfit=misfit,
    )


def token_weights(setup: Setup, streams: FlatTrajectories, aggregate: Aggregate) -> np.ndarray:
    """Loss weight of each token."""
    group = np.unique(streams.group, return_inverse=True)[1][streams.token_trajectory]
    trained = streams.trainable[streams.token_step]
    units = TokenUnits(streams.token_step, streams.token_trajectory, group)
    return loss_weights(aggregate, units, trained, fixed_denominator=setup.settings.loss.fixed_denominator)


def token_edges(parts: Sequence[Part]) -> np.ndarray:
    """Return the first token of each group, and the end of the last."""
    return np.cumsum([0, *(len(part.streams.logprobs) for part in parts)])


def make_assign(schemes: Schemes, parts: Sequence[Part], *, baselines: tuple[float, float]) -> Assign:
    """Make one program of all schemes, for all batches of as many groups.

    As in training, schemes that use a critic see its values where the run has one; for the others the future of a
    truncated trajectory is worth 0. A group that is drawn twice counts as two groups.
    """

    @jax.jit
    def together(plain: TokenBatch, valued: TokenBatch) -> jax.Array:
        credits = [scheme.assign(valued if scheme.uses_critic else plain) for scheme in schemes.values()]
        return jnp.stack([credit.advantages for credit in credits])

    of_parts = [part.streams for part in parts]
    room: dict[str, Any] = {
        "trajectories": len(parts) * max(len(s.returns) for s in of_parts),
        "steps": len(parts) * max(len(s.rewards) for s in of_parts),
        "tokens": len(parts) * max(len(s.logprobs) for s in of_parts),
    }

    def batch(groups: Sequence[FlatTrajectories], critic: bool) -> TokenBatch:
        apart = [dataclasses.replace(s, group=np.full_like(s.group, i)) for i, s in enumerate(groups)]
        return to_token_batch(concatenate(apart), critic=critic, baseline=baselines[critic], **room)

    def assign(parts: Sequence[Part]) -> np.ndarray:
        plain, valued = batch([p.streams for p in parts], False), [p.valued for p in parts if p.valued is not None]
        advantages = together(plain, batch(valued, True) if valued else plain)
        return np.asarray(advantages)[:, : sum(len(p.streams.logprobs) for p in parts)]

    return assign


def replay_error(scheme: Scheme, parts: Sequence[Part], *, baselines: tuple[float, float]) -> float | None:
    """Return the largest difference of a scheme's advantages from those that training recorded.

    It is a share of the largest recorded advantage; None where advantages are not recorded.
    """
    recorded = [step.advantages for part in parts for t in part.trajectories for step in t.steps]
    known = [x for x in recorded if x is not None]
    if len(known) < len(recorded):
        return None
    expected = np.concatenate(known)
    (assigned,) = make_assign({"own": scheme}, parts, baselines=baselines)(parts)
    largest = np.abs(expected).max()
    return float(np.abs(assigned - expected).max() / (largest or 1.0))


def resample(
    assign: Assign, parts: Sequence[Part], advantages: np.ndarray, resamples: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the groups anew with replacement, and assign credit by every scheme.

    Returns:
      [schemes, resamples, 3, groups]: factor of each group's gradient, of its gradient at A = 1, and how often it was
      drawn; [schemes] root mean square over steps of the standard deviation of a step's advantage; [schemes] largest
      misfit of scale and shift.
    """
    groups, rng = len(parts), np.random.default_rng(0)
    streams, edges = [part.streams for part in parts], token_edges(parts)
    steps = np.cumsum([0, *(len(s.rewards) for s in streams)])
    factors, misfit = np.zeros((len(advantages), resamples, 3, groups)), np.zeros(len(advantages))
    seen = np.zeros(steps[-1])
    total, square = np.zeros((2, len(advantages), steps[-1]))
    for r in range(resamples):
        drawn = np.sort(rng.integers(groups, size=groups))
        after = assign([parts[g] for g in drawn])
        before = np.concatenate([advantages[:, edges[g] : edges[g + 1]] for g in drawn], axis=1)
        count = np.bincount(drawn, minlength=groups)
        for i in range(len(advantages)):
            scale, shift, rest = stats.affine(before[i], after[i])
            factors[i, r] = scale * count, shift * count, count
            misfit[i] = max(misfit[i], rest)
        moves = stats.step_means(after - before, np.concatenate([streams[g].step_tokens for g in drawn]))
        # Copies of a group have equal advantages: the first will do.
        place, first = np.unique(np.concatenate([np.arange(steps[g], steps[g + 1]) for g in drawn]), return_index=True)
        seen[place] += 1
        total[:, place] += moves[:, first]
        square[:, place] += moves[:, first] ** 2
    seen = np.maximum(seen, 1)
    variance = np.maximum(square / seen - (total / seen) ** 2, 0)
    return factors, np.sqrt(variance.mean(1)), misfit


def group_gradients(
    setup: Setup, params: Params, parts: Sequence[Part], weights: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """Advantages [K] -> gradient of each group's part of the loss −Σ w·A·log π, float32 [groups, parameters].

    Only what is trained of the decoder counts; a group without any advantage has the gradient 0 and costs nothing.
    """
    objective = setup.settings.objective.imitation()
    loss = dataclasses.replace(objective.loss, ratio="token", entropy_coef=0.0)
    objective = dataclasses.replace(objective, loss=loss)
    gradient = jax.jit(batch_gradient(setup.policy, objective, setup.learner_mesh))
    policy = {"decoder": params["decoder"]}
    size = sum(x.size for x in jax.tree.leaves(policy))
    capacity = microbatches(setup, [part.packing for part in parts])

    def of_group(part: Part, advantages: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if not (advantages * weights).any():
            return np.zeros(size, np.float32)
        batch, count = to_device(setup, part.packing, capacity, {"advantage": advantages, "weight": weights})
        grads, _ = gradient(policy, setup.frozen, batch, count)
        return np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(jax.device_get(grads))])

    def vectors(advantages: np.ndarray) -> np.ndarray:
        pieces = zip(parts, itertools.pairwise(token_edges(parts)), strict=True)
        return np.stack([of_group(part, advantages[a:b], weights[a:b]) for part, (a, b) in pieces])

    return vectors
