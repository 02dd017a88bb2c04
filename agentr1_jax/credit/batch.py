"""The batch that a credit scheme sees, and the credit it returns.

Flat arrays in (trajectory, step, token) order, global over processes. Capacities are fixed per run; padding points to
one extra segment (token_step = S, step_trajectory = N, group = N) whose results are dropped.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@flax.struct.dataclass
class TokenBatch:
    """Rewards, values and the (group, trajectory, step) indices of a batch, padded to fixed capacities.

    Attributes:
      rewards: r_t of each step.
      token_rewards: reward of each token on top of its step's (KL in the reward).
      returns: R_i = Σₜ rₜ of each trajectory, with the rewards of its tokens.
      state_key: key of the state that each step starts in, as an integer; negative where it is unknown.
      values: V_k at the hidden state that predicts token k; None without a critic.
      is_action: True for tokens that the policy sampled.
      token_step: step of each token.
      step_trajectory: trajectory of each step.
      group: group of each trajectory, in [0, trajectories).
      bootstrap: value of the future of each trajectory: V(o_T) where it was truncated, 0 where it ended.
      state_value: fallback baseline of each step, known before this batch; None for 0.
      greedy_return: return of the greedy rollout of each trajectory's row; None where there is none.
    """

    rewards: Float[Array, "steps"]
    token_rewards: Float[Array, "tokens"]
    returns: Float[Array, "trajectories"]
    state_key: Int[Array, "steps"]
    values: Float[Array, "tokens"] | None
    is_action: Bool[Array, "tokens"]
    token_step: Int[Array, "tokens"]
    step_trajectory: Int[Array, "steps"]
    group: Int[Array, "trajectories"]
    bootstrap: Float[Array, "trajectories"]
    state_value: Float[Array, "steps"] | None = None
    greedy_return: Float[Array, "trajectories"] | None = None

    @property
    def steps(self) -> int:
        """Capacity S."""
        return self.rewards.shape[0]

    @property
    def trajectories(self) -> int:
        """Capacity N; also the capacity of groups."""
        return self.returns.shape[0]

    @property
    def real_token(self) -> Bool[Array, "tokens"]:
        """True for the tokens that get an advantage: sampled ones of real steps."""
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
        index = jnp.where(self.real_token, jnp.arange(self.token_step.shape[0]), self.token_step.shape[0])
        first = jax.ops.segment_min(index, self.token_step, self.steps + 1)
        return self.real_token & (index == first[self.token_step])

    @property
    def last_token(self) -> Bool[Array, "tokens"]:
        """True at the last sampled token of each step."""
        index = jnp.where(self.real_token, jnp.arange(self.token_step.shape[0]), -1)
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
    """

    advantages: Float[Any, "tokens"]
    value_targets: Float[Any, "tokens"] | None = None
    value_mask: Bool[Any, "tokens"] | None = None
