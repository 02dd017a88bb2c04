"""A notebook's worth of API: load a policy, roll it out, look at trajectories and advantages, update it.

    import agentr1_jax as ar

    task = ar.make_task("hopworld", top_k=2)
    policy = ar.load_policy("runs/quickstart")
    groups = ar.roll_out(policy, task, groups=4, samples=8)
    policy, metrics = ar.update(policy, groups, "grpo", learning_rate=1e-4)

Each function is a few calls of those that `experiments/train.py` is made of, in one process. A policy is a value: an
update returns a new one, and the old one can still be used. There is no KL term.
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
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.credit.scheme import CreditConfig
from agentr1_jax.envs.base import Task
from agentr1_jax.errors import UserError
from agentr1_jax.learner.update import LearnerState
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.presets import PRESETS
from agentr1_jax.registry import parse_call
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.runtime.mesh import MeshConfig
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build, collect, phases, train_step
from agentr1_jax.train.build import Setup
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
      settings: of rollouts and updates: budget, context rule, sampling, loss, optimizer.
      shape: of the decoder.
      tokenizer: of its prompts and responses.
      params: trained parameters: `{"decoder": ...}`, and `value` or `critic` where it has a critic.
      frozen: parameters that LoRA does not train; empty without LoRA.
      engine: samples its responses.
      learner_mesh: devices that the parameters are spread over.
      rollout_mesh: devices of the engine.
      state: parameters with the optimizer's state; None before the first update.
      version: updates that the parameters have seen since they were loaded.
      programs: compiled programs by their settings, shared by all versions of the policy.
    """

    settings: Settings
    shape: DecoderConfig
    tokenizer: Tokenizer
    params: Params
    frozen: Params
    engine: Engine
    learner_mesh: Mesh
    rollout_mesh: Mesh
    state: LearnerState | None = None
    version: int = 0
    programs: dict[str, tuple[Setup, build.StateBuilder, Phase]] = dataclasses.field(default_factory=dict, repr=False)


def load_policy(source: str, *, task: Task | None = None, **sections: Any) -> Policy:
    """Load a policy.

    Args:
      source: run folder, Hugging Face folder or hub id, or a preset for random parameters, e.g. `tiny`.
      task: source of texts for the tokenizer of a preset; not needed with `tokenizer={"path": ...}`.
      **sections: keys of a run's config that differ from those of the run, or from the defaults, e.g.
        `budget={"max_steps": 6}, policy={"lora": {"rank": 8}}, critic="shared_trunk"`; see docs/config.md.

    Raises:
      UserError: there is no such policy, or a key is unknown or out of range.
    """
    is_run = files.is_folder(os.path.join(source, "checkpoints"))
    values = _merge(_run_config(source) if is_run else _default_config(source), OTHERWISE_IN_A_NOTEBOOK)
    settings = _fit_devices(settings_from_dict(_with_row_sizes(_merge(values, sections)), TaskConfig()))
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
    return Policy(
        settings=settings,
        shape=shape,
        tokenizer=tokenizer,
        params=restore_params(source, builder.shapes.params)[0] if is_run else builder.init().params,
        frozen=build.make_frozen(settings, shape, learner_mesh),
        engine=build.make_engine(settings, shape, rollout_mesh),
        learner_mesh=learner_mesh,
        rollout_mesh=rollout_mesh,
    )


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
      groups: task rows.
      samples: trajectories of each row.
      split: of the task.
      first: index of the first row; a loop of updates moves it on.
      temperature: of sampling; 0 is greedy, None that of the policy's settings.
    """
    sampling = policy.settings.sampling
    request = collect.Request(
        name=split,
        split=split,
        prompts=range(first, first + groups),
        samples=samples,
        sampling=sampling if temperature is None else dataclasses.replace(sampling, temperature=temperature),
        version=policy.version,
    )
    batch = collect.roll_out(_make_setup(policy, policy.settings, task), policy.params, request)
    assert batch is not None  # Nobody asks it to stop.
    return sorted(batch.complete, key=lambda group: group[0].group)


def describe(trajectory: Trajectory, tokenizer: Tokenizer) -> str:
    """Return a trajectory as text: the first prompt, each response with its reward and observation, the outcome."""
    parts = [tokenizer.decode(trajectory.steps[0].prompt_ids)] if trajectory.steps else []
    for number, step in enumerate(trajectory.steps, start=1):
        parts.append(f"--- step {number}, reward {step.reward}\n{tokenizer.decode(step.response_ids)}")
        if step.observation:
            parts.append(f"--- observation\n{step.observation}")
    metrics = "".join(f", {name} {x:.3g}" for name, x in trajectory.metrics.items())
    fault = f" ({trajectory.info['error']})" if "error" in trajectory.info else ""
    parts.append(f"--- {trajectory.outcome}{fault}, return {trajectory.total_reward:.3g}{metrics}")
    return "\n".join(parts)


def compare_credit(policy: Policy, groups: Sequence[Group], *schemes: str) -> list[dict[str, Any]]:
    """Assign credit by several schemes to the same steps.

    Args:
      policy: its critic gives values to the schemes that need them, its settings shape the rewards.
      groups: trajectories of each task row.
      *schemes: names with arguments, e.g. `grpo` or `step_gae(lam=0.9)`.

    Returns:
      a row for each step, ready for `markdown_table` or a data frame: group, sample, step, reward, and by the name of
      each scheme the mean advantage of the step's tokens; None where the trajectory is not trained.

    Raises:
      UserError: a scheme is unknown, or the policy or the trajectories lack what it needs.
    """
    trajectories = _renumber(groups)
    steps = [(t, number) for t in trajectories for number in range(len(t.steps))]
    rows: list[dict[str, Any]] = [
        {"group": t.group, "sample": t.sample, "step": number, "reward": t.steps[number].reward} for t, number in steps
    ]
    for scheme in schemes:
        setup, _, phase = _make_phase(policy, scheme, groups)
        batch = train_step.pack(setup, phase, trajectories)
        outputs = train_step.token_outputs(setup, phase, policy.params, batch)
        credit = train_step.assign_credit(setup, phase, batch, outputs, Progress())
        trained = {(t.group, t.sample): t for t in train_step.with_advantages(batch, credit)}
        for row, (t, number) in zip(rows, steps, strict=True):
            advantages = trained[t.group, t.sample].steps[number].advantages
            row[scheme] = None if advantages is None else float(np.mean(advantages))
    return rows


def update(
    policy: Policy, groups: Sequence[Group], scheme: str = "grpo", *, learning_rate: float | None = None
) -> tuple[Policy, dict[str, float]]:
    """Take one train step: credit, loss and optimizer of the policy's settings.

    Args:
      policy: stays as it is.
      groups: trajectories of each task row, as `roll_out` returns them.
      scheme: credit scheme with arguments, e.g. `grpo` or `step_gae(lam=0.9)`.
      learning_rate: of the decoder; None for `optimizer.lr` of the settings.

    Returns:
      the new policy, and metrics of the step.

    Raises:
      UserError: see `compare_credit`.
    """
    setup, builder, phase = _make_phase(policy, scheme, groups)
    c = policy.settings.optimizer
    rates = dict.fromkeys(policy.params, c.value_lr)
    rates["decoder"] = c.lr if learning_rate is None else learning_rate
    batch = train_step.pack(setup, phase, _renumber(groups))
    outputs = train_step.token_outputs(setup, phase, policy.params, batch)
    credit = train_step.assign_credit(setup, phase, batch, outputs, Progress())
    # The program takes its state over; the old policy needs its own arrays.
    state = jax.tree.map(jnp.copy, policy.state or builder.restart(policy.params))
    state, metrics = train_step.update(setup, phase, state, batch, outputs, credit, rates)
    return dataclasses.replace(policy, params=state.params, state=state, version=policy.version + 1), metrics.fetch()


def _run_config(run: str) -> dict[str, Any]:
    """Return the config of a run without its task, on the devices that there are."""
    values = RunFolder(run).read_config()
    del values["task"]
    return {**values, "run_dir": run}


def _default_config(source: str) -> dict[str, Any]:
    """Return the keys that weights or a preset need, by the kind of the devices."""
    on_cpu = jax.default_backend() == "cpu"
    return {
        "run_dir": tempfile.mkdtemp(prefix="agentr1_jax-"),  # For the tokenizer of a preset.
        "policy": {
            "preset" if source in PRESETS else "weights": source,
            "dtype": "float32" if on_cpu else "bfloat16",
        },
        "tokenizer": {"path": "" if source in PRESETS else source},
        "budget": {
            "max_steps": 5,
            "response_tokens": 128,
            "observation_tokens": 256,
            "context_tokens": 1024,
            "trajectory_tokens": 8192,
        },
        "rollout": {
            "groups": 4,
            "samples": 8,
            "slots": 32,
            "decode_chunk": 8 if on_cpu else 16,
            "prefill_width": 16 if on_cpu else 128,
            "prefill_rows": (8, 32) if on_cpu else (4, 16),
            "attention_block": 64 if on_cpu else 512,
            "attention_group": 8 if on_cpu else 32,
        },
    }


def _with_row_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config in which cache slots and packed rows hold `budget.context_tokens`, where it names no sizes."""
    block = values["rollout"]["attention_block"]
    tokens = -(-values["budget"]["context_tokens"] // block) * block
    rows = {"row_tokens": tokens, "row_loss_tokens": tokens}
    return _merge({"rollout": {"slot_tokens": tokens}, "learner": rows}, values)


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with changes of some of them."""
    merged = dict(values)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _fit_devices(settings: Settings) -> Settings:
    """Return settings whose parameters, slots and rows spread over the devices that there are."""
    devices = jax.device_count()
    mesh = MeshConfig(data=1, fsdp=devices)
    learner = dataclasses.replace(settings.learner, rows=-(-settings.learner.rows // devices) * devices)
    return build.fit_devices(dataclasses.replace(settings, mesh=mesh, learner=learner))


def _renumber(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the trajectories of groups that may come from several rollouts: numbered anew."""
    return [
        dataclasses.replace(t, group=number, sample=sample)
        for number, group in enumerate(groups)
        for sample, t in enumerate(group)
    ]


def _make_setup(policy: Policy, settings: Settings, task: Task | None) -> Setup:
    """Return the parts of a run around a policy; without a task they serve the learner alone."""
    nothing: Any = None
    return Setup(
        settings=settings,
        task=task or nothing,
        tokenizer=policy.tokenizer,
        agent=build.make_agent(settings, task, policy.tokenizer) if task else nothing,
        policy=policy.shape,
        frozen=policy.frozen,
        learner_mesh=policy.learner_mesh,
        engine=policy.engine,
        rollout_params=build.make_rollout_params(policy.shape, policy.learner_mesh, policy.rollout_mesh),
        tool_metrics=ToolMetrics(),
    )


def _make_phase(policy: Policy, scheme: str, groups: Sequence[Group]) -> tuple[Setup, build.StateBuilder, Phase]:
    """Return the phase of RL with a credit scheme for batches of this size; made once.

    Raises:
      UserError: the scheme is unknown, or the policy or the trajectories lack what it needs.
    """
    try:
        call = parse_call(scheme, "scheme")
        credit = CreditConfig(call.name, args=call.named)
        bound = credit.bind()
    except ValueError as error:
        raise UserError(str(error)) from error
    trajectories = [t for group in groups for t in group]
    if bound.needs_state_key and all(s.state_key is None for t in trajectories for s in t.steps):
        raise UserError(f"credit scheme {bound.name!r} compares steps of equal state_key, and these steps have none")
    if bound.needs_greedy and all(t.greedy_return is None for t in trajectories):
        raise UserError(f"credit scheme {bound.name!r} needs a greedy rollout of each row, which these rows lack")
    samples = max((len(group) for group in groups), default=1)
    sizes = dataclasses.replace(policy.settings.rollout, groups=max(len(groups), 1), samples=samples)
    settings = dataclasses.replace(policy.settings, credit=credit, scheme=bound, rollout=sizes)
    key = repr(settings)
    if key not in policy.programs:
        setup = _make_setup(policy, settings, None)
        builder = build.make_state_builder(settings, policy.shape, policy.learner_mesh)
        phase = phases.reinforcement(setup, builder.optimizer, builder.layout, None)
        policy.programs[key] = setup, builder, phase
    return policy.programs[key]
