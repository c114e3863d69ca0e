"""The file of metrics: one row a line, cut back to the checkpoint that training continues from."""

import json
from pathlib import Path

from dflash.training.tracking import STEP


def resume_rows(path: Path, *, step: int) -> list[dict[str, float]]:
    """Cut the file of metrics back to those of a checkpoint and return them; a half-written last line goes too."""
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n") or (row := json.loads(line))[STEP] > step:
            break
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def last_row(history: list[dict[str, float]], kind: str) -> dict[str, float]:
    """The newest row of "train" or "validation" metrics; {} where there is none."""
    rows = [row for row in history if any(name.startswith(f"{kind}/") and name != STEP for name in row)]
    return rows[-1] if rows else {}


def of_all_rows(row: dict[str, float]) -> dict[str, float]:
    """Without what is of one category or bucket."""
    return {name: value for name, value in row.items() if not {"category", "bucket"} & set(name.split("/"))}
