"""Arms of an ablation side by side: learning curves, a table with intervals, paired differences to the first arm."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from agentr1_jax import files
from agentr1_jax.report.drawing import BLUE, GREEN, ORANGE, PURPLE, new_figure, save, tidy
from agentr1_jax.report.statistics import Interval, area_under, mean_interval, paired_difference, two_stage_interval
from agentr1_jax.report.tables import format_value, markdown_table
from agentr1_jax.report.tables import write_csv as write_rows

COLORS = (BLUE, ORANGE, GREEN, PURPLE, "#c2334d", "#0e9aa7", "#8a6d3b", "#e377c2")
STYLES = ("-", "--", ":", "-.")
KINDS = ("greedy", "sampled")
HOW = """\
{metric} over {questions} questions at the end, greedy and sampled at temperature 1; n is the number of seeds. Brackets
hold 95 % bootstrap intervals in two stages: seeds are drawn, then questions within them{shared}. Area: mean height of
the greedy learning curve over the updates, its interval over seeds alone. Differences to `{first}` are paired by seed
and question. With fewer than five seeds an interval over seeds is hardly more than their range and holds the truth in
50 % (n = 2), 75 % (3), 82 % (4) of all cases, not in 95 %; with one seed it speaks of questions only.
"""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    Attributes:
      greedy, sampled: question id -> score in the final evaluations.
      curve: (updates [N] ascending, scores [N]) of the greedy evaluations.
      seconds: of its reinforcement learning and evaluations.
    """

    greedy: Mapping[str, float]
    sampled: Mapping[str, float]
    curve: tuple[np.ndarray, np.ndarray]
    seconds: float


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """The runs of one arm: the finished ones by seed, the seeds without a finished run, and a remark for the reader."""

    name: str
    runs: Mapping[int, RunResult]
    missing: Sequence[int] = ()
    note: str = ""


def final_scores(arm: ArmResult, kind: str) -> Interval:
    """Mean final score of an arm with its two-stage interval; `kind` is `greedy` or `sampled`."""
    values, same = _match_questions([getattr(run, kind) for run in arm.runs.values()])
    return two_stage_interval(values, same_questions=same)


def difference(arm: ArmResult, base: ArmResult, kind: str) -> Interval | None:
    """Arm minus base over the seeds and questions that both have; None where they share none."""
    ours, theirs = [], []
    for seed in [seed for seed in arm.runs if seed in base.runs]:
        a, b = getattr(arm.runs[seed], kind), getattr(base.runs[seed], kind)
        if common := sorted(a.keys() & b.keys()):
            ours.append({question: a[question] for question in common})
            theirs.append({question: b[question] for question in common})
    if not ours:
        return None
    (a, same), (b, _) = _match_questions(ours), _match_questions(theirs)
    return paired_difference(a, b, same_questions=same)


def table_rows(arms: Sequence[ArmResult]) -> list[dict[str, Any]]:
    """One row an arm, in order; an Interval stands for mean and interval, None for what is not known."""
    rows = []
    for arm in arms:
        row: dict[str, Any] = {"arm": arm.name, "n": len(arm.runs)}
        areas = np.asarray([area_under(*run.curve) for run in arm.runs.values() if len(run.curve[0])])
        for kind in KINDS:
            row[kind] = final_scores(arm, kind) if arm.runs else None
        row["area"] = mean_interval(areas) if len(areas) else None
        for kind in KINDS:
            row[f"{kind} − first"] = None if arm is arms[0] else difference(arm, arms[0], kind)
        row["seconds"] = round(float(np.mean([run.seconds for run in arm.runs.values()])), 1) if arm.runs else None
        missing = f"seeds {', '.join(map(str, arm.missing))} missing" if arm.missing else ""
        row["note"] = "; ".join(part for part in (arm.note, missing) if part)
        rows.append(row)
    return rows


def seed_rows(arms: Sequence[ArmResult]) -> list[dict[str, Any]]:
    """One row an arm: the mean final score of each seed, greedy / sampled."""
    seeds = sorted({seed for arm in arms for seed in (*arm.runs, *arm.missing)})
    rows = []
    for arm in arms:
        row: dict[str, Any] = {"arm": arm.name, **dict.fromkeys(f"seed {seed}" for seed in seeds)}
        for seed, run in arm.runs.items():
            row[f"seed {seed}"] = " / ".join(f"{np.mean(list(getattr(run, kind).values())):.3f}" for kind in KINDS)
        rows.append(row)
    return rows


def write_markdown(
    path: files.PathLike, arms: Sequence[ArmResult], *, title: str, metric: str, remarks: Sequence[str] = ()
) -> None:
    """Write the tables and how to read them; `remarks` are paragraphs of their own."""
    runs = [run for arm in arms for run in arm.runs.values()]
    same = len({frozenset(run.greedy) for run in runs}) == 1
    how = HOW.format(
        metric=metric,
        questions=" or ".join(map(str, sorted({len(run.greedy) for run in runs}))),
        first=arms[0].name,
        shared=", the same draw for all, since all seeds are asked the same" if same else "",
    )
    rows = [{key: _cell(value) for key, value in row.items()} for row in table_rows(arms)]
    picture = f"{os.path.splitext(os.path.basename(path))[0]}.png"
    parts = [f"# {title}", markdown_table(rows), how, *remarks, f"![learning curves]({picture})"]
    parts += ["Each seed, greedy / sampled:", markdown_table(seed_rows(arms))]
    with files.atomic_write(path) as out:
        out.write("\n\n".join(part.strip() for part in parts) + "\n")


def write_csv(path: files.PathLike, arms: Sequence[ArmResult]) -> None:
    """Write the table with a column for each mean, lower and upper end."""
    rows = []
    for row in table_rows(arms):
        flat: dict[str, Any] = {}
        for key, value in row.items():
            name = key.replace(" − first", "_minus_first")
            if name in (*KINDS, "area") or name.endswith("_minus_first"):
                ends = value or Interval(*(float("nan"),) * 3)
                flat |= {name: ends.mean, f"{name}_low": ends.low, f"{name}_high": ends.high}
            else:
                flat[name] = value
        rows.append(flat)
    write_rows(path, rows)


def plot_ablation(path: files.PathLike, arms: Sequence[ArmResult], *, title: str, metric: str) -> None:
    """Draw each arm's greedy evaluations over RL updates: the mean over its seeds, in a band from lowest to highest.

    Seeds whose curves have other updates than the rest (a run that was changed) count where all have a point.
    """
    figure = new_figure(8.5, 4.6, title)
    axes = figure.add_subplot()
    for i, arm in enumerate(arms):
        curves = [dict(zip(*run.curve, strict=True)) for run in arm.runs.values()]
        updates = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if not updates:
            continue
        heights = np.asarray([[curve[update] for update in updates] for curve in curves])
        color, style = COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)]
        label = f"{arm.name}, n = {len(curves)}"
        axes.plot(updates, heights.mean(axis=0), color=color, ls=style, lw=1.8, marker="o", ms=3, label=label)
        axes.fill_between(updates, heights.min(axis=0), heights.max(axis=0), color=color, alpha=0.13, lw=0)
    if axes.lines:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    tidy(axes, title=f"{metric}, greedy: mean over seeds, band from lowest to highest", x_label="RL update")
    save(figure, path)


def _match_questions(by_seed: Sequence[Mapping[str, float]]) -> tuple[list[np.ndarray], bool]:
    """Scores of each seed in the order of question ids, and whether all seeds have the same questions.

    Where seeds share almost all questions (one was lost to a failed tool), those that all have are taken.
    """
    common = set.intersection(*(set(scores) for scores in by_seed))
    same = 2 * len(common) > max(len(scores) for scores in by_seed)
    asked = [sorted(common if same else scores) for scores in by_seed]
    values = [[scores[q] for q in questions] for scores, questions in zip(by_seed, asked, strict=True)]
    return [np.asarray(scores, np.float64) for scores in values], same


def _cell(value: Any) -> Any:
    if isinstance(value, Interval):
        return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
    return format_value(value) if value != "" else ""
