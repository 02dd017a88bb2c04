"""Compiled programs of the learner: token outputs (forward only), the update (one optimizer step), and the forward pass
that some ratios need before each update.

They loop over microbatches of one fixed shape whose number is data, so that batches of any size run one program. Loss
weights carry the global denominators, hence gradients of microbatches and shards are summed, never averaged: over
`data` once, behind the loop.
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
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from agentr1_jax.learner.batch import Batch, LossTokens
from agentr1_jax.learner.config import Objective
from agentr1_jax.learner.logprobs import token_logprobs
from agentr1_jax.learner.losses import kl_estimate, minibatch_log_ratio, policy_loss, value_loss
from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, Params, at_precision, head_kernel
from agentr1_jax.policy.params import join, values
from agentr1_jax.policy.sharding import ROWS, over_rows, row_specs, sum_over_devices
from agentr1_jax.runtime.compile_cache import cached_jit

BY_ROW = P(None, ROWS)
"""Spec of batches, whose leaves have shape [microbatches, rows, ...]."""
CLIP_BIAS = "clip_bias"
"""Key of the part of the loss whose gradient the clip took away, among the metrics of a microbatch."""


@flax.struct.dataclass
class LearnerState:
    """State that training changes; its leaves may be shardings.

    Attributes:
      params: trained parameters of `policy.params`: `{"decoder": ..., "value": ..., "critic": ...}`.
      opt_state: state of the optimizer, by part like `params`.
      updates: int32 scalar, updates applied.
      skipped: int32 scalar, updates skipped since something was not finite.
      skipped_in_a_row: int32 scalar, those since the last update applied.
    """

    params: Params
    opt_state: Any
    updates: Array
    skipped: Array
    skipped_in_a_row: Array


@flax.struct.dataclass
class TokenOutputs:
    """Outputs of a forward pass at each loss token.

    Attributes:
      logprob, entropy: of the policy, in nats.
      value: of the critic; None without one.
      ref_logprob: under the reference policy; None without one.
    """

    logprob: Float[Any, "*microbatches rows tokens"]
    entropy: Float[Any, "*microbatches rows tokens"]
    value: Float[Any, "*microbatches rows tokens"] | None = None
    ref_logprob: Float[Any, "*microbatches rows tokens"] | None = None


def init_state(params: Params, optimizer: optax.GradientTransformation) -> LearnerState:
    """Return the state at update 0."""
    updates, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))  # Donated, hence three buffers.
    return LearnerState(params, optimizer.init(params), updates, skipped, in_a_row)


def forward(
    policy: DecoderConfig, objective: Objective, mesh: Mesh | None, params: Params, batch: Batch
) -> TokenOutputs:
    """Return log-prob, entropy and (with a critic) value of every loss token of one microbatch.

    Args:
      policy: shape of the decoder.
      objective: its temperature, chunk and entropy bonus are used.
      mesh: of the batch, inside of `sharding.over_rows`; None for one device.
      params: trained and frozen parameters together.
      batch: leaves of shape [rows, ...].
    """
    packed, loss_tokens = batch.packed_tokens, batch.loss_tokens
    memory = PackedRows(packed.subtree_end, policy.attention, mesh)

    def hidden_states(decoder: Params) -> Float[Array, "rows tokens width"]:
        hidden, _ = Decoder(policy, mesh).apply({"params": decoder}, packed.tokens, packed.position, memory)
        return jnp.take_along_axis(hidden, loss_tokens.logit_index[..., None], axis=1)

    hidden = hidden_states(params["decoder"])
    logprob, entropy = token_logprobs(
        hidden,
        loss_tokens.target,
        loss_tokens.step >= 0,
        head_kernel(params["decoder"]),
        temperature=objective.temperature,
        chunk=objective.loss.chunk,
        mesh=mesh,
        entropy_gradient=objective.loss.entropy_coef != 0,
    )
    if "value" not in params:
        return TokenOutputs(logprob, entropy)
    value = values(params, hidden_states(params["critic"]) if "critic" in params else hidden)
    return TokenOutputs(logprob, entropy, value)


def loss_and_metrics(
    policy: DecoderConfig, objective: Objective, mesh: Mesh | None, trained: Params, frozen: Params, batch: Batch
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the loss of one microbatch, and sums over its trained tokens for the metrics."""
    outputs = forward(policy, objective, mesh, join(trained, frozen), batch)
    return loss_from_outputs(objective, outputs, batch.loss_tokens)


def loss_from_outputs(
    objective: Objective, outputs: TokenOutputs, loss_tokens: LossTokens
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return Σₖ wₖ·lₖ, and sums over the trained tokens for the metrics."""
    config, logprob = objective.loss, outputs.logprob
    trained = loss_tokens.weight > 0
    loss_tokens = _neutralize_other_tokens(loss_tokens, trained, logprob)

    def weighted_sum(x: Array) -> Array:
        return jnp.sum(jnp.where(trained, x * loss_tokens.weight, 0))

    def total(x: Array) -> Array:
        return jnp.sum(jnp.where(trained, x, 0))

    per_token, log_rho, clipped = policy_loss(config, logprob, loss_tokens)
    if loss_tokens.correction_weight is not None:
        per_token = per_token * loss_tokens.correction_weight
    gap = loss_tokens.old_logprob - logprob
    metrics = {
        "policy_loss": weighted_sum(per_token),
        "entropy_loss": weighted_sum(outputs.entropy),
        "tokens": total(jnp.ones_like(logprob)),
        "sum/logprob": total(logprob),
        "sum/entropy": total(outputs.entropy),
        "sum/ratio": total(jnp.exp(log_rho)),
        "sum/clip_fraction": total(clipped),
        "sum/approx_kl": total(jnp.exp(-gap) - 1 + gap),
        "sum/logprob_gap": total(jnp.abs(gap)),
        "max/logprob_gap": jnp.max(jnp.where(trained, jnp.abs(gap), 0)),
        "max/ratio": jnp.max(jnp.where(trained, jnp.exp(log_rho), 0)),
    }
    if config.clip_bias_norm:
        removed = jnp.where(clipped > 0, -loss_tokens.advantage * jnp.exp(log_rho), 0)
        correction = 1 if loss_tokens.correction_weight is None else loss_tokens.correction_weight
        metrics[CLIP_BIAS] = weighted_sum(removed * correction)
    loss = metrics["policy_loss"] - config.entropy_coef * metrics["entropy_loss"]
    kind = objective.kl_in_loss
    if kind != "none":
        assert loss_tokens.ref_logprob is not None, "loss tokens without ref_logprob"
        metrics["kl_loss"] = weighted_sum(kl_estimate(kind, logprob, loss_tokens.ref_logprob))
        loss = loss + objective.kl.coef * metrics["kl_loss"]
    if outputs.value is not None and loss_tokens.value_weight is not None:
        has_target = loss_tokens.value_weight > 0
        error = value_loss(config, outputs.value, loss_tokens)
        metrics["value_loss"] = jnp.sum(jnp.where(has_target, error * loss_tokens.value_weight, 0))
        loss = loss + config.value_coef * metrics["value_loss"]
    metrics["loss"] = loss
    return loss, metrics


def _neutralize_other_tokens(
    loss_tokens: LossTokens, trained: Bool[Array, "rows tokens"], logprob: Float[Array, "rows tokens"]
) -> LossTokens:
    """Set `is_action` of exactly the trained tokens, so that ratios are theirs alone, and harmless numbers elsewhere.

    0 times an infinite ratio would have a NaN gradient.
    """
    neutral: dict[str, Any] = {"advantage": 0, "correction_weight": 1, "log_ratio": 0}
    neutral |= dict.fromkeys(("old_logprob", "ref_logprob"), jax.lax.stop_gradient(logprob))
    fields = {name: getattr(loss_tokens, name) for name in neutral}
    harmless = {name: jnp.where(trained, x, neutral[name]) for name, x in fields.items() if x is not None}
    return dataclasses.replace(loss_tokens, is_action=trained, **harmless)


def _microbatch(batch: Batch, i: Array | int) -> Batch:
    return jax.tree.map(lambda x: x[i], batch)


def _batch_outputs(policy: DecoderConfig, objective: Objective, mesh: Mesh | None) -> Callable[..., TokenOutputs]:
    """Forward pass of `make_token_outputs`."""

    def own_outputs(
        trained: Params, frozen: Params, reference: Params | None, batch: Batch, count: Array
    ) -> TokenOutputs:
        params = join(trained, frozen)

        def outputs_of(i: Array | int) -> TokenOutputs:
            one = _microbatch(batch, i)
            outputs = forward(policy, objective, mesh, params, one)
            if reference is None:
                return outputs
            other = forward(policy, objective, mesh, join({"decoder": reference}, frozen), one)
            return dataclasses.replace(outputs, ref_logprob=other.logprob)

        def body(i: Array, out: TokenOutputs) -> TokenOutputs:
            return jax.tree.map(lambda all_, one: all_.at[i].set(one), out, outputs_of(i))

        rows = batch.loss_tokens.target.shape
        empty = jax.tree.map(lambda s: jnp.zeros(rows, s.dtype), jax.eval_shape(outputs_of, 0))
        return jax.lax.fori_loop(0, count, body, empty)

    def token_outputs(
        trained: Params, frozen: Params, reference: Params | None, batch: Batch, count: Array
    ) -> TokenOutputs:
        if mesh is None:
            return own_outputs(trained, frozen, reference, batch, count)
        parameters = (row_specs(tree, mesh) for tree in (trained, frozen, reference))
        return over_rows(own_outputs, mesh, (*parameters, BY_ROW, P()), BY_ROW)(
            trained, frozen, reference, batch, count
        )

    return at_precision(policy, token_outputs)


def make_token_outputs(
    policy: DecoderConfig, objective: Objective, mesh: Mesh | None = None
) -> Callable[[Params, Params, Params | None, Batch, Array], TokenOutputs]:
    """Compile the forward pass over a batch.

    Returns:
      jitted (trained, frozen, reference parameters, batch, microbatches with data) -> token outputs. The reference is a
      copy of the trained parameters of the policy's decoder, of another time; None where nothing needs it.
    """
    return cached_jit(_batch_outputs(policy, objective, mesh), mesh)


def make_log_ratio(
    policy: DecoderConfig, objective: Objective, mesh: Mesh | None = None
) -> Callable[[Params, Params, Batch, Array], Array]:
    """Compile the pass over a minibatch that gives `LossTokens.log_ratio`, for the ratios that need it.

    Returns:
      jitted (trained, frozen parameters, batch, microbatches with data) -> log ρ [microbatches, rows, tokens].
    """
    token_outputs = _batch_outputs(policy, objective, mesh)

    @functools.partial(cached_jit, mesh=mesh)
    def log_ratio(trained: Params, frozen: Params, batch: Batch, count: Array) -> Array:
        logprob = token_outputs(trained, frozen, None, batch, count).logprob
        loss_tokens = dataclasses.replace(batch.loss_tokens, is_action=batch.loss_tokens.weight > 0)
        return minibatch_log_ratio(objective.loss, logprob, loss_tokens).astype(jnp.float32)

    return log_ratio


def batch_gradient(
    policy: DecoderConfig, objective: Objective, mesh: Mesh | None
) -> Callable[[Params, Params, Batch, Array], tuple[Params, dict[str, Array]]]:
    """Return the gradient of a batch, a loop whose length is data.

    With `loss.clip_bias_norm`, the gradient of the decoder is divided by max(1, ‖C‖), C the gradient by the decoder's
    parameters of −Σ wₖ·Aₖ·ρₖ over the tokens whose gradient the clip took away: the clipping-triggered normalisation of
    ST-PPO (arXiv 2511.20718), which divides by ‖C‖₂. OUR READING: a norm below 1 divides nothing, and the decoder's
    gradient alone is divided. Costs a second backward pass, and the memory of a gradient.

    Returns:
      (trained, frozen parameters, batch, microbatches with data) -> gradient and metrics, summed over microbatches.
    """
    microbatch_loss = functools.partial(loss_and_metrics, policy, objective, mesh)
    normalize = objective.loss.clip_bias_norm

    def microbatch_gradients(trained: Params, frozen: Params, batch: Batch) -> tuple[list[Params], dict[str, Array]]:
        """Gradients of the loss and, where it is needed, of what the clip removed."""

        def parts(trained: Params) -> tuple[list[Array], dict[str, Array]]:
            loss, metrics = microbatch_loss(trained, frozen, batch)
            return [loss, *([metrics[CLIP_BIAS]] if normalize else [])], metrics

        values, pull, metrics = jax.vjp(parts, trained, has_aux=True)
        slots = range(len(values))
        return [pull([jnp.asarray(i == j, x.dtype) for j, x in enumerate(values)])[0] for i in slots], metrics

    def own_gradient(
        trained: Params, frozen: Params, batch: Batch, count: Array
    ) -> tuple[list[Params], dict[str, Array]]:
        def body(i: Array, carry: tuple[list[Params], dict[str, Array]]) -> tuple[list[Params], dict[str, Array]]:
            grads, metrics = carry
            new_grads, new_metrics = microbatch_gradients(trained, frozen, _microbatch(batch, i))
            merged = {
                key: jnp.maximum(metrics[key], x) if key.startswith("max/") else metrics[key] + x
                for key, x in new_metrics.items()
            }
            return jax.tree.map(jnp.add, grads, new_grads), merged

        shapes = jax.eval_shape(microbatch_loss, trained, frozen, _microbatch(batch, 0))[1]
        no_metrics = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        empty = [jax.tree.map(jnp.zeros_like, trained) for _ in range(1 + normalize)]
        return jax.lax.fori_loop(0, count, body, (empty, no_metrics))

    def gradient(trained: Params, frozen: Params, batch: Batch, count: Array) -> tuple[Params, dict[str, Array]]:
        if mesh is None:
            grads, metrics = own_gradient(trained, frozen, batch, count)
        else:
            specs = row_specs(trained, mesh)

            def sums(*arguments: Any) -> tuple[list[Params], dict[str, Array]]:
                grads, metrics = own_gradient(*arguments)
                most, total = (functools.partial(f, axis_name=ROWS) for f in (jax.lax.pmax, jax.lax.psum))
                reduced = {key: (most if key.startswith("max/") else total)(x) for key, x in metrics.items()}
                return [sum_over_devices(each, specs) for each in grads], reduced

            inputs, outputs = (specs, row_specs(frozen, mesh), BY_ROW, P()), ([specs] * (1 + normalize), P())
            grads, metrics = over_rows(sums, mesh, inputs, outputs)(trained, frozen, batch, count)
        if normalize:
            norm = optax.tree.norm(grads[1]["decoder"])
            del metrics[CLIP_BIAS]
            metrics["clip_bias_norm"] = norm
            decoder = jax.tree.map(lambda x: x / jnp.maximum(norm, 1).astype(x.dtype), grads[0]["decoder"])
            return grads[0] | {"decoder": decoder}, metrics
        return grads[0], metrics

    return at_precision(policy, gradient)


def make_update(
    policy: DecoderConfig, objective: Objective, optimizer: optax.GradientTransformation, layout: Any
) -> Callable[[LearnerState, Params, Batch, Array, dict[str, Array]], tuple[LearnerState, dict[str, Array]]]:
    """Compile the update.

    Learning rates and the optimizer's state are by part of the parameters (`optimizer.by_part`). A part of rate 0 does
    not learn: it stays as it is bit for bit, its state too, and its gradient counts nowhere. If loss, gradient or a new
    parameter is not finite, everything stays as it is and the update is counted as skipped. `layout` has the shardings
    of the new state, on the mesh of the batch.

    Returns:
      jitted (state, frozen parameters, batch, microbatches with data, rates) -> (state, metrics); the state is donated.
    """
    mesh = jax.tree.leaves(layout)[0].mesh
    gradient = batch_gradient(policy, objective, mesh)

    @functools.partial(cached_jit, mesh=mesh, donate_argnums=0, out_shardings=(layout, None))
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
        for part, on in learns.items():  # An optimizer can make infinite updates of finite gradients.
            finite &= ~on | _all_finite(params[part])
        moves = {part: finite & on for part, on in learns.items()}
        params, opt_state = _where(moves, params, state.params), _where(moves, opt_state, state.opt_state)
        bad = (~finite).astype(jnp.int32)
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        state = LearnerState(params, opt_state, state.updates + 1 - bad, state.skipped + bad, in_a_row)
        tokens = jnp.maximum(sums["tokens"], 1)
        metrics = {key.removeprefix("sum/"): x / tokens if key.startswith("sum/") else x for key, x in sums.items()}
        metrics = {key.replace("max/", "max_"): x for key, x in metrics.items()}
        metrics |= {"grad_norm": norm, "skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
        return state, metrics

    return update


def _all_finite(params: Params) -> Array:
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in jax.tree.leaves(params)])


def _where(on: dict[str, Array], one: Params, other: Params) -> Params:
    """Select each part from one tree where `on`, else from the other."""
    return {part: jax.tree.map(functools.partial(jnp.where, x), one[part], other[part]) for part, x in on.items()}
