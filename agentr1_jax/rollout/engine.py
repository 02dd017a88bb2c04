"""The slot engine: many trajectories share one batch of decode slots, each keeping its KV cache across its steps.

The host side runs in one asyncio loop: agents, environments and tools are coroutines. Every device program is
dispatched by one thread, so that tools run while the device works. The engine turns:

    requests -> seats (a slot for each, who waits longest first) -> copies and prefill of what no line holds
             -> a chunk of decoding -> completions
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.sharding import Mesh

from agentr1_jax.agents.base import Completion
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import EngineConfig
from agentr1_jax.rollout.counters import Counters, Timeline
from agentr1_jax.rollout.device import Device, Response
from agentr1_jax.rollout.lines import Lines, Move, Ticket
from agentr1_jax.rollout.sampling import Sampling

T = TypeVar("T")


class RequestError(ValueError):
    """A request that the engine cannot serve: it ends the trajectory that made it, and no other."""


@dataclasses.dataclass(eq=False)
class Request:
    """A response that somebody waits for, as far as it has come."""

    ticket: Ticket
    response: Response
    done: asyncio.Future[Completion]
    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    stopped: bool = False

    def completion(self, version: int) -> Completion:
        ids, logprobs = np.concatenate(self.ids), np.concatenate(self.logprobs)
        return Completion(ids, logprobs, "stop" if self.stopped else "length", version)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Whom a decode call under way serves, and whether others waited for a slot."""

    requests: dict[int, Request]
    others_waited: bool
    started: float


class Engine:
    """Decode slots on this process's devices.

    Args:
      policy: the decoder.
      config: shapes and habits.
      mesh: devices with axes `(data, fsdp, tensor)`; lines are sharded over `data`.

    Attributes:
      device: its programs and counters.
      version: of the policy that samples: the updates its parameters have seen.
      timeline: of the rollout under way or the last one; None unless `record_timeline`.
      record_timeline: whether to record one. The host then looks at every prefill too, which costs a little.
    """

    def __init__(self, policy: DecoderConfig, config: EngineConfig, mesh: Mesh) -> None:
        self.config = config
        self.device = Device(policy, config, mesh)
        self.version = 0
        self.record_timeline = False
        self.timeline: Timeline | None = None
        self._vocab_size = policy.vocab_size
        self._dispatcher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dispatch")
        self._reset()

    def _reset(self) -> None:
        self.device.close()
        self._lines = Lines(self.config, self.device.shards)
        self._waiting: list[Request] = []
        self._released: list[Ticket] = []
        self._open: dict[int, Request] = {}
        self._chunks: collections.deque[_Chunk] = collections.deque()
        self._room = self.config.slots + self.config.parking
        self._queue: collections.deque[asyncio.Future[None]] = collections.deque()
        self._away = 0  # Trajectories that do not wait for a response, but for their tools.
        self._turn = 0
        self._next_policy: tuple[Params, int] | None = None
        self._changed: asyncio.Event | None = None

    @property
    def counters(self) -> Counters:
        """What the engine did; see `fresh_counters`."""
        return self.device.counters

    def fresh_counters(self) -> None:
        """Counts from zero."""
        self.device.counters = Counters()

    def run(self, params: Params, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Runs coroutines that use `acquire` / `generate` / `release` until all have returned.

        Returns:
          their results, in order. An exception in one propagates after the others were cancelled.
        """

        async def everything() -> AsyncIterator[list[T]]:
            tasks = [asyncio.ensure_future(w) for w in work]
            try:
                yield await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        (results,) = self.stream(params, everything)
        return results

    def stream(self, params: Params, main: Callable[[], AsyncIterator[T]], version: int = 0) -> Iterator[T]:
        """Runs the engine beneath an async generator, and yields what that yields.

        The KV cache is allocated here and freed at the end, so that the learner has the memory to itself. Between two
        items everything stands still, but for the call the device is busy with.

        Args:
          params: decoder parameters on the engine's mesh.
          main: its coroutines use `acquire` / `generate` / `release`; what it raises ends the stream.
          version: of the policy.

        Raises:
          RuntimeError: the engine has a stream already that has not ended.
        """
        if self._changed is not None:
            raise RuntimeError("the engine is rolling out already; take that stream to its end or close it first")
        self._changed, self.version = asyncio.Event(), version
        self.timeline = Timeline(self.config.slots) if self.record_timeline else None
        try:
            self.device.open(params)
            with asyncio.Runner() as runner:
                items = main()
                driving = runner.get_loop().create_task(self._drive())
                try:
                    while True:
                        started = time.perf_counter()
                        item = runner.run(_next_while(items, driving))
                        self.counters.seconds += time.perf_counter() - started
                        if item is None:
                            return
                        yield item[0]
                finally:
                    runner.run(_close(items, driving))
        finally:
            self._dispatcher.submit(lambda: None).result()  # A turn that was under way ends first.
            if self.timeline is not None:
                self.timeline.finish()
            self._reset()

    def compile(self, params: Params) -> int:
        """Compiles every program the engine can need by running each once on idle lines; returns their number."""
        self.device.open(params)
        count = self.device.compile()
        self._reset()
        return count

    async def acquire(self, order: tuple[int, ...] = ()) -> Ticket:
        """Waits until there is a line for one more trajectory: a slot, or a place to park."""
        if self._room:
            self._room -= 1
            self._away += 1
            return Ticket(order)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._hand_on()
            raise
        return Ticket(order)

    def release(self, ticket: Ticket) -> None:
        """Gives the line back; what it holds stays, for whoever comes next with a prompt that begins alike."""
        self._released.append(ticket)
        self._hand_on()

    def _hand_on(self) -> None:
        """Who leaves makes room for who waits longest."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._room += 1
        self._away -= 1
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def generate(
        self,
        ticket: Ticket,
        prompt: np.ndarray,
        max_tokens: int,
        *,
        sampling: Sampling,
        key: np.ndarray,
        stop: Sequence[Sequence[int]],
    ) -> Completion:
        """Samples a response; what the cache shares with the prompt is not computed again.

        Args:
          ticket: from `acquire`.
          prompt: int32 [P], P ≥ 1.
          max_tokens: most tokens to sample.
          sampling: the distribution.
          key: uint32 [2], keys the random numbers of this response.
          stop: id sequences that end the response; the last id of the match is kept.

        Raises:
          RequestError: the request does not fit the engine.
        """
        response = Response(np.asarray(prompt, np.int32), max_tokens, sampling, key, stop)
        self._check(response)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(Request(ticket, response, done))
        self._away -= 1
        self._wake()
        try:
            return await done
        finally:
            self._away += done.cancelled()  # Else `_drive` has counted it, when it set the result.

    def adopt(self, params: Params, version: int) -> None:
        """Samples with other parameters from now on; called in the loop of the stream.

        Responses under way come to their end first, and until then none begins: a response has one policy. What the
        cache holds was computed with the old parameters, and is void.
        """
        self._next_policy = params, version
        self._wake()

    def _check(self, r: Response) -> None:
        c, prompt = self.config, r.prompt
        if not 1 <= len(prompt) or not 1 <= r.max_tokens or len(prompt) + r.max_tokens > c.length:
            raise RequestError(
                f"a prompt of {len(prompt)} and {r.max_tokens} new tokens do not fit a cache length of {c.length}; "
                "raise rollout.length or lower the budget"
            )
        if np.min(prompt) < 0 or np.max(prompt) >= self._vocab_size:
            raise RequestError(
                f"prompt ids must lie in [0, {self._vocab_size}), got {np.min(prompt)}..{np.max(prompt)}"
            )
        if r.sampling.fault():
            raise RequestError(f"rollout.{r.sampling.fault()}")
        if len(r.stop) > c.stop_sequences or any(not 1 <= len(s) <= c.stop_width or min(s) < 0 for s in r.stop):
            raise RequestError(
                f"at most {c.stop_sequences} stop sequences of 1 to {c.stop_width} ids each, "
                f"got {list(map(list, r.stop))}"
            )

    def in_turn(self, function: Callable[[], T]) -> T:
        """As `dispatch`, for other threads than the loop's."""
        return self._dispatcher.submit(function).result()

    async def dispatch(self, function: Callable[[], T]) -> T:
        """Runs a function on the thread that dispatches every device program, between two turns; waits for its result.

        For what else uses these devices during a rollout, such as a dense retriever. A device runs programs in the
        order in which they were enqueued, and a program over several devices waits for all of them. From two threads,
        one device could get them in another order than the next, and both would wait for ever. The engine's turns wait
        for the function, so it should be short.
        """
        return await asyncio.get_running_loop().run_in_executor(self._dispatcher, function)

    async def _drive(self) -> None:
        """Turns for as long as the stream lasts. Lines and slots change in turns, and between them in this task."""
        assert self._changed is not None
        while True:
            for _ in range(8):  # Lets agents whose tools answered at once come back with their next request.
                await asyncio.sleep(0)
            self._drop_cancelled()
            if self.timeline is not None:
                self.timeline.holding(self._lines.idle_slots())
            if self._next_policy and not self._open and not self._chunks:
                await self.dispatch(self._change_policy)
            ready = not (self.config.deterministic and self._away)
            if ready and (self._waiting or self._open or self._chunks):
                self._turn += 1
                requests = [] if self._next_policy else self._waiting
                self._waiting = self._waiting[len(requests) :]
                unseated, finished = await self.dispatch(functools.partial(self._device_turn, requests))
                self._waiting = unseated + self._waiting  # Who waits longest comes first.
                for request in finished:
                    if not request.done.done():
                        request.done.set_result(request.completion(self.version))
                        self._away += 1
                continue
            self._changed.clear()
            await self._changed.wait()

    def _change_policy(self) -> None:
        assert self._next_policy is not None
        (params, self.version), self._next_policy = self._next_policy, None
        self.device.use(params)
        self._lines.forget()

    def _drop_cancelled(self) -> None:
        """Forgets who left, and requests that nobody waits for any more."""
        self._waiting = [r for r in self._waiting if not r.done.done()]
        for slot in [slot for slot, r in self._open.items() if r.done.done()]:
            self._open.pop(slot).ticket.idle_since = self._turn
            self.device.stop(slot)
        released, self._released = self._released, []
        for ticket in released:
            self._lines.close(ticket)

    def _device_turn(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Seats requests, prefills, starts a chunk, looks at one; returns those without a seat and those completed."""
        unseated = self._seat(requests)
        if self._open:
            others_wait = bool(unseated or self._queue)
            self._chunks.append(_Chunk(dict(self._open), others_wait, time.perf_counter()))
            self.device.decode()
        if len(self._chunks) > (self.config.fetch_lag if self._open else 0):
            return unseated, self._look()
        return unseated, []

    def _seat(self, requests: list[Request]) -> list[Request]:
        """Gives slots to requests, and brings their lines to hold their prompts; returns those that got none."""
        if self.config.deterministic:
            requests = sorted(requests, key=lambda r: r.ticket.order)
        for r in requests:
            r.ticket.idle_since = None
        moves: list[Move] = []
        seats: dict[int, np.ndarray] = {}
        unseated = []
        for r in requests:
            prompt = r.response.prompt
            taken = self._lines.seat(r.ticket, prompt)
            if taken is None or r.ticket.line is None:
                unseated.append(r)
                continue
            moves += taken
            # The last prompt token is fed by decode, which needs its logits.
            seats[r.ticket.line] = prompt[:-1]
            slot = self._lines.slot_of(r.ticket.line)
            self.device.start(slot, r.response)
            self._open[slot] = r
        if self.timeline is not None:
            self.timeline.holding(self._lines.idle_slots())
        if seats:
            self._fill(moves, seats)
        return unseated

    def _fill(self, moves: list[Move], seats: dict[int, np.ndarray]) -> None:
        stages, saved = self._lines.plan(list(seats.items()))
        self.counters.prefill_tokens_saved += saved
        started = time.perf_counter()
        self.device.copy(moves)
        for stage in stages:
            self.device.copy(stage.moves)
            self.device.prefill(stage.rows, self._lines.spare)
        if self.timeline is not None:
            self.device.wait()
            self.timeline.add([self._lines.slot_of(line) for line in seats], "prefill", started, time.perf_counter())

    def _look(self) -> list[Request]:
        """Waits for the oldest chunk under way; returns the requests it completed."""
        chunk, out = self._chunks.popleft(), self.device.look()
        finished = []
        for slot, r in chunk.requests.items():
            if self._open.get(slot) is not r:
                continue  # It was dropped, or an older chunk completed it.
            r.ids.append(out.ids[slot, : out.count[slot]])
            r.logprobs.append(out.logprobs[slot, : out.count[slot]])
            if not out.active[slot]:
                r.stopped = bool(out.stopped[slot])
                del self._open[slot]
                finished.append(r)
                # All but the last sampled token were fed, so their keys and values are in the cache.
                self._lines.hold(self._lines.line_of(slot), np.concatenate([r.response.prompt, *r.ids])[:-1])
                r.ticket.idle_since = self._turn
        if chunk.others_waited:
            self.counters.waiting_tokens += int(out.count.sum())
            self.counters.waiting_slot_steps += int(out.iterations.max()) * self.config.slots
        if self.timeline is not None:
            self.timeline.add(list(chunk.requests), "decode", chunk.started, time.perf_counter())
        return finished


async def _next_while(items: AsyncIterator[T], driving: asyncio.Task[None]) -> tuple[T] | None:
    """The next item, in a tuple; None after the last. Raises what ends `driving`, which else does not end."""

    async def following() -> tuple[T] | None:
        try:
            return (await anext(items),)
        except StopAsyncIteration:
            return None

    item = asyncio.create_task(following())
    await asyncio.wait([item, driving], return_when=asyncio.FIRST_COMPLETED)
    if not item.done():
        item.cancel()
        await asyncio.gather(item, return_exceptions=True)
        driving.result()
    return item.result()


async def _close(items: Any, driving: asyncio.Task[None]) -> None:
    await items.aclose()
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
