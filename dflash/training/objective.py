"""What a micro-batch is trained for: blocks drafted after its anchors, the loss of their slots, and the tally of both.

Knows the drafter and tensors; no schedule, no optimizer and no file.

P tokens of all documents, F features, A anchors, S predicted slots, H hidden, N live slots
"""

import torch
from torch import Tensor

from dflash.drafter.blocks import block_labels
from dflash.drafter.losses import Tally, slot_statistics, slot_weights, tally
from dflash.drafter.model import Drafter, Ends
from dflash.training.batches import Batch


def block_loss(
    drafter: Drafter,
    ends: Ends,
    batch: Batch,
    *,
    features_PF: Tensor,
    anchors_A: Tensor,
    weights: str,
    gamma: float,
    alpha: float,
) -> tuple[Tensor, Tally]:
    """The weighted sum of the slots' negative log-likelihoods, not divided by anything yet, and its tally."""
    labels_AS, live_AS = block_labels(
        batch.greedy_ids_P,
        batch.loss_mask_P,
        batch.documents,
        anchors_A=anchors_A,
        block_size=drafter.config.block_size,
    )
    hidden_ASH = drafter.draft(
        ends,
        batch.input_ids_P[anchors_A],
        anchors_A=anchors_A,
        context=drafter.context(features_PF, batch.documents),
    )
    nll_N, rank_N = slot_statistics(hidden_ASH[live_AS], labels_AS[live_AS], ends)
    nll_AS = torch.zeros_like(live_AS, dtype=torch.float32).masked_scatter(live_AS, nll_N)
    rank_AS = torch.zeros_like(labels_AS).masked_scatter(live_AS, rank_N)
    weights_AS, normaliser = slot_weights(weights, live_AS, nll_AS, gamma=gamma, alpha=alpha)
    loss = (weights_AS * nll_AS).sum()
    return loss, tally(loss=loss, weight=normaliser, rank_BAS=rank_AS, live_BAS=live_AS)
