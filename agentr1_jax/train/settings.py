"""Settings of a run: one dataclass for each section of a config, checked by itself and against the others.

`configs/base.py` says what each key means; the sections of a package, such as `LossConfig`, are declared there.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from agentr1_jax.agents.context import ContextConfig, ContextRule
from agentr1_jax.agents.loop import AgentConfig
from agentr1_jax.credit.scheme import CreditConfig, Scheme
from agentr1_jax.credit.shaping import ShapingConfig
from agentr1_jax.envs.mixture import Stage, parse_curriculum
from agentr1_jax.errors import UserError, user_error
from agentr1_jax.learner.config import (
    CorrectionConfig,
    KLConfig,
    LearnerConfig,
    LossConfig,
    Objective,
    OptimizerConfig,
    PackingConfig,
    PackingMode,
)
from agentr1_jax.learner.losses import next_kl_coef
from agentr1_jax.learner.optimizer import learning_rates, make_optimizer
from agentr1_jax.policy.attention import SPLASH_BLOCK
from agentr1_jax.policy.config import PolicyConfig
from agentr1_jax.registry import Registry
from agentr1_jax.rollout.config import AttemptLimits, EngineConfig, RolloutConfig, SamplingConfig
from agentr1_jax.runtime.checkpoint import CheckpointConfig
from agentr1_jax.runtime.mesh import MeshConfig
from agentr1_jax.runtime.metrics import SinksConfig
from agentr1_jax.runtime.monitoring import parse_profile_updates
from agentr1_jax.runtime.processes import ProcessesConfig
from agentr1_jax.tools.wrappers import ToolsConfig
from agentr1_jax.train import defaults
from agentr1_jax.trajectory import Budget
from agentr1_jax.validation import INT32, STRICT, Count, Fraction, NonNegative, Positive, Seed, Whole, from_section


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """Keys at the top of the config."""

    seed: Seed = 0
    run_dir: str = "runs/base"
    updates: Whole = 100
    critic: Literal["none", "shared_trunk", "separate"] = "none"
    hardware: Literal["cpu", "v5e-8", "v5e-16", "v6e-8", "v5p-8", "h100x8", "h200", "auto"] = "cpu"
    profile_updates: str = ""
    compilation_cache: str = "{runs}/.programs"

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise ValueError("run_dir is empty; name the folder of the run")
        parse_profile_updates(self.profile_updates)


@dataclass(frozen=True, config=STRICT)
class TokenizerConfig:
    """Section `tokenizer`."""

    path: str = ""
    vocab_size: Count = 1024
    texts: Count = 4000


@dataclass(frozen=True, config=STRICT)
class PretrainConfig:
    """Section `pretrain`: language modelling on texts of the task, before the warm start."""

    updates: Whole = 0
    texts: Count = 100_000
    tokens: Count = 256
    batch: Count = 64
    lr: Positive = 3e-3
    rows: Count = 8
    row_tokens: Count = 512

    def __post_init__(self) -> None:
        if not 3 <= self.tokens <= self.row_tokens:
            raise ValueError(
                f"pretrain.tokens is {self.tokens}; a piece of text has at least 3 tokens, and at most "
                f"pretrain.row_tokens ({self.row_tokens})"
            )


@dataclass(frozen=True, config=STRICT)
class WarmStartConfig:
    """Section `warm_start`: imitation of expert trajectories, before reinforcement learning."""

    init_from: str = ""
    updates: Whole = 0
    control_seconds: NonNegative = 0.0
    lr: Positive = 3e-3
    demonstrations: Count = 4096
    practice: Fraction = 0.25
    batch: Count = 64


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Section `eval`."""

    split: str = "eval"
    questions: Count = 256
    every: Whole = 10
    quick_questions: Count = 64


@dataclass(frozen=True, config=STRICT)
class TaskConfig:
    """Section `task`; `sections` has the keys of each task that brings some, by its name."""

    name: str = ""
    file: str = ""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data_dir: str = ""
    mixture: tuple[str, ...] = ()
    curriculum: tuple[str, ...] = ()
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run, one field for each section of its config.

    `run` has the keys at the top; `rollout`, `engine` and `sampling` share the section `rollout`; `scheme` is the
    credit scheme that `credit` names, with its arguments.
    """

    run: RunConfig
    checkpoint: CheckpointConfig
    sinks: SinksConfig
    task: TaskConfig
    tools: ToolsConfig
    agent: AgentConfig
    budget: Budget
    context: ContextConfig
    tokenizer: TokenizerConfig
    policy: PolicyConfig
    rollout: RolloutConfig
    engine: EngineConfig
    sampling: SamplingConfig
    credit: CreditConfig
    shaping: ShapingConfig
    loss: LossConfig
    kl: KLConfig
    correction: CorrectionConfig
    learner: LearnerConfig
    optimizer: OptimizerConfig
    pretrain: PretrainConfig
    warm_start: WarmStartConfig
    eval: EvalConfig
    processes: ProcessesConfig
    mesh: MeshConfig
    scheme: Scheme

    def __post_init__(self) -> None:
        _ = self.stages
        with user_error():
            make_optimizer(self.optimizer)
        _check_credit(self)
        _check_critic_warmup(self)
        _check_kl(self)
        _check_sampling(self)
        _check_lengths(self)
        _check_batch(self)

    @property
    def context_rule(self) -> ContextRule:
        """The context rule with its arguments. Raises UserError if it cannot be read."""
        with user_error():
            return self.context.bound_rule

    @functools.cached_property
    def stages(self) -> Sequence[Stage]:
        """Stages of the curriculum. Raises UserError if one cannot be read."""
        with user_error():
            return parse_curriculum(self.task.curriculum, self.budget.max_steps)

    @property
    def batch_trajectories(self) -> int:
        """Trajectories of an RL batch, over all processes."""
        return self.rollout.groups * self.rollout.samples

    @property
    def learns_values(self) -> bool:
        """True if RL trains a critic: the config has one, and the credit scheme uses it."""
        return self.scheme.uses_critic and self.run.critic != "none"

    @property
    def needs_reference(self) -> bool:
        """True if RL compares with the policy that it starts from, or probes by it."""
        return self.kl.kind != "none" or self.credit.probe == "reference"

    @property
    def probe_packing(self) -> PackingConfig:
        """Rows of the forward pass where the gold answers are probed: a probe fits behind any prompt.

        Probes branch, so that trajectories whose chains are packed are packed as trees.
        """
        c = self.learner.packing_config
        tokens = c.row_tokens + self.budget.response_tokens
        tokens += -tokens % (SPLASH_BLOCK if self.policy.attention in ("splash", "splash_tree") else 1)
        mode: PackingMode = "prefix_tree" if c.mode == "trajectory" else c.mode
        return PackingConfig(mode, tokens, 2 * c.row_loss_tokens, c.rows)

    @property
    def imitates(self) -> bool:
        """True if the run imitates demonstrations: in a warm start of its own, or as a control."""
        c = self.warm_start
        return bool(c.control_seconds or (c.updates and not c.init_from))

    @property
    def most_steps(self) -> int:
        """Most steps of a trajectory."""
        return defaults.most_steps(self.budget, self.context_rule)

    @property
    def most_response_tokens(self) -> int:
        """Most tokens that one step samples."""
        return defaults.most_response_tokens(self.budget, self.context, self.context_rule)

    @property
    def batch_capacity(self) -> dict[str, int]:
        """Most trajectories, steps and tokens of a batch: the fixed shapes of a `TokenBatch`."""
        steps = self.batch_trajectories * self.most_steps
        step_tokens = self.budget.context_tokens if self.learner.observations else self.most_response_tokens
        return {"trajectories": self.batch_trajectories, "steps": steps, "tokens": steps * step_tokens}

    @property
    def objective(self) -> Objective:
        """The objective that an update of RL minimises."""
        return Objective(self.loss, self.kl, self.sampling.temperature)

    @property
    def attempt_limits(self) -> AttemptLimits:
        """When the runner gives up on a trajectory: well after an agent that keeps to its budget has done so itself."""
        seconds = self.budget.trajectory_seconds
        if seconds is None and self.budget.step_seconds is not None:
            seconds = (1 + self.most_steps) * self.budget.step_seconds  # 1 for the reset.
        return AttemptLimits(self.rollout.attempts, None if seconds is None else 2 * seconds)

    @property
    def pretrain_packing(self) -> PackingConfig:
        """Rows of pretraining, where every token is a loss token."""
        c = self.pretrain
        return PackingConfig(self.learner.packing, c.row_tokens, c.row_tokens, c.rows)

    def microbatches(self, trajectories: int) -> int:
        """Return the number of microbatches that the worst packing of so many trajectories fills.

        An update loops over those that hold data.
        """
        branches = self.context_rule.name != "append" or self.learner.packing in ("per_step", "per_step_padded")
        # A chain is also cut where its loss tokens exceed a row.
        cut = self.most_steps * self.most_response_tokens >= self.learner.row_loss_tokens
        segments = self.most_steps + 1 if branches or cut else 1
        return -(-trajectories * segments // self.learner.rows)

    def learning_rates(self, update: int, parts: Iterable[str]) -> dict[str, float]:
        """Return the learning rate of each part of the parameters in an update of RL, counted from 0."""
        return learning_rates(self.optimizer, update, self.run.updates, parts)


ROLLOUT = {"rollout": RolloutConfig, "engine": EngineConfig, "sampling": SamplingConfig}
"""Fields of `Settings` that share the section `rollout`."""
SECTIONS: Mapping[str, type] = {
    name: cls
    for name, cls in typing.get_type_hints(Settings).items()
    if name not in ("run", "task", "credit", "scheme", *ROLLOUT)
}
"""Sections whose keys are the fields of one dataclass."""


def settings_from_dict(values: Mapping[str, Any], task: TaskConfig) -> Settings:
    """Check every key of a config, by itself and against the others.

    Imports the user's files that register credit schemes and context rules.

    Args:
      values: section -> key -> value, and the keys at the top; `defaults.complete` gives values to those that are
        unset, and a missing key of another name has its dataclass's default.
      task: the section `task`, which is read where the tasks are known.

    Raises:
      UserError: a value is of another type, out of range or does not fit another; the message names the keys.
    """
    values = defaults.complete(values)
    credit = dict(values.get("credit", {}))
    credit["args"] = {key: x for key, x in credit.get("args", {}).items() if x is not None}
    credit_config = from_section(CreditConfig, "credit", credit)
    return Settings(
        run=from_section(RunConfig, "", {key: x for key, x in values.items() if not isinstance(x, Mapping)}),
        task=task,
        credit=credit_config,
        scheme=credit_config.bind(),
        **_split_rollout(values.get("rollout", {})),
        **{name: from_section(cls, name, values.get(name, {})) for name, cls in SECTIONS.items()},
    )


def load_file(registry: Registry[Any], path: str) -> None:
    """Import a user's file that registers something. Raises UserError if it cannot be imported."""
    with user_error():
        registry.load(path)


def _split_rollout(values: Mapping[str, Any]) -> dict[str, Any]:
    """Make the dataclasses of section `rollout`, each from its own fields."""
    fields = {name: {f.name for f in dataclasses.fields(cls)} for name, cls in ROLLOUT.items()}
    if unknown := values.keys() - set().union(*fields.values()):
        raise UserError(f"unknown key 'rollout.{min(unknown)}'")
    return {
        name: from_section(cls, "rollout", {key: x for key, x in values.items() if key in fields[name]})
        for name, cls in ROLLOUT.items()
    }


def _check_credit(s: Settings) -> None:
    """Refuse a credit scheme that would not get what it needs; the task is asked later."""
    scheme = s.scheme
    if scheme.needs_critic and s.run.critic == "none":
        raise UserError(f"credit scheme {scheme.name!r} needs a critic; set config.critic=shared_trunk")
    if scheme.needs_samples and s.rollout.samples < 2:
        raise UserError(
            f"credit scheme {scheme.name!r} compares the samples of a task row, and rollout.samples is "
            f"{s.rollout.samples}: no token would ever get an advantage; set rollout.samples to 2 or more"
        )
    _check_probe(s)
    token_gamma = {**scheme.defaults, **scheme.arguments}.get("gamma", 1.0) if scheme.discount_unit == "token" else 1.0
    if s.shaping.potential and token_gamma < 1:
        raise UserError(
            f"shaping.potential discounts by step, and credit scheme {scheme.name!r} by token (credit.args.gamma "
            f"{token_gamma}): what is best would change; set credit.args.gamma=1 or choose a scheme whose time is the "
            "step"
        )
    shaping = {
        "potential": s.shaping.potential,
        "overlong_buffer": s.shaping.overlong_buffer,
        "process_norm": s.shaping.process_norm != "none",
    }
    if scheme.needs_greedy and any(shaping.values()):
        raise UserError(
            f"credit scheme {scheme.name!r} compares with greedy rollouts, whose rewards are not shaped; leave "
            f"{', '.join(f'shaping.{key}' for key, active in shaping.items() if active)} at the default"
        )


def _check_probe(s: Settings) -> None:
    """Refuse a credit scheme whose beliefs nothing probes, or not by what it wants, and probes that nothing reads."""
    scheme, probe = s.scheme, s.credit.probe
    if scheme.needs_frozen_belief and probe != "reference":
        raise UserError(
            f"credit scheme {scheme.name!r} reads the reference's belief in the gold answer, and credit.probe is "
            f"{probe}; set credit.probe=reference, or credit.args.frozen=False with credit.probe=policy"
        )
    if scheme.needs_belief and probe == "none":
        raise UserError(
            f"credit scheme {scheme.name!r} reads the belief in the gold answer, and credit.probe is none; set "
            "credit.probe=policy (or reference)"
        )
    if probe != "none" and not scheme.needs_belief:
        raise UserError(
            f"credit.probe is {probe}, and nothing reads it: credit scheme {scheme.name!r} takes no belief; set "
            "credit.probe=none"
        )
    if s.credit.probe_text and probe == "none":
        raise UserError("credit.probe_text is set, and credit.probe is none: nothing reads it; unset it")


def _check_critic_warmup(s: Settings) -> None:
    """Refuse a warm-up of a critic that does not exist, or one that leaves no update to the policy."""
    updates = s.optimizer.critic_warmup
    if updates and not s.learns_values:
        why = "critic is none" if s.scheme.uses_critic else f"credit scheme {s.scheme.name!r} uses none"
        raise UserError(
            f"optimizer.critic_warmup is {updates}, and there is no critic to learn ({why}): nothing would be trained; "
            "set optimizer.critic_warmup=0"
        )
    if 0 < s.run.updates <= updates:
        raise UserError(
            f"optimizer.critic_warmup ({updates}) leaves none of the updates ({s.run.updates}): the policy would never "
            "learn; lower it"
        )


def _check_kl(s: Settings) -> None:
    """Refuse an adaptive KL coefficient that has nothing to act on."""
    c = s.kl
    if c.target is None:
        return
    if c.kind == "none" or c.where != "reward":
        raise UserError("kl.target adapts the coefficient of a KL in the reward; set kl.kind and kl.where=reward")
    with user_error("kl.target, kl.horizon: "):
        next_kl_coef(c.coef, c.target, s.batch_trajectories, target=c.target, horizon=c.horizon)


def _check_sampling(s: Settings) -> None:
    """Refuse sampling whose log-probs the learner cannot compute, and rollouts that cannot run ahead of the learner."""
    sampling, correction, staleness = s.sampling, s.correction, s.rollout.staleness
    if sampling.temperature == 0:
        raise UserError("rollout.temperature is 0: greedy samples of a group are all the same, and nothing is learned")
    if correction.kind != "none" and s.learner.old_logprobs != "learner":
        raise UserError(
            f"correction.kind is {correction.kind}, but learner.old_logprobs is {s.learner.old_logprobs}: without the "
            "learner's own log-probs there is no gap to correct; set learner.old_logprobs=learner"
        )
    if (sampling.top_k or sampling.top_p < 1) and correction.kind == "none":
        raise UserError(
            f"rollout.top_k is {sampling.top_k} and rollout.top_p is {sampling.top_p}: the learner cannot compute "
            "log-probs of a distribution without its tail; train with 0 and 1, or correct for the gap "
            "(correction.kind=tis_token learner.old_logprobs=learner)"
        )
    if s.engine.kv_dtype and correction.kind == "none":
        raise UserError(
            f"rollout.kv_dtype is {s.engine.kv_dtype}: the policy that samples then differs from the one that learns; "
            "correct for the gap (correction.kind=tis_token learner.old_logprobs=learner)"
        )
    if staleness and s.engine.deterministic:
        raise UserError(
            f"rollout.staleness is {staleness} and rollout.deterministic is set: when a rollout meets the next policy "
            "depends on how long things take; set one of them only"
        )
    if s.engine.adopt == "in_flight" and not staleness:
        raise UserError(
            "rollout.adopt is in_flight and rollout.staleness is 0: no rollout meets another policy; set "
            "rollout.staleness to 1 or more, or rollout.adopt=drain"
        )
    if staleness and s.scheme.needs_greedy:
        raise UserError(
            f"credit.name={s.scheme.name} samples a greedy rollout of each row with the policy that is trained; set "
            "rollout.staleness=0"
        )


def _check_lengths(s: Settings) -> None:
    """Refuse rows, cache slots and contexts that a step within the budget would not fit."""
    if s.context_rule.makes_summaries and not s.context.summary_tokens < s.budget.context_tokens:
        raise UserError(
            f"context.summary_tokens ({s.context.summary_tokens}) must be less than budget.context_tokens "
            f"({s.budget.context_tokens})"
        )
    for key, tokens in (("learner.row_tokens", s.learner.row_tokens), ("rollout.slot_tokens", s.engine.slot_tokens)):
        if tokens < s.budget.context_tokens:
            raise UserError(
                f"{key} ({tokens}) is less than budget.context_tokens ({s.budget.context_tokens}): a step would not "
                f"fit; {key}=None makes it follow"
            )
    if s.learner.row_loss_tokens <= s.most_response_tokens:
        key = "budget.response_tokens"
        if s.most_response_tokens > s.budget.response_tokens:
            key = "context.summary_tokens"
        raise UserError(
            f"learner.row_loss_tokens is {s.learner.row_loss_tokens}; a step can have {s.most_response_tokens} "
            f"({key}), and one more for the critic; learner.row_loss_tokens=None makes it follow"
        )
    if s.learner.observations and s.learner.row_loss_tokens < s.budget.context_tokens:
        raise UserError(
            f"learner.loss_mask or learner.advantage_mask is False: a step then has up to budget.context_tokens "
            f"({s.budget.context_tokens}) loss tokens, and learner.row_loss_tokens is {s.learner.row_loss_tokens}; "
            "learner.row_loss_tokens=None makes it follow"
        )


def _check_batch(s: Settings) -> None:
    """Refuse batches whose tokens 32 bits cannot count."""
    tokens = s.batch_capacity["tokens"]
    if tokens >= INT32:
        raise UserError(
            f"a batch could have {tokens:,} tokens, of rollout.groups ({s.rollout.groups}) x rollout.samples "
            f"({s.rollout.samples}) trajectories, each of budget.max_steps ({s.budget.max_steps}) steps; programs "
            "count to less than 2^31: lower one of them, or the tokens of a step"
        )
