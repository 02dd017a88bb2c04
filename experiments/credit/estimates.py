"""Monte Carlo policy gradients on small decision processes, by the library's own credit and loss, and their errors."""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import Aggregate, LossConfig, Objective
from agentr1_jax.learner.loss_weights import TokenUnits, loss_weights
from agentr1_jax.learner.losses import MINIBATCH_RATIOS, minibatch_log_ratio
from agentr1_jax.learner.update import TokenOutputs, loss_from_outputs
from experiments.credit.mdps import VOCABULARY, Paths, exact_values, greedy_probabilities, log_policy, probabilities

ROUGH = 0.5
"""The fallback baseline of a state, as a share of its exact value."""


@flax.struct.dataclass
class PathBatch:
    """Sampled trajectories of batches; leading axes are batches.

    Attributes:
      action: index of each token into the flat logits; -1 beyond a response.
      state: state of each step; -1 beyond the end.
      reward: reward of each step.
      value: V of the sampling policy before each token.
      state_value: a rough value of each step's state.
      old_logprob: log-prob of each token under the sampling policy.
      group: group of each trajectory.
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
    paths: Paths,
    logits: Float[np.ndarray, "nodes vocabulary"],
    seed: int | tuple[int, ...],
    *,
    batches: int,
    groups: int,
    samples: int,
) -> PathBatch:
    """Draw independent batches from the policy of these logits; each group has its own row, drawn uniformly."""
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
) -> PathBatch:
    """Return the batches of chosen paths; `samples` consecutive ones are a group."""
    value, state_value = exact_values(paths, logits)
    old = np.where(paths.action >= 0, log_policy(logits)[paths.action], 0)
    rough = np.where(paths.state >= 0, ROUGH * state_value[paths.state], 0)
    return PathBatch(
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
def lay_out(sample: PathBatch) -> tuple[dict[str, Array], LossTokens]:
    """Return the fields of the `TokenBatch`, padding last, and loss tokens without advantage and weight.

    A loss token's target is its index in the flat logits.
    """
    trajectories, capacity = sample.state.shape[0], sample.state.size
    real, sampled = sample.state >= 0, sample.action >= 0
    steps, tokens = (_real_first(x.ravel()) for x in (real, sampled))
    trajectory = jnp.broadcast_to(jnp.arange(trajectories)[:, None], real.shape)
    step_trajectory = jnp.where(real, trajectory, trajectories).ravel()[steps]
    number = (jnp.cumsum(real.ravel()) - 1).reshape(real.shape)
    token_step = jnp.where(sampled, number[..., None], capacity).ravel()[tokens]
    is_action = sampled.ravel()[tokens]
    digits = jnp.where(sampled, sample.action % VOCABULARY + 1, 0)
    said = digits @ (VOCABULARY + 1) ** jnp.arange(digits.shape[-1])
    action, old, value = (x.ravel()[tokens] for x in (sample.action, sample.old_logprob, sample.value))
    fields = {
        "rewards": jnp.where(real, sample.reward, 0).ravel()[steps],
        "token_rewards": jnp.zeros(tokens.shape),
        "returns": sample.reward.sum(axis=1),
        "state_key": sample.state.ravel()[steps],
        "action_key": jnp.where(real, said, -1).ravel()[steps],
        "values": value,
        "is_action": is_action,
        "token_step": token_step,
        "step_trajectory": step_trajectory,
        "group": sample.group,
        "bootstrap": jnp.zeros(trajectories),
        "state_value": sample.state_value.ravel()[steps],
        "greedy_return": sample.greedy_return,
    }
    of_step = jnp.append(step_trajectory, trajectories)
    of_token = jnp.where(is_action, of_step[token_step], 0)
    loss_tokens = LossTokens(
        logit_index=jnp.zeros_like(action),
        target=jnp.where(is_action, action, 0),
        step=jnp.where(is_action, token_step, -1),
        trajectory=jnp.where(is_action, of_token, -1),
        group=jnp.where(is_action, sample.group[of_token], -1),
        is_action=is_action,
        old_logprob=old,
        advantage=jnp.zeros_like(old),
        weight=jnp.zeros_like(old),
    )
    return fields, loss_tokens


def _real_first(real: Bool[Array, "n"]) -> Int[Array, "n"]:
    """Return the order that puts what is real first and changes no other; sorting would take longer."""
    place = jnp.where(real, jnp.cumsum(real) - 1, jnp.sum(real) + jnp.cumsum(~real) - 1)
    return jnp.zeros_like(place).at[place].set(jnp.arange(place.size), unique_indices=True)


def weights(aggregate: Aggregate, loss_tokens: LossTokens, trajectories: int) -> Float[np.ndarray, "batches tokens"]:
    """Return the loss weights of each batch; `fixed` divides by the number of trajectories, the others sum to 1."""
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
    """Return the ascent direction of each batch: minus the gradient of the loss by the flat logits."""

    def loss(logits: Array, loss_tokens: LossTokens) -> Array:
        loss_tokens = jax.tree.map(lambda x: x[None], loss_tokens)
        logprob = jax.nn.log_softmax(logits).ravel()[loss_tokens.target]
        if config.ratio in MINIBATCH_RATIOS and config.clip != "none":
            value = minibatch_log_ratio(config, jax.lax.stop_gradient(logprob), loss_tokens)
            loss_tokens = dataclasses.replace(loss_tokens, log_ratio=value)
        outputs = TokenOutputs(logprob, jnp.zeros_like(logprob))
        return loss_from_outputs(Objective(config), outputs, loss_tokens)[0]

    gradient = jax.vmap(jax.grad(loss), (None, 0))(logits, loss_tokens)
    return -gradient.reshape(len(gradient), -1)
