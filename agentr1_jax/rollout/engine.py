"""The slot engine: many sessions share one batch of decode slots, each keeping its KV cache across its steps.

The host side runs in one asyncio loop: agents, environments and tools are coroutines. Every device program is
dispatched by one thread, so that tools run while the device works. A request is served in turns of the drive loop:

    new requests -> longest common prefix with the slot's cache -> prefill what is new -> decode chunks -> completion
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from agentr1_jax.agents.base import Completion
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.cache import KVCache, cache_sharding, empty_cache
from agentr1_jax.rollout.programs import NO_TOKEN, Slots, build_programs


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static shapes of the engine; each one decides what is compiled.

    Attributes:
      slots: trajectories decoded together by this process.
      length: tokens a slot can hold; at least `budget.context_tokens`.
      decode_chunk: most tokens sampled between two looks of the host.
      prefill_rows: slots prefilled in one call, per data shard.
      prefill_lengths: buckets of new tokens per slot and call, ascending.
      live_lengths: buckets of cache length that attention reads, ascending; the last is `length`.
      stop_sequences: most stop sequences of a request.
      stop_width: most ids of a stop sequence.
    """

    slots: int
    length: int
    decode_chunk: int
    prefill_rows: int
    prefill_lengths: tuple[int, ...]
    live_lengths: tuple[int, ...]
    stop_sequences: int = 4
    stop_width: int = 4

    def __post_init__(self) -> None:
        for name in ("slots", "decode_chunk", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("prefill_lengths", "live_lengths"):
            buckets = getattr(self, name)
            ascending = list(buckets) == sorted(set(buckets))
            if not buckets or not ascending or not 1 <= buckets[0] <= buckets[-1] <= self.length:
                raise ValueError(f"rollout.{name} must ascend from at least 1 to at most {self.length}, got {buckets}")
        if self.live_lengths[-1] != self.length:
            raise ValueError(
                f"rollout.live_lengths ends with {self.live_lengths[-1]}; "
                f"its last bucket must be the cache length {self.length}"
            )

    @property
    def prefill_buckets(self) -> list[tuple[int, int]]:
        """(new tokens, live length) of each prefill program."""
        return [(width, live) for live in self.live_lengths for width in self.prefill_lengths if width <= live]


class RequestError(ValueError):
    """A request that the engine cannot serve: it ends the trajectory that made it, and no other."""


@dataclasses.dataclass
class Counters:
    """What the engine did since the counters were made; times in seconds, the rest in tokens or calls."""

    decode_tokens: int = 0
    decode_slot_steps: int = 0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_tokens_padded: int = 0
    prefill_tokens_saved: int = 0
    prefill_seconds: float = 0.0
    seconds: float = 0.0


@dataclasses.dataclass(eq=False)
class _Request:
    slot: int
    prompt: np.ndarray
    max_tokens: int
    temperature: float
    key: np.ndarray
    stops: np.ndarray
    done: asyncio.Future[Completion]
    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)


_NewTokens = tuple[int, np.ndarray, int]
"""A slot, the ids it is to hold, and how many of them it holds already."""


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _bucket(n: int, buckets: Sequence[int]) -> int:
    return next((b for b in buckets if n <= b), buckets[-1])


class Engine:
    """Decode slots on this process's devices.

    Args:
      policy: the decoder.
      config: shapes.
      mesh: local devices with axes `(data, fsdp, tensor)`; slots are sharded over `data`.
    """

    def __init__(self, policy: DecoderConfig, config: EngineConfig, mesh: Mesh) -> None:
        shards = mesh.shape["data"]
        if config.slots % shards:
            raise ValueError(
                f"rollout.slots ({config.slots}) must be a multiple of the {shards} data shards of its mesh"
            )
        self.config = config
        self.counters = Counters()
        self._policy = policy
        self._mesh = mesh
        self._shards = shards
        self.programs = build_programs(policy, mesh, config.decode_chunk)
        self._new_cache = jax.jit(
            functools.partial(empty_cache, policy, config.slots, config.length, mesh.shape["tensor"]),
            out_shardings=cache_sharding(policy, mesh),
        )
        self._params: Params = None
        self._cache: KVCache | None = None
        self._cached: list[np.ndarray] = []
        self._slots = idle_slots(self.config)
        self._free: collections.deque[int] = collections.deque()
        self._admission: asyncio.Semaphore | None = None
        self._waiting: list[_Request] = []
        self._open: dict[int, _Request] = {}
        self._arrived: asyncio.Event | None = None
        self._dispatcher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dispatch")

    def run(self, params: Params, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Runs coroutines that use `acquire` / `generate` / `release` until all have returned.

        The KV cache is allocated here and freed on return, so that the learner has the memory to itself.

        Args:
          params: decoder parameters on the engine's mesh.
          work: one coroutine per trajectory; an exception in one propagates after the others were cancelled.

        Returns:
          their results, in order.
        """
        start = time.perf_counter()
        self._params = params
        self._cache = self._new_cache()
        self._cached = [np.zeros(0, np.int32)] * self.config.slots
        self._free = collections.deque(range(self.config.slots))
        try:
            return asyncio.run(self._drive(work))
        finally:
            self._params = self._cache = None
            self._waiting, self._open = [], {}
            self._slots = idle_slots(self.config)
            self.counters.seconds += time.perf_counter() - start

    def compile(self, params: Params) -> int:
        """Compiles every program the engine can need by running each once on idle slots; returns their number."""
        self._params, self._cache = params, self._new_cache()
        buckets = self.config.prefill_buckets
        for width, live in buckets:
            self._prefill_call([], width, live)
        for live in self.config.live_lengths:
            self._cache, *_ = self.programs.decode(self._params, self._cache, self._slots, live=live)
        jax.block_until_ready(self._cache)
        self._params = self._cache = None
        return len(buckets) + len(self.config.live_lengths)

    async def acquire(self) -> int:
        """Waits for a free slot."""
        assert self._admission is not None
        await self._admission.acquire()
        return self._free.popleft()

    def release(self, slot: int) -> None:
        """Gives a slot back; its cache stays for whoever comes next with a prompt that begins alike."""
        assert self._admission is not None
        self._free.append(slot)
        self._admission.release()

    async def generate(
        self,
        slot: int,
        prompt: np.ndarray,
        max_tokens: int,
        *,
        temperature: float,
        key: np.ndarray,
        stop: Sequence[Sequence[int]],
    ) -> Completion:
        """Samples a response in a slot; what the slot's cache shares with the prompt is not computed again.

        Args:
          slot: from `acquire`.
          prompt: int32 [P], P ≥ 1.
          max_tokens: most tokens to sample.
          temperature: 0 is greedy.
          key: uint32 [2], keys the random numbers of this response.
          stop: id sequences that end the response; the last id of the match is kept.

        Raises:
          RequestError: the request does not fit the engine.
        """
        c, vocab = self.config, self._policy.vocab_size
        if not 1 <= len(prompt) or not 1 <= max_tokens or len(prompt) + max_tokens > c.length:
            raise RequestError(
                f"a prompt of {len(prompt)} and {max_tokens} new tokens do not fit a cache length of {c.length}; "
                "raise rollout.length or lower the budget"
            )
        if np.min(prompt) < 0 or np.max(prompt) >= vocab:
            raise RequestError(f"prompt ids must lie in [0, {vocab}), got {np.min(prompt)}..{np.max(prompt)}")
        if not 0 <= temperature < np.inf:
            raise RequestError(f"temperature is {temperature}; it must be 0 (greedy) or positive")
        if len(stop) > c.stop_sequences or any(not 1 <= len(s) <= c.stop_width or min(s) < 0 for s in stop):
            raise RequestError(
                f"at most {c.stop_sequences} stop sequences of 1 to {c.stop_width} ids each, "
                f"got {list(map(list, stop))}"
            )
        stops = np.full((c.stop_sequences, c.stop_width), NO_TOKEN, np.int32)
        for row, ids in zip(stops, stop, strict=False):
            row[-len(ids) :] = ids
        assert self._arrived is not None
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(slot, np.asarray(prompt, np.int32), max_tokens, temperature, key, stops, done))
        self._arrived.set()
        return await done

    async def _drive(self, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        self._admission = asyncio.Semaphore(self.config.slots)
        self._arrived = asyncio.Event()
        agents = asyncio.gather(*work)
        dispatch = functools.partial(asyncio.get_running_loop().run_in_executor, self._dispatcher)
        try:
            while not agents.done():
                for _ in range(8):  # Lets agents whose tools answered at once come back with their next request.
                    await asyncio.sleep(0)
                self._drop_cancelled()
                if self._waiting or self._open:
                    requests, self._waiting = self._waiting, []
                    for request in await dispatch(self._device_turn, requests):
                        if not request.done.done():
                            request.done.set_result(self._completion(request))
                    continue
                self._arrived.clear()
                arrived: asyncio.Future[Any] = asyncio.ensure_future(self._arrived.wait())
                await asyncio.wait([arrived, agents], return_when=asyncio.FIRST_COMPLETED)
                arrived.cancel()
            return await agents
        finally:
            agents.cancel()
            await asyncio.gather(agents, return_exceptions=True)

    def _drop_cancelled(self) -> None:
        """Forgets requests that nobody waits for any more; their slots may already belong to others."""
        self._waiting = [r for r in self._waiting if not r.done.done()]
        for slot in [slot for slot, r in self._open.items() if r.done.done()]:
            del self._open[slot]
            self._slots.active[slot] = False

    def _device_turn(self, requests: list[_Request]) -> list[_Request]:
        """Prefills new requests, then decodes one chunk; returns the requests that are complete."""
        self._start(requests)
        if not self._open:
            return []
        return self._decode_chunk()

    def _start(self, requests: list[_Request]) -> None:
        pending = []
        for r in requests:
            # The last prompt token is fed by decode, which needs its logits.
            reuse = min(_common_prefix(self._cached[r.slot], r.prompt), len(r.prompt) - 1)
            self.counters.prefill_tokens_saved += reuse
            if reuse < len(r.prompt) - 1:
                pending.append((r.slot, r.prompt[:-1], reuse))
            self._cached[r.slot] = r.prompt[:-1]
            self._open[r.slot] = r
            s = self._slots
            s.token[r.slot], s.position[r.slot] = r.prompt[-1], len(r.prompt) - 1
            s.sampled[r.slot], s.budget[r.slot] = 0, r.max_tokens
            s.temperature[r.slot], s.key[r.slot] = r.temperature, r.key
            s.active[r.slot], s.tail[r.slot], s.stops[r.slot] = True, NO_TOKEN, r.stops
        started = time.perf_counter()
        while pending:
            pending = self._prefill(pending)
        self.counters.prefill_seconds += time.perf_counter() - started

    def _prefill(self, pending: list[_NewTokens]) -> list[_NewTokens]:
        """One prefill call over as many rows as fit, the longest first so that they are alike; returns what is left."""
        c = self.config
        pending = sorted(pending, key=lambda row: row[2] - len(row[1]))
        room = collections.Counter(dict.fromkeys(range(self._shards), c.prefill_rows))
        call: list[_NewTokens] = []
        rest: list[_NewTokens] = []
        for row in pending:
            shard = row[0] // (c.slots // self._shards)
            (call if room[shard] else rest).append(row)
            room[shard] -= bool(room[shard])
        width = _bucket(len(call[0][1]) - call[0][2], c.prefill_lengths)
        ends = {slot: min(start + width, len(ids)) for slot, ids, start in call}
        live = _bucket(max(*ends.values(), width), c.live_lengths)
        self._prefill_call(call, width, live)
        self.counters.prefill_tokens += sum(ends[slot] - start for slot, _, start in call)
        return [(slot, ids, ends[slot]) for slot, ids, _ in call if ends[slot] < len(ids)] + rest

    def _prefill_call(self, call: list[_NewTokens], width: int, live: int) -> None:
        c = self.config
        per_shard, rows = c.slots // self._shards, c.prefill_rows
        tokens = np.zeros((self._shards * rows, width), np.int32)
        position = np.full((self._shards * rows, width), c.length, np.int32)
        slots = np.full(self._shards * rows, per_shard, np.int32)
        used = [0] * self._shards
        for slot, ids, start in call:
            shard = slot // per_shard
            i = shard * rows + used[shard]
            used[shard] += 1
            new = ids[start : start + width]
            tokens[i, : len(new)] = new
            position[i, : len(new)] = np.arange(start, start + len(new))
            slots[i] = slot % per_shard
        self._cache = self.programs.prefill(self._params, self._cache, tokens, slots, position, live=live)
        self.counters.prefill_tokens_padded += tokens.size

    def _decode_chunk(self) -> list[_Request]:
        c, s = self.config, self._slots
        started = time.perf_counter()
        reach = max(int(s.position[slot]) + min(c.decode_chunk, int(s.budget[slot])) for slot in self._open)
        live = _bucket(reach, c.live_lengths)
        self._cache, slots, out = self.programs.decode(self._params, self._cache, s, live=live)
        out, slots = jax.device_get((out, slots))
        self._slots = jax.tree.map(np.array, slots)
        finished = []
        for slot, r in list(self._open.items()):
            count = int(slots.sampled[slot]) - sum(map(len, r.ids))
            r.ids.append(out.ids[slot, :count])
            r.logprobs.append(out.logprobs[slot, :count])
            self.counters.decode_tokens += count
            if not slots.active[slot]:
                finished.append(self._open.pop(slot))
        self.counters.decode_slot_steps += int(out.iterations.max()) * c.slots
        self.counters.decode_seconds += time.perf_counter() - started
        return finished

    def _completion(self, request: _Request) -> Completion:
        ids = np.concatenate(request.ids)
        # All but the last sampled token were fed, so their keys and values are in the cache.
        self._cached[request.slot] = np.concatenate([request.prompt, ids[:-1]])
        tail = np.concatenate([np.full(request.stops.shape[1], NO_TOKEN, np.int32), ids])[-request.stops.shape[1] :]
        used = request.stops != NO_TOKEN
        stopped = bool((((request.stops == tail) | ~used).all(1) & used.any(1)).any())
        return Completion(ids, np.concatenate(request.logprobs), "stop" if stopped else "length")


def idle_slots(config: EngineConfig) -> Slots:
    """Slots that hold no response."""
    n, c = config.slots, config
    return Slots(
        token=np.zeros(n, np.int32),
        position=np.zeros(n, np.int32),
        sampled=np.zeros(n, np.int32),
        budget=np.zeros(n, np.int32),
        temperature=np.ones(n, np.float32),
        key=np.zeros((n, 2), np.uint32),
        active=np.zeros(n, bool),
        tail=np.full((n, c.stop_width), NO_TOKEN, np.int32),
        stops=np.full((n, c.stop_sequences, c.stop_width), NO_TOKEN, np.int32),
    )
