"""How far a run has come: the record that is stored with every checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.errors import UserError

FORMAT = 3
"""Of the checkpoints; grows where an earlier version could not go on with them."""
TOTALS = ("time/decode_tokens", "time/rollout", "time/learner_tokens", "time/learn")
"""Metrics that are summed over RL batches, for the rates of the summary."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come.

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
      warm_start_seconds: time spent until the end of the warm start.
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

    def enter(self, phase: str) -> Progress:
        """Return the start of the next phase."""
        return dataclasses.replace(self, phase=phase, update=0, first_checkpoint=self.checkpoint + 1)

    def after(self, prompts_used: int, return_statistics: RunningMeanStd) -> Progress:
        """Return the progress after one more train step."""
        return dataclasses.replace(
            self,
            update=self.update + 1,
            prompt_index=self.prompt_index + prompts_used,
            return_statistics=return_statistics,
        )

    def kl_coef_or(self, configured: float) -> float:
        """Return the present coefficient of the KL in the reward."""
        return configured if self.kl_coef is None else self.kl_coef

    def replace(self, **changes: Any) -> Progress:
        """Return a copy with other values of some fields."""
        return dataclasses.replace(self, **changes)

    def add_results(self, **figures: float) -> Progress:
        """Return a copy with further figures of the summary."""
        return dataclasses.replace(self, results={**self.results, **figures})

    def add_totals(self, metrics: Mapping[str, float], recompiles: int = 0) -> Progress:
        """Return a copy with the metrics of one more RL batch added to the totals."""
        totals = {key: self.totals.get(key, 0.0) + metrics.get(key, 0.0) for key in TOTALS}
        totals["recompiles"] = self.totals.get("recompiles", 0) + recompiles
        return dataclasses.replace(self, totals=totals)


def read_progress(record: Mapping[str, Any], where: str) -> Progress:
    """Read the record of a checkpoint.

    Raises:
      UserError: another version wrote it in the run folder `where`.
    """
    stored = record.get("format", 1)
    if stored > FORMAT:
        raise UserError(
            f"{where}: its checkpoints have format {stored}, this version knows {FORMAT}; go on with the newer "
            "version, or choose another --config.run_dir"
        )
    if stored < FORMAT:
        raise UserError(
            f"{where}: its checkpoints have format {stored} of version 0.1.0, which this version does not read; go on "
            "with that version (commit 41ce720), or choose another --config.run_dir"
        )
    return Progress(**record)
