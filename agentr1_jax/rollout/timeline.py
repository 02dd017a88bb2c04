"""Timeline of the decode slots of one rollout, for the report."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

State = Literal["decode", "prefill", "tool"]
TIMELINE_SPANS = 20_000


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
