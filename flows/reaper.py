"""What has to be in order before a worker starts: its pool, and the runs that a crash left "Running" for ever.

    python -m flows.reaper POOL

A run whose process is gone is marked Crashed here; one that lost only its worker is told to save and end first, as
nobody could cancel it any more. One that dies later, or on another machine, is marked by an automation of the server
that waits for its heartbeats. The next run of the same parameters continues where it was.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from dflash.manifests import HOST
from flows.drain import ACTIVE

PAGE = 100
SECONDS_TO_SAVE = 90
SILENT_AFTER = timedelta(seconds=120)  # four heartbeats missed; a server that is started again may miss two
AUTOMATION = "dflash: silent runs are marked Crashed"
ACTIVE_NOW = {"type": {"any_": [state.value for state in ACTIVE]}}


def open_pool(client: SyncPrefectClient, name: str) -> None:
    """Make the pool where it is missing, and open it where stopping paused it; what else was set there stays."""
    try:
        if client.read_work_pool(name).is_paused:
            client.update_work_pool(name, WorkPoolUpdate(is_paused=False))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))


def reap(client: SyncPrefectClient, pool: str) -> list[str]:
    """End runs of this machine without a worker, mark those whose process is gone; returns the names of the latter."""
    _end([pid for run in _active(client) if (pid := _worker_pid(run)) and _is_orphan(pid, run)])
    workers = client.read_workers_for_work_pool(pool)
    elsewhere = any(worker.name != HOST and worker.status == WorkerStatus.ONLINE for worker in workers)
    gone = [run for run in _active(client) if _is_gone(run, pool=pool, elsewhere=elsewhere)]
    for run in gone:
        assert run.state
        message = "its process was gone; a new run of the same parameters continues"
        wanted = run.state.type == StateType.CANCELLING  # by a person, or by stopping
        client.set_flow_run_state(run.id, Cancelled(message=message) if wanted else Crashed(message=message))
        tasks = client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run.id]}}),
            task_run_filter=TaskRunFilter.model_validate({"state": ACTIVE_NOW}),
        )
        for task in tasks:  # or the graph of the run has no end
            client.set_task_run_state(task.id, Crashed(message=message), force=True)
    return [run.name for run in gone]


def _active(client: SyncPrefectClient) -> list[FlowRun]:
    found: list[FlowRun] = []
    states = FlowRunFilter.model_validate({"state": ACTIVE_NOW})
    while page := client.read_flow_runs(flow_run_filter=states, limit=PAGE, offset=len(found)):
        found += page
    return found


def _is_gone(run: FlowRun, *, pool: str, elsewhere: bool) -> bool:
    """Whether its process was on this machine and is not there any more. False where that cannot be known.

    `elsewhere`: other machines have workers of this pool, and a worker does not say where its process is.
    """
    noted = (run.infrastructure_pid or "").split(":")
    if len(noted) == 3:  # by `note_of`
        host, number, began = noted
        return host == HOST and process_start(int(number)) != began
    if run.work_pool_name != pool or elsewhere:
        return False
    pid = _worker_pid(run)
    return pid is None or not _is_process_of(pid, run)


def _worker_pid(run: FlowRun) -> int | None:
    """The number that a worker has noted, on whatever machine that is."""
    noted = run.infrastructure_pid or ""
    return int(noted) if noted.isdigit() else None


def _is_orphan(pid: int, run: FlowRun) -> bool:
    """Whether the run goes on although its worker, the parent of its process, is gone."""
    if not _is_process_of(pid, run):
        return False
    try:
        parent = _stat(pid)[1]
        return b"worker\0start" not in Path(f"/proc/{parent}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


def _end(pids: list[int]) -> None:
    """Told to stop, a run saves its work."""
    began = {pid: process_start(pid) for pid in pids}
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_SAVE), (signal.SIGKILL, 10)):
        left = [pid for pid in pids if began[pid] and process_start(pid) == began[pid]]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while any(process_start(pid) == began[pid] for pid in left) and time.monotonic() < deadline:
            time.sleep(0.2)


def _is_process_of(pid: int, run: FlowRun) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone; another user's, so another process
        return False
    return f"PREFECT__FLOW_RUN_ID={run.id}".encode() in environment.split(b"\0")


def note_of(pid: int) -> str | None:
    """What names a process for good, on any machine: numbers of processes are given again. None where there is none."""
    began = process_start(pid)
    return f"{HOST}:{pid}:{began}" if began else None


def process_start(pid: int) -> str | None:
    """When a process started, in clock ticks since the machine did. None where there is none, or only its remains."""
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def _stat(pid: int) -> list[str]:
    """State, parent, …: proc(5) from its third field on; the second may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def upsert(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Put an automation on the server; one of that name is replaced, and stays switched off where it was."""
    found = client.read_automations_by_name(automation.name)
    for extra in found[1:]:
        client.delete_automation(extra.id)
    if found:
        client.update_automation(found[0].id, automation.model_copy(update={"enabled": found[0].enabled}))
    else:
        client.create_automation(automation)


def watch_heartbeats(client: SyncPrefectClient, *, silent_after: timedelta = SILENT_AFTER) -> None:
    """Have the server mark runs Crashed that are silent for so long; an automation of that name is replaced."""
    automation = AutomationCore(
        name=AUTOMATION,
        description="Runs whose process, worker or machine died. Written by dflash up.",
        trigger=EventTrigger(
            type="event",
            posture=Posture.Proactive,
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=silent_after,
        ),
        actions=[
            ChangeFlowRunState(
                type="change-flow-run-state",
                state=StateType.CRASHED,
                message="no heartbeat; a new run of the same parameters continues",
            )
        ],
    )
    upsert(client, automation)


def main() -> int:
    (pool,) = sys.argv[1:]
    with get_client(sync_client=True) as client:
        open_pool(client, pool)
        for name in reap(client, pool):
            print(f"its process was gone: {name}", flush=True)
        watch_heartbeats(client)
    return 0


if __name__ == "__main__":
    sys.exit(main())
