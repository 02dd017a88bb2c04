"""Arms of an ablation side by side: scores over seeds, paired differences to the first arm, learning curves."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from agentr1_jax import files
from agentr1_jax.report.drawing import BLUE, GREEN, ORANGE, PURPLE, new_figure, save, tidy
from agentr1_jax.report.statistics import (
    area_under,
    holm,
    interquartile_mean,
    paired_t,
    probability_of_improvement,
    stratified_bootstrap,
    t_interval,
    t_quantile,
)
from agentr1_jax.report.tables import format_value, markdown_table, write_csv

COLORS = (BLUE, ORANGE, GREEN, PURPLE, "#c2334d", "#0e9aa7", "#8a6d3b", "#e377c2")
STYLES = ("-", "--", ":", "-.")
KINDS = ("greedy", "sampled")
SCORES = (*KINDS, "area")
FEW_SEEDS = 5
"""Below it the reader is told what an interval can mean, curves have no bands and IQMs no intervals."""
CURVE_COLUMNS = ("update", "samples", "seconds", "value")
HOW = """\
`greedy` and `sampled`: {metric} over {questions} questions at the end, `sampled` at temperature 1. `area`: mean height
of the greedy learning curve over the first {samples} sampled trajectories, to which all runs came. Brackets hold 95 %
intervals: of means and differences Student's over n seeds, for the questions that were asked; of IQMs (the mean of the
middle half of the seeds, where there are at least four) a percentile bootstrap, which for few seeds is too narrow.
Differences to `{first}` are paired by seed, over the questions that both runs answered. p: two-sided paired t test;
p, Holm: corrected for all {tests} tests of this table. P(better): share of all pairs of a run of the arm and a run of
`{first}` in which the arm is better, ties as half.
"""
FEW = """\
**Fewer than five seeds ran in an arm.** Student's interval assumes that scores of seeds are normally distributed, which
so few cannot show, and it is wide: t·s/√n to each side, with t = {quantiles}. One seed says nothing of others: it has
no interval (–).
"""


class Curve(NamedTuple):
    """Greedy evaluations of a run, in order: RL updates, trajectories sampled and seconds spent until then, scores."""

    updates: Int[np.ndarray, "evaluations"]
    samples: Float[np.ndarray, "evaluations"]
    seconds: Float[np.ndarray, "evaluations"]
    values: Float[np.ndarray, "evaluations"]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    Attributes:
      greedy, sampled: question id -> score in the final evaluations.
      curve: of its learning.
      seconds: of its reinforcement learning and evaluations.
    """

    greedy: Mapping[str, float]
    sampled: Mapping[str, float]
    curve: Curve
    seconds: float

    def score(self, kind: str, end: float, questions: Collection[str] | None = None) -> float:
        """Return the mean final score of a kind, over some questions or all, or the `area` until `end` samples.

        NaN where there is none.
        """
        if kind == "area":
            return area_until(self.curve, end)
        values = [x for question, x in getattr(self, kind).items() if questions is None or question in questions]
        return float(np.mean(values)) if values else math.nan


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """The runs of one arm: the finished ones by seed, the seeds without a finished run, and a remark for the reader."""

    name: str
    runs: Mapping[int, RunResult]
    missing: Sequence[int] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Scores of one kind of an arm, and their differences to the first arm; NaN for what is not known.

    Attributes:
      arm: name of the arm.
      score: `greedy`, `sampled` or `area`.
      n: seeds with a score.
      mean, low, high: mean over seeds and its Student interval.
      iqm, iqm_low, iqm_high: interquartile mean and its bootstrap interval.
      pairs: seeds that the first arm has, too; 0 for the first arm.
      difference, difference_low, difference_high: mean of arm − first over these, and its Student interval.
      p, p_holm: of the paired t test, alone and corrected for all tests.
      better: probability that a run of the arm is better than a run of the first arm.
    """

    arm: str
    score: str
    n: int = 0
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    iqm: float = math.nan
    iqm_low: float = math.nan
    iqm_high: float = math.nan
    pairs: int = 0
    difference: float = math.nan
    difference_low: float = math.nan
    difference_high: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan
    better: float = math.nan


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Results of an ablation.

    Attributes:
      title: heading of its page and picture.
      metric: that is compared.
      arms: of which at least one has a finished run; differences are to the first one.
      remarks: paragraphs for the reader.
    """

    title: str
    metric: str
    arms: Sequence[ArmResult]
    remarks: Sequence[str] = ()

    @functools.cached_property
    def samples(self) -> float:
        """Sampled trajectories to which the learning curves of all runs come; 0 without any curve."""
        curves = [run.curve for arm in self.arms for run in arm.runs.values()]
        return min((float(curve.samples[-1]) for curve in curves if len(curve.samples)), default=0.0)

    @functools.cached_property
    def comparisons(self) -> Sequence[Comparison]:
        """Comparisons of all scores of all arms, score by score; their p values are corrected for all of them."""
        found = [_compare(arm, self.arms[0], score, self.samples) for score in SCORES for arm in self.arms]
        corrected = holm(np.asarray([one.p for one in found], np.float64))
        return [dataclasses.replace(one, p_holm=float(p)) for one, p in zip(found, corrected, strict=True)]


def area_until(curve: Curve, end: float) -> float:
    """Return the mean height of a learning curve over the samples until `end`, where it is interpolated."""
    if not len(curve.values):
        return math.nan
    before = curve.samples < end
    x = np.append(curve.samples[before], end)
    return float(area_under(x, np.append(curve.values[before], np.interp(end, curve.samples, curve.values))))


def _compare(arm: ArmResult, first: ArmResult, score: str, end: float) -> Comparison:
    own, base = ([run.score(score, end) for run in each.runs.values()] for each in (arm, first))
    x, y = (np.asarray([value for value in values if not math.isnan(value)], np.float64) for values in (own, base))
    figures: dict[str, Any] = {"n": len(x)}
    if len(x):
        figures |= dict(zip(("mean", "low", "high"), map(float, t_interval(x)), strict=True))
    if len(x) >= 4:
        figures["iqm"] = float(interquartile_mean(x))
    if len(x) >= FEW_SEEDS:
        low, high = stratified_bootstrap(x[None], lambda drawn: interquartile_mean(drawn, (-2, -1)))
        figures |= {"iqm_low": float(low), "iqm_high": float(high)}
    pairs = list(_pairs(arm, first, score, end)) if arm is not first else []
    if pairs:
        names = ("difference", "difference_low", "difference_high", "p")
        figures |= dict(zip(names, map(float, paired_t(*np.asarray(pairs).T)), strict=True))
    if arm is not first and min(len(x), len(y)) > 1:
        figures["better"] = float(probability_of_improvement(x, y))
    return Comparison(arm.name, score, pairs=len(pairs), **figures)


def _pairs(arm: ArmResult, first: ArmResult, kind: str, end: float) -> Iterator[tuple[float, float]]:
    """Yield the scores of both arms for each seed that both have, over the questions that both runs answered."""
    for seed in sorted(arm.runs.keys() & first.runs.keys()):
        ours, theirs = arm.runs[seed], first.runs[seed]
        common = None if kind == "area" else getattr(ours, kind).keys() & getattr(theirs, kind).keys()
        both = ours.score(kind, end, common), theirs.score(kind, end, common)
        if not any(map(math.isnan, both)):
            yield both


def table_rows(results: Ablation) -> list[dict[str, str]]:
    """Return a row of texts for each comparison."""
    return [
        {
            "score": one.score,
            "arm": one.arm,
            "n": str(one.n),
            "mean [95 %]": _interval(one.mean, one.low, one.high),
            "IQM [95 %]": _interval(one.iqm, one.iqm_low, one.iqm_high),
            "− first [95 %]": _interval(one.difference, one.difference_low, one.difference_high),
            "p": _p_value(one.p),
            "p, Holm": _p_value(one.p_holm),
            "P(better)": "–" if math.isnan(one.better) else f"{one.better:.2f}",
        }
        for one in results.comparisons
    ]


def arm_rows(results: Ablation) -> list[dict[str, Any]]:
    """Return a row for each arm: finished seeds, samples and seconds of a run, remarks."""
    rows = []
    for arm in results.arms:
        runs = list(arm.runs.values())
        missing = f"seeds {', '.join(map(str, arm.missing))} missing" if arm.missing else ""
        rows.append(
            {
                "arm": arm.name,
                "seeds": ", ".join(map(str, arm.runs)),
                "samples": _mean([run.curve.samples[-1] for run in runs if len(run.curve.samples)]),
                "seconds": _mean([run.seconds for run in runs]),
                "note": "; ".join(part for part in (arm.note, missing) if part),
            }
        )
    return rows


def seed_rows(results: Ablation) -> list[dict[str, Any]]:
    """Return a row for each arm: the mean final score of each seed, greedy / sampled."""
    seeds = sorted({seed for arm in results.arms for seed in (*arm.runs, *arm.missing)})
    rows = []
    for arm in results.arms:
        row: dict[str, Any] = {"arm": arm.name, **dict.fromkeys(f"seed {seed}" for seed in seeds)}
        for seed, run in arm.runs.items():
            row[f"seed {seed}"] = " / ".join(f"{run.score(kind, 0):.3f}" for kind in KINDS)
        rows.append(row)
    return rows


def describe(results: Ablation) -> list[str]:
    """Return paragraphs on how the table is made, on what intervals of few seeds can mean, and the remarks."""
    runs = [run for arm in results.arms for run in arm.runs.values()]
    how = HOW.format(
        metric=results.metric,
        questions=" or ".join(map(str, sorted({len(run.greedy) for run in runs}))),
        samples=f"{results.samples:,.0f}",
        first=results.arms[0].name,
        tests=sum(not math.isnan(one.p) for one in results.comparisons),
    )
    quantiles = ", ".join(f"{t_quantile(n):.1f} ({n} seeds)" for n in (2, 3, 4, 5, 10))
    few = [FEW.format(quantiles=quantiles)] if any(0 < len(arm.runs) < FEW_SEEDS for arm in results.arms) else []
    return [" ".join(text.split()) for text in (how, *few, *results.remarks)]


def write_markdown(path: files.PathLike, results: Ablation) -> None:
    """Write the tables and how to read them."""
    picture = f"{os.path.splitext(os.path.basename(path))[0]}.png"
    parts = [f"# {results.title}", markdown_table(table_rows(results)), *describe(results)]
    parts += [f"![learning curves]({picture})", markdown_table(arm_rows(results))]
    parts += ["Each seed, greedy / sampled:", markdown_table(seed_rows(results))]
    with files.atomic_write(path) as out:
        out.write("\n\n".join(part.strip() for part in parts) + "\n")


def write_scores(path: files.PathLike, results: Ablation) -> None:
    """Write scores, samples and seconds of all runs as CSV, a row for each arm, seed and score."""
    rows = [
        {"arm": arm.name, "seed": seed, "score": name, "value": value}
        for arm in results.arms
        for seed, run in arm.runs.items()
        for name, value in _run_figures(run, results.samples).items()
    ]
    write_csv(path, rows)


def write_curves(path: files.PathLike, results: Ablation) -> None:
    """Write the learning curves of all runs as CSV, a row for each greedy evaluation."""
    rows = [
        {"arm": arm.name, "seed": seed, **dict(zip(CURVE_COLUMNS, point, strict=True))}
        for arm in results.arms
        for seed, run in arm.runs.items()
        for point in zip(*(column.tolist() for column in run.curve), strict=True)
    ]
    write_csv(path, rows)


def make_document(results: Ablation) -> dict[str, Any]:
    """Return all results as plain JSON; None for what is not known."""

    def run_record(seed: int, run: RunResult) -> dict[str, Any]:
        curve = {name: column.tolist() for name, column in zip(CURVE_COLUMNS, run.curve, strict=True)}
        return {"seed": seed, **_run_figures(run, results.samples), "curve": curve}

    arms = [
        {
            "arm": arm.name,
            "note": arm.note,
            "missing_seeds": list(arm.missing),
            "scores": {
                one.score: {key: x for key, x in dataclasses.asdict(one).items() if key not in ("arm", "score")}
                for one in results.comparisons
                if one.arm == arm.name
            },
            "runs": [run_record(seed, run) for seed, run in arm.runs.items()],
        }
        for arm in results.arms
    ]
    document = {
        "title": results.title,
        "metric": results.metric,
        "first": results.arms[0].name,
        "area_samples": results.samples,
        "remarks": describe(results),
        "arms": arms,
    }
    out: dict[str, Any] = _plain(document)
    return out


def plot_ablation(path: files.PathLike, results: Ablation) -> None:
    """Draw each arm's greedy evaluations over sampled trajectories, and over seconds: means over its seeds.

    Around the mean of five or more seeds lies Student's 95 % interval; fewer seeds are drawn one by one. A point of a
    mean lies at the mean of its seeds' samples or seconds. Seeds whose curves have other updates than the rest (a run
    that was changed) count where all have a point.
    """
    figure = new_figure(13.0, 4.6, results.title)
    panels = figure.subplots(1, 2, sharey=True)
    sides: Sequence[tuple[str, str, Callable[[Curve], np.ndarray]]] = (
        (f"{results.metric}, greedy: mean over seeds", "sampled trajectories", lambda curve: curve.samples),
        ("band: 95 % interval of five or more seeds", "seconds of rollouts and learning", lambda curve: curve.seconds),
    )
    for axes, (heading, label, x) in zip(panels, sides, strict=True):
        for i, arm in enumerate(results.arms):
            _draw_arm(axes, arm, x, COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, min_n_ticks=1))
        tidy(axes, title=heading, x_label=label)
    if panels[1].lines:
        panels[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)
    save(figure, path)


def _draw_arm(axes: Axes, arm: ArmResult, x: Callable[[Curve], np.ndarray], color: str, style: str) -> None:
    curves = [run.curve for run in arm.runs.values() if len(run.curve.updates)]
    updates = sorted(set.intersection(*(set(curve.updates.tolist()) for curve in curves))) if curves else []
    if not updates:
        return
    at = [np.isin(curve.updates, updates) for curve in curves]
    place = np.mean([x(curve)[here] for curve, here in zip(curves, at, strict=True)], axis=0)
    mean, low, high = t_interval(np.stack([c.values[here] for c, here in zip(curves, at, strict=True)]), axis=0)
    label = f"{arm.name}, n = {len(curves)}"
    axes.plot(place, mean, color=color, ls=style, lw=1.8, marker="o", ms=3, label=label)
    if len(curves) >= FEW_SEEDS:
        axes.fill_between(place, low, high, color=color, alpha=0.13, lw=0)
    elif len(curves) > 1:
        for curve in curves:
            axes.plot(x(curve), curve.values, color=color, ls=style, lw=0.7, alpha=0.45)


def _run_figures(run: RunResult, end: float) -> dict[str, float]:
    """Return the scores, samples and seconds of a run."""
    samples = float(run.curve.samples[-1]) if len(run.curve.samples) else math.nan
    return {**{kind: run.score(kind, end) for kind in SCORES}, "samples": samples, "seconds": run.seconds}


def _interval(mean: float, low: float, high: float) -> str:
    """Return a mean with its interval; a dash stands for one that there is not."""
    if math.isnan(mean):
        return "–"
    if math.isnan(low):
        return f"{mean:.3f} –"
    # All seeds have the same score, which shows no spread and no lack of it.
    return f"{mean:.3f} (all alike)" if low == high else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _p_value(p: float) -> str:
    return "–" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "<0.001"


def _mean(values: Sequence[float]) -> str:
    return format_value(round(float(np.mean(values)))) if values else "–"


def _plain(value: Any) -> Any:
    """Return nested lists and dicts with None in place of NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
