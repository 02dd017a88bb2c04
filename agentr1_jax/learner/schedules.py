"""Learning rates over a run, as shares of their peak: a linear rise times a decay. Plain numbers of the host."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def rate(kind: str, update: int, total_updates: int, *, warmup: int, final_share: float) -> float:
    """Share of the peak rate at an update.

    Args:
      kind: `constant`, or a fall over all updates, `linear` or by a `cosine`.
      update: from 0.
      total_updates: of the run.
      warmup: updates of the linear rise; the first takes 1 / warmup, so that none is lost.
      final_share: where the fall ends.

    Raises:
      ValueError: unknown kind.
    """
    return min(1.0, (update + 1) / max(warmup, 1)) * decay(kind, update / max(total_updates, 1), final_share)


def rate_by_progress(kind: str, done: float, *, warmup: float, final_share: float, first: float = 1e-3) -> float:
    """`rate` where only the share of the run that is done is known, as in runs of a given time.

    Args:
      kind, final_share: as in `rate`.
      done: share of the run, 0 to 1; it ends at the final share beyond that.
      warmup: share of the run over which the rate rises.
      first: share of the run that its first update stands for.

    Raises:
      ValueError: unknown kind.
    """
    rise = min(1.0, (done + first) / warmup) if warmup else 1.0
    return rise * decay(kind, done, final_share)


def decay(kind: str, done: float, final_share: float) -> float:
    """From 1 at the start to `final_share` at the end; `constant` stays 1.

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
