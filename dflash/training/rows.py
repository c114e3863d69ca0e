"""The file of metrics: one row a line, cut back to the checkpoint that training continues from."""

import json
import logging
from pathlib import Path

from dflash.manifests import write_atomically
from dflash.training.tracking import STEP

log = logging.getLogger(__name__)


def resume_rows(path: Path, *, step: int, expected: int) -> list[dict[str, float]]:
    """Cut the file of metrics back to those of a checkpoint and return them; a half-written last line goes too.

    From a damaged line on all rows are lost, loudly, and so are those of the `expected` ones that are not there: the
    curves have a gap then, and nothing else depends on them.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows: list[dict[str, float]] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            later = row[STEP] > step
        except (ValueError, TypeError, KeyError) as error:
            log.error("%s:%d: no row of metrics (%s); it and those after it are dropped", path, number, error)
            break
        if later:
            break
        rows.append(row)
    if len(rows) < len(lines):
        write_atomically(path, b"".join(lines[: len(rows)]))
    if len(rows) < expected:
        log.warning(
            "%s: %d of the %d rows up to step %d are left; the curves have a gap, the drafter is the same",
            *(path, len(rows), expected, step),
        )
    return rows


def last_row(history: list[dict[str, float]], kind: str) -> dict[str, float]:
    """The newest row of "train" or "validation" metrics; {} where there is none."""
    rows = [row for row in history if any(name.startswith(f"{kind}/") and name != STEP for name in row)]
    return rows[-1] if rows else {}


def of_all_rows(row: dict[str, float]) -> dict[str, float]:
    """Without what is of one category or bucket."""
    return {name: value for name, value in row.items() if not {"category", "bucket"} & set(name.split("/"))}
