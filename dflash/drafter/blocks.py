"""Which blocks of a conversation a drafter trains on, and what each slot must predict. Knows ids and masks only.

Conversations of a micro-batch lie one after the other, without padding: its documents. An anchor is a token among
them; at position a of its document it opens the block a, a+1, …; slot k predicts the token at a+k, k = 1..S. The label
is what the verifier itself would have said there, its choice for the token after position a+k-1, or that token itself.

P tokens of all documents, D documents, A anchors of all documents, S predicted slots
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Where each conversation of a micro-batch begins and ends: numbers of the host, no device is waited for."""

    lengths: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of each document's first token, and of the end: D + 1 numbers."""
        return (0, *accumulate(self.lengths))

    def positions_P(self, device: torch.device) -> Tensor:  # noqa: N802
        """Of each token within its document."""
        tokens_P = torch.arange(self.total, device=device)
        return tokens_P - self.around(tokens_P)[0]

    def around(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(first, end) of the document that each token is in; the place behind all tokens is in the last one."""
        offsets, numbers = self._found(tokens)
        return offsets[numbers], offsets[numbers + 1]

    def numbers(self, tokens: Tensor) -> Tensor:
        """Of the document that each token is in, from 0."""
        return self._found(tokens)[1]

    def _found(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        offsets = torch.tensor(self.offsets).to(tokens.device, non_blocking=True)
        return offsets, torch.searchsorted(offsets[1:-1], tokens, right=True)


def legal_anchors(loss_mask_P: Tensor, documents: Documents) -> Tensor:
    """Boolean (P,): supervised, followed by a supervised token of its document, and not the first of it."""
    legal_P = loss_mask_P.bool().clone()
    legal_P[:-1] &= loss_mask_P[1:].bool()
    for first, end in pairwise(documents.offsets):
        legal_P[first : first + 1] = False
        legal_P[end - 1 : end] = False
    return legal_P


def sample_anchors(
    loss_mask_P: Tensor, documents: Documents, *, num_anchors: int, generators: Sequence[torch.Generator]
) -> Tensor:
    """(A,) up to `num_anchors` distinct legal anchors of each document, ascending, drawn uniformly; there may be none.

    One generator, of the CPU, per document: what is drawn for it depends neither on its company nor on the device.
    """
    legal_P = legal_anchors(loss_mask_P.cpu(), documents)
    chosen = []
    for first, length, generator in zip(documents.offsets[:-1], documents.lengths, generators, strict=True):
        legal_N = legal_P[first : first + length].nonzero()[:, 0]
        picked_N = torch.randperm(len(legal_N), generator=generator)[:num_anchors]
        chosen.append(first + legal_N[picked_N].sort().values)
    return torch.cat(chosen).to(loss_mask_P.device)


def block_labels(
    label_ids_P: Tensor, loss_mask_P: Tensor, documents: Documents, *, anchors_A: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """(labels_AS, live_AS) of the slots 1..S; `label_ids_P[t]` is what follows token t.

    A block lives up to its first unsupervised slot or its document's end.
    """
    tokens_AS = anchors_A[:, None] + torch.arange(1, block_size, device=anchors_A.device)
    inside_AS = tokens_AS < documents.around(anchors_A)[1][:, None]
    tokens_AS = tokens_AS.clamp(max=documents.total - 1)
    live_AS = (loss_mask_P[tokens_AS].bool() & inside_AS).cumprod(-1).bool()
    return label_ids_P[tokens_AS - 1].long(), live_AS
