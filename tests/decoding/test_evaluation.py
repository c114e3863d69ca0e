"""The evaluation stage on the bundled verifier, with a drafter that is partly right."""

import json
from pathlib import Path

import pytest
import torch
from decoding_small import teach

from dflash.bundled import resolve
from dflash.config import (
    EvaluationConfig,
    ExtractionConfig,
    GenerationConfig,
    SourceConfig,
    TokenizationConfig,
    TrainingConfig,
    VerifierConfig,
)
from dflash.corpus.tokenization import tokenize
from dflash.decoding import evaluation as stage
from dflash.decoding.evaluation import evaluate, spread
from dflash.decoding.live import Decoded
from dflash.drafter.export import save_drafter
from dflash.drafter.model import Drafter, DrafterConfig, Ends
from dflash.hidden.extraction import extract_shard, plan_shards, seal
from dflash.hidden.store import HiddenStates
from dflash.keys import training_key
from dflash.manifests import Artifact, publish
from dflash.pinning import PinnedVerifier, pin
from tests.answered import answered

LAYERS = [1, 2, 3]


class Inputs:
    """What the stage takes: a verifier, its hidden states over eight prompts of several categories, and a drafter."""

    def __init__(self, folder: Path) -> None:
        lines = resolve("bundled:evaluation").read_text().splitlines()
        by_category: dict[str, list[str]] = {}
        for line in lines:
            by_category.setdefault(json.loads(line)["category"], []).append(line)
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text("\n".join(line for group in by_category.values() for line in group[:2]) + "\n")
        self.categories = sorted(by_category)
        self.verifier = pin(VerifierConfig(model="bundled:demo-verifier", dtype="float32", device="cpu"))
        generation = GenerationConfig(prompts=[SourceConfig(path=str(self.prompts))], max_new_tokens=40)
        tokenization = TokenizationConfig(validation_share=0, min_supervised=1, num_buckets=1)
        corpus = tokenize(tokenization, answered(generation, self.verifier)[1], self.verifier)
        self.hidden_states = self.extract(corpus, "float32")
        self.rounded = self.extract(corpus, "bfloat16")
        self.fp8 = self.extract(corpus, "fp8")
        self.store = HiddenStates.open(self.hidden_states.path)
        self.ends = Ends(self.store.frozen(), dtype=torch.float32)
        drafter = self.new_drafter()
        teach(drafter, self.ends, [self.store.read(row) for row in range(len(self.store.rows))], steps=60)
        self.drafter = self.save(drafter)

    def extract(self, corpus: Artifact, storage_dtype: str) -> Artifact:
        config = ExtractionConfig(target_layer_ids=LAYERS, storage_dtype=storage_dtype)  # type: ignore[arg-type]
        plans = plan_shards(config, corpus, self.verifier)
        shards = [extract_shard(plan, config, corpus, self.verifier) for plan in plans]
        return seal(shards, config, corpus, self.verifier)

    def new_drafter(self, **changes: object) -> Drafter:
        settings = {"block_size": 6, "num_layers": 1, "mask_token_id": 3, "target_layer_ids": LAYERS} | changes
        config = DrafterConfig.from_verifier(self.store.verifier_config, **settings)  # type: ignore[arg-type]
        return Drafter(config).eval()

    def save(self, drafter: Drafter, *, summary: dict[str, object] | None = None) -> Artifact:
        config = TrainingConfig(mask_token_id=3, block_size=drafter.config.block_size)
        summary = summary or {"verifier": self.store.info["verifier"]}
        with publish(training_key(config, self.hidden_states), summary=summary) as (folder, artifact):
            save_drafter(folder, drafter)
        return artifact()

    def config(self, *, live_prompts: int = 0, budgets: tuple[int, ...] = (4, 16)) -> EvaluationConfig:
        return EvaluationConfig(
            prompts=[SourceConfig(path=str(self.prompts))], budgets=list(budgets), live_prompts=live_prompts
        )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("evaluation"))


@pytest.mark.parametrize("stored", ["hidden_states", "rounded", "fp8"])
def test_replay_and_live_decoding_agree_in_the_report(inputs: Inputs, stored: str) -> None:
    seen: list[tuple[float, float]] = []

    def progress(done: float, total: float, note: str = "") -> None:
        assert note
        seen.append((done, total))

    artifact = evaluate(
        inputs.config(live_prompts=3),
        inputs.drafter,
        getattr(inputs, stored),
        inputs.verifier,
        progress=progress,
    )
    rows = len(inputs.store.rows)
    assert seen == [(done, rows) for done in range(1, rows + 1)]
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["live"]["prompts"] == 3
    assert report["live"]["text_equal"] is True
    assert report["live"]["rounds_equal"] is True
    assert [run["method"] for run in report["live"]["runs"]] == ["chain", "tree16"] * 3
    assert len({run["category"] for run in report["live"]["runs"]}) == 3
    assert sum(run["accepted"] for run in report["live"]["runs"]) > 0, "the drafter must be partly right"
    lengths = report["acceptance_length"]
    assert artifact.summary["acceptance_length"] == lengths
    assert lengths["chain"] >= 1
    assert 1 < lengths["tree4"] <= lengths["tree16"] <= 6
    categories = report["sets"]["evaluation"]["categories"]
    assert sorted(categories) == inputs.categories
    assert report["overall"]["responses"] == rows
    assert report["overall"]["tokens"] == sum(row.num_supervised for row in inputs.store.rows)
    for name in ("responses", "tokens"):
        assert sum(numbers[name] for numbers in categories.values()) == report["overall"][name]
    text = (artifact.path / "report.md").read_text()
    assert "## Live decoding" in text
    assert "| yes | yes |" in text
    assert "not measured: no prompt" not in text


def test_without_live_prompts_the_verifier_is_not_loaded(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "load_verifier", None)
    artifact = evaluate(inputs.config(), inputs.drafter, inputs.hidden_states, inputs.verifier)
    live = json.loads((artifact.path / "report.json").read_text())["live"]
    assert live == {"prompts": 0, "text_equal": None, "rounds_equal": None, "runs": [], "speedup": None}


def test_another_text_in_float32_is_an_error_that_names_the_prompt(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = inputs.config(live_prompts=1, budgets=(5,))
    monkeypatch.setattr(stage, "decode", lambda *_, **__: Decoded([0], []))
    with pytest.raises(AssertionError, match=inputs.store.rows[0].id):
        evaluate(config, inputs.drafter, inputs.hidden_states, inputs.verifier)


def test_other_rounds_are_reported_and_logged(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = inputs.config(live_prompts=1, budgets=(6,))
    real = stage.decode
    monkeypatch.setattr(stage, "decode", lambda *args, **kw: Decoded(real(*args, **kw).ids, [0]))
    artifact = evaluate(config, inputs.drafter, inputs.hidden_states, inputs.verifier)
    live = json.loads((artifact.path / "report.json").read_text())["live"]
    assert (live["text_equal"], live["rounds_equal"]) == (True, False)
    assert inputs.store.rows[0].id in caplog.text


def other(verifier: PinnedVerifier) -> PinnedVerifier:
    return verifier.model_copy(update={"name": "other", "identity": "0123456789abcdef"})


def test_what_does_not_belong_together_is_refused(inputs: Inputs) -> None:
    def error(drafter: Artifact, verifier: PinnedVerifier = inputs.verifier) -> str:
        with pytest.raises(ValueError) as caught:
            evaluate(inputs.config(), drafter, inputs.hidden_states, verifier)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    message = error(inputs.drafter, other(inputs.verifier))
    assert inputs.verifier.identity[:8] in message
    assert "01234567" in message
    foreign = {"verifier": {"name": "other", "identity": "0123456789abcdef", "dtype": "float32"}}
    message = error(inputs.save(inputs.new_drafter(block_size=7), summary=foreign))
    assert inputs.verifier.identity[:8] in message
    assert "01234567" in message
    message = error(inputs.save(inputs.new_drafter(block_size=8, target_layer_ids=[0, 2, 3])))
    assert "[0, 2, 3]" in message
    assert "[1, 2, 3]" in message
    narrow = inputs.store.verifier_config | {"hidden_size": 96}
    config = DrafterConfig.from_verifier(narrow, block_size=9, num_layers=1, mask_token_id=3, target_layer_ids=LAYERS)
    message = error(inputs.save(Drafter(config)))
    assert "96" in message
    assert "192" in message


def test_live_prompts_are_spread_over_the_categories() -> None:
    assert spread(["a", "a", "a", "b", "c", "b"], 4) == [0, 3, 4, 1]
    assert spread(["a", "b"], 0) == []
    assert spread(["a", "b"], 9) == [0, 1]
