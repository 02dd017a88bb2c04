"""Bias, variance and mean squared error of every credit scheme and loss, against the exact policy gradient.

    python -m experiments.gradient_bench [--schemes=rloo,gigpo --process=stop_or_go --batches=16384 --out=DIR]

On small decision processes (`credit/processes.py`) the gradient of J = E[Σ r] is known by listing every trajectory.
Batches are drawn, credited and turned into gradients by the library's own schemes and loss. The first table is
on-policy, where all ratios and clips agree; the last is off-policy, for ratio x clip, with step_gae and the exact
critic of the policy that sampled. Even without bounds those are biased, since the states and what follows are the old
policy's; clipping shows as what comes on top. A critic is the exact value function, or (`const V`) 0.5 everywhere.
Takes one to two minutes on two cores, mostly of compilation.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.credit import SCHEMES, load_schemes
from agentr1_jax.learner.fill import AGGREGATES
from agentr1_jax.report.gradients import plot_gradients
from agentr1_jax.report.tables import markdown_table
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.errors import UserError
from agentr1_jax.runtime.progress import progress
from experiments.credit.bias import LOSSES, Row, chosen, off_policy, on_policy, variants
from experiments.credit.estimates import LEVEL
from experiments.credit.processes import PROCESSES

BATCHES = flags.DEFINE_integer("batches", 4096, "independent batches of each process", lower_bound=200)
GROUPS = flags.DEFINE_integer("groups", 4, "groups of a batch", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 4, "trajectories of a group", lower_bound=2)
WANTED = flags.DEFINE_list("schemes", ["all"], "credit schemes, or all")
FILE = flags.DEFINE_string("credit_file", "", "a Python file with schemes of one's own, as credit.file in a config")
PROCESS = flags.DEFINE_list("process", ["all"], f"of {', '.join(PROCESSES)}, or all")
SHIFT = flags.DEFINE_float("shift", 0.7, "off-policy: standard deviation of what the old logits differ by", 0.0)
SEED = flags.DEFINE_integer("seed", 0, "of sampling")
OUT = flags.DEFINE_string("out", "", "folder for gradients.md, gradients.csv and gradients.png")

WIDTH = 172
COLORS = {"unbiased": "green", "scaled": "blue", "biased": "dark_orange"}


def cells(row: Row) -> dict[str, str]:
    """A row as people read it."""
    return {
        "verdict": row["verdict"],
        "bias [95 %]": f"{row['bias']:.3f} [{row['bias_low']:.3f}, {row['bias_high']:.3f}]",
        "p": f"{row['p']:.3f}",
        "scale c": f"{row['scale']:.3f} ± {row['scale_half']:.3f}",
        "bias of direction": f"{row['off']:.3f} [{row['off_low']:.3f}, {row['off_high']:.3f}]",
        "variance": f"{row['variance']:.3g}",
        "variance/c²": f"{row['noise']:.3g}",
        "MSE": f"{row['mse']:.3g}",
        "cosine": f"{row['cosine']:.3f}",
    }


def by_aggregate(rows: Sequence[Row]) -> list[dict[str, str]]:
    """For each scheme and aggregate: the scale, and the bias of the direction with a star where it is one."""
    table: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: row["aggregate"] != "fixed"):
        star = "*" if row["verdict"] == "biased" else ""
        line = table.setdefault(row["scheme"], {"scheme": row["scheme"]})
        line[row["aggregate"]] = f"{row['scale']:.2f}, {row['off']:.3f}{star}"
    return list(table.values())


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """The tables of a report: title and lines."""
    for name in dict.fromkeys(row["process"] for row in rows):
        of_process = [row for row in rows if row["process"] == name]
        schemes = [row for row in of_process if row["loss"] == "on-policy"]
        about = f"{name} ({PROCESSES[name]().about})"
        fixed = [{"scheme": row["scheme"], **cells(row)} for row in schemes if row["aggregate"] == "fixed"]
        yield f"{about}: credit schemes, on-policy, aggregate fixed", fixed
        yield f"{about}: scale c and bias of direction by aggregate (* biased)", by_aggregate(schemes)
        losses = [{"ratio, clip": row["loss"], **cells(row)} for row in of_process if row["loss"] != "on-policy"]
        yield f"{about}: ratio and clip, off-policy, unbiased advantage", losses


def show(console: Console, title: str, lines: Sequence[Mapping[str, str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(lines[0]):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(f"[{COLORS[cell]}]{cell}[/]" if cell in COLORS else cell for cell in line.values()))
    console.print(table)


def write(folder: str, rows: Sequence[Row], notes: str) -> None:
    """The tables as Markdown, every figure as CSV, and the picture."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "gradients.md"), "w", encoding="utf-8") as out:
        out.write(f"{notes}\n")
        for title, lines in tables(rows):
            out.write(f"\n### {title}\n\n{markdown_table(lines)}")
    with open(os.path.join(folder, "gradients.csv"), "w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    fixed = [row for row in rows if row["loss"] == "on-policy" and row["aggregate"] == "fixed"]
    names = dict.fromkeys(row["process"] for row in fixed)
    panels = {name: [row for row in fixed if row["process"] == name] for name in names}
    plot_gradients(os.path.join(folder, "gradients.png"), panels, title="Policy gradients of one batch, on-policy")


def own_schemes(path: str) -> None:
    """Registers the schemes of a user's file. Raises UserError if it cannot be read."""
    try:
        load_schemes(path)
    except ValueError as error:
        raise UserError(str(error)) from error


def main(argv: Sequence[str]) -> None:
    """Draws, credits, differentiates, judges, and tells."""
    del argv
    if FILE.value:
        own_schemes(FILE.value)
    schemes = variants(chosen(WANTED.value, list(SCHEMES), "schemes"))
    processes = chosen(PROCESS.value, list(PROCESSES), "process")
    console = Console()
    console.width = max(console.width, WIDTH)  # A log must not cut figures.
    sizes = {"batches": BATCHES.value, "groups": GROUPS.value, "samples": SAMPLES.value}
    rows: list[Row] = []
    total = len(processes) * (len(schemes) * len(AGGREGATES) + len(LOSSES))
    with progress("gradients", 0, total, True) as tell:
        for name in processes:
            for row in itertools.chain(
                on_policy(name, schemes, SEED.value, sizes), off_policy(name, SHIFT.value, SEED.value, sizes)
            ):
                rows.append(row)
                tell(len(rows), name)
    notes = (
        f"{BATCHES.value} batches of {GROUPS.value} groups x {SAMPLES.value} trajectories. Lengths are shares of the "
        f"exact gradient's, squares of its square. c is the projection of the expected estimate on it. unbiased: a "
        f"joint test of all coordinates does not reject at {LEVEL}, each row by itself; scaled: only its length is off."
    )
    console.print(notes, soft_wrap=True)
    for title, lines in tables(rows):
        show(console, title, lines)
    if OUT.value:
        write(OUT.value, rows, notes)
        console.print(f"Look at {OUT.value}/gradients.md, {OUT.value}/gradients.png; all figures: gradients.csv")


if __name__ == "__main__":
    configs.run_main(main)
