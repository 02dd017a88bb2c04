"""How far a run has come, and what it writes as it goes: metrics, checkpoints with pending rollouts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.errors import UserError
from agentr1_jax.learner.update import LearnerState
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.runtime.metrics import MetricsWriter
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.trajectory import Trajectory

FORMAT = 3
"""Of the checkpoints; grows where an earlier version could not go on with them."""
TOTALS = ("time/decode_tokens", "time/rollout", "time/learner_tokens", "time/learn")
"""Metrics that are summed over RL batches, for the rates of the summary."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come: the record that is stored with every checkpoint.

    Attributes:
      phase: `pretraining`, `warm_start`, `rl` or `done`: the phase under way, or the one that comes next.
      update: train steps of that phase that are done.
      prompt_index: index of the task row of the next group.
      evaluated: RL updates after which the last evaluation during RL was made.
      first_checkpoint: number of the checkpoint at update 0 of the phase.
      metrics_index: index of the next record of metrics.jsonl.
      kl_coef: present coefficient of an adaptive KL; None for the config's.
      return_statistics: running statistics of the step returns of all RL batches, as (n, mean, squares).
      seconds: time spent by all starts of the run.
      warm_start_seconds: time spent until the end of the warm start; 0 without one.
      results: figures of the summary.
      totals: sums of `TOTALS`, and `recompiles`.
      format: version of this record and of the checkpoint beside it.
    """

    phase: str = "pretraining"
    update: int = 0
    prompt_index: int = 0
    evaluated: int = 0
    first_checkpoint: int = 0
    metrics_index: int = 0
    kl_coef: float | None = None
    return_statistics: Sequence[float] = RunningMeanStd()
    seconds: float = 0.0
    warm_start_seconds: float = 0.0
    results: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    totals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    @property
    def checkpoint(self) -> int:
        """Number of the checkpoint of this state."""
        return self.first_checkpoint + self.update

    def replace(self, **changes: Any) -> Progress:
        """Return a copy with other values of some fields."""
        return dataclasses.replace(self, **changes)

    def enter(self, phase: str) -> Progress:
        """Return the start of the next phase."""
        return self.replace(phase=phase, update=0, first_checkpoint=self.checkpoint + 1)

    def after(self, prompts_used: int, return_statistics: RunningMeanStd) -> Progress:
        """Return the progress after one more train step."""
        return self.replace(
            update=self.update + 1,
            prompt_index=self.prompt_index + prompts_used,
            return_statistics=return_statistics,
        )

    def kl_coef_or(self, configured: float) -> float:
        """Return the present coefficient of the KL in the reward."""
        return configured if self.kl_coef is None else self.kl_coef

    def add_results(self, **figures: float) -> Progress:
        """Return a copy with further figures of the summary."""
        return self.replace(results={**self.results, **figures})

    def add_totals(self, metrics: Mapping[str, float], recompiles: int = 0) -> Progress:
        """Return a copy with the metrics of one more RL batch added to the totals."""
        totals = {key: self.totals.get(key, 0.0) + metrics.get(key, 0.0) for key in TOTALS}
        return self.replace(totals={**totals, "recompiles": self.totals.get("recompiles", 0) + recompiles})


def read_progress(record: Mapping[str, Any], where: str) -> Progress:
    """Read the record of a checkpoint of the run folder `where`. Raises UserError if another version wrote it."""
    stored = record.get("format", 1)
    if stored != FORMAT:
        raise UserError(
            f"{where}: its checkpoints have format {stored}, this version reads {FORMAT}; go on with the version that "
            "wrote them, or choose another --config.run_dir"
        )
    return Progress(**record)


class Stopped(Exception):
    """The run was asked to stop; its state is saved."""


@dataclasses.dataclass(frozen=True)
class RunLogger:
    """Writers and watchers of a run.

    Attributes:
      metrics: writer of metrics.jsonl.
      checkpoints: of the learner's state.
      stop: whether somebody asked the run to stop.
      compiles: counts compiled programs.
      started: `time.perf_counter()` at the start, less the time spent by earlier starts.
    """

    folder: RunFolder
    metrics: MetricsWriter
    checkpoints: Checkpoints
    stop: StopRequest
    compiles: CompileCounter
    started: float

    @property
    def seconds(self) -> float:
        """Time spent so far, over all starts."""
        return time.perf_counter() - self.started

    def log(self, progress: Progress, metrics: Mapping[str, Any], phase: str = "") -> None:
        """Write one record of metrics."""
        self.metrics.write({"phase": phase or progress.phase, "update": progress.update, **metrics})

    def save(self, state: LearnerState, progress: Progress, pending: Sequence[Trajectory] = ()) -> None:
        """Write a checkpoint from which the run goes on as if nothing had happened.

        `pending` has this process's trajectories that are sampled and not trained yet.
        """
        record = progress.replace(metrics_index=self.metrics.next_index, seconds=self.seconds)
        self.metrics.sync()
        self.folder.write_pending(progress.checkpoint, pending)
        self.checkpoints.save(progress.checkpoint, state, dataclasses.asdict(record))
        self.folder.remove_pending_except([progress.checkpoint, *self.checkpoints.numbers()])

    def count_recompiles(self, before: int) -> int:
        """Return the number of programs compiled since a count; warns if there are any, for there should be none."""
        recompiles = self.compiles.count - before
        if recompiles:
            logging.warning("%d programs were compiled after warm-up", recompiles)
        return recompiles
