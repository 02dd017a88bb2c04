"""What a credit scheme sees and what it returns.

Flat streams in (trajectory, step, token) order, global over processes. Capacities are fixed per run; what is beyond the
data points to one extra segment (token_step = S, traj_of_step = N, group = N) whose results are dropped.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@flax.struct.dataclass
class CreditBatch:
    """Rewards, values and the (group, trajectory, step) indices that say what belongs together.

    Attributes:
      rewards: r_t of each step.
      token_rewards: reward of each token beside the step's own (KL in the reward).
      outcome: R_i = Σₜ rₜ of each trajectory, with the rewards of its tokens.
      state_key: anchor of the state each step starts in, as an integer; negative if unknown.
      values: V_k at the hidden state that predicts token k; None without a critic.
      is_action: True for tokens the policy sampled.
      token_step: step of each token.
      traj_of_step: trajectory of each step.
      group: group of each trajectory, in [0, trajectories).
      bootstrap: value of the future of each trajectory: V(o_T) where it was cut, 0 where it ended.
      state_value: fallback baseline of each step, from what was known before this batch; None for 0.
      greedy_reward: reward of the greedy rollout of each trajectory's row; None where none was made.
    """

    rewards: Float[Array, "steps"]
    token_rewards: Float[Array, "tokens"]
    outcome: Float[Array, "trajectories"]
    state_key: Int[Array, "steps"]
    values: Float[Array, "tokens"] | None
    is_action: Bool[Array, "tokens"]
    token_step: Int[Array, "tokens"]
    traj_of_step: Int[Array, "steps"]
    group: Int[Array, "trajectories"]
    bootstrap: Float[Array, "trajectories"]
    state_value: Float[Array, "steps"] | None = None
    greedy_reward: Float[Array, "trajectories"] | None = None

    @property
    def steps(self) -> int:
        """Capacity S."""
        return self.rewards.shape[0]

    @property
    def trajectories(self) -> int:
        """Capacity N; also the capacity of groups."""
        return self.outcome.shape[0]

    @property
    def real_step(self) -> Bool[Array, "steps"]:
        """False for padding."""
        return self.traj_of_step < self.trajectories

    @property
    def real_trajectory(self) -> Bool[Array, "trajectories"]:
        """False for padding."""
        return self.group < self.trajectories

    @property
    def trained(self) -> Bool[Array, "tokens"]:
        """Tokens that get an advantage: sampled ones of real steps."""
        return self.is_action & (self.token_step < self.steps)

    @property
    def first_token(self) -> Bool[Array, "tokens"]:
        """True at the first sampled token of each step."""
        index = jnp.where(self.trained, jnp.arange(self.token_step.shape[0]), self.token_step.shape[0])
        first = jax.ops.segment_min(index, self.token_step, self.steps + 1)
        return self.trained & (index == first[self.token_step])

    @property
    def last_token(self) -> Bool[Array, "tokens"]:
        """True at the last sampled token of each step."""
        index = jnp.where(self.trained, jnp.arange(self.token_step.shape[0]), -1)
        last = jax.ops.segment_max(index, self.token_step, self.steps + 1)
        return self.trained & (index == last[self.token_step])

    @property
    def step_index(self) -> Int[Array, "steps"]:
        """t of each step, from 0."""
        index = jnp.arange(self.steps)
        return index - jax.ops.segment_min(index, self.traj_of_step, self.trajectories + 1)[self.traj_of_step]

    @property
    def tokens_of_step(self) -> Int[Array, "steps"]:
        """Sampled tokens of each step; 0 for padding."""
        return jax.ops.segment_sum(self.trained.astype(jnp.int32), self.token_step, self.steps + 1)[:-1]

    @property
    def steps_of_trajectory(self) -> Int[Array, "trajectories"]:
        """Steps of each trajectory; 0 for padding."""
        return jax.ops.segment_sum(self.real_step.astype(jnp.int32), self.traj_of_step, self.trajectories + 1)[:-1]

    @property
    def tokens_of_trajectory(self) -> Int[Array, "trajectories"]:
        """Sampled tokens of each trajectory; 0 for padding."""
        return jax.ops.segment_sum(self.tokens_of_step, self.traj_of_step, self.trajectories + 1)[:-1]


@flax.struct.dataclass
class Credit:
    """The result of a scheme, on the device or fetched from it.

    Attributes:
      advantages: A_k; 0 where a token is not trained.
      value_targets: R_k for the critic.
      value_mask: where a value target exists.
    """

    advantages: Float[Any, "tokens"]
    value_targets: Float[Any, "tokens"]
    value_mask: Bool[Any, "tokens"]
