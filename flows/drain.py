"""Cancel the active runs of a work pool and wait for them: a process worker that is just stopped leaves them "Running".

The pool is paused, so that runs which wait for these do not start instead; `flows/reaper.py` opens it again.

python -m flows.drain POOL SECONDS
"""

import sys
import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Cancelling

ACTIVE = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]


def drain(pool: str, *, seconds: float) -> int:
    """Cancel what runs and wait at most `seconds`; returns how many runs were still active at the end."""
    with get_client(sync_client=True) as client:
        client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
        in_pool = WorkPoolFilter.model_validate({"name": {"any_": [pool]}})

        def active() -> list[tuple[str, object]]:
            states = FlowRunFilter.model_validate({"state": {"type": {"any_": [s.value for s in ACTIVE]}}})
            return [
                (run.name, run.id) for run in client.read_flow_runs(flow_run_filter=states, work_pool_filter=in_pool)
            ]

        for name, run_id in active():
            print(f"cancelling {name}", flush=True)
            client.set_flow_run_state(run_id, Cancelling(message="the stack was stopped"))  # type: ignore[arg-type]
        deadline = time.monotonic() + seconds
        while (left := active()) and time.monotonic() < deadline:
            time.sleep(1)
        for _, run_id in left:
            client.set_flow_run_state(run_id, Cancelled(message="did not stop in time"), force=True)  # type: ignore[arg-type]
        return len(left)


if __name__ == "__main__":
    sys.exit(1 if drain(sys.argv[1], seconds=float(sys.argv[2])) else 0)
