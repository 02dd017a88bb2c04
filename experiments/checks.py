"""What is refused before a run makes or writes anything, each with the keys at fault and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import jax
import ml_collections
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.agents.context import RULES, ContextRule, context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.credit import Scheme
from agentr1_jax.envs.base import Observation, Row, Task, writes_summaries
from agentr1_jax.envs.curriculum import parse_curriculum
from agentr1_jax.envs.mixture import MixtureTask
from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import CorrectionConfig
from agentr1_jax.learner.kl import next_kl_coef
from agentr1_jax.policy import attention_check
from agentr1_jax.policy.config import CRITICS, DecoderConfig
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.checkpoint import CheckpointConfig
from agentr1_jax.runtime.mesh import MeshConfig
from agentr1_jax.runtime.metrics import SinksConfig
from agentr1_jax.runtime.monitoring import parse_profile_updates
from agentr1_jax.runtime.processes import ProcessesConfig
from agentr1_jax.runtime.sinks import check_sinks
from agentr1_jax.validation import from_section
from experiments import build

OPENINGS_CHECKED = 8
IN_BUCKETS = ("run_dir", "warm_start.init_from", "tokenizer.path", "compilation_cache")
"""Keys whose paths may be `gs://`."""

POSITIVE = (
    ("rollout", "groups"),
    ("rollout", "samples"),
)


def check(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> None:
    """Refuses what cannot work before anything is made or written.

    Args:
      config: of the run.
      devices: those it is to run on; None for all there are.

    Raises:
      UserError: with the keys at fault and what to do.
    """
    _check_places(config)
    check_sinks(from_section(SinksConfig, "sinks", config.sinks.to_dict()), config.run_dir)
    from_section(ProcessesConfig, "processes", config.processes.to_dict())
    from_section(MeshConfig, "mesh", config.mesh.to_dict())
    checkpoint_keys = ("checkpoint.every", "checkpoint.keep")
    from_section(CheckpointConfig, "", {key: config[key] for key in checkpoint_keys})
    try:
        build.budget(config)
        if config.context.file:
            RULES.load(config.context.file)
        _check_context(config, context_rule(config.context.rule))
        scheme = build.credit_scheme(config)
        build.shaping(config)
        build.objective(config)
        build.learner_config(config)
        from_section(CorrectionConfig, "correction", config.correction.to_dict())
        build.optimizer_of(config)
        build.engine_config(config)
        build.limits(config)
    except ValueError as error:
        raise UserError(str(error)) from error
    choices: dict[str, tuple[str, Sequence[str]]] = {
        "critic": (config.critic, CRITICS),
    }
    for section, key in POSITIVE:
        if not config[section][key] > 0:
            raise UserError(f"{section}.{key} is {config[section][key]}; it must be positive")
    for key, (value, known) in choices.items():
        if value not in known:
            raise UserError(f"unknown {key} {value!r}; choose one of {', '.join(known)}")
    _check_credit(config, scheme)
    _check_kl(config)
    _check_pretraining(config)
    _check_curriculum(config)
    parse_profile_updates(config.profile_updates)
    _check_sampling(config)
    _check_lengths(config)
    _check_placement(config, jax.devices() if devices is None else devices)


def _check_curriculum(config: ml_collections.ConfigDict) -> None:
    try:
        parse_curriculum(config.task.curriculum, config.budget.max_steps)
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_places(config: ml_collections.ConfigDict) -> None:
    """Paths in buckets stand where they can be used, and what reads them is installed."""
    for key, value in configs.flatten(config.to_dict()):
        if not isinstance(value, str) or not files.is_remote(value):
            continue
        if key not in IN_BUCKETS:
            raise UserError(
                f"{key} is {value}, and only {', '.join(IN_BUCKETS)} may lie in a bucket; copy it to this machine, or "
                "mount the bucket and give the path there"
            )
        files.path(value)


def _check_context(config: ml_collections.ConfigDict, rule: ContextRule) -> None:
    """Keys that only the rule `summary` reads are set with it alone."""
    c = config.context
    if rule.makes_summaries and not 1 <= c.summary_tokens < config.budget.context_tokens:
        raise UserError(
            f"context.summary_tokens is {c.summary_tokens}; a summary has at least 1 token, and fewer than "
            f"budget.context_tokens ({config.budget.context_tokens})"
        )
    if not rule.makes_summaries and not c.train_summary:
        raise UserError(f"context.train_summary is False, and context.rule {rule.name!r} has no summaries")


def _check_credit(config: ml_collections.ConfigDict, scheme: Scheme) -> None:
    """The scheme gets what it needs, as far as a config can tell; `check_openings` asks the task for state keys."""
    c = config.rollout
    if scheme.needs_critic and config.critic == "none":
        raise UserError(f"credit scheme {scheme.name!r} needs a critic; set config.critic=shared_trunk")
    _check_critic_warmup(config, scheme)
    if scheme.needs_samples and c.samples < 2:
        raise UserError(
            f"credit scheme {scheme.name!r} compares the samples of a task row, and rollout.samples is {c.samples}: no "
            "token would ever get an advantage; set rollout.samples to 2 or more"
        )
    gamma = scheme.arguments.get("gamma", 1.0)
    if config.shaping.potential and scheme.discount_unit == "token" and gamma < 1:
        raise UserError(
            f"shaping.potential discounts by step, and credit scheme {scheme.name!r} by token (credit.args.gamma "
            f"{gamma}): what is best would change; set credit.args.gamma=1 or choose a scheme whose time is the step"
        )
    tools = [key for key in ("potential", "overlong_buffer") if config.shaping[key]]
    if scheme.needs_greedy and (tools or config.shaping.process_norm != "none"):
        raise UserError(
            f"credit scheme {scheme.name!r} compares with greedy rollouts, whose rewards are not shaped; set "
            f"shaping.{(tools or ['process_norm'])[0]} to none of it"
        )
    if build.learner_config(config).observations and config.learner.row_loss_tokens < config.budget.context_tokens:
        raise UserError(
            f"learner.loss_mask or learner.advantage_mask is False: a step then has up to budget.context_tokens "
            f"({config.budget.context_tokens}) loss tokens, and learner.row_loss_tokens is "
            f"{config.learner.row_loss_tokens}; raise it"
        )


def _check_critic_warmup(config: ml_collections.ConfigDict, scheme: Scheme) -> None:
    """While the critic warms up there is one that learns, and some update is left."""
    updates = config.optimizer.critic_warmup
    if updates and not build.learns_values(config):
        why = "critic is none" if scheme.uses_critic else f"credit scheme {scheme.name!r} uses none"
        raise UserError(
            f"optimizer.critic_warmup is {updates}, and there is no critic to learn ({why}): nothing would be trained; "
            "set optimizer.critic_warmup=0"
        )
    if 0 < config.updates <= updates:
        raise UserError(
            f"optimizer.critic_warmup ({updates}) leaves none of the updates ({config.updates}): the policy would "
            "never learn; lower it"
        )


def _check_kl(config: ml_collections.ConfigDict) -> None:
    """An adaptive coefficient has a KL to aim at, where it can act."""
    c, batch = config.kl, config.rollout.groups * config.rollout.samples
    if c.target is None:
        return
    if c.kind == "none" or c.where != "reward":
        raise UserError("kl.target adapts the coefficient of a KL in the reward; set kl.kind and kl.where=reward")
    try:
        next_kl_coef(c.coef, c.target, batch, target=c.target, horizon=c.horizon)
    except ValueError as error:
        raise UserError(f"kl.target, kl.horizon: {error}") from error


def _check_sampling(config: ml_collections.ConfigDict) -> None:
    """The learner can compute the log-probs of what was sampled."""
    sampling = build.sampling(config)
    build.rollout_config(config)
    if sampling.temperature == 0:
        raise UserError("rollout.temperature is 0: greedy samples of a group are all the same, and nothing is learned")
    c = config.correction
    if c.kind != "none" and config.learner.old_logprobs != "learner":
        raise UserError(
            f"correction.kind is {c.kind}, but learner.old_logprobs is {config.learner.old_logprobs}: without the "
            "learner's own log-probs there is no gap to correct; set learner.old_logprobs=learner"
        )
    if (sampling.top_k or sampling.top_p < 1) and c.kind == "none":
        raise UserError(
            f"rollout.top_k is {sampling.top_k} and rollout.top_p is {sampling.top_p}: the learner cannot compute "
            "log-probs of a distribution without its tail; train with 0 and 1, or correct for the gap "
            "(correction.kind=tis_token learner.old_logprobs=learner)"
        )
    _check_staleness(config)


def _check_staleness(config: ml_collections.ConfigDict) -> None:
    """What rollouts that run ahead of the learner cannot be."""
    c = config.rollout
    if not c.staleness:
        return
    if c.deterministic:
        raise UserError(
            f"rollout.staleness is {c.staleness} and rollout.deterministic is set: when a rollout meets the next "
            "policy depends on how long things take; set one of them only"
        )
    if build.credit_scheme(config).needs_greedy:
        raise UserError(
            f"credit.name={config.credit.name} samples a greedy rollout of each row with the policy that is trained; "
            "set rollout.staleness=0"
        )


def _check_pretraining(config: ml_collections.ConfigDict) -> None:
    """Pieces of text fit the rows, and a batch has some."""
    c = config.pretrain
    if not c.updates:
        return
    for key in ("updates", "texts", "batch", "rows"):
        if c[key] < 1:
            raise UserError(f"pretrain.{key} is {c[key]}; it must be at least 1")
    if not 3 <= c.tokens <= c.row_tokens:
        raise UserError(
            f"pretrain.tokens is {c.tokens}; a piece of text has at least 3 tokens, and at most pretrain.row_tokens "
            f"({c.row_tokens})"
        )


def _check_lengths(config: ml_collections.ConfigDict) -> None:
    """A trajectory that keeps to the budget fits everywhere."""
    if config.learner.row_tokens < config.budget.context_tokens:
        raise UserError(
            f"learner.row_tokens ({config.learner.row_tokens}) is less than budget.context_tokens "
            f"({config.budget.context_tokens}): a step would not fit a row"
        )
    if config.rollout.slot_tokens < config.budget.context_tokens:
        raise UserError(
            f"rollout.slot_tokens ({config.rollout.slot_tokens}) is less than budget.context_tokens "
            f"({config.budget.context_tokens}): a step would not fit the cache"
        )
    sampled = build.most_sampled(config)
    if config.learner.row_loss_tokens <= sampled:
        key = "budget.response_tokens" if sampled == config.budget.response_tokens else "context.summary_tokens"
        raise UserError(
            f"learner.row_loss_tokens is {config.learner.row_loss_tokens}; a step can have {sampled} ({key}), and one "
            "more for the critic"
        )


def _check_placement(config: ml_collections.ConfigDict, devices: Sequence[jax.Device]) -> None:
    """The meshes fit the devices; groups, rows and slots can be divided evenly."""
    processes, minibatches = len({d.process_index for d in devices}), config.learner.minibatches
    if config.rollout.groups % (processes * minibatches):
        raise UserError(
            f"rollout.groups ({config.rollout.groups}) must be a multiple of processes x learner.minibatches "
            f"({processes} x {minibatches})"
        )
    for section, updates in (("pretrain", config.pretrain.updates), ("warm_start", config.warm_start.updates)):
        batch = config[section].batch
        if updates and (batch < 1 or batch % processes):
            raise UserError(f"{section}.batch ({batch}) must be a positive multiple of the {processes} processes")
    if config.control and processes > 1:
        raise UserError("a control run is timed, and clocks of several processes differ; run it in one process")
    c = config.mesh
    learning, rolling = meshes.split_devices(devices, c.rollout_devices)
    data, fsdp, _ = meshes.axis_sizes(c.data, c.fsdp, c.tensor, learning)
    for section in ("learner", "pretrain") if config.pretrain.updates else ("learner",):
        rows = config[section].rows
        if rows % (data * fsdp):
            raise UserError(
                f"{section}.rows ({rows}) must be a multiple of the {data * fsdp} shards of a batch "
                f"(mesh.data x mesh.fsdp: {data} x {fsdp})"
            )
    try:
        shards = meshes.rollout_shards(len(rolling) // processes, config.rollout.tensor)
        build.engine_config(config).check_shards(shards)
    except ValueError as error:
        raise UserError(str(error)) from error


def check_task(config: ml_collections.ConfigDict, task: Task) -> None:
    """Refuses a split that the task lacks, and a scheme or reward tool that needs of the task what it does not have.

    Raises:
      UserError: names what there is and the keys to change.
    """
    for part in config.shaping.process_parts:
        if part not in task.reward_parts:
            raise UserError(
                f"shaping.process_parts: task {task.name!r} has no reward part {part!r}; it has "
                f"{', '.join(task.reward_parts)}"
            )
    rule = context_rule(config.context.rule)
    imitates = bool(config.warm_start.updates or config.control) and not config.warm_start.init_from
    if rule.makes_summaries and imitates and not writes_summaries(task):
        raise UserError(
            f"context.rule {rule.name!r} asks for summaries, and the expert of task {task.name!r} writes none to "
            "imitate; choose another context.rule, set warm_start.updates=0, or name a run in warm_start.init_from"
        )
    for row, observation in _openings(config, task, rows=1):
        _check_observation(config, row.get("task", task.name), observation)


def check_openings(config: ml_collections.ConfigDict, task: Task, agent: EnvLoop) -> None:
    """Refuses a budget that the task's first prompts already exceed.

    Raises:
      UserError: names the row, its length and the keys to change.
    """
    room = config.budget.context_tokens - config.budget.response_tokens
    for row, observation in _openings(config, task, rows=OPENINGS_CHECKED):
        tokens = len(agent.render_opening(observation))
        if tokens > room:
            raise UserError(
                f"the prompt of row {row['id']} has {tokens} tokens; budget.context_tokens "
                f"({config.budget.context_tokens}) less budget.response_tokens ({config.budget.response_tokens}) "
                f"leaves {room}: raise budget.context_tokens"
            )


def _openings(config: ml_collections.ConfigDict, task: Task, rows: int) -> Iterator[tuple[Row, Observation]]:
    """The first rows of each split that a run uses, of each task of a mixture, and how their episodes begin."""

    async def first_observation(row: Row) -> Observation:
        return await task.env().reset(row, seed=0)

    splits = [
        f"{split}/{name}" if name and "/" not in split else split
        for split in ("train", config.eval.split)
        for name in (task.names if isinstance(task, MixtureTask) else [""])
    ]
    for split in dict.fromkeys(splits):
        try:
            chosen = [task.row(split, index) for index in range(rows)]
        except ValueError as error:
            raise UserError(f"eval.split: {error}") from error
        for row in chosen:
            yield row, asyncio.run(first_observation(row))


def _check_observation(config: ml_collections.ConfigDict, task: str, observation: Observation) -> None:
    scheme = build.credit_scheme(config)
    if scheme.needs_state_key and observation.state_key is None:
        raise UserError(
            f"credit scheme {scheme.name!r} compares steps of equal state_key, and observations of task {task!r} "
            "have none; set Observation.state_key in the environment, or choose another credit.name"
        )
    rule = context_rule(config.context.rule)
    if rule.needs_evidence and observation.evidence is None:
        raise UserError(
            f"context.rule {rule.name!r} builds prompts from what the environment has shown, and observations of task "
            f"{task!r} do not say it; set Observation.evidence in the environment, or choose another context.rule"
        )
    if config.shaping.potential and observation.potential is None:
        raise UserError(
            f"shaping.potential is {config.shaping.potential}, and observations of task {task!r} have no "
            "potential; set Observation.potential in the environment, or shaping.potential=0"
        )


def check_attention(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh, *, call: bool = True) -> None:
    """Refuses an attention implementation that the learner's devices or rows do not allow, by a tiny call of it.

    Raises:
      UserError: see `policy.attention_check`.
    """
    try:
        attention_check.check_attention(policy, mesh, config.learner.row_tokens, config.learner.packing, call=call)
    except ValueError as error:
        raise UserError(str(error)) from error
