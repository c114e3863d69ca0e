"""Plots as PNG and SVG: the one home of matplotlib. Series of numbers in, figures out: knows no report and no run.

Figures are drawn without a display, and the same numbers give the same bytes. A value of None or NaN is a gap.
"""

import html
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import RcKeyType

__all__ = ["Figure", "bars", "inline_svg", "intervals", "lines", "save"]

INK = "#1a1c1f"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f", "#8b5cf6")  # Okabe-Ito and two
MARKED = 40  # points of a line up to which each has a dot
STYLE: dict[RcKeyType, Any] = {
    "date.converter": "concise",
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
    figure = Figure(figsize=(5.0, 3.4), layout="constrained")  # its letters are legible on a phone
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_axisbelow(True)
    return figure, axes


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _value(value: float | None) -> float:
    return math.nan if value is None else value


def _legend(figure: Figure, names: Collection[str]) -> None:
    """Below the plot, where it hides nothing, and only where there is a choice."""
    if len(names) > 1:
        figure.legend(loc="outside lower center", ncols=min(4, len(names)), fontsize="small")


@matplotlib.rc_context(STYLE)
def lines(
    series: Mapping[str, Sequence[tuple[float, float | None]]] | Mapping[str, Sequence[tuple[datetime, float | None]]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
) -> Figure:
    """A line per series of (x, y) points; x are numbers or times."""
    figure, axes = _figure(title=title, xlabel=xlabel, ylabel=ylabel)
    for number, (name, points) in enumerate(series.items()):
        axes.plot(
            [x for x, _ in points],  # type: ignore[arg-type]  # its stubs know no times, its converters do
            [_value(y) for _, y in points],
            color=_colour(number),
            marker="o" if len(points) <= MARKED else "",
            markersize=3.5,
            linewidth=1.5,
            label=name,
        )
    if not any(isinstance(x, datetime) or x % 1 for points in series.values() for x, _ in points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 10.5
    _legend(figure, series)
    return figure


@matplotlib.rc_context(STYLE)
def bars(
    series: Mapping[str, Sequence[float]], *, labels: Sequence[str], title: str, xlabel: str, ylabel: str
) -> Figure:
    """For each label a bar per series, side by side."""
    figure, axes = _figure(title=title, xlabel=xlabel, ylabel=ylabel)
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        at = [i + (number - (len(series) - 1) / 2) * width for i in range(len(labels))]
        axes.bar(at, values, width=width, color=_colour(number), label=name)
    axes.set_xticks(range(len(labels)), labels)
    _legend(figure, series)
    return figure


@matplotlib.rc_context(STYLE)
def intervals(
    points: Mapping[str, tuple[float | None, Sequence[float] | None]], *, title: str, xlabel: str, ylabel: str
) -> Figure:
    """A value per label with its (low, high), where there is one."""
    figure, axes = _figure(title=title, xlabel=xlabel, ylabel=ylabel)
    values = [_value(value) for value, _ in points.values()]
    axes.plot(range(len(values)), values, color=_colour(0), marker="o", markersize=4, linewidth=1.5)
    for at, (_, interval) in enumerate(points.values()):
        if interval:
            low, high = interval
            axes.vlines(at, low, high, color=_colour(0), linewidth=1.5)
    axes.set_xticks(range(len(points)), list(points))
    return figure


@matplotlib.rc_context(STYLE)
def save(figure: Figure, folder: Path, name: str) -> None:
    """Write the figure as name.png and name.svg into the folder, on white."""
    figure.savefig(folder / f"{name}.png", dpi=200, facecolor="white")
    figure.savefig(folder / f"{name}.svg", facecolor="white", metadata={"Date": None})


@matplotlib.rc_context(STYLE)
def inline_svg(figure: Figure, *, label: str) -> str:
    """The figure as an element of an HTML page: on no ground, in the page's own colour of text, of any width."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    opening = f'<svg role="img" aria-label="{html.escape(label)}" '
    return re.sub(r'<svg (.*?)width="[^"]*" height="[^"]*" ', lambda match: opening + match[1], svg, count=1)
