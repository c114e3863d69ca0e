"""Plots as PNG and SVG: the one home of matplotlib. Series of numbers in, figures out: knows no report and no run.

Figures are drawn without a display, and the same numbers give the same bytes. A value of None or NaN is a gap.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

INK = "#1a1c1f"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f", "#8b5cf6")  # Okabe-Ito and two
MARKED = 40  # points of a line up to which each has a dot
STYLE: dict[RcKeyType, Any] = {
    "svg.hashsalt": "dflash",  # ids within an SVG are random without it
    "svg.fonttype": "none",  # text stays text: small, searchable, and of the reader's own font
    "text.parse_math": False,  # names are not formulas, even with a dollar sign
    "font.size": 10,
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#8a8f98",
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def _figure(*, title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_axisbelow(True)
    return figure, axes


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _legend(axes: Axes, names: Sequence[str]) -> None:
    if len(names) > 1:
        axes.legend(ncols=2 if len(names) > 4 else 1, fontsize="small")


@matplotlib.rc_context(STYLE)
def lines(
    series: Mapping[str, Sequence[tuple[float, float | None]]], *, title: str, xlabel: str, ylabel: str
) -> Figure:
    """A line per series of (x, y) points, with a legend where there is more than one."""
    figure, axes = _figure(title=title, xlabel=xlabel, ylabel=ylabel)
    for number, (name, points) in enumerate(series.items()):
        axes.plot(
            [x for x, _ in points],
            [float("nan") if y is None else y for _, y in points],
            color=_colour(number),
            marker="o" if len(points) <= MARKED else "",
            markersize=3.5,
            linewidth=1.5,
            label=name,
        )
    _legend(axes, list(series))
    return figure


@matplotlib.rc_context(STYLE)
def save(figure: Figure, folder: Path, name: str) -> None:
    """Write the figure as name.png and name.svg into the folder, on white."""
    figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
    figure.savefig(folder / f"{name}.svg", facecolor="white", metadata={"Date": None})
