"""Results of the finished runs of a grid, from their folders, as tables, pictures, CSV and JSON."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentr1_jax.errors import UserError
from agentr1_jax.report import ablation as report
from agentr1_jax.report.ablation import Ablation, ArmResult, Curve, RunResult
from agentr1_jax.report.curves import series
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder, read_trajectories
from agentr1_jax.train.settings import Settings
from experiments.ablation import jobs
from experiments.ablation.grid import Cell, summary

SECONDS_FOR_OTHERS = 60.0
"""Longest wait for another command that writes the same results."""
FILES = {
    "ablation.md": report.write_markdown,
    "ablation.csv": report.write_scores,
    "curves.csv": report.write_curves,
    "ablation.png": report.plot_ablation,
}
COSTS = ("batch/dynamic_sampling_groups", "time/rollout", "time/learn")
"""Metrics of an RL batch that make the samples and seconds of a learning curve."""


def compare(out: str, cells: Sequence[Cell], metric: str, title: str, console: Console) -> Ablation | None:
    """Write and print the results of the finished runs; return them, None if there are none.

    Commands that share the folder write it one after the other.
    """
    arms = [
        ArmResult(
            arm,
            {cell.seed: run_result(cell, metric) for cell in cells if cell.arm == arm and cell.is_finished},
            missing=[cell.seed for cell in cells if cell.arm == arm and not cell.is_finished],
            note=next(cell.note for cell in cells if cell.arm == arm),
        )
        for arm in dict.fromkeys(cell.arm for cell in cells)
    ]
    if not any(arm.runs for arm in arms):
        console.print("no run has finished yet: no table", markup=False)
        return None
    results = Ablation(title, metric, arms, remarks(cells, metric))
    paths = {os.path.join(out, name): write for name, write in FILES.items()}
    own = jobs.claim(os.path.join(out, "ablation"), SECONDS_FOR_OTHERS)
    with own or contextlib.nullcontext():
        for path, write in paths.items():
            write(path, results)
    console.print(results_table(results))
    for text in report.describe(results):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Look at {', '.join(paths)}", markup=False, soft_wrap=True)
    return results


def results_table(results: Ablation) -> Table:
    """Return the table of ablation.md for the terminal."""
    rows = report.table_rows(results)
    table = Table(*rows[0], title=f"{results.metric} over n seeds", title_justify="left")
    for number, row in enumerate(rows, 1):
        table.add_row(*map(Text, row.values()), end_section=number % len(results.arms) == 0)
    return table


def remarks(cells: Sequence[Cell], metric: str) -> list[str]:
    """Return remarks that a reader of the table needs."""
    done = [summary(cell) for cell in cells if cell.is_finished]
    out = ["Seconds of a run are those without its warm start, beside the other runs of the grid."]
    if metric == "em" and all({"em_before_sampled", "em_before_greedy"} <= set(s) for s in done):
        greedy, sampled = (np.mean([s[key] for s in done]) for key in ("em_before_greedy", "em_before_sampled"))
        out.append(f"Before RL: {greedy:.3f} greedy, {sampled:.3f} sampled.")
    missing = [cell.title for cell in cells if not cell.is_finished]
    if missing:
        out.append(f"**Not finished, and not in the table: {', '.join(missing)}.**")
    return out


def run_result(cell: Cell, metric: str) -> RunResult:
    """Read the result of a finished run.

    Raises:
      UserError: its evaluations have no such metric, or a file of it is missing or damaged.
    """
    records = read_metrics(os.path.join(cell.folder, "metrics.jsonl"))
    return RunResult(
        greedy=scores(cell.folder, "eval_after_greedy", metric),
        sampled=scores(cell.folder, "eval_after_sampled", metric),
        curve=learning_curve(records, cell.settings, metric),
        seconds=summary(cell)["seconds"],
    )


def learning_curve(records: Iterable[Mapping[str, Any]], settings: Settings, metric: str) -> Curve:
    """Return the greedy evaluations of a run over its updates, sampled trajectories and seconds.

    Samples are all that RL has sampled: also groups that dynamic sampling added, and greedy rollouts of a scheme.
    Seconds are those of rollouts and learning, without evaluations and checkpoints; where rollouts run ahead, the time
    of a batch is that from one batch to the next.
    """
    records, c = list(records), settings.rollout
    updates, values = series(records, "eval", f"eval/{metric}")
    figures = {name: dict(zip(*series(records, "rl", name), strict=True)) for name in COSTS}
    samples, seconds = np.zeros(len(updates)), np.zeros(len(updates))
    for i, update in enumerate(updates):
        extra, rollout, learn = (sum(x for number, x in figures[name].items() if number <= update) for name in COSTS)
        samples[i] = update * c.groups * (c.samples + settings.scheme.needs_greedy) + extra * c.samples
        seconds[i] = rollout + learn * (not c.staleness)
    return Curve(updates, samples, seconds, values)


def scores(folder: str, name: str, metric: str) -> dict[str, float]:
    """Read question id -> metric of one evaluation, without failures of the infrastructure.

    Raises:
      UserError: there is no such evaluation, or none of its trajectories has the metric.
    """
    values, known = dict[str, float](), set[str]()
    for trajectory in read_trajectories(RunFolder(folder).trajectory_files().get(name, ())):
        known |= trajectory.metrics.keys()
        if metric in trajectory.metrics:
            values[str(trajectory.row.get("id", trajectory.uid))] = float(trajectory.metrics[metric])
    if not values:
        has = f"it has {', '.join(sorted(known))}" if known else "the evaluation is missing or empty"
        raise UserError(f"{folder}/trajectories/{name}: no metric {metric!r}; {has}")
    return values
