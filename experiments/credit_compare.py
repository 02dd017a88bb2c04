"""Compare credit schemes on the recorded trajectories of a run.

    python -m experiments.credit_compare RUN [--schemes=grpo,step_gae(lam=0.9),gigpo] [--update=12]

All schemes judge the same steps by the rewards and values that training recorded with them. Gradients are taken at the
parameters of the checkpoint nearest before the batch, or of the newest one. OUT (in RUN unless given) gets report.html,
summary.md, schemes.csv, pairs.csv, advantages.csv, the pictures, and the page of the batch (rl_000012.html), to which
the comparison links. The quickstart's batch of 128 trajectories takes a minute on two CPU cores.
"""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags, logging
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentr1_jax import files
from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.errors import UserError, inert
from agentr1_jax.learner.config import AGGREGATES
from agentr1_jax.report import credit as stats
from agentr1_jax.report.page import write_page
from agentr1_jax.report.run_report import Tokens, write_run_report
from agentr1_jax.report.selection import Selection
from agentr1_jax.report.tables import format_value, markdown_table, write_csv
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.run_folder import RunFolder, batch_name
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build, phases, train_step
from agentr1_jax.train.build import Setup
from agentr1_jax.train.phases import Phase
from agentr1_jax.train.progress import read_progress
from agentr1_jax.train.restore import checkpoint_before, restore_params
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import POLICIES, Step, Trajectory
from experiments.credit import recording
from experiments.credit.choice import choose, label
from experiments.credit.effects import Effects, effects, replay_error
from experiments.credit.recording import Part, Scale
from experiments.setup import read_run, read_settings, use_compile_cache

configs.define_trust_flag()
UPDATE = flags.DEFINE_string("update", "last", "the recorded RL batch: a number as in trajectories/rl_000012, or last")
SCHEMES = flags.DEFINE_string("schemes", "all", "names with commas between them, with hyper-parameters in brackets")
OUT = flags.DEFINE_string("out", None, "folder of the results; RUN/credit_compare unless given")
RESAMPLES = flags.DEFINE_integer("resamples", 200, "resampled batches, for the noise", lower_bound=2)
AGGREGATE = flags.DEFINE_enum("aggregate", "token", AGGREGATES, "of the tokens' losses")
MOST_STEPS, MOST_PAIRS, MOST_PRINTED = 24, 6, 6
"""Steps in the report; pairs of schemes and steps in the terminal."""
PROMPT_TOKENS = 120
"""Last tokens of a prompt in the report."""
AFFINE_TO = 1e-3
SAME_TO = 1e-3
"""Advantages are the recorded ones where they differ by no more than this share of the largest of them."""


def main(argv: Sequence[str]) -> None:
    """Read recordings and parameters, compare the schemes, write the results."""
    run = argv[1]
    settings, out = read_settings(read_run(run)), OUT.value or os.path.join(run, "credit_compare")
    update, batch = recording.read_batch(run, settings, UPDATE.value)
    use_compile_cache(settings)
    tokenizer = build.make_tokenizer(settings, None, resumes=True)
    policy, mesh = build.make_policy(settings, tokenizer), meshes.learner_mesh(1, jax.device_count(), 1)
    nothing: Any = None  # Nothing is rolled out.
    setup = Setup(
        settings=settings,
        task=nothing,
        tokenizer=tokenizer,
        agent=nothing,
        policy=policy,
        frozen=build.make_frozen(settings, policy, mesh),
        learner_mesh=mesh,
        engine=nothing,
        rollout_params=nothing,
        tool_metrics=ToolMetrics(),
    )
    builder = build.make_state_builder(settings, policy, mesh)
    phase = phases.reinforcement(setup, builder.optimizer, builder.layout, None)
    trajectories = usable(setup, phase, batch)
    chosen = choose(SCHEMES.value, settings, trajectories)
    params, record = restore_params(run, builder.shapes.params, checkpoint=checkpoint_before(run, update))
    progress = read_progress(record, run)

    estimate = recording.estimate_scale(setup, RunningMeanStd(*progress.return_statistics), trajectories)
    scale = recording.read_scale(run, update, estimate, critic=settings.learns_values)
    parts, gap = recording.score_groups(setup, params, trajectories, scale)
    distance = replay_error(settings.scheme, parts, baselines=scale.baselines)
    result = effects(
        setup,
        params,
        parts,
        chosen.schemes,
        aggregate=AGGREGATE.value,
        resamples=RESAMPLES.value,
        baselines=scale.baselines,
    )
    version = recording.version(progress, settings)
    facts = {
        "trajectories": len(trajectories),
        "groups": len(parts),
        "steps": result.steps.shape[1],
        "tokens": result.advantages.shape[1],
        "sampled by version": trajectories[0].steps[0].policy_version,
        "gradients at version": version,
        "their log-prob gap": gap,
        "aggregate": AGGREGATE.value,
        "resamples": RESAMPLES.value,
    }
    notes = [
        gradient_note(update, version),
        *lacking(trajectories, scale, valued="value" in params, version=version),
        own_note(settings, trajectories, distance),
        *chosen.notes,
        *remarks(parts, result),
    ]
    title = f"Credit schemes on {run} {batch_name(update)}"
    page = f"{batch_name(update)}.html"
    write(out, title, facts, notes, chosen.own, result, tokenizer, page)
    tokens = Tokens(tokenizer.decode, frozenset(tokenizer.added.values()))
    for fault in write_run_report(RunFolder(run), Selection((update,)), tokens, out=os.path.join(out, page)):
        logging.warning("%s", fault)
    show(Console(), title, notes, result, page)
    Console(soft_wrap=True).print(
        Text(f"Look at {out}/report.html; accounts are in {out}/{page}, figures in {out}/*.csv and {out}/summary.md")
    )


def usable(setup: Setup, phase: Phase, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories that training would use, by whichever scheme.

    Raises:
      UserError: there are none, or one lacks its final prompt.
    """
    credited = any(s.advantages is not None for t in trajectories for s in t.steps)
    if credited:  # Training has not seen the others.
        trajectories = [t for t in trajectories if t.steps and t.steps[0].advantages is not None]
    any_scheme = dataclasses.replace(phase, scheme=None, observations=False, critic=setup.settings.run.critic != "none")
    try:
        sifted, _, _ = train_step.sift(setup, any_scheme, trajectories)
    except ValueError as error:
        raise UserError(str(error)) from error
    trained = [t for t in sifted if POLICIES[t.outcome].training == "train"]
    if not trained:
        run_dir = setup.settings.run.run_dir
        raise UserError(f"{run_dir}: no trajectory of this batch can be trained on; choose another --update")
    return trained


def gradient_note(update: int, version: int) -> str:
    """Say at which parameters the gradients of RL batch `update` are taken; `version` is their number of updates."""
    learnt = f"the parameters after {version} RL updates"
    if version == update:
        where = f"{learnt}, which then learnt from this batch"
    elif version < update:
        where = f"{learnt}, the checkpoint nearest before this batch, which came {update - version} updates later"
    else:
        where = f"{learnt}, {version - update} more than before this batch: no earlier checkpoint is kept"
    return f"Gradients are those at {where}. Advantages do not depend on the parameters but where a note says so."


def lacking(trajectories: Sequence[Trajectory], scale: Scale, *, valued: bool, version: int) -> list[str]:
    """Return a remark on each thing that is not recorded; `valued` where the parameters have a critic."""
    notes = []
    if valued and not recording.has_values(trajectories):
        notes.append(
            "No values of a critic are recorded with this batch: schemes with a critic judge by those of the "
            f"parameters after {version} RL updates."
        )
    if not scale.recorded:
        notes.append(
            "The run has not recorded how it shaped the rewards of this batch: they are shaped anew, with the running "
            f"statistics of returns after {version} RL updates."
        )
    return notes


def own_note(settings: Settings, trajectories: Sequence[Trajectory], distance: float | None) -> str:
    """Say whether the run's own scheme gives the recorded advantages; see `replay_error`."""
    own = f"The run's own scheme, {label(settings.scheme.name, settings.scheme.arguments)},"
    if distance is None:
        return f"{own} cannot be checked: no advantages are recorded with this batch."
    if distance <= SAME_TO:
        return f"{own} gives the recorded advantages to {SAME_TO:g} of the largest of them."
    if not settings.learner.advantage_mask:
        why = "the mask ablation (learner.advantage_mask=False) is not replayed"
    elif settings.objective.kl_in_reward != "none":
        why = "the KL in the reward is recorded by step, not by token"
    elif settings.learns_values and not recording.has_values(trajectories):
        why = "the values by which they were assigned are not recorded"
    elif settings.learns_values:
        why = "values are recorded with three digits (float16)"
    else:
        why = "the record of the batch is not what training saw"
    return f"{own} does not give the recorded advantages (largest difference {distance:.2g} of the largest): {why}."


def remarks(parts: Sequence[Part], result: Effects) -> list[str]:
    """Return remarks on the figures."""
    out = []
    values = [part.valued.values for part in parts if part.valued is not None]
    if values and not np.ptp(np.concatenate(values)):
        out.append("The critic's values are all the same: nothing has trained it.")
    for name, rest in zip(result.schemes, result.misfit, strict=True):
        if rest > AFFINE_TO:
            out.append(
                f"{name}: in a resampled batch its advantages are not a scale and a shift of those here (misfit "
                f"{rest:.2g} of their size), so its signal to noise is approximate."
            )
    return out


def scheme_rows(result: Effects) -> list[dict[str, Any]]:
    """Return a row for each scheme."""
    rows = []
    for i, name in enumerate(result.schemes):
        x, noise = result.steps[i], result.noise[i]
        rows.append(
            {
                "scheme": name,
                "mean": float(x.mean()),
                "std": float(x.std()),
                "zero": float((x == 0).mean()),
                "gradient": noise.norm,
                "snr": noise.snr,
                "direction": noise.direction,
                "batch effect": float(result.batch_effect[i]),
            }
        )
    return rows


def short(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as people read them: three decimals (three digits of a gradient's norm), and None for NaN."""

    def one(key: str, value: Any) -> Any:
        if not isinstance(value, float):
            return value
        return None if np.isnan(value) else float(f"{value:.3g}") if key == "gradient" else round(value, 3) + 0.0

    return [{key: one(key, value) for key, value in row.items()} for row in rows]


def pair_rows(result: Effects) -> list[dict[str, Any]]:
    """Return a row for every two schemes, the least alike gradients first."""
    matrices = {
        "pearson": stats.pearson(result.steps),
        "spearman": stats.spearman(result.steps),
        "opposed": stats.opposition(result.steps),
        "gradient cosine": stats.cosines(result.gram),
    }
    rows = [
        {"scheme": one, "other": other} | {name: float(matrix[i, j]) for name, matrix in matrices.items()}
        for i, one in enumerate(result.schemes)
        for j, other in enumerate(result.schemes[:i])
    ]
    return sorted(rows, key=lambda row: np.nan_to_num(row["gradient cosine"], nan=2.0))


def step_positions(trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, int, Step]]:
    """Return the steps in order, each with its trajectory and its number."""
    return [(t, number, step) for t in trajectories for number, step in enumerate(t.steps)]


def account_link(page: str, uid: str, number: int) -> str:
    """Return the address of the account of a step, counted from 0, on the page of its batch."""
    return f"{page}#{urllib.parse.quote(uid, safe='/', errors='replace')}/{number + 1}"


def advantage_rows(result: Effects, page: str) -> list[dict[str, Any]]:
    """Return a row for each step."""
    return [
        {
            "uid": t.uid,
            "step": number,
            "reward": step.reward,
            "state_key": step.state_key,
            "account": account_link(page, t.uid, number),
        }
        | {name: float(f"{x:.6g}") for name, x in zip(result.schemes, result.steps[:, place], strict=True)}
        for place, (t, number, step) in enumerate(step_positions(result.trajectories))
    ]


def disputed_places(result: Effects) -> list[int]:
    """Return the places of the steps on which scaled advantages differ most, at most one of each trajectory."""
    split = stats.scale_by_rms(result.steps).std(axis=0)
    steps, of_uid = step_positions(result.trajectories), dict[str, int]()
    for place in np.argsort(-split, kind="stable").tolist():
        of_uid.setdefault(steps[place][0].uid, place)
    return list(of_uid.values())[:MOST_STEPS]


def disputed_rows(result: Effects, page: str) -> list[dict[str, Any]]:
    """Return a row for each disputed step: the schemes that encourage it most and least, and its account."""
    scaled, steps = stats.scale_by_rms(result.steps), step_positions(result.trajectories)
    rows = []
    for place in disputed_places(result):
        t, number, _ = steps[place]
        column = scaled[:, place]
        most, least = int(column.argmax()), int(column.argmin())
        rows.append(
            {
                "account": account_link(page, t.uid, number),
                "disagreement": float(column.std()),
                "scheme": result.schemes[most],
                "highest": float(column[most]),
                "other": result.schemes[least],
                "lowest": float(column[least]),
            }
        )
    return rows


def disputed_steps(result: Effects, tokenizer: Tokenizer, page: str) -> list[dict[str, Any]]:
    """Return the disputed steps for the page.

    `advantages` are pairs (advantage, advantage over the scheme's root mean square) by scheme.
    """
    scaled = stats.scale_by_rms(result.steps)
    split, steps = scaled.std(axis=0), step_positions(result.trajectories)
    out: list[dict[str, Any]] = []
    for place in disputed_places(result):
        t, number, step = steps[place]
        end = step.prompt_ids[-PROMPT_TOKENS:]
        facts = (
            f"disagreement {split[place]:.2f}",
            f"step reward {format_value(step.reward)}",
            f"return {format_value(t.total_reward)}",
            str(t.outcome),
        )
        out.append(
            {
                "title": f"Step {number + 1} of {len(t.steps)}",
                "uid": t.uid,
                "account": account_link(page, t.uid, number),
                "facts": facts,
                "question": str(t.row.get("question", t.task)),
                "prompt": ("… " if len(end) < len(step.prompt_ids) else "") + tokenizer.decode(end),
                "response": tokenizer.decode(step.response_ids),
                "observation": step.observation,
                "advantages": {
                    name: (float(a), float(z))
                    for name, a, z in zip(result.schemes, result.steps[:, place], scaled[:, place], strict=True)
                },
            }
        )
    return out


def write(
    out: str,
    title: str,
    facts: Mapping[str, Any],
    notes: Sequence[str],
    own: str | None,
    result: Effects,
    tokenizer: Tokenizer,
    page: str,
) -> None:
    """Write all files of the comparison; `page` is the file name of the page of the batch beside them."""
    schemes, pairs = scheme_rows(result), pair_rows(result)
    cosine, rank = stats.cosines(result.gram), stats.spearman(result.steps)
    order = stats.similarity_order(cosine)
    names = [result.schemes[i] for i in order]
    pictures = {name: os.path.join(out, f"{name}.png") for name in ("heatmaps", "noise", "strips")}
    square = np.ix_(order, order)
    stats.plot_heatmaps(
        pictures["heatmaps"],
        names,
        [("Rank correlation of advantages", rank[square]), ("Cosine of gradients", cosine[square])],
    )
    measured = {key: np.array([row[key] for row in schemes]) for key in ("snr", "direction", "batch effect")}
    stats.plot_noise(
        pictures["noise"],
        result.schemes,
        [
            ("Signal to noise of the gradient", measured["snr"]),
            ("Cosine to the whole batch", measured["direction"]),
            ("Effect of the other groups", measured["batch effect"]),
        ],
    )
    index = np.array([number for _, number, _ in step_positions(result.trajectories)])
    stats.plot_strips(pictures["strips"], result.schemes, stats.scale_by_rms(result.steps), index, above_mean(result))
    write_page(
        os.path.join(out, "report.html"),
        "credit.html",
        title=title,
        facts=facts,
        notes=notes,
        schemes=short(schemes),
        pairs=short(pairs),
        pictures=pictures,
        steps=disputed_steps(result, tokenizer, page),
        own=own,
    )
    for name, rows in (("schemes", schemes), ("pairs", pairs), ("advantages", advantage_rows(result, page))):
        write_csv(os.path.join(out, f"{name}.csv"), rows)
    lines = "".join(f"- {note}\n" for note in [*(f"{k}: {format_value(x)}" for k, x in facts.items()), *notes])
    with files.atomic_write(os.path.join(out, "summary.md")) as file:
        file.write(f"# {title}\n\n{lines}\n{markdown_table(short(schemes))}\n{markdown_table(short(pairs))}")
        disputed = [{**row, "account": f"[{row['account']}]({row['account']})"} for row in disputed_rows(result, page)]
        file.write(f"\nSteps on which the schemes disagree most:\n\n{markdown_table(short(disputed))}")


def above_mean(result: Effects) -> np.ndarray:
    """Return of each step's trajectory less the mean of its group."""
    returns = np.array([t.total_reward for t in result.trajectories])
    group = np.unique([t.group for t in result.trajectories], return_inverse=True)[1]
    above = returns - (np.bincount(group, returns) / np.bincount(group))[group]
    return np.repeat(above, [len(t.steps) for t in result.trajectories])


def show(console: Console, title: str, notes: Sequence[str], result: Effects, page: str) -> None:
    """Print the table of schemes, the pairs that are least alike, and the steps on which schemes disagree most."""
    texts = ("scheme", "other", "account")
    for heading, rows in (
        (title, scheme_rows(result)),
        ("Least alike gradients", pair_rows(result)[:MOST_PAIRS]),
        ("Steps they disagree on most", disputed_rows(result, page)[:MOST_PRINTED]),
    ):
        table = Table(title=Text(heading), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in rows[0] if rows else ():
            text = name in texts
            width = None if text else max(6, *map(len, name.split()))
            table.add_column(name, justify="left" if text else "right", overflow="fold", min_width=width)
        for row in short(rows):
            table.add_row(*(Text(inert(format_value(x))) for x in row.values()))
        console.print(table)
    for note in notes:
        console.print(Text(inert(f"- {note}")))


if __name__ == "__main__":
    configs.run_main(main, arguments=("RUN",))
