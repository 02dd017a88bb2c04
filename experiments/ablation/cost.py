"""Contents and cost of a grid of runs, and checks before it starts."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np
from rich.table import Table

from agentr1_jax.agents.context import context_rule
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.run_folder import RunFolder
from experiments import checks, tasks
from experiments.ablation.grid import Cell, summary


def check_apart(cells: Sequence[ml_collections.ConfigDict]) -> str:
    """Check every run as it would check itself; return the kind of devices.

    The checks run in another process: this one must not hold the accelerator that the runs need.

    Raises:
      UserError: the first config that cannot work, with its folder.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as apart:
        return apart.submit(check_all, cells).result()


def check_all(cells: Sequence[ml_collections.ConfigDict]) -> str:
    """See `check_apart`."""
    for config in cells:
        try:
            checks.check(config)
            checks.check_task(config, tasks.make_task(config))
        except UserError as error:
            raise UserError(f"{config.run_dir}: {error}") from error
    return jax.default_backend()


def check_folders(cells: Sequence[Cell]) -> None:
    """Refuse folders with runs of another config; finished runs may have been moved since."""
    for cell in cells:
        if os.path.exists(os.path.join(cell.folder, "config.json")):
            may_differ = ("run_dir", "warm_start.init_from") if cell.finished else ("run_dir",)
            try:
                RunFolder(cell.folder).check_same_config(configs.resolve(cell.config), may_differ)
            except UserError as error:
                raise UserError(str(error).replace("--config.run_dir", "--out")) from error


def grid_table(warm_starts: Sequence[Cell], cells: Sequence[Cell]) -> Table:
    """Return a table of arms, folders and finished runs."""
    table = Table("arm", "seeds", "finished", "folder", "note", title="Grid", title_justify="left")
    for arm in dict.fromkeys(cell.arm for cell in (*warm_starts, *cells)):
        own = [cell for cell in (*warm_starts, *cells) if cell.arm == arm]
        seeds = ", ".join(str(cell.seed) for cell in own)
        done = f"{sum(cell.finished for cell in own)} of {len(own)}"
        table.add_row(arm, seeds, done, os.path.dirname(own[0].folder), own[0].note)
    return table


def cost_table(warm_starts: Sequence[Cell], cells: Sequence[Cell], parallel: int) -> Table:
    """Return a table of what the whole grid computes, and how long the rest will take."""
    table = Table("", "warm starts", "runs", title="Cost", title_justify="left")
    rows: dict[str, list[str]] = {}
    for group in (warm_starts, cells):
        costs = [cost(cell.config) for cell in group]
        rows.setdefault("number", []).append(str(len(group)))
        for i, name in enumerate(("updates", "trajectories", "tokens decoded, at most")):
            rows.setdefault(name, []).append(f"{sum(c[i] for c in costs):,}")
        left = hours_left(group, parallel)
        unknown = "unknown until one has finished"
        rows.setdefault(f"hours left, {parallel} at once", []).append(unknown if left is None else f"{left:.2f}")
    for name, columns in rows.items():
        table.add_row(name, *columns)
    return table


def cost(config: ml_collections.ConfigDict) -> tuple[int, int, int]:
    """Return (updates, trajectories, most tokens decoded) of a run from its start, evaluations included."""
    supervised = 0 if config.warm_start.init_from else config.pretrain.updates + config.warm_start.updates
    r, b, evaluation = config.rollout, config.budget, config.eval
    final = 4 if config.updates else 2  # Greedy and sampled, before and after RL.
    quick = (config.updates - 1) // evaluation.every if evaluation.every and config.updates else 0
    trained = config.updates * (r.groups + r.dynamic_sampling_groups) * r.samples
    trajectories = trained + final * evaluation.questions + quick * evaluation.quick_questions
    steps = b.max_steps + b.final_answer_step
    makes_summaries = context_rule(config.context.rule).makes_summaries
    summaries = (steps - 1) * config.context.summary_tokens if makes_summaries else 0
    tokens = min(steps * b.response_tokens + summaries, b.trajectory_tokens)
    return supervised + config.updates, trajectories, trajectories * tokens


def hours_left(cells: Sequence[Cell], parallel: int) -> float | None:
    """Estimate the hours left from the finished runs; None without any, 0 where nothing is left."""
    seconds = [summary(cell)["seconds"] for cell in cells if cell.finished]
    left = len(cells) - len(seconds)
    if not left:
        return 0.0
    return left * float(np.mean(seconds)) / min(parallel, left) / 3600 if seconds else None
