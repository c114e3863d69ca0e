import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.drafter.export import load_drafter, save_drafter
from dflash.drafter.shape import DrafterConfig
from tests.drafter.small import features, make_config, make_drafter, make_ends


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


@pytest.mark.parametrize("kept", [0, 7, 2000])
def test_weights_that_are_cut_short_are_named_as_damaged(tmp_path, kept):
    save_drafter(tmp_path, make_drafter())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        load_drafter(tmp_path, dtype=torch.float32)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64},
    "mrope": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rope_is_written_out_and_survives_saving_and_loading_in_either_schema(tmp_path, rope):
    drafter, ends = make_drafter(verifier={"rope_parameters": ROPES[rope]}), make_ends()
    save_drafter(tmp_path, drafter)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert "mrope_section" not in str(settings), "the positions of a text token are equal in all sections"
    older = {name: value for name, value in settings.items() if name != "rope_parameters"}
    newer = {name: value for name, value in settings.items() if name not in ("rope_theta", "rope_scaling")}
    if rope in ("linear", "yarn"):  # an unscaled partial one has a field of its own in the older schema
        assert DrafterConfig.from_json(older).rope == drafter.config.rope
    assert DrafterConfig.from_json(newer) == drafter.config
    loaded = load_drafter(tmp_path, dtype=torch.float32)
    ids, anchors = torch.tensor([3]), torch.tensor([206])
    outputs = [
        d.draft(ends, ids, anchors_A=anchors, context=d.context(features(9), start=200)) for d in (drafter, loaded)
    ]
    assert torch.equal(*outputs), "frequencies are not lost on a meta device"


SHAPES = {
    "wider": {"hidden_size": 40, "head_dim": 12, "num_attention_heads": 6, "num_key_value_heads": 3},
    "windows": {"sliding_window": 6, "num_layers": 3},
    "one window": {"sliding_window": 7, "sliding_layers": [1]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_survives_saving_and_loading(tmp_path, shape):
    drafter, ends = make_drafter(**SHAPES[shape]), make_ends()
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path, dtype=torch.float32)
    assert loaded.config == drafter.config
    ids, anchors = torch.tensor([3]), torch.tensor([15])
    outputs = [d.draft(ends, ids, anchors_A=anchors, context=d.context(features(20))) for d in (drafter, loaded)]
    assert torch.equal(*outputs)
    assert ends.logits(outputs[0]).shape == (1, 4, 61)


def test_only_a_drafter_of_another_width_has_weights_and_a_field_that_others_do_not_know(tmp_path):
    extra = {"embed_proj.weight", "head_proj.weight"}
    for width, expected in ((0, set()), (40, extra)):
        drafter = make_drafter(hidden_size=width)
        assert set(drafter.state_dict()) & extra == expected
        assert ("target_hidden_size" in drafter.config.to_json(dtype="float32")) == bool(expected)


def test_a_config_that_layers_cannot_follow_is_refused_with_the_reason():
    published = make_config(sliding_window=6).to_json(dtype="float32")
    assert published["layer_types"] == ["sliding_attention", "full_attention"]
    for change, reason in (
        ({"layer_types": ["full_attention"]}, "^has 2 layers, but 1 layer_types; correct it, or get the folder again$"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"is_causal": True}, "^has is_causal True, .* both directions; correct it, or get the folder again$"),
        ({"sliding_window": 4}, "sliding_window 4 is smaller than a block of 5"),
        ({"rope_parameters": {"rope_type": "longrope"}, "rope_scaling": None}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}, "rope_scaling": None}, "linear' lacks factor"),
        ({"num_key_value_heads": 3}, "not a multiple of 3"),
        ({"dflash_config": None}, "has dflash_config None"),
        ({"rope_theta": 5.0}, "rope_theta 5, but 10000 in its rope_parameters"),
        ({"block_size": "x", "head_dim": 3.5}, "block_size .x. .*, head_dim 3.5 "),
    ):
        with pytest.raises(ValueError, match=reason):
            DrafterConfig.from_json(published | change)
    del published["block_size"]
    with pytest.raises(ValueError, match="has no 'block_size'"):
        DrafterConfig.from_json(published)


def test_layers_with_a_window_are_all_but_the_last_unless_named():
    full, sliding = "full_attention", "sliding_attention"
    assert make_config(sliding_window=9, num_layers=3).layer_types == (sliding, sliding, full)
    assert make_config(sliding_window=9, num_layers=3, sliding_layers=[2]).layer_types == (full, full, sliding)
    for shape, reason in (
        ({"sliding_layers": [0]}, "need a window"),
        ({"sliding_layers": [2]}, r"\[2\] are not among 2"),
        ({"sliding_window": 9, "num_layers": 1}, "the only layer, which is the last, sees all"),
    ):
        with pytest.raises(ValueError, match=reason):
            make_config(**shape)
