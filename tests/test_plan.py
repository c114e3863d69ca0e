"""What a plan says of steps that are not cached."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from dflash import keys
from dflash.bundled import resolve
from dflash.corpus.collection import collect
from dflash.hidden import planning
from dflash.manifests import DAMAGED_MANIFEST, MANIFEST, Artifact, Key, home, publish
from dflash.pinning import PinnedVerifier
from dflash.plan import PlannedStep, plan, preflight
from dflash.training.planning import drafter_config
from flows.recipes import load, load_recipe

pytestmark = pytest.mark.usefixtures("home")
RECIPE = load_recipe("demo", ["generation.max_prompts=4", "evaluation.max_prompts=4"])


def planned(*changes: str) -> dict[str, PlannedStep]:
    settings = ["generation.max_prompts=4", "evaluation.max_prompts=4", *changes]
    return {step.stage: step for step in plan(load_recipe("demo", settings))}


def test_the_evaluation_set_is_not_compared_with_the_training_prompts() -> None:
    collect(RECIPE.generation, RECIPE.evaluation.prompts)
    steps = planned()
    assert steps["evaluation-generation"].reason == steps["generation"].reason == "never made"
    assert planned("generation.max_prompts=5")["generation"].reason == "max_prompts 4 -> 5"


def test_a_damaged_artifact_says_what_depends_on_how_it_comes_out_again() -> None:
    prompts = collect(RECIPE.generation, RECIPE.evaluation.prompts)
    [file] = (prompts.path / "prompts").iterdir()
    file.unlink()
    reason = planned()["generation"].reason
    assert reason.startswith(f"{file}: missing")
    assert reason.endswith("what comes after runs only if it comes out otherwise")


def make(key: Key, **summary: int) -> Artifact:
    with publish(key, summary=summary, content_identity=True) as (folder, artifact):
        (folder / "content").write_text(str(key))
    return artifact()


def make_corpus() -> tuple[Key, PinnedVerifier]:
    """What comes before an extraction; the extraction's key."""
    verifier, _ = preflight(RECIPE, trains=False)
    prompts = collect(RECIPE.generation, RECIPE.evaluation.prompts)
    conversations = make(keys.generation_key(RECIPE.generation, prompts, verifier), tokens=900, prompt_tokens=100)
    corpus = make(keys.tokenization_key(RECIPE.tokenization, conversations, verifier), tokens=1000)
    return keys.extraction_key(RECIPE.extraction, corpus, verifier), verifier


def test_hidden_states_over_the_quota_are_refused_unless_they_are_there() -> None:
    key, _ = make_corpus()
    assert planned("extraction.disk_quota_gb=1")["extraction"].state == "would run"
    with pytest.raises(
        ValueError, match=r"extraction\.disk_quota_gb: hidden states need about \S+ GB, the quota is 1e-06"
    ):
        planned("extraction.disk_quota_gb=1e-6")
    make(key)
    assert planned("extraction.disk_quota_gb=1e-6")["extraction"].state == "cached"


def test_an_artifact_set_aside_is_called_damaged_not_that_of_another_corpus() -> None:
    key, verifier = make_corpus()
    make(keys.extraction_key(RECIPE.extraction, make(key), verifier))
    folder = home() / key.location
    (folder / MANIFEST).rename(folder / DAMAGED_MANIFEST)
    assert planned()["extraction"].reason == "damaged, and set aside"


@pytest.mark.parametrize(("setting", "value"), [("thinking", "on"), ("template_options", "{mood: good}")])
def test_a_variable_that_the_template_does_not_read_is_named_by_its_setting(
    tmp_path: Path, setting: str, value: str
) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(ValueError, match=rf"^verifier\.{setting}: the chat template does not read"):
        planned(f"verifier.template={template}", f"verifier.{setting}={value}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("extraction.runner=ray", r"extraction.runner: ray needs .* pip install 'dflash\[ray\]'"),
        ("extraction.storage=s3://bucket", r"extraction.storage: .* pip install 'dflash\[cloud\]'"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    monkeypatch.setattr(planning, "find_spec", lambda _: None)
    planned()
    with pytest.raises(ValueError, match=message):
        planned(change)


def test_a_width_that_fp8_does_not_allow_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    narrow = shutil.copytree(resolve("bundled:demo-verifier"), tmp_path / "narrow")
    settings = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(settings | {"hidden_size": 96}))
    with pytest.raises(ValueError, match=r"fp8 needs a hidden size divisible by 64, the verifier's is 96"):
        planned(f"verifier.model={narrow}", "extraction.storage_dtype=fp8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.shape={num_attention_heads: 5}", r"^training: 5 attention heads are not a multiple of 2 key/value"),
        ("training.shape={head_dim: 31}", r"^training: 31 of 31 dimensions rotate; choose an even head_dim"),
        ("training.shape={sliding_window: 4}", r"^training: sliding_window 4 is smaller than a block of 16; raise it"),
        (
            "training.shape={sliding_window: 64, sliding_layers: [7]}",
            r"^training\.shape\.sliding_layers: \[7\] are not",
        ),
        ("training.shape={sliding_layers: [0]}", r"^training\.shape\.sliding_layers need a window"),
        ("training.draft_vocab_size=1", r"^training\.draft_vocab_size: 1 leaves nothing to draft but mask and end tok"),
        (
            "training.initialisation=verifer",
            r"^training\.initialisation: no verifer/config\.json; expected random, verifier or the folder of a drafter",
        ),
    ],
)
def test_a_drafter_that_cannot_be_made_is_refused_before_anything_is(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(change)


@pytest.mark.parametrize(
    ("name", "trains"),
    [
        ("demo", True),
        ("train-drafter/demo", True),
        ("prepare-data/demo", False),
        ("evaluate/demo", False),
        ("nightly-evaluation/demo", False),
    ],
)
def test_only_what_trains_needs_the_drafter_that_training_starts_from(name: str, trains: bool) -> None:
    start = load(name, ["training.initialisation=gone"])
    with pytest.raises(ValueError, match=r"^training\.initialisation") if trains else nullcontext():
        preflight(start.recipe, trains=start.trains)


def test_a_start_from_a_drafter_of_another_depth_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    verifier, taps = preflight(RECIPE, trains=False)
    settings = json.loads((Path(verifier.path) / "config.json").read_text())
    drafter = drafter_config(RECIPE.training, settings, target_layer_ids=taps)
    (tmp_path / "config.json").write_text(json.dumps(drafter.to_json(dtype="float32")))
    start = f"training.initialisation={tmp_path}"
    with pytest.raises(ValueError, match=r"^training\.initialisation: no .*/model\.safetensors; expected"):
        planned(start)
    (tmp_path / "model.safetensors").touch()
    planned(start)
    with pytest.raises(ValueError, match=r"^training\.initialisation: .* is another one: layer_types is \('full_att"):
        planned(start, f"training.num_layers={RECIPE.training.num_layers + 1}")


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    bare = shutil.copytree(resolve("bundled:demo-verifier"), tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"bare has no chat template; .* verifier.template"):
        planned(f"verifier.model={bare}")
