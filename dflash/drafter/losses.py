"""What a drafter is trained on and judged by: label likelihood and rank per slot, slot weights, sums and counts.

Knows no batches and no schedule. Every metric follows from the rank of the label; sums are divided only when printed.

N live slots, B batch, A anchors, S predicted slots, H hidden, V vocabulary
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dflash.drafter.model import Ends

CHUNK_LOGITS = 1 << 20
"""Logits in memory at once (4 MB in float32, which stays in a core's cache); a GPU is given more."""


class _SlotStatistics(torch.autograd.Function):
    """Gradient in the forward pass: the head is frozen, so d nll / d hidden is one row of H numbers per slot.

    Keeping it costs N*H instead of N*V, and the logits need not be computed again.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, labels_N: Tensor, ends: Ends, chunk: int) -> tuple[Tensor, Tensor]:
        nll_N = hidden_NH.new_empty(len(labels_N), dtype=torch.float32)
        rank_N = torch.empty_like(labels_N)
        grad_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        for start in range(0, len(labels_N), chunk):
            part = slice(start, start + chunk)
            logits_CV = ends.logits(hidden_NH[part])
            label_C1 = labels_N[part, None]
            rank_N[part] = label_ranks(logits_CV, labels_N[part])
            logp_CV = logits_CV.log_softmax(-1, dtype=torch.float32)
            nll_N[part] = -logp_CV.gather(-1, label_C1)[:, 0]
            if grad_NH is not None:
                p_CV = logp_CV.exp_()
                p_CV.scatter_add_(-1, label_C1, p_CV.new_full(label_C1.shape, -1.0))
                grad_NH[part] = ends.gradient(p_CV, logits_CV)
        ctx.save_for_backward(grad_NH)
        ctx.mark_non_differentiable(rank_N)
        return nll_N, rank_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (grad_NH,) = ctx.saved_tensors
        return (grads[0][:, None] * grad_NH).to(grad_NH.dtype), None, None, None


def label_ranks(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """0-based rank of each label: tokens with a larger logit, and those with an equal one and a lower id."""
    label_N1 = logits_NV.gather(-1, labels_N[:, None])
    rank_N = (logits_NV > label_N1).sum(-1, dtype=torch.int32)  # half the time of an int64 sum
    tied_N = (logits_NV >= label_N1).sum(-1, dtype=torch.int32) > rank_N + 1
    if tied_N.any():  # rare in float32, common in bfloat16
        equal_MV = logits_NV[tied_N] == label_N1[tied_N]
        lower_MV = torch.arange(logits_NV.shape[-1], device=labels_N.device) < labels_N[tied_N, None]
        rank_N[tied_N] += (equal_MV & lower_MV).sum(-1, dtype=torch.int32)
    return rank_N.long()


def slot_statistics(hidden_NH: Tensor, labels_N: Tensor, ends: Ends, *, chunk: int = 0) -> tuple[Tensor, Tensor]:
    """(nll_N, rank_N): negative log-likelihood of each label in float32, differentiable in `hidden`, and its rank.

    `chunk` slots are projected at once (0: chosen by the vocabulary); no (N, V) tensor is ever kept.
    """
    budget = CHUNK_LOGITS if hidden_NH.device.type == "cpu" else CHUNK_LOGITS << 9
    chunk = chunk or max(1, budget // ends.vocab_size)
    nll_N, rank_N = _SlotStatistics.apply(hidden_NH, labels_N, ends, chunk)
    return nll_N, rank_N


def slot_weights(kind: str, live_BAS: Tensor, nll_BAS: Tensor, *, gamma: float, alpha: float) -> tuple[Tensor, Tensor]:
    """(weights_BAS, normaliser): detached float32 weights, 0 at dead slots, and what their weighted sum is divided by.

    decay: exp(-(k-1)/gamma) for slot k = 1..S; uniform: 1; both are divided by the sum of the weights. dpace follows
    the drafter's own confidence and is divided by the number of live slots: its own sum would cancel it.
    """
    if kind == "dpace":  # arXiv 2605.18810: w_j = sum_{m>=j} prod_{i<=m} q~_i over the live slots m
        q_BAS = (1 - alpha) * torch.exp(-nll_BAS.detach()) + alpha
        reach_BAS = q_BAS.cumprod(-1) * live_BAS
        return reach_BAS.flip(-1).cumsum(-1).flip(-1) * live_BAS, live_BAS.sum()
    weights_BAS = live_BAS.float()
    if kind == "decay":
        weights_BAS = weights_BAS * torch.exp(-torch.arange(live_BAS.shape[-1], device=live_BAS.device) / gamma)
    return weights_BAS, weights_BAS.sum()


@dataclass(frozen=True)
class Tally:
    """Sums and counts over blocks, additive. `streakK`: leading live slots with the label among the top K."""

    loss: float = 0.0
    weight: float = 0.0
    slots: float = 0.0
    blocks: float = 0.0
    top1: float = 0.0
    top4: float = 0.0
    top8: float = 0.0
    streak1: float = 0.0
    streak4: float = 0.0
    streak8: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, name.name) + getattr(other, name.name) for name in fields(Tally)))

    def metrics(self) -> dict[str, float]:
        """Averages per unit of weight, per live slot and per block; without live slots there is nothing to say: {}."""
        if not self.slots:
            return {}
        return {
            "loss": self.loss / self.weight,
            "accuracy": self.top1 / self.slots,
            "top4_accuracy": self.top4 / self.slots,
            "top8_accuracy": self.top8 / self.slots,
            "streak": self.streak1 / self.blocks,
            "ddtree_streak4": self.streak4 / self.blocks,
            "ddtree_streak8": self.streak8 / self.blocks,
        }


def tally(*, loss: Tensor, weight: Tensor, rank_BAS: Tensor, live_BAS: Tensor) -> Tally:
    """Count one micro-batch. `loss` is the weighted sum, `weight` its normaliser; ranks of dead slots do not matter."""
    values = [loss, weight, live_BAS.sum(), live_BAS.any(-1).sum()]
    hits = [live_BAS & (rank_BAS < k) for k in (1, 4, 8)]
    values += [hit_BAS.sum() for hit_BAS in hits] + [hit_BAS.cumprod(-1).sum() for hit_BAS in hits]
    return Tally(*torch.stack([value.detach().double() for value in values]).tolist())
