"""Colours, bare axes and saving of all pictures; no global state of pyplot."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from agentr1_jax import files

BLUE, ORANGE, GREEN, PURPLE = "#2f6fde", "#d9770b", "#1a8a5a", "#8a56c9"
INK, SOFT, FAINT, WASH = "#30353c", "#5b636e", "#c9ced6", "#eef0f3"


def new_figure(width: float, height: float, title: str | None) -> Figure:
    """An empty white figure, sizes in inches, with a heading over the whole picture if there is a title."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(width, height), dpi=130, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", color=INK)
    return figure


def tidy(axes: Axes) -> None:
    """Faint axes at the left and below, nothing else around."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=SOFT, labelsize=9)


def save(figure: Figure, path: files.PathLike) -> None:
    """Write the picture as a PNG; its folder is made if need be."""
    with files.atomic_write(path, "wb") as out:
        figure.savefig(out, format="png")
