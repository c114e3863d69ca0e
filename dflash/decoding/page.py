"""A report's files: the record, markdown, plots and one HTML page that needs no network. Numbers come from the record.

report.json  report.md  report.html  responses.parquet  plots/<name>.png and .svg
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from dflash import plots
from dflash.bundled import ASSETS
from dflash.decoding.acceptance import CHAIN
from dflash.decoding.responses import Response, write_responses
from dflash.decoding.tables import WORST, best_tree, heading, headline, introduction, markdown, tables, title

History = Mapping[str, Sequence[tuple[datetime, float | None]]]
"""The acceptance length of each method over time, as `history.series` gives it."""


def figures(report: Mapping[str, Any], *, history: History) -> dict[str, plots.Figure]:
    """The plots for which there is data, by file name."""
    overall, methods = report["overall"], report["methods"]
    found = {
        "acceptance_length": plots.intervals(
            {
                method.removeprefix("tree"): (overall["acceptance_length"][method], overall["interval"][method])
                for method in methods
            },
            title="Acceptance length, with 95 % intervals",
            xlabel="tree budget",
            ylabel="acceptance length",
        ),
        "acceptance_by_slot": plots.lines(
            {
                heading(method): [(float(slot["slot"]), slot["share"]) for slot in slots]
                for method, slots in overall["conditional_acceptance"].items()
            },
            title="Acceptance of a slot once those before it were accepted",
            xlabel="slot",
            ylabel="share of rounds",
        ),
    }
    if rounds := overall["rounds"][CHAIN]:
        shown = [method for method in (CHAIN, best_tree(report)) if method]
        found["accepted"] = plots.bars(
            {
                heading(method): [count / overall["rounds"][method] for count in overall["histogram"][method]]
                for method in shown
            },
            labels=[str(count) for count in range(report["num_slots"] + 1)],
            title=f"Accepted tokens per round ({rounds:,} rounds of the chain)",
            xlabel="accepted",
            ylabel="share of rounds",
        )
    if history:
        found["history"] = history_figure(history)
    return found


def history_figure(history: History) -> plots.Figure:
    """The acceptance length of each method over time."""
    return plots.lines(
        {heading(method): list(points) for method, points in history.items()},
        title="Acceptance length of this verifier's drafters",
        xlabel="evaluated",
        ylabel="acceptance length",
    )


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(ASSETS)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("report.html.jinja")


def page(report: Mapping[str, Any], drawn: Mapping[str, plots.Figure]) -> str:
    """report.html: everything in one file, without scripts."""
    return _template().render(
        title=title(report),
        introduction=introduction(report),
        headline=headline(report),
        notes=report["notes"],
        plots=[plots.inline_svg(figure, label=figure.axes[0].get_title(loc="left")) for figure in drawn.values()],
        tables=tables(report),
        worst=report["worst"],
        worst_definition=WORST,
        heading=heading,
    )


def write_report(
    folder: Path, report: Mapping[str, Any], responses: Sequence[Response], *, history: History | None = None
) -> None:
    """Write all files of a report into an existing folder."""
    drawn = figures(report, history=history or {})
    (folder / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (folder / "report.md").write_text(markdown(report))
    (folder / "report.html").write_text(page(report, drawn))
    write_responses(folder, responses)
    (folder / "plots").mkdir()
    for name, figure in drawn.items():
        plots.save(figure, folder / "plots", name)
