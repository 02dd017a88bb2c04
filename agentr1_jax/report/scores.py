"""Scores of the trajectories of an evaluation: the few numbers that figures are made of."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.trajectory import POLICIES, Trajectory
from agentr1_jax.trajectory_io import CORRUPT


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Score of one trajectory.

    Attributes:
      mode, split, dataset, kind: mode of the evaluation, split, data set and kind of question.
      question: id of the row.
      sample: index of the sample of its question.
      outcome: outcome of the trajectory.
      metrics: `em, f1, steps, tool_calls, prompt_tokens, response_tokens`, and `recall, all_gold` where gold passages
        are known; empty where the infrastructure failed.
    """

    mode: str
    split: str
    dataset: str
    kind: str
    question: str
    sample: int
    outcome: str
    metrics: Mapping[str, float]


def is_infrastructure_failure(trajectory: Trajectory) -> bool:
    """Return True if the infrastructure ended it; a mistake of the policy is a wrong answer instead."""
    return POLICIES[trajectory.outcome].training == "drop"


def score(trajectory: Trajectory) -> Score:
    """Score a trajectory whose `row` holds `mode, split, dataset, id`, and where known `kind` and `gold_ids`.

    A metric that the environment did not compute, since the policy was too slow, is 0.
    """
    row, measured = trajectory.row, trajectory.metrics
    metrics = {}
    if not is_infrastructure_failure(trajectory):
        metrics = {
            "em": measured.get("em", 0.0),
            "f1": measured.get("f1", 0.0),
            "steps": float(len(trajectory.steps)),
            "tool_calls": float(sum(len(step.tool_calls) for step in trajectory.steps)),
            "prompt_tokens": float(sum(len(step.prompt_ids) for step in trajectory.steps)),
            "response_tokens": float(sum(len(step.response_ids) for step in trajectory.steps)),
        }
        if row.get("gold_ids"):
            recall = measured.get("gold_recall", 0.0)
            metrics |= {"recall": recall, "all_gold": float(recall == 1.0)}
    return Score(
        mode=row["mode"],
        split=row["split"],
        dataset=row["dataset"],
        kind=str(row.get("kind", "")),
        question=str(row["id"]),
        sample=trajectory.sample,
        outcome=str(trajectory.outcome),
        metrics=metrics,
    )


class Gallery:
    """Collect the first few trajectories of each mode and verdict (right, wrong, failed)."""

    def __init__(self, of_each: int) -> None:
        self.shown: list[Trajectory] = []
        self._of_each = of_each
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def passing(self, trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
        """Yield the same trajectories, and keep some of them."""
        for trajectory in trajectories:
            place = (trajectory.row["mode"], verdict(trajectory))
            if self._counts[place] < self._of_each:
                self._counts[place] += 1
                self.shown.append(trajectory)
            yield trajectory


def verdict(trajectory: Trajectory) -> str:
    """Return `right`, `wrong` or `failed`."""
    if is_infrastructure_failure(trajectory):
        return "failed"
    return "right" if trajectory.metrics.get("em") == 1.0 else "wrong"


def write_scores(path: str, scores: Iterable[Score]) -> None:
    """Write gzipped JSONL, renamed into place."""
    with files.atomic_write(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as out:
        for each in scores:
            out.write(json.dumps(dataclasses.asdict(each)).encode() + b"\n")


def read_scores(folder: str) -> list[Score]:
    """Read the scores of a finished evaluation. Raise UserError if there are none, or they are damaged."""
    path = os.path.join(folder, "scores.jsonl.gz")
    if not files.is_file(path):
        raise UserError(f"{folder}: no finished evaluation (it has no scores.jsonl.gz); run experiments.evaluate first")
    out: list[Score] = []
    try:
        with files.open_bytes(path) as raw, gzip.open(raw, "rt", encoding="utf-8") as lines:
            for line in lines:
                out.append(Score(**json.loads(line)))
    except CORRUPT as error:
        raise UserError(f"{path}, line {len(out) + 1}: not a score ({error}); delete it and evaluate again") from error
    return out
