"""Small real verifiers with random weights, their greedy answers, and drafters that are right now and then."""

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash.decoding.replay import response_span
from dflash.drafter.model import Drafter, DrafterConfig, Ends
from dflash.hidden.encoding import as_stored
from dflash.hidden.store import RowStates
from dflash.verifier import Verifier

LAYERS = (1, 3)
VOCAB = 61
ARCHITECTURES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def make_verifier(kind: str = "qwen3", *, seed: int = 0, eos: int = 7) -> Verifier:
    config_class, model_class = ARCHITECTURES[kind]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,  # wide, so that answers wander and choices are clear
        tie_word_embeddings=kind == "llama",
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
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
    features_1TF, greedy_1T, *_ = verifier.forward(ids_1T, layers=LAYERS)
    supervised_T = torch.arange(ids_1T.shape[1]) >= len(prompt)
    return RowStates(as_stored(features_1TF[0], storage_dtype).clone(), ids_1T[0], supervised_T, greedy_1T[0].clone())


def make_ends(verifier: Verifier) -> Ends:
    return Ends(verifier.frozen_weights(), dtype=torch.float32)


def make_drafter(verifier: Verifier, *, block_size: int = 6, seed: int = 0) -> Drafter:
    config = DrafterConfig.from_verifier(
        verifier.model.config.to_dict(),
        block_size=block_size,
        num_layers=1,
        mask_token_id=VOCAB - 1,
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
