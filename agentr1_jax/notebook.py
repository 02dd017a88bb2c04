"""A notebook's worth of API: load a policy, roll it out, look at trajectories and advantages, update it.

    import agentr1_jax as ar

    task = ar.make_task("hopworld", top_k=2)
    policy = ar.load_policy("runs/quickstart")
    groups = ar.roll_out(policy, task, groups=4, samples=8)
    policy, metrics = ar.update(policy, groups, "grpo", learning_rate=1e-4)

Each function is a few calls of those that `experiments/train.py` is made of, in one process. A policy is a value: an
update returns a new one, and the old one can still be used. There is no KL term, and no greedy rollout for `remax`.
Published weights are loaded as by `policy.weights` of a run; the tests of this module load runs and presets only.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentr1_jax import files
from agentr1_jax.credit.scheme import CreditConfig
from agentr1_jax.envs.base import Task
from agentr1_jax.errors import UserError
from agentr1_jax.learner.update import LearnerState
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.presets import PRESETS
from agentr1_jax.registry import parse_call
from agentr1_jax.report.account import account_lines, number_text
from agentr1_jax.runtime.config import flatten
from agentr1_jax.runtime.mesh import MeshConfig
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build, collect, phases, train_step
from agentr1_jax.train.build import Setup
from agentr1_jax.train.defaults import AUTO, complete
from agentr1_jax.train.phases import Phase
from agentr1_jax.train.progress import Progress
from agentr1_jax.train.restore import restore_params
from agentr1_jax.train.settings import Settings, TaskConfig, settings_from_dict
from agentr1_jax.trajectory import Trajectory

Group = list[Trajectory]
OTHERWISE_IN_A_NOTEBOOK: Mapping[str, Mapping[str, Any]] = {
    "kl": {"kind": "none", "target": None},
    "optimizer": {"critic_warmup": 0},
    "rollout": {"staleness": 0, "dynamic_sampling_groups": 0},
    "warm_start": {"init_from": ""},
}
"""Keys of a run that a single update has no use for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A policy that can be rolled out and updated.

    Attributes:
      setup: parts of a run around it: settings, tokenizer, shape, frozen parameters, engine; no task.
      params: trained parameters: `{"decoder": ...}`, and `value` or `critic` where it has a critic.
      state: parameters with the optimizer's state; None before the first update.
      version: number of updates since the parameters were loaded.
      programs: compiled programs by their settings, shared by all versions of the policy.
    """

    setup: Setup
    params: Params
    state: LearnerState | None = None
    version: int = 0
    programs: dict[str, tuple[Setup, build.StateBuilder, Phase]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of its prompts and responses."""
        return self.setup.tokenizer

    @property
    def shape(self) -> DecoderConfig:
        """Shape of the decoder."""
        return self.setup.policy


def load_policy(source: str, *, task: Task | None = None, **sections: Any) -> Policy:
    """Load a policy.

    Args:
      source: run folder, Hugging Face folder or hub id, or a preset for random parameters, e.g. `tiny`.
      task: source of texts for the tokenizer of a preset; not needed with `tokenizer={"path": ...}`.
      **sections: keys of a run's config that differ from those of the run, or from the defaults, e.g.
        `budget={"max_steps": 6}, policy={"lora": {"rank": 8}}, critic="shared_trunk"`; see docs/config.md.

    Raises:
      UserError: there is no such policy, a key is unknown or out of range, or a run brings Python of its own.
    """
    is_run = files.is_folder(os.path.join(source, "checkpoints"))
    if is_run:
        values = {key: x for key, x in RunFolder(source).read_config().items() if key != "task"} | {"run_dir": source}
        _refuse_risks(source, values, sections)
    else:
        values = _default_config(source)
    settings = _read_settings(_merge(_merge(values, OTHERWISE_IN_A_NOTEBOOK), sections))
    if settings.kl.kind != "none":
        raise UserError("kl.kind: an update in a notebook has no KL term; leave it out")
    if not (is_run or settings.tokenizer.path or task):
        raise UserError(
            f'{source} has no tokenizer; give tokenizer={{"path": ...}}, or a task to train one on its texts'
        )
    tokenizer = build.make_tokenizer(settings, task, resumes=is_run)
    shape = build.make_policy(settings, tokenizer)
    learner_mesh, rollout_mesh = build.make_learner_mesh(settings), build.make_rollout_mesh(settings)
    builder = build.make_state_builder(settings, shape, learner_mesh)
    nothing: Any = None
    setup = Setup(
        settings=settings,
        task=nothing,
        tokenizer=tokenizer,
        agent=nothing,
        policy=shape,
        frozen=build.make_frozen(settings, shape, learner_mesh),
        learner_mesh=learner_mesh,
        engine=build.make_engine(settings, shape, rollout_mesh),
        rollout_params=build.make_rollout_params(shape, learner_mesh, rollout_mesh),
        tool_metrics=ToolMetrics(),
    )
    return Policy(setup, restore_params(source, builder.shapes.params)[0] if is_run else builder.init().params)


def roll_out(
    policy: Policy,
    task: Task,
    *,
    groups: int = 4,
    samples: int = 8,
    split: str = "train",
    first: int = 0,
    temperature: float | None = None,
) -> list[Group]:
    """Sample groups of trajectories. The same policy and arguments give the same trajectories.

    Args:
      policy: samples the responses.
      task: source of rows and environments.
      groups: number of task rows.
      samples: trajectories of each row.
      split: of the task.
      first: index of the first row; a loop of updates moves it on.
      temperature: of sampling; 0 is greedy, None that of the policy's settings.
    """
    settings = policy.setup.settings
    sampling = settings.sampling
    request = collect.Request(
        name=split,
        split=split,
        prompts=range(first, first + groups),
        samples=samples,
        sampling=sampling if temperature is None else dataclasses.replace(sampling, temperature=temperature),
        version=policy.version,
    )
    agent = build.make_agent(settings, task, policy.tokenizer)
    batch = collect.roll_out(dataclasses.replace(policy.setup, task=task, agent=agent), policy.params, request)
    assert batch is not None  # Nobody asks it to stop.
    return sorted(batch.complete, key=lambda group: group[0].group)


def describe(trajectory: Trajectory, tokenizer: Tokenizer) -> str:
    """Return a trajectory as text: the first prompt, each response with its reward and observation, the outcome.

    A step that training has judged also has its advantage, and the terms that it is the sum of.
    """
    parts = [tokenizer.decode(trajectory.steps[0].prompt_ids)] if trajectory.steps else []
    for number, step in enumerate(trajectory.steps, start=1):
        parts.append(f"--- step {number}, reward {step.reward}\n{tokenizer.decode(step.response_ids)}")
        if step.advantages is not None:
            mean = number_text(float(np.mean(step.advantages)))
            parts.append("\n".join([f"--- advantage {mean}", *account_lines(step.account)]))
        if step.observation:
            parts.append(f"--- observation\n{step.observation}")
    metrics = "".join(f", {name} {x:.3g}" for name, x in trajectory.metrics.items())
    fault = f" ({trajectory.info['error']})" if "error" in trajectory.info else ""
    parts.append(f"--- {trajectory.outcome}{fault}, return {trajectory.total_reward:.3g}{metrics}")
    return "\n".join(parts)


def assign_credit(policy: Policy, groups: Sequence[Group], scheme: str = "grpo") -> list[Group]:
    """Return the groups, numbered anew, with the credit of a scheme in the record of each step that it judges.

    `describe` then says why a step got its advantage. See `compare_credit` for the arguments and errors.
    """
    *_, batch, outputs, credit = _assign_credit(policy, groups, scheme)
    recorded = {(t.group, t.sample): t for t in train_step.with_credit(batch, outputs, credit)}
    return [[recorded[number, sample] for sample in range(len(group))] for number, group in enumerate(groups)]


def compare_credit(policy: Policy, groups: Sequence[Group], *schemes: str) -> list[dict[str, Any]]:
    """Assign credit to the same steps by several schemes, named with arguments: `grpo`, `step_gae(lam=0.9)`.

    The policy's critic gives values to the schemes that need them, its settings shape the rewards.

    Returns:
      a row for each step, ready for `markdown_table` or a data frame: group, sample, step, reward, and by the name of
      each scheme the mean advantage of the step's tokens; None where the trajectory is not trained.

    Raises:
      UserError: a scheme is unknown, or the policy or the trajectories lack what it needs.
    """
    steps = [(t, number) for t in _renumber(groups) for number in range(len(t.steps))]
    rows: list[dict[str, Any]] = [
        {"group": t.group, "sample": t.sample, "step": number, "reward": t.steps[number].reward} for t, number in steps
    ]
    for scheme in schemes:
        credited = assign_credit(policy, groups, scheme)
        for row, (t, number) in zip(rows, steps, strict=True):
            advantages = credited[t.group][t.sample].steps[number].advantages
            row[scheme] = None if advantages is None else float(np.mean(advantages))
    return rows


def update(
    policy: Policy, groups: Sequence[Group], scheme: str = "grpo", *, learning_rate: float | None = None
) -> tuple[Policy, dict[str, float]]:
    """Take one train step with the loss and optimizer of the policy's settings; the old policy stays as it is.

    Args:
      policy: policy to update.
      groups: trajectories of each task row, as `roll_out` returns them.
      scheme: credit scheme with arguments, e.g. `grpo` or `step_gae(lam=0.9)`.
      learning_rate: of the decoder; None for `optimizer.lr` of the settings.

    Returns:
      the new policy, and metrics of the step.

    Raises:
      UserError: see `compare_credit`.
    """
    setup, builder, phase, batch, outputs, credit = _assign_credit(policy, groups, scheme)
    optimizer = setup.settings.optimizer
    rates = dict.fromkeys(policy.params, optimizer.value_lr)
    rates["decoder"] = optimizer.lr if learning_rate is None else learning_rate
    # The program takes its state over; the old policy needs its own arrays.
    state = jax.tree.map(jnp.copy, policy.state or builder.restart(policy.params))
    state, metrics = train_step.update(setup, phase, state, batch, outputs, credit, rates)
    return dataclasses.replace(policy, params=state.params, state=state, version=policy.version + 1), metrics.fetch()


def _default_config(source: str) -> dict[str, Any]:
    """Return the keys that weights or a preset need; `hardware` fills those that depend on the devices."""
    is_preset = source in PRESETS
    return {
        "hardware": AUTO,
        "run_dir": tempfile.mkdtemp(prefix="agentr1_jax-"),  # For the tokenizer of a preset.
        "policy": {"preset" if is_preset else "weights": source, "attention": "xla", "remat": "none"},
        "budget": {
            "max_steps": 5,
            "response_tokens": 128,
            "observation_tokens": 256,
            "context_tokens": 1024,
        },
        "rollout": {"groups": 4, "samples": 8, "slots": 32},
    }


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with changes of some of them."""
    merged = dict(values)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _refuse_risks(run: str, values: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Raise UserError for Python files that may have come with a run and that the caller does not name."""
    named = dict(flatten(sections))
    for key, path in RunFolder(run).risks(values).items():
        if key not in named:
            section = key.partition(".")[0]
            raise UserError(
                f"{run}: its config names a Python file that may have come with it, {key}: {path}; look at it, and "
                f'name it to have it executed, or "": load_policy(..., {section}={{"file": ...}})'
            )


def _read_settings(values: dict[str, Any]) -> Settings:
    """Return checked settings, spread over the devices."""
    settings = settings_from_dict(complete(values, jax.devices()), TaskConfig())
    devices = jax.device_count()
    learner = dataclasses.replace(settings.learner, rows=-(-settings.learner.rows // devices) * devices)
    return build.fit_devices(dataclasses.replace(settings, mesh=MeshConfig(data=1, fsdp=devices), learner=learner))


def _renumber(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the trajectories of groups that may come from several rollouts: numbered anew."""
    return [
        dataclasses.replace(t, group=number, sample=sample)
        for number, group in enumerate(groups)
        for sample, t in enumerate(group)
    ]


def _assign_credit(policy: Policy, groups: Sequence[Group], scheme: str) -> tuple[Any, ...]:
    """Return (setup, state builder, phase, batch, token outputs, credit) of an update up to its gradient."""
    setup, builder, phase = _make_phase(policy, scheme, groups)
    batch = train_step.pack(setup, phase, _renumber(groups))
    outputs = train_step.token_outputs(setup, phase, policy.params, batch)
    return setup, builder, phase, batch, outputs, train_step.assign_credit(setup, phase, batch, outputs, Progress())


def _make_phase(policy: Policy, scheme: str, groups: Sequence[Group]) -> tuple[Setup, build.StateBuilder, Phase]:
    """Return the phase of RL with a credit scheme for batches of this size; made once. Raises as `compare_credit`."""
    try:
        call = parse_call(scheme, "scheme")
        credit = CreditConfig(call.name, args=call.named)
        bound = credit.bind()
        if bound.needs_belief:
            credit = dataclasses.replace(credit, probe="policy", probe_text=policy.setup.settings.credit.probe_text)
    except ValueError as error:
        raise UserError(str(error)) from error
    trajectories = [t for group in groups for t in group]
    if bound.needs_state_key and all(s.state_key is None for t in trajectories for s in t.steps):
        raise UserError(f"credit scheme {bound.name!r} compares steps of equal state_key, and these steps have none")
    if bound.needs_action_key and all(s.action_key is None for t in trajectories for s in t.steps):
        raise UserError(f"credit scheme {bound.name!r} compares steps of equal action_key, and these steps have none")
    if bound.needs_frozen_belief:
        raise UserError(f"{bound.name!r} probes a reference policy, and a notebook has none; give it frozen=False")
    if bound.needs_belief and not all(t.row.get("answers") for t in trajectories):
        raise UserError(f"credit scheme {bound.name!r} probes gold answers, and rows of these trajectories have none")
    if bound.needs_greedy and all(t.greedy_return is None for t in trajectories):
        raise UserError(f"credit scheme {bound.name!r} needs a greedy rollout of each row, which these rows lack")
    settings = policy.setup.settings
    samples = max((len(group) for group in groups), default=1)
    sizes = dataclasses.replace(settings.rollout, groups=max(len(groups), 1), samples=samples)
    settings = dataclasses.replace(settings, credit=credit, scheme=bound, rollout=sizes)
    key = repr(settings)
    if key not in policy.programs:
        setup = dataclasses.replace(policy.setup, settings=settings)
        builder = build.make_state_builder(settings, setup.policy, setup.learner_mesh)
        phase = phases.reinforcement(setup, builder.optimizer, builder.layout, None)
        policy.programs[key] = setup, builder, phase
    return policy.programs[key]
