"""Checks of a grid of runs before it starts, and a table of what it holds."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Sequence

import jax
import numpy as np
from rich.markup import escape
from rich.table import Table

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train.defaults import AUTO, BY_HARDWARE
from agentr1_jax.train.settings import RunConfig
from experiments.ablation.grid import Cell, summary
from experiments.checks import check_placement, check_task
from experiments.setup import Config, complete, make_task, read_section, read_settings


def check_apart(cells: Sequence[Cell]) -> str:
    """Check the config of every run as it would itself; return the kind of devices.

    The checks run in another process: this one must not hold the accelerator that the runs need.

    Raises:
      UserError: the first config that cannot work, with its arm and seed.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as apart:
        return apart.submit(check_all, [(cell.title, cell.config) for cell in cells]).result()


def check_all(runs: Sequence[tuple[str, Config]]) -> str:
    """See `check_apart`; a run is its title and its config."""
    for title, config in runs:
        try:
            settings = read_settings(complete(config, jax.devices()))
            check_placement(settings, jax.devices())
            check_task(settings, make_task(settings, ToolMetrics()))
        except UserError as error:
            raise UserError(f"arm {title}: {error}") from error
    return jax.default_backend()


def check_folders(cells: Sequence[Cell]) -> None:
    """Refuse folders with runs of another config; finished runs may have been moved since."""
    for cell in cells:
        if os.path.exists(os.path.join(cell.folder, "config.json")):
            may_differ = ("run_dir", "warm_start.init_from") if cell.is_finished else ("run_dir",)
            by_devices = BY_HARDWARE if read_section(cell.config, RunConfig).hardware == AUTO else ()
            try:
                resolved = configs.resolve(complete(cell.config))
                RunFolder(cell.folder).check_same_config(resolved, (*may_differ, *by_devices))
            except UserError as error:
                raise UserError(str(error).replace("--config.run_dir", "--out")) from error


def grid_table(warm_starts: Sequence[Cell], cells: Sequence[Cell], parallel: int) -> Table:
    """Return a table of arms, folders and finished runs, and how long the rest will take."""
    table = Table("arm", "seeds", "finished", "folder", "note", title="Grid", title_justify="left")
    for arm in dict.fromkeys(cell.arm for cell in (*warm_starts, *cells)):
        own = [cell for cell in (*warm_starts, *cells) if cell.arm == arm]
        seeds = ", ".join(str(cell.seed) for cell in own)
        done = f"{sum(cell.is_finished for cell in own)} of {len(own)}"
        table.add_row(*map(escape, (arm, seeds, done, os.path.dirname(own[0].folder), own[0].note)))
    for group, name in ((warm_starts, "warm starts"), (cells, "runs")):
        hours = hours_left(group, parallel)
        left = "unknown until one has finished" if hours is None else f"{hours:.2f}"
        table.add_row(f"{name}: hours left, {parallel} at once", "", "", "", left)
    return table


def hours_left(cells: Sequence[Cell], parallel: int) -> float | None:
    """Estimate the hours left from the finished runs; None without any, 0 where nothing is left."""
    seconds = [summary(cell)["seconds"] for cell in cells if cell.is_finished]
    left = len(cells) - len(seconds)
    if not left:
        return 0.0
    return left * float(np.mean(seconds)) / min(parallel, left) / 3600 if seconds else None
