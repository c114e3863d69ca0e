"""The pipeline on a real server with the bundled verifier: what is cached, what runs again, what survives."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from safetensors.torch import load_file, save_file

import tasks.stage
from dflash import keys
from dflash.bundled import resolve
from dflash.drafters import drafter_of
from dflash.manifests import home, load_manifest
from dflash.pinning import pin

tasks.stage.BACKOFF_SECONDS = 0  # before the tasks are made

from flows.pipeline import evaluate, pipeline, prepare_data, train_drafter
from flows.recipes import load_recipe
from flows.steps import CURRENT, RunRecord

ALL = [
    "generation", "tokenization", "extraction",
    "evaluation-generation", "evaluation-tokenization", "evaluation-extraction",
    "training", "evaluation",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("prefect_server")


class Runs:
    """Runs of one small recipe, whose training prompts are a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.prompts = folder / "prompts.jsonl"
        lines = resolve("bundled:gsm8k-train").read_text().splitlines()
        self.prompts.write_text("\n".join(lines[:12]) + "\n")

    def __call__(
        self, *changes: str, refresh: tuple[str, ...] = (), flow: Flow[Any, Any] = pipeline, **own: str
    ) -> RunRecord:
        settings = (
            f"generation.prompts=['{self.prompts}']", "generation.max_new_tokens=24", "evaluation.max_new_tokens=24",
            "evaluation.max_prompts=4", "evaluation.minimum_conversations=2", "evaluation.live_prompts=1",
            "evaluation.parity=off",
            "extraction.shard_tokens=400", "tokenization.validation_share=0.2", "training.num_layers=1",
            "training.max_steps=4", "training.tracking=disabled",
        )  # fmt: skip
        self.recipe = recipe = load_recipe("demo", [*settings, *changes])
        self.record = RunRecord(recipe="demo")
        token = CURRENT.set(self.record)
        try:
            flow(
                **{name: getattr(recipe, name) for name in type(recipe).model_fields},
                recipe="demo",
                refresh=list(refresh),
                **own,
            )
        finally:
            CURRENT.reset(token)
        return self.record

    def ran(self, *changes: str, refresh: tuple[str, ...] = ()) -> list[str]:
        self(*changes, refresh=refresh)
        return self.states("ran")

    def states(self, state: str) -> list[str]:
        return [step.stage for step in self.record.stages if step.state == state]

    def folder(self, stage: str) -> Path:
        key = next(step.fingerprint for step in self.record.stages if step.stage == stage)
        return home() / "artifacts" / stage / str(key)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("pipeline"))
    assert runs.ran() == ALL
    return runs


def test_the_report_and_the_drafter_are_there(runs: Runs) -> None:
    runs()
    record = runs.record
    assert runs.states("cached") == ALL
    assert record.report
    assert record.drafter
    assert "chain" in Path(record.report).read_text()
    assert (Path(record.drafter) / "model.safetensors").exists()
    lengths = record.acceptance_length
    assert set(lengths) == {"chain", "tree16", "tree64"}
    assert 1 <= lengths["chain"] <= lengths["tree16"] <= lengths["tree64"] <= 16  # type: ignore[operator]
    report = json.loads((Path(record.report).parent / "report.json").read_text())
    assert report["live"]["text_equal"]
    assert report["live"]["rounds_equal"]


def test_the_verdict_is_in_the_record_and_only_what_passed_the_gate_becomes_champion(runs: Runs) -> None:
    record = runs()
    assert (record.verdict, record.champion) == ("first", None)
    record = runs("evaluation.parity=on")
    assert record.drafter
    assert (record.verdict, record.champion) == ("first", Path(record.drafter).name)
    try:
        assert runs("evaluation.parity=on").verdict == "champion"
        other = runs("training.seed=5")
        assert other.verdict in ("better", "same", "worse")
        assert other.champion == record.champion, "without the gate it is never promoted"
    finally:
        shutil.rmtree(home() / "champions")


def test_the_parts_of_the_pipeline_find_what_it_made(runs: Runs) -> None:
    drafter = runs().drafter
    assert drafter
    parts = {prepare_data: ALL[:6], train_drafter: [*ALL[:3], "training"], evaluate: [*ALL[3:6], "evaluation"]}
    for flow, steps in parts.items():
        runs(flow=flow)
        assert runs.states("cached") == steps
    assert (runs.record.drafter, runs.record.verdict) == (drafter, "first")
    assert runs.record.report


def test_evaluate_trains_nothing_and_says_what_is_missing(runs: Runs) -> None:
    with pytest.raises(ValueError, match="no drafter with these settings under .*; run the recipe's pipeline, or name"):
        runs("training.seed=99", flow=evaluate)
    assert runs.record.stages == []


def test_only_what_trains_is_refused_where_the_drafter_to_start_from_is_gone(runs: Runs) -> None:
    drafter = runs().drafter
    gone = "training.initialisation=gone"
    assert runs(gone, flow=evaluate, drafter=str(drafter)).drafter == drafter
    for flow in (pipeline, train_drafter):
        with pytest.raises(ValueError, match=r"^training\.initialisation: no gone/config\.json"):
            runs(gone, flow=flow)
        assert runs.record.stages == []


def test_a_drafter_is_found_by_name_and_anything_else_is_refused(runs: Runs, tmp_path: Path) -> None:
    runs()
    drafter = runs.folder("training")
    verifier = pin(runs.recipe.verifier)
    for name in (str(drafter), drafter.name, drafter.name.removeprefix("training-")[:8]):
        assert drafter_of(runs.recipe, verifier, name=name).path == drafter
    shutil.copytree(drafter, tmp_path / "copy")
    for name, message in {
        "training-0123": "training-0123: no artifact begins so",
        runs.folder("evaluation").name: "evaluation-.* is no drafter; dflash ls",
        str(tmp_path / "copy"): "copy is not .*, where training-.* of this data root lies; import it",
        str(tmp_path): "holds no manifest.json",
    }.items():
        with pytest.raises(ValueError, match=message):
            drafter_of(runs.recipe, verifier, name=name)


def test_a_drafter_that_is_not_what_was_trained_fails_the_run_with_the_diagnosis(runs: Runs) -> None:
    drafter = runs("training.seed=6").drafter
    assert drafter
    path = Path(drafter) / "model.safetensors"
    weights = load_file(path)
    before, stamp = path.read_bytes(), path.stat()
    save_file({name: -weight for name, weight in weights.items()}, path, metadata={"format": "pt"})
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as if training had written it so
    try:
        with pytest.raises(ValueError, match="parity: .* as in training; "):
            runs("training.seed=6", "evaluation.parity=on")
        assert runs.record.stages[-1].state == "failed"
        assert runs.record.report is None
        assert not (home() / "champions").exists()
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("training.gamma=7", ["training", "evaluation"]),
        ("evaluation.budgets=[8, 16]", ["evaluation"]),
        ("extraction.batch_tokens=4096", []),
        ("training.save_every=2", []),
        ("evaluation.max_new_tokens=20", [*ALL[3:6], "evaluation"]),
    ],
)
def test_a_changed_setting_reruns_what_depends_on_it(runs: Runs, change: str, expected: list[str]) -> None:
    assert runs.ran(change) == expected
    assert runs.ran(change) == []
    assert runs.ran() == []


def test_a_changed_prompt_reruns_everything_downstream_of_it_and_evaluate_takes_the_newest(runs: Runs) -> None:
    before = runs.prompts.read_text()
    runs.prompts.write_text(before.replace("How", "Tell me how", 1))
    try:
        assert runs.ran() == [*ALL[:3], "training", "evaluation"]
        newest = runs.record.drafter
    finally:
        runs.prompts.write_text(before)
    assert runs(flow=evaluate).drafter == newest  # of the recipe, whose prompts may be others by now
    assert runs.ran() == []
    assert runs.record.drafter != newest


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("extraction", ["extraction", "evaluation-extraction", "training", "evaluation"]),
        ("evaluation", ["evaluation"]),
        ("tokenization", ["tokenization", "evaluation-tokenization"]),  # equal bytes: nothing downstream is redone
    ],
)
def test_a_bumped_recipe_number_reruns_the_stage_and_what_follows(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, stage: str, expected: list[str]
) -> None:
    monkeypatch.setitem(keys.RECIPES, stage, 1000)
    assert runs.ran() == expected


def test_a_rebuilt_but_equal_corpus_reruns_nothing_else(runs: Runs) -> None:
    runs()
    shutil.rmtree(runs.folder("tokenization"))
    assert runs.ran() == ["tokenization"]


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda shard: shutil.rmtree(shard),
        lambda shard: flip_a_byte(largest_file(shard)),
        lambda shard: largest_file(shard).write_bytes(largest_file(shard).read_bytes()[:-7]),
        lambda shard: (shard / "manifest.json").unlink(),
    ],
    ids=["deleted", "flipped byte", "truncated", "no manifest"],
)
def test_a_damaged_shard_is_redone_alone(runs: Runs, damage: Callable[[Path], Any]) -> None:
    runs()
    shards = sorted((runs.folder("extraction") / "shards").iterdir())
    assert len(shards) >= 3
    before = [load_manifest(shard).created for shard in shards]
    damage(shards[1])
    assert runs.ran() == ["extraction"]
    after = [load_manifest(shard).created for shard in shards]
    assert [old != new for old, new in zip(before, after, strict=True)] == [n == 1 for n in range(len(shards))]


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_a_deleted_drafter_costs_training_only(runs: Runs) -> None:
    runs()
    shutil.rmtree(runs.folder("training"))
    assert runs.ran() == ["training"]


def test_lost_records_cost_nothing(runs: Runs) -> None:
    from dflash.manifests import home

    shutil.rmtree(home() / "records")
    assert runs.ran() == []


def test_refresh_forces_one_stage(runs: Runs) -> None:
    assert runs.ran(refresh=("training",)) == ["training"]
    assert runs.ran(refresh=("extraction",)) == ["extraction"]


@pytest.mark.parametrize("stage", ["tokenization", "evaluation"])
def test_a_failing_stage_keeps_what_was_done_and_the_next_run_starts_there(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    change = {"tokenization": "tokenization.max_length=300", "evaluation": "evaluation.budgets=[5]"}[stage]
    attempts: list[int] = []

    def broken(*_: Any, **__: Any) -> None:
        attempts.append(1)
        raise RuntimeError("injected fault")

    where = {"tokenization": "dflash.corpus.tokenization.tokenize", "evaluation": "dflash.decoding.evaluation.evaluate"}
    with monkeypatch.context() as patch:
        patch.setattr(where[stage], broken)
        with pytest.raises(RuntimeError, match="injected fault"):
            runs(change)
    assert len(attempts) == 3
    assert runs.states("failed") == [stage]
    assert runs.states("ran") == []
    following = runs.ran(change)
    assert following[0] == stage
    assert "generation" not in following


def test_bad_input_is_not_retried(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash.corpus import generation

    attempts: list[int] = []
    real = generation.generate_chunk

    def counted(*args: Any, **kwargs: Any) -> Any:
        attempts.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(generation, "generate_chunk", counted)
    with pytest.raises(ValueError, match="longer than max_prompt_tokens 1 .* raise it"):
        runs("generation.max_prompt_tokens=1")
    assert runs.states("failed") == ["generation"]
    assert attempts == [1]
