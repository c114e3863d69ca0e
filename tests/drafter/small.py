"""A drafter, the ends it works between, and features: small, real, seeded."""

import torch

from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig

VERIFIER = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def make_config(*, block_size: int = 5, verifier: dict[str, object] | None = None, **shape: object) -> DrafterConfig:
    """Of a verifier with some settings changed, in a shape of its own."""
    settings = {"block_size": block_size, "num_layers": 2, "mask_token_id": 60, "target_layer_ids": [1, 3]}
    return DrafterConfig.from_verifier(VERIFIER | (verifier or {}), **settings | shape)


def make_drafter(*, seed: int = 0, **settings: object) -> Drafter:
    drafter = Drafter(make_config(**settings), generator=torch.Generator().manual_seed(seed))
    for parameter in drafter.parameters():  # larger than at the start of training, so that every path shows
        if parameter.ndim == 2:
            parameter.data *= 8
    return drafter


def make_ends(seed: int = 1) -> Ends:
    generator = torch.Generator().manual_seed(seed)
    frozen = {name: torch.randn(61, 24, generator=generator) for name in ("embed_tokens.weight", "lm_head.weight")}
    return Ends(frozen, dtype=torch.float32)


def features(length: int, *, seed: int = 2) -> torch.Tensor:
    return torch.randn(length, 48, generator=torch.Generator().manual_seed(seed))
