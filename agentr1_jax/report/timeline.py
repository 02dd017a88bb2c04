"""The timeline of one rollout as a picture: what every decode slot was used for, moment by moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from agentr1_jax import files
from agentr1_jax.report.drawing import BLUE, FAINT, INK, ORANGE, SOFT, WASH, new_figure, save, save_message, tidy

STATES = ("idle", "tool", "prefill", "decode")
"""A slot that is in two at once counts as the later of them."""
COLORS = {"idle": WASH, "tool": ORANGE, "prefill": INK, "decode": BLUE}
LABELS = {"idle": "idle", "tool": "waiting for tool", "prefill": "prefill", "decode": "decoding"}
COLUMNS, CURVE_POINTS = 3000, 300


def sample_states(spans: Sequence[Mapping[str, Any]], slots: int) -> tuple[Int[np.ndarray, "slots moments"], float]:
    """Return the state of each slot at `COLUMNS` equally spaced moments, as a place in `STATES`, and the total seconds.

    Args:
      spans: records `{"slot", "state": "decode" | "prefill" | "tool", "start", "end"}`, in seconds since the rollout
        began, in any order.
      slots: number of decode slots.
    """
    grid = np.zeros((slots, COLUMNS), np.int8)
    seconds = float(max((span["end"] for span in spans), default=0.0))
    for span in sorted(spans, key=lambda span: STATES.index(span["state"])):
        first, end = (round(span[key] / seconds * COLUMNS) if seconds else 0 for key in ("start", "end"))
        grid[span["slot"], first:end] = STATES.index(span["state"])
    return grid, seconds


def plot_timeline(
    path: files.PathLike, spans: Sequence[Mapping[str, Any]], *, slots: int, title: str | None = None
) -> None:
    """Draw what the slots of an engine were used for during one rollout as a PNG; `spans` as for `sample_states`."""
    grid, seconds = sample_states(spans, slots)
    bands_height = min(max(0.19 * slots, 1.2), 6.0)
    figure = new_figure(11.0, bands_height + 2.2, title)
    if not seconds:
        return save_message(figure, path, "no timeline was recorded")
    bands, below = figure.subplots(2, 1, sharex=True, height_ratios=[bands_height, 1.1])
    _draw_bands(bands, grid, seconds)
    _draw_decoding(below, grid, seconds)
    save(figure, path)


def _draw_bands(axes: Axes, grid: np.ndarray, seconds: float) -> None:
    """Draw a band for each slot, slot 0 on top, and the share of each state."""
    slots = len(grid)
    colors = np.array([to_rgb(COLORS[state]) for state in STATES])
    axes.imshow(colors[grid], aspect="auto", extent=(0, seconds, slots - 0.5, -0.5), interpolation="nearest")
    if slots <= 64:
        axes.hlines(np.arange(slots - 1) + 0.5, 0, seconds, color="white", lw=1.5)
    tidy(axes, grid=None)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.set_ylabel("slot", color=SOFT, fontsize=9.5)
    axes.tick_params(length=0, labelbottom=False)
    keys = [
        Patch(facecolor=COLORS[state], edgecolor=FAINT, lw=0.6, label=f"{LABELS[state]} {np.mean(grid == place):.1%}")
        for place, state in reversed(list(enumerate(STATES)))
    ]
    axes.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(keys), frameon=False, fontsize=9.5)


def _draw_decoding(axes: Axes, grid: np.ndarray, seconds: float) -> None:
    """Draw the number of decoding slots, averaged over short intervals so that millisecond pauses do not blacken it."""
    count = (grid == STATES.index("decode")).sum(axis=0).reshape(CURVE_POINTS, -1).mean(axis=1)
    edges = np.linspace(0, seconds, CURVE_POINTS + 1)
    axes.stairs(count, edges, color=COLORS["decode"], fill=True, alpha=0.18, lw=0)
    axes.stairs(count, edges, color=COLORS["decode"], lw=0.9, baseline=None)
    tidy(axes, x_label="seconds since the rollout began")
    axes.set_ylim(0, 1.04 * len(grid))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4, min_n_ticks=2))
    axes.set_ylabel("decoding", color=SOFT, fontsize=9.5)
