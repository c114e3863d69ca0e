"""The nightly evaluation on a real server: what it says of drafters that are there, and that it trains none."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.events.filters import EventFilter

import tasks.stage

tasks.stage.BACKOFF_SECONDS = 0  # before the tasks are made

from dflash.bundled import resolve
from dflash.config import NightlyConfig
from dflash.decoding.drift import drift
from dflash.decoding.history import read_history
from dflash.decoding.judging import promote_by_hand
from dflash.manifests import home, load_manifest
from flows.nightly import nightly_evaluation
from flows.pipeline import pipeline
from flows.recipes import load_recipe
from flows.steps import CURRENT, RunRecord
from tests.training.test_tracking import offline_runs

pytestmark = pytest.mark.usefixtures("prefect_server")


class Nights:
    """A recipe with prompts of its own, and two drafters: a trained one, the champion, and one that learned nothing."""

    def __init__(self, folder: Path, client: SyncPrefectClient) -> None:
        self.client = client
        lines = resolve("bundled:gsm8k-train").read_text().splitlines()
        self.files = {"train": lines[300:324], "known": lines[340:352], "new": lines[360:370]}
        for name, some in self.files.items():
            (folder / f"{name}.jsonl").write_text("\n".join(some) + "\n")
        self.folder = folder
        self.settings = (
            f"generation.prompts=['{folder / 'train.jsonl'}']", "generation.max_new_tokens=40",
            f"evaluation.prompts=['{folder / 'known.jsonl'}']", "evaluation.max_new_tokens=40",
            "evaluation.live_prompts=0", "evaluation.parity=off", "evaluation.minimum_difference=0",
            "evaluation.budgets=[8]", "tokenization.validation_share=0", "tokenization.max_length=256",
            "training.num_layers=1", "training.num_anchors=24", "training.max_tokens_per_batch=512",
            "training.epochs=100", "training.tree_budget=8", "training.tracking=auto",
        )  # fmt: skip
        self.good, self.bad = (self.run(pipeline, f"training.max_steps={steps}").drafter for steps in (30, 1))

    def run(self, flow: Any, *changes: str, **own: Any) -> RunRecord:
        recipe = load_recipe("demo", [*self.settings, *changes])
        self.record = RunRecord(recipe="nights")
        token = CURRENT.set(self.record)
        try:
            flow(**{name: getattr(recipe, name) for name in type(recipe).model_fields}, recipe="nights", **own)
        finally:
            CURRENT.reset(token)
        return self.record

    def night(self, *changes: str, **nightly: Any) -> State[Any]:
        self.run(nightly_evaluation, "training.max_steps=1", *changes, nightly=NightlyConfig.model_validate(nightly))
        return self.last_run().state  # type: ignore[return-value]

    def crown(self) -> None:
        """Make the better drafter the champion, whatever ran before."""
        assert self.good
        promote_by_hand(Path(self.good).name, reason="for this test")

    def last_run(self) -> FlowRun:
        only = FlowRunFilter.model_validate({"id": {"any_": [self.record.flow_run_id]}})
        (found,) = self.client.read_flow_runs(flow_run_filter=only)
        return found

    def event(self, name: str, *, drafter: str) -> dict[str, Any]:
        """The server stores events some seconds after they were emitted."""
        body = {"filter": EventFilter.model_validate({"event": {"name": [name]}}).model_dump(mode="json")}
        deadline = time.monotonic() + 90  # on a machine in use
        while True:
            found = self.client.request("POST", "/events/filter", json=body).json()["events"]
            for event in found:
                if event["payload"]["drafter"] == drafter:
                    return dict(event)
            assert time.monotonic() < deadline
            time.sleep(0.2)

    @property
    def verifier(self) -> str:
        assert self.bad
        return str(load_manifest(Path(self.bad)).summary["verifier"]["identity"])


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Iterator[Nights]:
    with get_client(sync_client=True) as client:
        yield Nights(tmp_path_factory.mktemp("nights"), client)
    shutil.rmtree(home() / "champions", ignore_errors=True)  # others of this process have no champion


def test_without_a_drafter_there_is_nothing_to_do(nights: Nights) -> None:
    state = nights.night("training.seed=4")
    assert (state.name, state.message) == ("Completed", "nothing to do: the recipe has no drafter yet")
    assert nights.record.stages == []


def test_with_nothing_new_it_says_so_and_what_is_known(nights: Nights) -> None:
    state = nights.night()
    assert state.name == "Completed"
    assert str(state.message).startswith("nothing new; first: the first of its verifier")


def test_a_drafter_that_is_worse_than_the_champion_stands_out(nights: Nights) -> None:
    assert nights.good
    assert nights.bad
    nights.crown()
    state = nights.night()
    assert (state.name, state.type) == ("Worse", "COMPLETED")
    assert Path(nights.bad).name in str(state.message)
    assert {step.state for step in nights.record.stages} == {"cached"}
    event = nights.event("dflash.evaluation.worse", drafter=Path(nights.bad).name)
    assert event["payload"]["champion"] == Path(nights.good).name
    assert "nights" in nights.last_run().name
    assert "worse" in nights.last_run().tags


def test_another_evaluation_set_is_a_row_in_the_history_and_a_plot_and_is_logged(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(read_history(nights.verifier))
    monkeypatch.setenv("WANDB_MODE", "offline")
    nights.night("evaluation.max_prompts=10")
    assert [step.stage for step in nights.record.stages if step.state == "ran"] == [
        "evaluation-generation", "evaluation-tokenization", "evaluation-extraction", "evaluation",
    ]  # fmt: skip
    assert len(read_history(nights.verifier)) == before + 1
    (logged,) = offline_runs()
    rows = [record.history for record in logged if record.WhichOneof("record_type") == "history"]  # type: ignore[attr-defined]
    names = {"/".join(item.nested_key) or item.key for item in rows[-1].item}
    assert {"evaluation/step", "evaluation/acceptance_length/chain", "evaluation/acceptance_length/tree8"} <= names
    wanted = ArtifactFilter.model_validate({"key": {"any_": ["nightly-history"]}})
    plots = nights.client.request("POST", "/artifacts/filter", json={"artifacts": wanted.model_dump(mode="json")})
    assert any(plot["flow_run_id"] == nights.record.flow_run_id for plot in plots.json())


def test_new_prompts_say_whether_retraining_is_due(nights: Nights) -> None:
    assert nights.good
    nights.crown()
    state = nights.night(drafters=[nights.good], new_prompts=[str(nights.folder / "new.jsonl")])
    assert state.name == "Completed"  # prompts of the same kind
    assert nights.record.retraining == "not due"
    assert nights.record.verdict == "champion"


def test_the_pipeline_is_started_only_where_it_is_registered(nights: Nights) -> None:
    nights.crown()
    with pytest.raises(ValueError, match="nightly.retrain: pipeline/nights is not registered .*; dflash up"):
        nights.night(retrain=True)


def test_where_new_prompts_are_of_another_kind_retraining_is_due_and_the_pipeline_is_started(nights: Nights) -> None:
    assert nights.good
    nights.crown()
    flow_id = nights.client.create_flow_from_name("pipeline")
    deployment = nights.client.create_deployment(flow_id, "nights")  # what dflash up makes of a recipe
    lines = resolve("bundled:evaluation").read_text().splitlines()
    other = [line for line in lines if json.loads(line)["category"] in ("qa", "reasoning", "writing")]
    (nights.folder / "other.jsonl").write_text("\n".join(other) + "\n")
    try:
        state = nights.night(
            f"evaluation.prompts=['{nights.folder / 'train.jsonl'}']",  # which it knows best
            drafters=[nights.good],
            new_prompts=[str(nights.folder / "other.jsonl")],
            largest_drop=0.01,
            retrain=True,
        )
        wanted = FlowRunFilter.model_validate({"deployment_id": {"any_": [deployment]}})
        (started,) = nights.client.read_flow_runs(flow_run_filter=wanted)
    finally:
        nights.client.delete_deployment(deployment)
    assert (state.name, state.type) == ("Retraining due", "COMPLETED"), state.message
    assert nights.record.retraining == "due"
    assert str(state.message).endswith(f"started {started.name}")
    assert started.state
    assert started.state.is_scheduled()
    assert started.parameters["recipe"] == "nights"
    assert started.parameters["training"]["max_steps"] == 1
    nights.event("dflash.retraining.due", drafter=Path(nights.good).name)


def report(tau: float, low: float | None, high: float | None, **others: Any) -> dict[str, Any]:
    interval = None if low is None else [low, high]
    overall = {"acceptance_length": {"tree8": tau}, "interval": {"tree8": interval}, "conversations": 8}
    return {"drafter": "d", "schema_version": 1, "conditions": {}, "overall": overall} | others


@pytest.mark.parametrize(
    ("new", "verdict", "reason"),
    [
        (report(2.0, 1.9, 2.1), "due", "33% of what the drafter adds is lost"),
        (report(2.4, 2.35, 2.45), "not due", "a drop of 7%, below 10%"),
        (report(2.0, 1.2, 2.8), "not due", "the interval is not below 0"),
        (report(2.9, 2.8, 3.0), "not due", "the interval is not below 0"),
        (report(2.0, None, None), "unknown", "too few responses for an interval"),
        (
            report(2.0, 1.9, 2.1, conditions={"thinking": "on"}),
            "unknown",
            "conditions .*; evaluate both in the same way",
        ),
    ],
)
def test_retraining_is_due_where_a_large_drop_is_certain(new: dict[str, Any], verdict: str, reason: str) -> None:
    found = drift(report(2.5, 2.45, 2.55), new, method="tree8", largest_drop=0.1, minimum_conversations=8)
    assert found.retraining == verdict
    assert re.search(reason, found.reason)
    if found.interval:  # of the difference, which it holds
        assert found.interval[0] < found.new - found.known < found.interval[1]  # type: ignore[operator]


def test_too_few_conversations_say_nothing_of_drift() -> None:
    few = report(2.0, 1.9, 2.1)
    few["overall"]["conversations"] = 7
    found = drift(report(2.5, 2.45, 2.55), few, method="tree8", largest_drop=0.1, minimum_conversations=8)
    assert (found.retraining, found.reason[:15]) == ("unknown", "7 conversations")
