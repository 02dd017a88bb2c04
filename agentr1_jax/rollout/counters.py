"""Counters of an engine for the metrics, and a timeline of its decode slots for the report."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

State = Literal["decode", "prefill", "tool"]
TIMELINE_SPANS = 20_000


@dataclasses.dataclass
class Counters:
    """Work of an engine since its counters were reset; times in seconds, the rest in tokens or calls.

    Attributes:
      decode_tokens: tokens sampled.
      decode_slot_steps: decode slots x iterations of the decode loop.
      waiting_tokens, waiting_slot_steps: the same two, of the calls during which some trajectory waited for a slot.
      prefill_tokens: prompt tokens computed.
      prefill_tokens_padded: the same with the padding of the prefill calls.
      prefill_tokens_saved: prompt tokens that were cached and not computed again.
      copied_tokens: tokens copied from one KV slot to another.
      decode_calls, prefill_calls, copy_calls: calls of the compiled programs.
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
    copy_calls: int = 0
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


class DeviceClock:
    """Clock of the time during which programs run: from a dispatch to an idle device to the last fetch."""

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        """Note that a program is dispatched."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self, more: bool) -> float:
        """Return the seconds since the start or the last stop.

        Args:
          more: whether further programs are in flight.
        """
        now = time.perf_counter()
        seconds = 0.0 if self._since is None else now - self._since
        self._since = now if more else None
        return seconds


@dataclasses.dataclass(frozen=True)
class Span:
    """Use of a decode slot over some time; start and end in seconds since the rollout began."""

    slot: int
    state: State
    start: float
    end: float


class Timeline:
    """The first `TIMELINE_SPANS` spans of one rollout."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.spans: list[Span] = []
        self._began = time.perf_counter()
        self._tool_since: dict[int, float] = {}

    def add(self, slots: list[int], state: State, start: float, end: float) -> None:
        """Add a span of this state for each slot; start and end by `time.perf_counter`."""
        room = max(TIMELINE_SPANS - len(self.spans), 0)
        self.spans += [Span(slot, state, start - self._began, end - self._began) for slot in slots[:room]]

    def set_tool_slots(self, slots: set[int]) -> None:
        """Set the slots whose sequences wait for their tool now, and end the tool spans of all other slots."""
        now = time.perf_counter()
        for slot in [slot for slot in self._tool_since if slot not in slots]:
            self.add([slot], "tool", self._tool_since.pop(slot), now)
        for slot in slots:
            self._tool_since.setdefault(slot, now)

    def finish(self) -> None:
        """End all open tool spans."""
        self.set_tool_slots(set())

    def records(self) -> list[dict[str, Any]]:
        """Return the spans as plain records `{"slot", "state", "start", "end"}`."""
        return [dataclasses.asdict(span) for span in self.spans]
