"""Near-ties: choices between two tokens so alike that another rounding makes them otherwise. Knows no file.

Passes of another shape (a batch, a tree, one token) add up in another order. Where texts or rounds differ that should
be equal, the margin at the first difference says whether that is all there is to it.

T tokens, V vocabulary
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dflash.verifier import Verifier

NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, "fp8": 0.5}
"""Log-probabilities that are closer than that are a near-tie, by the coarser of arithmetic and stored states; in this
order. Some hundred times what rounding does to the logits of a small verifier, since a deep one rounds more often."""


def coarser(*dtypes: str) -> str:
    return max(dtypes, key=list(NEAR_TIE).index)


class Divergence(NamedTuple):
    """The first token in which two answers differ, and how far below its favourite the verifier, alone, puts the less
    likely of the two there; infinitely far where one of the answers has ended.
    """

    at: int
    margin: float


@torch.inference_mode()
def divergence(
    verifier: Verifier, prompt_ids: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> Divergence | None:
    """Where two answers to a prompt part; None where they are the same."""
    if list(first) == list(second):
        return None
    at = [*(a == b for a, b in zip(first, second, strict=False)), False].index(False)
    if at == min(len(first), len(second)):
        return Divergence(at, float("inf"))
    ids_1T = torch.tensor([[*prompt_ids, *first[:at]]], device=verifier.device)
    final_H = verifier.forward(ids_1T, layers=(), greedy=False, final=True).final_BTH[0, -1]
    logits_V = verifier.logits(final_H[None])[0].float()
    return Divergence(at, float(logits_V.max() - logits_V[[first[at], second[at]]].min()))
