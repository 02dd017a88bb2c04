"""Monte Carlo policy gradients on small decision processes, by the library's own credit and loss, and their errors."""

from __future__ import annotations

import dataclasses
import functools
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float, Int

from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import Aggregate, LossConfig, Objective
from agentr1_jax.learner.loss_weights import TokenUnits, loss_weights
from agentr1_jax.learner.ratios import MINIBATCH_RATIOS, minibatch_log_ratio
from agentr1_jax.learner.update import TokenOutputs, loss_from_outputs
from experiments.credit.processes import Paths, exact_values, greedy_probabilities, log_policy, probabilities

Z = 1.96
"""Half a 95 % interval, in standard errors."""
LEVEL = 1e-4
"""An estimator is called biased where chance alone would show as much this rarely."""
ROUGH = 0.5
"""Share of the exact value of a state that stands for what earlier batches may have told of it."""


@flax.struct.dataclass
class Drawn:
    """Sampled trajectories of batches; leading axes are batches.

    Attributes:
      action: place of each token in the flat logits; -1 beyond a response.
      state: of each step; -1 beyond the end.
      reward: of each step.
      value: V of the sampling policy before each token.
      state_value: a rough value of each step's state.
      old_logprob: of the sampling policy.
      group: of each trajectory.
      greedy_return: return of a greedy rollout of the same row.
    """

    action: Int[Array, "*batches trajectories steps tokens"]
    state: Int[Array, "*batches trajectories steps"]
    reward: Float[Array, "*batches trajectories steps"]
    value: Float[Array, "*batches trajectories steps tokens"]
    state_value: Float[Array, "*batches trajectories steps"]
    old_logprob: Float[Array, "*batches trajectories steps tokens"]
    group: Int[Array, "*batches trajectories"]
    greedy_return: Float[Array, "*batches trajectories"]


def draw(
    paths: Paths, logits: Float[np.ndarray, "nodes vocabulary"], seed: int, *, batches: int, groups: int, samples: int
) -> Drawn:
    """Independent batches from the policy of these logits; each group has a row of its own, drawn evenly."""
    rng = np.random.default_rng(seed)
    row = rng.integers(paths.rows, size=(batches, groups, 1))

    def pick(probability: np.ndarray, count: int) -> np.ndarray:
        # Paths of a row lie together, so the cumulative probability of row r runs from r to r + 1.
        cumulative = np.cumsum(probability)
        at = np.searchsorted(cumulative, row + rng.random((batches, groups, count)), side="right")
        return np.minimum(at, len(cumulative) - 1).reshape(batches, -1)

    path = pick(probabilities(paths, log_policy(logits)), samples)
    greedy = pick(greedy_probabilities(paths, logits), 1)
    return gather(paths, logits, path, np.repeat(paths.outcome[greedy], samples, axis=1), samples)


def gather(
    paths: Paths,
    logits: Float[np.ndarray, "nodes vocabulary"],
    path: Int[np.ndarray, "batches trajectories"],
    greedy_return: Float[np.ndarray, "batches trajectories"],
    samples: int,
) -> Drawn:
    """The batches of chosen paths; so many in a row are a group."""
    value, state_value = exact_values(paths, logits)
    old = np.where(paths.action >= 0, log_policy(logits)[paths.action], 0)
    rough = np.where(paths.state >= 0, ROUGH * state_value[paths.state], 0)
    return Drawn(
        action=jnp.asarray(paths.action[path], jnp.int32),
        state=jnp.asarray(paths.state[path], jnp.int32),
        reward=jnp.asarray(paths.reward[path], jnp.float32),
        value=jnp.asarray(value[path], jnp.float32),
        state_value=jnp.asarray(rough[path], jnp.float32),
        old_logprob=jnp.asarray(old[path], jnp.float32),
        group=jnp.asarray(np.broadcast_to(np.arange(path.shape[1]) // samples, path.shape), jnp.int32),
        greedy_return=jnp.asarray(greedy_return, jnp.float32),
    )


@jax.jit
@jax.vmap
def lay_out(drawn: Drawn) -> tuple[dict[str, Array], LossTokens]:
    """Fields of the `TokenBatch`, what is real first, and loss tokens without advantage and weight.

    A loss token's target is its index in the flat logits.
    """
    trajectories, capacity = drawn.state.shape[0], drawn.state.size
    real, sampled = drawn.state >= 0, drawn.action >= 0
    steps, tokens = (jnp.argsort(~x.ravel(), stable=True) for x in (real, sampled))
    trajectory = jnp.broadcast_to(jnp.arange(trajectories)[:, None], real.shape)
    step_trajectory = jnp.where(real, trajectory, trajectories).ravel()[steps]
    number = (jnp.cumsum(real.ravel()) - 1).reshape(real.shape)
    token_step = jnp.where(sampled, number[..., None], capacity).ravel()[tokens]
    is_action = sampled.ravel()[tokens]
    action, old, value = (x.ravel()[tokens] for x in (drawn.action, drawn.old_logprob, drawn.value))
    fields = {
        "rewards": jnp.where(real, drawn.reward, 0).ravel()[steps],
        "token_rewards": jnp.zeros(tokens.shape),
        "returns": drawn.reward.sum(axis=1),
        "state_key": drawn.state.ravel()[steps],
        "values": value,
        "is_action": is_action,
        "token_step": token_step,
        "step_trajectory": step_trajectory,
        "group": drawn.group,
        "bootstrap": jnp.zeros(trajectories),
        "state_value": drawn.state_value.ravel()[steps],
        "greedy_return": drawn.greedy_return,
    }
    of_step = jnp.append(step_trajectory, trajectories)
    of_token = jnp.where(is_action, of_step[token_step], 0)
    loss_tokens = LossTokens(
        logit_index=jnp.zeros_like(action),
        target=jnp.where(is_action, action, 0),
        step=jnp.where(is_action, token_step, -1),
        trajectory=jnp.where(is_action, of_token, -1),
        group=jnp.where(is_action, drawn.group[of_token], -1),
        is_action=is_action,
        old_logprob=old,
        advantage=jnp.zeros_like(old),
        weight=jnp.zeros_like(old),
    )
    return fields, loss_tokens


def weights(aggregate: Aggregate, loss_tokens: LossTokens, trajectories: int) -> Float[np.ndarray, "batches tokens"]:
    """Loss weights of each batch; `fixed` divides by the number of trajectories, the others sum to 1."""
    mask = np.asarray(loss_tokens.is_action)
    batches, capacity = mask.shape
    first = np.arange(batches)[:, None] * (capacity + 1)
    step, trajectory, group = (
        (np.where(mask, np.asarray(unit), capacity) + first).ravel()
        for unit in (loss_tokens.step, loss_tokens.trajectory, loss_tokens.group)
    )
    units = TokenUnits(step, trajectory, group)
    flat = loss_weights(aggregate, units, mask.ravel(), fixed_denominator=float(trajectories))
    out = flat.reshape(mask.shape)
    # All batches at once are one long batch; its shares, made to sum to 1 within each, are theirs.
    return out if aggregate == "fixed" else out / out.sum(axis=1, keepdims=True)


@functools.partial(jax.jit, static_argnums=0)
def gradients(
    config: LossConfig, logits: Float[Array, "nodes vocabulary"], loss_tokens: LossTokens
) -> Float[Array, "batches actions"]:
    """The ascent direction of each batch: minus the gradient of the loss by the flat logits."""

    def loss(logits: Array, loss_tokens: LossTokens) -> Array:
        loss_tokens = jax.tree.map(lambda x: x[None], loss_tokens)
        logprob = jax.nn.log_softmax(logits).ravel()[loss_tokens.target]
        if config.ratio in MINIBATCH_RATIOS and config.clip != "none":
            value = minibatch_log_ratio(config.ratio, jax.lax.stop_gradient(logprob), loss_tokens)
            loss_tokens = dataclasses.replace(loss_tokens, log_ratio=value)
        outputs = TokenOutputs(logprob, jnp.zeros_like(logprob))
        return loss_from_outputs(Objective(config), outputs, loss_tokens)[0]

    gradient = jax.vmap(jax.grad(loss), (None, 0))(logits, loss_tokens)
    return -gradient.reshape(len(gradient), -1)


@dataclasses.dataclass(frozen=True)
class Errors:
    """How estimates ĝ of a gradient g err; lengths are shares of ‖g‖, squares of ‖g‖².

    Attributes:
      verdict: `unbiased`; `scaled`: its direction alone is right; `biased`.
      bias, bias_low, bias_high: ‖E ĝ − g‖ with its 95 % interval.
      p: of the test that E ĝ = g.
      scale, scale_half: c, the projection of E ĝ on g, and half its 95 % interval.
      off, off_low, off_high: ‖E ĝ − c·g‖/|c| with its interval: the bias that no learning rate mends.
      off_p: of the test that E ĝ = c·g.
      variance, variance_half: trace of the covariance, and half its 95 % interval.
      noise: variance/c².
      mse, mse_half: E‖ĝ − g‖², and half its 95 % interval.
      cosine: mean cosine of the angle between ĝ and g; 0 for ĝ = 0.
    """

    verdict: str
    bias: float
    bias_low: float
    bias_high: float
    p: float
    scale: float
    scale_half: float
    off: float
    off_low: float
    off_high: float
    off_p: float
    variance: float
    variance_half: float
    noise: float
    mse: float
    mse_half: float
    cosine: float


def judge(estimates: Float[np.ndarray, "batches actions"], exact: Float[np.ndarray, "actions"]) -> Errors:
    """Compares independent estimates with the exact gradient.

    Bias is judged jointly over all coordinates: T² = B·bᵀ·Σ⁻¹·b of the mean error b against χ² (Hotelling's test for
    many batches), at the level `LEVEL` for each estimator by itself: in a hundred tables of a hundred
    rows there is one false alarm. Intervals of variance and mean squared error are those of the mean over batches of
    squared deviations, which are taken as normal.
    """
    n, norm = len(estimates), float(np.linalg.norm(exact))
    estimates = estimates.astype(np.float64)
    mean = estimates.mean(axis=0)
    spread = estimates - mean
    # No BLAS here: on busy cores its threads wait for each other a hundred times as long as this takes.
    covariance = np.einsum("bi,bj->ij", spread, spread) / (n - 1)
    unit = exact / norm
    across = np.eye(len(exact)) - np.outer(unit, unit)
    error, off_mean, off_covariance = mean - exact, across @ mean, across @ covariance @ across
    p, off_p = (mean_is_zero(m, c, n, norm) for m, c in ((error, covariance), (off_mean, off_covariance)))
    scale, half = float(unit @ mean) / norm, Z * math.sqrt(unit @ covariance @ unit / n) / norm
    bias = norm_of_mean(error, covariance, n) / norm
    off = norm_of_mean(off_mean, off_covariance, n) / norm / max(abs(scale), 1e-9)
    lengths = np.linalg.norm(estimates, axis=1)
    around, missed = ((x**2).sum(axis=1) / norm**2 for x in (spread, estimates - exact))
    variance = float(np.trace(covariance)) / norm**2
    return Errors(
        verdict="unbiased" if p >= LEVEL else "scaled" if off_p >= LEVEL and scale > half else "biased",
        bias=float(bias[0]),
        bias_low=float(bias[1]),
        bias_high=float(bias[2]),
        p=p,
        scale=scale,
        scale_half=half,
        off=float(off[0]),
        off_low=float(off[1]),
        off_high=float(off[2]),
        off_p=off_p,
        variance=variance,
        variance_half=half_interval(around),
        noise=variance / max(scale**2, 1e-18),
        mse=float(missed.mean()),
        mse_half=half_interval(missed),
        cosine=float((estimates @ unit / np.where(lengths > 0, lengths, 1)).mean()),
    )


def half_interval(x: Float[np.ndarray, "batches"]) -> float:
    """Half the 95 % interval of the mean of independent numbers."""
    return Z * float(x.std(ddof=1)) / math.sqrt(len(x))


def mean_is_zero(
    mean: Float[np.ndarray, "coordinates"],
    covariance: Float[np.ndarray, "coordinates coordinates"],
    n: int,
    unit: float,
) -> float:
    """p-value of Hotelling's test that all coordinates are 0 on average, for many more samples n than coordinates.

    Coordinates may be dependent, since logits of a node have gradients that sum to 0: the test is on those directions
    in which samples differ. In the others the mean must be below 1e-4 of `unit`, or p is 0.
    """
    spread, axes = np.linalg.eigh(covariance)
    varies = spread > 1e-9 * max(spread[-1], 1e-9 * unit**2)
    if np.linalg.norm(mean @ axes[:, ~varies]) > 1e-4 * unit:
        return 0.0
    t2 = n * float(((mean @ axes[:, varies]) ** 2 / spread[varies]).sum())
    return float(scipy.stats.chi2.sf(t2, int(varies.sum()))) if varies.any() else 1.0


def norm_of_mean(
    mean: Float[np.ndarray, "coordinates"], covariance: Float[np.ndarray, "coordinates coordinates"], n: int
) -> Float[np.ndarray, "3"]:
    """‖μ‖ of μ = E x and its 95 % interval, from the mean of n samples: (estimate, low, high).

    ‖mean‖² exceeds ‖μ‖² by tr Σ/n on average, which is taken off. The interval holds all u = ‖μ‖² from which that
    differs by at most 1.96 of its standard deviations √(4κu + 2·tr Σ²/n²), κ = μᵀΣμ/(n·u) taken at the mean.
    """
    square = mean @ mean - np.trace(covariance) / n
    kappa = mean @ covariance @ mean / n / max(mean @ mean, 1e-300)
    centre = square + 2 * kappa * Z**2
    half = math.sqrt(max(centre**2 - square**2 + 2 * (covariance**2).sum() / n**2 * Z**2, 0))
    return np.sqrt(np.maximum([square, centre - half, centre + half], 0))
