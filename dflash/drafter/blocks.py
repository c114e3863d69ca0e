"""Which blocks of a conversation a drafter trains on, and what each slot must predict. Knows ids and masks only.

An anchor at position a opens the block a, a+1, …; slot k predicts the token at a+k, k = 1..S. The label is what the
verifier itself would have said there: greedy_ids[a+k-1], its choice for the token after position a+k-1.

B batch, T tokens, A anchors, S predicted slots
"""

import torch
from torch import Tensor


def legal_anchors(loss_mask: Tensor) -> Tensor:
    """Boolean, shaped as the mask (…, T): supervised, followed by a supervised token, and not the first of its row."""
    legal = torch.zeros_like(loss_mask, dtype=torch.bool)
    legal[..., 1:-1] = loss_mask[..., 1:-1] & loss_mask[..., 2:]
    return legal


def sample_anchors(loss_mask_BT: Tensor, *, num_anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(anchors_BA, valid_BA): up to `num_anchors` distinct legal anchors per row, ascending, drawn uniformly.

    A is the most that any row of the batch has, at least 1. Where valid is False the anchor is padding (position 1).
    The draw is made on the CPU, so that it is the same on every device.
    """
    legal_BT = legal_anchors(loss_mask_BT.cpu())
    counts_B = legal_BT.sum(1).clamp(max=num_anchors)
    A = max(1, int(counts_B.max()))
    priority_BT = torch.rand(legal_BT.shape, generator=generator).masked_fill(~legal_BT, 2.0)
    chosen_BA = priority_BT.argsort(1)[:, :A]
    valid_BA = torch.arange(A) < counts_B[:, None]
    anchors_BA, order_BA = chosen_BA.masked_fill(~valid_BA, legal_BT.shape[1]).sort(1)
    valid_BA = valid_BA.gather(1, order_BA)
    device = loss_mask_BT.device
    return anchors_BA.masked_fill(~valid_BA, 1).to(device), valid_BA.to(device)


def block_labels(
    greedy_ids_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    lengths_B: Tensor,
    anchors_BA: Tensor,
    valid_BA: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """(labels_BAS, live_BAS) of the slots 1..S. A block lives up to its first unsupervised slot or its row's end."""
    B, T = greedy_ids_BT.shape
    A = anchors_BA.shape[1]
    positions_BAS = anchors_BA[..., None] + torch.arange(1, block_size, device=anchors_BA.device)
    inside_BAS = positions_BAS < lengths_B[:, None, None]
    flat = positions_BAS.clamp(max=T - 1).view(B, -1)
    supervised_BAS = loss_mask_BT.gather(1, flat).view(B, A, -1).bool() & inside_BAS & valid_BA[..., None]
    labels_BAS = greedy_ids_BT.gather(1, flat - 1).view(B, A, -1).long()
    return labels_BAS, supervised_BAS.cumprod(-1).bool()
