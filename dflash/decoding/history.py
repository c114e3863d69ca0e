"""The history of a verifier's evaluations: one row per report, in one Parquet file. Knows no model and no table.

$DFLASH_HOME/history/<verifier identity>.parquet
"""

import io
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
from filelock import FileLock

from dflash.manifests import Manifest, home, write_atomically
from dflash.parquet import read_parquet

COLUMNS = pl.Schema(
    {
        "report": pl.String(),  # the key of its artifact
        "created": pl.Datetime("us", "UTC"),
        "schema_version": pl.Int64(),
        "drafter": pl.String(),
        "hidden_states": pl.List(pl.String()),
        "dtype": pl.String(),
        "num_slots": pl.Int64(),
        "responses": pl.Int64(),
        "tokens": pl.Int64(),
        "methods": pl.List(
            pl.Struct(
                {
                    "method": pl.String(),
                    "acceptance_length": pl.Float64(),
                    "low": pl.Float64(),
                    "high": pl.Float64(),
                    "rounds": pl.Int64(),
                }
            )
        ),
    }
)


def history_path(verifier: str) -> Path:
    """The file of the verifier of that identity."""
    return home() / "history" / f"{verifier}.parquet"


def read_history(verifier: str) -> pl.DataFrame:
    """The rows, oldest first; none where there was no evaluation. Raises ValueError where the file is damaged."""
    path = history_path(verifier)
    if not path.exists():
        return pl.DataFrame(schema=COLUMNS)
    try:
        frame = read_parquet(path, COLUMNS)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: the history is {error} and was left as it is; move it away, and reports that are appended "
            "(again) start a new one"
        ) from None
    return frame.sort("created", "report")


def append(report: Mapping[str, Any], *, key: str, created: datetime) -> bool:
    """Add the row of a report; False where the history has one of that key already, which stays as it is."""
    overall, verifier = report["overall"], report["verifier"]["identity"]
    row = {
        "report": key,
        "created": created,
        "schema_version": report["schema_version"],
        "drafter": report["drafter"],
        "hidden_states": list(report["hidden_states"].values()),
        "dtype": report["verifier"]["dtype"],
        "num_slots": report["num_slots"],
        "responses": overall["responses"],
        "tokens": overall["tokens"],
        "methods": [
            {
                "method": method,
                "acceptance_length": overall["acceptance_length"][method],
                "low": (overall["interval"][method] or [None, None])[0],
                "high": (overall["interval"][method] or [None, None])[1],
                "rounds": overall["rounds"][method],
            }
            for method in report["methods"]
        ],
    }
    path = history_path(verifier)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        frame = read_history(verifier)
        if key in frame["report"]:
            return False
        content = io.BytesIO()
        pl.concat([frame, pl.DataFrame([row], schema=COLUMNS)]).sort("created", "report").write_parquet(content)
        write_atomically(path, content.getvalue())
    return True


def reports_on(drafter: Manifest, known: Iterable[Manifest]) -> list[Manifest]:
    """The reports on a drafter among the artifacts that are known, those that speak for it first: of the history, which
    those on new prompts, of the check for drift, are not in; of either kind the newest first.
    """
    found = [one for one in known if one.stage == "evaluation" and one.inputs["drafter"] == drafter.identity]
    noted = set(read_history(drafter.summary["verifier"]["identity"])["report"]) if found else set()
    return sorted(found, key=lambda report: (report.key in noted, report.created), reverse=True)


def series(history: pl.DataFrame, *, like: Mapping[str, Any]) -> dict[str, list[tuple[datetime, float | None]]]:
    """The acceptance length of each method over time, for a plot: of the evaluations that can stand beside a report.

    Those are of its definitions and dtype, on as many responses and tokens: whichever taps are stored, the same ones.
    """
    same = {
        "schema_version": like["schema_version"],
        "dtype": like["verifier"]["dtype"],
        "responses": like["overall"]["responses"],
        "tokens": like["overall"]["tokens"],
    }
    found: dict[str, list[tuple[datetime, float | None]]] = {}
    for row in history.filter(**same).iter_rows(named=True):
        for part in row["methods"]:
            found.setdefault(part["method"], []).append((row["created"], part["acceptance_length"]))
    return found
