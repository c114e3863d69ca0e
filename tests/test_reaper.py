"""Runs whose process is gone: found by whoever starts a worker, else by the server, which misses their heartbeats."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling, Pending, Running, Scheduled, State

from dflash import housekeeping
from dflash.manifests import HOST
from flows import reaper, watch
from tests.test_interruption import Command

pytestmark = pytest.mark.timeout(600)


@flow
def nothing() -> None:
    pass


@pytest.fixture(scope="module")
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def pool(client: SyncPrefectClient) -> str:
    """A pool of its own, with a deployment of that name."""
    name = f"pool-{uuid4()}"
    reaper.open_pool(client, name)
    client.create_deployment(client.create_flow(nothing), name, work_pool_name=name)
    return name


def start(client: SyncPrefectClient, pool: str, state: State, process: str | None) -> UUID:
    deployment = client.read_deployment_by_name(f"nothing/{pool}")
    run = client.create_flow_run_from_deployment(deployment.id, state=Scheduled())
    client.set_flow_run_state(run.id, state, force=True)
    client.update_flow_run(run.id, infrastructure_pid=process)
    return run.id


def state_of(client: SyncPrefectClient, run: UUID) -> StateType:
    state = client.read_flow_run(run).state
    assert state
    return state.type


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def ended() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (Running(), StateType.CRASHED),
        (Pending(), StateType.CRASHED),
        (Cancelling(), StateType.CANCELLED),
        (Scheduled(), StateType.SCHEDULED),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_run_whose_process_is_gone_is_over(
    client: SyncPrefectClient, pool: str, ended: int, state: State, expected: StateType
) -> None:
    for process in (None, str(ended), f"{HOST}:{ended}:1234"):
        run = start(client, pool, state, process)
        reaper.reap(client, pool)
        assert state_of(client, run) == expected


def test_a_number_that_another_process_has_now_is_not_the_runs(
    client: SyncPrefectClient, pool: str, process: subprocess.Popen[bytes]
) -> None:
    began = reaper.process_start(process.pid)
    assert began
    runs = [
        start(client, pool, Running(), name) for name in (str(process.pid), f"{HOST}:{process.pid}:{int(began) - 1}")
    ]
    reaper.reap(client, pool)
    assert [state_of(client, run) for run in runs] == [StateType.CRASHED] * 2


def test_runs_that_are_alive_or_may_be_elsewhere_go_on(
    client: SyncPrefectClient, pool: str, process: subprocess.Popen[bytes], ended: int
) -> None:
    own = start(client, pool, Running(), None)
    worker, child = worker_with_child(own)
    client.update_flow_run(own, infrastructure_pid=str(child))
    noted = start(client, pool, Running(), reaper.note_of(process.pid))
    remote = start(client, pool, Running(), f"another-host:{ended}:1234")
    other_pool = client.create_flow_run(nothing, state=Running()).id  # of no pool and without a note
    reaper.reap(client, pool)
    assert [state_of(client, run) for run in (own, noted, remote, other_pool)] == [StateType.RUNNING] * 4

    worker.kill()
    process.kill()  # its remains have a number still
    reaper.reap(client, pool)
    assert [state_of(client, run) for run in (own, noted)] == [StateType.CRASHED] * 2
    assert reaper.process_start(child) is None  # which nobody could have cancelled any more
    worker.communicate()


def worker_with_child(run: UUID) -> tuple[subprocess.Popen[str], int]:
    """A process that looks like a worker, and the number of one it started for the run."""
    code = f"import os, subprocess; os.environ['PREFECT__FLOW_RUN_ID'] = '{run}'\n"
    code += "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
    worker = subprocess.Popen([sys.executable, "-c", code, "worker", "start"], stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    return worker, int(worker.stdout.readline())


def test_where_another_machine_works_for_the_pool_its_runs_are_left_to_their_heartbeats(
    client: SyncPrefectClient, pool: str, ended: int
) -> None:
    client.send_worker_heartbeat(pool, "another-host", heartbeat_interval_seconds=30)
    theirs, ours = (start(client, pool, Running(), name) for name in (str(ended), f"{HOST}:{ended}:1234"))
    reaped = reaper.reap(client, pool)
    assert client.read_flow_run(ours).name in reaped
    assert client.read_flow_run(theirs).name not in reaped
    assert state_of(client, theirs) == StateType.RUNNING
    assert state_of(client, ours) == StateType.CRASHED


def test_its_tasks_are_over_too(client: SyncPrefectClient, pool: str, ended: int) -> None:
    from prefect import task

    run = start(client, pool, Running(), str(ended))
    shard = client.create_task_run(task(nothing.fn), run, dynamic_key="0", state=Running())
    reaper.reap(client, pool)
    state = client.read_task_run(shard.id).state
    assert state
    assert state.type == StateType.CRASHED


def test_a_pool_that_stopping_paused_is_open_again_and_what_was_set_there_stays(
    client: SyncPrefectClient, pool: str
) -> None:
    client.update_work_pool(pool, WorkPoolUpdate(is_paused=True, concurrency_limit=3))
    reaper.open_pool(client, pool)
    found = client.read_work_pool(pool)
    assert (found.is_paused, found.concurrency_limit) == (False, 3)


def test_a_killed_run_that_no_worker_watches_is_marked_crashed_when_its_heart_stops(
    client: SyncPrefectClient, prefect_server: str, tmp_path: Path
) -> None:
    reaper.watch_heartbeats(client)
    silence = timedelta(seconds=45)
    reaper.watch_heartbeats(client, silent_after=silence)  # replaces the other
    (automation,) = client.read_automations_by_name(reaper.AUTOMATION)
    assert automation.trigger.within == silence  # type: ignore[union-attr]
    command = Command(tmp_path, prefect_server, **{"training.max_steps": 3000, "training.epochs": 3000})
    began = time.time()
    command.kill_when("in_progress/training-*/*")
    deadline = time.monotonic() + 150
    while not (crashed := crashed_since(client, began)):
        assert time.monotonic() < deadline
        time.sleep(2)
    assert "heartbeat" in crashed[0]


def crashed_since(client: SyncPrefectClient, began: float) -> list[str]:
    runs = [run for run in client.read_flow_runs() if run.created and run.created.timestamp() >= began]
    return [run.state.message or "" for run in runs if run.state and run.state.is_crashed()]


def test_a_run_of_this_process_is_noted_and_what_it_uses_is_protected_while_it_lasts(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_QUOTA_GB", "0")
    seen: dict[str, object] = {}

    @flow(on_running=[watch.begin], on_completion=[watch.end], on_failure=[watch.end])
    def watched() -> None:
        from prefect import runtime

        seen["note"] = client.read_flow_run(runtime.flow_run.id).infrastructure_pid
        seen["since"] = active_since()

    watched()
    assert seen["note"] == reaper.note_of(os.getpid())
    assert seen["since"] != "inf"
    assert active_since() == "inf"

    deadline = time.monotonic() + 60  # and more data than the quota is an event, which an automation may wait for
    body = {"filter": {"event": {"name": [watch.QUOTA_EVENT]}}}
    while not (events := client.request("POST", "/events/filter", json=body).json()["events"]):
        assert time.monotonic() < deadline
        time.sleep(1)
    assert events[0]["payload"]["quota_bytes"] == 0


def active_since() -> str:
    """As another process sees it."""
    code = "from dflash.housekeeping import oldest_active_run; print(oldest_active_run())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_run_that_fails_protects_nothing_any_more(client: SyncPrefectClient) -> None:
    @flow(on_running=[watch.begin], on_completion=[watch.end], on_failure=[watch.end])
    def failing() -> None:
        raise RuntimeError("injected fault")

    with pytest.raises(RuntimeError, match="injected fault"):
        failing()
    assert housekeeping.oldest_active_run() == float("inf")
