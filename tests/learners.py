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

from agentr1_jax.learner.update import init_state
from agentr1_jax.policy.sharding import shardings
from configs import base
from experiments import build, learning, phases
from experiments.circle import Run

SMALL = {
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
CAPO = {"loss.ratio": "capo", "optimizer.name": "adamw", "optimizer.eps": 1e-3}
TWICE = {"learner.minibatches": 2, "learner.epochs": 2}
RATES = {"decoder": 0.02, "value": 0.02}
MICROBATCHES = 10
"""So many of four rows hold a batch in any mode: all modes share their programs."""


@dataclasses.dataclass(frozen=True)
class Made:
    """A run that has no rollout half, its learner, and a function that makes a fresh state."""

    run: Run
    learner: phases.Learner
    fresh: Any
    wide: bool

    def learn(self, trajectories, state=None, kl_coef=0.0, moments=learning.NOTHING_SEEN, **programs):
        """(new state, metrics, trajectories), with other programs in the learner where they are given."""
        learner = dataclasses.replace(self.learner, **programs)
        with jax.enable_x64(self.wide):
            state = self.fresh() if state is None else state
            rates = {part: RATES[part] for part in state.params}
            state, pending, out = learning.learn(self.run, learner, state, trajectories, rates, kl_coef, moments)
            return state, pending.result(), out

    def under(self, changes):
        """The same programs under a config in which only what they do not depend on is changed."""
        config = self.run.config.copy_and_resolve_references()
        config.update_from_flattened_dict(changes)
        packing = dataclasses.replace(self.learner.packing, mode=config.learner.packing)
        learner = dataclasses.replace(self.learner, packing=packing)
        return dataclasses.replace(self, run=dataclasses.replace(self.run, config=config), learner=learner)


def make(changes, *, wide=False, make_learner=phases.reinforced, shards=1):
    """All who ask for the same config share its programs."""
    return _made(tuple(sorted({**SMALL, **changes}.items())), wide, make_learner, shards)


@functools.cache
def _made(settings, wide, make_learner, shards):
    config = base.get_config().unlock()
    config.update_from_flattened_dict(dict(settings))
    mesh, none = tiny.mesh(shards), None
    run = Run(config.lock(), none, none, none, WIDE if wide else POLICY, {}, none, mesh, none, none)
    optimizer = build.optimizer_of(config)
    params = parameters(config.critic != "none")

    def fresh():
        copies = jax.tree.map(lambda x: jnp.array(x, jnp.float64 if wide else x.dtype), params)
        state = init_state(copies, optimizer)
        return jax.device_put(state, shardings(state, mesh))

    with jax.enable_x64(wide):
        state = fresh()
        layout = shardings(state, mesh)
        if make_learner in (phases.supervised, phases.pretraining):
            learner = make_learner(run, optimizer, layout)
        else:
            start = None if config.kl.kind == "none" else state.params["decoder"]
            learner = phases.reinforced(run, optimizer, layout, start)
    capacity = MICROBATCHES * 4 // config.learner.rows
    return Made(run, dataclasses.replace(learner, microbatches=capacity), fresh, wide)


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
