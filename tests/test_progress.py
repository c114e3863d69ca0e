"""Progress on a real server: what takes long is on the run's page, what is quick asks nothing of it."""

import pytest
from prefect import flow, runtime
from prefect.client.orchestration import get_client

from tasks import progress
from tasks.progress import reporter


@pytest.mark.usefixtures("prefect_server")
def test_progress_is_shown_of_what_takes_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    @flow(persist_result=False)
    def steps() -> str:
        for name, seconds in (("quick", 60), ("slow", 0)):
            monkeypatch.setattr(progress, "UI_SECONDS", seconds)
            with reporter(name) as report:
                for done in (1, 2, 3):
                    report(done, 3, f"part {done}")
        return str(runtime.flow_run.id)

    wanted = {"artifacts": {"flow_run_id": {"any_": [steps()]}}}
    with get_client(sync_client=True) as client:
        (shown,) = client.request("POST", "/artifacts/filter", json=wanted).json()
    assert (shown["type"], shown["key"], shown["data"]) == ("progress", None, 100)
    assert shown["description"] == "slow: finished"
