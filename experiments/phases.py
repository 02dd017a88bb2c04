"""What each phase of a run learns with: its compiled programs, and what credit is assigned by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from agentr1_jax.credit import Credit, ShapingConfig, TokenBatch
from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.learner.losses import MINIBATCH_RATIOS
from agentr1_jax.learner.update import LearnerState, TokenOutputs, make_log_ratio, make_token_outputs, make_update
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime.compile_cache import cached_jit
from experiments import build
from experiments.circle import Run


@dataclasses.dataclass(frozen=True)
class Learner:
    """The compiled programs of one phase.

    Attributes:
      update: one optimizer step.
      token_outputs: forward pass for values, recomputed and reference log-probs; None where nothing needs it.
      log_ratio: the pass that the ratio needs before each update; None for those that need none.
      reference: what is trained of the decoder, as RL started; None without a KL term.
      critic: whether values are wanted.
      packing: layout and shape of a microbatch.
      microbatches: most of them that a batch can fill.
      credit: the scheme; None for demonstrations, whose advantage is 1.
      greedy: whether the scheme needs the reward of a greedy rollout of each row.
      gamma: the scheme's discount per step.
      shaping: what is done to rewards before.
      observations: observation tokens are loss tokens too, where a mask is left out to compare.
    """

    update: Callable[..., tuple[LearnerState, dict[str, jax.Array]]]
    packing: PackingConfig
    microbatches: int
    token_outputs: Callable[..., TokenOutputs] | None = None
    log_ratio: Callable[..., jax.Array] | None = None
    reference: Params | None = None
    critic: bool = False
    credit: Callable[[TokenBatch], Credit] | None = None
    greedy: bool = False
    gamma: float = 1.0
    shaping: ShapingConfig = ShapingConfig()
    observations: bool = False


def pretraining(run: Run, optimizer: Any, layout: Any) -> Learner:
    """The learner of pretraining: every token of a document is trained."""
    c = run.config.pretrain
    return Learner(
        update=make_update(run.policy, build.objective(run.config).imitation(), optimizer, layout),
        packing=PackingConfig(run.config.learner.packing, c.row_tokens, c.row_tokens, c.rows),
        microbatches=-(-c.batch // c.rows),
    )


def supervised(run: Run, optimizer: Any, layout: Any) -> Learner:
    """The learner of the warm start: the same update with advantage 1, and no ratio, no KL, no critic."""
    config = run.config
    return Learner(
        update=make_update(run.policy, build.objective(config).imitation(), optimizer, layout),
        packing=packing(config),
        microbatches=build.microbatches(config, config.warm_start.batch),
    )


def reinforced(run: Run, optimizer: Any, layout: Any, reference: Params | None) -> Learner:
    """The learner of RL."""
    config, objective = run.config, build.objective(run.config)
    scheme = build.credit_scheme(config)
    critic, observations = build.learns_values(config), build.learner_config(config).observations
    needs_outputs = critic or reference is not None or config.learner.old_logprobs == "learner" or observations
    needs_pass = objective.loss.ratio in MINIBATCH_RATIOS and objective.loss.clip != "none"
    batch = config.rollout.groups * config.rollout.samples // config.learner.minibatches
    return Learner(
        update=make_update(run.policy, objective, optimizer, layout),
        packing=packing(config),
        microbatches=build.microbatches(config, batch),
        token_outputs=make_token_outputs(run.policy, objective, run.learner_mesh) if needs_outputs else None,
        log_ratio=make_log_ratio(run.policy, objective, run.learner_mesh) if needs_pass else None,
        reference=reference,
        critic=critic,
        credit=cached_jit(scheme.assign, None),
        greedy=scheme.needs_greedy,
        gamma=scheme.gamma,
        shaping=build.shaping(config),
        observations=observations,
    )


def packing(config: ml_collections.ConfigDict) -> PackingConfig:
    """Layout and shape of a microbatch of trajectories."""
    return build.learner_config(config).packing_config
