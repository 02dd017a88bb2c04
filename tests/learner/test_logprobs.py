"""Chunked log-probs against the whole softmax: results, both gradients, precision, sharding, work and memory."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from builders import VOCAB
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.learner import logprobs
from agentr1_jax.learner.logprobs import token_logprobs
from agentr1_jax.policy.sharding import ROWS, over_rows
from agentr1_jax.runtime.mesh import AXES
from experiments import topology

QWEN_VOCAB, LONG = 151_936, 4096


def whole(hidden, target, used, head, temperature):
    """Log-probs and entropies [2, rows, reads] by a softmax of all logits."""
    logprobs = jax.nn.log_softmax(hidden @ head / temperature)
    chosen = jnp.take_along_axis(logprobs, target[..., None], axis=-1)[..., 0]
    return jnp.where(used, jnp.stack([chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)]), 0)


def inputs(rng, rows, reads, vocab=VOCAB, width=6):
    """hidden, target, used (in some rows with holes), head and a weight for each result; float64."""
    hidden, head = jnp.asarray(rng.normal(size=(rows, reads, width))), jnp.asarray(rng.normal(size=(width, vocab)))
    used = rng.random((rows, reads)) < np.linspace(1, 0, rows)[:, None]
    weights = jnp.asarray(rng.normal(size=(2, rows, reads)))
    return hidden, jnp.asarray(rng.integers(0, vocab, (rows, reads))), jnp.asarray(used), head, weights


def results_and_gradients(function, hidden, head, weights):
    """([2, rows, reads], gradients of their weighted sum for hidden states and head)."""

    def loss(hidden, head):
        out = jnp.stack(function(hidden, head))
        return jnp.sum(out * weights), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)
    return out, *grads


def check(got, expected, atol):
    for a, b in zip(got, expected, strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=atol)


@pytest.mark.parametrize(("reads", "chunk"), [(7, 9), (5, 100), (4, 1)])
def test_chunked_logprobs_equal_the_whole_softmax(reads, chunk):
    with jax.enable_x64(True):
        hidden, target, used, head, weights = inputs(np.random.default_rng(reads), 3, reads)
        chunked = functools.partial(token_logprobs, temperature=0.7, chunk=chunk)
        got = results_and_gradients(lambda h, w: chunked(h, target, used, w), hidden, head, weights)
        expected = results_and_gradients(lambda h, w: whole(h, target, used, w, 0.7), hidden, head, weights)
        check(got, expected, 1e-12)


def by_rows(compute, mesh):
    """On each device's own rows, and its own shard of the head over `fsdp`."""
    return over_rows(compute, mesh, (P(ROWS), P(ROWS), P(ROWS), P("fsdp")), P(ROWS))


def test_an_entropy_that_is_only_looked_at_has_no_gradient():
    with jax.enable_x64(True):
        hidden, target, used, head, weights = inputs(np.random.default_rng(0), 3, 7)
        chunked = functools.partial(token_logprobs, temperature=0.7, chunk=4, entropy_gradient=False)
        got = results_and_gradients(lambda h, w: chunked(h, target, used, w), hidden, head, weights)

        def detached(h, w):
            logprob, entropy = whole(h, target, used, w, 0.7)
            return logprob, jax.lax.stop_gradient(entropy)

        check(got, results_and_gradients(detached, hidden, head, weights), 1e-12)


@pytest.mark.parametrize("vocab", [32, 33])
def test_shards_of_rows_and_vocabulary_do_not_change_results(vocab):
    """Each shard of rows takes chunks of its own number, and 33 ids cannot be dealt over `tensor`."""
    mesh = tiny.mesh(2, 2, 2)
    with jax.enable_x64(True):
        hidden, target, used, head, weights = inputs(np.random.default_rng(1), 8, 5, vocab)
        sharded = by_rows(functools.partial(token_logprobs, temperature=0.7, chunk=3, mesh=mesh), mesh)
        rows = NamedSharding(mesh, P(ROWS))
        hidden, target, used = jax.device_put((hidden, target, used), rows)
        got = results_and_gradients(lambda h, w: sharded(h, target, used, w), hidden, head, weights)
        expected = results_and_gradients(lambda h, w: whole(h, target, used, w, 0.7), hidden, head, weights)
        check(got, expected, 1e-12)


def test_unused_reads_are_not_looked_at():
    with jax.enable_x64(True):
        hidden, target, used, head, weights = inputs(np.random.default_rng(2), 3, 7)
        chunked = functools.partial(token_logprobs, temperature=1.0, chunk=4)
        spoilt = jnp.where(used[..., None], hidden, jnp.nan), jnp.where(used, target, VOCAB)
        got = results_and_gradients(lambda h, w: chunked(h, spoilt[1], used, w), spoilt[0], head, weights)
        expected = results_and_gradients(lambda h, w: chunked(h, target, used, w), hidden, head, weights)
        check(got, expected, 0)


@pytest.mark.parametrize(("count", "chunks"), [(0, 0), (8, 2), (9, 3)])
def test_work_follows_the_used_reads_wherever_they_lie(count, chunks, monkeypatch):
    """Of 24 reads in 4 rows, in chunks of 4; logits are computed once forward and once backward."""
    computed = []
    inner = logprobs._logits

    def counted(*args):
        jax.debug.callback(lambda: computed.append(None))
        return inner(*args)

    monkeypatch.setattr(logprobs, "_logits", counted)
    rng = np.random.default_rng(count)
    hidden, target, _, head, weights = inputs(rng, 4, 6)
    used = jnp.asarray(rng.permutation(24).reshape(4, 6) < count)
    chunked = functools.partial(token_logprobs, temperature=1.0, chunk=4)
    out = results_and_gradients(lambda h, w: chunked(h, target, used, w), hidden, head, weights)
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert len(computed) == 2 * chunks
    assert (np.asarray(out[0][0]) != 0).sum() == count


def test_half_precision_states_give_float32_results_and_sums():
    rng = np.random.default_rng(3)
    hidden, target, used, head, weights = inputs(rng, 4, 128)
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16).astype(jnp.float32)
    one, many = (
        results_and_gradients(
            lambda h, w, chunk=chunk: token_logprobs(h, target, used, w, temperature=1.0, chunk=chunk),
            hidden,
            head,
            weights,
        )
        for chunk in (512, 4)
    )
    assert [x.dtype for x in many] == [jnp.float32, jnp.bfloat16, jnp.float32]
    wide = [x.astype(jnp.float32) for x in (hidden, head)]
    expected = results_and_gradients(lambda h, w: whole(h, target, used, w, 1.0), *wide, weights)
    np.testing.assert_allclose(many[0], expected[0], atol=1e-5)  # Products of two bfloat16 are exact in float32.
    for got, exact in zip(many[1:], expected[1:], strict=True):
        assert np.abs(got.astype(jnp.float32) - exact).max() < 2**-7 * np.abs(exact).max()
    # A sum of 64 chunks in bfloat16 would differ by 1e-2.
    np.testing.assert_allclose(many[2], one[2], rtol=0, atol=1e-5 * np.abs(one[2]).max())


def test_large_logits_lose_no_digits():
    """Near ±10,000, float32 holds logits to 1e-3; those here are exact, hence so must be what is made of them."""
    rng = np.random.default_rng(4)
    offsets = np.round(rng.normal(size=(16, VOCAB)) * 2 * 64) / 64
    logits = np.concatenate([1e4 + offsets, -1e4 + offsets, 1e4 * np.sign(offsets)])[None]
    hidden, head = jnp.asarray(logits, jnp.float32), jnp.eye(VOCAB, dtype=jnp.float32)
    target, used = jnp.asarray(rng.integers(0, VOCAB, (1, 48))), jnp.ones((1, 48), bool)
    weights = jnp.ones((2, 1, 48), jnp.float32)
    chunked = functools.partial(token_logprobs, temperature=1.0, chunk=16)
    out, by_hidden, by_head = results_and_gradients(lambda h, w: chunked(h, target, used, w), hidden, head, weights)
    assert all(np.isfinite(x).all() for x in (out, by_hidden, by_head)) and (out[0] <= 0).all() and (out[1] >= 0).all()
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, head, weights)]
        expected, slope, _ = results_and_gradients(lambda h, w: whole(h, target, used, w, 1.0), *wide)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(by_hidden, slope, atol=1e-5)


def gradient_program(chunk, vocab, width=64, reads=LONG, mesh=None):
    """The compiled forward and backward pass over one row of reads, from shapes alone."""

    def struct(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)) if mesh else None)

    def loss(hidden, head, target, used):
        compute = by_rows(functools.partial(token_logprobs, temperature=1.0, chunk=chunk, mesh=mesh), mesh)
        logprob, entropy = compute(hidden, target, used, head)
        return jnp.sum(logprob) + jnp.sum(entropy)

    rows = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    arguments = (
        struct((rows, reads // rows, width), jnp.float32, ROWS),
        struct((width, vocab), jnp.float32, "fsdp", "tensor"),
        struct((rows, reads // rows), jnp.int32, ROWS),
        struct((rows, reads // rows), bool, ROWS),
    )
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


def test_logits_are_never_whole():
    """Peak memory follows the chunk: 152k ids, 4096 reads, of which all logits would take 2.5 GB."""
    small, large = (temporary(gradient_program(chunk, QWEN_VOCAB)) for chunk in (128, 512))
    logits = 4 * QWEN_VOCAB
    assert 128 * logits <= small <= 4 * 128 * logits
    assert 512 * logits <= large <= 4 * 512 * logits < LONG * logits
    assert large > 3 * small


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])
def test_logits_are_never_whole_on_a_tpu(shape):
    """The TPU compiler fuses what lies between matrix products: at most a chunk of logits is in memory at a time."""
    devices = np.array(topology.devices("v5e:2x2")[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    on_device = 4 * QWEN_VOCAB // shape[2]
    with topology.no_compile_cache():
        small, large = (temporary(gradient_program(chunk, QWEN_VOCAB, mesh=mesh)) for chunk in (512, 1024))
    assert small <= 1.5 * 512 * on_device
    assert large <= 1.5 * 1024 * on_device < LONG // shape[0] * on_device
    assert large > 1.5 * small
