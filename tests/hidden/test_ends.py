"""The verifier's ends, rebuilt from what extraction stores, give the verifier's own logits and their gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hidden_small import VOCABULARY, make_corpus, pinned, save_verifier
from torch.nn import functional as F

from dflash.config import ExtractionConfig
from dflash.drafter.losses import slot_statistics
from dflash.drafter.model import Ends
from dflash.hidden.extraction import extract_shard, seal
from dflash.hidden.planning import plan_shards
from dflash.hidden.store import HiddenStates
from dflash.verifier import load_verifier

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "Granite": {"logits_scaling": 4.0, "tie_word_embeddings": False},
    "Phi": {},  # its head has a bias
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stored_final_state_and_ends_give_the_verifiers_own_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    folder = save_verifier(tmp_path / "verifier")  # for its tokenizer
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if getattr(model.lm_head, "bias", None) is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder)
    verifier, corpus = pinned(folder), make_corpus([9, 30, 12])
    settings = ExtractionConfig(target_layer_ids=[0, 1], storage_dtype="float32", store_final=True)
    shards = [extract_shard(plan, settings, corpus, verifier) for plan in plan_shards(settings, corpus, verifier)]
    store = HiddenStates.open(seal(shards, settings, corpus, verifier).path)
    ends = Ends(store.frozen(), dtype=torch.float32, **store.info["logits"])
    assert store.info["logits"] == load_verifier(verifier).logit_rule._asdict()
    for number in range(len(store.rows)):
        row = store.read(number)
        assert row.final_TH is not None
        with torch.no_grad():
            expected_TV = model(input_ids=row.input_ids_T[None]).logits[0]
        torch.testing.assert_close(ends.logits(row.final_TH), expected_TV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [{}, {"scale": 0.25}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 2.0}])
@pytest.mark.parametrize("biased", [False, True])
def test_the_gradient_of_a_loss_takes_scale_softcap_and_bias_into_account(rule: dict[str, float], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    frozen = {"embed_tokens.weight": torch.randn(23, 8, generator=generator)}
    if biased:
        frozen["lm_head.bias"] = torch.randn(23, generator=generator)
    ends = Ends(frozen, dtype=torch.float32, **rule)
    labels = torch.arange(11)
    hidden = torch.randn(11, 8, generator=generator, requires_grad=True)
    F.cross_entropy(ends.logits(hidden), labels, reduction="sum").backward()
    assert hidden.grad is not None
    expected, hidden.grad = hidden.grad, None
    nll = slot_statistics(hidden, labels, ends, loss={"ce": 1.0}).loss_N
    nll.sum().backward()
    torch.testing.assert_close(hidden.grad, expected)
