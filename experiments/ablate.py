"""Run a grid of trainings and compare them: credit schemes, other changes to the config, several seeds.

    python -m experiments.ablate --config=configs/quickstart.py --schemes=grpo,step_gae,gigpo --seeds=0,1,2
    python -m experiments.ablate --config=... --schemes='gigpo(norm=mean_std_norm),grpo+loss.clip=dual' --dry_run

The same command again resumes the grid, and where all runs are finished only draws anew. An arm of `--schemes` is

    SCHEME                          a credit scheme, with the config's settings where it knows them
    SCHEME(setting=value, ...)      with hyper-parameters of its own (`credit.args`)
    SCHEME+key=value+key=value      with changes to any other keys of the config; after SCHEME or SCHEME(...)

`--loss_mask=true,false` and `--advantage_mask=true,false` run each arm with each value of `learner.loss_mask` and
`learner.advantage_mask`. A scheme that needs a critic gets `critic=shared_trunk` where the config has none, and an arm
without a mask gets rows with room for what it reads more; the table says so. Every run is checked before any starts.

All arms of a seed start RL from one warm start, which is made first, by the config without the changes of any arm; arms
with a context rule of their own from one under that rule.
Several machines that share OUT make a grid together, each with its `--share=0/3`, `1/3`, `2/3` of the runs, by hand or
by a launcher (docs/launchers.md). A run waits for a warm start that another machine makes; the table is whole when all
have ended.

Folders: OUT/<arm>/seed<k>, OUT/warm_start/seed<k>; log and config of a run lie beside its folder. OUT gets
ablation.png, ablation.md and ablation.csv. Ctrl-C and SIGTERM have all runs save and leave.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import compile_cache
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.train.settings import RunConfig
from experiments.ablation import checks, grid, jobs
from experiments.ablation.comparison import compare
from experiments.setup import change_config, read_section, run_main

CONFIG = configs.define_config_flag()
SCHEMES = flags.DEFINE_string("schemes", None, "arms of the grid, separated by commas", required=True)
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "each arm is run with each of them")
OUT = flags.DEFINE_string("out", None, "folder of the grid; the config's run_dir with _ablation unless given")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "runs at once; unless given as many as there are cores, and one on accelerators", lower_bound=1
)
LOSS_MASK = flags.DEFINE_list("loss_mask", [], "values of learner.loss_mask to run each arm with")
ADVANTAGE_MASK = flags.DEFINE_list("advantage_mask", [], "values of learner.advantage_mask to run each arm with")
METRIC = flags.DEFINE_string("metric", "em", "metric of the evaluations that is compared")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "print the grid and the hours left, and leave")
CHECK = flags.DEFINE_string("check", "", "check all runs for PROCESSESxDEVICES elsewhere, e.g. v5e:1x8, and leave")
SHARE = flags.DEFINE_string("share", "0/1", "K/N: make every Nth run from the Kth, where N machines share the folder")
WIDTH = 150
"""Columns of the tables where the output is no terminal."""


def main(argv: Sequence[str]) -> int:
    """Make the grid, check it, run it, compare the results."""
    del argv
    config, console, share = CONFIG.value, Console(), grid.parse_share(SHARE.value)
    if not console.is_terminal:
        console = Console(width=WIDTH)
    arms = grid.parse_arms(SCHEMES.value)
    for key, values in (("learner.loss_mask", LOSS_MASK.value), ("learner.advantage_mask", ADVANTAGE_MASK.value)):
        if values:
            arms = grid.cross(arms, key, values, dict(configs.flatten(configs.resolve(config)))[key])
    run = read_section(config, RunConfig)
    out = OUT.value or f"{run.run_dir.rstrip('/')}_ablation"
    if files.is_remote(out):
        raise UserError(f"{out}: the logs of a grid are appended to, which a bucket cannot; choose a local --out")
    cache = compile_cache.cache_folder(run.compilation_cache, out)  # One for all arms.
    config = change_config(config, {"compilation_cache": cache})
    warm_starts, cells = grid.make_grid(config, arms, grid.parse_seeds(SEEDS.value), out)
    if CHECK.value:
        from experiments import preflight

        preflight.show([cell.config for cell in (*warm_starts, *cells)], CHECK.value)
        return 0
    todo = [cell for cell in (*warm_starts, *cells) if not cell.is_finished]
    backend = checks.check_apart([cell.config for cell in todo]) if todo else ""
    checks.check_folders([*warm_starts, *cells])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parallel = min(PARALLEL.value or (cores if backend == "cpu" else 1), max(len(cells), 1))
    if DRY_RUN.value:
        console.print(checks.grid_table(warm_starts, cells, parallel))
        return 0

    with StopRequest() as stop:
        failed = jobs.run_all([*warm_starts[share], *cells[share]], parallel=parallel, stop=stop, console=console)
    for cell, fault in failed.items():
        console.print(f"{jobs.title(cell)} failed: {fault}", markup=False, highlight=False, soft_wrap=True)
    compare(out, cells, METRIC.value, os.path.basename(run.run_dir), console)
    if stop.requested:
        console.print(f"stopped; the same command goes on with {out}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
