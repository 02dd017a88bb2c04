"""Small runs without a rollout half: a learner, batches for it, and slow references."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from builders import LONGEST, trajectory, with_logprobs
from examples import POLICY, WIDE, outputs_of, parameters

from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.learner.optimizer import make_optimizer
from agentr1_jax.learner.update import init_state
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.train import phases, train_step
from agentr1_jax.train.build import Setup
from agentr1_jax.train.phases import Phase
from agentr1_jax.train.progress import Progress
from configs import base
from experiments.setup import read_settings

SMALL = {
    "policy.preset": "tiny",
    "budget.context_tokens": LONGEST,
    "rollout.groups": 4,
    "rollout.samples": 2,
    "rollout.temperature": 0.8,
    "budget.max_steps": 4,
    "budget.response_tokens": 4,
    "learner.row_tokens": LONGEST,
    "learner.row_loss_tokens": 20,
    "learner.rows": 4,
    "loss.chunk": 16,
    "optimizer.name": "sgd",
    "optimizer.max_grad_norm": 0.0,
    "warm_start.batch": 8,
}
EVERYTHING = {
    "critic": "shared_trunk",
    "credit.name": "step_gae",
    "loss.ratio": "trajectory",
    "kl.kind": "k3",
    "kl.coef": 0.01,
    "learner.old_logprobs": "learner",
    "correction.kind": "tis_token",
}
CENTRED = {"loss.ratio": "centred_step", "optimizer.name": "adamw", "optimizer.eps": 1e-3}
TWICE = {"learner.minibatches": 2, "learner.epochs": 2}
RATES = {"decoder": 0.02, "value": 0.02}
NO_RETURNS = RunningMeanStd()
MICROBATCHES = 10
"""So many of four rows hold a batch in any mode: all modes share their programs."""


@dataclasses.dataclass(frozen=True)
class TrainHalf:
    """A setup without its rollout half, a phase of it, and a function that makes the state training starts from."""

    config: Any
    setup: Setup
    phase: Phase
    fresh: Any
    wide: bool

    def learn(self, trajectories, state=None, *, kl_coef=None, statistics=NO_RETURNS, rates=RATES, **programs):
        """(new state, metrics, trajectories) of one train step; `programs` replace those of the phase."""
        with jax.enable_x64(self.wide):
            state, metrics, out, _ = self.step(trajectories, state, kl_coef, statistics, rates, **programs)
            return state, metrics.fetch(), out

    def step(self, trajectories, state=None, kl_coef=None, statistics=NO_RETURNS, rates=RATES, **programs):
        """As `learn`, without waiting for the device; also the credit."""
        setup, phase = self.setup, dataclasses.replace(self.phase, **programs)
        state = self.fresh() if state is None else state
        batch = train_step.pack(setup, phase, trajectories)
        outputs = train_step.token_outputs(setup, phase, state.params, batch)
        progress = Progress(kl_coef=kl_coef, return_statistics=statistics)
        credit = train_step.assign_credit(setup, phase, batch, outputs, progress)
        rates = {part: rates[part] for part in state.params}
        state, metrics = train_step.update(setup, phase, state, batch, outputs, credit, rates)
        return state, metrics, train_step.with_credit(batch, outputs, credit), credit

    def sift(self, trajectories, *, critic):
        """Usable and dropped trajectories, and how many of these were malformed."""
        return train_step.sift(self.setup, dataclasses.replace(self.phase, critic=critic), trajectories)

    def under(self, changes):
        """The same programs under settings in which only what they do not depend on is changed."""
        config = self.config.copy_and_resolve_references()
        config.update_from_flattened_dict(changes)
        settings = read_settings(config)
        packing = dataclasses.replace(self.phase.packing, mode=settings.learner.packing)
        phase = dataclasses.replace(self.phase, packing=packing)
        if phase.prober:
            phase = dataclasses.replace(phase, outputs_packing=settings.probe_packing)
        if settings.scheme != self.setup.settings.scheme:
            phase = dataclasses.replace(phase, scheme=settings.scheme, assign=jax.jit(settings.scheme.assign))
        return dataclasses.replace(
            self, config=config, setup=dataclasses.replace(self.setup, settings=settings), phase=phase
        )


def make(changes, *, wide=False, make_phase=phases.reinforcement, shards=1):
    """All who ask for the same settings share its programs."""
    return _make(tuple(sorted({**SMALL, **changes}.items())), wide, make_phase, shards)


@functools.cache
def _make(changes, wide, make_phase, shards):
    config = base.get_config("hopworld").unlock()
    config.update_from_flattened_dict(dict(changes))
    settings = read_settings(config.lock())
    mesh, none = tiny.mesh(shards), None
    setup = Setup(settings, none, none, none, WIDE if wide else POLICY, {}, mesh, none, none, none)
    optimizer = make_optimizer(settings.optimizer)
    params = parameters(settings.run.critic != "none")

    def fresh():
        copies = jax.tree.map(lambda x: jnp.array(x, jnp.float64 if wide else x.dtype), params)
        state = init_state(copies, optimizer)
        return jax.device_put(state, shardings(state, mesh))

    with jax.enable_x64(wide):
        state = fresh()
        layout = shardings(state, mesh)
        if make_phase is phases.reinforcement:
            start = state.params["decoder"] if settings.needs_reference else None
            phase = phases.reinforcement(setup, optimizer, layout, start)
        else:
            phase = make_phase(setup, optimizer, layout)
    capacity = MICROBATCHES * 4 // settings.learner.rows
    return TrainHalf(config, setup, dataclasses.replace(phase, microbatches=capacity), fresh, wide)


def batch(seed=0, context="append"):
    """Eight trajectories of four groups, ended and cut."""
    rng = np.random.default_rng(seed)
    cuts = (None, "steps", "response", None)
    return [
        trajectory(
            rng,
            rng.integers(1, 5, rng.integers(1, 5)).tolist(),
            context=context,
            cut=cuts[(group + sample) % 4],
            group=group,
            sample=sample,
        )
        for group in range(4)
        for sample in range(2)
    ]


@functools.cache
def exact(seed=0, context="append"):
    """The batch with the log-probs of the parameters that training starts from."""
    made = batch(seed, context)
    return with_logprobs(made, outputs_of(made)[0])


def recording(update, seen):
    """The update; it notes in `seen` the parameters and the batch that it was given."""

    def recorded(state, frozen, batch, count, rates):
        seen.append(jax.device_get((state.params, batch)))
        return update(state, frozen, batch, count, rates)

    return recorded


def stream(loss_tokens, name):
    """A field of the sampled tokens, in (trajectory, step, token) order."""
    on = loss_tokens.is_action
    return getattr(loss_tokens, name)[on][np.argsort(loss_tokens.step[on], kind="stable")]


def sampled(trajectories):
    """Log-probs, step and trajectory of the sampled tokens."""
    steps = [(i, s) for i, t in enumerate(trajectories) for s in t.steps]
    sizes = [len(s.response_ids) for _, s in steps]
    logprobs = np.concatenate([s.logprobs for _, s in steps]).astype(np.float64)
    return logprobs, np.repeat(np.arange(len(steps)), sizes), np.repeat([i for i, _ in steps], sizes)


def slow_logprobs(params, trajectories):
    """Log-probs of the sampled tokens by one forward pass of each step alone, in double precision."""
    steps = [s for t in trajectories for s in t.steps]
    with jax.enable_x64(True):
        ids = [np.concatenate([s.prompt_ids, s.response_ids]) for s in steps]
        logits = tiny.full_logits(WIDE, params["decoder"], ids, LONGEST)
    out = []
    for s, row in zip(steps, logits, strict=True):
        own = tiny.log_softmax(row[len(s.prompt_ids) - 1 : -1] / SMALL["rollout.temperature"])
        out.append(own[np.arange(len(s.response_ids)), s.response_ids])
    return np.concatenate(out)


def check_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


def with_step(t, number, **changes):
    steps = list(t.steps)
    steps[number] = dataclasses.replace(steps[number], **changes)
    return dataclasses.replace(t, steps=tuple(steps))


def bad(**changes):
    """A trajectory with one wrong step."""
    return with_step(trajectory(np.random.default_rng(0), [2, 2], group=7), 1, **changes)


def of_size(prompt, response):
    """Ids and log-probs of a step of these lengths."""
    ids = np.zeros(max(prompt, response), np.int32)
    return {"prompt_ids": ids[:prompt], "response_ids": ids[:response], "logprobs": np.zeros(response, np.float32)}
