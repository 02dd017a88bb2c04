"""The two compiled programs of the learner: `score` (forward only) and `update` (one optimizer step).

Both loop over microbatches of one fixed shape whose number is data, so that batches of any size run one program. Loss
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
import optax.contrib
from jax.sharding import Mesh
from jaxtyping import Array, Float

from agentr1_jax.learner.batch import Batch
from agentr1_jax.learner.logprobs import token_logprobs
from agentr1_jax.learner.losses import LossConfig, policy_loss, value_loss
from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, Params, head_kernel
from agentr1_jax.policy.params import join, values

OPTIMIZERS = ("adamw", "muon")


@flax.struct.dataclass
class LearnerState:
    """What training changes.

    Attributes:
      params: what is trained of `policy.params`: `{"decoder": ..., "value": ..., "critic": ...}`.
      opt_state: of the gradient transformation.
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
    """What one forward pass says of each read."""

    logprob: Float[Any, "*microbatches rows reads"]
    entropy: Float[Any, "*microbatches rows reads"]
    value: Float[Any, "*microbatches rows reads"] | None


def make_optimizer(
    *, name: str, max_grad_norm: float, b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """An optimizer without its learning rate, which is an argument of the update; kernels and embeddings alone decay.

    Args:
      name: `adamw`; or `muon` (orthogonalised momentum, https://kellerjordan.github.io/posts/muon) for the kernels
        of the layers, scaled to the size of AdamW's steps (arXiv 2502.16982) so that both take one learning rate, with
        AdamW (of Nesterov momentum, like Muon's) for the rest.
      max_grad_norm: gradients are clipped to this global norm.
      b1, b2, eps: of Adam.
      weight_decay: decoupled, times the learning rate.

    Raises:
      ValueError: unknown name.
    """
    clip = optax.clip_by_global_norm(max_grad_norm)
    decay = optax.add_decayed_weights(weight_decay, mask=_decays)
    if name == "adamw":
        return optax.chain(clip, optax.scale_by_adam(b1=b1, b2=b2, eps=eps), decay)
    if name == "muon":
        muon = optax.contrib.muon(
            learning_rate=-1.0,
            eps=eps,
            adam_b1=b1,
            adam_b2=b2,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(_matrix, params),
        )
        return optax.chain(clip, muon, decay)
    raise ValueError(f"unknown optimizer.name {name!r}; choose one of {', '.join(OPTIMIZERS)}")


def _matrix(path: Any, leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Which axes of a kernel of the layers are its inputs and its outputs; heads belong with their dimensions."""
    names = [key.key for key in path]
    if names[-1] != "kernel" or leaf.ndim < 3:
        return None
    inputs = 2 if names[-2] == "out" else 1
    axes = tuple(range(leaf.ndim))
    return optax.contrib.MuonDimensionNumbers(axes[1 : 1 + inputs], axes[1 + inputs :])


def _decays(params: Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embed", "head"), params)


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
    )
    if "value" not in params:
        return logprob, entropy, None
    value = values(params, hidden_of_reads(params["critic"]) if "critic" in params else read_hidden)
    return logprob, entropy, value


def loss_and_metrics(
    policy: DecoderConfig, config: LossConfig, mesh: Mesh | None, trained_params: Params, frozen: Params, batch: Batch
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Σₖ wₖ·lₖ of one microbatch, and sums over its trained tokens for the metrics."""
    reads = batch.reads
    trained = reads.is_action & (reads.weight > 0)
    logprob, entropy, value = forward_reads(policy, config, mesh, join(trained_params, frozen), batch)
    # What is not trained must not reach the loss at all: 0 times an infinite ratio has a NaN gradient.
    reads = dataclasses.replace(
        reads,
        advantage=jnp.where(trained, reads.advantage, 0),
        old_logprob=jnp.where(trained, reads.old_logprob, jax.lax.stop_gradient(logprob)),
    )

    def weighted(x: Array) -> Array:
        return jnp.sum(jnp.where(trained, x * reads.weight, 0))

    def total(x: Array) -> Array:
        return jnp.sum(jnp.where(trained, x, 0))

    per_read, log_rho, clipped = policy_loss(config, logprob, reads)
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
    }
    loss = metrics["policy_loss"] - config.entropy_coef * metrics["entropy_loss"]
    if value is not None and reads.value_weight is not None:
        has_target = reads.value_weight > 0
        error = value_loss(config, value, reads)
        metrics["value_loss"] = jnp.sum(jnp.where(has_target, error * reads.value_weight, 0))
        loss = loss + config.value_coef * metrics["value_loss"]
    metrics["loss"] = loss
    return loss, metrics


def make_score(
    policy: DecoderConfig, loss: LossConfig, mesh: Mesh | None = None
) -> Callable[[Params, Params, Batch, Array], Scores]:
    """The jitted forward pass: (trained params, frozen params, batch, microbatches that hold data) -> Scores."""

    @jax.jit
    def score(trained_params: Params, frozen: Params, batch: Batch, count: Array) -> Scores:
        params = join(trained_params, frozen)
        shape = batch.reads.src.shape
        empty = jnp.zeros(shape, jnp.float32)
        out = Scores(logprob=empty, entropy=empty, value=empty if "value" in params else None)

        def body(i: Array, out: Scores) -> Scores:
            logprob, entropy, value = forward_reads(policy, loss, mesh, params, jax.tree.map(lambda x: x[i], batch))
            new = Scores(logprob, entropy, value)
            return jax.tree.map(lambda all_, one: all_.at[i].set(one.astype(all_.dtype)), out, new)

        return jax.lax.fori_loop(0, count, body, out)

    return score


def make_update(
    policy: DecoderConfig, loss: LossConfig, optimizer: optax.GradientTransformation, layout: Any
) -> Callable[[LearnerState, Params, Batch, Array, dict[str, Array]], tuple[LearnerState, dict[str, Array]]]:
    """The jitted update: (state, frozen parameters, batch, microbatches with data, rates) -> (state, metrics).

    The state is donated; the new one lies as `layout` (shardings, on the mesh of the batch) says. Learning rates are by
    part of the parameters. If loss or gradient is not finite, the parameters stay as they are and the update is counted
    as skipped.
    """
    mesh = jax.tree.leaves(layout)[0].mesh
    objective = functools.partial(loss_and_metrics, policy, loss, mesh)
    gradient = jax.value_and_grad(objective, has_aux=True)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, None))
    def update(
        state: LearnerState, frozen: Params, batch: Batch, count: Array, rates: dict[str, Array]
    ) -> tuple[LearnerState, dict[str, Array]]:
        def microbatch(i: Array | int) -> Batch:
            return jax.tree.map(lambda x: x[i], batch)

        def body(i: Array, carry: tuple[Params, dict[str, Array]]) -> tuple[Params, dict[str, Array]]:
            grads, metrics = carry
            (_, new_metrics), new_grads = gradient(state.params, frozen, microbatch(i))
            joined = {
                key: jnp.maximum(metrics[key], x) if key.startswith("max/") else metrics[key] + x
                for key, x in new_metrics.items()
            }
            return jax.tree.map(jnp.add, grads, new_grads), joined

        shapes = jax.eval_shape(objective, state.params, frozen, microbatch(0))[1]
        zero = (jax.tree.map(jnp.zeros_like, state.params), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
        grads, sums = jax.lax.fori_loop(0, count, body, zero)
        norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = {
            part: jax.tree.map(lambda p, u, lr=rates[part]: p - lr.astype(p.dtype) * u, old, updates[part])
            for part, old in state.params.items()
        }
        finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
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
