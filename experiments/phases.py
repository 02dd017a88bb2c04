"""What each phase of a run learns with: its compiled programs, and what credit is assigned by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from agentr1_jax import kept
from agentr1_jax.credit import Credit, ShapingConfig, TokenBatch
from agentr1_jax.learner.ratios import MINIBATCH_RATIOS
from agentr1_jax.learner.update import LearnerState, Scores, make_log_ratio, make_score, make_update
from agentr1_jax.policy.decoder import Params
from experiments import build
from experiments.circle import Run


@dataclasses.dataclass(frozen=True)
class Rows:
    """The fixed shape of a microbatch: so many rows, over all processes, of so many tokens and trained tokens each."""

    count: int
    tokens: int
    reads: int


@dataclasses.dataclass(frozen=True)
class Learner:
    """The compiled programs of one phase.

    Attributes:
      update: one optimizer step.
      score: forward pass for values, recomputed and reference log-probs; None where nothing needs it.
      log_ratio: the pass that the ratio needs before each update; None for those that need none.
      reference: what is trained of the decoder, as RL started; None without a KL term.
      critic: whether values are wanted.
      rows: shape of a microbatch.
      microbatches: most of them that a batch can fill.
      credit: the scheme; None for demonstrations, whose advantage is 1.
      greedy: whether the scheme needs the reward of a greedy rollout of each row.
      gamma: the scheme's discount per step.
      shaping: what is done to rewards before.
      reads: tokens that are trained: `sampled`, or `all` where a mask is left out to compare.
    """

    update: Callable[..., tuple[LearnerState, dict[str, jax.Array]]]
    rows: Rows
    microbatches: int
    score: Callable[..., Scores] | None = None
    log_ratio: Callable[..., jax.Array] | None = None
    reference: Params | None = None
    critic: bool = False
    credit: Callable[[TokenBatch], Credit] | None = None
    greedy: bool = False
    gamma: float = 1.0
    shaping: ShapingConfig = ShapingConfig()
    reads: str = "sampled"


def pretraining(run: Run, optimizer: Any, layout: Any) -> Learner:
    """The learner of pretraining: every token of a document is trained."""
    c = run.config.pretrain
    return Learner(
        update=make_update(run.policy, build.loss_config(run.config, clip="none", kl="none"), optimizer, layout),
        rows=Rows(c.rows, c.row_tokens, c.row_tokens),
        microbatches=-(-c.batch // c.rows),
    )


def supervised(run: Run, optimizer: Any, layout: Any) -> Learner:
    """The learner of the warm start: the same update with advantage 1, and no ratio, no KL, no critic."""
    config = run.config
    return Learner(
        update=make_update(run.policy, build.loss_config(config, clip="none", kl="none"), optimizer, layout),
        rows=rows(config),
        microbatches=build.microbatches(config, config.warm_start.batch),
    )


def reinforced(run: Run, optimizer: Any, layout: Any, reference: Params | None) -> Learner:
    """The learner of RL."""
    config, loss = run.config, build.loss_config(run.config)
    scheme = build.credit_scheme(config)
    critic, reads = build.learns_values(config), build.reads(config)
    needs_score = critic or reference is not None or config.learner.old_logprobs == "learner" or reads == "all"
    needs_pass = loss.ratio in MINIBATCH_RATIOS and loss.clip != "none"
    batch = config.rollout.groups * config.rollout.samples // config.learner.minibatches
    return Learner(
        update=make_update(run.policy, loss, optimizer, layout),
        rows=rows(config),
        microbatches=build.microbatches(config, batch),
        score=make_score(run.policy, loss, run.learner_mesh) if needs_score else None,
        log_ratio=make_log_ratio(run.policy, loss, run.learner_mesh) if needs_pass else None,
        reference=reference,
        critic=critic,
        credit=kept.jit(scheme.assign, None),
        greedy=scheme.needs_greedy,
        gamma=scheme.gamma,
        shaping=build.shaping(config),
        reads=reads,
    )


def rows(config: ml_collections.ConfigDict) -> Rows:
    """The shape of a microbatch of trajectories."""
    return Rows(config.learner.rows, config.learner.row_tokens, config.learner.row_reads)
