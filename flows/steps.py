"""The steps of a run: each is called, timed and remembered, so that a run can say which were cached and which ran."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from prefect.client.schemas.objects import State
from prefect.tasks import Task
from pydantic import BaseModel

from dflash.config import Step
from dflash.manifests import load_manifest
from flows.runners import Call, CallAll, one_after_another


class StepRecord(BaseModel):
    """What became of one step."""

    stage: Step
    state: Literal["ran", "cached", "failed"]
    seconds: float
    fingerprint: str | None = None


class RunRecord(BaseModel):
    """What a run came to: the stable interface of `dflash run --json`, and of whoever started the flow."""

    recipe: str
    stages: list[StepRecord] = []
    acceptance_length: dict[str, float | None] = {}
    report: str | None = None
    drafter: str | None = None
    verdict: str | None = None
    reason: str | None = None
    retraining: str | None = None
    champion: str | None = None
    flow_run_id: str | None = None


CURRENT: ContextVar[RunRecord | None] = ContextVar("current_run", default=None)
"""Set by a caller in the same process that wants to see the steps of a run that fails, too."""


class Steps:
    """Calls tasks as steps of a run and keeps the record."""

    def __init__(self, record: RunRecord, *, refresh: Sequence[Step]) -> None:
        self.record = record
        self.refresh = refresh

    def run(self, step: Step, task: Task[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One task as one step: its result, or its exception."""
        return self.run_all(step, task, [args], **kwargs)[0]

    def run_all(
        self,
        step: Step,
        task: Task[..., Any],
        calls: Sequence[tuple[Any, ...]],
        *,
        call_all: CallAll = one_after_another,
        first: Call | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Several calls of one task as (part of) one step. All are tried before the first failure is raised.

        `call_all` decides where they run, and calls `first` before them.
        """
        if not calls:
            return []
        if step in self.refresh:
            task = task.with_options(refresh_cache=True)
        began, t0 = datetime.now(UTC), time.monotonic()
        with self.watch(step):
            states = call_all(task, calls, first=first, **kwargs, step=step)
            failed = [state for state in states if not state.is_completed()]
            if failed:
                failed[0].result()  # raises
        seconds = time.monotonic() - t0
        results = [state.result() for state in states]
        made = any(_was_made(state, result, began) for state, result in zip(states, results, strict=True))
        fingerprint = results[-1].key
        self._remember(
            StepRecord(stage=step, state="ran" if made else "cached", seconds=seconds, fingerprint=fingerprint)
        )
        return results

    @contextmanager
    def watch(self, step: Step) -> Iterator[None]:
        """Remembers the step as failed where what is done inside fails or is interrupted."""
        t0 = time.monotonic()
        try:
            yield
        except BaseException:
            self._remember(StepRecord(stage=step, state="failed", seconds=time.monotonic() - t0))
            raise

    def _remember(self, new: StepRecord) -> None:
        stages = self.record.stages
        if stages and stages[-1].stage == new.stage:  # the parts of a step count as one
            last = stages.pop()
            new.seconds += last.seconds
            if new.state == "cached":
                new.state = last.state
        new.seconds = round(new.seconds, 2)
        stages.append(new)


def _was_made(state: State[Any], result: Any, began: datetime) -> bool:
    """Cached by Prefect, or found on disk although Prefect's record was lost: both are work that was not done again."""
    return state.name != "Cached" and load_manifest(result.path).created >= began
