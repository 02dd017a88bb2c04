"""Results of the finished runs of a grid, from their folders, as tables and a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from agentr1_jax.errors import UserError
from agentr1_jax.report.ablation import ArmResult, RunResult, plot_ablation, table_rows, write_csv, write_markdown
from agentr1_jax.report.curves import series
from agentr1_jax.report.statistics import Interval
from agentr1_jax.report.tables import format_value
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder, read_trajectories
from experiments.ablation import jobs
from experiments.ablation.grid import Cell, summary


def compare(out: str, cells: Sequence[Cell], metric: str, title: str, console: Console) -> None:
    """Write and print the results of the finished runs."""
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
        return
    paths = [os.path.join(out, f"ablation.{kind}") for kind in ("md", "csv", "png")]
    write_markdown(paths[0], arms, title=title, metric=metric, remarks=remarks(cells, metric))
    write_csv(paths[1], arms)
    plot_ablation(paths[2], arms, title=title, metric=metric)
    console.print(results_table(arms, metric))
    console.print(f"Look at {', '.join(paths)}", markup=False, soft_wrap=True)


def results_table(arms: Sequence[ArmResult], metric: str) -> Table:
    """Return the table of ablation.md for the terminal."""
    rows = table_rows(arms)
    table = Table(*rows[0], title=f"{metric}, mean over n seeds [95 %]", title_justify="left")
    for row in rows:
        cells = [
            f"{v.mean:.3f}\n[{v.low:.3f}, {v.high:.3f}]" if isinstance(v, Interval) else format_value(v)
            for v in row.values()
        ]
        table.add_row(*cells)
    return table


def remarks(cells: Sequence[Cell], metric: str) -> list[str]:
    """Return remarks that a reader of the table needs."""
    done = [summary(cell) for cell in cells if cell.is_finished]
    out = ["Seconds are those of a run without its warm start, beside the other runs of the grid."]
    if metric == "em" and all({"em_before_sampled", "em_before_greedy"} <= set(s) for s in done):
        greedy, sampled = (np.mean([s[key] for s in done]) for key in ("em_before_greedy", "em_before_sampled"))
        out.append(f"Before RL: {greedy:.3f} greedy, {sampled:.3f} sampled.")
    missing = [jobs.title(cell) for cell in cells if not cell.is_finished]
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
        curve=series(records, "eval", f"eval/{metric}"),
        seconds=summary(cell)["seconds"],
    )


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
