"""Rotary positions (arXiv 2104.09864): the frequencies of the parameters that a config asks for.

The scaled kinds are computed as in Transformers, always in float32: bfloat16 frequencies err by radians at position
2,048.
"""

import math
from typing import Any

import torch
from torch import Tensor


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
