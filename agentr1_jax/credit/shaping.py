"""Reward tools: what a config may do to the rewards of a batch before credit is assigned.

Pure functions from `Streams` to `Streams`. Each but `limits_end` changes r_t, and R_i = Σₜ rₜ with it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from agentr1_jax.credit.streams import Streams

PROCESS_NORMS = ("none", "group", "batch")
OVERLONG_UNITS = ("step", "trajectory")


class Moments(NamedTuple):
    """Running number, mean and sum of squared deviations of the step returns G_t of all batches so far."""

    number: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def seen(self, x: Float[np.ndarray, "n"]) -> Moments:
        """With further values (Chan et al. 1979)."""
        if not len(x):
            return self
        x = x.astype(np.float64)
        count, apart = self.number + len(x), float(x.mean()) - self.mean
        squares = self.squares + float(((x - x.mean()) ** 2).sum()) + apart**2 * self.number * len(x) / count
        return Moments(count, self.mean + apart * len(x) / count, squares)

    @property
    def std(self) -> float:
        """Sample standard deviation; 1 of fewer than two values and of equal ones, which cannot scale anything."""
        std = (self.squares / max(self.number - 1, 1)) ** 0.5
        return std if self.number > 1 and std > 1e-6 else 1.0


@dataclasses.dataclass(frozen=True)
class Shaping:
    """Which reward tools a run uses.

    Attributes:
      limits_end: what the budget cut is over, where limits are part of the task; else a critic values its future.
      terminal_only: the rewards of a trajectory are summed and given on its last step.
      process_parts: names of the reward parts that are process rewards.
      process_norm: `group` or `batch` normalises process rewards over the steps of each group, or of the batch.
      potential: weight of potential-based shaping; 0 for none.
      overlong_buffer: tokens before the limit at which the penalty for length begins; 0 for no penalty.
      overlong_limit: tokens at which it is full.
      overlong_factor: the full penalty.
      overlong_unit: what has the length, and pays: a `step`, or the `trajectory` on its last step.
      scale_returns: rewards are divided by the running standard deviation of returns.

    Raises:
      ValueError: an unknown name, or a number out of its range.
    """

    limits_end: bool = False
    terminal_only: bool = False
    process_parts: tuple[str, ...] = ()
    process_norm: str = "none"
    potential: float = 0.0
    overlong_buffer: int = 0
    overlong_limit: int = 0
    overlong_factor: float = 1.0
    overlong_unit: str = "step"
    scale_returns: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("process_norm", PROCESS_NORMS), ("overlong_unit", OVERLONG_UNITS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown shaping.{name} {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        if self.process_norm != "none" and not self.process_parts:
            raise ValueError("shaping.process_norm needs shaping.process_parts, the reward parts that it normalises")
        if self.process_parts and self.process_norm == "none":
            raise ValueError("shaping.process_parts is set, but shaping.process_norm is none; set it to group or batch")
        if self.terminal_only and (self.process_parts or self.potential):
            raise ValueError(
                "shaping.terminal_only takes all reward to the last step, where process_norm and potential "
                "would have nothing left to shape; choose one"
            )
        if self.overlong_buffer < 0 or self.overlong_factor < 0:
            raise ValueError("shaping.overlong_buffer and shaping.overlong_factor must be at least 0")
        if self.overlong_buffer and self.overlong_limit < self.overlong_buffer:
            raise ValueError(
                f"shaping.overlong_limit ({self.overlong_limit}) must be at least shaping.overlong_buffer "
                f"({self.overlong_buffer})"
            )


def shaped(
    streams: Streams, shaping: Shaping, *, gamma: float, moments: Moments, bootstraps: bool = False
) -> tuple[Streams, Moments]:
    """Applies the tools of a run, in the order of this file.

    Args:
      streams: of a batch, over all processes.
      shaping: the choices.
      gamma: discount per step, of the scheme.
      moments: of the returns of earlier batches, before scaling.
      bootstraps: whether a critic values the future of what was cut.

    Returns:
      streams with shaped rewards, and moments with this batch.
    """
    if shaping.limits_end:
        streams = limits_end(streams)
    if shaping.terminal_only:
        streams = terminal_only(streams)
    if shaping.process_norm != "none":
        streams = normalise_process(streams, shaping.process_norm)
    if shaping.overlong_buffer:
        streams = overlong(
            streams,
            limit=shaping.overlong_limit,
            buffer=shaping.overlong_buffer,
            factor=shaping.overlong_factor,
            unit=shaping.overlong_unit,
        )
    if shaping.potential:
        streams = with_potential(streams, weight=shaping.potential, gamma=gamma, bootstraps=bootstraps)
    moments = moments.seen(returns(streams, gamma))
    return (scaled(streams, moments.std) if shaping.scale_returns else streams), moments


def limits_end(streams: Streams) -> Streams:
    """Nothing follows where a trajectory was cut: V beyond its last step is 0.

    A critic that values the future of what was cut (the default) is right where limits only save time. Where success
    counts within them, nothing would tell a policy to come to an end: each cut is worth what the critic thinks of it,
    and that is worth more the more it thinks so.

    Source: Pardo et al., Time Limits in Reinforcement Learning, arXiv 1712.00378.
    """
    return dataclasses.replace(streams, cut=np.zeros_like(streams.cut))


def terminal_only(streams: Streams) -> Streams:
    """R_i on the last step, 0 on the others: what a scheme is left with where only the end is judged."""
    return with_rewards(streams, np.where(_last_step(streams), streams.outcome[streams.traj_of_step], 0))


def normalise_process(streams: Streams, over: str) -> Streams:
    """rₜ − pₜ + (pₜ − mean)/(std + 1e-6), p the process part.

    Mean and std (n − 1) are over the steps of the `group`, or of the `batch`. A lone step gets 0 for its process part,
    as do steps whose parts are all equal.

    Source: process supervision of DeepSeekMath, arXiv 2402.03300, section 4.1.3.
    """
    process = streams.process.astype(np.float64)
    unit = np.unique(streams.group, return_inverse=True)[1][streams.traj_of_step]
    unit = unit if over == "group" else np.zeros_like(unit)
    count = np.maximum(np.bincount(unit), 1)
    centred = process - (np.bincount(unit, process) / count)[unit]
    std = np.sqrt(np.bincount(unit, centred**2) / np.maximum(count - 1, 1))[unit]
    # Rounding of the mean is not a difference.
    normal = np.where(std > 1e-7 * np.abs(process).max(initial=0), centred / (std + 1e-6), 0)
    return with_rewards(streams, streams.rewards - process + normal)


def overlong(streams: Streams, *, limit: int, buffer: int, factor: float, unit: str) -> Streams:
    """rₜ − factor·clip((length − (limit − buffer))/buffer, 0, 1): nothing up to limit − buffer sampled tokens, then
    linear. A step pays for its own length; a trajectory for the length of all its responses, on its last step.

    Source: soft overlong punishment of DAPO, arXiv 2503.14476.
    """
    length = np.bincount(streams.token_step, streams.is_action, len(streams.rewards))
    if unit == "trajectory":
        whole = np.bincount(streams.traj_of_step, length, len(streams.outcome))
        length = np.where(_last_step(streams), whole[streams.traj_of_step], 0)
    return with_rewards(streams, streams.rewards - factor * np.clip((length - (limit - buffer)) / buffer, 0, 1))


def with_potential(streams: Streams, *, weight: float, gamma: float, bootstraps: bool) -> Streams:
    """rₜ + w·(γΦ(sₜ₊₁) − Φ(sₜ)), Φ = 0 beyond the last step.

    The best policies stay the best (the scheme must use the same γ): a return changes by −w·Φ(sₜ) alone. Where a
    trajectory was cut and a critic `bootstraps` what follows, Φ there is the state's: that critic learns shaped values.
    Without one what follows is worth 0, and so is its Φ; else where one is cut would be paid for.

    Source: Ng, Harada and Russell 1999.

    Raises:
      ValueError: the environment gives no potential.
    """
    over = _last_step(streams) & ~(streams.cut[streams.traj_of_step] & bootstraps)
    after = np.where(over, 0, streams.next_potential)
    if np.isnan(streams.potential).any() or np.isnan(after).any():
        raise ValueError(
            "shaping.potential needs the potential of every state, and some observations of this environment have "
            "none; set Observation.potential in the environment, or shaping.potential=0"
        )
    return with_rewards(streams, streams.rewards + weight * (gamma * after - streams.potential))


def scaled(streams: Streams, std: float) -> Streams:
    """rₜ / std, the rewards of tokens and of greedy rollouts too; std is of the returns so far, so that advantages keep
    their size as a policy improves. Rewards are not centred, which would change what is best."""
    streams = with_rewards(streams, streams.rewards / std)
    others = {name: (getattr(streams, name) / std).astype(np.float32) for name in ("token_rewards", "greedy_reward")}
    return dataclasses.replace(streams, **others)


def returns(streams: Streams, gamma: float) -> Float[np.ndarray, "steps"]:
    """Gₜ = rₜ + γGₜ₊₁ in float64, with the rewards of the step's tokens and without bootstrap."""
    reward = streams.rewards + np.bincount(streams.token_step, streams.token_rewards, len(streams.rewards))
    first = np.cumsum(streams.trajectory_steps) - streams.trajectory_steps
    out, after = np.zeros(len(reward)), np.zeros(len(first))
    for t in reversed(range(int(streams.trajectory_steps.max(initial=0)))):  # All trajectories at once.
        at = streams.trajectory_steps > t
        after[at] = out[first[at] + t] = reward[first[at] + t] + gamma * after[at]
    return out


def with_rewards(streams: Streams, rewards: np.ndarray) -> Streams:
    """Other step rewards, and the outcomes that follow from them."""
    outcome = np.bincount(streams.traj_of_step, rewards, len(streams.outcome))
    return dataclasses.replace(streams, rewards=rewards.astype(np.float32), outcome=outcome.astype(np.float32))


def _last_step(streams: Streams) -> np.ndarray:
    last = np.zeros(len(streams.rewards), bool)
    last[np.cumsum(streams.trajectory_steps)[streams.trajectory_steps > 0] - 1] = True
    return last
