"""Learning rates over a run: a linear rise times a decay, as plain numbers of the host.

Optax's schedules compute in float32 on the device, and hold one rate for all parts of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from agentr1_jax.learner.config import SCHEDULES, OptimizerConfig, Schedule


def learning_rates(config: OptimizerConfig, update: int, total_updates: int, parts: Iterable[str]) -> dict[str, float]:
    """Return the learning rate of each part of the parameters in an update of RL.

    Args:
      config: peak rates and their schedule; the policy's rate is 0 during `critic_warmup`.
      update: index of the update, from 0.
      total_updates: updates of the run.
      parts: `decoder`, `value`, `critic`.
    """
    done, total = update - config.critic_warmup, total_updates - config.critic_warmup
    share = 0.0
    if done >= 0:
        share = rate(config.schedule, done, total, warmup=config.warmup, final_share=config.final_share)
    return {part: config.lr * share if part == "decoder" else config.value_lr for part in parts}


def rate(kind: Schedule, update: int, total_updates: int, *, warmup: int, final_share: float) -> float:
    """Return the share of the peak rate at an update.

    Args:
      kind: `constant`, or a decay over all updates, `linear` or `cosine`.
      update: index of the update, from 0.
      total_updates: updates of the run.
      warmup: updates of the linear rise; the first has the rate 1 / warmup, so that none is lost.
      final_share: share at the end of the decay.

    Raises:
      ValueError: unknown kind.
    """
    return min(1.0, (update + 1) / max(warmup, 1)) * decay(kind, update / max(total_updates, 1), final_share)


def rate_by_progress(kind: Schedule, done: float, *, warmup: float, final_share: float, first: float = 1e-3) -> float:
    """Return `rate` where only the finished share of the run is known, as in runs of a given time.

    Args:
      kind, final_share: as in `rate`.
      done: finished share of the run, 0 to 1; beyond 1 the rate stays at the final share.
      warmup: share of the run over which the rate rises.
      first: share of the run that its first update stands for.

    Raises:
      ValueError: unknown kind.
    """
    rise = min(1.0, (done + first) / warmup) if warmup else 1.0
    return rise * decay(kind, done, final_share)


def decay(kind: Schedule, done: float, final_share: float) -> float:
    """Return a factor that falls from 1 at the start to `final_share` at the end; `constant` stays 1.

    Raises:
      ValueError: unknown kind.
    """
    done = min(done, 1.0)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1 + (final_share - 1) * done
    if kind == "cosine":
        return (1 + final_share) / 2 + (1 - final_share) / 2 * math.cos(math.pi * done)
    raise ValueError(f"unknown schedule {kind!r}; choose one of {', '.join(SCHEDULES)}")
