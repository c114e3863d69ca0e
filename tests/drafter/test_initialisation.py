import json
import logging

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dflash.drafter.attention import Visible
from dflash.drafter.export import save_drafter
from dflash.drafter.initialisation import initialise
from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterConfig
from dflash.last_layers import last_layers
from dflash.verifier import Verifier
from tests.drafter.small import VERIFIER, make_drafter

SIZES = {name: value for name, value in VERIFIER.items() if name != "rope_parameters"}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, MOE),
}


def make_verifier(family: str, **changes: object) -> Verifier:
    config_class, model_class, extra = FAMILIES[family]
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 7}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config_class(**SIZES | special | extra | changes))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.normal_(std=0.3)
    return Verifier(model, None, eos_ids=frozenset([7]))


def shape_of(verifier: Verifier, **shape: object) -> DrafterConfig:
    settings = {"block_size": 5, "num_layers": 2, "mask_token_id": 60, "target_layer_ids": [1, 3]}
    return DrafterConfig.from_verifier(verifier.model.config.to_dict(), **settings | shape)


def start(verifier: Verifier, **shape: object) -> tuple[Drafter, list[str]]:
    drafter = Drafter(shape_of(verifier, **shape))
    return drafter, initialise(drafter, "verifier", verifier_layers=last_layers(verifier, len(drafter.layers)))


def test_a_drafter_starts_as_the_verifiers_last_layers_behind_its_last_tap():
    verifier = make_verifier("qwen3")
    drafter, kept = start(verifier)
    assert kept == []
    for ours, theirs in zip(drafter.layers, verifier.decoder.layers[-2:], strict=True):
        expected = theirs.state_dict()
        assert ours.state_dict().keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in ours.state_dict().items())
    assert torch.equal(drafter.norm.weight, verifier.decoder.norm.weight)
    features = torch.randn(3, 48)
    torch.testing.assert_close(drafter.fc(features), features[:, 24:])


@torch.no_grad()
def test_a_layer_so_begun_computes_what_the_verifiers_does():
    """A block of one sees the context and itself: the verifier's attention, where the context is what it attends to."""
    verifier = make_verifier("qwen3")
    drafter, _ = start(verifier, block_size=2)
    theirs, ours = verifier.decoder.layers[-1], drafter.layers[-1]
    x_TH = torch.randn(9, 24, generator=torch.Generator().manual_seed(1))
    cos, sin = drafter._rope(torch.arange(9))
    normed_TH = ours.input_layernorm(x_TH)
    k_KTD, v_KTD = ours.self_attn.context(normed_TH[:8], cos[:8], sin[:8])
    visible = {0: Visible(torch.tensor([0]), torch.tensor([8]), 8, block_size=1)}
    mine = ours(x_TH[None, 8:], cos[None, 8:], sin[None, 8:], k_KTD, v_KTD, visible)
    embeddings = verifier.decoder.rotary_emb(x_TH[None], torch.arange(9)[None])
    expected = theirs(x_TH[None], position_embeddings=embeddings, attention_mask=None)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(mine[0, 0], expected.view(9, 24)[8], rtol=1e-4, atol=1e-5)


def test_norms_that_scale_by_one_more_are_converted_and_the_norm_before_the_mlp_is_taken():
    verifier = make_verifier("gemma2")
    drafter, kept = start(verifier)
    assert kept == []
    layer = verifier.decoder.layers[-1]
    torch.testing.assert_close(drafter.norm.weight.data, 1 + verifier.decoder.norm.weight)
    torch.testing.assert_close(drafter.layers[1].input_layernorm.weight.data, 1 + layer.input_layernorm.weight)
    before_mlp = drafter.layers[1].post_attention_layernorm.weight.data
    torch.testing.assert_close(before_mlp, 1 + layer.pre_feedforward_layernorm.weight)


def test_norms_that_the_verifier_does_not_have_start_as_ones():
    drafter, kept = start(make_verifier("llama"))
    assert kept == []
    assert torch.equal(drafter.layers[0].self_attn.q_norm.weight.data, torch.ones(8))


def test_what_does_not_agree_stays_random_and_is_named_in_one_line(caplog):
    caplog.set_level(logging.INFO)
    verifier = make_verifier("qwen3_moe")
    drafter, kept = start(verifier)
    assert kept == [f"layers.{i}.mlp.{name}_proj.weight" for i in range(2) for name in ("down", "gate", "up")]
    assert torch.equal(drafter.layers[1].self_attn.q_proj.weight, verifier.decoder.layers[-1].self_attn.q_proj.weight)
    assert [record.message.count("mlp.up_proj") for record in caplog.records] == [2]
    random = Drafter(shape_of(verifier)).state_dict()
    assert all(torch.equal(drafter.state_dict()[name], random[name]) for name in kept)
    _, kept = start(make_verifier("qwen3"), hidden_size=40, intermediate_size=48)
    assert "fc.weight" in kept
    assert len(kept) == 1 + 2 + 2 * 7


def test_random_keeps_what_the_drafter_was_made_with():
    drafter = make_drafter()
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    initialise(drafter, "random")
    assert all(torch.equal(weight, before[name]) for name, weight in drafter.state_dict().items())


def test_a_drafter_continues_from_the_folder_of_another_one(tmp_path):
    earlier, drafter = make_drafter(seed=1), make_drafter(seed=2)
    save_drafter(tmp_path, earlier.bfloat16())
    assert initialise(drafter, str(tmp_path)) == []
    assert all(torch.equal(weight, earlier.state_dict()[name].float()) for name, weight in drafter.state_dict().items())
    assert drafter.fc.weight.dtype == torch.float32
    assert drafter.fc.weight.requires_grad


def test_a_folder_of_another_drafter_is_refused_with_every_difference(tmp_path):
    save_drafter(tmp_path, make_drafter(block_size=7, num_layers=1))
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"max_position_embeddings": 99, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError) as refused:
        initialise(make_drafter(), str(tmp_path))
    message = str(refused.value)
    for part in ("block_size is 7, here 5", "rms_norm_eps is 1e-05, here 1e-06", "layer_types", "layers.1.mlp.up_proj"):
        assert part in message
    assert "max_position_embeddings" not in message
    for folder in ("nowhere", "veriifer"):
        with pytest.raises(ValueError, match=r"config.json is missing; give the folder of a DFlash drafter"):
            initialise(make_drafter(), folder)
