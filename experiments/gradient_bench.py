"""Bias, variance and mean squared error of every credit scheme and loss, against the exact policy gradient.

    python -m experiments.gradient_bench [--schemes=rloo,gigpo --process=stop_or_go --batches=16384 --out=DIR]

On small decision processes (`credit/mdps.py`) the gradient of J = E[Σ r] is known by listing every trajectory.
Batches are drawn, credited and turned into gradients by the library's own schemes and loss. The first table is
on-policy, where all ratios and clips agree; the last two are off-policy: ratio x clip in detail for step_gae with the
exact critic of the policy that sampled, and for every scheme at a glance. Even without bounds those are biased, since
the states and what follows are the old policy's; clipping shows as what comes on top. A critic is the exact value
function, or (`const V`) 0.5 everywhere. Takes about two minutes on two cores.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.credit import SCHEMES
from agentr1_jax.learner.config import AGGREGATES, RATIOS
from agentr1_jax.report.gradients import LEVEL, plot_gradients
from agentr1_jax.report.tables import markdown_table, write_csv
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.monitoring import progress_bar
from agentr1_jax.train.settings import load_file
from experiments.credit.bias import LOSSES, REFERENCE, Row, off_policy, on_policy, plain, select_names, variants
from experiments.credit.mdps import PROCESSES

BATCHES = flags.DEFINE_integer("batches", 4096, "independent batches of each process", lower_bound=200)
GROUPS = flags.DEFINE_integer("groups", 4, "groups of a batch", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 4, "trajectories of a group", lower_bound=2)
WANTED = flags.DEFINE_list("schemes", ["all"], "credit schemes, or all")
FILE = flags.DEFINE_string("credit_file", "", "a Python file with schemes of one's own, as credit.file in a config")
PROCESS = flags.DEFINE_list("process", ["all"], f"of {', '.join(PROCESSES)}, or all")
SHIFT = flags.DEFINE_float(
    "shift", None, "off-policy: standard deviation of what the old logits differ by; else each process has its own", 0.0
)
SEED = flags.DEFINE_integer("seed", 0, "of sampling")
OUT = flags.DEFINE_string("out", "", "folder for gradients.md, gradients.csv and gradients.png")

WIDTH = 190
BEYOND = 100.0
"""Bias of a direction that is none: c is 0 within chance."""
COLORS = {"unbiased": "green", "scaled": "blue", "biased": "dark_orange"}


def cells(row: Row) -> dict[str, str]:
    """Return a row as people read it."""
    return {
        "verdict": row["verdict"],
        "bias [95 %]": f"{row['bias']:.3f} [{row['bias_low']:.3f}, {row['bias_high']:.3f}]",
        "p": f"{row['p']:.3f}",
        "scale c": f"{row['scale']:.3f} ± {row['scale_half']:.3f}",
        "bias of direction": f"{row['off']:.3f} [{row['off_low']:.3f}, {row['off_high']:.3f}]",
        "variance": f"{row['variance']:.3g} ± {row['variance_half']:.2g}",
        "variance/c²": f"{row['noise']:.3g}",
        "MSE": f"{row['mse']:.3g} ± {row['mse_half']:.2g}",
        "cosine": f"{row['cosine']:.3f}",
    }


def compact(rows: Sequence[Row], line: Sequence[str], column: str) -> list[dict[str, str]]:
    """Return a table by the columns of `line` and by `column`: scale, and bias of direction, with a star if biased."""
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        star = "*" if row["verdict"] == "biased" else ""
        off = f"{row['off']:.3f}" if row["off"] < BEYOND else f"> {BEYOND:g}"
        of_line = table.setdefault(tuple(row[key] for key in line), {key: row[key] for key in line})
        of_line[row[column]] = f"{row['scale']:.2f}, {off}{star}"
    return list(table.values())


def by_aggregate(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a line for each scheme, a column for each aggregate."""
    return compact(sorted(rows, key=lambda row: row["aggregate"] != "fixed"), ["scheme"], "aggregate")


def by_loss(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a line for each scheme and ratio, a column for each clip; `none` takes no ratio, and is in all lines."""
    spread = []
    for row in rows:
        ratio, _, clip = row["loss"].rpartition(", ")
        spread += [{**row, "ratio": kind, "clip": clip} for kind in ([ratio] if ratio else RATIOS)]
    return compact(spread, ["scheme", "ratio"], "clip")


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the tables of a report: title and lines."""
    for name in dict.fromkeys(row["process"] for row in rows):
        of_process = [row for row in rows if row["process"] == name]
        schemes = [row for row in of_process if row["loss"] == "on-policy"]
        losses = [row for row in of_process if row["loss"] != "on-policy"]
        about = f"{name} ({PROCESSES[name]().about})"
        fixed = [{"scheme": row["scheme"], **cells(row)} for row in schemes if row["aggregate"] == "fixed"]
        yield f"{about}: credit schemes, on-policy, aggregate fixed", fixed
        yield f"{about}: scale c and bias of direction by aggregate (* biased)", by_aggregate(schemes)
        off_policy = f"{about}: ratio and clip, off-policy (logits differ by {losses[0]['shift']:g})"
        reference = [{"ratio, clip": row["loss"], **cells(row)} for row in losses if row["scheme"] == REFERENCE.label]
        yield f"{off_policy}, {REFERENCE.label}", reference
        yield f"{off_policy}, scale c and bias of direction by scheme (* biased)", by_loss(losses)


def show(console: Console, title: str, lines: Sequence[Mapping[str, str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(lines[0]):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(f"[{COLORS[cell]}]{cell}[/]" if cell in COLORS else cell for cell in line.values()))
    console.print(table)


def write(folder: str, rows: Sequence[Row], notes: str) -> None:
    """Write the tables as Markdown, every figure as CSV, and the picture."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "gradients.md"), "w", encoding="utf-8") as out:
        out.write(f"{notes}\n")
        for title, lines in tables(rows):
            out.write(f"\n### {title}\n\n{markdown_table(lines)}")
    write_csv(os.path.join(folder, "gradients.csv"), rows)
    fixed = [row for row in rows if row["loss"] == "on-policy" and row["aggregate"] == "fixed"]
    names = dict.fromkeys(row["process"] for row in fixed)
    panels = {name: [row for row in fixed if row["process"] == name] for name in names}
    plot_gradients(os.path.join(folder, "gradients.png"), panels, title="Policy gradients of one batch, on-policy")


def main(argv: Sequence[str]) -> None:
    """Draw batches, assign credit, differentiate, measure the errors, print tables."""
    del argv
    if FILE.value:
        load_file(SCHEMES, FILE.value)
    schemes = variants(select_names(WANTED.value, list(SCHEMES), "schemes"))
    processes = select_names(PROCESS.value, list(PROCESSES), "process")
    console = Console()
    console.width = max(console.width, WIDTH)  # A log must not cut figures.
    sizes = {"batches": BATCHES.value, "groups": GROUPS.value, "samples": SAMPLES.value}
    rows: list[Row] = []
    total = len(processes) * (len(schemes) * len(AGGREGATES) + len(plain(schemes)) * len(LOSSES))
    with progress_bar("gradients", 0, total, True) as show_progress:
        for name in processes:
            for row in itertools.chain(
                on_policy(name, schemes, SEED.value, sizes),
                off_policy(name, plain(schemes), SHIFT.value, SEED.value, sizes),
            ):
                rows.append(row)
                show_progress(len(rows), name)
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
