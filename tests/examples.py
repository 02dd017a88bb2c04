"""Small batches with all that credit assignment would find for them, and compiled losses that tests share."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from builders import LONGEST, VOCAB, fixed_batch, with_logprobs

from agentr1_jax.learner.batch import to_microbatches
from agentr1_jax.learner.config import KLConfig, LossConfig, Objective, PackingConfig
from agentr1_jax.learner.loss_weights import TokenUnits, loss_weights
from agentr1_jax.learner.packing import gather, pack, scatter_fields
from agentr1_jax.learner.update import loss_and_metrics, make_token_outputs
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.params import init_params

POLICY = DecoderConfig(vocab_size=VOCAB, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=24)
OBJECTIVE = Objective(LossConfig(clip="dual", clip_high=0.28, entropy_coef=0.01, chunk=48), temperature=0.8)
WIDE = dataclasses.replace(POLICY, dtype="float64", param_dtype="float64")
ROWS, LOSS_TOKENS = 16, LONGEST


def objective(*, kl="none", kl_coef=0.001, temperature=OBJECTIVE.temperature, **loss):
    """`OBJECTIVE` with changes."""
    return Objective(dataclasses.replace(OBJECTIVE.loss, **loss), KLConfig(kl, coef=kl_coef), temperature)


@functools.cache
def parameters(critic=True):
    """Random parameters with a value head that is not 0."""
    params = {"decoder": tiny.decoder_params(POLICY)}
    if critic:
        head = init_params(POLICY, jax.random.key(1), critic="shared_trunk")["value"]
        params["value"] = {
            "kernel": jax.random.normal(jax.random.key(2), head["kernel"].shape) / 4,
            "bias": jnp.ones(()),
        }
    return params


@functools.cache
def token_outputs():
    return make_token_outputs(POLICY, OBJECTIVE)


def outputs_of(trajectories, mode="trajectory"):
    """Log-prob, entropy and value of the sampled tokens, in stream order."""
    packing = layout(trajectories, mode)
    batch = to_microbatches(packing.packed_tokens, packing.loss_tokens, microbatches=1, rows=ROWS)
    out = token_outputs()(parameters(), {}, None, batch, np.int32(1))
    return [gather(packing, np.asarray(x)[0, : packing.rows]) for x in (out.logprob, out.entropy, out.value)]


def layout(trajectories, mode):
    return pack(trajectories, PackingConfig(mode, LONGEST, LOSS_TOKENS, ROWS), final_values=True)


@dataclasses.dataclass(frozen=True)
class Example:
    """A batch and all that credit assignment would have found for it, [K] in stream order."""

    trajectories: list
    advantages: np.ndarray
    weights: np.ndarray
    old_values: np.ndarray
    targets: np.ndarray
    value_weights: np.ndarray
    ref_logprobs: np.ndarray
    correction_weights: np.ndarray

    def loss_tokens(self, packing, critic=True, others=False):
        extra = {"ref_logprob": self.ref_logprobs, "correction_weight": self.correction_weights} if others else {}
        if critic:
            extra |= {"old_value": self.old_values, "value_target": self.targets, "value_weight": self.value_weights}
        return scatter_fields(packing, {"advantage": self.advantages, "weight": self.weights, **extra})

    def batch(self, mode="trajectory", critic=True, microbatches=1, rows=ROWS, others=False):
        packing = layout(self.trajectories, mode)
        loss_tokens = self.loss_tokens(packing, critic, others)
        return to_microbatches(packing.packed_tokens, loss_tokens, microbatches=microbatches, rows=rows)


def away_from_edges(rng, step, trajectory, edges):
    """log ρ of each token such that every ratio of it stays 1e-3 from the clip's edges."""
    steps, own = (np.unique(unit, return_inverse=True)[1] for unit in (step, trajectory))
    length = np.bincount(steps)
    while True:
        drawn = rng.uniform(-1.5, 1.5, len(step))
        means = [np.bincount(unit, drawn) / np.bincount(unit) for unit in (steps, own)]
        centred = drawn.mean() + (means[0] - drawn.mean()) * np.sqrt(length)
        logs = np.concatenate([drawn, *means, centred])
        if np.abs(np.exp(logs)[:, None] - edges).min() > 1e-3:
            return drawn


@functools.cache
def example(context="append", aggregate="token", seed=0):
    """One untrained trajectory among five; old log-probs and values away from where the losses have corners."""
    rng = np.random.default_rng(seed)
    trajectories = fixed_batch(context, seed)
    logprob, _, value = outputs_of(trajectories)
    steps = [(i, t.group, s) for i, t in enumerate(trajectories) for s in t.steps]
    sizes = [len(s.response_ids) for _, _, s in steps]
    step = np.repeat(np.arange(len(steps)), sizes)
    trajectory, group = (np.repeat([cell[i] for cell in steps], sizes) for i in (0, 1))
    units, trained = TokenUnits(step, trajectory, group), trajectory != 1
    off = rng.uniform(0.1, 1.0, len(step)) * rng.choice([-1, 1], len(step))
    return Example(
        trajectories=with_logprobs(
            trajectories, logprob - away_from_edges(rng, step, trajectory, np.array([0.8, 1.28, 3.0]))
        ),
        advantages=rng.normal(size=len(step)).astype(np.float32),
        weights=loss_weights(aggregate, units, trained, fixed_denominator=10.0),
        old_values=(value + np.where(np.abs(np.abs(off) - 0.5) < 0.01, 0.3, off)).astype(np.float32),
        targets=(value + rng.normal(0.5, 1.0, len(step))).astype(np.float32),
        value_weights=loss_weights("token", units, trained & (rng.random(len(step)) < 0.7)),
        ref_logprobs=(logprob + rng.normal(0.0, 0.5, len(step))).astype(np.float32),
        correction_weights=rng.uniform(0.2, 2.0, len(step)).astype(np.float32),
    )


@functools.cache
def gradient(policy, objective):
    """Compiled (params, batch of one microbatch) -> ((loss, metrics), gradient)."""
    inner = jax.value_and_grad(functools.partial(loss_and_metrics, policy, objective, None), has_aux=True)
    # Compiled fast rather than to be fast.
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda params, batch: inner(params, {}, jax.tree.map(lambda x: x[0], batch)), compiler_options=quick)


def check_close(one, other, relative):
    """Each leaf within `relative` of its largest entry."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=relative * max(np.abs(b).max(), 1e-30))


def check_nonzero(grads):
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
