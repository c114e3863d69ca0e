"""Progress of a step where people look: a bar on a terminal, a progress artifact in the UI, now and then a log line."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash import manifests

log = logging.getLogger("dflash.tasks")
UI_SECONDS = 1.0
LOG_SECONDS = 15.0


@contextmanager
def reporter(step: str) -> Iterator[manifests.Progress]:
    """A progress callback for the library, throttled: cheap to call for every batch.

    What takes less than a second, as shards can in thousands, asks nothing of the server.
    """
    artifact: UUID | None = None
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    line = bar.add_task(step, total=None, note="")
    shown = dict.fromkeys(("ui", "log"), time.monotonic())

    def report(done: float, total: float, note: str = "") -> None:
        nonlocal artifact
        now, percent = time.monotonic(), 100 * done / total if total else 100.0
        bar.update(line, completed=done, total=total, note=note)
        if now - shown["ui"] >= UI_SECONDS:
            shown["ui"] = now
            said = f"{step}: {note or 'running'}"
            if artifact:
                update_progress_artifact(artifact, progress=round(percent, 1), description=said)
            else:  # without a key: on its run's page, and not in the list of what people look for again
                created = create_progress_artifact(round(percent, 1), description=said)
                assert isinstance(created, UUID)  # not a coroutine: stages are synchronous
                artifact = created
        if now - shown["log"] >= LOG_SECONDS and not console.is_terminal:
            shown["log"] = now
            log.info("%s %.0f%% %s", step, percent, note)

    with bar:
        yield report
    if artifact:
        update_progress_artifact(artifact, progress=100.0, description=f"{step}: finished")
