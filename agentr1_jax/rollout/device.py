"""The device side of the engine: numpy in, calls of programs in order, numpy out. Called by one thread."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import EngineConfig
from agentr1_jax.rollout.counters import Counters, DeviceClock
from agentr1_jax.rollout.executor import Executor
from agentr1_jax.rollout.lines import Move, NewTokens
from agentr1_jax.rollout.programs import Sampled
from agentr1_jax.rollout.sampling import NO_TOKEN, Sampling
from agentr1_jax.rollout.slots import idle_slots, to_words

MOVES = 16
"""Copies in one call of the copy program, per data shard."""


def rows_bucket(n: int, buckets: Sequence[int]) -> int:
    """Rows of the next call when n are left: the smallest bucket if more than half of it is used, else a full one."""
    enough = next((b for b in buckets if n <= b), buckets[-1])
    filled = [b for b in buckets if b <= n]
    return enough if not filled or 2 * n > enough else filled[-1]


@dataclasses.dataclass(frozen=True)
class Response:
    """What a slot is to sample.

    Attributes:
      prompt: int32 [P]; the cache holds all but its last id.
      max_tokens: most tokens to sample.
      sampling: the distribution.
      key: uint32 [2].
      stop: id sequences that end it.
    """

    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    key: np.ndarray
    stop: Sequence[Sequence[int]]


class Device:
    """What the next calls of the programs are to say, and what those under way have brought.

    Args:
      policy: the decoder.
      config: shapes.
      mesh: devices with axes `(data, fsdp, tensor)`; lines are sharded over `data`.

    Attributes:
      executor: what lies on the devices.
      counters: what it did; may be replaced.
      under_way: decode calls that nobody has looked at yet.
    """

    def __init__(self, policy: DecoderConfig, config: EngineConfig, mesh: Mesh) -> None:
        self.shards = mesh.shape["data"]
        config.check_shards(self.shards)
        self.counters = Counters()
        self.executor = Executor(policy, config, mesh)
        self._config = config
        self._per_shard = config.lines(self.shards) // self.shards
        self.close()

    def open(self, params: Params) -> None:
        """Allocates the cache."""
        self.executor.open(params)
        self._new, self._told = idle_slots(self._config), np.zeros(self._config.slots, bool)

    def use(self, params: Params) -> None:
        """Other parameters from now on; what the cache holds was computed with the old ones."""
        self.executor.use(params)

    def close(self) -> None:
        """Frees everything on the device."""
        self.executor.close()
        self.under_way: collections.deque[tuple[Sampled, float]] = collections.deque()
        self._clock = DeviceClock()

    def compile(self) -> int:
        """Runs every program once on idle lines; returns their number."""
        c = self._config
        nothing: list[list[NewTokens]] = [[] for _ in range(self.shards)]
        for rows in c.prefill_rows:
            self._prefill_call(nothing, rows, [0] * self.shards)
        self._copy_call([[] for _ in range(self.shards)])
        self.decode()
        self.wait()
        return len(c.prefill_rows) + 2

    def wait(self) -> None:
        """Until all calls so far are done."""
        self.executor.wait()

    def start(self, slot: int, response: Response) -> None:
        """Tells the next decode call of a response."""
        p, r = self._new, response
        p.token[slot], p.position[slot] = r.prompt[-1], len(r.prompt) - 1
        p.sampled[slot], p.budget[slot] = 0, r.max_tokens
        p.temperature[slot], p.top_k[slot], p.top_p[slot] = dataclasses.astuple(r.sampling)
        p.key[slot], p.active[slot] = r.key, True
        p.tail[slot] = p.stops[slot] = NO_TOKEN
        for row, ids in zip(p.stops[slot], r.stop, strict=False):
            row[-len(ids) :] = ids
        self._told[slot] = True

    def stop(self, slot: int) -> None:
        """Tells the next decode call that nobody waits for the response of a slot any more."""
        self._new.active[slot], self._told[slot] = False, True

    def copy(self, moves: Sequence[Move]) -> None:
        """Copies lines, in order."""
        self.counters.moved_tokens += sum(m.tokens for m in moves)
        shards: list[list[Move]] = [[] for _ in range(self.shards)]
        for move in moves:
            shards[move.source // self._per_shard].append(move)
        for at in range(0, max(map(len, shards)), MOVES):
            self._copy_call([own[at : at + MOVES] for own in shards])

    def _copy_call(self, shards: list[list[Move]]) -> None:
        table = np.zeros((2, self.shards, MOVES), np.int32)
        for shard, moves in enumerate(shards):
            for i, m in enumerate(moves):
                table[:, shard, i] = m.source % self._per_shard, m.target % self._per_shard
        count = np.asarray([len(moves) for moves in shards], np.int32)
        self._clock.started()
        source, target = table.reshape(2, -1)
        self.executor.copy(source, target, count)
        self.counters.copy_calls += 1

    def prefill(self, new: Sequence[NewTokens], spare: Sequence[int]) -> None:
        """Computes new tokens, in calls of rows of `prefill_width`; the rows of a line in order.

        Args:
          new: of lines, each once.
          spare: a line of each shard that holds nothing, for rows that are padding.
        """
        shards: list[list[NewTokens]] = [[] for _ in range(self.shards)]
        for line in sorted(new, key=lambda n: len(n.ids)):  # Lines of like length read alike.
            shards[line.line // self._per_shard] += self._rows(line)
            self.counters.prefill_tokens += len(line.ids) - line.start
        while left := max(map(len, shards)):
            count = rows_bucket(left, self._config.prefill_rows)
            call = [own[:count] for own in shards]
            self._prefill_call(call, count, spare)
            shards = [own[count:] for own in shards]

    def _rows(self, line: NewTokens) -> Iterator[NewTokens]:
        width = self._config.prefill_width
        for at in range(line.start, len(line.ids), width):
            # A row ends within the cache: the last may begin with tokens that the one before computed.
            at = min(at, self._config.length - width)
            yield dataclasses.replace(line, start=at, ids=line.ids[: at + width])

    def _prefill_call(self, shards: list[list[NewTokens]], count: int, spare: Sequence[int]) -> None:
        tokens = np.zeros((self.shards, count, self._config.prefill_width), np.int32)
        line = np.repeat(np.asarray(spare, np.int32)[:, None] % self._per_shard, count, axis=1)
        start = np.zeros((self.shards, count), np.int32)
        for shard, own in enumerate(shards):
            for i, row in enumerate(own):
                ids = row.ids[row.start :]
                tokens[shard, i, : len(ids)] = ids
                line[shard, i], start[shard, i] = row.line % self._per_shard, row.start
        self._clock.started()
        self.executor.prefill(tokens.reshape(-1, tokens.shape[-1]), line.ravel(), start.ravel())
        self.counters.prefill_tokens_padded += tokens.size
        self.counters.prefill_calls += 1

    def decode(self) -> None:
        """Starts a chunk for all responses that are open."""
        words = to_words(self._new, self._told) if self._told.any() else None
        self._told[:] = False
        started = time.perf_counter()
        self._clock.started()
        self.under_way.append((self.executor.decode(words), started))
        self.counters.decode_calls += 1

    def look(self) -> Sampled:
        """Waits for the oldest chunk under way; its output as numpy arrays."""
        out, started = self.under_way.popleft()
        out = jax.device_get(out)
        self.counters.device_seconds += self._clock.finished(more=bool(self.under_way))
        self.counters.decode_seconds += time.perf_counter() - started
        self.counters.decode_tokens += int(out.count.sum())
        self.counters.decode_slot_steps += int(out.iterations.max()) * self._config.slots
        return out
