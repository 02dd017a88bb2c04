"""The rollout engine: many trajectories share a batch of decode slots, and each keeps its KV cache across its steps.

The host side runs in one asyncio loop: agents, environments and tools are coroutines. One thread dispatches all device
programs, so that tools run while the device works. The engine runs in cycles:

    requests -> decode slots, first come first served -> cache copies and prefill of what is not cached
             -> one chunk of decoding -> completions
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh

from agentr1_jax.agents.session import Completion
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import MOST_STOP_SEQUENCES, STOP_WIDTH, EngineConfig
from agentr1_jax.rollout.device import Counters, Device, ResponseRequest
from agentr1_jax.rollout.page_scheduler import PageScheduler
from agentr1_jax.rollout.scheduler import Lease, Scheduler
from agentr1_jax.runtime.processes import Dispatcher

TIMELINE_SPANS = 20_000
"""Most spans of a timeline."""


class RequestError(ValueError):
    """A request that the engine cannot serve; it ends the trajectory that made it, and no other."""


@dataclasses.dataclass(eq=False)
class PendingResponse:
    """A response that a trajectory waits for, with the tokens sampled so far."""

    lease: Lease
    request: ResponseRequest
    done: asyncio.Future[Completion]
    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # Of the policy, one for each array.
    stopped: bool = False

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and sampled ids, int32."""
        return np.concatenate([self.request.prompt, *self.ids])

    def room(self, tokens: int) -> int:
        """Positions that it needs for so many tokens more."""
        known = len(self.request.prompt) + sum(map(len, self.ids))
        return min(known + tokens, len(self.request.prompt) + self.request.max_tokens)

    def completion(self) -> Completion:
        """Return the complete response."""
        ids, logprobs = np.concatenate(self.ids), np.concatenate(self.logprobs)
        version = np.repeat(self.versions, [len(part) for part in self.ids])
        changes = tuple((int(at), int(version[at])) for at in np.flatnonzero(np.diff(version)) + 1)
        return Completion(ids, logprobs, "stop" if self.stopped else "length", int(version[0]), changes)


class Chunk(NamedTuple):
    """A decode call in flight, dispatched at the time `started`: the responses that it samples, by decode slot."""

    responses: dict[int, PendingResponse]
    version: int
    others_wait: bool
    started: float


class Timeline:
    """Use of the decode slots during one rollout: its first `TIMELINE_SPANS` spans.

    Attributes:
      spans: records `{"slot", "state", "start", "end"}`, in seconds since the rollout began.
    """

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._began = time.perf_counter()
        self._tool_since: dict[int, float] = {}

    def add(self, slots: list[int], state: Literal["decode", "prefill", "tool"], start: float, end: float) -> None:
        """Add a span of this state for each slot; start and end by `time.perf_counter`."""
        room = max(TIMELINE_SPANS - len(self.spans), 0)
        times = {"start": start - self._began, "end": end - self._began}
        self.spans += [{"slot": slot, "state": state, **times} for slot in slots[:room]]

    def set_tool_slots(self, slots: set[int]) -> None:
        """Set the slots whose sequences wait for their tool now, and end the tool spans of all other slots."""
        now = time.perf_counter()
        for slot in [slot for slot in self._tool_since if slot not in slots]:
            self.add([slot], "tool", self._tool_since.pop(slot), now)
        for slot in slots:
            self._tool_since.setdefault(slot, now)


class Engine:
    """Sampler of the responses of many trajectories on the devices of this process.

    The slots are sharded over the axis `data` of the mesh.

    Attributes:
      dispatcher: thread of its programs. What else uses the devices during a rollout must go through it.
      version: version of the policy that samples: the number of updates of its parameters.
      timeline: timeline of the current or last rollout; None unless `record_timeline`.
      record_timeline: whether to record one. The host then waits for every prefill, which costs a little time.
    """

    def __init__(
        self, policy: DecoderConfig, config: EngineConfig, mesh: Mesh, dispatcher: Dispatcher | None = None
    ) -> None:
        self.config = config
        self.device = Device(policy, config, mesh)
        self.dispatcher = dispatcher or Dispatcher()
        self.version = 0
        self.record_timeline = False
        self.timeline: Timeline | None = None
        self._vocab_size = policy.vocab_size
        self._reset()

    def _reset(self) -> None:
        self.device.close()
        kind = PageScheduler if self.config.cache == "pages" else Scheduler
        self._scheduler = kind(self.config, self.device.shards)
        self._waiting: list[PendingResponse] = []  # For a decode slot.
        self._requests: dict[Lease, asyncio.Future[Completion]] = {}  # The last one of each trajectory.
        self._starting: dict[int, PendingResponse] = {}  # By decode slot: their prompts are being computed.
        self._decoding: dict[int, PendingResponse] = {}  # By decode slot.
        self._chunks: collections.deque[Chunk] = collections.deque()  # In flight.
        self._free_leases = self.config.slots + self.config.swap_slots
        self._admission_queue: collections.deque[asyncio.Future[None]] = collections.deque()
        self._leases_to_release: list[Lease] = []
        self._in_tools = 0  # Trajectories with a lease that wait for no response, but for their tools.
        self._cycle = 0
        self._next_policy: tuple[Params, int] | None = None
        self._wake_up: asyncio.Event | None = None

    @property
    def counters(self) -> Counters:
        """Work done since `reset_counters`."""
        return self.device.counters

    def reset_counters(self) -> None:
        """Count from zero."""
        self.device.counters = Counters()

    @contextlib.asynccontextmanager
    async def open(self, params: Params, version: int) -> AsyncIterator[None]:
        """Serve the coroutines of the body, which use `acquire`, `generate` and `release`.

        The KV cache is allocated here and freed at the end, so that the learner has the memory to itself. What breaks
        the engine cancels the body, and is raised here. The parameters of the policy are on the engine's mesh.
        """
        if self._wake_up is not None:
            raise RuntimeError("the engine is rolling out already; take that rollout to its end or close it first")
        self._wake_up, self.version = asyncio.Event(), version
        started = time.perf_counter()
        self.timeline = Timeline() if self.record_timeline else None
        closing = False

        async def run_cycles() -> None:
            try:
                await self._run_cycles()
            except asyncio.CancelledError:
                if not closing:  # Without cycles all that wait for a response would wait for ever.
                    raise RuntimeError("an environment, tool or agent has cancelled a task of the engine") from None
                raise

        try:
            self.device.open(params)
            async with asyncio.TaskGroup() as tasks:
                cycles = tasks.create_task(run_cycles())
                try:
                    yield
                finally:
                    closing = True
                cycles.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.dispatcher.call(lambda: None)  # A cycle in progress ends first.
            self.counters.seconds += time.perf_counter() - started
            if self.timeline is not None:
                self.timeline.set_tool_slots(set())
            self._reset()

    def compile(self, params: Params) -> int:
        """Compile every program of the engine by running each once on idle slots; return their number."""
        self.device.open(params)
        count = self.device.compile()
        self._reset()
        return count

    async def acquire(self, order: tuple[int, ...] = ()) -> Lease:
        """Wait until one more trajectory can be admitted: until a KV slot, for decoding or swapping, is free.

        The order, (group, sample), is that of the requests of one cycle in deterministic mode.
        """
        if self._free_leases:
            self._free_leases -= 1
            self._in_tools += 1
            return Lease(order)
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._admission_queue.append(admission)
        try:
            await admission
        except asyncio.CancelledError:
            if not admission.cancelled():
                self._admit_next()
            raise
        return Lease(order)

    def release(self, lease: Lease) -> None:
        """End a lease. The slot keeps its contents, for prompts that begin with them."""
        self._abandon(lease)
        self._leases_to_release.append(lease)
        self._admit_next()

    def _admit_next(self) -> None:
        """Admit the trajectory that has waited longest in place of one that leaves."""
        while self._admission_queue:
            admission = self._admission_queue.popleft()
            if not admission.done():
                admission.set_result(None)
                return
        self._free_leases += 1
        self._in_tools -= 1
        self._notify()

    def _notify(self) -> None:
        """Wake the loop of cycles."""
        if self._wake_up is not None:
            self._wake_up.set()

    async def generate(self, lease: Lease, request: ResponseRequest) -> Completion:
        """Sample a response. Raises RequestError where the request does not fit the engine."""
        self._check(request)
        self._abandon(lease)  # Only what an agent left behind can be in progress.
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(PendingResponse(lease, request, done))
        self._requests[lease] = done
        self._in_tools -= 1
        self._notify()
        try:
            return await done
        finally:
            if self._requests.get(lease) is done:
                self._abandon(lease)
            self._in_tools += done.cancelled()  # Otherwise `_run_cycles` counted it when it set the result.

    def _abandon(self, lease: Lease) -> None:
        """Have the response that a trajectory asked for last dropped, if it is still in progress."""
        done = self._requests.pop(lease, None)
        if done is not None:
            done.cancel()

    def adopt(self, params: Params, version: int) -> None:
        """Sample with other parameters from now on; called in the loop in which the engine is open.

        With `config.adopt` = `drain` responses in progress end first, and until then none begins: a response has one
        policy. The contents of the cache, computed with the old parameters, become void. With `in_flight` the next
        decode call has the new parameters, whatever it goes on with; each trajectory keeps what it has in the cache,
        and those that begin later share nothing with it.
        """
        self._next_policy = params, version
        self._notify()

    def _check(self, r: ResponseRequest) -> None:
        c, prompt = self.config, r.prompt
        if not 1 <= len(prompt) or not 1 <= r.max_tokens or len(prompt) + r.max_tokens > c.slot_tokens:
            raise RequestError(
                f"a prompt of {len(prompt)} and {r.max_tokens} new tokens do not fit "
                f"rollout.slot_tokens={c.slot_tokens}; raise it or lower the budget"
            )
        if np.min(prompt) < 0 or np.max(prompt) >= self._vocab_size:
            raise RequestError(
                f"prompt ids must lie in [0, {self._vocab_size}), got {np.min(prompt)}..{np.max(prompt)}"
            )
        if len(r.stop) > MOST_STOP_SEQUENCES or not all(
            1 <= len(s) <= STOP_WIDTH and 0 <= min(s) and max(s) < 2**31 for s in r.stop
        ):
            raise RequestError(
                f"at most {MOST_STOP_SEQUENCES} stop sequences of 1 to {STOP_WIDTH} ids each, "
                f"got {list(map(list, r.stop))}"
            )

    async def _run_cycles(self) -> None:
        """Run cycles while the engine is open. Only cycles, and this task between them, change the scheduler."""
        assert self._wake_up is not None
        while True:
            for _ in range(8):  # Lets agents whose tools answered at once come back with their next request.
                await asyncio.sleep(0)
            self._drop_cancellations()
            if self.timeline is not None:
                self.timeline.set_tool_slots(self._scheduler.tool_slots())
            begun = [r for r in self._waiting if r.ids]  # They gave way, and have the policy of their first tokens.
            busy = bool(begun or self._decoding or self._chunks or self._scheduler.queue_length)
            if self._next_policy and (self.config.adopt == "in_flight" or not busy):
                await self.dispatcher(self._change_policy)
            ready = not (self.config.deterministic and self._in_tools)
            if ready and (self._waiting or busy):
                self._cycle += 1
                waiting, later = self._waiting, list[PendingResponse]()
                if self._next_policy:
                    waiting, later = begun, [r for r in self._waiting if not r.ids]
                self._waiting = later
                unassigned, complete = await self.dispatcher(functools.partial(self._device_cycle, waiting))
                self._waiting = unassigned + self._waiting  # Longest wait first.
                for response in complete:
                    if not response.done.done():
                        response.done.set_result(response.completion())
                        self._in_tools += 1
                continue
            self._wake_up.clear()
            await self._wake_up.wait()

    def _change_policy(self) -> None:
        assert self._next_policy is not None
        (params, self.version), self._next_policy = self._next_policy, None
        self.device.set_params(params)
        if self.config.adopt == "drain":
            self._scheduler.invalidate()
        else:
            self._scheduler.seal()

    def _drop_cancellations(self) -> None:
        """Drop responses that no trajectory waits for any more, and end the leases that were released."""
        self._waiting = [r for r in self._waiting if not r.done.done()]
        for responses in (self._starting, self._decoding):
            for slot in [slot for slot, r in responses.items() if r.done.done()]:
                responses.pop(slot).lease.idle_since = self._cycle
                self._scheduler.finish(slot, None)
                self.device.stop(slot)
        leases, self._leases_to_release = self._leases_to_release, []
        for lease in leases:
            self._scheduler.release(lease)

    def _device_cycle(self, waiting: list[PendingResponse]) -> tuple[list[PendingResponse], list[PendingResponse]]:
        """Assign slots, prefill, dispatch a chunk and fetch one; return the still unassigned and complete responses."""
        complete: list[PendingResponse] = []
        unassigned = self._assign(waiting)
        self._prefill()
        unassigned = self._make_room(complete) + unassigned
        if self._decoding:
            others_wait = bool(unassigned or self._admission_queue)
            self._chunks.append(Chunk(dict(self._decoding), self.version, others_wait, time.perf_counter()))
            self.device.decode()
        if len(self._chunks) > (self.config.fetch_lag if self._decoding else 0):
            complete += self._fetch()
        return unassigned, complete

    def _assign(self, waiting: list[PendingResponse]) -> list[PendingResponse]:
        """Assign decode slots; return the responses for which there is none."""
        if self.config.deterministic:
            waiting = sorted(waiting, key=lambda r: r.lease.order)
        for r in waiting:
            r.lease.idle_since = None
        unassigned = []
        for r in waiting:
            # Decode feeds the last token, because it needs its logits.
            slot = self._scheduler.assign(r.lease, r.tokens[:-1], r.room(self.config.decode_chunk))
            if slot is None:
                unassigned.append(r)
            else:
                self._starting[slot] = r
        if self.timeline is not None:
            self.timeline.set_tool_slots(self._scheduler.tool_slots())
        return unassigned

    def _prefill(self) -> None:
        """Compute prompts: one call, and further ones while more decode slots wait for their prompts than decode."""
        while self._scheduler.queue_length:
            passes, ready, saved = self._scheduler.advance()
            self.counters.prefill_tokens_saved += saved
            started = time.perf_counter()
            self.device.set_table(self._scheduler.table)
            for each in passes:
                self.device.copy(each.copies)
                self.device.prefill(each.prefills, self._scheduler.padding)
            if self.timeline is not None:
                self.device.wait()
                self.timeline.add(ready, "prefill", started, time.perf_counter())
            for slot in ready:
                r = self._decoding[slot] = self._starting.pop(slot)
                self.device.start(slot, r.request, r.tokens)
            if self._scheduler.queue_length <= len(self._decoding):
                break

    def _make_room(self, complete: list[PendingResponse]) -> list[PendingResponse]:
        """Have pages for the next chunk of each response, those of the oldest trajectories first.

        Where they run out, the response of the trajectory admitted last gives up its slot, and goes on later.

        Args:
          complete: takes the responses that ended meanwhile.

        Returns:
          the responses that gave way.
        """
        gave_way = []
        for slot in self._scheduler.by_age(self._decoding):
            while (r := self._decoding.get(slot)) is not None:
                in_flight = sum(chunk.responses.get(slot) is r for chunk in self._chunks)
                if self._scheduler.extend(slot, r.room((1 + in_flight) * self.config.decode_chunk)):
                    break
                if self._chunks:  # Their tokens are not here yet.
                    complete += self._fetch()
                    continue
                per_shard = self._scheduler.decode_slots_per_shard
                shard = [other for other in self._decoding if other // per_shard == slot // per_shard]
                last = self._scheduler.by_age(shard)[-1]
                r = self._decoding.pop(last)
                self._scheduler.finish(last, r.tokens[:-1])
                self.device.stop(last)
                gave_way.append(r)
        self.device.set_table(self._scheduler.table)
        return gave_way

    def _fetch(self) -> list[PendingResponse]:
        """Wait for the oldest chunk in flight; return the responses that it completed."""
        chunk, out = self._chunks.popleft(), self.device.fetch()
        complete = []
        for slot, r in chunk.responses.items():
            if self._decoding.get(slot) is not r:
                continue  # It was dropped, or an older chunk completed it.
            r.ids.append(out.ids[slot, : out.count[slot]])
            r.logprobs.append(out.logprobs[slot, : out.count[slot]])
            r.versions.append(chunk.version)
            if not out.active[slot]:
                r.stopped = bool(out.stopped[slot])
                del self._decoding[slot]
                complete.append(r)
                # All but the last sampled token were fed, so their keys and values are in the cache.
                self._scheduler.finish(slot, r.tokens[:-1])
                r.lease.idle_since = self._cycle
        if chunk.others_wait:
            self.counters.waiting_tokens += int(out.count.sum())
            self.counters.waiting_slot_steps += int(out.iterations.max()) * self.config.slots
        if self.timeline is not None:
            self.timeline.add(list(chunk.responses), "decode", chunk.started, time.perf_counter())
        return complete
