"""Run a grid of trainings and compare them: any keys of the config as arms, several seeds.

    python -m experiments.ablate --config=configs/quickstart.py --schemes=grpo,step_gae,gigpo --seeds=0,1,2,3,4
    python -m experiments.ablate --config=... --arms=credit.name=grpo,step_gae --arms=learner.loss_mask=true,false
    python -m experiments.ablate --config=... --arms=my_arms.py --dry_run

The same command again resumes the grid, and where all runs are finished only draws anew. Several `--arms` make their
product: each combination is an arm. One of them is

    KEY=VALUE,VALUE            an arm for each value of a key of the config; commas in brackets belong to a value
    KEY=VALUE+KEY=VALUE,...    with changes to further keys in that arm
    credit=SCHEME(SETTING=VALUE),...    credit schemes with arguments of their own: `--schemes=...` is short for this
    FILE.py                    arms that its function `get_arms(config)` yields: (label, {"key": value}),
                               (label, changed config), or changed configs alone

The first arm is the one that all others are compared with. Arguments of the config's credit scheme stay where the
scheme of an arm knows them. A scheme that needs a critic gets `critic=shared_trunk` where the config has none, and an
arm without a mask gets rows with room for what it reads more; the table says so. Every run is checked before any
starts. Arms cannot change seeds, folders and evaluations.

All arms of a seed start RL from one warm start, which is made first, by the config without the changes of any arm; arms
that change the policy, what it learns from, or how prompts look, from one with that change.

**Several commands** on one folder, on one machine or on many, make a grid together: start the same one as often as you
like. Each claims runs by locks, waits for what the others make, takes over what one that was killed has left, and ends
with the whole table. The folder must have locks that all machines see: local disks and NFS have, a mounted bucket has
not. There each command gets a part of its own, `--share=0/3`, `1/3`, `2/3`, as launchers give it (docs/launchers.md).

Folders: OUT/<arm>/seed<k>, OUT/warm_start/seed<k>; log, config and claim of a run lie beside its folder. OUT gets
ablation.md, ablation.png, ablation.csv (arm, seed, score) and curves.csv. `--json` prints all results as one JSON
document on stdout, and everything else on stderr. Ctrl-C and SIGTERM have all runs save and leave.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.report.ablation import make_document
from agentr1_jax.runtime import compile_cache
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.train.settings import RunConfig
from experiments.ablation import checks, grid, jobs
from experiments.ablation.arms import parse_arms
from experiments.ablation.comparison import compare
from experiments.setup import change_config, read_section, run_main

CONFIG = configs.define_config_flag()
SCHEMES = flags.DEFINE_string("schemes", None, "credit schemes as arms, separated by commas")
ARMS = flags.DEFINE_multi_string("arms", [], "arms of the grid: KEY=VALUE,VALUE or FILE.py; several make their product")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "each arm is run with each of them")
OUT = flags.DEFINE_string("out", None, "folder of the grid; the config's run_dir with _ablation unless given")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "runs at once; unless given as many as there are cores, and one on accelerators", lower_bound=1
)
METRIC = flags.DEFINE_string("metric", "em", "metric of the evaluations that is compared")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "print the grid and the hours left, and leave")
CHECK = flags.DEFINE_string("check", "", "check all runs for PROCESSESxDEVICES elsewhere, e.g. v5e:1x8, and leave")
SHARE = flags.DEFINE_string("share", "0/1", "K/N: make every Nth run from the Kth, on a folder without common locks")
JSON = flags.DEFINE_bool("json", False, "print the results on stdout as a JSON document, the rest on stderr")
WIDTH = 150
"""Columns of the tables where the output is no terminal."""


def main(argv: Sequence[str]) -> int:
    """Make the grid, check it, run it, compare the results."""
    del argv
    config, console, share = CONFIG.value, Console(stderr=JSON.value), grid.parse_share(SHARE.value)
    if not console.is_terminal:
        console = Console(stderr=JSON.value, width=WIDTH)
    if SCHEMES.value is None and not ARMS.value:
        raise UserError("no arms given; add --schemes=grpo,step_gae or --arms=KEY=VALUE,VALUE")
    schemes = [] if SCHEMES.value is None else [f"credit={SCHEMES.value}"]
    arms = parse_arms([*schemes, *ARMS.value], config)
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
    backend = checks.check_apart(todo) if todo else ""
    checks.check_folders([*warm_starts, *cells])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parallel = min(PARALLEL.value or (cores if backend == "cpu" else 1), max(len(cells), 1))
    if DRY_RUN.value:
        console.print(checks.grid_table(warm_starts, cells, parallel))
        return 0

    with StopRequest() as stop:
        failed = jobs.run_all([*warm_starts[share], *cells[share]], parallel=parallel, stop=stop, console=console)
    for cell, fault in failed.items():
        console.print(f"{cell.title} failed: {fault}", markup=False, highlight=False, soft_wrap=True)
    results = compare(out, cells, METRIC.value, os.path.basename(run.run_dir), console)
    if JSON.value and results is not None:
        document = make_document(results)
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    if stop.requested:
        console.print(f"stopped; the same command goes on with {out}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
