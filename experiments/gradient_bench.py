"""Bias, variance and mean squared error of every credit scheme and loss, against the exact policy gradient.

    python -m experiments.gradient_bench [--schemes=rloo,gigpo --process=stop_or_go --until=.02 --out=DIR]

On small decision processes (`credit/mdps.py`) the gradient of J = E[Σ r] is known by listing every trajectory.
Batches are drawn, credited and turned into gradients by the library's own schemes and loss. The first table is
on-policy, where all ratios and clips agree; the last two are off-policy: ratio x clip in detail for step_gae with the
exact critic of the policy that sampled, and for every scheme at a glance. Even without bounds those are biased, since
the states and what follows are the old policy's; clipping shows as what comes on top. A critic is the exact value
function, or (`const V`) 0.5 everywhere. Every row says the smallest bias that it would have shown; `--until` draws
batches until that is small enough. Takes two to three minutes on one core, with `--until=.02` twelve.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.credit import SCHEMES
from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import RATIOS
from agentr1_jax.report.gradients import BIASED, CERTAIN, LEVEL, POWER, SCALED, UNSEEN, plot_gradients
from agentr1_jax.report.tables import markdown_table, write_csv
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.monitoring import progress_bar
from agentr1_jax.train.settings import load_file
from experiments.credit.bias import REFERENCE, Row, Sampling, cases, measure, select_names, select_schemes, variants
from experiments.credit.mdps import PROCESSES

BATCHES = flags.DEFINE_integer("batches", 4096, "independent batches of each process", lower_bound=200)
UNTIL = flags.DEFINE_float(
    "until", None, "go on until every row would have shown a bias of this share of the gradient's length", CERTAIN
)
MOST_BATCHES = flags.DEFINE_integer("most_batches", 131072, "with --until: no row takes more batches", lower_bound=200)
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

WIDTH = 260
BEYOND = 100.0
"""Bias of a direction that is none: c is 0 within chance."""
COLORS = {UNSEEN: "green", SCALED: "blue", BIASED: "dark_orange"}


def verdict(row: Row) -> str:
    """Return the verdict of a row, and what it would have taken for another one."""
    return {
        UNSEEN: f"{UNSEEN} (≥ {row['visible']:.2g} would have been)",
        SCALED: f"{SCALED}, no turn seen (≥ {row['off_visible']:.2g} would be)",
        BIASED: BIASED,
    }[row["verdict"]]


def cells(row: Row) -> dict[str, str]:
    """Return a row as people read it."""
    return {
        "verdict": verdict(row),
        "bias [95 %]": f"{row['bias']:.3f} [{row['bias_low']:.3f}, {row['bias_high']:.3f}]",
        "p": f"{row['p']:.3f}",
        "scale c": f"{row['scale']:.3f} ± {row['scale_half']:.3f}",
        "bias of direction": f"{row['off']:.3f} [{row['off_low']:.3f}, {row['off_high']:.3f}]",
        "visible bias, of direction": f"{row['visible']:.3f}, {row['off_visible']:.3f}",
        "variance": f"{row['variance']:.3g} ± {row['variance_half']:.2g}",
        "variance/c²": f"{row['noise']:.3g}",
        "MSE": f"{row['mse']:.3g} ± {row['mse_half']:.2g}",
        "cosine": f"{row['cosine']:.3f}",
        "batches": f"{row['batches']}",
    }


def compact(rows: Sequence[Row], line: Sequence[str], column: str) -> list[dict[str, str]]:
    """Return a table by the columns of `line` and by `column`; a star is for a biased direction."""
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        star = "*" if row["verdict"] == BIASED else ""
        off, visible = (f"{x:.3f}" if x < BEYOND else f"> {BEYOND:g}" for x in (row["off"], row["off_visible"]))
        of_line = table.setdefault(tuple(row[key] for key in line), {key: row[key] for key in line})
        of_line[row[column]] = f"{row['scale']:.2f}, {off}{star} ({visible})"
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


def tables(rows: Sequence[Row], until: float = math.inf) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the tables of a report: title and lines."""
    short = "scale c, bias of direction (* biased) and, in parentheses, the smallest visible one"
    for name in dict.fromkeys(row["process"] for row in rows):
        of_process = [row for row in rows if row["process"] == name]
        schemes = [row for row in of_process if row["loss"] == "on-policy"]
        losses = [row for row in of_process if row["loss"] != "on-policy"]
        about = f"{name} ({PROCESSES[name]().about})"
        fixed = [{"scheme": row["scheme"], **cells(row)} for row in schemes if row["aggregate"] == "fixed"]
        yield f"{about}: credit schemes, on-policy, aggregate fixed", fixed
        yield f"{about}: {short}, by aggregate", by_aggregate(schemes)
        off_policy = f"{about}: ratio and clip, off-policy (logits differ by {losses[0]['shift']:g})"
        reference = [{"ratio, clip": row["loss"], **cells(row)} for row in losses if row["scheme"] == REFERENCE.label]
        yield f"{off_policy}, {REFERENCE.label}", reference
        yield f"{off_policy}: {short}, by scheme", by_loss(losses)
    facts = ("process", "scheme", "aggregate", "loss")
    coarse = [
        {**{key: row[key] for key in facts}, "batches": f"{row['batches']}", "visible bias": f"{row['visible']:.3f}"}
        for row in rows
        if row["visible"] > until
    ]
    if coarse:
        yield f"{len(coarse)} of {len(rows)} rows did not get to a visible bias of {until:g}", coarse


def paint(cell: str) -> str:
    """Return a cell of a table with the color of the verdict that it opens with, if any."""
    color = next((color for kind, color in COLORS.items() if cell.startswith(kind)), None)
    return f"[{color}]{cell}[/]" if color else cell


def show(console: Console, title: str, lines: Sequence[Mapping[str, str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(lines[0]):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(paint(cell) for cell in line.values()))
    console.print(table)


def write(folder: str, rows: Sequence[Row], notes: str, until: float) -> None:
    """Write the tables as Markdown, every figure as CSV, and the picture."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "gradients.md"), "w", encoding="utf-8") as out:
        out.write(f"{notes}\n")
        for title, lines in tables(rows, until):
            out.write(f"\n### {title}\n\n{markdown_table(lines)}")
    write_csv(os.path.join(folder, "gradients.csv"), rows)
    fixed = [row for row in rows if row["loss"] == "on-policy" and row["aggregate"] == "fixed"]
    names = dict.fromkeys(row["process"] for row in fixed)
    panels = {name: [row for row in fixed if row["process"] == name] for name in names}
    plot_gradients(os.path.join(folder, "gradients.png"), panels, title="Policy gradients of one batch, on-policy")


def main(argv: Sequence[str]) -> None:
    """Draw batches, assign credit, differentiate, measure the errors, print tables."""
    del argv
    until = math.inf if UNTIL.value is None else UNTIL.value
    if MOST_BATCHES.value < BATCHES.value and until < math.inf:
        raise UserError(f"--most_batches={MOST_BATCHES.value} is less than --batches={BATCHES.value}")
    if FILE.value:
        load_file(SCHEMES, FILE.value)
    schemes = variants(select_schemes(WANTED.value))
    processes = select_names(PROCESS.value, list(PROCESSES), "process")
    console = Console()
    console.width = max(console.width, WIDTH)  # A log must not cut figures.
    sampling = Sampling(BATCHES.value, GROUPS.value, SAMPLES.value, SEED.value, until, MOST_BATCHES.value)
    on_policy, off_policy = cases(schemes)
    rows: list[Row] = []
    total = len(processes) * len(on_policy + off_policy) * sampling.most_draws
    with progress_bar("gradients", 0, total, True) as show_progress:
        done = 0

        def advance(estimated: int, text: str) -> None:
            nonlocal done
            done += estimated
            show_progress(done, text)

        for name in processes:
            rows += measure(name, on_policy, 0.0, sampling, advance)
            rows += measure(name, off_policy, SHIFT.value, sampling, advance)
    drawn = sorted({row["batches"] for row in rows})
    notes = (
        f"{' to '.join(str(n) for n in dict.fromkeys((drawn[0], drawn[-1])))} batches of {GROUPS.value} groups x "
        f"{SAMPLES.value} trajectories. Lengths are shares of the exact gradient's, squares of its square. c is the "
        f"projection of the expected estimate on it. {UNSEEN}: a joint test of all coordinates does not reject at "
        f"{LEVEL}, each row by itself; {SCALED}: a bias was seen, but none of the direction (no turn). A visible bias "
        f"is the smallest that the test finds in {POWER:.0%} of cases, wherever it points."
    )
    console.print(notes, soft_wrap=True)
    for title, lines in tables(rows, until):
        show(console, title, lines)
    if OUT.value:
        write(OUT.value, rows, notes, until)
        look = f"Look at {OUT.value}/gradients.md, {OUT.value}/gradients.png; all figures: gradients.csv"
        console.print(look, markup=False, soft_wrap=True)


if __name__ == "__main__":
    configs.run_main(main)
