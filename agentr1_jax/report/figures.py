"""Figures of an evaluation: the score of each trajectory, means with bootstrap intervals, pass@k, paired differences.

The value of a question is the mean over its samples; failures of the infrastructure are left out. Questions are
resampled, never samples, since samples of one question are alike. As in `report.statistics`, a resample draws n - 1 of
n questions. All metrics are resampled together, in blocks: 12,000 questions take seconds and little memory.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.report.statistics import DRAWS, LEVEL
from agentr1_jax.trajectory import POLICIES, Trajectory
from agentr1_jax.trajectory_io import CORRUPT

ALL, MEAN = "all", "mean"
"""Names of the pool of all data sets, and of the mean over data sets."""
COMPARED = ("em", "f1", "recall", "all_gold")
BLOCK = 2_000_000
"""Questions drawn at once."""

Group = tuple[str, str, str]
"""Mode, split, data set."""
Values = Mapping[str, Mapping[str, float]]
"""Question -> metric -> value."""


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


def score(trajectory: Trajectory) -> Score:
    """Score a trajectory whose `row` holds `mode, split, dataset, id`, and where known `kind` and `gold_ids`.

    A metric that the environment did not compute, since the policy was too slow, is 0.
    """
    row, measured = trajectory.row, trajectory.metrics
    metrics = {}
    if POLICIES[trajectory.outcome].training != "drop":  # Else the infrastructure ended it.
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


def write_scores(path: str, scores: Iterable[Score]) -> None:
    """Write gzipped JSONL, which appears whole."""
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


def figures(scores: Sequence[Score], *, samples: int = 1, draws: int = DRAWS) -> dict[str, Any]:
    """Compute all figures of an evaluation; with several samples of a question also pass@k for every k.

    Returns:
      `groups`, a record for each mode, split and data set, and `differences`, one for each two modes and metric on the
      questions that both have; plain JSON. An interval is `{mean, low, high, n}`, n its number of questions; what
      nothing was measured of is absent.
    """
    by_group: dict[Group, list[Score]] = collections.defaultdict(list)
    for each in scores:
        by_group[each.mode, each.split, each.dataset].append(each)
    values: dict[Group, Values] = {group: question_values(members, samples) for group, members in by_group.items()}
    pooled = sorted({(mode, split) for mode, split, _ in by_group})
    groups, differences = [], []
    for mode, split in pooled:
        datasets = sorted(d for m, s, d in by_group if (m, s) == (mode, split))
        for dataset in datasets:
            group = (mode, split, dataset)
            groups.append(_summarize(group, by_group[group], [values[group]], draws))
        if len(datasets) > 1:
            members = [each for d in datasets for each in by_group[mode, split, d]]
            strata = [values[mode, split, d] for d in datasets]
            groups.append(_summarize((mode, split, ALL), members, [_pool(strata)], draws))
            groups.append(_summarize((mode, split, MEAN), members, strata, draws))
    for split in sorted({split for _, split in pooled}):
        modes = [m for m, s in pooled if s == split]
        for ours, theirs in itertools.combinations(modes, 2):
            sides = [{d: values[m, s, d] for m, s, d in by_group if (m, s) == (mode, split)} for mode in (ours, theirs)]
            for dataset, strata in _common(*sides).items():
                for metric, interval in intervals(strata, draws).items():
                    record = {"ours": ours, "theirs": theirs, "split": split, "dataset": dataset, "metric": metric}
                    differences.append(record | interval)
    return {"groups": groups, "differences": differences}


def question_values(scores: Sequence[Score], samples: int = 1) -> dict[str, dict[str, float]]:
    """Return `dataset/id` of a question -> mean of each metric over its samples, and `pass@k` for each possible k.

    A question without any sample is left out.
    """
    by_question: dict[str, list[Score]] = collections.defaultdict(list)
    for each in scores:
        if each.metrics:
            by_question[f"{each.dataset}/{each.question}"].append(each)
    out = {}
    for question, members in sorted(by_question.items()):
        names = dict.fromkeys(name for each in members for name in each.metrics)
        found = {name: [each.metrics[name] for each in members if name in each.metrics] for name in names}
        out[question] = {name: math.fsum(xs) / len(xs) for name, xs in found.items()}
        if samples > 1:
            correct = sum(each.metrics["em"] == 1.0 for each in members)
            for k in range(1, len(members) + 1):
                out[question][f"pass@{k}"] = pass_at_k(len(members), correct, k)
    return out


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the chance that one of k samples drawn without replacement is correct: 1 − C(n−c, k) / C(n, k).

    Unbiased for the chance that one of k samples is correct (Chen et al. 2021, "Evaluating large language models
    trained on code", equation 1).
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def intervals(strata: Sequence[Values], draws: int = DRAWS) -> dict[str, dict[str, Any]]:
    """Return metric -> mean over strata of means over questions, with its percentile bootstrap interval.

    Questions are resampled within their stratum; one that lacks a metric counts for the others. A metric that some
    stratum lacks altogether is left out.
    """
    names = list(dict.fromkeys(name for stratum in strata for values in stratum.values() for name in values))
    if not strata or not all(strata):
        return {}
    matrices = [np.array([[v.get(name, np.nan) for name in names] for v in s.values()]) for s in strata]
    rng = np.random.default_rng(0)
    resampled = np.mean([resampled_means(matrix, rng, draws) for matrix in matrices], axis=0)
    counts = [(~np.isnan(matrix)).sum(axis=0) for matrix in matrices]
    out = {}
    for i, name in enumerate(names):
        if min(count[i] for count in counts) == 0:
            continue
        low, high = np.nanquantile(resampled[:, i], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        mean = float(np.mean([np.nanmean(matrix[:, i]) for matrix in matrices]))
        out[name] = {"mean": mean, "low": float(low), "high": float(high), "n": int(sum(c[i] for c in counts))}
    return out


def resampled_means(values: np.ndarray, rng: np.random.Generator, draws: int) -> np.ndarray:
    """Return means of resampled questions: [questions, metrics] -> [draws, metrics].

    NaN is a metric that a question lacks, or of which no question was drawn.
    """
    count = len(values)
    known = ~np.isnan(values)
    sums = np.where(known, values, 0.0)
    block = max(BLOCK // count, 1)
    out = []
    for start in range(0, draws, block):
        rows = min(block, draws - start)
        drawn = rng.integers(count, size=(rows, max(count - 1, 1))) + np.arange(rows)[:, None] * count
        weights = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count).astype(np.float64)
        weight = weights @ known
        out.append(np.divide(weights @ sums, weight, out=np.full(weight.shape, np.nan), where=weight > 0))
    return np.concatenate(out)


def _summarize(group: Group, members: Sequence[Score], strata: Sequence[Values], draws: int) -> dict[str, Any]:
    """Return the record of a mode, split and data set."""
    mode, split, dataset = group
    outcomes = collections.Counter(each.outcome for each in members)
    asked = {(each.dataset, each.question) for each in members}
    answered = {(each.dataset, each.question) for each in members if each.metrics}
    kinds = {}
    if dataset != MEAN:
        for kind in sorted({each.kind for each in members} - {""}):
            found = intervals([question_values([each for each in members if each.kind == kind])], draws)
            kinds[kind] = {name: found[name] for name in COMPARED if name in found}
    return {
        "mode": mode,
        "split": split,
        "dataset": dataset,
        "questions": len(asked),
        "trajectories": len(members),
        "failed_questions": len(asked - answered),
        "failed_trajectories": sum(not each.metrics for each in members),
        "figures": intervals(strata, draws),
        "outcomes": {name: {"count": count, "share": count / len(members)} for name, count in sorted(outcomes.items())},
        "kinds": kinds,
    }


def _pool(strata: Iterable[Values]) -> Values:
    """Pool the questions of several data sets."""
    return {question: values for stratum in strata for question, values in stratum.items()}


def _common(ours: Mapping[str, Values], theirs: Mapping[str, Values]) -> dict[str, list[Values]]:
    """Return data set -> strata of the paired differences, with `ALL` and `MEAN` where there are several."""
    pairs: dict[str, Values] = {}
    for dataset in sorted(ours.keys() & theirs.keys()):
        one, other = ours[dataset], theirs[dataset]
        if shared := [question for question in other if question in one]:
            pairs[dataset] = {
                q: {m: one[q][m] - other[q][m] for m in COMPARED if m in one[q] and m in other[q]} for q in shared
            }
    out = {dataset: [pair] for dataset, pair in pairs.items()}
    if len(pairs) > 1:
        out |= {ALL: [_pool(pairs.values())], MEAN: list(pairs.values())}
    return out
