"""Trajectories as flat numpy streams in (trajectory, step, token) order, and the `CreditBatch` made of them.

Every process flattens its own trajectories; the streams of all processes are joined in process order, so that
statistics are global and each process finds its own part again as one slice.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from agentr1_jax.credit.batch import CreditBatch
from agentr1_jax.trajectory import POLICIES, Step, Trajectory, observation_tokens


@dataclasses.dataclass(frozen=True)
class Streams:
    """Flat data of S steps, K tokens and N trajectories.

    Tokens are the sampled ones; for the mask ablations, those that a step's response was answered with follow it.

    Attributes:
      rewards: r_t.
      process: the part of r_t that is process reward.
      potential, next_potential: Φ of the states each step starts in and leads to; NaN where there is none.
      state_key: 63-bit hash of each step's anchor; -1 if it has none.
      step_tokens: tokens of each step.
      trajectory_steps: steps of each trajectory.
      outcome: R_i.
      greedy_reward: reward of the greedy rollout of each trajectory's row; NaN where none was made.
      group: group of each trajectory, any integers.
      cut: True for trajectories whose outcome is bootstrapped.
      trained: False for steps whose tokens get no weight (their rewards still count in statistics): those of
        trajectories that are masked, and those that say so themselves.
      is_action: True for tokens the policy sampled.
      logprobs: behaviour log-probabilities; 0 for tokens that were not sampled.
      token_rewards: reward of each token beside its step's (KL in the reward).
      values: V_k, or all 0 without a critic.
      final_values: V at `final_prompt_ids`, 0 where there is none.
    """

    rewards: Float[np.ndarray, "steps"]
    process: Float[np.ndarray, "steps"]
    potential: Float[np.ndarray, "steps"]
    next_potential: Float[np.ndarray, "steps"]
    state_key: Int[np.ndarray, "steps"]
    step_tokens: Int[np.ndarray, "steps"]
    trajectory_steps: Int[np.ndarray, "trajectories"]
    outcome: Float[np.ndarray, "trajectories"]
    greedy_reward: Float[np.ndarray, "trajectories"]
    group: Int[np.ndarray, "trajectories"]
    cut: Bool[np.ndarray, "trajectories"]
    trained: Bool[np.ndarray, "steps"]
    is_action: Bool[np.ndarray, "tokens"]
    logprobs: Float[np.ndarray, "tokens"]
    token_rewards: Float[np.ndarray, "tokens"]
    values: Float[np.ndarray, "tokens"]
    final_values: Float[np.ndarray, "trajectories"]

    @property
    def token_step(self) -> np.ndarray:
        """Step of each token [K]."""
        return np.repeat(np.arange(len(self.rewards)), self.step_tokens)

    @property
    def traj_of_step(self) -> np.ndarray:
        """Trajectory of each step [S]."""
        return np.repeat(np.arange(len(self.outcome)), self.trajectory_steps)

    @property
    def token_trajectory(self) -> np.ndarray:
        """Trajectory of each token [K]."""
        return self.traj_of_step[self.token_step]


def flatten(
    trajectories: Sequence[Trajectory],
    values: np.ndarray | None = None,
    final_values: np.ndarray | None = None,
    token_rewards: np.ndarray | None = None,
    *,
    process_parts: Sequence[str] = (),
    observations: bool = False,
) -> Streams:
    """Flattens usable trajectories.

    Args:
      trajectories: N trajectories.
      values: float32 [K] critic values in stream order, None without a critic.
      final_values: float32 [N] critic values at `final_prompt_ids`, None without a critic.
      token_rewards: float32 [K] rewards of tokens in stream order, None for 0.
      process_parts: names of the reward parts that are process rewards.
      observations: whether tokens that were not sampled are in the stream too, after the response they answer.
    """
    steps = [s for t in trajectories for s in t.steps]
    counted = [POLICIES[t.outcome].reward == "use" for t in trajectories for _ in t.steps]
    sampled = np.array([len(s.response_ids) for s in steps], np.int64)
    answered = np.zeros(len(steps), np.int64)
    if observations:
        answered = np.array(
            [n for t in trajectories for n in [*observation_tokens(t)[1:], 0][: len(t.steps)]], np.int64
        )
    is_action = np.repeat(np.tile([True, False], len(steps)), np.stack([sampled, answered], axis=1).ravel())
    logprobs = np.zeros(len(is_action), np.float32)
    logprobs[is_action] = np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in steps)])

    def of_steps(read: Callable[[Step], float | None]) -> np.ndarray:
        return np.array([read(s) if use else 0.0 for s, use in zip(steps, counted, strict=True)], np.float32)

    def of_info(owners: Sequence[Step | Trajectory], key: str) -> np.ndarray:
        return np.array([owner.info.get(key, np.nan) for owner in owners], np.float32)

    return Streams(
        rewards=of_steps(lambda s: s.reward),
        process=of_steps(lambda s: sum(x for name, x in s.reward_parts.items() if name in process_parts)),
        potential=of_info(steps, "potential"),
        next_potential=of_info(steps, "next_potential"),
        state_key=np.array([_hash(s.state_key) for s in steps], np.int64),
        step_tokens=sampled + answered,
        trajectory_steps=np.array([len(t.steps) for t in trajectories], np.int64),
        outcome=np.array([t.total_reward for t in trajectories], np.float32),
        greedy_reward=of_info(trajectories, "greedy_reward"),
        group=np.array([t.group for t in trajectories], np.int64),
        cut=np.array([POLICIES[t.outcome].bootstrap for t in trajectories], bool),
        trained=np.array([_is_trained(t, s) for t in trajectories for s in t.steps], bool),
        is_action=is_action,
        logprobs=logprobs,
        token_rewards=np.zeros(len(is_action), np.float32) if token_rewards is None else token_rewards,
        values=np.zeros(len(is_action), np.float32) if values is None else values.astype(np.float32),
        final_values=np.zeros(len(trajectories), np.float32) if final_values is None else final_values,
    )


def join(parts: Sequence[Streams]) -> Streams:
    """The streams of several processes one after the other; groups must already differ between processes."""
    fields = [f.name for f in dataclasses.fields(Streams)]
    return Streams(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in fields})


def to_batch(
    streams: Streams,
    *,
    trajectories: int,
    steps: int,
    tokens: int,
    critic: bool,
    baseline: float = 0.0,
    advantage_mask: bool = True,
) -> CreditBatch:
    """Pads the streams to fixed capacities.

    Args:
      streams: of all processes.
      trajectories, steps, tokens: capacities.
      critic: whether the values of the streams are a critic's.
      baseline: what a state is worth of which nothing else is known.
      advantage_mask: False takes every token for one that the policy sampled (an ablation of Agent-R1).

    Raises:
      ValueError: the data exceed a capacity.
    """
    have = {"trajectories": len(streams.outcome), "steps": len(streams.rewards), "tokens": len(streams.logprobs)}
    room = {"trajectories": trajectories, "steps": steps, "tokens": tokens}
    for name, n in have.items():
        if n > room[name]:
            raise ValueError(f"a batch of {n} {name} exceeds the capacity of {room[name]} of this run")

    def pad(x: np.ndarray, capacity: int, fill: float, dtype: type = np.float32) -> jax.Array:
        return jnp.asarray(np.concatenate([x, np.full(capacity - len(x), fill)]).astype(dtype))

    # What a trajectory is worth in all: schemes that compare trajectories see the KL in the reward too.
    outcome = streams.outcome + np.bincount(streams.token_trajectory, streams.token_rewards, have["trajectories"])
    _, group = np.unique(streams.group, return_inverse=True)
    _, key = np.unique(streams.state_key, return_inverse=True)
    key = np.where(streams.state_key < 0, -1, key)
    return CreditBatch(
        rewards=pad(streams.rewards, steps, 0),
        token_rewards=pad(streams.token_rewards, tokens, 0),
        outcome=pad(outcome, trajectories, 0),
        state_key=pad(key, steps, -1, np.int32),
        values=pad(streams.values, tokens, 0) if critic else None,
        is_action=pad(streams.is_action | (not advantage_mask), tokens, 0, bool),
        token_step=pad(streams.token_step, tokens, steps, np.int32),
        traj_of_step=pad(streams.traj_of_step, steps, trajectories, np.int32),
        group=pad(group, trajectories, trajectories, np.int32),
        bootstrap=pad(np.where(streams.cut, streams.final_values, 0), trajectories, 0),
        state_value=jnp.full((steps,), baseline, jnp.float32),
        greedy_reward=pad(streams.greedy_reward, trajectories, 0),
    )


def _is_trained(trajectory: Trajectory, step: Step) -> bool:
    return POLICIES[trajectory.outcome].training == "train" and step.info.get("trained", True)


def _hash(key: str | None) -> int:
    if key is None:
        return -1
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
