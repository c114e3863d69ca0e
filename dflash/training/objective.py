"""What a micro-batch is trained for: blocks drafted after its anchors, the loss of their slots, and the tally of both.

Knows the drafter and tensors; no schedule, no optimizer and no file.

P tokens of all documents, D documents, F features, A anchors, S predicted slots, H hidden, N live slots, K candidates
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash.drafter.blocks import block_labels
from dflash.drafter.losses import compares_distributions, slot_statistics, slot_weights
from dflash.drafter.model import Drafter, Ends
from dflash.training.batches import Batch
from dflash.training.metrics import TREE_BUDGETS, Tally, tally


def block_loss(
    drafter: Drafter,
    ends: Ends,
    batch: Batch,
    *,
    features_PF: Tensor,
    anchors_A: Tensor,
    labels: str,
    loss: Mapping[str, float],
    weights: str,
    gamma: float,
    alpha: float,
    tree_budget: int,
    tree_metrics: bool,
    memory_bytes: int = 0,
    groups_DX: Tensor | None = None,
    num_groups: int = 0,
) -> tuple[Tensor, Tally]:
    """The weighted sum of the slots' losses, not divided by anything yet, and its tally.

    `labels` are greedy, the verifier's choices, or data, the documents' own tokens. `tree_metrics` builds the trees of
    TREE_BUDGETS and `tree_budget`, which is too much for every step. `groups_DX` holds the numbers of the groups that
    each document is in, from 0 up to `num_groups`.
    """
    label_ids_P = batch.greedy_ids_P if labels == "greedy" else batch.input_ids_P.roll(-1)
    labels_AS, live_AS = block_labels(
        label_ids_P, batch.loss_mask_P, batch.documents, anchors_A=anchors_A, block_size=drafter.config.block_size
    )
    hidden_ASH = drafter.draft(
        ends,
        batch.input_ids_P[anchors_A],
        anchors_A=anchors_A,
        context=drafter.context(features_PF, batch.documents),
    )
    final_NH = None
    if batch.final_PH is not None and compares_distributions(loss):
        # the state at a+k-1 says what follows it: the label of slot k
        before_AS = anchors_A[:, None] + torch.arange(live_AS.shape[1], device=anchors_A.device)
        final_NH = batch.final_PH[before_AS[live_AS]]
    budgets = tuple(sorted({*TREE_BUDGETS, tree_budget} - {0}))
    top_k = min(max(budgets), ends.draft_vocab_size) if tree_metrics else 0
    slots = slot_statistics(
        hidden_ASH[live_AS],
        labels_AS[live_AS],
        ends,
        loss=loss,
        final_NH=final_NH,
        top_k=top_k,
        memory_bytes=memory_bytes,
    )
    loss_AS = torch.zeros_like(live_AS, dtype=torch.float32).masked_scatter(live_AS, slots.loss_N)
    nll_AS = torch.zeros_like(loss_AS).masked_scatter(live_AS, slots.nll_N)
    rank_AS = torch.zeros_like(labels_AS).masked_scatter(live_AS, slots.rank_N)
    weights_AS, normaliser_A = slot_weights(
        weights, live_AS, nll_AS=nll_AS, rank_AS=rank_AS, gamma=gamma, alpha=alpha, budget=tree_budget
    )
    loss_A = (weights_AS * loss_AS).sum(-1)
    top_values_ASK = None
    if tree_metrics:  # a tree spends nodes on slots beyond the end as well: the drafter cannot know
        top_values_ASK = slots.top_values_NK.new_empty(*live_AS.shape, top_k)
        top_values_ASK[live_AS] = slots.top_values_NK
        with torch.no_grad():
            dead_NH = hidden_ASH[~live_AS]
            dead = slot_statistics(dead_NH, labels_AS[~live_AS], ends, loss={}, top_k=top_k, memory_bytes=memory_bytes)
        top_values_ASK[~live_AS] = dead.top_values_NK
    if groups_DX is None:
        groups_DX = anchors_A.new_empty(len(batch.documents.lengths), 0)
    counted = tally(
        loss_A=loss_A,
        weight_A=normaliser_A,
        rank_AS=rank_AS,
        live_AS=live_AS,
        top_values_ASK=top_values_ASK,
        tree_budgets=budgets,
        groups_AX=groups_DX[batch.documents.numbers(anchors_A)],
        num_groups=num_groups,
    )
    return loss_A.sum(), counted
