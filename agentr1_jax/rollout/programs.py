"""The compiled programs of the rollout engine: `prefill`, `decode` and `copy`.

Each runs inside a `shard_map` over the data axis of the mesh: a shard owns its slots and their cache, so that the
programs contain no collective over data, and a shard leaves its decode loop when its own slots have stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, Params, at_precision, output_logits
from agentr1_jax.rollout.cache import CacheView, KVCache, cache_sharding, cached_heads, copy_slots, empty_cache
from agentr1_jax.rollout.config import MOST_STOP_SEQUENCES, STOP_WIDTH, EngineConfig
from agentr1_jax.rollout.pages import PageCache, PageView, empty_pages, page_sharding
from agentr1_jax.runtime.compile_cache import cached_jit

NO_TOKEN = -1
"""Padding of ids and stop sequences."""
KERNEL_HEAD_DIM = 128
"""The kernel for pages takes heads of multiples of this size."""

Cache = KVCache | PageCache


@flax.struct.dataclass
class SlotState:
    """State of each decode slot. It stays on the device; the host sends only the rows that it changes.

    Attributes:
      token: id to feed next, at `position` of the KV slot: the last of the prompt, or the last one sampled.
      sampled: number of tokens of the response so far; also the index that keys their random numbers.
      budget: number of tokens that may still be sampled.
      key: raw threefry key of the response.
      active: whether the slot is decoding a response.
      tail: last ids of the response, right-aligned, `NO_TOKEN` before its start.
      stops: stop sequences, right-aligned, padded on the left with `NO_TOKEN`.
    """

    token: Int[Any, "slots"]
    position: Int[Any, "slots"]
    sampled: Int[Any, "slots"]
    budget: Int[Any, "slots"]
    temperature: Float[Any, "slots"]
    top_k: Int[Any, "slots"]
    top_p: Float[Any, "slots"]
    key: UInt32[Any, "slots 2"]
    active: Bool[Any, "slots"]
    tail: Int[Any, "slots width"]
    stops: Int[Any, "slots stops width"]


def idle_slot_state(config: EngineConfig) -> SlotState:
    """State of slots that decode nothing, as numpy arrays."""
    n = config.slots
    return SlotState(
        token=np.zeros(n, np.int32),
        position=np.zeros(n, np.int32),
        sampled=np.zeros(n, np.int32),
        budget=np.zeros(n, np.int32),
        temperature=np.ones(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        key=np.zeros((n, 2), np.uint32),
        active=np.zeros(n, bool),
        tail=np.full((n, STOP_WIDTH), NO_TOKEN, np.int32),
        stops=np.full((n, MOST_STOP_SEQUENCES, STOP_WIDTH), NO_TOKEN, np.int32),
    )


def encode_updates(state: SlotState, changed: np.ndarray) -> UInt32[np.ndarray, "slots words"]:
    """Lay all fields side by side as 32-bit words, followed by one word that says whether the slot changes.

    One array, because each array that is sent to the device has a fixed cost.

    Args:
      state: new state, as numpy arrays.
      changed: bool [slots], the slots that take the new state.
    """
    fields = [*jax.tree.leaves(state), changed]
    words = [x.astype(np.uint32) if x.dtype == bool else x.view(np.uint32) for x in fields]
    return np.concatenate([x.reshape(len(changed), -1) for x in words], axis=1)


def apply_updates(updates: UInt32[Array, "slots words"], state: SlotState) -> SlotState:
    """Return the state with the rows that `encode_updates` marks as changed replaced by those it encodes."""
    fields, structure = jax.tree.flatten(state)
    changed, at, out = updates[:, -1] != 0, 0, []
    for old in fields:
        size = math.prod(old.shape[1:])
        new = updates[:, at : at + size].reshape(old.shape)
        new = new != 0 if old.dtype == bool else jax.lax.bitcast_convert_type(new, old.dtype)
        out.append(jnp.where(changed.reshape(-1, *[1] * (old.ndim - 1)), new, old))
        at += size
    return jax.tree.unflatten(structure, out)


@flax.struct.dataclass
class Sampled:
    """Output of one decode call.

    Attributes:
      ids, logprobs: sampled ids and their log-probabilities, in the first `count` columns of the row of a slot.
      active: whether the response of the slot goes on.
      stopped: whether the response of the slot ended with a stop sequence in this call.
      iterations: iterations of the decode loop of each shard.
    """

    ids: Int[Any, "slots chunk"]
    logprobs: Float[Any, "slots chunk"]
    count: Int[Any, "slots"]
    active: Bool[Any, "slots"]
    stopped: Bool[Any, "slots"]
    iterations: Int[Any, "shards"]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted programs. KV slots and pages are numbered within their data shard.

    Attributes:
      new_cache: () -> an empty cache.
      prefill: (params, cache, tokens[rows, width], slot[rows], start[rows]) -> cache. There are `prefill_rows` rows per
        shard; row i holds the tokens from position start[i] on of its KV slot (of its decode slot, for pages).
      decode: (params, cache, state, updates[slots, words], early_exit_after[shards]) -> (cache, state, sampled); see
        `encode_updates` for the updates.
      copy: (cache, source[copies], target[copies], count[shards]) -> cache; None for pages.
    """

    new_cache: Callable[[], Cache]
    prefill: Callable[..., Cache]
    decode: Callable[..., tuple[Cache, SlotState, Sampled]]
    copy: Callable[..., KVCache] | None


@dataclasses.dataclass(frozen=True)
class Attention:
    """How the programs attend to a cache; see `CacheView` and `PageView`."""

    block: int
    group_size: int
    tensor: int
    kernel: bool
    rows_at_once: bool

    def view(self, cache: Cache, slot: Array | None, position: Array) -> CacheView | PageView:
        """Return the memory of the new tokens of some slots, or of one more token in each."""
        if isinstance(cache, PageCache):
            return PageView(slot, position, self.block, self.group_size, self.tensor, self.kernel)
        return CacheView(
            slot, position, self.block, self.group_size, self.tensor, self.kernel, rows_at_once=self.rows_at_once
        )


def prefill(
    decoder: Decoder, params: Params, cache: Cache, tokens: Array, slot: Array, start: Array, *, attention: Attention
) -> Cache:
    """Write the keys and values of new prompt tokens. There are no logits: `decode` feeds the last prompt token."""
    position = start[:, None] + jnp.arange(tokens.shape[1])
    result: Any = decoder.apply({"params": params}, tokens, position, attention.view(cache, slot, position), cache)
    return result[1]


def decode(
    decoder: Decoder,
    params: Params,
    cache: Cache,
    state: SlotState,
    updates: UInt32[Array, "slots words"],
    early_exit_after: Int[Array, "1"],
    *,
    chunk: int,
    attention: Attention,
) -> tuple[Cache, SlotState, Sampled]:
    """Apply the updates of the host, then sample up to `chunk` tokens for every active slot.

    The loop ends early when no slot is active, or when `early_exit_after` > 0 responses have ended.
    """
    state = apply_updates(updates, state)
    n = state.token.shape[0]
    active_at_start = state.active.sum()
    empty = Sampled(
        ids=jnp.full((n, chunk), NO_TOKEN, jnp.int32),
        logprobs=jnp.zeros((n, chunk), jnp.float32),
        count=jnp.zeros(n, jnp.int32),
        active=state.active,
        stopped=jnp.zeros(n, bool),
        iterations=jnp.zeros(1, jnp.int32),
    )

    def keep_going(carry: tuple[Cache, SlotState, Sampled]) -> Array:
        _, state, out = carry
        active = state.active.sum()
        exit_early = (early_exit_after[0] > 0) & (active_at_start - active >= early_exit_after[0])
        return (out.iterations[0] < chunk) & (active > 0) & ~exit_early

    def body(carry: tuple[Cache, SlotState, Sampled]) -> tuple[Cache, SlotState, Sampled]:
        cache, state, out = carry
        # A position beyond the cache: idle slots write nothing.
        position = jnp.where(state.active, state.position, cache.length)[:, None]
        view = attention.view(cache, None, position)
        result: Any = decoder.apply({"params": params}, state.token[:, None], position, view, cache)
        hidden, cache = result
        active = state.active
        # The last request of an idle slot must not keep the truncation of `sample` going.
        truncation = jnp.where(active, state.top_k, 0), jnp.where(active, state.top_p, 1.0)
        ids, logprobs = sample(
            output_logits(params, hidden[:, 0]), state.temperature, *truncation, state.key, state.sampled
        )
        tail = jnp.where(active[:, None], jnp.concatenate([state.tail[:, 1:], ids[:, None]], axis=1), state.tail)
        stopped = active & matches_stop(tail, state.stops)
        step = active.astype(jnp.int32)
        column = out.iterations[0]
        state = dataclasses.replace(
            state,
            token=jnp.where(active, ids, state.token),
            position=state.position + step,
            sampled=state.sampled + step,
            budget=state.budget - step,
            active=active & ~stopped & (state.budget > 1),
            tail=tail,
        )
        out = Sampled(
            ids=out.ids.at[:, column].set(jnp.where(active, ids, NO_TOKEN)),
            logprobs=out.logprobs.at[:, column].set(jnp.where(active, logprobs, 0.0)),
            count=out.count + step,
            active=state.active,
            stopped=out.stopped | stopped,
            iterations=out.iterations + 1,
        )
        return cache, state, out

    return jax.lax.while_loop(keep_going, body, (cache, state, empty))


def sample(
    logits: Float[Array, "slots vocab"],
    temperature: Float[Array, "slots"],
    top_k: Int[Array, "slots"],
    top_p: Float[Array, "slots"],
    key: UInt32[Array, "slots 2"],
    index: Int[Array, "slots"],
) -> tuple[Int[Array, "slots"], Float[Array, "slots"]]:
    """Sample one id per slot by Gumbel-max from softmax(logits / temperature), truncated as `SamplingConfig` says.

    The raw threefry key of a response and the index of a token in it key the random numbers.

    Returns:
      ids, and their log-probabilities under the distribution sampled from (0 where greedy: a point mass).
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    some = ((top_k > 0) | (top_p < 1)) & ~greedy
    # A branch of its own, which costs nothing where no slot needs it.
    scaled = jax.lax.cond(some.any(), truncate_logits, lambda scaled, k, p: scaled, scaled, top_k, top_p)
    logprobs = jax.nn.log_softmax(scaled)
    noise = jax.vmap(lambda k, i: jax.random.gumbel(jax.random.fold_in(k, i), logits.shape[1:], logits.dtype))(
        jax.random.wrap_key_data(key, impl="threefry2x32"), index
    )
    ids = jnp.argmax(logprobs + jnp.where(greedy[:, None], 0.0, noise), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
    return ids, jnp.where(greedy, 0.0, chosen)


def truncate_logits(
    logits: Float[Array, "slots vocab"], top_k: Int[Array, "slots"], top_p: Float[Array, "slots"]
) -> Float[Array, "slots vocab"]:
    """Return the logits with −inf outside the k most likely ids, and outside the nucleus of mass p among those.

    Ids as likely as the last one stay, and so does the most likely id, also where p rounds to 0.
    """
    # Unsigned integers in the order of the floats: the bits of a negative one turned, of another one the sign.
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    order = bits ^ jnp.where(bits >> 31 != 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))
    vocab = logits.shape[1]
    most = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    last = _threshold(order, jnp.ones_like(logits), most)
    # Of the ids as likely as the k-th, those beyond k have no part in the nucleus's mass.
    above, level = order > last[:, None], order == last[:, None]
    part = (most - above.sum(axis=-1)) / level.sum(axis=-1)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True)) * jnp.where(level, part[:, None], above)
    weights /= weights.sum(axis=-1, keepdims=True)
    nucleus = jnp.minimum(_threshold(order, weights, top_p), order.max(axis=-1))
    last = jnp.where(top_p < 1, jnp.maximum(last, nucleus), last)
    return jnp.where(order >= last[:, None], logits, -jnp.inf)


def _threshold(
    order: UInt32[Array, "slots vocab"], weights: Float[Array, "slots vocab"], least: Shaped[Array, "slots"]
) -> UInt32[Array, "slots"]:
    """Return the largest number t of each slot for which the weights of `order` ≥ t sum to `least` or more.

    Bit by bit from the highest. Where the vocabulary is sharded, only these sums are exchanged; a sort would gather it.
    """

    def body(i: Array, found: UInt32[Array, "slots"]) -> UInt32[Array, "slots"]:
        tried = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        total = jnp.sum(jnp.where(order >= tried[:, None], weights, 0), axis=-1)
        return jnp.where(total >= least, tried, found)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(order.shape[0], jnp.uint32))


def matches_stop(tail: Int[Array, "slots width"], stops: Int[Array, "slots stops width"]) -> Bool[Array, "slots"]:
    """Return whether the response so far ends with one of the stop sequences of its slot."""
    used = stops != NO_TOKEN
    equal = (stops == tail[:, None, :]) | ~used
    return jnp.any(equal.all(-1) & used.any(-1), axis=-1)


def cache_maker(policy: DecoderConfig, config: EngineConfig, mesh: Mesh) -> tuple[Callable[[], Cache], Any]:
    """Return the function of an empty cache, and its shardings on a mesh."""
    shards, tensor, dtype = mesh.shape["data"], mesh.shape["tensor"], config.kv_dtype or policy.dtype
    if config.cache == "slots":
        new = functools.partial(empty_cache, policy, config.kv_slots(shards), config.slot_tokens, tensor, dtype)
        each = cache_sharding(policy, mesh)
        return new, KVCache(keys=each, values=each)
    table = config.slots, config.slot_tokens // config.page_tokens
    pages = functools.partial(empty_pages, policy, config.page_count(shards), config.page_tokens, dtype=dtype)
    return functools.partial(pages, tensor=tensor, table=table), page_sharding(policy, mesh)


def uses_kernel(policy: DecoderConfig, config: EngineConfig, platform: str) -> bool:
    """Return whether a kernel attends: to pages on TPUs, and in decoding to slots of 16-bit numbers on GPUs."""
    if config.cache == "pages":
        return platform == "tpu" and policy.head_dim % KERNEL_HEAD_DIM == 0
    # A step of the kernel takes at least 16 positions, and sizes that are powers of two.
    sizes = policy.head_dim.bit_count() == 1 and policy.head_dim >= 16 and config.slot_tokens % 16 == 0
    return platform == "gpu" and jnp.finfo(policy.dtype).bits == 16 and not config.kv_dtype and sizes


def build_programs(policy: DecoderConfig, config: EngineConfig, mesh: Mesh) -> Programs:
    """Jit the programs for a mesh: slots and pages over `data`, heads over `tensor`. The cache is donated."""
    decoder, shards, tensor = Decoder(policy), mesh.shape["data"], mesh.shape["tensor"]
    platform = mesh.devices.flat[0].platform
    kernel = uses_kernel(policy, config, platform)
    if kernel and config.cache == "pages" and config.kv_dtype and cached_heads(policy, tensor) // tensor < 2:
        raise ValueError(
            f"rollout.kv_dtype={config.kv_dtype} with pages needs two key heads on each device, and there are "
            f"{cached_heads(policy, tensor)} over rollout.tensor={tensor}; lower rollout.tensor, or unset kv_dtype"
        )
    attention = Attention(
        config.attention_block, config.attention_group_size(shards), tensor, kernel, rows_at_once=platform == "gpu"
    )
    by_row, by_slot = P("data"), P(None, "data")
    caches: Any = PageCache(pages=by_slot, table=by_row) if config.cache == "pages" else by_slot
    # Explicit: on one device the inferred sharding would be P(), another entry of jit's cache.
    new, layout, rows = *cache_maker(policy, config, mesh), NamedSharding(mesh, by_row)

    def over_shards(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        f = at_precision(policy, f)
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"data"}, check_vma=False)

    run_prefill = over_shards(
        functools.partial(prefill, decoder, attention=attention), (P(), caches, by_row, by_row, by_row), caches
    )
    run_decode = over_shards(
        functools.partial(decode, decoder, chunk=config.decode_chunk, attention=attention),
        (P(), caches, by_row, by_row, by_row),
        (caches, by_row, by_row),
    )
    run_copy = over_shards(copy_slots, (by_slot, by_row, by_row, by_row), by_slot)
    return Programs(
        new_cache=cached_jit(new, mesh, out_shardings=layout),
        prefill=cached_jit(run_prefill, mesh, donate_argnums=1, out_shardings=layout),
        decode=cached_jit(run_decode, mesh, donate_argnums=1, out_shardings=(layout, rows, rows)),
        copy=None if config.cache == "pages" else cached_jit(run_copy, mesh, donate_argnums=0, out_shardings=layout),
    )
