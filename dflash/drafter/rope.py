"""Rotary positions (arXiv 2104.09864): which parameters a config asks for, and their frequencies.

Knows configs as dictionaries. The scaled kinds are computed as in Transformers, always in float32:
bfloat16 frequencies err by radians at position 2,048.
"""

import math
from typing import Any

import torch
from torch import Tensor

DEFAULT_THETA = 10_000.0
FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The kinds of RoPE and the numbers that each cannot do without."""


def rope_parameters(settings: dict[str, Any]) -> dict[str, Any]:
    """All RoPE parameters of a config.json, of Transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

    Where layer types have different ones, those of full attention. Sections of a multimodal RoPE are left out: the
    three positions of a text token are equal, so that all sections rotate alike. Raises ValueError for kinds that are
    not in FIELDS, and for numbers that are missing.
    """
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    given = given.get("full_attention") or given
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "default" if kind == "mrope" else kind
    if kind not in FIELDS:
        raise ValueError(f"config.json: RoPE of type {kind!r} is not supported, only {', '.join(FIELDS)}")
    theta = given.get("rope_theta") or settings.get("rope_theta") or DEFAULT_THETA
    partial = given.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
    rope = {"rope_type": kind, "rope_theta": float(theta), "partial_rotary_factor": float(partial)}
    known = {"original_max_position_embeddings": settings.get("max_position_embeddings")} | given
    if length := settings.get("original_max_position_embeddings"):
        known["original_max_position_embeddings"] = length
    if missing := [name for name in FIELDS[kind] if known.get(name) is None]:
        raise ValueError(f"config.json: RoPE of type {kind!r} lacks {', '.join(missing)}")
    rope |= {name: known[name] for name in FIELDS[kind]}
    return rope | _yarn_defaults(known) if kind == "yarn" else rope


def _yarn_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """What YaRN (arXiv 2309.00071) derives or assumes, made explicit; DeepSeek's mscales give one attention factor."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(given["factor"]) + 1.0 if given["factor"] > 1 else 1.0

    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        both = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = mscale(both[0]) / mscale(both[1]) if both[0] and both[1] else mscale(1.0)
    return {
        "attention_factor": attention_factor,
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "truncate": given.get("truncate", True),
    }


def frequencies(rope: dict[str, Any], *, head_dim: int) -> Tensor:
    """Radians per position of each pair of rotated dimensions, float32, from what `rope_parameters` gave."""
    rotated = int(head_dim * rope["partial_rotary_factor"])
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    kind = rope["rope_type"]
    if kind == "default":
        return plain
    slowed = plain / rope["factor"]
    if kind == "linear":
        return slowed
    length = rope["original_max_position_embeddings"]
    if kind == "llama3":
        turns = length * plain / (2 * math.pi)  # over the length of the pre-training
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:

        def pair_with(turns: float) -> float:
            return rotated * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

        first, last = pair_with(rope["beta_fast"]), pair_with(rope["beta_slow"])
        if rope["truncate"]:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        pairs = torch.arange(rotated // 2, dtype=torch.float32)
        kept = 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return slowed * (1 - kept) + plain * kept
