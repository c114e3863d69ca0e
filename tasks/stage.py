"""What all stage tasks have in common: the decorator, and finding or making the artifact."""

import base64
import logging
from collections.abc import Callable, Sequence
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import CachePolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import Task, exponential_backoff

from dflash.corpus.records import TooManyDropped, conservation_table
from dflash.manifests import Artifact, Damaged, Key, Progress, find, home
from tasks.caching import CheckedJSON, locked
from tasks.progress import reporter

log = logging.getLogger("dflash.tasks")
GPU = "gpu"
"""The tag of tasks that load a model: a limit on it keeps them from sharing a GPU (docs/machines.md)."""
RETRIES = 2
BACKOFF_SECONDS = 5


def worth_retrying(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Bad input and our own mistakes stay; other failures (memory, disk, network, a killed process) may not."""
    del task, task_run
    try:
        state.result()
    except (ValueError, AssertionError):
        return False
    except Exception as error:
        log.warning("%s: %s; trying again", type(error).__name__, error)
    return True


def stage(
    key_of: Callable[..., Key], *, name: str, hours: float, run_name: str = "{step}", tags: Sequence[str] = ()
) -> Callable[[Callable[..., Artifact]], Task[..., Artifact]]:
    """Make a stage's task: cached by `key_of`, locked, retried with back-off and jitter, bounded in time."""
    policy: CachePolicy = locked(key_of)

    def decorate(function: Callable[..., Artifact]) -> Task[..., Artifact]:
        return task(
            name=name,
            task_run_name=run_name,
            tags=tags,  # only where a limit may be wanted: for each other set of tags the server is asked for one
            cache_policy=policy,
            persist_result=True,
            result_storage=home() / "records",
            result_serializer=CheckedJSON(),
            cache_result_in_memory=False,
            retries=RETRIES,
            retry_delay_seconds=exponential_backoff(backoff_factor=BACKOFF_SECONDS),
            retry_jitter_factor=0.5,
            retry_condition_fn=worth_retrying,
            timeout_seconds=hours * 3600,
        )(function)

    return decorate


def refreshing() -> bool:
    """Whether this task was asked to run although its artifact exists."""
    context = TaskRunContext.get()
    return bool(context and context.task.refresh_cache)


def find_or_make(step: str, key: Key, make: Callable[[Progress], Artifact], *, location: str = "") -> Artifact:
    """The artifact of the key: from disk if it is there and whole (a lost record costs nothing), else made now."""
    if not refreshing():
        try:
            found = find(key, location=location)
        except Damaged as damage:
            log.warning("%s: %s", step, damage)
            found = None
        if found:
            log.info("%s: %s was already there", step, found.key)
            return found
    with reporter(step) as progress:
        try:
            artifact = make(progress)
        except TooManyDropped as failure:
            table = f"{failure}\n\n{conservation_table(failure.summary)}"
            create_markdown_artifact(table, key=f"{step}-dropped", description=f"{step}: too many rows were dropped")
            raise
    assert artifact.key == str(key), f"{step} made {artifact.key} instead of {key}"
    log.info("%s: made %s", step, artifact.key)
    return artifact


def show(step: str, artifact: Artifact, markdown: str = "", *, part: str = "") -> None:
    """A markdown artifact on the run's page: the given text, else the artifact's summary as tables."""
    facts: dict[str, Any] = {"key": f"`{artifact.key}`", "folder": f"`{artifact.location}`"}
    tables = []
    for name, value in artifact.summary.items():
        if name == "sources":
            tables.append(f"### rows in = kept + dropped\n\n{conservation_table(artifact.summary)}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            tables.append(f"### {name}\n\n{_table(value)}")
        else:
            facts[name] = value
    lines = "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items())
    create_markdown_artifact(
        markdown or "\n\n".join([f"| {part or step} | |\n|---|---|\n{lines}", *tables]),
        key=f"{step}-{part}" if part else step,
        description=f"{step}: what came out" + (f" ({part})" if part else ""),
    )


def plots_of(artifact: Artifact) -> str:
    """Its plots, as images within a text: the browser asks no one for them."""
    return "\n\n".join(
        svg_image(path.stem, path.read_text()) for path in sorted((artifact.path / "plots").glob("*.svg"))
    )


def svg_image(name: str, svg: str) -> str:
    """Markdown of the image. Prefect's own image artifacts show, below it, its whole text as an address."""
    return f"![{name}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _table(records: list[dict[str, Any]]) -> str:
    header = f"| {' | '.join(records[0])} |\n|{'--:|' * len(records[0])}"
    return "\n".join([header, *(f"| {' | '.join(_cell(value) for value in record.values())} |" for record in records)])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{name}: {_cell(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
