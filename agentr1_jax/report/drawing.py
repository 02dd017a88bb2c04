"""Colours, bare axes and saving of all pictures; no global state of pyplot."""

from __future__ import annotations

from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from agentr1_jax import files

BLUE, ORANGE, GREEN, PURPLE = "#2f6fde", "#d9770b", "#1a8a5a", "#8a56c9"
INK, SOFT, FAINT, WASH = "#30353c", "#5b636e", "#c9ced6", "#eef0f3"


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """An empty white figure, sizes in inches, with a heading over the whole picture if there is a title."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(width, height), dpi=130, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", color=INK)
    return figure


def tidy(axes: Axes, *, title: str = "", x_label: str = "", grid: Literal["x", "y", "both"] | None = "y") -> None:
    """Faint axes at the left and below, nothing else around; a heading, a label, and faint lines behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=SOFT, labelsize=9)
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, weight="bold", pad=9)
    axes.set_xlabel(x_label, color=SOFT, fontsize=9.5)
    if grid:
        axes.grid(axis=grid, color="#e6e8ec", lw=0.8)
        axes.set_axisbelow(True)


def save(figure: Figure, path: files.PathLike) -> None:
    """Write the picture as a PNG, which appears whole; its folder is made if need be."""
    with files.atomic_write(path, "wb") as out:
        figure.savefig(out, format="png")


def save_message(figure: Figure, path: files.PathLike, message: str) -> None:
    """Write a picture that says why there is nothing to see."""
    figure.text(0.5, 0.5, message, ha="center", va="center", color=SOFT)
    save(figure, path)
