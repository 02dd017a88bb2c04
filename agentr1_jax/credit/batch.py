"""Trajectories as flat arrays in (trajectory, step, token) order: numpy on the host, and the `TokenBatch` of a scheme.

Every process flattens its own trajectories (`flatten`). The arrays of all processes are concatenated in process order,
so that statistics are global and each process finds its own part again as one slice. `to_token_batch` pads them to the
fixed capacities of a run; padding points to one extra segment (token_step = S, step_trajectory = N, group = N) whose
results are dropped.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.trajectory import POLICIES, Step, Term, Trajectory, observation_tokens


@flax.struct.dataclass
class TokenBatch:
    """Rewards, values and the (group, trajectory, step) indices of a batch, padded to fixed capacities.

    Attributes:
      rewards: r_t of each step.
      token_rewards: reward of each token on top of its step's (KL in the reward).
      returns: R_i = Σₜ rₜ of each trajectory, with the rewards of its tokens.
      state_key: key of the state that each step starts in, as an integer; negative where it is unknown.
      action_key: key of what the step did, likewise.
      values: V_k at the hidden state that predicts token k; None without a critic.
      is_action: True for tokens that the policy sampled.
      token_step: step of each token.
      step_trajectory: trajectory of each step.
      group: group of each trajectory, in [0, trajectories).
      bootstrap: value of the future of each trajectory: V(o_T) where it was truncated, 0 where it ended.
      state_value: fallback baseline of each step, known before this batch; None for 0.
      greedy_return: return of the greedy rollout of each trajectory's row; None where there is none.
      belief: mean log-prob of the gold answer's tokens at the prompt of each step; None where nothing probes it.
    """

    rewards: Float[Array, "steps"]
    token_rewards: Float[Array, "tokens"]
    returns: Float[Array, "trajectories"]
    state_key: Int[Array, "steps"]
    action_key: Int[Array, "steps"]
    values: Float[Array, "tokens"] | None
    is_action: Bool[Array, "tokens"]
    token_step: Int[Array, "tokens"]
    step_trajectory: Int[Array, "steps"]
    group: Int[Array, "trajectories"]
    bootstrap: Float[Array, "trajectories"]
    state_value: Float[Array, "steps"] | None = None
    greedy_return: Float[Array, "trajectories"] | None = None
    belief: Float[Array, "steps"] | None = None

    @property
    def steps(self) -> int:
        """Capacity S."""
        return self.rewards.shape[0]

    @property
    def trajectories(self) -> int:
        """Capacity N, of trajectories and groups."""
        return self.returns.shape[0]

    @property
    def real_token(self) -> Bool[Array, "tokens"]:
        """True for the tokens that get an advantage, sampled ones of real steps; False for padding."""
        return self.is_action & (self.token_step < self.steps)

    @property
    def real_step(self) -> Bool[Array, "steps"]:
        """False for padding."""
        return self.step_trajectory < self.trajectories

    @property
    def real_trajectory(self) -> Bool[Array, "trajectories"]:
        """False for padding."""
        return self.group < self.trajectories

    @property
    def first_token(self) -> Bool[Array, "tokens"]:
        """True at the first sampled token of each step."""
        index = jnp.where(self.real_token, jnp.arange(self.token_step.size), self.token_step.size)
        first = jax.ops.segment_min(index, self.token_step, self.steps + 1)
        return self.real_token & (index == first[self.token_step])

    @property
    def last_token(self) -> Bool[Array, "tokens"]:
        """True at the last sampled token of each step."""
        index = jnp.where(self.real_token, jnp.arange(self.token_step.size), -1)
        last = jax.ops.segment_max(index, self.token_step, self.steps + 1)
        return self.real_token & (index == last[self.token_step])

    @property
    def step_index(self) -> Int[Array, "steps"]:
        """t of each step in its trajectory, from 0."""
        index = jnp.arange(self.steps)
        return index - jax.ops.segment_min(index, self.step_trajectory, self.trajectories + 1)[self.step_trajectory]

    @property
    def step_group(self) -> Int[Array, "steps"]:
        """Group of each step; N for padding."""
        return jnp.append(self.group, jnp.array(self.trajectories, self.group.dtype))[self.step_trajectory]

    @property
    def token_trajectory(self) -> Int[Array, "tokens"]:
        """Trajectory of each token; N for padding."""
        padding = jnp.array(self.trajectories, self.step_trajectory.dtype)
        return jnp.append(self.step_trajectory, padding)[self.token_step]

    @property
    def step_tokens(self) -> Int[Array, "steps"]:
        """Number of sampled tokens of each step; 0 for padding."""
        return jax.ops.segment_sum(self.real_token.astype(jnp.int32), self.token_step, self.steps + 1)[:-1]

    @property
    def trajectory_steps(self) -> Int[Array, "trajectories"]:
        """Number of steps of each trajectory; 0 for padding."""
        return jax.ops.segment_sum(self.real_step.astype(jnp.int32), self.step_trajectory, self.trajectories + 1)[:-1]

    @property
    def trajectory_tokens(self) -> Int[Array, "trajectories"]:
        """Number of sampled tokens of each trajectory; 0 for padding."""
        return jax.ops.segment_sum(self.step_tokens, self.step_trajectory, self.trajectories + 1)[:-1]


@flax.struct.dataclass
class Credit:
    """Result of a scheme, on the device or fetched from it.

    Attributes:
      advantages: A_k of each token; 0 where a token was not sampled.
      value_targets: target of the critic at each token; None from a scheme that does not train a critic.
      value_mask: True where a value target exists; None likewise.
      terms: terms by name, of quantities [steps]; their totals sum to the mean of `advantages` over the sampled tokens
        of each step. Weights and stds are [steps] or scalars. Empty from a scheme that does not explain itself.
    """

    advantages: Float[Any, "tokens"]
    value_targets: Float[Any, "tokens"] | None = None
    value_mask: Bool[Any, "tokens"] | None = None
    terms: Mapping[str, Term] = flax.struct.field(default_factory=dict)


def account_of_step(terms: Mapping[str, Term], step: int) -> dict[str, Term]:
    """Return the terms [steps] of one step as numbers of seven digits, for its record.

    A term of weight 0 is left out where others are not, e.g. the baseline that does not apply.
    """

    def number(x: np.ndarray) -> float:
        return float(f"{x[step]:.7g}")

    account = {}
    for name, term in terms.items():
        plus, minus = ({key: number(x) for key, x in part.items()} for part in (term.plus, term.minus))
        account[name] = Term(plus, minus, number(term.weight), number(term.std))
    return {name: term for name, term in account.items() if term.weight} or dict(list(account.items())[:1])


@dataclasses.dataclass(frozen=True)
class FlatTrajectories:
    """N trajectories of S steps and K tokens; what is also in `TokenBatch` is explained there.

    Tokens are the sampled ones; for the mask ablations, those of the observation that answers a response follow it.

    Attributes:
      process_rewards: part of r_t that is process reward.
      potential, next_potential: Φ of the states that each step starts in and leads to; NaN where there is none.
      state_key, action_key: 63-bit hashes of the keys of each step; -1 where it has none.
      step_tokens: number of tokens of each step.
      trajectory_steps: number of steps of each trajectory.
      greedy_return: NaN where there is none.
      group: any integers.
      truncated: True for trajectories whose future is bootstrapped.
      trainable: False for steps whose tokens get no loss weight, though their rewards count in statistics.
      logprobs: behaviour log-probs; 0 for tokens that were not sampled.
      values: all 0 without a critic.
      final_values: V at `final_prompt_ids` of each trajectory; 0 where it has none.
      belief: NaN where there is none.
    """

    rewards: Float[np.ndarray, "steps"]
    process_rewards: Float[np.ndarray, "steps"]
    potential: Float[np.ndarray, "steps"]
    next_potential: Float[np.ndarray, "steps"]
    state_key: Int[np.ndarray, "steps"]
    action_key: Int[np.ndarray, "steps"]
    step_tokens: Int[np.ndarray, "steps"]
    trajectory_steps: Int[np.ndarray, "trajectories"]
    returns: Float[np.ndarray, "trajectories"]
    greedy_return: Float[np.ndarray, "trajectories"]
    group: Int[np.ndarray, "trajectories"]
    truncated: Bool[np.ndarray, "trajectories"]
    trainable: Bool[np.ndarray, "steps"]
    is_action: Bool[np.ndarray, "tokens"]
    logprobs: Float[np.ndarray, "tokens"]
    token_rewards: Float[np.ndarray, "tokens"]
    values: Float[np.ndarray, "tokens"]
    final_values: Float[np.ndarray, "trajectories"]
    belief: Float[np.ndarray, "steps"]

    @property
    def token_step(self) -> Int[np.ndarray, "tokens"]:
        """Step of each token."""
        return np.repeat(np.arange(len(self.rewards)), self.step_tokens)

    @property
    def step_trajectory(self) -> Int[np.ndarray, "steps"]:
        """Trajectory of each step."""
        return np.repeat(np.arange(len(self.returns)), self.trajectory_steps)

    @property
    def token_trajectory(self) -> Int[np.ndarray, "tokens"]:
        """Trajectory of each token."""
        return self.step_trajectory[self.token_step]


def flatten(
    trajectories: Sequence[Trajectory],
    values: np.ndarray | None = None,
    final_values: np.ndarray | None = None,
    beliefs: np.ndarray | None = None,
    *,
    process_parts: Sequence[str] = (),
    observations: bool = False,
) -> FlatTrajectories:
    """Flatten N trajectories, each with steps, of K tokens in all; the rewards of tokens are 0.

    Args:
      trajectories: of this process.
      values: float32 [K] critic values in flat order, None without a critic.
      final_values: float32 [N] critic values at `final_prompt_ids`, None without a critic.
      beliefs: float32 [S] beliefs in the gold answer; None for those that the steps have recorded.
      process_parts: names of the reward parts that are process rewards.
      observations: True to include the tokens of each observation after the response that it answers.
    """
    steps = [s for t in trajectories for s in t.steps]
    policies = [POLICIES[t.outcome] for t in trajectories for _ in t.steps]
    sampled = np.array([len(s.response_ids) for s in steps], np.int64)
    answered = np.zeros(len(steps), np.int64)
    if observations:
        answered = np.array(
            [n for t in trajectories for n in [*observation_tokens(t)[1:], 0][: len(t.steps)]], np.int64
        )
    is_action = np.repeat(np.tile([True, False], len(steps)), np.stack([sampled, answered], axis=1).ravel())
    logprobs = np.zeros(len(is_action), np.float32)
    logprobs[is_action] = np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in steps)])

    def reward_of(read: Callable[[Step], float | None]) -> np.ndarray:
        used = [p.reward == "use" for p in policies]
        return np.array([read(s) if use else 0.0 for s, use in zip(steps, used, strict=True)], np.float32)

    def nan_if_none(values: Iterable[float | None]) -> np.ndarray:
        return np.array([np.nan if x is None else x for x in values], np.float32)

    def zeros_if_none(x: np.ndarray | None, size: int) -> np.ndarray:
        return np.zeros(size, np.float32) if x is None else x.astype(np.float32)

    return FlatTrajectories(
        rewards=reward_of(lambda s: s.reward),
        process_rewards=reward_of(lambda s: sum(x for name, x in s.reward_parts.items() if name in process_parts)),
        potential=nan_if_none(s.potential for s in steps),
        next_potential=nan_if_none(s.next_potential for s in steps),
        state_key=np.array([_hash(s.state_key) for s in steps], np.int64),
        action_key=np.array([_hash(s.action_key) for s in steps], np.int64),
        step_tokens=sampled + answered,
        trajectory_steps=np.array([len(t.steps) for t in trajectories], np.int64),
        returns=np.array([t.total_reward for t in trajectories], np.float32),
        greedy_return=nan_if_none(t.greedy_return for t in trajectories),
        group=np.array([t.group for t in trajectories], np.int64),
        truncated=np.array([POLICIES[t.outcome].bootstrap for t in trajectories], bool),
        trainable=np.array([p.training == "train" and s.trainable for s, p in zip(steps, policies, strict=True)], bool),
        is_action=is_action,
        logprobs=logprobs,
        token_rewards=np.zeros(len(is_action), np.float32),
        values=zeros_if_none(values, len(is_action)),
        final_values=zeros_if_none(final_values, len(trajectories)),
        belief=nan_if_none(s.belief for s in steps) if beliefs is None else beliefs,
    )


def concatenate(parts: Sequence[FlatTrajectories]) -> FlatTrajectories:
    """Concatenate the trajectories of several processes, whose groups must differ."""
    fields = [f.name for f in dataclasses.fields(FlatTrajectories)]
    return FlatTrajectories(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in fields})


def to_token_batch(
    flat: FlatTrajectories,
    *,
    trajectories: int,
    steps: int,
    tokens: int,
    critic: bool,
    baseline: float = 0.0,
    advantage_mask: bool = True,
) -> TokenBatch:
    """Pad the trajectories of all processes to fixed capacities, on the device.

    Args:
      flat: the trajectories.
      trajectories, steps, tokens: the capacities.
      critic: True if `flat.values` are those of a critic.
      baseline: `state_value` of all steps.
      advantage_mask: False treats every token as sampled by the policy (an ablation of Agent-R1).

    Raises:
      ValueError: the data exceed a capacity.
    """
    sizes = {"trajectories": len(flat.returns), "steps": len(flat.rewards), "tokens": len(flat.logprobs)}
    capacities = {"trajectories": trajectories, "steps": steps, "tokens": tokens}
    for name, n in sizes.items():
        if n > capacities[name]:
            raise ValueError(f"a batch of {n} {name} exceeds the capacity of {capacities[name]} of this run")

    def pad(x: np.ndarray, capacity: int, fill: float, dtype: type = np.float32) -> jax.Array:
        return jnp.asarray(np.concatenate([x, np.full(capacity - len(x), fill)]).astype(dtype))

    # Schemes that compare trajectories see the KL in the reward, too.
    returns = flat.returns + np.bincount(flat.token_trajectory, flat.token_rewards, sizes["trajectories"])
    _, group = np.unique(flat.group, return_inverse=True)
    return TokenBatch(
        rewards=pad(flat.rewards, steps, 0),
        token_rewards=pad(flat.token_rewards, tokens, 0),
        returns=pad(returns, trajectories, 0),
        state_key=pad(_number(flat.state_key), steps, -1, np.int32),
        action_key=pad(_number(flat.action_key), steps, -1, np.int32),
        values=pad(flat.values, tokens, 0) if critic else None,
        is_action=pad(flat.is_action | (not advantage_mask), tokens, 0, bool),
        token_step=pad(flat.token_step, tokens, steps, np.int32),
        step_trajectory=pad(flat.step_trajectory, steps, trajectories, np.int32),
        group=pad(group, trajectories, trajectories, np.int32),
        bootstrap=pad(np.where(flat.truncated, flat.final_values, 0), trajectories, 0),
        state_value=jnp.full((steps,), baseline, jnp.float32),
        greedy_return=pad(flat.greedy_return, trajectories, 0),
        belief=None if np.isnan(flat.belief).all() else pad(flat.belief, steps, 0),
    )


def _number(hashes: Int[np.ndarray, "steps"]) -> Int[np.ndarray, "steps"]:
    """Number the hashes, which are too long for the device; -1 where there is none."""
    _, number = np.unique(hashes, return_inverse=True)
    return np.where(hashes < 0, -1, number)


def _hash(key: str | None) -> int:
    if key is None:
        return -1
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1
