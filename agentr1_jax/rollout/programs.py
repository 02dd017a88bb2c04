"""The compiled programs of the rollout engine: `prefill`, `decode` and `copy`.

All run inside one `shard_map` over the mesh's data axis: each shard owns its slots and their cache, so that the
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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, Params, output_logits
from agentr1_jax.rollout.cache import CacheView, KVCache, cache_sharding, copy_lines
from agentr1_jax.rollout.sampling import NO_TOKEN, matches_stop, sample
from agentr1_jax.rollout.slots import Slots, take_over
from agentr1_jax.runtime.compile_cache import cached_jit


@flax.struct.dataclass
class Sampled:
    """What one decode call produced; a slot's tokens are the first `count` columns of its row.

    Attributes:
      active: slots whose response is still open.
      stopped: slots whose response ended with a stop sequence in this call.
      iterations: tokens that each shard's loop went through.
    """

    ids: Int[Any, "slots chunk"]
    logprobs: Float[Any, "slots chunk"]
    count: Int[Any, "slots"]
    active: Bool[Any, "slots"]
    stopped: Bool[Any, "slots"]
    iterations: Int[Any, "shards"]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted programs. Lines count within their data shard.

    Attributes:
      prefill: (params, cache, tokens[rows, width], line[rows], start[rows]) -> cache.
        `rows` is one of `prefill_rows` for each shard; row i holds the tokens at start[i] ... of its line.
      decode: (params, cache, slots, words[slots, words], leave_after[shards]) -> (cache, slots, sampled);
        the words are those of `slots.to_words`.
      copy: (cache, source[moves], target[moves], count[shards]) -> cache.
    """

    prefill: Callable[..., KVCache]
    decode: Callable[..., tuple[KVCache, Slots, Sampled]]
    copy: Callable[..., KVCache]


def run_decoder(
    decoder: Decoder, params: Params, tokens: Array, view: CacheView, cache: KVCache
) -> tuple[Float[Array, "rows length width"], KVCache]:
    """Hidden states of new tokens, and the cache with their keys and values."""
    out: Any = decoder.apply({"params": params}, tokens, view.position, view, cache)
    return out


def prefill(
    decoder: Decoder, params: Params, cache: KVCache, tokens: Array, line: Array, start: Array, *, block: int
) -> KVCache:
    """Writes the keys and values of new prompt tokens; no logits, since decode feeds the last prompt token itself."""
    view = CacheView(line=line, position=start[:, None] + jnp.arange(tokens.shape[1]), block=block)
    return run_decoder(decoder, params, tokens, view, cache)[1]


def decode(
    decoder: Decoder,
    params: Params,
    cache: KVCache,
    slots: Slots,
    words: UInt32[Array, "slots words"],
    leave_after: Int[Array, "1"],
    *,
    chunk: int,
    block: int,
    together: int,
) -> tuple[KVCache, Slots, Sampled]:
    """Takes over what the host says, then samples up to `chunk` tokens for every active slot.

    Leaves early when none is active, or when `leave_after` > 0 responses have ended.
    """
    slots = take_over(words, slots)
    n = slots.token.shape[0]
    begun = slots.active.sum()
    empty = Sampled(
        ids=jnp.full((n, chunk), NO_TOKEN, jnp.int32),
        logprobs=jnp.zeros((n, chunk), jnp.float32),
        count=jnp.zeros(n, jnp.int32),
        active=slots.active,
        stopped=jnp.zeros(n, bool),
        iterations=jnp.zeros(1, jnp.int32),
    )

    def running(carry: tuple[KVCache, Slots, Sampled]) -> Array:
        _, slots, out = carry
        left = slots.active.sum()
        enough = (leave_after[0] > 0) & (begun - left >= leave_after[0])
        return (out.iterations[0] < chunk) & (left > 0) & ~enough

    def body(carry: tuple[KVCache, Slots, Sampled]) -> tuple[KVCache, Slots, Sampled]:
        cache, slots, out = carry
        # Idle slots write outside the cache, that is, nowhere.
        position = jnp.where(slots.active, slots.position, cache.keys.shape[3])
        view = CacheView(line=None, position=position[:, None], block=block, together=together)
        hidden, cache = run_decoder(decoder, params, slots.token[:, None], view, cache)
        active = slots.active
        # What an idle slot was asked for last must not keep the sort going.
        tail_cut = jnp.where(active, slots.top_k, 0), jnp.where(active, slots.top_p, 1.0)
        ids, logprobs = sample(
            output_logits(params, hidden[:, 0]), slots.temperature, *tail_cut, slots.key, slots.sampled
        )
        tail = jnp.where(active[:, None], jnp.concatenate([slots.tail[:, 1:], ids[:, None]], axis=1), slots.tail)
        stopped = active & matches_stop(tail, slots.stops)
        step = active.astype(jnp.int32)
        column = out.iterations[0]
        slots = dataclasses.replace(
            slots,
            token=jnp.where(active, ids, slots.token),
            position=slots.position + step,
            sampled=slots.sampled + step,
            budget=slots.budget - step,
            active=active & ~stopped & (slots.budget > 1),
            tail=tail,
        )
        out = Sampled(
            ids=out.ids.at[:, column].set(jnp.where(active, ids, NO_TOKEN)),
            logprobs=out.logprobs.at[:, column].set(jnp.where(active, logprobs, 0.0)),
            count=out.count + step,
            active=slots.active,
            stopped=out.stopped | stopped,
            iterations=out.iterations + 1,
        )
        return cache, slots, out

    return jax.lax.while_loop(running, body, (cache, slots, empty))


def build_programs(config: DecoderConfig, mesh: Mesh, *, chunk: int, block: int, together: int) -> Programs:
    """Jits the programs for a mesh; the cache is donated.

    Args:
      config: the decoder.
      mesh: lines are sharded over `data`, heads of parameters and cache over `tensor`.
      chunk: most tokens a decode call samples per slot.
      block: positions of a line that attention reads at once.
      together: slots whose lines it reads at once, when it decodes.
    """
    decoder = Decoder(config)
    by_row, by_line = P("data"), P(None, "data")
    # Said aloud: on one device they would be P(), another entry of jit's cache.
    layout, rows = cache_sharding(config, mesh), NamedSharding(mesh, by_row)

    def sharded(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"data"}, check_vma=False)

    run_prefill = sharded(
        functools.partial(prefill, decoder, block=block), (P(), by_line, by_row, by_row, by_row), by_line
    )
    run_decode = sharded(
        functools.partial(decode, decoder, chunk=chunk, block=block, together=together),
        (P(), by_line, by_row, by_row, by_row),
        (by_line, by_row, by_row),
    )
    run_copy = sharded(copy_lines, (by_line, by_row, by_row, by_row), by_line)
    return Programs(
        prefill=cached_jit(run_prefill, mesh, donate_argnums=1, out_shardings=layout),
        decode=cached_jit(run_decode, mesh, donate_argnums=1, out_shardings=(layout, rows, rows)),
        copy=cached_jit(run_copy, mesh, donate_argnums=0, out_shardings=layout),
    )
