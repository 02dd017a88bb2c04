"""The compiled programs of the learner: `score` (forward only), `update` (one optimizer step), and the pass that some
ratios need between them.

They loop over microbatches of one fixed shape whose number is data, so that batches of any size run one program. Loss
weights carry the global denominators, hence gradients of microbatches and shards are summed, never averaged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from agentr1_jax import kept
from agentr1_jax.learner.batch import Batch, Reads
from agentr1_jax.learner.kl import kl_estimate
from agentr1_jax.learner.logprobs import token_logprobs
from agentr1_jax.learner.losses import LossConfig, policy_loss, value_loss
from agentr1_jax.learner.ratios import minibatch_log_ratio
from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, Params, head_kernel
from agentr1_jax.policy.params import join, values


@flax.struct.dataclass
class LearnerState:
    """What training changes.

    Attributes:
      params: what is trained of `policy.params`: `{"decoder": ..., "value": ..., "critic": ...}`.
      opt_state: of the gradient transformation, by part like `params`.
      updates: updates applied; int32 scalars, these three (no shape in their types, since the leaves may be shardings).
      skipped: updates skipped since something was not finite, in all and in a row.
    """

    params: Params
    opt_state: Any
    updates: Array
    skipped: Array
    skipped_in_a_row: Array


@flax.struct.dataclass
class Scores:
    """What one forward pass says of each read.

    Attributes:
      logprob, entropy: of the policy.
      value: of the critic; None without one.
      ref_logprob: log-prob under the reference policy; None without one.
    """

    logprob: Float[Any, "*microbatches rows reads"]
    entropy: Float[Any, "*microbatches rows reads"]
    value: Float[Any, "*microbatches rows reads"] | None
    ref_logprob: Float[Any, "*microbatches rows reads"] | None


def init_state(params: Params, optimizer: optax.GradientTransformation) -> LearnerState:
    """A state at update 0."""
    updates, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))  # Donated, hence three buffers.
    return LearnerState(params, optimizer.init(params), updates, skipped, in_a_row)


def forward_reads(
    policy: DecoderConfig, loss: LossConfig, mesh: Mesh | None, params: Params, batch: Batch
) -> tuple[Float[Array, "rows reads"], Float[Array, "rows reads"], Float[Array, "rows reads"] | None]:
    """Log-probability, entropy and (with a critic) value of every read of one microbatch, all parameters given."""
    nodes, reads = batch.nodes, batch.reads
    memory = PackedRows(nodes.subtree_end, policy.attention, mesh)

    def hidden_of_reads(decoder: Params) -> Float[Array, "rows reads width"]:
        hidden, _ = Decoder(policy, mesh).apply({"params": decoder}, nodes.tokens, nodes.position, memory)
        return jnp.take_along_axis(hidden, reads.src[..., None], axis=1)

    read_hidden = hidden_of_reads(params["decoder"])
    logprob, entropy = token_logprobs(
        read_hidden,
        reads.target,
        reads.step >= 0,
        head_kernel(params["decoder"]),
        temperature=loss.temperature,
        chunk=loss.chunk,
        mesh=mesh,
        entropy_gradient=loss.entropy_coef != 0,
    )
    if "value" not in params:
        return logprob, entropy, None
    value = values(params, hidden_of_reads(params["critic"]) if "critic" in params else read_hidden)
    return logprob, entropy, value


def loss_and_metrics(
    policy: DecoderConfig, config: LossConfig, mesh: Mesh | None, trained_params: Params, frozen: Params, batch: Batch
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss of one microbatch, and sums over its trained tokens for the metrics."""
    logprob, entropy, value = forward_reads(policy, config, mesh, join(trained_params, frozen), batch)
    return loss_of_reads(config, logprob, entropy, value, batch.reads)


def loss_of_reads(
    config: LossConfig,
    logprob: Float[Array, "rows reads"],
    entropy: Float[Array, "rows reads"],
    value: Float[Array, "rows reads"] | None,
    reads: Reads,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Σₖ wₖ·lₖ of what the forward pass said of the reads, and sums over those that are trained for the metrics."""
    trained = _trained(reads)
    reads = _only_trained(reads, trained, logprob)

    def weighted(x: Array) -> Array:
        return jnp.sum(jnp.where(trained, x * reads.weight, 0))

    def total(x: Array) -> Array:
        return jnp.sum(jnp.where(trained, x, 0))

    per_read, log_rho, clipped = policy_loss(config, logprob, reads)
    if reads.rollout_weight is not None:
        per_read = per_read * reads.rollout_weight
    gap = reads.old_logprob - logprob
    metrics = {
        "policy_loss": weighted(per_read),
        "entropy_loss": weighted(entropy),
        "tokens": total(jnp.ones_like(logprob)),
        "sum/logprob": total(logprob),
        "sum/entropy": total(entropy),
        "sum/ratio": total(jnp.exp(log_rho)),
        "sum/clip_fraction": total(clipped),
        "sum/approx_kl": total(jnp.exp(-gap) - 1 + gap),
        "sum/logprob_gap": total(jnp.abs(gap)),
        "max/logprob_gap": jnp.max(jnp.where(trained, jnp.abs(gap), 0)),
        "max/ratio": jnp.max(jnp.where(trained, jnp.exp(log_rho), 0)),
    }
    loss = metrics["policy_loss"] - config.entropy_coef * metrics["entropy_loss"]
    if config.kl != "none":
        metrics["kl_loss"] = weighted(kl_estimate(config.kl, logprob, reads.ref_logprob))
        loss = loss + config.kl_coef * metrics["kl_loss"]
    if value is not None and reads.value_weight is not None:
        has_target = reads.value_weight > 0
        error = value_loss(config, value, reads)
        metrics["value_loss"] = jnp.sum(jnp.where(has_target, error * reads.value_weight, 0))
        loss = loss + config.value_coef * metrics["value_loss"]
    metrics["loss"] = loss
    return loss, metrics


def _trained(reads: Reads) -> Bool[Array, "*rows reads"]:
    return reads.weight > 0


def _only_trained(reads: Reads, trained: Bool[Array, "rows reads"], logprob: Float[Array, "rows reads"]) -> Reads:
    """What is trained counts as action, so that ratios are of it alone; elsewhere stand harmless numbers, since 0 times
    an infinite ratio has a NaN gradient."""
    here = jax.lax.stop_gradient(logprob)
    neutral: dict[str, Any] = {"advantage": 0, "old_logprob": here, "ref_logprob": here, "rollout_weight": 1}
    neutral["log_ratio"] = 0
    present = {name: getattr(reads, name) for name in neutral if getattr(reads, name) is not None}
    harmless = {name: jnp.where(trained, x, neutral[name]) for name, x in present.items()}
    return dataclasses.replace(reads, is_action=trained, **harmless)


def make_score(
    policy: DecoderConfig, loss: LossConfig, mesh: Mesh | None = None
) -> Callable[[Params, Params, Params | None, Batch, Array], Scores]:
    """The jitted forward pass: (trained, frozen, reference parameters, batch, microbatches with data) -> Scores.

    The reference is what is trained of the policy's decoder, of another time; None where nothing asks for it.
    """

    return kept.jit(_score(policy, loss, mesh), mesh)


def _score(policy: DecoderConfig, loss: LossConfig, mesh: Mesh | None) -> Callable[..., Scores]:
    """The forward pass of `make_score`."""

    def score(trained_params: Params, frozen: Params, reference: Params | None, batch: Batch, count: Array) -> Scores:
        params = join(trained_params, frozen)

        def microbatch(i: Array | int) -> Scores:
            one = jax.tree.map(lambda x: x[i], batch)
            logprob, entropy, value = forward_reads(policy, loss, mesh, params, one)
            if reference is None:
                return Scores(logprob, entropy, value, None)
            other = join({"decoder": reference}, frozen)
            return Scores(logprob, entropy, value, forward_reads(policy, loss, mesh, other, one)[0])

        shapes = jax.eval_shape(microbatch, 0)
        rows = batch.reads.src.shape
        empty = jax.tree.map(lambda s: jnp.zeros(rows, s.dtype), shapes)

        def body(i: Array, out: Scores) -> Scores:
            return jax.tree.map(lambda all_, one: all_.at[i].set(one), out, microbatch(i))

        return jax.lax.fori_loop(0, count, body, empty)

    return score


def make_log_ratio(
    policy: DecoderConfig, loss: LossConfig, mesh: Mesh | None = None
) -> Callable[[Params, Params, Batch, Array], Array]:
    """The jitted pass over a minibatch that gives `Reads.log_ratio`, for the ratios that need it."""
    score = _score(policy, loss, mesh)

    @functools.partial(kept.jit, mesh=mesh)
    def log_ratio(trained_params: Params, frozen: Params, batch: Batch, count: Array) -> Array:
        logprob = score(trained_params, frozen, None, batch, count).logprob
        reads = dataclasses.replace(batch.reads, is_action=_trained(batch.reads))
        return minibatch_log_ratio(loss.ratio, logprob, reads).astype(jnp.float32)

    return log_ratio


def batch_gradient(
    policy: DecoderConfig, loss: LossConfig, mesh: Mesh | None
) -> Callable[[Params, Params, Batch, Array], tuple[Params, dict[str, Array]]]:
    """(trained, frozen parameters, batch, microbatches with data) -> gradient and metrics, both sums over microbatches.

    A loop whose length is data: batches of any size run one program.
    """
    objective = functools.partial(loss_and_metrics, policy, loss, mesh)
    gradient = jax.value_and_grad(objective, has_aux=True)

    def summed(trained_params: Params, frozen: Params, batch: Batch, count: Array) -> tuple[Params, dict[str, Array]]:
        def microbatch(i: Array | int) -> Batch:
            return jax.tree.map(lambda x: x[i], batch)

        def body(i: Array, carry: tuple[Params, dict[str, Array]]) -> tuple[Params, dict[str, Array]]:
            grads, metrics = carry
            (_, new_metrics), new_grads = gradient(trained_params, frozen, microbatch(i))
            joined = {
                key: jnp.maximum(metrics[key], x) if key.startswith("max/") else metrics[key] + x
                for key, x in new_metrics.items()
            }
            return jax.tree.map(jnp.add, grads, new_grads), joined

        shapes = jax.eval_shape(objective, trained_params, frozen, microbatch(0))[1]
        zero = (
            jax.tree.map(jnp.zeros_like, trained_params),
            jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
        )
        return jax.lax.fori_loop(0, count, body, zero)

    return summed


def make_update(
    policy: DecoderConfig, loss: LossConfig, optimizer: optax.GradientTransformation, layout: Any
) -> Callable[[LearnerState, Params, Batch, Array, dict[str, Array]], tuple[LearnerState, dict[str, Array]]]:
    """The jitted update: (state, frozen parameters, batch, microbatches with data, rates) -> (state, metrics).

    The state is donated; the new one lies as `layout` (shardings, on the mesh of the batch) says. Learning rates are by
    part of the parameters, and so is the state of the optimizer (`optimizer.by_part`). A part of rate 0 does not learn:
    it stays as it is bit for bit, its state too, and its gradient counts nowhere. If loss or gradient is not finite,
    everything stays as it is and the update is counted as skipped.
    """
    mesh = jax.tree.leaves(layout)[0].mesh
    gradient = batch_gradient(policy, loss, mesh)

    @functools.partial(kept.jit, mesh=mesh, donate_argnums=0, out_shardings=(layout, None))
    def update(
        state: LearnerState, frozen: Params, batch: Batch, count: Array, rates: dict[str, Array]
    ) -> tuple[LearnerState, dict[str, Array]]:
        grads, sums = gradient(state.params, frozen, batch, count)
        learns = {part: rates[part] != 0 for part in state.params}
        grads = _where(learns, grads, jax.tree.map(jnp.zeros_like, grads))
        norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = {
            part: jax.tree.map(lambda p, u, lr=rates[part]: p - lr.astype(p.dtype) * u, old, updates[part])
            for part, old in state.params.items()
        }
        finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
        moves = {part: finite & on for part, on in learns.items()}
        params, opt_state = _where(moves, params, state.params), _where(moves, opt_state, state.opt_state)
        bad = (~finite).astype(jnp.int32)
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        state = LearnerState(params, opt_state, state.updates + 1 - bad, state.skipped + bad, in_a_row)
        tokens = jnp.maximum(sums["tokens"], 1)
        metrics = {key.removeprefix("sum/"): x / tokens if key.startswith("sum/") else x for key, x in sums.items()}
        metrics = {key.replace("max/", "max_"): x for key, x in metrics.items()}
        return state, metrics | {
            "grad_norm": norm,
            "skipped": state.skipped,
            "skipped_in_a_row": state.skipped_in_a_row,
        }

    return update


def _where(on: dict[str, Array], one: Params, other: Params) -> Params:
    """The parts of one tree or of another."""
    return {part: jax.tree.map(functools.partial(jnp.where, x), one[part], other[part]) for part, x in on.items()}
