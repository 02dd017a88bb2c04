"""Figures of an evaluation from its scores: means with bootstrap intervals, pass@k, outcomes, paired differences.

The value of a question is the mean over its samples; failures of the infrastructure are left out. Questions are
resampled, never samples, since samples of one question are alike. As in `report.statistics`, a resample draws n - 1 of
n questions. All metrics are resampled together, in blocks: 12,000 questions take seconds and little memory.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.report.scores import Score
from agentr1_jax.report.statistics import DRAWS, LEVEL

ALL, MEAN = "all", "mean"
"""Names of the pool of all data sets, and of the mean over data sets."""
COMPARED = ("em", "f1", "recall", "all_gold")
BLOCK = 2_000_000
"""Questions drawn at once."""

Group = tuple[str, str, str]
"""Mode, split, data set."""
Values = Mapping[str, Mapping[str, float]]
"""Question -> metric -> value."""


def figures(scores: Sequence[Score], *, samples: int = 1, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """Compute all figures of an evaluation.

    Args:
      scores: scores of all trajectories.
      samples: number of samples of each question; with several there is a pass@k for every k up to it.
      draws: number of bootstrap resamples.
      seed: seed of the resampling.

    Returns:
      `groups`, a record for each mode, split and data set, and `differences`, one for each two modes and metric on the
      questions that both have; plain JSON. An interval is `{mean, low, high, n}`, n its number of questions; what
      nothing was measured of is absent.
    """
    by_group: dict[Group, list[Score]] = collections.defaultdict(list)
    for score in scores:
        by_group[score.mode, score.split, score.dataset].append(score)
    values: dict[Group, Values] = {group: question_values(members, samples) for group, members in by_group.items()}
    pooled = sorted({(mode, split) for mode, split, _ in by_group})
    groups, differences = [], []
    for mode, split in pooled:
        datasets = sorted(d for m, s, d in by_group if (m, s) == (mode, split))
        for dataset in datasets:
            group = (mode, split, dataset)
            groups.append(_group(group, by_group[group], [values[group]], draws, seed))
        if len(datasets) > 1:
            members = [score for d in datasets for score in by_group[mode, split, d]]
            strata = [values[mode, split, d] for d in datasets]
            groups.append(_group((mode, split, ALL), members, [_pool(strata)], draws, seed))
            groups.append(_group((mode, split, MEAN), members, strata, draws, seed))
    for split in sorted({split for _, split in pooled}):
        modes = list(dict.fromkeys(m for m, s in pooled if s == split))
        for ours, theirs in itertools.combinations(modes, 2):
            sides = [{d: values[m, split, d] for m_, s, d in by_group if (m_, s) == (m, split)} for m in (ours, theirs)]
            for dataset, strata in _common(*sides).items():
                for metric, interval in intervals(strata, draws, seed).items():
                    record = {"ours": ours, "theirs": theirs, "split": split, "dataset": dataset, "metric": metric}
                    differences.append(record | interval)
    return {"groups": groups, "differences": differences}


def question_values(scores: Sequence[Score], samples: int = 1) -> dict[str, dict[str, float]]:
    """Return `dataset/id` of a question -> mean of each metric over its samples, and `pass@k` for each possible k.

    A question without any sample is left out.
    """
    by_question: dict[str, list[Score]] = collections.defaultdict(list)
    for score in scores:
        if score.metrics:
            by_question[f"{score.dataset}/{score.question}"].append(score)
    out = {}
    for question, members in sorted(by_question.items()):
        names = dict.fromkeys(name for score in members for name in score.metrics)
        found = {name: [s.metrics[name] for s in members if name in s.metrics] for name in names}
        out[question] = {name: math.fsum(xs) / len(xs) for name, xs in found.items()}
        if samples > 1:
            correct = sum(score.metrics["em"] == 1.0 for score in members)
            for k in range(1, len(members) + 1):
                out[question][f"pass@{k}"] = pass_at_k(len(members), correct, k)
    return out


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the chance that one of k samples drawn without replacement is correct: 1 − C(n−c, k) / C(n, k).

    Unbiased for the chance that one of k samples is correct (Chen et al. 2021, "Evaluating large language models
    trained on code", equation 1).

    Raises:
      ValueError: there are fewer than k samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples; k must be from 1 to the number of samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def intervals(strata: Sequence[Values], draws: int = DRAWS, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return metric -> mean over strata of means over questions, with its percentile bootstrap interval.

    Args:
      strata: the questions of each; they are resampled within it. A question that lacks a metric counts for the others.
      draws: resamples.
      seed: of the resampling.

    Returns:
      metrics in order of first appearance; one that some stratum lacks altogether is left out.
    """
    names = list(dict.fromkeys(name for stratum in strata for values in stratum.values() for name in values))
    matrices = [np.array([[v.get(name, np.nan) for name in names] for v in s.values()]) for s in strata if s]
    if len(matrices) < len(strata) or not strata:
        return {}
    rng = np.random.default_rng(seed)
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
    """Return means of resampled questions.

    Args:
      values: float [questions, metrics]; NaN where a question lacks a metric.
      rng: draws the questions.
      draws: resamples.

    Returns:
      float64 [draws, metrics]; NaN where no question with that metric was drawn.
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


def pair_differences(ours: Values, theirs: Values) -> dict[str, dict[str, float]]:
    """Return question -> difference of each compared metric, for questions and metrics that both sides have."""
    return {
        question: {m: ours[question][m] - other[m] for m in COMPARED if m in ours[question] and m in other}
        for question, other in theirs.items()
        if question in ours
    }


def _group(group: Group, members: Sequence[Score], strata: Sequence[Values], draws: int, seed: int) -> dict[str, Any]:
    """Return the record of a mode, split and data set."""
    mode, split, dataset = group
    outcomes = collections.Counter(score.outcome for score in members)
    asked = {(score.dataset, score.question) for score in members}
    answered = {(score.dataset, score.question) for score in members if score.metrics}
    out: dict[str, Any] = {
        "mode": mode,
        "split": split,
        "dataset": dataset,
        "questions": len(asked),
        "trajectories": len(members),
        "failed_questions": len(asked - answered),
        "failed_trajectories": sum(not score.metrics for score in members),
        "figures": intervals(strata, draws, seed),
        "outcomes": {name: {"count": count, "share": count / len(members)} for name, count in sorted(outcomes.items())},
        "kinds": {},
    }
    if dataset != MEAN:
        for kind in sorted({score.kind for score in members} - {""}):
            of_kind = [score for score in members if score.kind == kind]
            found = intervals([question_values(of_kind)], draws, seed)
            out["kinds"][kind] = {name: found[name] for name in COMPARED if name in found}
    return out


def _pool(strata: Sequence[Values]) -> Values:
    """Pool the questions of several data sets."""
    return {question: values for stratum in strata for question, values in stratum.items()}


def _common(ours: Mapping[str, Values], theirs: Mapping[str, Values]) -> dict[str, list[Values]]:
    """Return data set -> strata of the paired differences, with `ALL` and `MEAN` where there are several."""
    pairs: dict[str, Values] = {d: pair_differences(ours[d], theirs[d]) for d in sorted(ours.keys() & theirs.keys())}
    pairs = {dataset: pair for dataset, pair in pairs.items() if pair}
    out: dict[str, list[Values]] = {dataset: [pair] for dataset, pair in pairs.items()}
    if len(pairs) > 1:
        out |= {ALL: [_pool(list(pairs.values()))], MEAN: list(pairs.values())}
    return out
