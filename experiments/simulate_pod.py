"""Simulates rollouts on 1 to 256 hosts: engines at their own pace, one engine in lockstep, rounds of generation.

    python -m experiments.simulate_pod RUN [--hosts=256 --scaling=strong --tool_latency='lognormal(1.0,0.8)' --out=DIR]
    python -m experiments.simulate_pod RUN --check [--speeds_of=OTHER_RUN]

Trajectories are drawn from those that RUN recorded, whole groups at a time; the engine's shape and, where no flags give
those of another device, the speeds are RUN's too. Each way is simulated without overlap of rollouts with updates and
with it (staleness 0 and 1). DIR gets pod.md, pod.json and pod.png. With --check every recorded batch is replayed on one
host and held against what RUN measured. docs/scaling.md says what is assumed. The defaults take a few minutes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.report.tables import markdown_table
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.progress import progress
from experiments.pod import results as told
from experiments.pod.measured import Recording, measured_latency, measured_speeds, read_run, replay
from experiments.pod.model import Latency, Speeds, parse_latency
from experiments.pod.simulation import WAYS, Cell, Figures, Setting, simulate

HOSTS = flags.DEFINE_integer("hosts", 256, "most hosts; simulated are 1, 2, 4, ... and this number", lower_bound=1)
SCALING = flags.DEFINE_enum("scaling", "weak", ["weak", "strong"], "groups for each host, or in all, stay the same")
GROUPS = flags.DEFINE_integer("groups", None, "of a batch: for each host (weak) or in all (strong); RUN's unless given")
SLOTS = flags.DEFINE_integer("slots", None, "of each host; RUN's unless given")
PARKING = flags.DEFINE_integer("parking", None, "lines of each host; RUN's unless given")
WAYS_WANTED = flags.DEFINE_list("ways", list(WAYS), "of rolling out")
STALENESS = flags.DEFINE_list("staleness", ["0", "1"], "without and with overlap of rollouts with updates")
LATENCY = flags.DEFINE_multi_string(
    "tool_latency", ["measured"], "of a call: measured, or e.g. lognormal(1.0,0.8): median (s), sigma of the log"
)
UPDATES = flags.DEFINE_integer("updates", 2, "cycles that count in each simulation", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 4, "simulations of each kind", lower_bound=1)
SPEEDS_OF = flags.DEFINE_string("speeds_of", None, "another run, made by the host whose speeds are wanted")
STEP = flags.DEFINE_float("step_seconds", None, "of a decode iteration, however few slots are live")
SLOT = flags.DEFINE_float("slot_seconds", None, "what each live slot adds")
PREFILL = flags.DEFINE_float("prefill_tokens_per_s", None, "prompt tokens computed by a host, padding included", 1e-9)
LEARNER = flags.DEFINE_float("learner_tokens_per_s", None, "tokens of trajectories in an update, of a host", 1e-9)
UPDATE = flags.DEFINE_float("update_seconds", None, "of an update, whatever its size")
TRANSFER = flags.DEFINE_float("transfer_seconds", None, "new weights on their way to the engines")
TURN = flags.DEFINE_float("turn_seconds", None, "of a turn of the engine, beside prefill and decoding")
RESPONSE = flags.DEFINE_float("response_seconds", None, "of the host, for each response that ends")
JITTER = flags.DEFINE_float("jitter", None, "standard deviation of the log of the time of a host's turn")
CHECK = flags.DEFINE_bool("check", False, "replay RUN's batches on one host, compare with what it measured, and leave")
JOBS = flags.DEFINE_integer("jobs", os.cpu_count() or 1, "processes", lower_bound=1)
OUT = flags.DEFINE_string("out", "", "folder for pod.md, pod.json and pod.png")
WIDTH = 170


def given_speeds() -> dict[str, float]:
    """Speeds that flags give."""
    flag_of = {
        "step": STEP.value,
        "slot": SLOT.value,
        "prefill_token": PREFILL.value and 1 / PREFILL.value,
        "turn": TURN.value,
        "response": RESPONSE.value,
        "learner_token": LEARNER.value and 1 / LEARNER.value,
        "update": UPDATE.value,
        "transfer": TRANSFER.value,
        "jitter": JITTER.value,
    }
    return {name: value for name, value in flag_of.items() if value is not None}


def speeds(run: Recording) -> Speeds:
    """Those that flags give; the others measured by a run, or, where `--step_seconds` is another device's, 0."""
    given = given_speeds()
    if "step" in given and not SPEEDS_OF.value:
        return Speeds(**given)
    return dataclasses.replace(measured_speeds(read_run(SPEEDS_OF.value) if SPEEDS_OF.value else run), **given)


def latencies(run: Recording) -> list[Latency]:
    """The tool latencies to simulate."""
    return [measured_latency(run) if text == "measured" else parse_latency(text) for text in LATENCY.value]


def cells(of_tools: Sequence[Latency]) -> list[Cell]:
    """Every simulation, by latency, way, staleness, hosts and seed."""
    for value, known, flag in (
        *((way, WAYS, "ways") for way in WAYS_WANTED.value),
        *((staleness, ("0", "1"), "staleness") for staleness in STALENESS.value),
    ):
        if value not in known:
            raise UserError(f"--{flag}: {value!r} is unknown; choose among {', '.join(known)}")
    hosts = sorted({HOSTS.value} | {2**k for k in range(HOSTS.value.bit_length())})
    return [
        Cell(latency, way, int(staleness), count, seed)
        for latency, way, staleness, count, seed in itertools.product(
            of_tools, WAYS_WANTED.value, STALENESS.value, hosts, range(SEEDS.value)
        )
    ]


def run_all(setting: Setting, wanted: Sequence[Cell]) -> list[Figures]:
    """The figures of all cells, the largest simulated first."""
    order = sorted(range(len(wanted)), key=lambda i: -wanted[i].hosts)
    found: dict[int, Figures] = {}
    work = functools.partial(simulate, setting)
    with progress("simulations", 0, len(wanted), True) as tell:
        if JOBS.value == 1:
            for i in order:
                found[i] = work(wanted[i])
                tell(len(found), f"{wanted[i].hosts} hosts")
        else:
            # Not forked: JAX, which is imported here, has threads.
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(JOBS.value, mp_context=context) as pool:
                place = {pool.submit(work, wanted[i]): i for i in order}
                for done in concurrent.futures.as_completed(place):
                    found[place[done]] = done.result()
                    tell(len(found), f"{wanted[place[done]].hosts} hosts")
    return [found[i] for i in range(len(wanted))]


def check_rows(run: Recording, s: Speeds, latency: Latency) -> list[dict[str, str]]:
    """A row for each quantity: recorded and simulated means over batches, and how far single batches are off."""
    records = replay(run, s, latency, 0)
    if not records:
        raise UserError(f"{run.folder}: no times of RL batches in metrics.jsonl to compare with")
    rows = []
    for key in [key.removesuffix(", recorded") for key in records[0] if key.endswith(", recorded")]:
        recorded = np.asarray([r[f"{key}, recorded"] for r in records])
        off = np.asarray([r[f"{key}, simulated"] for r in records]) / recorded - 1
        rows.append(
            {
                "": key,
                "recorded": told.short(float(recorded.mean())),
                "simulated": told.short(float((recorded * (1 + off)).mean())),
                "mean deviation": f"{off.mean():+.1%}",
                "mean size of it": f"{np.abs(off).mean():.1%}",
                "largest": f"{np.abs(off).max():.1%}",
            }
        )
    return rows


def show(console: Console, title: str, rows: Sequence[dict[str, str]]) -> None:
    """Prints a table."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def notes(setting: Setting, of_tools: Sequence[Latency]) -> list[str]:
    """What the figures rest on."""
    shape, used = setting.shape, dataclasses.asdict(setting.speeds)
    works = [work for group in setting.recorded for work in group]
    means = [
        (float(np.mean([len(w.response) for w in works])), "steps"),
        (float(np.mean([sum(w.response) for w in works])), "sampled tokens"),
        (float(np.mean([sum(w.prefill) for w in works])), "prefilled"),
        (float(np.mean([w.tokens for w in works])), "in all"),
    ]
    speeds_of = "given by flags" if STEP.value is not None and not SPEEDS_OF.value else "measured by a run"
    fitted = " (a lognormal through the recorded median and 95th percentile)" if "measured" in LATENCY.value else ""
    return [
        f"{len(works):,} recorded trajectories in {len(setting.recorded):,} groups, each of "
        f"{', '.join(f'{told.short(value)} {what}' for value, what in means)}.",
        f"{setting.groups} groups {'in all' if setting.strong else 'for each host'}; {shape.slots} slots, "
        f"{shape.parking} parking lines, chunks of {shape.chunk}, left after {shape.leave_after} ended responses.",
        f"Speeds, {speeds_of} (seconds): {', '.join(f'{name} {value:.3g}' for name, value in used.items())}.",
        f"Tools: {', '.join(map(str, of_tools))}{fitted}.",
        f"{UPDATES.value} updates of each of {SEEDS.value} seeds; in brackets 95 % bootstrap intervals over seeds.",
    ]


def write(folder: str, lines: Sequence[str], found: Sequence[told.Result], setting: Setting) -> None:
    """Tables as Markdown, all figures as JSON, the picture."""
    parts = ["\n".join(f"- {line}" for line in lines)]
    parts += [f"### {title}\n\n{markdown_table(rows).strip()}" for title, rows in told.tables(found, setting.strong)]
    with files.published(os.path.join(folder, "pod.md")) as out:
        out.write("\n\n".join(parts) + "\n")
    figures: dict[str, Any] = {
        "shape": dataclasses.asdict(setting.shape),
        "speeds": dataclasses.asdict(setting.speeds),
        "groups": setting.groups,
        "scaling": SCALING.value,
        "updates": setting.updates,
        "seeds": SEEDS.value,
        "results": told.to_json(found),
    }
    with files.published(os.path.join(folder, "pod.json")) as out:
        json.dump(figures, out, indent=1)
    title = f"Simulated rollouts, {SCALING.value} scaling"
    told.plot(os.path.join(folder, "pod.png"), found, strong=setting.strong, title=title)


def main(argv: Sequence[str]) -> None:
    """Reads the run, simulates every way on every number of hosts, tells."""
    run = read_run(argv[1], SLOTS.value, PARKING.value)
    console = Console()
    console.width = max(console.width, WIDTH)  # A log must not cut figures.
    s, of_tools = speeds(run), latencies(run)
    if CHECK.value:
        show(console, f"{len(run.metrics)} batches replayed, tools {of_tools[0]}", check_rows(run, s, of_tools[0]))
        return
    per_batch = max(len(groups) for groups in run.batches.values())
    strong = SCALING.value == "strong"
    groups = GROUPS.value if GROUPS.value is not None else per_batch // (1 if strong else run.processes)
    if groups < 1:
        raise UserError(f"--groups={groups}: a batch has at least one group")
    setting = Setting([g for g in run.groups if g], run.shape, s, groups, strong, UPDATES.value)
    wanted = cells(of_tools)
    found = told.results(wanted, run_all(setting, wanted))
    lines = notes(setting, of_tools)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    for title, rows in told.tables(found, strong):
        show(console, title, rows)
    if OUT.value:
        write(OUT.value, lines, found, setting)
        console.print(f"Look at {OUT.value}/pod.md and {OUT.value}/pod.png; all figures: {OUT.value}/pod.json")


if __name__ == "__main__":
    configs.run_main(main, arguments=("RUN",))
