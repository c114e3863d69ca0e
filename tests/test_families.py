"""Every family of verifiers: a tiny random model of each real class gives the states, choices and logits of the whole.

`DFLASH_UPDATE_FAMILIES=1 pytest tests/test_families.py` writes the README's table of what was checked.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from dflash.pinning import layer_kinds
from dflash.verifier import NORMS, Verifier, compact, describe_norm, find_fault, go_back, running_states

README = Path(__file__).parent.parent / "README.md"
VOCABULARY = 67
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide, so that choices are clear
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


class Family(NamedTuple):
    name: str
    model_class: str
    config: Mapping[str, Any] = MappingProxyType({})
    wrapper: Mapping[str, Any] | None = None
    """Of a multimodal model: settings beside those of its text part, which are `config`."""


FAMILIES = [
    Family("Qwen2", "Qwen2ForCausalLM"),
    Family("Qwen3", "Qwen3ForCausalLM"),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", {"num_experts": 4, **EXPERTS}),
    Family("Qwen3-Next", "Qwen3NextForCausalLM", {"num_experts": 4, **EXPERTS, **DELTA}),
    Family("Qwen3.5", "Qwen3_5ForCausalLM", DELTA),
    Family("Llama", "LlamaForCausalLM"),
    Family("Mistral", "MistralForCausalLM", {"sliding_window": 4}),
    Family("Gemma 2", "Gemma2ForCausalLM", {**SLIDING, "final_logit_softcapping": 3.0}),
    Family("Gemma 3", "Gemma3ForCausalLM", SLIDING),
    Family("Phi-3", "Phi3ForCausalLM"),
    Family("GLM-4", "Glm4ForCausalLM"),
    Family("gpt-oss", "GptOssForCausalLM", {
        **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
        },
    }),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", {**EXPERTS, **LATENT, "head_dim": 4}),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    Family("Granite", "GraniteForCausalLM", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    Family("Cohere", "CohereForCausalLM", {"logit_scale": 0.25}),
    Family("HyperCLOVA X", "HyperCLOVAXForCausalLM", {"logits_scaling": 0.25}),
    Family("MiniCPM3", "MiniCPM3ForCausalLM", {**LATENT, "dim_model_base": 8}),
    Family("Falcon-H1", "FalconH1ForCausalLM", {
        "lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }),
    Family("Gemma 3, multimodal", "Gemma3ForConditionalGeneration", SLIDING, {
        "vision_config": {"model_type": "siglip_vision_model", **VISION}, "mm_tokens_per_image": 4,
    }),
    Family("Qwen2-VL", "Qwen2VLForConditionalGeneration", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }, {"vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}}),
]  # fmt: skip


def build(family: Family) -> Verifier:
    model_class = getattr(transformers, family.model_class, None)
    if model_class is None:
        pytest.skip(f"Transformers {transformers.__version__} has no {family.model_class}")
    settings = SIZES | dict(family.config)
    config_class = model_class.config_class
    if family.wrapper is None:
        config = config_class(**settings)
    else:
        config = config_class(text_config=settings, **family.wrapper)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Verifier(model_class(config), None, eos_ids=frozenset())


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def verifier(request: pytest.FixtureRequest) -> Verifier:
    return build(request.param)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_taps_choices_and_logits_are_those_of_the_whole_model(verifier: Verifier) -> None:
    ids_BT = random_ids(2, 13)
    states = verifier.forward(ids_BT, layers=[0, 1, 2], final=True, top_k=5)
    whole = verifier.model(input_ids=ids_BT, output_hidden_states=True)
    assert torch.equal(states.features_BTF, torch.cat(whole.hidden_states[1:4], dim=-1))
    assert states.features_BTF.unflatten(-1, (3, -1)).any(-1).all()  # a running state is no excuse for zeros
    assert torch.equal(states.final_BTH, whole.hidden_states[4])
    torch.testing.assert_close(verifier.logits(states.final_BTH), whole.logits)
    assert torch.equal(states.greedy_BT, whole.logits.argmax(-1))
    logprobs, ids = whole.logits.log_softmax(-1).topk(5)
    assert torch.equal(states.topk_ids_BTK, ids)
    torch.testing.assert_close(states.topk_logprobs_BTK, logprobs)


def test_rows_padded_on_the_right_are_as_each_row_alone(verifier: Verifier) -> None:
    rows = [random_ids(n, seed=n) for n in (21, 4, 9)]
    padded_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    together = verifier.forward(padded_BT, layers=[0, 2], final=True, top_k=3)
    for i, row in enumerate(rows):
        alone = verifier.forward(row[None], layers=[0, 2], final=True, top_k=3)
        for of_batch, of_row in zip(together, alone, strict=True):
            torch.testing.assert_close(of_batch[i, : len(row)], of_row[0], rtol=1e-4, atol=1e-4)


def test_taps_alone_are_the_same_without_the_layers_behind_them(verifier: Verifier) -> None:
    ids_BT = random_ids(2, 9)
    expected = verifier.forward(ids_BT, layers=[0, 1]).features_BTF

    def must_not_run(*_: Any) -> None:
        pytest.fail("a layer behind the last tap ran")

    hook = verifier.decoder.layers[2].register_forward_pre_hook(must_not_run)
    alone = verifier.forward(ids_BT, layers=[0, 1], greedy=False)
    assert torch.equal(alone.features_BTF, expected)
    assert not any(part.numel() for part in alone[1:])
    hook.remove()
    assert torch.equal(verifier.forward(ids_BT, layers=[0, 1]).features_BTF, expected)


def test_a_family_is_sound(verifier: Verifier) -> None:
    assert find_fault(verifier) == ""


def test_where_trees_are_offered_a_branch_is_as_its_path_alone(verifier: Verifier) -> None:
    cache = verifier.new_cache()
    if running_states(cache):
        pytest.skip("a running state has no branches")
    prompt_T, nodes_N = random_ids(11), random_ids(3, seed=1)  # the third node is a sibling of the second
    visible = torch.ones(1, 1, 3, 14, dtype=torch.bool).tril(11)
    visible[..., 2, 12] = False
    verifier.forward(prompt_T[None], layers=[], cache=cache)
    tree = verifier.forward(
        nodes_N[None], layers=[0, 2], attention_mask=visible, position_ids=torch.tensor([[11, 12, 12]]), cache=cache
    )
    for node, path in enumerate([[0], [0, 1], [0, 2]]):
        alone = verifier.forward(torch.cat([prompt_T, nodes_N[path]])[None], layers=[0, 2])
        torch.testing.assert_close(tree.features_BTF[0, node], alone.features_BTF[0, -1], rtol=1e-4, atol=1e-4)
        assert tree.greedy_BT[0, node] == alone.greedy_BT[0, -1]


def test_what_was_drafted_and_rejected_leaves_no_trace(verifier: Verifier) -> None:
    text_T, drafted_N = random_ids(20), random_ids(5, seed=1)
    cache = verifier.new_cache()
    verifier.forward(text_T[None, :11], layers=[], cache=cache)
    states = running_states(cache)
    verifier.forward(torch.cat([text_T[11:14], drafted_N])[None], layers=[], cache=cache)
    if states:
        go_back(cache, states, length=11)
        verifier.forward(text_T[None, 11:14], layers=[], cache=cache)
    else:
        compact(cache, torch.arange(3), start=11)
    after = verifier.forward(text_T[None, 14:], layers=[0, 2], cache=cache)
    whole = verifier.forward(text_T[None], layers=[0, 2])
    torch.testing.assert_close(after.features_BTF, whole.features_BTF[:, 14:], rtol=1e-4, atol=1e-4)
    assert torch.equal(after.greedy_BT, whole.greedy_BT[:, 14:])


def test_the_final_norm_is_told_by_what_it_does_in_any_precision(verifier: Verifier) -> None:
    norm, eps = verifier.final_norm, getattr(verifier.model.config.get_text_config(), "rms_norm_eps", 1e-5)
    norm.weight.data.copy_(torch.linspace(0.5, 2, len(norm.weight)))
    kinds = set()
    for dtype in (torch.float32, torch.bfloat16):
        found = describe_norm(norm.to(dtype))
        kinds.add(found["kind"])
        assert found["formula"] == NORMS[found["kind"]]
        assert found["eps"] == eps
    assert len(kinds) == 1


def test_a_norm_of_no_known_kind_is_said_to_be_none() -> None:
    class Tripling(torch.nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(x)

    assert describe_norm(Tripling(8, eps=1e-3)) == {"kind": None, "formula": None, "eps": 1e-3}


def table_row(family: Family) -> str:
    verifier = build(family)
    config = verifier.model.config.get_text_config()
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or layer_kinds(config.to_dict()))
    kind = describe_norm(verifier.final_norm)["kind"]
    scale, softcap = verifier.logit_rule
    logits = [text for text, is_so in (("scaled", scale != 1), ("soft-capped", softcap is not None)) if is_so]
    live = "chain" if running_states(verifier.new_cache()) else "chain and trees"
    cells = (
        family.name,
        f"`{family.model_class}`",
        ", ".join(kind.replace("_", " ") for kind in kinds),
        kind,
        ", ".join(logits) or "plain",
        live,
    )
    return f"| {' | '.join(cells)} |"


HEADER = """\
| family | class | layers | final norm | logits | live decoding |
|---|---|---|---|---|---|
"""


def test_the_table_of_families_is_up_to_date() -> None:
    known = [family for family in FAMILIES if hasattr(transformers, family.model_class)]
    rows = [table_row(family) for family in known]
    before, header, below = README.read_text().partition(HEADER)
    assert header
    written, end, after = below.partition("\n\n")
    if os.environ.get("DFLASH_UPDATE_FAMILIES"):
        assert known == FAMILIES, "install a Transformers that has them all"
        written = "\n".join(rows)
        README.write_text(before + header + written + end + after)
    assert set(rows) <= set(written.splitlines())
    assert len(written.splitlines()) == len(FAMILIES)
