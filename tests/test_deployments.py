"""The deployments of prefect.yaml: each fits its flow, is complete, and is registered without a question asked."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.sorting import FlowRunSort
from prefect.flows import load_flow_from_entrypoint

from dflash.config import Recipe
from flows import recipes
from flows.deployments import register
from flows.reaper import open_pool
from tasks.stage import GPU

PROJECT = recipes.prefect_yaml().parent
KNOWN = recipes.registered(recipes.prefect_yaml())
FLOWS = ["pipeline", "prepare-data", "train-drafter", "evaluate", "nightly-evaluation"]
PUBLISHED = "evaluate/evaluate-published"  # of no recipe: nothing is trained


def test_every_flow_is_there_for_every_recipe() -> None:
    names = recipes.deployments(recipes.prefect_yaml())
    assert set(KNOWN) - {PUBLISHED} == {f"{flow}/{name}" for flow in FLOWS for name in names}


@pytest.mark.parametrize("name", KNOWN)
def test_each_deployment_fits_its_flow_and_says_what_it_is(name: str) -> None:
    deployment = KNOWN[name]
    flow: Flow[Any, Any] = load_flow_from_entrypoint(deployment["entrypoint"])
    assert flow.name == name.partition("/")[0]
    flow.validate_parameters(deployment["parameters"])
    start = recipes.load(name)
    assert start.recipe == recipes.load_recipe(deployment["name"]), "a name says which, without its flow too"
    assert set(Recipe.model_fields) | {"recipe", "refresh"} | set(recipes.OWN_PARAMETERS.get(flow.name, {})) == set(
        flow.parameters.properties
    )
    for parameter in flow.parameters.properties.values():
        assert parameter.get("description")
    assert deployment["description"].endswith(".")
    assert deployment["work_pool"] == {"name": "local"}
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    verifiers = {KNOWN[f"{flow}/{deployment['name']}"]["tags"][1] for flow in FLOWS if name != PUBLISHED}
    assert deployment["tags"][0] == deployment["parameters"]["recipe"] == deployment["name"]
    assert verifiers <= {deployment["tags"][1]}
    assert deployment["tags"][2] in ("pipeline", "data", "training", "evaluation")
    assert deployment["tags"][3] in ("cpu", "gpu")
    for schedule in deployment.get("schedules", []):
        assert schedule["timezone"]
        assert schedule.get("active", True) == (deployment["tags"][3] == "cpu")
    assert bool(deployment.get("schedules")) == (flow.name == "nightly-evaluation")


@pytest.fixture(scope="module")
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        open_pool(client, "local")
        yield client


def registered(client: SyncPrefectClient) -> dict[str, dict[str, Any]]:
    """What the server knows of each deployment, times of change and such left out."""
    volatile = {
        "version",
        "created",
        "updated",
        "updated_by",
        "created_by",
        "last_polled",
        "version_id",
        "version_info",
        "labels",
    }
    found = {name: client.read_deployment_by_name(name).model_dump(mode="json", exclude=volatile) for name in KNOWN}
    for deployment in found.values():
        deployment["schedules"] = [(one["slug"], one["schedule"], one["active"]) for one in deployment["schedules"]]
    return found


@pytest.mark.timeout(600)  # on a busy machine
def test_registering_does_what_prefect_deploy_does_and_again_changes_nothing(
    client: SyncPrefectClient, prefect_server: str
) -> None:
    register(client, recipes.prefect_yaml())
    before = registered(client)
    for name, deployment in KNOWN.items():
        there = before[name]
        assert there["parameters"] == deployment["parameters"]
        assert (there["description"], there["tags"]) == (deployment["description"], deployment["tags"])
        assert there["global_concurrency_limit"]["limit"] == 1
    register(client, recipes.prefect_yaml())
    assert registered(client) == before
    # what a person has switched in the UI stays
    nightly = "nightly-evaluation/qwen3-8b-ddtree"
    (schedule,) = client.read_deployment_by_name(nightly).schedules
    assert (schedule.slug, schedule.active) == ("every-night", False)
    client.update_deployment_schedule(schedule.deployment_id, schedule.id, active=True)
    register(client, recipes.prefect_yaml())
    assert [one.active for one in client.read_deployment_by_name("nightly-evaluation/qwen3-8b-ddtree").schedules] == [
        True
    ]
    # and so does what was moved to another pool
    open_pool(client, "elsewhere")
    moved = client.read_deployment_by_name("pipeline/demo")
    client.update_deployment(moved.id, DeploymentUpdate(work_pool_name="elsewhere", job_variables={"env": {"A": "1"}}))
    register(client, recipes.prefect_yaml())
    there = client.read_deployment_by_name("pipeline/demo")
    assert (there.work_pool_name, there.job_variables) == ("elsewhere", {"env": {"A": "1"}})
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        env={**os.environ, "PREFECT_API_URL": prefect_server, "PWD": str(PROJECT)},
        cwd=PROJECT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert registered(client) == before


def test_a_run_of_the_command_has_the_tags_of_its_deployment_and_its_tasks_do_not(
    client: SyncPrefectClient, home: Path
) -> None:
    """A set of tags on a task costs requests, and `gpu` on one that needs none would wait for a GPU."""
    changes = ["generation.max_prompts=2", "generation.max_new_tokens=8", "tokenization.validation_share=0"]
    changes += ["evaluation.max_prompts=2", "evaluation.max_new_tokens=8"]
    words = ["run", "prepare-data/demo", *(word for change in changes for word in ("--set", change))]
    subprocess.run([sys.executable, "-m", "flows.cli", *words], check=True, timeout=240)
    flow = FlowFilter(name=FlowFilterName(any_=["prepare-data"]))
    [run] = client.read_flow_runs(flow_filter=flow, sort=FlowRunSort.START_TIME_DESC, limit=1)
    assert sorted(run.tags) == sorted(KNOWN["prepare-data/demo"]["tags"])
    deadline = time.monotonic() + 30
    while not (tasks := client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))):
        assert time.monotonic() < deadline, "the server writes task runs down a little later"
        time.sleep(0.2)
    assert {tag for task in tasks for tag in task.tags} <= {GPU}
