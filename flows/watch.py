"""What is noted of every run while it is active, as hooks of its flow: where its process is, and that it uses data.

@flow(on_running=[begin], on_completion=[end], on_failure=[end])
"""

import logging
import os
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from filelock import FileLock
from prefect import Flow, State
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event
from prefect.logging.loggers import flow_run_logger

from dflash import housekeeping
from dflash.manifests import HOST
from flows.reaper import note_of

log = logging.getLogger("dflash.flows")
QUOTA_EVENT = "dflash.quota.exceeded"
TAGS: ContextVar[Sequence[str]] = ContextVar("tags_of_the_run", default=())
"""Of a run that this process starts by itself; a deployment's run has them already. With Prefect's own `tags` its tasks
would have them too, where each set is asked about at the server, and `gpu` is a limit."""
_active: dict[UUID, FileLock] = {}


def begin(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Note process and tags (a worker does it for its own), protect what the run uses, say when the disk is full."""
    del state
    library = logging.getLogger("dflash")
    if library.level == logging.NOTSET:  # Prefect gives it a handler, but no level, and then only warnings pass
        library.setLevel(logging.INFO)
    if flow_run.id not in _active:
        _active[flow_run.id] = housekeeping.protect_run(str(flow_run.id))
    if os.environ.get("PREFECT__FLOW_RUN_ID") != str(flow_run.id) and (note := note_of(os.getpid())):
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, infrastructure_pid=note, tags=list(TAGS.get()) or None)
    used, quota = housekeeping.usage_and_quota()
    if quota is not None and used > quota:
        for place in (log, flow_run_logger(flow_run, flow)):  # the terminal; the run's page, as a hook is no part of it
            place.warning("%s", housekeeping.over_quota(used, quota))
        emit_event(
            QUOTA_EVENT,
            resource={"prefect.resource.id": f"dflash.data.{HOST}", "prefect.resource.name": f"data of {HOST}"},
            payload={"bytes": used, "quota_bytes": quota},
        )


def end(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """The run uses nothing any more. Where its process dies instead, the operating system says so."""
    del flow, state
    if lock := _active.pop(flow_run.id, None):
        lock.release()
