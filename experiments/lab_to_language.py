"""From the credit lab to language: processes of the lab told in words, with a decoder for a policy.

    python -m experiments.lab_to_language --part=late_key
    python -m experiments.lab_to_language --part=order --lab=runs/credit_lab

Both parts are grids of `experiments.ablate` on configs/keydoor.py; the same command resumes them, and where all runs
are finished only counts anew. All runs of a layout start from one warm start. What is compared is the regret: the best
expected return less that of the policy, sampled, over 256 questions on which no run was trained and no rate was chosen.

late_key: noisy rooms before the keys or after them, with payments of ± 0 or ± 1.5, five schemes, eight seeds. In each
of these four cells each scheme chooses its learning rate on `dev`, with two other seeds; where the best rate is the
lowest or the highest that was tried, one beyond it is tried, too. `CONTRASTS` were written down before the first run.

order: schemes in the order of the lab's areas against their order in words, on `noise_before` and `inquiry`, on which
most of the lab's schemes differ by more than a few hundredths. Arguments of schemes are those that the lab chose, and
so are learning rates, times one factor that makes their geometric mean the config's.
"""

from __future__ import annotations

import ast
import csv
import functools
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from absl import flags
from jaxtyping import Float
from rich.console import Console

from agentr1_jax import files
from agentr1_jax.envs.tabular import action_values
from agentr1_jax.errors import UserError
from agentr1_jax.report.lab import plot_regrets
from agentr1_jax.report.statistics import holm, paired_t, t_interval
from agentr1_jax.report.tables import markdown_table, write_csv
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.keydoor import game
from experiments.ablation.arms import folder_name
from experiments.ablation.grid import is_finished
from experiments.setup import run_main

PART = flags.DEFINE_enum("part", "late_key", ["late_key", "order"], "what is run")
OUT = flags.DEFINE_string("out", "runs/lab_to_language", "folder of the grids and of the results")
LAB = flags.DEFINE_string("lab", "runs/credit_lab", "folder of the lab's results, for --part=order")

CONFIG = "configs/keydoor.py"
LAYOUTS: Mapping[str, Sequence[str]] = {
    "before": ("--config.task.keydoor.rooms_before={rooms}", "--config.task.keydoor.rooms=0"),
    "after": ("--config.task.keydoor.rooms_before=0", "--config.task.keydoor.rooms={rooms}"),
}
NOISES = (1.5, 0.0)
TO_GO = ("reinforce", "step_gae", "state_baseline")
"""Schemes whose credit is the return from the step on."""
LATE_KEY = ("grpo", "gigpo", *TO_GO)
RATES = (2.5e-4, 5e-4, 1e-3)
LIMITS = 3e-5, 8e-3
"""Rates beyond these are not tried."""
CONFIG_RATE = 5e-4
TUNING_SEEDS, SEEDS = (100, 101), tuple(range(8))
ROOMS = 5
CONTRASTS: Mapping[str, Mapping[tuple[str, float], float]] = {
    "noise before the choice": {("before", 1.5): 1},
    "noise after the choice": {("after", 1.5): 1},
    "no noise, rooms before": {("before", 0.0): 1},
    "no noise, rooms after": {("after", 0.0): 1},
    "what noise adds before − what it adds after": {
        ("before", 1.5): 1,
        ("before", 0.0): -1,
        ("after", 1.5): -1,
        ("after", 0.0): 1,
    },
}
"""Weights of the cells. In each cell stands, for every seed, the regret of grpo less the mean regret of `TO_GO`. The
first is the one that the study is about, and is tested at .05 by itself; the others are corrected together."""
ORDER = ("grpo", "rloo", "gigpo", "turn_grpo", "rtmc", *TO_GO)
ORDER_SEEDS = tuple(range(10))
LAB_ROOMS = 4
INQUIRY = (
    "--config.task.file=experiments/lab/inquiry.py",
    "--config.task.name=inquiry",
    "--config.budget.max_steps=6",
    "--config.eval.every=0",
)
DRAWS = 4000
CONSOLE = Console(soft_wrap=True, highlight=False)


class Score(NamedTuple):
    """A finished run: regret of the sampled and of the greedy policy, and share of opened doors, sampled."""

    regret: float
    greedy: float
    em: float


def rooms_flags(layout: str, rooms: int, noise: float) -> list[str]:
    """Return the flags that make a layout of KeyDoor."""
    return [
        *(flag.format(rooms=rooms) for flag in LAYOUTS[layout]),
        f"--config.task.keydoor.noise={noise}",
        f"--config.budget.max_steps={rooms + 2}",
        "--config.eval.every=0",
    ]


def best_return(layout: str, rooms: int, split: str, questions: int) -> float:
    """Return the mean of the best expected returns over the questions of a split; noise does not change it."""
    before, after = (rooms, 0) if layout == "before" else (0, rooms)
    task = make_task("keydoor", rooms_before=before, rooms=after)
    games = [game(task.row(split, i), noise=0.0) for i in range(questions)]
    return float(np.mean([max(action_values(one)[one.start].values()) for one in games]))


def call(module: str, *arguments: str) -> None:
    """Run a program of ours and show its command. Raises UserError if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    CONSOLE.print(shlex.join(["python", *command[1:]]), markup=False)
    if status := subprocess.run(command).returncode:
        raise UserError(f"{module} ended with status {status}; mend what it says, and start the same command again")


def warm_start(folder: str, changes: Sequence[str]) -> str:
    """Make a warm start where there is none; return its folder. Raises UserError where it was stopped."""
    if not is_finished(folder):
        call("experiments.train", f"--config={CONFIG}", *changes, "--config.updates=0", f"--config.run_dir={folder}")
    check_result(folder)
    return folder


def check_result(folder: str) -> None:
    """Raise UserError where a run was stopped: programs that are stopped end with status 0."""
    if not is_finished(folder):
        raise UserError(f"{folder} is not finished; the same command goes on with it")


def run_grid(out: str, arms: Sequence[str], seeds: Sequence[int], start: str, *changes: str) -> None:
    """Run a grid of arms, written as `ablate --schemes` takes them, from a warm start."""
    call(
        "experiments.ablate",
        f"--config={CONFIG}",
        f"--schemes={','.join(arms)}",
        f"--seeds={','.join(map(str, seeds))}",
        f"--out={out}",
        "--metric=expected_return",
        f"--config.warm_start.init_from={start}",
        f"--config.compilation_cache={os.path.join(os.path.dirname(start), 'compiled')}",
        *changes,
    )


def score(out: str, arm: str, seed: int, best: float) -> Score:
    """Read the last evaluations of a run."""
    folder = os.path.join(out, folder_name(arm), f"seed{seed}")
    check_result(folder)
    last = {record["phase"]: record for record in read_metrics(os.path.join(folder, "metrics.jsonl"))}
    regret, greedy = (best - float(last[phase]["eval/expected_return"]) for phase in ("eval_sampled", "eval"))
    return Score(regret, greedy, float(last["eval_sampled"]["eval/em"]))


def scores(out: str, arm: str, seeds: Sequence[int], best: float) -> Float[np.ndarray, "score seeds"]:
    """Read the scores of an arm: each field of `Score`, of all seeds."""
    return np.array([score(out, arm, seed, best) for seed in seeds]).T


def choose_rates(
    regret: Callable[[Mapping[str, Sequence[float]]], Mapping[str, Mapping[float, float]]],
) -> dict[str, dict[float, float]]:
    """Try learning rates until the best of each scheme lies between others, or at a limit.

    Args:
      regret: (scheme -> rates) -> scheme -> rate -> mean regret.

    Returns:
      scheme -> rate -> mean regret, the best rate first.
    """
    tried = {scheme: list(RATES) for scheme in LATE_KEY}
    while True:
        found = {scheme: sorted(of_rate.items(), key=lambda pair: pair[1]) for scheme, of_rate in regret(tried).items()}
        beyond = {}
        for scheme, ((best, _), *_) in found.items():
            ends = {min(tried[scheme]): best / 2, max(tried[scheme]): best * 2}
            if best in ends and LIMITS[0] <= ends[best] <= LIMITS[1]:
                beyond[scheme] = ends[best]
        if not beyond:
            return {scheme: dict(pairs) for scheme, pairs in found.items()}
        for scheme, rate in beyond.items():
            tried[scheme].append(rate)


def regrets_on_dev(
    folder: str, start: str, changes: Sequence[str], best: float, tried: Mapping[str, Sequence[float]]
) -> dict[str, dict[float, float]]:
    """Train each scheme with each rate; return scheme -> rate -> mean regret on `dev`, whose best return is `best`."""
    arms = [arm_of(scheme, rate) for scheme, rates in tried.items() for rate in rates]
    run_grid(folder, arms, TUNING_SEEDS, start, *changes, "--config.eval.split=dev")
    return {
        scheme: {rate: float(scores(folder, arm_of(scheme, rate), TUNING_SEEDS, best)[0].mean()) for rate in rates}
        for scheme, rates in tried.items()
    }


def arm_of(scheme: str, rate: float) -> str:
    """Return a scheme with a learning rate as an arm."""
    return f"{scheme}+optimizer.lr={rate:.3g}"


def contrast_rows(regrets: Mapping[tuple[str, float, str], Float[np.ndarray, "seeds"]]) -> list[dict[str, Any]]:
    """Return a line for each of `CONTRASTS`, from the regrets of each layout, noise and scheme."""
    lines, p_values = list[dict[str, Any]](), list[float]()
    for name, weights in CONTRASTS.items():
        gain = np.sum(
            [
                weight * (regrets[*cell, "grpo"] - np.mean([regrets[*cell, scheme] for scheme in TO_GO], axis=0))
                for cell, weight in weights.items()
            ],
            axis=0,
        )
        p_values.append(float(paired_t(gain, np.zeros_like(gain))[-1]))
        level = 0.05 if len(lines) == 0 else 0.05 / (len(CONTRASTS) - 1)
        seen = visible_mean(gain, level)
        lines.append({"contrast": name, "mean [95 %]": interval(gain), "would have been seen": seen})
    corrected = [p_values[0], *holm(np.array(p_values[1:]))]
    return [{**line, "p": f"{p:.2g}"} for line, p in zip(lines, corrected, strict=True)]


def visible_mean(x: Float[np.ndarray, "n"], level: float, power: float = 0.8) -> float:
    """Return the smallest mean that a t test at `level` finds with probability `power`, by the spread of x."""
    quantiles = scipy.stats.t.ppf(1 - level / 2, len(x) - 1) + scipy.stats.t.ppf(power, len(x) - 1)
    return float(quantiles * x.std(ddof=1) / len(x) ** 0.5)


def interval(x: Float[np.ndarray, "n"]) -> str:
    """Return a mean with Student's interval as text."""
    mean, low, high = t_interval(x)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def late_key(out: str) -> list[str]:
    """Run the two by two, return its tables."""
    tuned, lines, regrets = [], [], dict[tuple[str, float, str], Any]()
    csv_rows = []
    for noise, layout in itertools.product(NOISES, LAYOUTS):
        start = warm_start(os.path.join(out, f"warm_start_{layout}_{ROOMS}"), rooms_flags(layout, ROOMS, 0.0))
        folder = os.path.join(out, "late_key", layout)
        tuning, cell = (os.path.join(folder, f"{name}_{noise:g}") for name in ("tuning", "noise"))
        changes = rooms_flags(layout, ROOMS, noise)
        on_dev = functools.partial(regrets_on_dev, tuning, start, changes, best_return(layout, ROOMS, "dev", 256))
        arms = []
        for scheme, regret_of in choose_rates(on_dev).items():
            arms.append(arm_of(scheme, next(iter(regret_of))))
            shown = ", ".join(f"{rate:g}: {regret_of[rate]:.3f}" for rate in sorted(regret_of))
            tuned.append({"rooms": layout, "noise": noise, "scheme": scheme, "regrets on dev": shown})
        run_grid(cell, arms, SEEDS, start, *changes)
        best = best_return(layout, ROOMS, "eval", 256)
        for scheme, arm in zip(LATE_KEY, arms, strict=True):
            regret, greedy, em = scores(cell, arm, SEEDS, best)
            regrets[layout, noise, scheme] = regret
            place = {"rooms": layout, "noise": noise, "scheme": scheme}
            figures = {"regret [95 %]": interval(regret), "greedy": interval(greedy), "em": interval(em)}
            lines.append({**place, **figures})
            csv_rows += [
                {**place, "seed": seed, "regret": r, "em": e} for seed, r, e in zip(SEEDS, regret, em, strict=True)
            ]
    write_csv(os.path.join(out, "late_key.csv"), csv_rows)
    cells = {
        f"rooms {layout} the keys, ± {noise:g}": {scheme: regrets[layout, noise, scheme] for scheme in LATE_KEY}
        for layout in LAYOUTS
        for noise in NOISES
    }
    plot_regrets(os.path.join(out, "late_key.png"), cells)
    return [markdown_table(rows) for rows in (tuned, lines, contrast_rows(regrets))]


def read_lab(folder: str, process: str) -> dict[str, tuple[str, Float[np.ndarray, "seeds"]]]:
    """Read each scheme of `ORDER` as the lab chose it, as an arm, and the areas of its trainings.

    Raises:
      UserError: the lab has not run such a scheme or process.
    """
    path, areas = os.path.join(folder, "lab.csv"), dict[str, list[float]]()
    if not os.path.exists(path):
        raise UserError(f"--lab={folder}: no lab.csv there; run python -m experiments.credit_lab --out={folder}")
    chosen = dict[str, tuple[float, Mapping[str, float]]]()
    with open(path, encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["process"] == process and row["scheme"] in ORDER:
                areas.setdefault(row["scheme"], []).append(float(row["area"]))
                chosen[row["scheme"]] = float(row["lr"]), ast.literal_eval(row["arguments"])
    if missing := [scheme for scheme in ORDER if scheme not in chosen]:
        raise UserError(f"{path}: {', '.join(missing)} not run on {process}; run the lab with them")
    factor = CONFIG_RATE / scipy.stats.gmean([rate for rate, _ in chosen.values()])
    out = {}
    for scheme in ORDER:
        rate, arguments = chosen[scheme]
        given = ",".join(f"{key}={x:g}" for key, x in arguments.items())
        out[scheme] = arm_of(f"{scheme}({given})" if given else scheme, factor * rate), np.array(areas[scheme])
    return out


def rank_correlation(
    lab: Sequence[Float[np.ndarray, "seeds"]], regrets: Sequence[Float[np.ndarray, "seeds"]]
) -> dict[str, str]:
    """Return Spearman's correlation of the lab's areas with the regrets in words, sign turned, over schemes.

    Two intervals: seeds drawn anew (for these schemes), and schemes and seeds drawn anew (for others like them). Means
    of drawn seeds scatter more than the means do, which pulls both towards 0; schemes that are near copies of each
    other count as several.
    """

    rng, n = np.random.default_rng(0), len(lab)
    draws = [np.stack([rng.choice(x, (DRAWS, len(x))).mean(-1) for x in each], -1) for each in (lab, regrets)]
    picked = rng.integers(n, size=(DRAWS, n))
    intervals = {
        "of seeds": spearman(draws[0], -draws[1]),
        "of seeds and schemes": spearman(*(np.take_along_axis(x, picked, -1) for x in (draws[0], -draws[1]))),
    }
    areas, lost = (np.array([x.mean() for x in each]) for each in (lab, regrets))
    orders = np.array([rng.permutation(areas) for _ in range(DRAWS)])
    found = spearman(areas, -lost)
    by_chance = (np.abs(spearman(orders, -lost)) >= abs(found) - 1e-9).sum()
    out = {"rank correlation": f"{found:.2f}", "p, permutations": f"{(by_chance + 1) / (DRAWS + 1):.3f}"}
    for name, values in intervals.items():
        low, high = np.nanquantile(values, [0.025, 0.975])
        out[f"95 % {name}"] = f"[{low:.2f}, {high:.2f}]"
    return out


def spearman(x: Float[np.ndarray, "... n"], y: Float[np.ndarray, "... n"]) -> Float[np.ndarray, "..."]:
    """Return Spearman's rank correlation over the last axis; NaN where all of x or of y are equal."""
    x, y = (rank - rank.mean(-1, keepdims=True) for rank in (scipy.stats.rankdata(each, axis=-1) for each in (x, y)))
    with np.errstate(invalid="ignore"):
        return (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))


def order(out: str, lab: str) -> list[str]:
    """Run the schemes with the lab's arguments in words, return the tables of both orders."""
    from experiments.lab.inquiry import BEST_RETURN  # Registers its task, which nothing else asks for.

    lines, found, csv_rows = [], [], []
    in_words = {
        "noise_before": (rooms_flags("before", LAB_ROOMS, max(NOISES)), best_return("before", LAB_ROOMS, "eval", 256)),
        "inquiry": (INQUIRY, BEST_RETURN),
    }
    for process, (changes, best) in in_words.items():
        of_lab = read_lab(lab, process)
        folder = os.path.join(out, "order", process)
        start = warm_start(os.path.join(folder, "warm_start"), changes)
        arms = [arm for arm, _ in of_lab.values()]
        run_grid(folder, arms, ORDER_SEEDS, start, *changes)
        regrets = []
        for scheme, (arm, area) in of_lab.items():
            regret, greedy, em = scores(folder, arm, ORDER_SEEDS, best)
            regrets.append(regret)
            place = {"process": process, "scheme": arm}
            intervals = {"regret [95 %]": interval(regret), "greedy": interval(greedy), "em": interval(em)}
            lines.append({**place, "area in the lab": interval(area), **intervals})
            csv_rows += [
                {"process": process, "scheme": scheme, "arm": arm, "seed": seed, "regret": r, "em": e}
                for seed, r, e in zip(ORDER_SEEDS, regret, em, strict=True)
            ]
        found.append({"process": process, **rank_correlation([area for _, area in of_lab.values()], regrets)})
    write_csv(os.path.join(out, "order.csv"), csv_rows)
    return [markdown_table(lines), markdown_table(found)]


def main(argv: Sequence[str]) -> None:
    """Run a part, write and print its tables."""
    del argv
    tables = late_key(OUT.value) if PART.value == "late_key" else order(OUT.value, LAB.value)
    text = "\n".join(tables)
    with files.atomic_write(os.path.join(OUT.value, f"{PART.value}.md")) as out:
        out.write(text)
    CONSOLE.print(text, markup=False)


if __name__ == "__main__":
    run_main(main)
