"""Imports: drafters as other projects write them draft the same here, or one line says what is wrong with them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.config import TrainingConfig, VerifierConfig
from dflash.drafter.export import load_drafter, save_drafter
from dflash.drafter.formats import FORMATS
from dflash.drafter.initialisation import initialise
from dflash.drafter.model import Drafter
from dflash.export.exporting import CHECKSUMS, PROVENANCE, export_drafter
from dflash.export.importing import check_sums, import_drafter, verifier_of
from dflash.keys import training_key
from dflash.manifests import Artifact, file_sha256, home, load_manifest
from dflash.pinning import pin
from tests.export.export_small import LAYERS, Made

VERIFIER = "bundled:demo-verifier"
Change = Callable[[Path], object]


def read(folder: Path, verifier: str = VERIFIER, *, block_size: int = 0) -> Artifact:
    pinned = pin(VerifierConfig(model=verifier)) if verifier else verifier_of(folder, revision="main")
    return import_drafter(folder, pinned, block_size=block_size)


def error(folder: Path, verifier: str = VERIFIER, **settings: Any) -> str:
    before = set((home() / "artifacts" / "training").iterdir())
    with pytest.raises(ValueError) as caught:
        read(folder, verifier, **settings)
    assert set((home() / "artifacts" / "training").iterdir()) == before, "nothing is published"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def drafts(folder: Path) -> torch.Tensor:
    """Final states of one block, in float32."""
    drafter = load_drafter(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    size, width = drafter.config.block_size, drafter.config.verifier_hidden_size
    context = drafter.context(torch.randn(9, width * len(LAYERS), generator=generator))
    blocks_1WH = torch.randn(1, size, width, generator=generator)
    return drafter(blocks_1WH, anchors_A=torch.tensor([9]), context=context)


@pytest.fixture(scope="module")
def drafter(made: Made) -> Artifact:
    return made.drafter(seed=7)


def exported(drafter: Artifact, folder: Path, kind: str) -> Path:
    return export_drafter(drafter.key, folder, kind=kind, dtype="", verifier="", revision="main", ungated=True)


def as_torchspec(drafter: Artifact, folder: Path, made: Made) -> None:
    """Its names, its config, and the verifier's embedding beside."""
    folder.mkdir()
    settings = json.loads((drafter.path / "config.json").read_text())
    layers = {"num_target_layers": len(LAYERS), "target_num_hidden_layers": 6, "target_layer_ids": LAYERS}
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta")
    described = {name: settings[name] for name in kept} | layers
    described |= {"architectures": ["DFlashDraftModel"], "model_type": "dflash", "mask_token_id": 3}
    (folder / "config.json").write_text(json.dumps(described))
    names = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
    weights = {"draft_model.embed_tokens.weight": made.store.frozen()["embed_tokens.weight"]}
    for name, weight in load_file(drafter.path / "model.safetensors").items():
        for ours, theirs in names.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
        weights[f"draft_model.{name}"] = weight
    save_file(weights, folder / "model.safetensors")


def as_speculators_saves(folder: Path) -> None:
    """It leaves out what is its layers' default; here that is all the same as before."""
    described = json.loads((folder / "config.json").read_text())
    for name in ("rms_norm_eps", "attention_bias", "hidden_act", "layer_types", "sliding_window", "use_sliding_window"):
        del described["transformer_layer_config"][name]
    (folder / "config.json").write_text(json.dumps(described))


def in_shards(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {f"model-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("kind", ["dflash", "speculators", "torchspec", "older", "shards"])
def test_a_drafter_in_any_format_drafts_as_before_when_imported(
    made: Made, drafter: Artifact, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "theirs"
    block_size = 0
    if kind == "torchspec":
        as_torchspec(drafter, folder, made)
        assert "no block_size" in error(folder)
        block_size = 5
    elif kind in ("dflash", "speculators"):
        exported(drafter, folder, kind)
        for name in (CHECKSUMS, PROVENANCE):
            (folder / name).unlink()
        if kind == "speculators":
            as_speculators_saves(folder)
    else:
        shutil.copytree(drafter.path, folder, ignore=shutil.ignore_patterns("manifest.json"))
        if kind == "shards":
            in_shards(folder)
        else:  # the block size among the method's settings, the older schema of RoPE, taps by the formula
            described = json.loads((folder / "config.json").read_text())
            described["dflash_config"] |= {"block_size": described.pop("block_size")}
            del described["rope_parameters"]
            (folder / "config.json").write_text(json.dumps(described))
    imported = read(folder, block_size=block_size)
    assert torch.equal(drafts(imported.path), drafts(drafter.path))
    assert load_manifest(imported.path).summary["verifier"]["identity"] == made.verifier.identity
    assert read(folder, block_size=block_size) == imported, "the same again is found"


def test_an_export_says_itself_which_verifier_it_is_for_and_keeps_its_record(
    made: Made, drafter: Artifact, tmp_path: Path
) -> None:
    imported = read(exported(drafter, tmp_path / "out", "dflash"), verifier="")
    assert imported.summary["chat"] == made.store.info["chat"]
    again = exported(imported, tmp_path / "again", "dflash")
    assert json.loads((again / PROVENANCE).read_text())["drafter"] == drafter.key
    record = tmp_path / "out" / PROVENANCE
    found = json.loads(record.read_text())
    (tmp_path / "out" / CHECKSUMS).unlink()
    record.write_text(json.dumps({"schema_version": 1, "verifier": {"name": "moved"}}))
    assert "its verifier 'moved' at revision 'main' is not found" in error(tmp_path / "out", verifier="")
    found["verifier"]["identity"] = "0" * 16
    record.write_text(json.dumps(found))
    assert "it is for verifier bundled:demo-verifier (00000000), not for bundled:demo-verifier" in error(
        tmp_path / "out"
    )


@pytest.mark.parametrize(
    "record",
    [
        {"verifier": {"name": VERIFIER, "identity": "0" * 16}},
        {"schema_version": 1, "verifier": VERIFIER},
        {"schema_version": 2, "verifier": {}},
        [VERIFIER],
    ],
)
def test_a_record_of_another_layout_is_not_used(drafter: Artifact, tmp_path: Path, record: object) -> None:
    folder = exported(drafter, tmp_path / "out", "dflash")
    (folder / CHECKSUMS).unlink()
    (folder / PROVENANCE).write_text(json.dumps(record))
    assert "it does not say which verifier" in error(folder, verifier="")
    imported = read(folder)
    assert imported.summary["provenance"] is None
    again = exported(imported, tmp_path / "again", "dflash")
    assert json.loads((again / PROVENANCE).read_text())["drafter"] == imported.key


def test_an_imported_drafter_is_evaluated_and_training_starts_from_it(
    made: Made, drafter: Artifact, tmp_path: Path
) -> None:
    folder = exported(drafter, tmp_path / "out", "speculators")
    (folder / PROVENANCE).unlink()
    (folder / CHECKSUMS).unlink()
    imported = read(folder)
    report = made.report(imported)
    theirs, ours = (
        json.loads((r.path / "report.json").read_text()) for r in (report, made.report(drafter, parity="off"))
    )
    assert theirs["acceptance_length"] == ours["acceptance_length"]
    assert theirs["trained"]["conditions"] == dict.fromkeys(theirs["trained"]["conditions"]), "nothing is known of it"
    assert theirs["parity"]["agreement"] == 1
    started = Drafter(load_drafter(imported.path, dtype=torch.float32).config)
    initialise(started, str(imported.path))
    weights = load_file(drafter.path / "model.safetensors")
    assert all(torch.equal(weight, weights[name]) for name, weight in started.state_dict().items())
    config = TrainingConfig(mask_token_id=3, block_size=5, initialisation=str(imported.path))
    assert training_key(config, made.hidden_states).inputs.keys() >= {"initialisation.model.safetensors"}


def edit(**changes: Any) -> Change:
    """config.json with some fields set, or removed where None."""

    def change(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return apply


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    in_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "training_state.pt")


def index(names: dict[str, Any]) -> Change:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def method(**changes: Any) -> dict[str, Any]:
    return {"mask_token_id": 3, "target_layer_ids": LAYERS} | changes


WRONG: dict[str, tuple[Change, str]] = {
    "a missing weight": (weights(lambda w: w.pop("norm.weight")), "lacks norm.weight"),
    "an unknown weight": (weights(lambda w: w.update({"gate.weight": torch.ones(2)})), "has unknown gate.weight"),
    "another head": (
        weights(lambda w: w.update({"lm_head.weight": torch.ones(2048, 192)})),
        "lm_head.weight is not that of its verifier",
    ),
    "several dtypes": (weights(lambda w: w.update({"norm.weight": w["norm.weight"].half()})), "float16, float32"),
    "fewer taps": (edit(dflash_config=method(target_layer_ids=[1])), "fc.weight reads 384 features, but .* 1 taps"),
    "a tap beyond": (edit(dflash_config=method(target_layer_ids=[1, 5])), "layer 5 is out of range"),
    "another hidden size": (edit(hidden_size=256), "hidden size 256, its verifier bundled:demo-verifier 192"),
    "another vocabulary": (edit(vocab_size=32000), "vocabulary 32000"),
    "another depth": (edit(num_target_layers=36), "verifier of 36 layers, not of 6"),
    "a mask token beyond": (edit(dflash_config=method(mask_token_id=5000)), "mask_token_id: 5000 is out of range"),
    "an end token as mask": (
        edit(dflash_config=method(mask_token_id=2)),
        ": 2 is the verifier's eos token",
    ),
    "no mask token": (edit(dflash_config=method(mask_token_id=None)), "no mask_token_id"),
    "another method": (edit(dflash_config=method(projector_type="domino")), "projector_type 'domino'"),
    "another architecture": (edit(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel'. are unknown"),
    "biases": (edit(attention_bias=True), "attention_bias True"),
    "scaled embeddings": (edit(dflash_config=method(input_embedding_scale=8.0)), "input_embedding_scale 8.0"),
    "another speculator": (edit(speculators_model_type="eagle3"), "type 'eagle3'"),
    "half a file": (cut, "model.safetensors is damaged"),
    "a shard less": (lose_a_shard, "model-00002-of-00002.safetensors is missing, one of 2 files"),
    "pickles": (pickled, "training_state.pt is not read"),
    "counts for weights": (
        weights(lambda w: w.update({name: weight.long() for name, weight in w.items()})),
        "no numbers of the right kind in fc.weight, hidden_norm.weight",
    ),
    "no numbers": (weights(lambda w: w["fc.weight"].fill_(torch.nan)), "fc.weight hold numbers that are not finite"),
    "an index of something else": (index({"fc.weight": 5}), "index.json is damaged"),
    "an index that leads outside": (index({"fc.weight": "../a.safetensors"}), "'../a.safetensors' is no file of this"),
    "checksums in no encoding": (lambda folder: (folder / CHECKSUMS).write_bytes(b"\xff"), "SHA256SUMS is damaged"),
    "checksums of something outside": (
        lambda folder: (folder / CHECKSUMS).write_text(f"{'0' * 64}  ../config.json\n"),
        "SHA256SUMS:1: .* is no checksum and name",
    ),
    "another theta": (edit(rope_theta=5.0), "rope_theta 5, but 10000 in its rope_parameters"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "half a config": (lambda folder: (folder / "config.json").write_text('{"block'), "config.json is damaged"),
    "something else": (edit(num_hidden_layers=None), "has no 'num_hidden_layers'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_folder_is_named(drafter: Artifact, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(drafter.path, folder, ignore=shutil.ignore_patterns("manifest.json"))
    change, expected = WRONG[what]
    change(folder)
    found = error(folder)
    assert re.search(expected, found), found
    assert str(folder) in found


IMPOSSIBLE: dict[str, list[Any]] = {
    "block_size": ["x", -1, 1, 3.5, [0], True, 10**9],
    "rms_norm_eps": ["x", -1, 0, 1e9, {"a": 1}],
    "max_position_embeddings": ["x", 0],
    "num_hidden_layers": [3.5, 10**9],
    "num_key_value_heads": [0, -1],
    "intermediate_size": ["x", -1],
    "draft_vocab_size": ["x", 3.5],
    "mask_token_id": ["x", [], 3.5, True],
    "rope_parameters": ["x", []],
    "rope_scaling": ["x", 5],
    "architectures": [5, [0]],
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_a_value_that_no_drafter_has_is_named_with_its_field(drafter: Artifact, tmp_path: Path, field: str) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(drafter.path, folder, ignore=shutil.ignore_patterns("manifest.json"))
    for value in IMPOSSIBLE[field]:
        edit(**({"dflash_config": method(mask_token_id=value)} if field == "mask_token_id" else {field: value}))(folder)
        found = error(folder)
        assert str(folder) in found
        assert field in found
        assert repr(value) in found, found


def test_a_speculator_of_another_kind_is_named(drafter: Artifact, tmp_path: Path) -> None:
    for number, (changes, expected) in enumerate(
        (
            ({"draft_vocab_size": 1000}, "lacks d2t, t2d"),
            ({"aux_hidden_state_layer_ids": [0, 2]}, "hold the embedding"),
            ({"sample_from_anchor": True}, "sample_from_anchor True"),
            ({"block_size": None}, "has no 'block_size'"),
            ({"transformer_layer_config": "x"}, "transformer_layer_config 'x'"),
            ({"transformer_layer_config": {"rope_parameters": []}}, "is not known to Transformers"),
            ({"aux_hidden_state_layer_ids": []}, "aux_hidden_state_layer_ids []"),
            ({"mask_token_id": "x"}, "mask_token_id 'x'"),
        )
    ):
        folder = exported(drafter, tmp_path / str(number), "speculators")
        (folder / CHECKSUMS).unlink()
        edit(**changes)(folder)
        assert expected in error(folder)


@pytest.mark.parametrize("said", ["x", ["x"], {"verifier": "x"}, {"verifier": {"name_or_path": 5}}])
def test_a_verifier_that_is_said_in_another_layout_is_named(drafter: Artifact, tmp_path: Path, said: object) -> None:
    folder = exported(drafter, tmp_path / "out", "speculators")
    (folder / CHECKSUMS).unlink()
    edit(speculators_config=said)(folder)
    assert "config.json: has speculators_config" in error(folder, verifier="")


def test_a_download_that_is_not_whole_is_noticed_by_its_checksums(drafter: Artifact, tmp_path: Path) -> None:
    folder = exported(drafter, tmp_path / "out", "dflash")
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in error(folder)
    shutil.copyfile(folder / "config.json", folder / "tokenizer.json")
    assert "tokenizer.json differs from its checksum" in error(folder)


@pytest.mark.parametrize("mark", [" *", "  ./", " *./"])
def test_checksums_of_binary_mode_and_of_names_with_their_folder_are_read(tmp_path: Path, mark: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    line = file_sha256(tmp_path / "config.json") + mark
    (tmp_path / CHECKSUMS).write_text(f"{line}config.json\n")
    check_sums(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json differs from its checksum in SHA256SUMS"):
        check_sums(tmp_path)


@pytest.mark.parametrize("name", ["../config.json", "a/config.json", "/config.json", "", "."])
def test_checksums_of_files_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / CHECKSUMS).write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(ValueError, match=f"SHA256SUMS:1: .*; get the folder again|{CHECKSUMS} names it"):
        check_sums(tmp_path)


def test_the_dtype_of_the_weights_is_kept_and_the_verifier_must_be_known(drafter: Artifact, tmp_path: Path) -> None:
    assert "give --verifier" in error(drafter.path, verifier="")
    save_drafter(tmp_path, load_drafter(drafter.path, dtype=torch.bfloat16))
    assert json.loads((read(tmp_path).path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_drafter_of_a_part_of_the_vocabulary_goes_out_with_its_maps_and_head_and_comes_back(
    made: Made, tmp_path: Path, kind: str
) -> None:
    trimmed = made.drafter(seed=8, draft_vocab_size=100)
    folder = export_drafter(
        trimmed.key, tmp_path / "out", kind=kind, dtype="bfloat16", verifier="", revision="main", ungated=True
    )
    settings, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layers = settings.get("transformer_layer_config", settings)
    assert (settings["draft_vocab_size"], layers["vocab_size"]) == (100, 2048)
    assert (layers is settings) or "draft_vocab_size" not in layers
    assert weights["d2t"].tolist() == [2 * place for place in range(100)]
    assert weights["t2d"].nonzero()[:, 0].tolist() == [3 * place for place in range(100)]
    head_VH = made.store.frozen()["embed_tokens.weight"]
    assert torch.equal(weights["lm_head.weight"], head_VH[::3][:100].bfloat16())

    back = load_file(read(folder).path / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    (folder / CHECKSUMS).unlink()
    save_file(
        {name: weight + (name == "lm_head.weight") for name, weight in weights.items()}, folder / "model.safetensors"
    )
    assert "lm_head.weight is not that of its verifier" in error(folder)
