"""What is refused before a run starts: a task, prompts, devices or attention that its settings do not fit.

Every check raises UserError, whose message names the keys to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from agentr1_jax.agents import boundary, event_loop
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.envs.base import Observation, Row, Task, has_expert, has_texts, writes_summaries
from agentr1_jax.envs.mixture import MixtureTask
from agentr1_jax.errors import RetryableError, UserError, user_error
from agentr1_jax.policy import attention
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.text.chat import truncate
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.train.defaults import check_chips
from agentr1_jax.train.probes import make_prober
from agentr1_jax.train.settings import Settings
from experiments.task_checks import describe_error

OPENINGS_CHECKED = 8
"""Rows of each split whose first prompt must fit the budget."""
ANSWERS_CHECKED = 64
"""Training rows of a procedural task whose answers must fit a probe; of a finite one all."""


def check_task(settings: Settings, task: Task) -> None:
    """Refuse a task that lacks what the settings need: experts, texts, splits, reward parts, state keys, answers."""
    warm_start = settings.warm_start
    if settings.imitates and not has_expert(task):
        raise UserError(
            f"task {task.name!r} has no expert to imitate, and warm_start.updates is {warm_start.updates}; set "
            "warm_start.updates=0, or name a run in warm_start.init_from"
        )
    if not warm_start.init_from and not has_texts(task) and (not settings.tokenizer.path or settings.pretrain.updates):
        raise UserError(
            f"task {task.name!r} has no texts to train a tokenizer or to pretrain on; set tokenizer.path and "
            "pretrain.updates=0, or name a run in warm_start.init_from"
        )
    if settings.imitates and warm_start.practice:
        try:
            task.row("practice", 0)
        except ValueError as error:
            raise UserError(f"{task.name} has no split 'practice'; set warm_start.practice=0 ({error})") from error
    for part in settings.shaping.process_parts:
        if part not in task.reward_parts:
            raise UserError(
                f"shaping.process_parts: task {task.name!r} has no reward part {part!r}; it has "
                f"{', '.join(task.reward_parts)}"
            )
    if settings.context_rule.makes_summaries and settings.imitates and not writes_summaries(task):
        raise UserError(
            f"context.rule {settings.context.rule!r} asks for summaries, and the expert of task {task.name!r} writes "
            "none to imitate; choose another context.rule, set warm_start.updates=0, or name a run in "
            "warm_start.init_from"
        )
    if settings.credit.probe != "none":
        for row in _training_rows(task, lambda split: 1):
            if not row.get("answers"):
                raise UserError(
                    f"credit.probe is {settings.credit.probe}, and rows of task {row.get('task', task.name)!r} have no "
                    "answers to probe; choose another credit.name, and credit.probe=none"
                )
    for row, observation in _openings(settings, task, rows=1):
        _check_observation(settings, row.get("task", task.name), observation)


def check_openings(settings: Settings, task: Task, agent: EnvLoop) -> None:
    """Refuse a budget that the task's first prompts already exceed, and a chat template that cannot render them.

    Refuse a length of observations, too, that has no room for the mark of those that are truncated.
    """
    budget = settings.budget
    with user_error("budget.observation_tokens: "):
        truncate(agent.tokenizer, "", budget.observation_tokens, whole=False)
    room = budget.context_tokens - budget.response_tokens
    for row, observation in _openings(settings, task, rows=OPENINGS_CHECKED):
        tokens = len(_render(agent, observation))
        if tokens > room:
            raise UserError(
                f"the prompt of row {row['id']} has {tokens} tokens; budget.context_tokens ({budget.context_tokens}) "
                f"less budget.response_tokens ({budget.response_tokens}) leaves {room}: raise budget.context_tokens"
            )


def check_answers(settings: Settings, task: Task, tokenizer: Tokenizer) -> None:
    """Refuse training rows whose answers cannot be probed, where the settings probe them."""
    prober = make_prober(settings, tokenizer)
    if prober is None:
        return
    for row in _training_rows(task, lambda split: task.size(split) or ANSWERS_CHECKED):
        if fault := prober.fault(row):
            raise UserError(fault)


def first_prompt(settings: Settings, task: Task, agent: EnvLoop) -> tuple[str, np.ndarray]:
    """Return the id of the first training row, and the ids of its first prompt, int32 [P]."""
    row, observation = next(_openings(settings, task, rows=1))
    return str(row["id"]), _render(agent, observation)


def _render(agent: EnvLoop, observation: Observation) -> np.ndarray:
    with user_error():
        return agent.render_opening(observation)


def _training_rows(task: Task, count: Callable[[str], int]) -> Iterator[Row]:
    """Yield the first training rows of each task of a mixture."""
    for split in [f"train/{name}" for name in task.names] if isinstance(task, MixtureTask) else ["train"]:
        for index in range(count(split)):
            yield task.row(split, index)


def _openings(settings: Settings, task: Task, rows: int) -> Iterator[tuple[Row, Observation]]:
    """Yield the first rows of each split that a run uses, of each task of a mixture, and how their episodes begin."""
    splits = [
        f"{split}/{name}" if name and "/" not in split else split
        for split in ("train", settings.eval.split)
        for name in (task.names if isinstance(task, MixtureTask) else [""])
    ]
    for split in dict.fromkeys(splits):
        with user_error("eval.split: "):
            chosen = [task.row(split, index) for index in range(rows)]
        for index, row in enumerate(chosen):
            yield row, _first_observation(task, row, f"{split}/{index}")


def _first_observation(task: Task, row: Row, place: str) -> Observation:
    """Return how the episode of a row begins.

    Raises:
      UserError: not as the contract says.
      RetryableError: it raises an exception: a service that it needs may be out of order.
    """

    async def reset() -> Observation:
        boundary.check_row(row)
        return boundary.check_observation(await task.env().reset(row, seed=0))

    try:
        return event_loop.run(reset())
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:
        refusal = UserError if isinstance(error, boundary.BoundaryError) else RetryableError
        raise refusal(f"row {place} of task {task.name!r}: no episode can begin: {describe_error(error)}") from error


def _check_observation(settings: Settings, task: str, observation: Observation) -> None:
    """Refuse an environment whose observations lack what credit scheme, context rule or shaping read."""
    if settings.scheme.needs_state_key and observation.state_key is None:
        raise UserError(
            f"credit scheme {settings.scheme.name!r} compares steps of equal state_key, and observations of task "
            f"{task!r} have none; set Observation.state_key in the environment, or choose another credit.name"
        )
    if settings.context_rule.needs_evidence and observation.evidence is None:
        raise UserError(
            f"context.rule {settings.context.rule!r} builds prompts from what the environment has shown, and "
            f"observations of task {task!r} do not say it; set Observation.evidence in the environment, or choose "
            "another context.rule"
        )
    if settings.shaping.potential and observation.potential is None:
        raise UserError(
            f"shaping.potential is {settings.shaping.potential}, and observations of task {task!r} have no potential; "
            "set Observation.potential in the environment, or shaping.potential=0"
        )


def check_placement(settings: Settings, devices: Sequence[jax.Device]) -> None:
    """Refuse meshes that do not fit the devices, and sizes that do not spread evenly over them."""
    check_chips(settings.run.hardware, devices)
    count, minibatches = len({d.process_index for d in devices}), settings.learner.minibatches
    if settings.rollout.groups % (count * minibatches):
        raise UserError(
            f"rollout.groups ({settings.rollout.groups}) must be a multiple of processes x learner.minibatches "
            f"({count} x {minibatches})"
        )
    for section, c in (("pretrain", settings.pretrain), ("warm_start", settings.warm_start)):
        if c.updates and c.batch % count:
            raise UserError(f"{section}.batch ({c.batch}) must be a multiple of the {count} processes")
    if settings.warm_start.control_seconds and count > 1:
        raise UserError("a control run is timed, and clocks of several processes differ; run it in one process")
    mesh = settings.mesh
    learner_devices, rollout_devices = meshes.split_devices(devices, mesh.rollout_devices)
    data, fsdp, _ = meshes.axis_sizes(mesh.data, mesh.fsdp, mesh.tensor, learner_devices)
    sections = {"learner": settings.learner.rows}
    if settings.pretrain.updates:
        sections["pretrain"] = settings.pretrain.rows
    for section, rows in sections.items():
        if rows % (data * fsdp):
            raise UserError(
                f"{section}.rows ({rows}) must be a multiple of the {data * fsdp} shards of a batch "
                f"(mesh.data x mesh.fsdp: {data} x {fsdp})"
            )
    with user_error():
        settings.engine.check_shards(meshes.rollout_shards(len(rollout_devices) // count, settings.rollout.tensor))


def check_attention(settings: Settings, policy: DecoderConfig, mesh: Mesh, *, run: bool = True) -> None:
    """Refuse an attention implementation that the learner's devices or rows do not allow, by a tiny call of it."""
    with user_error():
        attention.check_attention(policy, mesh, settings.learner.row_tokens, settings.learner.packing, call=run)
        if settings.credit.probe != "none":  # Probes branch.
            tree = dataclasses.replace(policy, attention=attention.for_trees(policy.attention))
            rows = settings.probe_packing
            attention.check_attention(tree, mesh, rows.row_tokens, rows.mode, call=run)
