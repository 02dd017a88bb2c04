"""Dry run: print sizes, meshes and programs of a run (`--dry_run`), also for a TPU slice (`--topology=v5e:4x4`)."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from agentr1_jax.train.settings import Settings
from experiments.checks import first_prompt
from experiments.estimate import chip_of, describe_fit, estimates_table
from experiments.plan import (
    Plan,
    activation_bytes,
    describe_cost,
    device_bytes,
    make_plan,
    parse_speeds,
    programs,
    total_bytes,
)
from experiments.setup import make_task

WIDTH = 120
"""Width of the tables, in characters, if the output is not a terminal."""


def show(settings: Settings, topology_name: str = "", speeds: Sequence[str] = ()) -> None:
    """Print sizes, meshes and programs of a run; for a TPU slice also compile its large programs.

    Nothing is written, and no model is allocated.

    Args:
      settings: settings of the run.
      topology_name: TPU slice such as `v5e:4x4`; empty for the devices of this machine.
      speeds: values of `--tokens_per_second`, for an estimate of the time.

    Raises:
      UserError: the settings do not fit the devices or their memory, the topology is unknown, or a program does not
        compile for it.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    rates = parse_speeds(speeds)
    plan = make_plan(settings, topology_name)
    console.print(run_table(plan))
    console.print(describe_opening(settings, plan.setup.policy), markup=False, highlight=False, soft_wrap=True)
    console.print(bytes_table(plan))
    console.print(programs_table(plan))
    cost = describe_cost(settings, plan.setup.learner_mesh.size, rates)
    console.print(cost, markup=False, highlight=False, soft_wrap=True)
    if not topology_name:
        return
    table, failed, peaks = estimates_table(plan, topology_name, programs(plan))
    console.print(table)
    lines, fits = describe_fit(plan, peaks, chip_of(topology_name))
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise UserError(f"{', '.join(failed)}: not accepted by the compiler for {topology_name}; see the table")
    if not fits:
        raise UserError(
            f"{lines[-1]}: {lines[0]}; lower rollout.slots, swap_slots or pages, share more heads (rollout.tensor, "
            "mesh.tensor), shorten budget.context_tokens, or take more devices"
        )


def describe_opening(settings: Settings, policy: DecoderConfig) -> str:
    """Return what a run logs at its start: policy, tokenizer and template in a line, and the first prompt.

    Where tokenizer or data are not at hand, or a server of the task does not answer, the text says what is left out.

    Raises:
      UserError: the tokenizer is not that of the weights, or cannot serve the task.
    """
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = dataclasses.replace(settings, run=dataclasses.replace(settings.run, run_dir=folder))
        try:
            task = make_task(_without_vectors(settings), ToolMetrics())
            tokenizer = build.make_tokenizer(elsewhere, task, resumes=False)
        except UserError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return f"the first prompt is not shown: {error}"
            raise
    build.check_vocabulary(tokenizer, policy, settings.policy)
    agent = build.make_agent(settings, task, tokenizer)
    line = build.describe_policy(settings, policy, agent)
    try:
        row, prompt = first_prompt(settings, task, agent)
    except UserError:
        raise
    except Exception as error:  # An environment may need what only the run has, such as a server.
        return f"{line}\nthe first prompt is not shown: {type(error).__name__}: {error}"
    return f"{line}\n{build.describe_prompt(row, prompt, tokenizer)}"


def _without_vectors(settings: Settings) -> Settings:
    """Return settings without dense retrieval, which would compute the vectors of all passages."""
    task = settings.task
    config = task.sections.get("multihop")
    if config is None or config.retriever.kind != "dense":
        return settings
    words = dataclasses.replace(config, retriever=type(config.retriever)())
    return dataclasses.replace(settings, task=dataclasses.replace(task, sections={**task.sections, "multihop": words}))


def run_table(plan: Plan) -> Table:
    """Return a table of the policy, the meshes and the batches."""
    settings, policy = plan.setup.settings, plan.setup.policy
    table = _table("Run", "", "")
    trained, frozen = (sum(x.size for x in jax.tree.leaves(t)) for t in (plan.state.params, plan.setup.frozen))
    table.add_row("parameters", f"{trained + frozen:,}" + (f", {trained:,} of them trained" if frozen else ""))
    table.add_row(
        "policy",
        f"{policy.layers} layers, width {policy.width}, {policy.heads} query heads, {policy.kv_heads} key heads of "
        f"{policy.head_dim}, vocabulary {policy.vocab_size:,}; parameters {policy.param_dtype}, "
        f"computes in {policy.dtype}, attention {policy.attention}, remat {policy.remat}",
    )
    for name, mesh, where in (
        ("learner mesh", plan.setup.learner_mesh, "all devices"),
        ("rollout mesh", plan.rollout_mesh, "each process on its own"),
    ):
        device = mesh.devices.flat[0].device_kind
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        table.add_row(name, f"{axes}: {mesh.size} x {device}, {where}")
    r, c, n = settings.rollout, settings.learner, settings.batch_trajectories
    most, rows = settings.microbatches(n // c.minibatches), f"{c.rows} rows x {c.row_tokens} tokens"
    table.add_row(
        "RL batch",
        f"{r.groups} groups x {r.samples} samples = {n} trajectories; updates: {c.minibatches * c.epochs}, each of at "
        f"most {most} microbatches of {rows}",
    )
    return table


def bytes_table(plan: Plan) -> Table:
    """Return a table of the memory, in all and per device."""
    table = _table("Memory", "what", "in all", "per device", "when")
    engines = len({d.process_index for d in plan.setup.learner_mesh.devices.flat})
    parameters = (plan.state.params, plan.setup.frozen)
    for name, tree, copies, when in (
        ("parameters", parameters, 1, "always"),
        ("optimizer state", plan.state.opt_state, 1, "always"),
        ("rollout parameters", plan.rollout_params, engines, "rolling out"),
        ("KV cache", plan.cache, engines, "rolling out"),
        ("gradients, two (estimate)", (plan.state.params,) * 2, 1, "learning"),
    ):
        table.add_row(name, size(copies * total_bytes(tree)), size(device_bytes(tree)), when)
    table.add_row("activations (estimate)", "", size(activation_bytes(plan)), "learning")
    return table


def programs_table(plan: Plan) -> Table:
    """Return a table of the programs."""
    listed = list(programs(plan))
    table = _table(f"{len(listed)} programs", "program", "shape")
    for program in listed:
        table.add_row(program.name, program.shape)
    return table


def size(count: float) -> str:
    """Write a number of bytes in GiB, or in MiB below a tenth of a GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:,.2f} MiB"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for i, column in enumerate(columns):
        number = column in ("in all", "per device")
        table.add_column(column, justify="right" if number else "left", no_wrap=i == 0)
    return table
