"""The three phases of a run: language modelling on texts, imitation of an expert, reinforcement learning.

All three take the same train step. A document, and a demonstration, is a trajectory whose responses somebody else
wrote: there every advantage is 1 and nothing is clipped. They are made once, before the phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from absl import logging

from agentr1_jax.agents import event_loop
from agentr1_jax.agents.session import ScriptedSession
from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.scheme import Scheme
from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.learner.losses import MINIBATCH_RATIOS
from agentr1_jax.learner.update import LearnerState, TokenOutputs, make_log_ratio, make_token_outputs, make_update
from agentr1_jax.policy.attention import for_trees
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.runner import attempt_episode
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.compile_cache import cached_jit
from agentr1_jax.runtime.seeds import generator
from agentr1_jax.train.build import Setup
from agentr1_jax.train.collect import (
    AsynchronousRollouts,
    Rollouts,
    SynchronousRollouts,
    identities,
    process_shard,
    wait_or_stop,
)
from agentr1_jax.train.probes import Prober, make_prober
from agentr1_jax.train.progress import Progress
from agentr1_jax.trajectory import POLICIES, Outcome, Step, Trajectory

PRACTICE = "practice"
"""Split of a task for demonstrations alone, where it has one."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """How a phase of a run trains: its compiled programs and the shape of its batches.

    Attributes:
      updates: train steps of the phase.
      packing: layout and size of the rows of a microbatch.
      microbatches: most microbatches that a minibatch can fill.
      update: one optimizer step.
      token_outputs: forward pass for values, recomputed and reference log-probs and beliefs; None where nothing needs
        it.
      outputs_packing: layout of its rows; None for `packing`.
      prober: writes the probes of beliefs that this pass scores; None without.
      reads_policy: True if the pass is needed of the policy, too, and not of the reference's beliefs alone.
      log_ratio: the pass that the ratio needs before each update; None where the ratio needs none.
      reference: the decoder's trained parameters as RL started, in compute dtype; None where nothing needs it.
      scheme: credit scheme; None where every advantage is 1.
      assign: the scheme's function, compiled.
      critic: True if values are computed and trained.
      observations: True if observation tokens are loss tokens too, as the mask ablations need.
    """

    name: Literal["pretraining", "warm_start", "rl"]
    updates: int
    packing: PackingConfig
    microbatches: int
    update: Callable[..., tuple[LearnerState, dict[str, jax.Array]]]
    token_outputs: Callable[..., TokenOutputs] | None = None
    outputs_packing: PackingConfig | None = None
    prober: Prober | None = None
    reads_policy: bool = True
    log_ratio: Callable[..., jax.Array] | None = None
    reference: Params | None = None
    scheme: Scheme | None = None
    assign: Callable[[TokenBatch], Credit] | None = None
    critic: bool = False
    observations: bool = False


def pretraining(setup: Setup, optimizer: Any, layout: Any) -> Phase:
    """Return the phase of language modelling, in which every token of a document is trained.

    Args:
      setup: parts of the run.
      optimizer: optax transformation without its learning rate.
      layout: shardings of the learner's state.
    """
    settings = setup.settings
    return Phase(
        name="pretraining",
        updates=settings.pretrain.updates,
        packing=settings.pretrain_packing,
        microbatches=-(-settings.pretrain.batch // settings.pretrain.rows),
        update=make_update(setup.policy, settings.objective.imitation(), optimizer, layout),
    )


def warm_start(setup: Setup, optimizer: Any, layout: Any) -> Phase:
    """Return the phase of imitation; see `pretraining` for the arguments."""
    settings = setup.settings
    return Phase(
        name="warm_start",
        updates=settings.warm_start.updates,
        packing=settings.learner.packing_config,
        microbatches=settings.microbatches(settings.warm_start.batch),
        update=make_update(setup.policy, settings.objective.imitation(), optimizer, layout),
    )


def reinforcement(setup: Setup, optimizer: Any, layout: Any, reference: Params | None) -> Phase:
    """Return the phase of reinforcement learning; see `pretraining` and `Phase` for the arguments."""
    settings, objective, mesh = setup.settings, setup.settings.objective, setup.learner_mesh
    learner, critic = settings.learner, settings.learns_values
    prober = make_prober(settings, setup.tokenizer)
    reads_policy = critic or settings.kl.kind != "none" or learner.old_logprobs == "learner" or learner.observations
    reads_policy = reads_policy or (prober is not None and prober.scorer == "policy")
    policy = setup.policy
    if prober:  # Probes branch.
        policy = dataclasses.replace(policy, attention=for_trees(policy.attention))
    needs_pass = objective.loss.ratio in MINIBATCH_RATIOS and objective.loss.clip != "none"
    return Phase(
        name="rl",
        updates=settings.run.updates,
        packing=learner.packing_config,
        microbatches=settings.microbatches(settings.batch_trajectories // learner.minibatches),
        update=make_update(setup.policy, objective, optimizer, layout),
        token_outputs=make_token_outputs(policy, objective, mesh) if reads_policy or prober else None,
        outputs_packing=settings.probe_packing if prober else None,
        prober=prober,
        reads_policy=reads_policy,
        log_ratio=make_log_ratio(setup.policy, objective, mesh) if needs_pass else None,
        reference=reference,
        scheme=settings.scheme,
        assign=cached_jit(settings.scheme.assign, None),
        critic=critic,
        observations=learner.observations,
    )


def make_demonstrations(setup: Setup, stop: processes.StopRequest) -> list[Trajectory] | None:
    """Make this process's share of the expert trajectories, some of them on the task's practice split. Collective.

    Returns:
      the trajectories; those whose environment failed are among them, and no batch trains on them. None in all
      processes if any is asked to stop.

    Raises:
      UserError: all of them failed.
    """
    c, seed = setup.settings.warm_start, setup.settings.run.seed
    practice = generator(seed, "practice").random(c.demonstrations) < c.practice
    # Rows of a split follow each other: what rows share, such as a world, is made once.
    rows = np.where(practice, np.cumsum(practice), np.cumsum(~practice)) - 1

    async def play() -> list[Trajectory]:
        trajectories = []
        for index in process_shard(c.demonstrations):
            (identity,) = identities(setup, "demonstration", index, index, 1)
            row = setup.task.row(PRACTICE if practice[index] else "train", int(rows[index]))
            expert = setup.task.expert(row, identity.seed)
            session = ScriptedSession(identity, expert, setup.tokenizer, setup.agent.call_format)
            limit = setup.settings.attempt_limits.seconds
            trajectories.append(await attempt_episode(setup.agent, session, row, limit))
        return trajectories

    work = event_loop.start(play())
    if not wait_or_stop(work, stop):
        return None
    trajectories = work.result()
    failures = [t for t in trajectories if POLICIES[t.outcome].training == "drop"]
    if failures:
        message = (
            f"{len(failures)} of {len(trajectories)} demonstrations failed, the first one as {failures[0].outcome}: "
            f"{failures[0].info.get('error', 'no details')}"
        )
        if len(failures) == len(trajectories):
            raise UserError(f"warm_start: {message}; `python -m experiments.try_task` plays the task")
        logging.warning("%s", message)
    return trajectories


def make_documents(setup: Setup) -> list[Trajectory]:
    """Make this process's share of the task's texts, in pieces; each is a trajectory whose one response is the text.

    A piece begins and ends with the stop token, as a piece of a longer text does too.
    """
    c, stop = setup.settings.pretrain, setup.tokenizer.stop_id
    texts = setup.task.texts(c.texts)
    pieces = [
        np.asarray([*ids[at : at + c.tokens - 2], stop], np.int32)
        for ids in (setup.tokenizer.encode_data(texts[i]) for i in process_shard(len(texts)))
        for at in range(0, len(ids), c.tokens - 2)
    ]
    prompt = np.asarray([stop], np.int32)
    return [
        Trajectory(
            uid=f"text/{i:06d}",
            group=i,
            sample=0,
            task=setup.task.name,
            seed=0,
            steps=(Step(prompt, piece, np.zeros(len(piece), np.float32), reward=0.0),),
            outcome=Outcome.ENV_DONE,
        )
        for i, piece in enumerate(pieces)
    ]


class Examples:
    """Batches of documents or demonstrations: `size` of this process's in each, in an order keyed by the run's seed.

    See `collect` for the methods.
    """

    background = None

    def __init__(self, trajectories: Sequence[Trajectory], size: int, seed: int) -> None:
        self._trajectories, self._size, self._seed = trajectories, size, seed
        self.count = len(trajectories) * processes.process_count()

    def next(self, params: Params, progress: Progress, stop: processes.StopRequest) -> Rollouts:
        """Return the batch of an update: passes over the examples, each in an order of its own."""
        per_epoch = max(len(self._trajectories) // self._size, 1)
        epoch, place = divmod(progress.update, per_epoch)
        order = generator(self._seed, "demonstration order", epoch).permutation(len(self._trajectories))
        return Rollouts([self._trajectories[i] for i in order[place * self._size :][: self._size]])

    def publish(self, params: Params, update: int) -> None:
        """Do nothing: nothing is sampled."""

    def pending(self) -> Sequence[Trajectory]:
        """Return nothing."""
        return ()


Batches = Examples | SynchronousRollouts | AsynchronousRollouts
