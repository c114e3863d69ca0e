"""Exports: the weights as they are, the config that others read, a card that says what is known, or one clear line."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash.config import VerifierConfig
from dflash.decoding.history import append
from dflash.decoding.verdict import load_evaluated
from dflash.drafter.export import load_drafter
from dflash.export import exporting, importing
from dflash.export.card import model_card
from dflash.export.exporting import CHECKSUMS, PROVENANCE, export_drafter
from dflash.export.facts import shown, weak_categories
from dflash.export.importing import check_sums, import_drafter, verifier_of
from dflash.manifests import Artifact, home
from tests.decoding.evaluated_small import full_report, response
from tests.export.export_small import LAYERS, Made

AS_IS: dict[str, Any] = {"kind": "dflash", "dtype": "", "verifier": "", "revision": "main", "ungated": True}


def error(drafter: Artifact | str, folder: Path, **settings: Any) -> str:
    name = drafter if isinstance(drafter, str) else drafter.key
    with pytest.raises(ValueError) as caught:
        export_drafter(name, folder, **AS_IS | settings)
    assert "\n" not in str(caught.value)
    assert not folder.exists() or not any(folder.iterdir()), "nothing is written where anything is wrong"
    assert not list(folder.parent.glob(f".{folder.name}*"))
    return str(caught.value)


@pytest.fixture(scope="module")
def drafter(made: Made) -> Artifact:
    """Evaluated, with the parity gate on."""
    found = made.drafter(remembered=True)
    made.report(found)
    return found


@pytest.fixture(scope="module")
def imported(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A drafter of which nothing but weights and config is known, not evaluated."""
    copy = tmp_path_factory.mktemp("theirs") / "foreign"
    shutil.copytree(made.drafter(seed=4).path, copy, ignore=shutil.ignore_patterns("manifest.json"))
    return import_drafter(copy, made.verifier, block_size=0)


@pytest.mark.parametrize("kind", ["dflash", "speculators"])
def test_weights_are_exported_bit_for_bit_and_cast_only_when_asked(
    drafter: Artifact, kind: str, tmp_path: Path
) -> None:
    trained = load_file(drafter.path / "model.safetensors")
    folder = export_drafter(drafter.key, tmp_path / "deep" / "out", **AS_IS | {"kind": kind, "ungated": False})
    same = load_file(folder / "model.safetensors")
    assert same.keys() == trained.keys()
    assert all(torch.equal(same[name], weight) and same[name].dtype == weight.dtype for name, weight in trained.items())
    check_sums(folder)
    files = {path.name for path in folder.iterdir()}
    assert files >= {"config.json", "README.md", PROVENANCE, CHECKSUMS, "tokenizer.json", "tokenizer_config.json"}
    cast = export_drafter(str(drafter.path), tmp_path / "cast", **AS_IS | {"kind": kind, "dtype": "bfloat16"})
    assert json.loads((cast / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_file(cast / "model.safetensors")
    assert all(torch.equal(weights[name], weight.bfloat16()) for name, weight in trained.items())


def test_every_template_of_the_verifier_comes_along_and_is_in_the_checksums(
    made: Made, drafter: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "verifier"
    shutil.copytree(made.verifier.path, theirs)
    (theirs / "additional_chat_templates").mkdir()
    template = theirs / "additional_chat_templates" / "tool_use.jinja"
    template.write_text("{{ tools }}")
    pinned = made.verifier.model_copy(update={"path": str(theirs)})
    monkeypatch.setattr(exporting, "_verifier_of", lambda *_, **__: pinned)
    folder = export_drafter(drafter.key, tmp_path / "out", **AS_IS)
    copy = folder / "additional_chat_templates" / "tool_use.jinja"
    assert copy.read_text() == template.read_text()
    check_sums(folder)
    copy.write_text("{{ tool }}")
    with pytest.raises(ValueError, match="tool_use.jinja differs from its checksum"):
        check_sums(folder)


def test_the_speculators_config_counts_layers_from_the_embedding_and_names_the_verifier(
    drafter: Artifact, tmp_path: Path
) -> None:
    ours = json.loads((drafter.path / "config.json").read_text())
    folder = export_drafter(drafter.key, tmp_path / "out", **AS_IS | {"kind": "speculators"})
    theirs = json.loads((folder / "config.json").read_text())
    assert theirs["aux_hidden_state_layer_ids"] == [layer + 1 for layer in LAYERS]
    assert (theirs["block_size"], theirs["mask_token_id"], theirs["draft_vocab_size"]) == (5, 3, 2048)
    layers = theirs["transformer_layer_config"]
    assert {name: layers[name] for name in layers} == {name: ours[name] for name in layers}
    method = theirs["speculators_config"]
    assert method["proposal_methods"][0]["speculative_tokens"] == 4
    assert method["verifier"] == {"name_or_path": "bundled:demo-verifier", "architectures": ["Qwen3ForCausalLM"]}


def test_the_card_says_what_the_manifests_and_the_report_say(made: Made, drafter: Artifact, tmp_path: Path) -> None:
    folder = export_drafter(drafter.key, tmp_path / "out", **AS_IS)
    facts, card = json.loads((folder / PROVENANCE).read_text()), (folder / "README.md").read_text()
    key = facts["evaluation"]["report"]
    report = json.loads((home() / "artifacts" / "evaluation" / key / "report.json").read_text())
    assert facts["verifier"]["identity"] == made.verifier.identity
    assert facts["data"]["sources"][0]["name"] == "maths.jsonl", "not where it lies on this machine"
    assert (facts["data"]["sources"][0]["rows"], facts["data"]["corpus"]["rows"]) == (6, 6)
    assert facts["evaluation"]["categories"]["all"]["acceptance_length"] == report["acceptance_length"]
    low, high = report["overall"]["interval"]["chain"]
    for text in (
        f"{report['acceptance_length']['chain']:.2f} ({low:.2f} to {high:.2f})",
        "| maths.jsonl | 6 | 6 | not known |",
        "| taps | 1, 3 |",
        "| thinking | left to the template |",
        made.store.info["chat"]["template_sha256"],
        "| gamma | 10.0 |",
        f"drafted 100.0% of {report['parity']['compared']} tokens as in training",
    ):
        assert text in card
    assert str(made.hidden_states.path.parent) not in card


def test_a_category_is_weak_where_its_whole_interval_is_below_the_rest_and_the_card_names_it() -> None:
    skills = {"maths": 0.8, "writing": 0.2}
    responses = [
        response(f"{name}{number}", skill=skill, category=name) for name, skill in skills.items() for number in range(9)
    ]
    report = full_report(responses)
    assert weak_categories(report) == ["writing"]


def test_what_is_not_known_is_said_to_be_unknown(imported: Artifact, tmp_path: Path) -> None:
    folder = export_drafter(imported.key, tmp_path / "out", **AS_IS)
    card = (folder / "README.md").read_text()
    for text in (
        "trained on is not known",
        "How it was trained is not known",
        "It was not evaluated",
        "| thinking | not",
    ):
        assert text in card
    assert [shown(name) for name in ("bundled:x", "hub:a/b", "/home/me/secret/chat.jsonl")] == [
        "bundled:x",
        "hub:a/b",
        "chat.jsonl",
    ]


def test_a_card_names_the_hub_id_of_its_verifier(drafter: Artifact, tmp_path: Path) -> None:
    facts = json.loads((export_drafter(drafter.key, tmp_path / "out", **AS_IS) / PROVENANCE).read_text())
    facts["verifier"] |= {"name": "Qwen/Qwen3-8B", "revision": "0123abc"}
    assert "\nbase_model: Qwen/Qwen3-8B\n---" in model_card(facts, kind="dflash", dtype="bfloat16")


def test_a_card_says_at_which_temperature_its_figures_were_drawn(drafter: Artifact, tmp_path: Path) -> None:
    facts = json.loads((export_drafter(drafter.key, tmp_path / "out", **AS_IS) / PROVENANCE).read_text())
    assert facts["evaluation"]["temperature"] == 0
    assert "temperature" not in model_card(facts, kind="dflash", dtype="float32").partition("## Evaluation")[2]
    facts["evaluation"]["temperature"] = 0.7
    assert "answers were drawn at temperature 0.7." in model_card(facts, kind="dflash", dtype="float32")


def test_a_relative_folder_of_a_verifier_is_no_hub_id(
    made: Made, drafter: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made.verifier.path, tmp_path / "models" / "qwen3")
    monkeypatch.chdir(tmp_path)
    folder = export_drafter(drafter.key, tmp_path / "out", **AS_IS | {"verifier": "models/qwen3"})
    assert json.loads((folder / PROVENANCE).read_text())["verifier"]["name"] == "qwen3"
    assert "base_model" not in (folder / "README.md").read_text()


def test_the_card_of_an_imported_drafter_does_not_say_that_it_drafts_as_in_training(
    made: Made, imported: Artifact, tmp_path: Path
) -> None:
    copy = tmp_path / "theirs"
    shutil.copytree(imported.path, copy, ignore=shutil.ignore_patterns("manifest.json"))
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 1000}))
    evaluated = import_drafter(copy, made.verifier, block_size=0)
    made.report(evaluated)
    card = (export_drafter(evaluated.key, tmp_path / "out", **AS_IS) / "README.md").read_text()
    assert "tokens as the process that evaluated it." in card
    assert "as in training" not in card


def test_a_folder_of_another_data_root_is_not_taken_for_the_artifact_of_its_key(
    drafter: Artifact, tmp_path: Path
) -> None:
    shutil.copytree(drafter.path, tmp_path / "copy")
    said = error(str(tmp_path / "copy"), tmp_path / "out")
    for text in (str(tmp_path / "copy"), str(drafter.path), "dflash import", "DFLASH_HOME"):
        assert text in said
    (tmp_path / "link").symlink_to(drafter.path)
    export_drafter(str(tmp_path / "link"), tmp_path / "out", **AS_IS)


def test_a_verifier_is_pinned_at_its_recorded_revision_and_with_its_code_where_asked(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "trusted"
    shutil.copytree(made.verifier.path, trusted)
    (trusted / "modeling.py").write_text("pass\n")
    copy = tmp_path / "theirs"
    shutil.copytree(made.drafter(seed=6).path, copy, ignore=shutil.ignore_patterns("manifest.json"))
    verifier = verifier_of(copy, model=str(trusted), trust_remote_code=True)
    found = import_drafter(copy, verifier, block_size=0)
    assert "--revision or --trust-remote-code" in error(found, tmp_path / "out")
    export_drafter(found.key, tmp_path / "out", **AS_IS | {"trust_remote_code": True})

    asked = []

    def remember(config: VerifierConfig) -> None:
        asked.append((config.model, config.revision))
        raise ValueError("not here")

    monkeypatch.setattr(importing, "pin", remember)
    record = {"schema_version": 1, "verifier": {"name": "Qwen/Qwen3-8B", "revision": "0123abc"}}
    (copy / PROVENANCE).write_text(json.dumps(record))
    for model, revision in (("", ""), ("Qwen/Qwen3-8B", ""), ("", "v2"), ("other/one", "")):
        with pytest.raises(ValueError, match="not here"):
            verifier_of(copy, model=model, revision=revision)
    assert asked == [("Qwen/Qwen3-8B", "0123abc")] * 2 + [("Qwen/Qwen3-8B", "v2"), ("other/one", "main")]


def test_a_drafter_that_the_parity_gate_did_not_pass_is_refused_unless_asked(made: Made, tmp_path: Path) -> None:
    unchecked = made.drafter(seed=1)
    assert "has no report" in error(unchecked, tmp_path / "out", ungated=False)
    report = made.report(unchecked, parity="off")
    assert "gate off" in error(unchecked, tmp_path / "out", ungated=False)
    folder = export_drafter(unchecked.key, tmp_path / "out", **AS_IS)
    assert "not checked that another process drafts" in (folder / "README.md").read_text()
    written = json.loads((report.path / "report.json").read_text())
    (report.path / "report.json").write_text(json.dumps({**written, "schema_version": 2}))
    assert "has no report of this version" in error(unchecked, tmp_path / "again", ungated=False)


def test_a_check_on_other_prompts_neither_bars_a_drafter_nor_gives_its_figures(made: Made, tmp_path: Path) -> None:
    checked, unchecked = (made.drafter(seed=seed) for seed in (9, 10))

    def note(report: Artifact) -> None:
        append(load_evaluated(report.path).report, key=report.key, created=datetime.now(UTC))

    first, later = made.report(checked), made.report(unchecked, parity="off")
    for report in (first, later):
        note(report)
    made.report(checked, parity="off", budget=3)  # on new prompts, and so in no history
    made.report(unchecked, budget=3)
    for found, report in ((checked, first), (unchecked, later)):
        folder = export_drafter(found.key, tmp_path / found.key, **AS_IS | {"ungated": False})
        evaluation = json.loads((folder / PROVENANCE).read_text())["evaluation"]
        assert (evaluation["report"], evaluation["methods"]) == (report.key, ["chain", "tree4"])
        assert evaluation["parity"]["compared"]
        card = (folder / "README.md").read_text()
        gate = evaluation["parity_report"]
        assert (gate == report.key) == (found is checked)
        assert ("drafted 100.0% of" in card, f"(report `{gate}`)" in card) == (True, found is unchecked)
        assert "not checked that another process" not in card


def test_figures_are_of_the_weights_that_were_measured_also_where_a_cast_one_comes_back(
    made: Made, drafter: Artifact, tmp_path: Path
) -> None:
    def card(source: Artifact, dtype: str) -> str:
        folder = tmp_path / f"{source.key}-{dtype}"
        export_drafter(source.key, folder, **AS_IS | {"dtype": dtype})
        return (folder / "README.md").read_text()

    said = "of weights in float32, run in float32; here they are cast to bfloat16, which were not measured"
    assert "cast to" not in card(drafter, "float32")
    assert said in card(drafter, "bfloat16")
    back = import_drafter(tmp_path / f"{drafter.key}-bfloat16", made.verifier, block_size=0)
    assert said in card(back, "")
    assert "cast to bfloat16, then to float32, which were not measured" in card(back, "float32")
    again = import_drafter(tmp_path / f"{back.key}-float32", made.verifier, block_size=0)
    assert "cast to bfloat16, then to float32, which were not measured" in card(again, "")
    halves = json.loads((tmp_path / f"{drafter.key}-bfloat16" / PROVENANCE).read_text())
    halves["evaluation"]["conditions"]["dtype"] = "bfloat16"
    assert "cast to bfloat16, which comes to the same." in model_card(halves, kind="dflash", dtype="bfloat16")


def test_a_dtype_in_which_weights_are_not_finite_is_refused(made: Made, tmp_path: Path) -> None:
    large = made.drafter(seed=11, scale=1e6)
    assert "fc.weight, " in error(large, tmp_path / "out", dtype="float16")
    assert "hold numbers that float16 does not have" in error(large, tmp_path / "out", dtype="float16")
    export_drafter(large.key, tmp_path / "out", **AS_IS | {"dtype": "bfloat16"})


def test_what_cannot_be_exported_is_refused_in_one_line(made: Made, drafter: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "'gguf' is unknown; expected one of dflash, speculators" in error(drafter, out, kind="gguf")
    assert "'int4' is unknown" in error(drafter, out, dtype="int4")
    assert "no artifact begins so" in error("training-nothing", out)
    assert "is no drafter" in error(made.hidden_states, out)
    (tmp_path / "empty").mkdir()
    assert "import it first" in error(str(tmp_path / "empty"), out)
    wider = made.drafter(seed=2, hidden_size=96)
    assert "hidden size 96" in error(wider, out)
    windowed = made.drafter(seed=3, sliding_window=8)
    assert "layers with a window" in error(windowed, out, kind="speculators")
    other = tmp_path / "other"
    shutil.copytree(made.verifier.path, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-5}))
    assert "is another one" in error(drafter, out, verifier=str(other))
    damaged = made.drafter(seed=5)
    weights = damaged.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors" in error(damaged, out)


def test_a_folder_that_holds_something_is_left_alone(drafter: Artifact, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something already"):
        export_drafter(drafter.key, tmp_path, **AS_IS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_exported_folder_is_a_drafter_as_any_other(drafter: Artifact, tmp_path: Path) -> None:
    folder = export_drafter(drafter.key, tmp_path / "out", **AS_IS)
    assert load_drafter(folder, dtype=torch.float32).config == load_drafter(drafter.path, dtype=torch.float32).config
