"""Plots: figures are drawn without a display, and the same numbers give the same bytes."""

import math
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from dflash.plots import bars, inline_svg, intervals, lines, save

SERIES = {"loss": [(0.0, 2.0), (1.0, 1.5), (2.0, math.nan), (3.0, 1.0)], "cost $5": [(0.0, 1.0), (3.0, 2.0)]}


def test_a_figure_is_saved_as_png_and_svg_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    written = []
    for _ in range(2):
        save(lines(SERIES, title="Loss", xlabel="step", ylabel="nats"), tmp_path, "loss")
        written.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert written[0] == written[1]
    assert sorted(written[0]) == ["loss.png", "loss.svg"]
    assert written[0]["loss.png"].startswith(b"\x89PNG")
    assert b"cost $5" in written[0]["loss.svg"], "text stays text, and a dollar sign starts no formula"


def test_a_plot_without_data_is_an_empty_plot(tmp_path: Path) -> None:
    save(lines({"loss": []}, title="Loss", xlabel="step", ylabel="nats"), tmp_path, "loss")
    assert ">Loss</text>" in (tmp_path / "loss.svg").read_text()


def test_bars_and_intervals_take_gaps_and_no_data() -> None:
    points = {"chain": (1.5, (1.2, 1.9)), "8": (2.0, None), "64": (None, None)}
    for figure in (
        intervals(points, title="t", xlabel="x", ylabel="y"),
        intervals({}, title="t", xlabel="x", ylabel="y"),
        bars({"a": [0.5, 0.5], "b": [1.0, 0.0]}, labels=["0", "1"], title="t", xlabel="x", ylabel="y"),
        bars({}, labels=[], title="t", xlabel="x", ylabel="y"),
    ):
        assert inline_svg(figure, label="t").startswith("<svg role=")


def test_steps_and_slots_have_no_halves() -> None:
    for xs, whole in (((10, 14), True), ((0, 3), True), ((0.5, 3), False)):
        figure = lines({"a": [(float(x), 1.0) for x in xs]}, title="t", xlabel="x", ylabel="y")
        assert all(tick % 1 == 0 for tick in figure.axes[0].get_xticks()) is whole


def test_times_are_an_axis_of_dates() -> None:
    series = {"chain": [(datetime(2026, 1, day, tzinfo=UTC), 2.0) for day in (1, 20)]}
    assert "2026-Jan" in inline_svg(lines(series, title="t", xlabel="x", ylabel="y"), label="t")


def test_an_inline_plot_takes_the_pages_colour_and_width() -> None:
    svg = inline_svg(lines({'<a> & "b"': [(0, 1)], "c": [(0, 2)]}, title="t", xlabel="x", ylabel="y"), label='<"&')
    root = ElementTree.fromstring(svg)
    assert "width" not in root.attrib
    assert root.attrib["aria-label"] == '<"&'
    assert "currentColor" in svg
    assert "#ffffff" not in svg
