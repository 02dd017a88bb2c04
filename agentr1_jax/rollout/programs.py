"""The compiled programs of the rollout engine: `prefill` and `decode`.

Both run inside one `shard_map` over the mesh's data axis: each shard owns its slots and their cache, so that the
programs contain no collective over data and a shard leaves its decode loop when its own slots have stopped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, Params, head_kernel
from agentr1_jax.rollout.cache import CacheView, KVCache, cache_sharding

NO_TOKEN = -1


@flax.struct.dataclass
class Slots:
    """What the decode loop knows of each slot: JAX arrays inside the program, numpy arrays on the host between calls.

    Attributes:
      token: the id to feed next: the last of the prompt, or the last one sampled.
      position: where it goes in the cache.
      sampled: tokens of the open response so far; also the index that keys their random numbers.
      budget: tokens the response may still get.
      temperature: logits are divided by it; 0 is greedy.
      key: raw threefry key of the open response.
      active: False for slots that hold no open response.
      tail: the last ids of the open response, right-aligned, `NO_TOKEN` before its start.
      stops: id sequences that end the response, right-aligned, padded on the left with `NO_TOKEN`.
    """

    token: Int[Any, "slots"]
    position: Int[Any, "slots"]
    sampled: Int[Any, "slots"]
    budget: Int[Any, "slots"]
    temperature: Float[Any, "slots"]
    key: UInt32[Any, "slots 2"]
    active: Bool[Any, "slots"]
    tail: Int[Any, "slots width"]
    stops: Int[Any, "slots stops width"]


@flax.struct.dataclass
class Sampled:
    """What one decode call produced; column i of a slot counts from the start of the call."""

    ids: Int[Any, "slots chunk"]
    logprobs: Float[Any, "slots chunk"]
    stopped: Bool[Any, "slots"]
    iterations: Int[Any, "shards"]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted programs; `live` is static and taken from a few buckets.

    Attributes:
      prefill: (params, cache, tokens[rows, P], slot[rows], position[rows, P], live=) -> cache.
        `rows` is `prefill_rows` for each data shard and `slot` counts within the shard.
      decode: (params, cache, slots, live=) -> (cache, slots, sampled).
    """

    prefill: Callable[..., KVCache]
    decode: Callable[..., tuple[KVCache, Slots, Sampled]]


def matches_stop(tail: Int[Array, "slots width"], stops: Int[Array, "slots stops width"]) -> Bool[Array, "slots"]:
    """True where the response so far ends with one of the slot's stop sequences."""
    used = stops != NO_TOKEN
    equal = (stops == tail[:, None, :]) | ~used
    return jnp.any(equal.all(-1) & used.any(-1), axis=-1)


def sample(
    logits: Float[Array, "slots vocab"],
    temperature: Float[Array, "slots"],
    key: UInt32[Array, "slots 2"],
    index: Int[Array, "slots"],
) -> tuple[Int[Array, "slots"], Float[Array, "slots"]]:
    """Samples one id per slot by Gumbel-max from softmax(logits / temperature), keyed by (slot's key, token index).

    Returns:
      ids, and their log-probabilities under the distribution sampled from (0 where greedy: a point mass).
    """
    greedy = temperature == 0
    logprobs = jax.nn.log_softmax(logits / jnp.where(greedy, 1.0, temperature)[:, None])
    noise = jax.vmap(lambda k, i: jax.random.gumbel(jax.random.fold_in(k, i), logits.shape[1:], logits.dtype))(
        jax.random.wrap_key_data(key, impl="threefry2x32"), index
    )
    ids = jnp.argmax(logprobs + jnp.where(greedy[:, None], 0.0, noise), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
    return ids, jnp.where(greedy, 0.0, chosen)


def run_decoder(
    decoder: Decoder, params: Params, tokens: Array, view: CacheView, cache: KVCache
) -> tuple[Float[Array, "rows length width"], KVCache]:
    """Hidden states of new tokens, and the cache with their keys and values."""
    out: Any = decoder.apply({"params": params}, tokens, view.position, view, cache)
    return out


def prefill(
    decoder: Decoder, params: Params, cache: KVCache, tokens: Array, slot: Array, position: Array, *, live: int
) -> KVCache:
    """Writes the keys and values of new prompt tokens; no logits, since decode feeds the last prompt token itself."""
    view = CacheView(slot=slot, position=position, live=live)
    return run_decoder(decoder, params, tokens, view, cache)[1]


def decode(
    decoder: Decoder, params: Params, cache: KVCache, slots: Slots, *, live: int, chunk: int
) -> tuple[KVCache, Slots, Sampled]:
    """Samples up to `chunk` tokens for every active slot; leaves early when none is active."""
    head = head_kernel(params)
    n = slots.token.shape[0]
    empty = Sampled(
        ids=jnp.full((n, chunk), NO_TOKEN, jnp.int32),
        logprobs=jnp.zeros((n, chunk), jnp.float32),
        stopped=jnp.zeros(n, bool),
        iterations=jnp.zeros(1, jnp.int32),
    )

    def running(carry: tuple[KVCache, Slots, Sampled]) -> Array:
        _, slots, out = carry
        return (out.iterations[0] < chunk) & slots.active.any()

    def body(carry: tuple[KVCache, Slots, Sampled]) -> tuple[KVCache, Slots, Sampled]:
        cache, slots, out = carry
        # Idle slots write outside the cache, that is, nowhere.
        position = jnp.where(slots.active, slots.position, cache.keys.shape[2])
        view = CacheView(slot=None, position=position[:, None], live=live)
        hidden, cache = run_decoder(decoder, params, slots.token[:, None], view, cache)
        logits = jnp.matmul(hidden[:, 0], head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        ids, logprobs = sample(logits, slots.temperature, slots.key, slots.sampled)
        active = slots.active
        tail = jnp.where(active[:, None], jnp.concatenate([slots.tail[:, 1:], ids[:, None]], axis=1), slots.tail)
        stopped = active & matches_stop(tail, slots.stops)
        step = active.astype(jnp.int32)
        column = out.iterations[0]
        out = Sampled(
            ids=out.ids.at[:, column].set(jnp.where(active, ids, NO_TOKEN)),
            logprobs=out.logprobs.at[:, column].set(jnp.where(active, logprobs, 0.0)),
            stopped=out.stopped | stopped,
            iterations=out.iterations + 1,
        )
        slots = dataclasses.replace(
            slots,
            token=jnp.where(active, ids, slots.token),
            position=slots.position + step,
            sampled=slots.sampled + step,
            budget=slots.budget - step,
            active=active & ~stopped & (slots.budget > 1),
            tail=tail,
        )
        return cache, slots, out

    return jax.lax.while_loop(running, body, (cache, slots, empty))


def build_programs(config: DecoderConfig, mesh: Mesh, chunk: int) -> Programs:
    """Jits the programs for a mesh; the cache is donated.

    Args:
      config: the decoder.
      mesh: slots are sharded over `data`, heads of parameters and cache over `tensor`.
      chunk: most tokens a decode call samples per slot.
    """
    decoder = Decoder(config)
    by_row, by_slot = P("data"), P(None, "data")
    layout = cache_sharding(config, mesh)  # Said aloud: on one device it would be P(), another entry of jit's cache.

    def sharded(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"data"}, check_vma=False)

    @functools.partial(jax.jit, donate_argnums=1, static_argnames="live", out_shardings=layout)
    def run_prefill(
        params: Params, cache: KVCache, tokens: Array, slot: Array, position: Array, *, live: int
    ) -> KVCache:
        f = functools.partial(prefill, decoder, live=live)
        return sharded(f, (P(), by_slot, by_row, by_row, by_row), by_slot)(params, cache, tokens, slot, position)

    @functools.partial(jax.jit, donate_argnums=1, static_argnames="live", out_shardings=(layout, None, None))
    def run_decode(params: Params, cache: KVCache, slots: Slots, *, live: int) -> tuple[KVCache, Slots, Sampled]:
        f = functools.partial(decode, decoder, live=live, chunk=chunk)
        return sharded(f, (P(), by_slot, by_row), (by_slot, by_row, by_row))(params, cache, slots)

    return Programs(prefill=run_prefill, decode=run_decode)
