import warnings

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash.drafter.rope import frequencies
from dflash.drafter.shape import rope_parameters

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn of a short text": {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 40, "beta_fast": 8},
    "yarn with an attention factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.3, "truncate": False},
    "yarn of DeepSeek": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_slow": 2},
    "partial yarn": {"rope_type": "yarn", **YARN, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("theta", [10_000.0, 5e6])
def test_scaled_frequencies_are_those_of_transformers(kind, theta):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"max_position_embeddings": 2048, "rope_parameters": SCALED[kind] | {"rope_theta": theta}}
        config = Qwen3Config(head_dim=64, **settings)
        expected, scale = ROPE_INIT_FUNCTIONS[SCALED[kind]["rope_type"]](config)
    rope = rope_parameters(settings)
    found = frequencies(rope, head_dim=64)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert rope.get("attention_factor", 1.0) == pytest.approx(scale)


def test_parameters_are_found_wherever_a_config_puts_them():
    plain = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}
    assert rope_parameters({"rope_theta": 5e5, "rope_scaling": None}) == plain
    assert rope_parameters({"rope_parameters": {"rope_theta": 5e5}}) == plain
    per_type = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    assert rope_parameters({"rope_parameters": per_type}) == plain
    assert rope_parameters({"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}) == plain
    assert rope_parameters({"rope_theta": 5e5, "partial_rotary_factor": 0.25})["partial_rotary_factor"] == 0.25
    older = {"rope_theta": 5e5, "max_position_embeddings": 99, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert rope_parameters(older)["original_max_position_embeddings"] == 99


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_kind_that_is_not_known_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"'{kind}' is not supported"):
        rope_parameters({"rope_scaling": {"type": kind, "factor": 2.0}})
