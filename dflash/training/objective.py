"""What a micro-batch is trained for: blocks drafted after its anchors, the loss of their slots, and the tally of both.

Knows the drafter and tensors; no schedule, no optimizer and no file.

B batch, T tokens, F features, A anchors, S predicted slots, H hidden, N live slots
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
    features_BTF: Tensor,
    anchors_BA: Tensor,
    valid_BA: Tensor,
    weights: str,
    gamma: float,
    alpha: float,
) -> tuple[Tensor, Tally]:
    """The weighted sum of the slots' negative log-likelihoods, not divided by anything yet, and its tally."""
    labels_BAS, live_BAS = block_labels(
        batch.greedy_ids_BT,
        batch.loss_mask_BT,
        lengths_B=batch.lengths_B,
        anchors_BA=anchors_BA,
        valid_BA=valid_BA,
        block_size=drafter.config.block_size,
    )
    hidden_BASH = drafter.draft(
        ends,
        batch.input_ids_BT.gather(1, anchors_BA),
        anchors_BA=anchors_BA,
        context=drafter.context(features_BTF),
    )
    nll_N, rank_N = slot_statistics(hidden_BASH[live_BAS], labels_BAS[live_BAS], ends)
    nll_BAS = torch.zeros_like(live_BAS, dtype=torch.float32).masked_scatter(live_BAS, nll_N)
    rank_BAS = torch.zeros_like(labels_BAS).masked_scatter(live_BAS, rank_N)
    weights_BAS, normaliser = slot_weights(weights, live_BAS, nll_BAS, gamma=gamma, alpha=alpha)
    loss = (weights_BAS * nll_BAS).sum()
    return loss, tally(loss=loss, weight=normaliser, rank_BAS=rank_BAS, live_BAS=live_BAS)
