"""What a run recorded: its trajectories as work, its engine's shape, the speeds and tool latencies it measured."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.rollout.lines import common_prefix
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.trajectory import Trajectory
from experiments import recordings
from experiments.pod.engine import Engine
from experiments.pod.model import Latency, Shape, Speeds, Work, draw_batch, lognormal_of
from experiments.sources import stored_config

TIMED = ("time/rollout", "time/decode", "time/decode_tokens", "time/learn", "rollout/occupancy")
"""Metrics without which a batch says nothing of speeds."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """The RL batches of a run.

    Attributes:
      folder: of the run.
      shape: of its engines.
      processes: that rolled out, each with an engine.
      batches: update -> its groups, trajectories in order of samples.
      metrics: update -> its record, where there is one.
    """

    folder: str
    shape: Shape
    processes: int
    batches: Mapping[int, Sequence[Sequence[Work]]]
    metrics: Mapping[int, Mapping[str, Any]]

    @property
    def groups(self) -> list[Sequence[Work]]:
        """All groups of all batches."""
        return [group for groups in self.batches.values() for group in groups]


def read_run(folder: str, slots: int | None = None, parking: int | None = None) -> Recording:
    """Reads a run folder.

    Args:
      folder: of the run.
      slots, parking: in place of its own.

    Raises:
      UserError: no run, no RL batch, a file that cannot be read.
    """
    c = stored_config(folder).rollout
    if c.fetch_lag:
        raise UserError(f"{folder}: rollout.fetch_lag is {c.fetch_lag}; only engines that look at once are simulated")
    shape = Shape(
        slots=c.slots if slots is None else slots,
        parking=c.parking if parking is None else parking,
        chunk=c.decode_chunk,
        leave_after=c.leave_after,
        prefill_width=c.prefill_width,
        prefill_rows=tuple(c.prefill_rows),
    )
    found = recordings.batches(folder)
    batches = {update: _groups(recordings.read(paths), shape.prefill_width) for update, paths in found.items()}
    if not any(batches.values()):
        raise UserError(f"{folder}: its RL batches hold no trajectory with a response")
    path = os.path.join(folder, "metrics.jsonl")
    # A record counts updates from 1, a file of trajectories from 0.
    records = [r for r in read_metrics(path) if r.get("phase") == "rl"] if files.exists(path) else []
    metrics = {r["update"] - 1: r for r in records if r["update"] - 1 in batches}
    return Recording(folder, shape, max(map(len, found.values())), batches, metrics)


def _groups(batch: Sequence[Trajectory], width: int) -> list[list[Work]]:
    """A batch as work, group by group; trajectories without a response are left out."""
    with_steps = [t for t in batch if t.steps and all(len(step.response_ids) for step in t.steps)]
    order = sorted(with_steps, key=lambda t: (t.group, t.sample))
    return [work_of(list(group), width) for _, group in itertools.groupby(order, key=lambda t: t.group)]


def work_of(group: Sequence[Trajectory], width: int) -> list[Work]:
    """The samples of a task row as work.

    Of a prompt's ids all but the last are prefilled, less what the line holds (the step before, without its last token)
    or what another sample of the group has had computed: samples often search for the same. As in `rollout.lines`,
    another line is copied only where that saves half a prefill row.
    """
    worth = max(width // 2, 1)
    prefill: list[list[int]] = [[] for _ in group]
    again: list[list[int]] = [[] for _ in group]
    for step in range(max(len(t.steps) for t in group)):
        before: list[np.ndarray] = []
        for i, t in enumerate(group):
            if step >= len(t.steps):
                continue
            ids = t.steps[step].prompt_ids[:-1]
            own = 0
            if step:
                last = t.steps[step - 1]
                own = common_prefix(np.concatenate([last.prompt_ids, last.response_ids])[:-1], ids)
            others = max((common_prefix(other, ids) for other in before), default=0)
            prefill[i].append(len(ids) - (others if others >= own + worth else own))
            again[i].append(len(ids) - (others if others >= worth else 0))
            before.append(ids)
    return [
        Work(
            response=tuple(len(step.response_ids) for step in t.steps),
            prefill=tuple(prefill[i]),
            again=tuple(again[i]),
            calls=tuple(len(step.tool_calls) for step in t.steps),
            tokens=len(t.steps[-1].prompt_ids) + len(t.steps[-1].response_ids),
        )
        for i, t in enumerate(group)
    ]


def measured_latency(run: Recording) -> Latency:
    """A lognormal through the medians over batches of the recorded median and 95th percentile; no call is timed alone.

    Raises:
      UserError: the run recorded no latencies.
    """
    ends = [(r["time/tool_p50"], r["time/tool_p95"]) for r in run.metrics.values() if "time/tool_p95" in r]
    if not ends:
        raise UserError(f"{run.folder}: no time/tool_* in metrics.jsonl; say --tool_latency='lognormal(1.0,0.8)'")
    p50, p95 = np.median(np.asarray(ends, np.float64), axis=0)
    return lognormal_of(float(p50), float(p95))


def measured_speeds(run: Recording) -> Speeds:
    """Speeds of the host that made a run, fitted to its batches; transfer and jitter are not in its metrics, and 0.

    `time/decode` is taken as step x iterations + slot x tokens + prefill_token x padded prompt tokens, with none of
    them negative, relative errors weighing alike: the host's look at a chunk waits for the prefill before it too. What
    else a rollout took is laid on its responses. The first batch, which compiles, is left out where there are others.

    Raises:
      UserError: the run recorded no times, or those of several hosts.
    """
    if run.processes > 1:
        raise UserError(f"{run.folder}: rolled out on {run.processes} processes; its times are those of the first only")
    updates = [update for update, r in run.metrics.items() if all(key in r for key in TIMED)]
    updates = updates[1:] if len(updates) > 1 else updates
    if not updates:
        raise UserError(f"{run.folder}: no times of RL batches in metrics.jsonl; give --step_seconds and the others")
    rows = [run.metrics[update] for update in updates]
    decode = np.asarray([r["time/decode"] for r in rows])
    parts = np.asarray([[iterations(r, run.shape), r["time/decode_tokens"], r["rollout/prefill_padded"]] for r in rows])
    step, slot, prefill_token = nonnegative_least_squares(parts / decode[:, None], np.ones(len(rows)))
    rest = sum(r["time/rollout"] for r in rows) - decode.sum()
    responses = sum(len(work.response) for u in updates for group in run.batches[u] for work in group)
    learned = sum(work.tokens for u in updates for group in run.batches[u] for work in group)
    return Speeds(
        step=float(step),
        slot=float(slot),
        prefill_token=float(prefill_token),
        response=max(float(rest / responses), 0.0),
        learner_token=sum(r["time/learn"] for r in rows) / learned,
    )


def iterations(record: Mapping[str, Any], shape: Shape) -> float:
    """Decode iterations of a recorded batch."""
    return float(record["time/decode_tokens"] / record["rollout/occupancy"] / shape.slots)


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x ≥ 0 that minimises ‖a x − b‖, for a handful of columns: the best over all sets of columns.

    Args:
      a: float64 [rows, columns].
      b: float64 [rows].
    """
    columns = a.shape[1]
    best, least = np.zeros(columns), math.inf
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(columns), k + 1) for k in range(columns)):
        x = np.zeros(columns)
        x[list(chosen)] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
        error = float(np.linalg.norm(a @ x - b))
        if np.all(x >= 0) and error < least * (1 - 1e-12):
            best, least = x, error
    return best


def replay(run: Recording, speeds: Speeds, latency: Latency, seed: int) -> list[dict[str, float]]:
    """Every recorded batch on one simulated host, in its own order, beside what was recorded of it.

    Returns:
      a record for each batch with metrics: of each quantity `recorded` and `simulated` values.
    """
    out = []
    for update, r in run.metrics.items():
        if not all(key in r for key in TIMED):
            continue
        # One group of all: `draw_batch` then only adds latencies.
        everything = [work for group in run.batches[update] for work in group]
        (jobs,) = draw_batch([everything], 1, latency, seed, update)
        engine = Engine(run.shape, speeds)
        engine.submit(jobs, 0)
        engine.finish(0)
        did = engine.counters
        pairs = {
            "decode iterations": (iterations(r, run.shape), did.iterations),
            "occupancy": (r["rollout/occupancy"], did.tokens / did.slot_steps),
            "prefill tokens": (r["rollout/prefill_tokens"], did.prefill_tokens),
            "with padding": (r["rollout/prefill_padded"], did.prefill_padded),
            "rollout seconds": (r["time/rollout"], engine.now),
            "update seconds": (r["time/learn"], speeds.learner_token * sum(job.work.tokens for job in jobs)),
        }
        out.append(
            {
                f"{name}, {kind}": float(x)
                for name, pair in pairs.items()
                for kind, x in zip(("recorded", "simulated"), pair, strict=True)
            }
        )
    return out
