"""The three phases of a run: language modelling on texts, imitation of an expert, reinforcement learning.

All three take the same train step. A document, and a demonstration, is a trajectory whose responses somebody else
wrote: there every advantage is 1 and nothing is clipped.
"""

from __future__ import annotations

from typing import Any

from agentr1_jax.learner.losses import MINIBATCH_RATIOS
from agentr1_jax.learner.update import make_log_ratio, make_token_outputs, make_update
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime.compile_cache import cached_jit
from agentr1_jax.train.parts import Phase, Setup


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
    """Return the phase of reinforcement learning; see `pretraining` for the arguments.

    `reference` is the policy that the KL is measured to; None without a KL term.
    """
    settings, objective, mesh = setup.settings, setup.settings.objective, setup.learner_mesh
    learner, critic = settings.learner, settings.learns_values
    needs_outputs = critic or reference is not None or learner.old_logprobs == "learner" or learner.observations
    needs_pass = objective.loss.ratio in MINIBATCH_RATIOS and objective.loss.clip != "none"
    return Phase(
        name="rl",
        updates=settings.run.updates,
        packing=learner.packing_config,
        microbatches=settings.microbatches(settings.batch_trajectories // learner.minibatches),
        update=make_update(setup.policy, objective, optimizer, layout),
        token_outputs=make_token_outputs(setup.policy, objective, mesh) if needs_outputs else None,
        log_ratio=make_log_ratio(setup.policy, objective, mesh) if needs_pass else None,
        reference=reference,
        scheme=settings.scheme,
        assign=cached_jit(settings.scheme.assign, None),
        critic=critic,
        observations=learner.observations,
    )
