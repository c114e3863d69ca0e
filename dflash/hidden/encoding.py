"""How states become the numbers of an array, and back: bfloat16 as its bits, which Zarr lacks, float32, and fp8.

fp8 is e4m3 with a bfloat16 scale per token and group of channels: a few channels are a hundred times the others, and a
scale per token alone would leave little of those. Knows no files.

T tokens, K taps, F features (taps x hidden size)
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

GROUP = 64  # channels that share a scale
LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 2.0**-126  # bfloat16's smallest normal number; smaller ones are too coarse to divide by
AT_ONCE = 2**17  # numbers of fp8; what becomes of more would leave the cache before it is used

ENCODINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {
        "logical_dtype": "bfloat16",
        "bit_layout": "SEEEEEEEEMMMMMMM",
        "endian": "little",
        "decode": "torch.from_numpy(a).view(torch.bfloat16)",
    },
    "float32": {"logical_dtype": "float32"},
    "fp8": {
        "logical_dtype": "bfloat16",
        "bit_layout": "SEEEEMMM",
        "encoding": f"float8_e4m3fn, times scales[token, channel // {GROUP}], whose numbers are the bits of bfloat16",
        "decode": "(torch.from_numpy(a).view(torch.float8_e4m3fn).to(torch.bfloat16).unflatten(1, (-1, 64)) "
        "* torch.from_numpy(scales).view(torch.bfloat16)[..., None]).flatten(1)",
    },
}
"""The attributes of an array: what a reader must know beyond Zarr."""

NUMBERS = {"bfloat16": "uint16", "float32": "float32", "fp8": "uint8"}
_E4M3_AS_BFLOAT16 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)


def encode(states_TF: torch.Tensor, storage_dtype: str) -> np.ndarray:
    """The numbers of bfloat16 or float32 states."""
    stored_TF = states_TF.to(getattr(torch, storage_dtype)).contiguous()
    return bits(stored_TF, NUMBERS[storage_dtype])


def encode_fp8(states_TF: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the states, (T, F), and of their scales, (T, F / 64)."""
    parts = [_quantise(states_TF[block]) for block in _blocks(states_TF)]
    codes, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return bits(codes.flatten(1), "uint8"), bits(scales.squeeze(-1), "uint16")


def code_memory(out_TF: torch.Tensor) -> np.ndarray:
    """Where `decode_fp8` expects the numbers: the second half of the memory that it fills."""
    return out_TF.view(torch.uint8).numpy().reshape(2, *out_TF.shape)[1]


def decode_fp8(scales: np.ndarray, out_TF: torch.Tensor) -> None:
    """What `encode_fp8` gave, its codes in `code_memory(out_TF)`, into contiguous bfloat16 memory.

    By a table, since PyTorch's conversion is slow.
    """
    codes, out, table = code_memory(out_TF), bits(out_TF, "int16"), bits(_E4M3_AS_BFLOAT16, "int16")
    factors = torch.from_numpy(scales).view(torch.bfloat16)[..., None]
    for block in _blocks(out_TF):
        np.take(table, codes[block].copy(), out=out[block], mode="clip")  # copied, as the last overlap what they become
        out_TF[block].unflatten(1, (-1, GROUP)).mul_(factors[block])


def relative_errors(states_TF: torch.Tensor, codes: np.ndarray, scales: np.ndarray, *, num_taps: int) -> torch.Tensor:
    """|decoded - exact| / |exact| of every token and tap that is not zero."""
    parts = []
    for block in _blocks(states_TF):
        exact_TF = states_TF[block]
        decoded_TF = torch.empty(exact_TF.shape, dtype=torch.bfloat16)
        code_memory(decoded_TF)[:] = codes[block]
        decode_fp8(scales[block], decoded_TF)
        errors_TF = decoded_TF.to(exact_TF.dtype).sub_(exact_TF)
        errors_TK, exact_TK = (
            torch.linalg.vector_norm(x.unflatten(1, (num_taps, -1)), dim=-1, dtype=torch.float32)
            for x in (errors_TF, exact_TF)
        )
        parts.append((errors_TK / exact_TK)[exact_TK > 0])
    return torch.cat(parts)


def as_stored(states: torch.Tensor, storage_dtype: str) -> torch.Tensor:
    """States (…, F) as they would be read back from the store."""
    if storage_dtype != "fp8":
        return states.to(getattr(torch, storage_dtype))
    codes, scales = _quantise(states)
    return (codes.to(torch.bfloat16) * scales).flatten(-2)


def bits(tensor: torch.Tensor, dtype: str | np.dtype) -> np.ndarray:
    """The memory of a tensor whose last dimension is contiguous, as numbers of a type of the same width."""
    return tensor.view(torch.uint8).numpy().view(dtype)


def _blocks(states_TF: torch.Tensor) -> Iterator[slice]:
    """Runs of tokens that stay in the processor's cache."""
    tokens = max(1, AT_ONCE // states_TF.shape[1])
    return (slice(start, start + tokens) for start in range(0, len(states_TF), tokens))


def _quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 (…, F / 64, 64) and scales (…, F / 64, 1); the largest of a group becomes 448."""
    groups = states.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / LARGEST).to(torch.bfloat16).clamp(min=SMALLEST_SCALE)
    return (groups / scales.float()).to(torch.float8_e4m3fn), scales
