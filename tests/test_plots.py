"""Plots: figures are drawn without a display, and the same numbers give the same bytes."""

import math
from pathlib import Path

from dflash.plots import lines, save

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
