"""Which credit scheme learns what: every scheme on small decision processes, with enough seeds to tell them apart.

    python -m experiments.credit_lab [--schemes=grpo,gigpo,step_gae --processes='noise_before,corridor(horizon=64)']

The whole loop is compiled (`lab/training.py`): rollouts, the library's credit and loss, updates; exact values of the
processes (`lab/processes.py`) give J, A and Q*. Each scheme chooses its hyper-parameters among the same number of
candidates, on seeds of their own; then `--seeds` fresh trainings are compared. All schemes on all processes take about
a quarter of an hour on two cores (docs/results/credit.md), and leave `lab.html`, `lab.csv` (a line for each training),
`curves.csv` and `pairs.csv` (every two schemes, with corrected p) in `--out`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from absl import flags
from rich.console import Console

from agentr1_jax.credit import SCHEMES
from agentr1_jax.errors import UserError
from agentr1_jax.registry import split_list
from agentr1_jax.report import lab
from agentr1_jax.report.statistics import t_interval
from agentr1_jax.report.tables import markdown_table, write_csv
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.monitoring import progress_bar
from agentr1_jax.train.settings import load_file
from experiments.credit.bias import select_names
from experiments.lab.processes import PROCESSES, make_process, tabulate
from experiments.lab.study import (
    OPTIMUM,
    OWN,
    Pair,
    Plan,
    Result,
    compare,
    false_positives,
    study,
    visible_difference,
)
from experiments.lab.training import EVERY, VALUE_RATE, PolicyKind

WANTED = flags.DEFINE_list("schemes", ["all"], "credit schemes, or all")
FILE = flags.DEFINE_string("credit_file", "", "a Python file with schemes of one's own, as credit.file in a config")
WHERE = flags.DEFINE_string("processes", "all", f"of {', '.join(PROCESSES)}, with arguments, or all")
POLICY = flags.DEFINE_enum("policy", "tabular", ["tabular", "recurrent"], "a table of logits, or a GRU of width 16")
SEEDS = flags.DEFINE_integer("seeds", 100, "trainings that are reported", lower_bound=2)
TUNING = flags.DEFINE_integer("tuning_seeds", 25, "trainings of each candidate", lower_bound=1)
BUDGET = flags.DEFINE_integer("budget", 8, "candidates for the hyper-parameters of each scheme; even", lower_bound=2)
UPDATES = flags.DEFINE_integer("updates", 200, "updates of a training", lower_bound=2)
GROUPS = flags.DEFINE_integer("groups", 2, "groups of a batch", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 8, "trajectories of a group", lower_bound=2)
SEED = flags.DEFINE_integer("seed", 0, "of everything that is drawn")
NULL = flags.DEFINE_integer("null", 200, "comparisons of grpo with itself, to see how often they differ; 0 for none")
OUT = flags.DEFINE_string("out", "runs/credit_lab", "folder of the results")

LEVEL = 0.05
NULL_SEEDS = 20


def figures(result: Result) -> dict[str, Any]:
    """Return a result as a line of the table."""
    area, low, high = t_interval(result.area)
    there = np.isfinite(result.updates_to_optimum)
    return {
        "process": result.process,
        "scheme": result.scheme,
        "area": f"{area:.3f} [{low:.3f}, {high:.3f}]",
        "end": float(result.share[:, -1].mean()),
        f"updates to {OPTIMUM:.0%}": float(np.median(result.updates_to_optimum)) if there.mean() > 0.5 else None,
        "get there": f"{there.mean():.0%}",
        "with A": result.alignment,
        "with Q*": result.alignment_best,
        "chosen": result.choice.label,
    }


def describe_process(name: str, results: Sequence[Result], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return a line on what a process tells apart."""
    own, compared = [r for r in results if r.process == name], [p for p in pairs if p.process == name]
    best = max(own, key=lambda r: r.area.mean())
    return {
        "process": name,
        "what is hard": make_process(name).about,
        "best": best.scheme,
        "pairs told apart": f"{sum(p.p < LEVEL for p in compared)} of {len(compared)}",
        "would have been seen": visible_difference(own),
    }


def matrices(names: Sequence[str], pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """Return for each two schemes the mean probability of improvement, and on how many processes they differ."""
    shape = (len(names), len(names))
    total, count, different = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for pair in pairs:
        i, j = names.index(pair.one), names.index(pair.other)
        for a, b, x in ((i, j, pair.improvement), (j, i, 1 - pair.improvement)):
            total[a, b] += x
            count[a, b] += 1
            different[a, b] += pair.p < LEVEL
    with np.errstate(invalid="ignore"):
        return np.where(count, total / count, np.nan), np.where(count, different, np.nan)


def trainings(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Yield a line for each training."""
    for r in results:
        for seed, (area, end, reached) in enumerate(zip(r.area, r.share[:, -1], r.updates_to_optimum, strict=True)):
            chosen = {"lr": r.choice.rate, "arguments": str(dict(r.choice.arguments))}
            there = "" if math.isinf(reached) else int(reached)
            yield {
                "process": r.process,
                "scheme": r.scheme,
                "seed": seed,
                "area": area,
                "end": end,
                "reached": there,
                **chosen,
            }


def mean_curves(results: Sequence[Result], trajectories: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each update of each scheme on each process."""
    for r in results:
        for update, (mean, low, high) in enumerate(zip(*map(np.atleast_1d, t_interval(r.share, axis=0)), strict=True)):
            place = {"process": r.process, "scheme": r.scheme, "update": update, "trajectories": update * trajectories}
            yield {**place, "share": mean, "low": low, "high": high}


def checklist(plan: Plan, results: Sequence[Result]) -> Mapping[str, str]:
    """Return what a report on credit assignment should say, and what this one does."""
    horizons = [make_process(r.process).horizon for r in results]
    own = ", ".join(f"{scheme}: {name}" for scheme, (name, _) in OWN.items())
    return {
        "granularity": "an action is a response of one token, which is a step; schemes differ by what they compare",
        "environments": "finite decision processes, known exactly; noise, horizon and what is observed differ",
        "bifurcation": "the process `bifurcation`: one decisive step among decoys, whose true advantage is 0",
        "horizon": f"{min(horizons)} to {max(horizons)} steps",
        "policy": f"{plan.policy}; uniform at first",
        "optimiser": "Adam (.9, .99), one update a batch; the loss is summed over tokens, divided by trajectories",
        "critic": f"one of its own, of the policy's kind; it sees what the policy sees; Adam at {VALUE_RATE:g}",
        "hyper-parameters": f"{plan.budget} candidates for each scheme and process, by the mean area over "
        f"{plan.tuning_seeds} seeds that are not reported: learning rates, times what some schemes have ({own})",
        "samples": f"{plan.updates} batches of {plan.groups} x {plan.samples} trajectories",
        "seeds": f"{plan.seeds}, the same numbers for all schemes; intervals are Student's",
        "tests": f"Mann-Whitney on the areas; Holm's correction over all pairs of a process, level {LEVEL:g}",
        "extra compute": "remax rolls out greedily, too, and some schemes train a critic; neither counts as samples",
        "truth": f"A of the policy and Q* by dynamic programming; alignment at every {EVERY}th update",
        "what it cannot say": "how schemes fare with long responses, or with the shared parameters of a large model",
    }


def write(
    folder: str, plan: Plan, results: Sequence[Result], pairs: Sequence[Pair], notes: Sequence[str], seconds: float
) -> str:
    """Write tables, pictures and page; return the path of the page."""
    os.makedirs(folder, exist_ok=True)
    write_csv(os.path.join(folder, "lab.csv"), list(trainings(results)))
    write_csv(os.path.join(folder, "curves.csv"), list(mean_curves(results, plan.groups * plan.samples)))
    write_csv(os.path.join(folder, "pairs.csv"), [dataclasses.asdict(pair) for pair in pairs])
    names = list(dict.fromkeys(r.scheme for r in results))
    places = list(dict.fromkeys(r.process for r in results))
    areas = np.full((len(names), len(places), plan.seeds), np.nan)
    for r in results:
        areas[names.index(r.scheme), places.index(r.process)] = r.area
    scores = lab.Scores(names, places, areas)
    ranked = [name for name, *_ in scores.order()]
    pictures = {name: os.path.join(folder, f"{name}.png") for name in ("areas", "curves", "pairs", "alignment")}
    lab.plot_areas(pictures["areas"], scores)
    shares = {place: {r.scheme: r.share for r in results if r.process == place} for place in places}
    lab.plot_curves(pictures["curves"], shares, plan.groups * plan.samples)
    lab.plot_pairs(pictures["pairs"], ranked, *matrices(ranked, pairs))
    lab.plot_alignment(pictures["alignment"], [(r.process, r.scheme, r.alignment, r.area.mean()) for r in results])
    by_process = [describe_process(place, results, pairs) for place in places]
    page = os.path.join(folder, "lab.html")
    lab.write_lab_page(
        page,
        pictures,
        title="Credit lab",
        finding=finding(by_process),
        facts={
            "schemes": len(names),
            "processes": len(places),
            "seeds": plan.seeds,
            "trainings": len(results) * (plan.seeds + plan.budget * plan.tuning_seeds),
            "minutes": seconds / 60,
        },
        notes=notes,
        checklist=checklist(plan, results),
        by_process=by_process,
        rows=[figures(r) for r in results],
    )
    with open(os.path.join(folder, "lab.md"), "w", encoding="utf-8") as out:
        out.write(f"{markdown_table(by_process)}\n{markdown_table([figures(r) for r in results])}")
    return page


def finding(by_process: Sequence[Mapping[str, Any]]) -> str:
    """Return the result in one sentence."""
    apart = [(line["process"], int(line["pairs told apart"].split()[0])) for line in by_process]
    several = [f"{name} ({count})" for name, count in sorted(apart, key=lambda x: -x[1]) if count >= 3]
    if several:
        return f"Pairs of schemes are told apart, after correction, on {', '.join(several)}."
    seen = max(line["would have been seen"] for line in by_process)
    return f"No process tells three pairs apart; a difference of {seen:.2f} in area would have been seen on each."


def main(argv: Sequence[str]) -> None:
    """Choose hyper-parameters, train, compare, write the page."""
    del argv
    if FILE.value:
        load_file(SCHEMES, FILE.value)
    schemes = select_names(WANTED.value, list(SCHEMES), "schemes")
    wanted = list(PROCESSES) if WHERE.value == "all" else [part.strip() for part in split_list(WHERE.value)]
    if not wanted:
        raise UserError(f"--processes is empty; choose some of {', '.join(PROCESSES)}, or all")
    if BUDGET.value % 2:
        raise UserError(f"--budget={BUDGET.value} is odd; some schemes try two values of an argument, so make it even")
    processes = {name: make_process(name) for name in wanted}
    for process in processes.values():
        tabulate(process)  # One that is too large is refused before anything is trained.
    sizes = UPDATES.value, GROUPS.value, SAMPLES.value
    plan = Plan(SEEDS.value, TUNING.value, BUDGET.value, *sizes, cast(PolicyKind, POLICY.value), SEED.value)
    console, started = Console(), time.monotonic()
    total = len(schemes) * len(processes)
    with progress_bar("credit lab", 0, total, True) as show_progress:
        done = 0

        def show(result: Result) -> None:
            nonlocal done
            done += 1
            show_progress(done, f"{result.scheme} on {result.process}: {result.area.mean():.3f}")

        results = study(schemes, processes, plan, show)
    if not results:
        raise UserError("nothing to compare: a scheme that needs a belief has none on these processes; add inquiry")
    pairs, notes = compare(results), []
    silent = [name for name, process in processes.items() if process.gold is None]
    if believing := [name for name in schemes if SCHEMES[name].needs_belief and silent]:
        notes.append(
            f"{', '.join(believing)} read a belief, and were not tried where nothing is asked: {', '.join(silent)}."
        )
    if NULL.value:
        name, process = next(iter(processes.items()))
        rate = false_positives(schemes[0], process, plan, repetitions=NULL.value, seeds=NULL_SEEDS)
        notes.append(
            f"{schemes[0]} against itself on {name}, {NULL_SEEDS} fresh seeds a side: different at level {LEVEL:g} in "
            f"{rate:.1%} of {NULL.value} comparisons."
        )
    page = write(OUT.value, plan, results, pairs, notes, time.monotonic() - started)
    for line in markdown_table([describe_process(name, results, pairs) for name in processes]).splitlines():
        console.print(line, markup=False, soft_wrap=True)
    look = f"Look at {page}; figures: lab.csv, curves.csv and pairs.csv beside it"
    console.print("\n".join([*notes, look]), markup=False, soft_wrap=True)


if __name__ == "__main__":
    configs.run_main(main)
