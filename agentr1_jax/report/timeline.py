"""The timeline of one rollout as a picture: what every decode slot was used for, moment by moment."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from agentr1_jax.report.drawing import BLUE, FAINT, INK, ORANGE, SOFT, WASH, new_figure, save, tidy

STATES = ("decode", "prefill", "tool")
"""A slot that is in two at once counts as the first of them."""
COLORS = {"decode": BLUE, "prefill": INK, "tool": ORANGE, "idle": WASH}
LABELS = {"decode": "decoding", "prefill": "prefill", "tool": "waiting for tool", "idle": "idle"}
CURVE_POINTS = 300


class Pieces(NamedTuple):
    """Stretches of time of which no two of one slot overlap, as arrays [N]; `state` is a place in `STATES`.

    `seconds` is the end of the last span.
    """

    slot: np.ndarray
    state: np.ndarray
    start: np.ndarray
    end: np.ndarray
    seconds: float


def _parse_span(span: Mapping[str, Any], slots: int) -> tuple[int, int, float, float]:
    slot, state, start, end = int(span["slot"]), span["state"], float(span["start"]), float(span["end"])
    if not 0 <= slot < slots or state not in STATES or not 0 <= start <= end < math.inf:
        raise ValueError(
            f"span {dict(span)} does not fit a timeline of {slots} slots: slot counts from 0, state is one of "
            f"{', '.join(STATES)}, start and end are seconds with 0 <= start <= end"
        )
    return slot, STATES.index(state), start, end


def _disjoint_spans(state: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spans [N] of one slot, perhaps overlapping, as disjoint ones (state, start, end) in order of time."""
    times, place = np.unique(np.concatenate([start, end]), return_inverse=True)
    first, last = np.split(place, 2)
    covered = np.zeros((len(STATES), len(times)), np.int64)
    np.add.at(covered, (state, first), 1)
    np.add.at(covered, (state, last), -1)
    in_state = np.cumsum(covered, axis=1) > 0
    now = np.where(in_state.any(axis=0), in_state.argmax(axis=0), -1)
    changes = np.flatnonzero(np.diff(now, prepend=-1))
    begins, ends = changes, np.append(changes[1:], len(times) - 1)
    busy = now[begins] >= 0
    return now[begins][busy], times[begins][busy], times[ends][busy]


def _disjoint_pieces(spans: Iterable[Mapping[str, Any]], slots: int) -> Pieces:
    """Spans without their overlaps. Raise ValueError where a span does not fit."""
    if slots < 1:
        raise ValueError(f"slots is {slots}; a timeline has at least 1")
    rows = np.array([_parse_span(span, slots) for span in spans], np.float64).reshape(-1, 4)
    slot, state = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    found = [(slot[:0], state[:0], rows[:0, 2], rows[:0, 3])]
    for k in np.unique(slot):
        of = slot == k
        parts = _disjoint_spans(state[of], rows[of, 2], rows[of, 3])
        found.append((np.full(len(parts[0]), k), *parts))
    slot, state, start, end = map(np.concatenate, zip(*found, strict=True))
    return Pieces(slot, state, start, end, float(rows[:, 3].max(initial=0.0)))


def _shares(pieces: Pieces, slots: int) -> dict[str, float]:
    total = slots * pieces.seconds
    seconds = np.bincount(pieces.state, pieces.end - pieces.start, minlength=len(STATES))
    shares = {state: float(s / total) if total else 0.0 for state, s in zip(STATES, seconds, strict=True)}
    return shares | {"idle": max(1.0 - sum(shares.values()), 0.0)}


def state_shares(spans: Iterable[Mapping[str, Any]], slots: int) -> dict[str, float]:
    """Return the shares of slot-time, `slots` x the seconds from 0 to the end of the last span, in each state.

    A slot in two states at once counts as decoding before prefill before waiting for a tool.

    Args:
      spans: records `{"slot": 0 to slots - 1, "state": "decode" | "prefill" | "tool", "start", "end"}`, in seconds
        since the rollout began, in any order.
      slots: of the engine.

    Returns:
      Shares of `decode`, `prefill`, `tool` and `idle`; they add up to 1. Without spans all is idle.

    Raises:
      ValueError: a span does not fit.
    """
    return _shares(_disjoint_pieces(spans, slots), slots)


def mean_busy_slots(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean number of slots in a state between consecutive times.

    Args:
      start, end: [N] of that state, in seconds.
      edges: [B + 1] ascending.

    Returns:
      float64 [B].
    """

    def elapsed_time(since: np.ndarray) -> np.ndarray:
        """Sum over `since` of the time from it to each edge, where that is positive."""
        since = np.sort(since)
        count = np.searchsorted(since, edges)
        return count * edges - np.concatenate([[0.0], np.cumsum(since)])[count]

    return np.diff(elapsed_time(start) - elapsed_time(end)) / np.diff(edges)


def _bands(axes: Axes, pieces: Pieces, slots: int) -> None:
    """One band a slot, slot 0 on top; a gap between them where there is room for it."""
    half = 0.42 if slots <= 64 else 0.5
    axes.barh(np.arange(slots), pieces.seconds, height=2 * half, color=COLORS["idle"], lw=0)
    for i, state in enumerate(STATES):
        of = pieces.state == i
        x0, x1, y = pieces.start[of], pieces.end[of], pieces.slot[of]
        corners = [(x0, y - half), (x1, y - half), (x1, y + half), (x0, y + half)]
        boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
        # Snapped to pixels, a pause of a millisecond would look as long as a short prefill.
        drawn = PolyCollection(list(boxes), facecolors=COLORS[state], linewidths=0, snap=False)
        axes.add_collection(drawn, autolim=False)
    axes.set_ylim(slots - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.set_ylabel("slot", color=SOFT, fontsize=9.5)
    axes.tick_params(length=0, labelbottom=False)


def _legend(axes: Axes, shares: Mapping[str, float]) -> None:
    keys = [
        Patch(facecolor=COLORS[k], edgecolor=FAINT, linewidth=0.6, label=f"{LABELS[k]} {100 * share:.1f} %")
        for k, share in shares.items()
    ]
    axes.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(keys),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        borderaxespad=0.2,
        borderpad=0.2,
        handlelength=1.2,
        handleheight=0.9,
        columnspacing=1.8,
    )


def _curve(axes: Axes, pieces: Pieces, slots: int) -> None:
    """Draw the number of decoding slots, averaged over short intervals so that millisecond pauses do not blacken it."""
    decoding = pieces.state == STATES.index("decode")
    edges = np.linspace(0, pieces.seconds, CURVE_POINTS + 1)
    count = mean_busy_slots(pieces.start[decoding], pieces.end[decoding], edges)
    axes.stairs(count, edges, color=COLORS["decode"], fill=True, alpha=0.18, lw=0)
    axes.stairs(count, edges, color=COLORS["decode"], lw=0.9, baseline=None)
    axes.set_ylim(0, 1.04 * slots)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4, min_n_ticks=2))
    axes.grid(axis="y", color="#e6e8ec", lw=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel("decoding", color=SOFT, fontsize=9.5)
    axes.set_xlabel("seconds since the rollout began", color=SOFT, fontsize=9.5)


def plot_timeline(
    path: str | os.PathLike[str], spans: Iterable[Mapping[str, Any]], *, slots: int, title: str | None = None
) -> None:
    """Draw what the slots of an engine were used for during one rollout as a PNG, renamed into place.

    Args:
      path: where the picture goes.
      spans: records as `state_shares` takes them.
      slots: of the engine; each has a band.
      title: a heading over the whole picture.

    Raises:
      ValueError: a span does not fit.
    """
    pieces = _disjoint_pieces(spans, slots)
    bands_height = min(max(0.19 * slots, 1.2), 6.0)
    figure = new_figure(11.0, bands_height + 2.2, title)
    if pieces.seconds > 0:
        grid = figure.add_gridspec(2, 1, height_ratios=[bands_height, 1.1])
        bands = figure.add_subplot(grid[0])
        below = figure.add_subplot(grid[1], sharex=bands)
        _bands(bands, pieces, slots)
        _legend(bands, _shares(pieces, slots))
        _curve(below, pieces, slots)
        for axes in (bands, below):
            tidy(axes)
        bands.set_xlim(0, pieces.seconds)
    else:
        figure.text(0.5, 0.5, "no timeline was recorded", ha="center", va="center", color=SOFT)
    save(figure, path)
