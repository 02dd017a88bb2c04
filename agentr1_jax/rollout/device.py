"""Arrays of the engine on its devices, and the calls of the compiled programs: numpy in, numpy out.

A call returns before its program has run; `fetch` waits for the output of a decode call. One thread makes all calls.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import STOP_WIDTH, EngineConfig, SamplingConfig
from agentr1_jax.rollout.programs import NO_TOKEN, Sampled, SlotState, build_programs, encode_updates, idle_slot_state
from agentr1_jax.rollout.scheduler import CacheCopy, Prefill

COPIES_PER_CALL = 16
"""Most copies in one call of the copy program, per data shard."""


@dataclasses.dataclass
class Counters:
    """Work of an engine since its counters were reset; times in seconds, the rest in tokens or calls.

    Attributes:
      decode_tokens: tokens sampled.
      decode_slot_steps: decode slots x iterations of the decode loop.
      waiting_tokens, waiting_slot_steps: the same two, of the calls during which some trajectory waited for a slot.
      prefill_tokens: prompt tokens computed; `_padded` with the padding of the calls, `_saved` those found cached.
      device_seconds: time during which some program was running, as the host sees it.
      decode_seconds: time from the dispatch of each decode call until its output was fetched.
      seconds: duration of all rollouts.
    """

    decode_tokens: int = 0
    decode_slot_steps: int = 0
    waiting_tokens: int = 0
    waiting_slot_steps: int = 0
    prefill_tokens: int = 0
    prefill_tokens_padded: int = 0
    prefill_tokens_saved: int = 0
    copied_tokens: int = 0
    decode_calls: int = 0
    prefill_calls: int = 0
    device_seconds: float = 0.0
    decode_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of slot iterations that sampled a token."""
        return self.decode_tokens / max(self.decode_slot_steps, 1)

    @property
    def occupancy_while_waiting(self) -> float:
        """Occupancy while some trajectory waited for a slot; 1 if none ever did."""
        return self.waiting_tokens / self.waiting_slot_steps if self.waiting_slot_steps else 1.0

    @property
    def host_share(self) -> float:
        """Share of the time during which no device program ran."""
        return max(1 - self.device_seconds / self.seconds, 0.0) if self.seconds else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the rollouts of this process."""
        return {
            "rollout/occupancy": self.occupancy,
            "rollout/occupancy_while_waiting": self.occupancy_while_waiting,
            "rollout/prefill_tokens": float(self.prefill_tokens),
            "rollout/prefill_saved": float(self.prefill_tokens_saved),
            "rollout/prefill_padded": float(self.prefill_tokens_padded),
            "rollout/copied_tokens": float(self.copied_tokens),
            "time/host_share": self.host_share,
            "time/decode_tokens": float(self.decode_tokens),
            "time/rollout": self.seconds,
            "time/decode": self.decode_seconds,
        }


def next_bucket(rows: int, buckets: Sequence[int]) -> int:
    """Return the rows of the next call: the smallest bucket that holds all rows, or a full one if less than half of it.

    `buckets` are ascending, and `rows` ≥ 1 are left.
    """
    enough = next((b for b in buckets if rows <= b), buckets[-1])
    full = [b for b in buckets if b <= rows]
    return enough if not full or 2 * rows > enough else full[-1]


@dataclasses.dataclass(frozen=True)
class ResponseRequest:
    """Response that a slot is to sample.

    Attributes:
      prompt: int32 [P]; the KV slot holds all but its last id.
      max_tokens: most tokens to sample.
      sampling: distribution of each token.
      key: uint32 [2], keys the random numbers.
      stop: id sequences that end the response.
    """

    prompt: np.ndarray
    max_tokens: int
    sampling: SamplingConfig
    key: np.ndarray
    stop: Sequence[Sequence[int]] = ()


class Device:
    """Parameters, KV cache and slot states on a mesh, with one method per call of a compiled program.

    Attributes:
      in_flight: outputs of the decode calls that were not fetched yet, with their times of dispatch.
    """

    def __init__(self, policy: DecoderConfig, config: EngineConfig, mesh: Mesh) -> None:
        self.shards = mesh.shape["data"]
        config.check_shards(self.shards)
        self.counters = Counters()
        self.programs = build_programs(policy, config, mesh)
        self._config, self._paged = config, config.cache == "pages"
        # Of what prefills and copies name.
        self._slots_per_shard = (config.slots if self._paged else config.kv_slots(self.shards)) // self.shards
        self._by_slot = NamedSharding(mesh, P("data"))
        self._params: Params = None
        self._cache: Any = None
        self._state: SlotState | None = None
        self.close()

    def open(self, params: Params) -> None:
        """Allocate the cache; the decoder parameters are on the mesh."""
        c = self._config
        self._params, self._cache = params, self.programs.new_cache()
        self._table: np.ndarray | None = None
        self._next_state, self._changed = idle_slot_state(c), np.zeros(c.slots, bool)
        self._state = self._put(idle_slot_state(c))  # Not `_next_state`: a device array may alias the memory of numpy.
        self._no_updates = self._put(encode_updates(self._next_state, self._changed))
        self._early_exit_after = self._put(np.full(self.shards, c.early_exit_after, np.int32))

    def set_params(self, params: Params) -> None:
        """Use other parameters from now on; what the cache holds was computed with the old ones."""
        self._params = params

    def close(self) -> None:
        """Free all arrays on the devices."""
        self._params = self._cache = self._state = None
        self.in_flight: collections.deque[tuple[Sampled, float]] = collections.deque()
        self._busy_since: float | None = None

    def compile(self) -> int:
        """Run every program once on idle slots; return their number."""
        c = self._config
        nothing: list[list[Prefill]] = [[] for _ in range(self.shards)]
        for rows in c.prefill_rows:
            self._prefill_call(nothing, rows, [0] * self.shards)
        if not self._paged:
            self._copy_call([[] for _ in range(self.shards)])
        self.decode()
        self.wait()
        return len(c.prefill_rows) + (1 if self._paged else 2)

    def wait(self) -> None:
        """Wait until all programs dispatched so far have run."""
        jax.block_until_ready((self._cache, self._state))

    def start(self, slot: int, request: ResponseRequest, tokens: np.ndarray) -> None:
        """Have the next decode call begin a response, or go on with it: `tokens` are prompt and sampled ids."""
        s, r = self._next_state, request
        sampled = tokens[len(r.prompt) :]
        s.token[slot], s.position[slot] = tokens[-1], len(tokens) - 1
        s.sampled[slot], s.budget[slot] = len(sampled), r.max_tokens - len(sampled)
        s.temperature[slot], s.top_k[slot], s.top_p[slot] = r.sampling.temperature, r.sampling.top_k, r.sampling.top_p
        s.key[slot], s.active[slot] = r.key, True
        s.tail[slot] = s.stops[slot] = NO_TOKEN
        s.tail[slot, STOP_WIDTH - min(len(sampled), STOP_WIDTH) :] = sampled[-STOP_WIDTH:]
        for row, ids in zip(s.stops[slot], r.stop, strict=False):
            row[-len(ids) :] = ids
        self._changed[slot] = True

    def stop(self, slot: int) -> None:
        """Have the next decode call drop the response of a decode slot."""
        self._next_state.active[slot], self._changed[slot] = False, True

    def set_table(self, table: np.ndarray | None) -> None:
        """Set the pages of each decode slot for the calls from now on, see `pages.PageCache`; None with KV slots."""
        if table is not None and (self._table is None or not np.array_equal(table, self._table)):
            self._table = table.copy()
            self._cache = dataclasses.replace(self._cache, table=self._put(self._table.copy()))

    def copy(self, copies: Sequence[CacheCopy]) -> None:
        """Copy KV slots, in order."""
        self.counters.copied_tokens += sum(copy.tokens for copy in copies)
        shards: list[list[CacheCopy]] = [[] for _ in range(self.shards)]
        for copy in copies:
            shards[copy.source // self._slots_per_shard].append(copy)
        for at in range(0, max(map(len, shards)), COPIES_PER_CALL):
            self._copy_call([own[at : at + COPIES_PER_CALL] for own in shards])

    def _copy_call(self, shards: list[list[CacheCopy]]) -> None:
        table = np.zeros((2, self.shards, COPIES_PER_CALL), np.int32)
        for shard, copies in enumerate(shards):
            for i, copy in enumerate(copies):
                table[:, shard, i] = copy.source % self._slots_per_shard, copy.target % self._slots_per_shard
        count = np.asarray([len(copies) for copies in shards], np.int32)
        self._note_dispatch()
        source, target = table.reshape(2, -1)
        assert self.programs.copy is not None
        self._cache = self.programs.copy(self._cache, source, target, count)

    def prefill(self, prefills: Sequence[Prefill], padding: Sequence[int]) -> None:
        """Compute new tokens, in calls of rows of `prefill_width`; the rows of a slot in order.

        Args:
          prefills: tokens to compute, each slot at most once.
          padding: for each shard the slot that padding rows name, numbered within the shard; nothing it holds is read.
        """
        shards: list[list[Prefill]] = [[] for _ in range(self.shards)]
        for new in prefills:
            shards[new.slot // self._slots_per_shard] += self._rows(new)
            self.counters.prefill_tokens += len(new.ids) - new.start
        while left := max(map(len, shards)):
            count = next_bucket(left, self._config.prefill_rows)
            call = [own[:count] for own in shards]
            self._prefill_call(call, count, padding)
            shards = [own[count:] for own in shards]

    def _rows(self, new: Prefill) -> Iterator[Prefill]:
        width = self._config.prefill_width
        for at in range(new.start, len(new.ids), width):
            # A row ends within the KV slot: the last may begin with tokens that the row before it computed.
            if not self._paged:
                at = min(at, self._config.slot_tokens - width)
            yield dataclasses.replace(new, start=at, ids=new.ids[: at + width])

    def _prefill_call(self, shards: list[list[Prefill]], count: int, padding: Sequence[int]) -> None:
        tokens = np.zeros((self.shards, count, self._config.prefill_width), np.int32)
        slot = np.repeat(np.asarray(padding, np.int32)[:, None], count, axis=1)
        start = np.zeros((self.shards, count), np.int32)
        for shard, rows in enumerate(shards):
            for i, row in enumerate(rows):
                ids = row.ids[row.start :]
                tokens[shard, i, : len(ids)] = ids
                slot[shard, i], start[shard, i] = row.slot % self._slots_per_shard, row.start
        self._note_dispatch()
        arrays = tokens.reshape(-1, tokens.shape[-1]), slot.ravel(), start.ravel()
        self._cache = self.programs.prefill(self._params, self._cache, *arrays)
        self.counters.prefill_tokens_padded += tokens.size
        self.counters.prefill_calls += 1

    def decode(self) -> None:
        """Dispatch the decoding of one chunk of all active responses."""
        updates = self._no_updates
        if self._changed.any():
            updates = self._put(encode_updates(self._next_state, self._changed))
        self._changed[:] = False
        started = self._note_dispatch()
        self._cache, self._state, sampled = self.programs.decode(
            self._params, self._cache, self._state, updates, self._early_exit_after
        )
        self.in_flight.append((sampled, started))
        self.counters.decode_calls += 1

    def fetch(self) -> Sampled:
        """Wait for the oldest decode call in flight; return its output as numpy arrays."""
        sampled, started = self.in_flight.popleft()
        sampled = jax.device_get(sampled)
        now = time.perf_counter()
        self.counters.device_seconds += 0.0 if self._busy_since is None else now - self._busy_since
        self._busy_since = now if self.in_flight else None
        self.counters.decode_seconds += now - started
        self.counters.decode_tokens += int(sampled.count.sum())
        self.counters.decode_slot_steps += int(sampled.iterations.max()) * self._config.slots
        return sampled

    def _note_dispatch(self) -> float:
        """Note that the device is busy from now on, if it was not; return the time."""
        now = time.perf_counter()
        if self._busy_since is None:
            self._busy_since = now
        return now

    def _put(self, tree: Any) -> Any:
        """Place numpy arrays on the mesh, sharded by slot."""
        return jax.device_put(tree, self._by_slot)
