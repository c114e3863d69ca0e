"""Plots of a training from its rows of metrics. Knows the names of metrics and how to draw; no run and no model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dflash.plots import lines, save
from dflash.training.tracking import STEP

Rows = Sequence[dict[str, float]]


class Curves(NamedTuple):
    """A plot of metrics of these names, or beginning with what ends in a slash or @; lines are called by the rest."""

    name: str
    title: str
    ylabel: str
    metrics: tuple[str, ...]


CURVES = (
    Curves("loss", "Loss", "weighted mean per slot", ("train/loss",)),
    Curves(
        "acceptance_length", "Acceptance length, held-out rows", "tokens per round", ("validation/acceptance_length/",)
    ),
    Curves(
        "accuracy", "Accuracy of the label", "share of slots",
        ("train/accuracy", "train/top4_accuracy", "train/top8_accuracy"),
    ),
    Curves(
        "streak", "Leading slots with the label among the top 1, 4, 8", "slots per block",
        ("train/streak", "train/ddtree_streak4", "train/ddtree_streak8"),
    ),
    Curves("ddtree_accept", "Slots that a tree of the budget accepts", "slots per block", ("train/ddtree_accept@",)),
    Curves("acceptance_by_slot", "Acceptance of a slot, those before accepted", "share", ("train/acceptance/",)),
    Curves("learning_rate", "Learning rate", "", ("train/lr",)),
    Curves("noise", "Feature noise", "in units of each tap's RMS", ("train/noise_std",)),
    Curves("bucket_mix", "Length buckets", "share of tokens", ("batch/bucket/",)),
)  # fmt: skip
MAX_LINES = 16
MAX_POINTS = 500  # of a line: the plots are shown in a browser, and all rows are beside them


def _named(row: dict[str, float], metrics: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for metric in metrics:
        if metric[-1] in "/@":
            yield from (
                (name.removeprefix(metric), value)
                for name, value in row.items()
                if name.startswith(metric) and "/" not in name.removeprefix(metric)  # not those of parts of the data
            )
        elif metric in row:
            yield metric.rpartition("/")[2], row[metric]


def thinned(points: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Every n-th point and the last."""
    every = -(-len(points) // MAX_POINTS)
    return points[:-1:every] + points[-1:]


def draw_curves(rows: Rows, folder: Path) -> list[str]:
    """Write each plot that has data as PNG and SVG into the folder; returns their names."""
    drawn = []
    for curves in CURVES:
        series: dict[str, list[tuple[float, float | None]]] = {}
        for row in rows:
            for name, value in _named(row, curves.metrics):
                series.setdefault(name, []).append((row[STEP], value))
        if series:
            shown = {name: thinned(points) for name, points in list(series.items())[:MAX_LINES]}
            save(lines(shown, title=curves.title, xlabel="step", ylabel=curves.ylabel), folder, curves.name)
            drawn.append(curves.name)
    return drawn
