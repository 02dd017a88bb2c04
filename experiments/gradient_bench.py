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
import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

from agentr1_jax.credit import SCHEMES, CreditBatch, get_scheme, load_schemes
from agentr1_jax.credit.registry import DISCOUNTS
from agentr1_jax.learner.batch import Reads
from agentr1_jax.learner.fill import AGGREGATES
from agentr1_jax.learner.losses import CLIPS, LossConfig
from agentr1_jax.learner.ratios import RATIOS
from agentr1_jax.report.gradients import plot_gradients
from agentr1_jax.report.tables import markdown_table
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.errors import UserError
from agentr1_jax.runtime.progress import progress
from experiments.credit.estimates import LEVEL, draw, gradients, judge, lay_out, weights
from experiments.credit.processes import PROCESSES, every_path, exact_gradient

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
WRONG_VALUE = 0.5
ON_POLICY = LossConfig(
    ratio="token",
    clip="ppo",
    clip_low=0.2,
    clip_high=0.2,
    dual_c=3.0,
    value_coef=0.5,
    value_clip=0.5,
    entropy_coef=0.0,
    temperature=1.0,
    chunk=1024,
)
UNCLIPPED = dataclasses.replace(ON_POLICY, clip_low=1 - 1e-6, clip_high=1e9)
LOSSES = {
    "none": dataclasses.replace(ON_POLICY, clip="none"),
    **{f"{ratio}, no bound": dataclasses.replace(UNCLIPPED, ratio=ratio) for ratio in RATIOS},
    **{
        f"{ratio}, {clip}": dataclasses.replace(
            ON_POLICY, ratio=ratio, clip=clip, clip_high=0.2 if clip == "ppo" else 0.28
        )
        for ratio in RATIOS
        for clip in CLIPS
        if clip != "none"
    },
}
"""Every ratio x clip; `no bound` is `ppo` whose bounds are never reached."""
COLORS = {"unbiased": "green", "scaled": "blue", "biased": "dark_orange"}
Row = dict[str, Any]


class Variant(NamedTuple):
    """A scheme with hyper-parameters and, if it needs one, a critic: `exact V` or `const V`."""

    scheme: str
    hyperparameters: Mapping[str, Any]
    critic: str | None

    @property
    def label(self) -> str:
        """As tables show it."""
        settings = [f"{key}={x:g}" if isinstance(x, float) else f"{key}={x}" for key, x in self.hyperparameters.items()]
        return ", ".join([" ".join([self.scheme, *settings]), *([self.critic] if self.critic else [])])


def variants(names: Sequence[str]) -> list[Variant]:
    """Each scheme plain, as it is by default, and with one hyper-parameter changed at a time; plain is not whitened."""
    out = []
    for name in names:
        scheme, _ = get_scheme(name, {})
        known = inspect.signature(scheme.assign).parameters
        plain = {"whiten": "none"} if "whiten" in known and known["whiten"].default != "none" else {}
        others: list[Mapping[str, Any]] = [{}] if plain else []
        others += [plain | {"lam": 0.9}] if "lam" in known else []
        others += [plain | {key: 1.0} for key in ("gamma", "gamma_high") if key in known and known[key].default != 1]
        others += [{"norm": "mean_std_norm"}] if "norm" in known else []
        others += [{"of": "return", "outcome_weight": 0.0}] if {"of", "outcome_weight"} <= set(known) else []
        critics = ("exact V", "const V") if scheme.needs_critic else (None,)
        out += [Variant(name, settings, critic) for critic in critics for settings in (plain, *others)]
    return out


@functools.cache
def program(scheme: str, settings: tuple[tuple[str, Any], ...]) -> Callable[..., Array]:
    """(fields of batches, discounts) -> advantages [batches, tokens]: one program, whatever the discounts."""
    _, assign = get_scheme(scheme, dict(settings))
    return jax.jit(jax.vmap(lambda fields, given: assign(CreditBatch(**fields), **given).advantages, (0, None)))


def advantages(variant: Variant, fields: Mapping[str, Array]) -> Float[Array, "batches tokens"]:
    """Advantages under a variant of a scheme, of batches given by the fields of their `CreditBatch`."""
    scheme, _ = get_scheme(variant.scheme, variant.hyperparameters)
    defaults = {key: x.default for key, x in inspect.signature(scheme.assign).parameters.items() if key in DISCOUNTS}
    given = {**defaults, **variant.hyperparameters}
    settings = tuple((key, x) for key, x in given.items() if key not in defaults)
    constant = jnp.full_like(fields["values"], WRONG_VALUE)
    values = {None: None, "exact V": fields["values"], "const V": constant}[variant.critic]
    return program(variant.scheme, settings)({**fields, "values": values}, {key: float(given[key]) for key in defaults})


def on_policy(name: str, schemes: Sequence[Variant]) -> Iterator[Row]:
    """A row for each variant and aggregate."""
    process = PROCESSES[name]()
    paths = every_path(process)
    _, exact = exact_gradient(paths, process.logits)
    fields, reads = lay_out(draw(paths, process.logits, SEED.value, **sizes()))
    shares = {aggregate: weights(aggregate, reads, GROUPS.value * SAMPLES.value) for aggregate in AGGREGATES}
    for variant in schemes:
        advantage = advantages(variant, fields)
        for aggregate, share in shares.items():
            errors = judge(estimate(ON_POLICY, process.logits, reads, advantage, share), exact)
            told = {"process": name, "scheme": variant.label, "aggregate": aggregate, "loss": "on-policy"}
            yield told | dataclasses.asdict(errors)


def off_policy(name: str) -> Iterator[Row]:
    """A row for each loss, on trajectories of other logits."""
    process = PROCESSES[name]()
    paths = every_path(process)
    _, exact = exact_gradient(paths, process.logits)
    shift = np.random.default_rng(0).normal(scale=SHIFT.value, size=process.logits.shape)
    fields, reads = lay_out(draw(paths, process.logits + shift, SEED.value, **sizes()))
    variant = Variant("step_gae", {"whiten": "none"}, critic="exact V")
    advantage, share = advantages(variant, fields), weights("fixed", reads, GROUPS.value * SAMPLES.value)
    for loss, config in LOSSES.items():
        errors = judge(estimate(config, process.logits, reads, advantage, share), exact)
        told = {"process": name, "scheme": variant.label, "aggregate": "fixed", "loss": loss}
        yield told | dataclasses.asdict(errors)


def sizes() -> dict[str, int]:
    return {"batches": BATCHES.value, "groups": GROUPS.value, "samples": SAMPLES.value}


def estimate(config: LossConfig, logits: np.ndarray, reads: Reads, advantage: Array, weight: np.ndarray) -> np.ndarray:
    """Gradient of each batch, [batches, actions]."""
    reads = dataclasses.replace(reads, advantage=advantage, weight=jnp.asarray(weight))
    return np.asarray(gradients(config, jnp.asarray(logits, jnp.float32), reads))


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


def chosen(wanted: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The names asked for. Raises UserError for an unknown one."""
    if wanted == ["all"]:
        return list(known)
    for name in wanted:
        if name not in known:
            raise UserError(f"--{what}: unknown name {name!r}; choose all or some of {', '.join(known)}")
    return list(wanted)


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
    rows: list[Row] = []
    total = len(processes) * (len(schemes) * len(AGGREGATES) + len(LOSSES))
    with progress("gradients", 0, total, True) as tell:
        for name in processes:
            for row in itertools.chain(on_policy(name, schemes), off_policy(name)):
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
