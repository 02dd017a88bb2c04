"""What an engine did: sums for the metrics, and a timeline of its slots for the report."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

State = Literal["decode", "prefill", "tool"]
TIMELINE_SPANS = 20_000


@dataclasses.dataclass
class Counters:
    """What the engine did since the counters were made; times in seconds, the rest in tokens or calls.

    Attributes:
      decode_tokens: tokens sampled and kept.
      decode_slot_steps: slots x iterations of the decode loop.
      waiting_tokens, waiting_slot_steps: the same, of calls during which some trajectory waited for a slot.
      prefill_tokens: prompt tokens computed; `padded` with the padding of their calls, `saved` those that were not.
      moved_tokens: tokens of lines copied.
      decode_calls, prefill_calls, copy_calls: of the programs.
      device_seconds: during which some program was running, as far as the host can see.
      decode_seconds: of which from the start of a decode call to the host's look at it.
      seconds: of all rollouts.
    """

    decode_tokens: int = 0
    decode_slot_steps: int = 0
    waiting_tokens: int = 0
    waiting_slot_steps: int = 0
    prefill_tokens: int = 0
    prefill_tokens_padded: int = 0
    prefill_tokens_saved: int = 0
    moved_tokens: int = 0
    decode_calls: int = 0
    prefill_calls: int = 0
    copy_calls: int = 0
    device_seconds: float = 0.0
    decode_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        """Kept tokens over slots x iterations."""
        return self.decode_tokens / max(self.decode_slot_steps, 1)

    @property
    def occupancy_while_waiting(self) -> float:
        """Occupancy while there was somebody to fill the slots with; 1 if there never was."""
        return self.waiting_tokens / self.waiting_slot_steps if self.waiting_slot_steps else 1.0

    @property
    def host_share(self) -> float:
        """Share of the time in which no program ran."""
        return max(1 - self.device_seconds / self.seconds, 0.0) if self.seconds else 0.0


class DeviceClock:
    """Adds up the time in which programs run: from a start with nothing under way to the host's look at the last."""

    def __init__(self) -> None:
        self._since: float | None = None

    def started(self) -> None:
        """A program was dispatched."""
        if self._since is None:
            self._since = time.perf_counter()

    def finished(self, more: bool) -> float:
        """Seconds since the start or the last look; `more` says whether further programs are under way."""
        now = time.perf_counter()
        seconds = 0.0 if self._since is None else now - self._since
        self._since = now if more else None
        return seconds


@dataclasses.dataclass(frozen=True)
class Span:
    """What a slot was used for, in seconds since the rollout began."""

    slot: int
    state: State
    start: float
    end: float


class Timeline:
    """Spans of one rollout, the first `TIMELINE_SPANS` of them."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.spans: list[Span] = []
        self._began = time.perf_counter()
        self._tool_since: dict[int, float] = {}

    def add(self, slots: list[int], state: State, start: float, end: float) -> None:
        """The slots were in this state from `start` to `end` (`time.perf_counter`)."""
        room = max(TIMELINE_SPANS - len(self.spans), 0)
        self.spans += [Span(slot, state, start - self._began, end - self._began) for slot in slots[:room]]

    def holding(self, slots: set[int]) -> None:
        """These slots, and no others, are kept by trajectories whose tool is at work."""
        now = time.perf_counter()
        for slot in [slot for slot in self._tool_since if slot not in slots]:
            self.add([slot], "tool", self._tool_since.pop(slot), now)
        for slot in slots:
            self._tool_since.setdefault(slot, now)

    def finish(self) -> None:
        """The rollout is over; slots still kept for a tool were so until now."""
        self.holding(set())

    def records(self) -> list[dict[str, Any]]:
        """The spans as plain records `{"slot", "state", "start", "end"}`, for a picture or a file."""
        return [dataclasses.asdict(span) for span in self.spans]
