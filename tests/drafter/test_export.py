import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.drafter.export import load_drafter, save_drafter
from dflash.drafter.model import DrafterConfig
from tests.drafter.small import VERIFIER, features, make_drafter, make_ends


def test_a_saved_drafter_drafts_the_same_when_loaded(tmp_path):
    drafter, ends = make_drafter(), make_ends()
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path, dtype=torch.float32)
    assert loaded.config == drafter.config
    ids, anchors = torch.tensor([3]), torch.tensor([6])
    outputs = [d.draft(ends, ids, anchors_A=anchors, context=d.context(features(9))) for d in (drafter, loaded)]
    assert torch.equal(*outputs)


def test_the_config_is_the_published_one(tmp_path):
    save_drafter(tmp_path, make_drafter())
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["architectures"] == ["DFlashDraftModel"]
    assert settings["dflash_config"] == {"mask_token_id": 60, "target_layer_ids": [1, 3]}
    assert (settings["block_size"], settings["num_target_layers"], settings["dtype"]) == (5, 6, "float32")
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == 10_000.0


@pytest.mark.parametrize("change", ["lacks", "has unknown", "has misshapen"])
def test_wrong_weights_are_named(tmp_path, change):
    save_drafter(tmp_path, make_drafter())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    tensor = weights.pop("layers.1.mlp.up_proj.weight")
    if change == "has unknown":
        weights |= {"layers.1.mlp.up_proj.weight": tensor, "lm_head.weight": tensor.clone()}
    elif change == "has misshapen":
        weights["layers.1.mlp.up_proj.weight"] = tensor[:3].clone()
    save_file(weights, path)
    with pytest.raises(ValueError, match=f"{change} l"):
        load_drafter(tmp_path, dtype=torch.float32)


def test_scaled_rope_is_refused_and_theta_is_found_where_either_transformers_puts_it():
    shape = {"block_size": 4, "num_layers": 1, "mask_token_id": 60, "target_layer_ids": [1]}
    older = {name: value for name, value in VERIFIER.items() if name != "rope_parameters"} | {"rope_theta": 5e5}
    assert DrafterConfig.from_verifier(older, **shape).rope_theta == 5e5
    with pytest.raises(ValueError, match="yarn"):
        DrafterConfig.from_verifier(older | {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, **shape)
