"""Small real verifiers with random weights, their greedy answers, and drafters that are right now and then."""

import random
from typing import Any

import torch
import transformers

from dflash.decoding.replay import response_span
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.hidden.encoding import as_stored
from dflash.hidden.store import RowStates
from dflash.verifier import Verifier

LAYERS = (1, 3)
VOCAB = 61
WINDOW = 4
ALTERNATING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "sliding_window": WINDOW,
}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3ForCausalLM", {**ALTERNATING, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOssForCausalLM", {
        **ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }),
    "qwen3_5": ("Qwen3_5ForCausalLM", DELTA),
    "qwen3_next": ("Qwen3NextForCausalLM", {**DELTA, **EXPERTS, "num_experts": 4}),
}  # fmt: skip
DENSE, SLIDING, HYBRID = ("qwen3", "llama"), ("mistral", "gemma3", "gpt_oss"), ("qwen3_5", "qwen3_next")


def make_verifier(kind: str = "qwen3", *, seed: int = 0, eos: int = 7, vocab_size: int = VOCAB) -> Verifier:
    class_name, settings = KINDS[kind]
    model_class = getattr(transformers, class_name)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # wide, so that answers wander and choices are clear
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
    }
    if "layer_types" in settings:
        settings = settings | {"layer_types": settings["layer_types"][: sizes["num_hidden_layers"]]}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**sizes | settings))
    return Verifier(model, None, eos_ids=frozenset([eos]))


def make_prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    """Of one to eight tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB - 1) for _ in range(1 + i % 8)] for i in range(count)]


def make_row(
    verifier: Verifier, prompt: list[int], response: list[int], *, storage_dtype: str = "float32"
) -> RowStates:
    """As extraction stores it."""
    ids_1T = torch.tensor([prompt + response])
    outputs = verifier.forward(ids_1T, layers=LAYERS, final=True)
    supervised_T = torch.arange(ids_1T.shape[1]) >= len(prompt)
    features_TF = as_stored(outputs.features_BTF[0], storage_dtype).clone()
    return RowStates(features_TF, ids_1T[0], supervised_T, outputs.greedy_BT[0].clone(), outputs.final_BTH[0].clone())


def make_ends(verifier: Verifier) -> Ends:
    return Ends(verifier.frozen_weights(), dtype=torch.float32)


def make_drafter(verifier: Verifier, *, block_size: int = 6, seed: int = 0, mask_token_id: int = VOCAB - 1) -> Drafter:
    config = DrafterConfig.from_verifier(
        verifier.model.config.to_dict(),
        block_size=block_size,
        num_layers=1,
        mask_token_id=mask_token_id,
        target_layer_ids=list(LAYERS),
    )
    return Drafter(config, generator=torch.Generator().manual_seed(seed)).eval()


def teach(drafter: Drafter, ends: Ends, rows: list[RowStates], *, steps: int) -> None:
    """Some steps of cross-entropy on rows, so that drafts are partly right."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    num_slots = drafter.config.block_size - 1
    for step in range(steps):
        row = rows[step % len(rows)]
        first, end = response_span(row.loss_mask_T)
        anchors_A = torch.arange(first, end - num_slots)
        labels_AS = row.input_ids_T[anchors_A[:, None] + torch.arange(1, num_slots + 1)]
        context = drafter.context(row.features_TF.float())
        hidden_ASH = drafter.draft(ends, row.input_ids_T[anchors_A], anchors_A=anchors_A, context=context)
        loss = torch.nn.functional.cross_entropy(ends.logits(hidden_ASH).flatten(0, 1), labels_AS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
