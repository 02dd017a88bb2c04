"""Reward shaping: what a config may do to the rewards of a batch before credit is assigned.

Pure functions from `FlatTrajectories` to `FlatTrajectories`. All but `end_at_truncation` change r_t, and R_i = Σₜ rₜ
with it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic.dataclasses import dataclass

from agentr1_jax.credit.batch import FlatTrajectories
from agentr1_jax.validation import STRICT, NonNegative, Whole


@dataclass(frozen=True, config=STRICT)
class ShapingConfig:
    """Section `shaping`; see the functions below for the definitions, and `configs/base.py` for the keys."""

    truncation_is_terminal: bool = False
    terminal_only: bool = False
    process_parts: tuple[str, ...] = ()
    process_norm: Literal["none", "group", "batch"] = "none"
    potential: NonNegative = 0.0
    overlong_buffer: Whole = 0
    overlong_limit: Whole = 0
    overlong_factor: NonNegative = 1.0
    overlong_unit: Literal["step", "trajectory"] = "step"
    scale_returns: bool = False

    def __post_init__(self) -> None:
        if self.process_norm != "none" and not self.process_parts:
            raise ValueError("process_norm needs process_parts, the reward parts that it normalises")
        if self.process_parts and self.process_norm == "none":
            raise ValueError("process_parts is set, but process_norm is none; set process_norm to group or batch")
        if self.terminal_only and (self.process_parts or self.potential):
            raise ValueError(
                "terminal_only moves all reward to the last step, where process_norm and potential would have nothing "
                "left to shape; choose one"
            )
        if self.overlong_buffer and self.overlong_limit < self.overlong_buffer:
            raise ValueError(
                f"overlong_limit ({self.overlong_limit}) must be at least overlong_buffer ({self.overlong_buffer})"
            )


class RunningMeanStd(NamedTuple):
    """Running statistics of `n` values, e.g. of the step returns G_t of all batches so far (Chan et al. 1979).

    `squares` is the sum of their squared deviations from the mean.
    """

    n: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, x: Float[np.ndarray, "n"]) -> RunningMeanStd:
        """Return the statistics with the values x, too."""
        if not len(x):
            return self
        x = x.astype(np.float64)
        n, difference = self.n + len(x), float(x.mean()) - self.mean
        squares = self.squares + float(((x - x.mean()) ** 2).sum()) + difference**2 * self.n * len(x) / n
        return RunningMeanStd(n, self.mean + difference * len(x) / n, squares)

    @property
    def std(self) -> float:
        """Standard deviation with n − 1; 1 for fewer than two values and for equal values."""
        std = (self.squares / max(self.n - 1, 1)) ** 0.5
        return std if self.n > 1 and std > 1e-6 else 1.0


def shape_rewards(
    flat: FlatTrajectories, config: ShapingConfig, *, gamma: float, statistics: RunningMeanStd, bootstraps: bool = False
) -> tuple[FlatTrajectories, RunningMeanStd]:
    """Shape the rewards of a batch, in the order of this file.

    Args:
      flat: the batch, of all processes.
      config: what is done.
      gamma: discount per step of the credit scheme.
      statistics: running statistics of the step returns of earlier batches, before scaling.
      bootstraps: True if a critic values the future of truncated trajectories.

    Returns:
      the batch with shaped rewards, and the statistics with this batch.
    """
    if config.truncation_is_terminal:
        flat = end_at_truncation(flat)
    if config.terminal_only:
        flat = move_to_last_step(flat)
    if config.process_norm != "none":
        flat = normalise_process_rewards(flat, config.process_norm)
    if config.overlong_buffer:
        flat = penalise_overlong(flat, config)
    if config.potential:
        flat = add_potential(flat, weight=config.potential, gamma=gamma, bootstraps=bootstraps)
    statistics = statistics.update(discounted_returns(flat, gamma))
    return (scale_rewards(flat, statistics.std) if config.scale_returns else flat), statistics


def end_at_truncation(flat: FlatTrajectories) -> FlatTrajectories:
    """Treat truncated trajectories as ended: V beyond their last step is 0.

    A critic that values the future of truncated trajectories (the default) is right where limits only save time. Where
    success counts only within the limits it would not tell the policy to finish: a truncated trajectory is worth the
    critic's own estimate, which then confirms itself.

    Source: Pardo et al., Time Limits in Reinforcement Learning, arXiv 1712.00378.
    """
    return dataclasses.replace(flat, truncated=np.zeros_like(flat.truncated))


def move_to_last_step(flat: FlatTrajectories) -> FlatTrajectories:
    """Give R_i on the last step and 0 on the others, as where only the end of a trajectory is judged."""
    return replace_rewards(flat, np.where(_last_step(flat), flat.returns[flat.step_trajectory], 0))


def normalise_process_rewards(flat: FlatTrajectories, over: str) -> FlatTrajectories:
    """Replace rₜ by rₜ − pₜ + (pₜ − mean)/(std + 1e-6), p the process reward.

    Mean and std (n − 1) are over the steps of the `group`, or of the `batch`. A lone step gets 0 for its process
    reward, as do steps whose process rewards are all equal.

    Source: process supervision of DeepSeekMath, arXiv 2402.03300, section 4.1.3.
    """
    process = flat.process_rewards.astype(np.float64)
    unit = np.unique(flat.group, return_inverse=True)[1][flat.step_trajectory]
    unit = unit if over == "group" else np.zeros_like(unit)
    count = np.maximum(np.bincount(unit), 1)
    centred = process - (np.bincount(unit, process) / count)[unit]
    std = np.sqrt(np.bincount(unit, centred**2) / np.maximum(count - 1, 1))[unit]
    # Rounding of the mean is not a difference.
    normal = np.where(std > 1e-7 * np.abs(process).max(initial=0), centred / (std + 1e-6), 0)
    return replace_rewards(flat, flat.rewards - process + normal)


def penalise_overlong(flat: FlatTrajectories, config: ShapingConfig) -> FlatTrajectories:
    """Replace rₜ by rₜ − factor·clip((length − (limit − buffer))/buffer, 0, 1).

    The penalty is 0 up to limit − buffer sampled tokens, then linear. By `overlong_unit`, a step pays for its own
    length, or a trajectory for the length of all its responses, on its last step.

    Source: soft overlong punishment of DAPO, arXiv 2503.14476.
    """
    length = np.bincount(flat.token_step, flat.is_action, len(flat.rewards))
    if config.overlong_unit == "trajectory":
        whole = np.bincount(flat.step_trajectory, length, len(flat.returns))
        length = np.where(_last_step(flat), whole[flat.step_trajectory], 0)
    buffer = config.overlong_buffer
    excess = np.clip((length - (config.overlong_limit - buffer)) / buffer, 0, 1)
    return replace_rewards(flat, flat.rewards - config.overlong_factor * excess)


def add_potential(flat: FlatTrajectories, *, weight: float, gamma: float, bootstraps: bool) -> FlatTrajectories:
    """Replace rₜ by rₜ + w·(γΦ(sₜ₊₁) − Φ(sₜ)), with Φ = 0 beyond the last step.

    The best policies stay the best (the scheme must use the same γ): a return changes by −w·Φ(sₜ) alone. Where a
    trajectory was truncated and a critic `bootstraps` its future, Φ beyond it is that of its last state, since the
    critic learns shaped values. Without a critic the future is worth 0, and so is its Φ; else being truncated in a good
    state would be rewarded.

    Source: Ng, Harada and Russell 1999.

    Raises:
      ValueError: the environment gives no potential.
    """
    over = _last_step(flat) & ~(flat.truncated[flat.step_trajectory] & bootstraps)
    after = np.where(over, 0, flat.next_potential)
    if np.isnan(flat.potential).any() or np.isnan(after).any():
        raise ValueError(
            "shaping.potential needs the potential of every state, and some observations of this environment have "
            "none; set Observation.potential in the environment, or shaping.potential=0"
        )
    return replace_rewards(flat, flat.rewards + weight * (gamma * after - flat.potential))


def scale_rewards(flat: FlatTrajectories, std: float) -> FlatTrajectories:
    """Divide all rewards by a standard deviation: those of steps, tokens and greedy rollouts.

    `std` is that of the returns so far, so that advantages keep their size as a policy improves. Rewards are not
    centred, which would change which policy is best.
    """
    flat = replace_rewards(flat, flat.rewards / std)
    others = {name: (getattr(flat, name) / std).astype(np.float32) for name in ("token_rewards", "greedy_return")}
    return dataclasses.replace(flat, **others)


def discounted_returns(flat: FlatTrajectories, gamma: float) -> Float[np.ndarray, "steps"]:
    """Return Gₜ = rₜ + γGₜ₊₁ in float64, with the rewards of the step's tokens and without bootstrap."""
    reward = flat.rewards + np.bincount(flat.token_step, flat.token_rewards, len(flat.rewards))
    first = np.cumsum(flat.trajectory_steps) - flat.trajectory_steps
    out, after = np.zeros(len(reward)), np.zeros(len(first))
    for t in reversed(range(int(flat.trajectory_steps.max(initial=0)))):  # All trajectories at once.
        at = flat.trajectory_steps > t
        after[at] = out[first[at] + t] = reward[first[at] + t] + gamma * after[at]
    return out


def replace_rewards(flat: FlatTrajectories, rewards: np.ndarray) -> FlatTrajectories:
    """Set the rewards of steps, and the returns of trajectories that follow from them."""
    returns = np.bincount(flat.step_trajectory, rewards, len(flat.returns))
    return dataclasses.replace(flat, rewards=rewards.astype(np.float32), returns=returns.astype(np.float32))


def _last_step(flat: FlatTrajectories) -> np.ndarray:
    """Return True at the last step of each trajectory."""
    last = np.zeros(len(flat.rewards), bool)
    last[np.cumsum(flat.trajectory_steps)[flat.trajectory_steps > 0] - 1] = True
    return last
