"""What a comparison came to: intervals over seeds, tables, a picture."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from agentr1_jax.report.drawing import BLUE, GREEN, INK, ORANGE, SOFT, new_figure, save, tidy
from agentr1_jax.report.statistics import Interval, mean_interval
from experiments.pod.simulation import Cell, Figures

COLORS = {"per_process": BLUE, "lockstep": ORANGE, "rounds": GREEN}
STYLES = {0: "-", 1: "--"}


@dataclasses.dataclass(frozen=True)
class Result:
    """A way on so many hosts: of each figure its mean over seeds and interval."""

    latency: str
    way: str
    staleness: int
    hosts: int
    figures: Mapping[str, Interval]

    @property
    def name(self) -> str:
        """As tables and the picture name it."""
        return f"{self.way}{', overlap' if self.staleness else ''}"


def results(cells: Sequence[Cell], found: Sequence[Figures]) -> list[Result]:
    """Cells of equal settings joined over their seeds, in order of first appearance."""
    joined: dict[tuple[str, str, int, int], list[Figures]] = {}
    for cell, one in zip(cells, found, strict=True):
        joined.setdefault((str(cell.latency), cell.way, cell.staleness, cell.hosts), []).append(one)
    return [
        Result(
            *key,
            {
                field.name: mean_interval(np.asarray([getattr(one, field.name) for one in ones], np.float64))
                for field in dataclasses.fields(Figures)
            },
        )
        for key, ones in joined.items()
    ]


def tables(all_results: Sequence[Result], strong: bool) -> list[tuple[str, list[dict[str, str]]]]:
    """Title and rows: throughput by hosts, then all figures at the most hosts; for each tool latency."""
    out = []
    for latency in dict.fromkeys(r.latency for r in all_results):
        of_latency = [r for r in all_results if r.latency == latency]
        lines: dict[str, dict[str, str]] = {}
        for r in of_latency:
            line = lines.setdefault(r.name, {"way": r.name})
            line[str(r.hosts)] = short(throughput(r, strong).mean)
        of = "in all" if strong else "and host"
        out.append((f"tools {latency}: trajectories a second {of}", list(lines.values())))
        most = max(r.hosts for r in of_latency)
        at_most = [r for r in of_latency if r.hosts == most]
        out.append((f"tools {latency}: {most} hosts", [details(r, at_most[0]) for r in at_most]))
    return out


def throughput(r: Result, strong: bool) -> Interval:
    """Trajectories a second: of all hosts where the batch stays as it is, else of one."""
    every = r.figures["trajectories_per_s"]
    return every if strong else Interval(*(x / r.hosts for x in every))


def details(r: Result, first: Result) -> dict[str, str]:
    """A row with all figures; throughput also in multiples of the first way's."""
    f = r.figures
    times = f["trajectories_per_s"].mean / first.figures["trajectories_per_s"].mean
    return {
        "way": r.name,
        "trajectories/s": spread(f["trajectories_per_s"]),
        "of the first": f"{times:.2f}",
        "decode tokens/s and host": short(f["decode_tokens_per_s"].mean),
        "occupancy": f"{f['occupancy'].mean:.2f}",
        "utilisation": f"{f['utilisation'].mean:.2f}",
        "seconds per update": spread(f["cycle_seconds"]),
        "stale tokens": f"{f['stale'].mean:.2f}",
    }


def short(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(interval: Interval) -> str:
    """A mean and its interval."""
    return f"{short(interval.mean)} [{short(interval.low)}, {short(interval.high)}]"


def to_json(all_results: Sequence[Result]) -> list[dict[str, Any]]:
    """All figures, each as mean and interval."""
    return [
        {
            **{key: getattr(r, key) for key in ("latency", "way", "staleness", "hosts")},
            **{name: list(interval) for name, interval in r.figures.items()},
        }
        for r in all_results
    ]


def plot(path: str | os.PathLike[str], all_results: Sequence[Result], *, strong: bool, title: str) -> None:
    """Draws throughput and utilisation over hosts, a column of panels for each tool latency."""
    latencies = list(dict.fromkeys(r.latency for r in all_results))
    figure = new_figure(max(4.6 * len(latencies) + 1.6, 7.0), 6.6, title)
    grid = figure.add_gridspec(2, len(latencies))
    for column, latency in enumerate(latencies):
        of_latency = [r for r in all_results if r.latency == latency]
        above, below = figure.add_subplot(grid[0, column]), figure.add_subplot(grid[1, column])
        heading = f"trajectories a second {'in all' if strong else 'and host'}"
        _lines(above, of_latency, {id(r): throughput(r, strong) for r in of_latency})
        _lines(below, of_latency, {id(r): r.figures["utilisation"] for r in of_latency})
        above.set_title(f"tools {latency}", loc="left", fontsize=10.5, color=INK, weight="bold")
        if strong:
            above.set_yscale("log")
        else:
            above.set_ylim(bottom=0)
        below.set_ylim(0, 1)
        below.set_xlabel("hosts", color=SOFT, fontsize=9.5)
        if not column:
            above.set_ylabel(heading, color=SOFT, fontsize=9.5)
            below.set_ylabel("utilisation", color=SOFT, fontsize=9.5)
        if column + 1 == len(latencies):
            above.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False, handlelength=3)
    save(figure, path)


def _lines(axes: Axes, of_latency: Sequence[Result], heights: Mapping[int, Interval]) -> None:
    """A line for each way over the number of hosts, in a band of its interval."""
    for name in dict.fromkeys(r.name for r in of_latency):
        line = [r for r in of_latency if r.name == name]
        hosts = [r.hosts for r in line]
        color, style = COLORS[line[0].way], STYLES[line[0].staleness]
        y = [heights[id(r)] for r in line]
        axes.plot(hosts, [i.mean for i in y], color=color, ls=style, lw=1.8, marker="o", ms=3, label=name)
        axes.fill_between(hosts, [i.low for i in y], [i.high for i in y], color=color, alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    ticks = sorted({r.hosts for r in of_latency})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color="#e6e8ec", lw=0.8)
    axes.set_axisbelow(True)
    tidy(axes)
