"""What a drafter is trained on: a loss per slot, the rank of its label, and the weight of the slot.

Knows no batches and no schedule. Logits exist for a chunk of slots at a time, and everything that is asked of them is
taken from them then: losses and their gradients, ranks, and the best log-probabilities.

N live slots, C of them projected at once, A anchors, S predicted slots, H hidden, K candidates per slot,
V draft vocabulary: all tokens, or those that the drafter can propose
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash.drafter.model import Ends

LOSSES = ("ce", "kl", "tv", "lk")

LK_ETA = 3.0
"""How soon LK turns from KL to total variation: arXiv 2602.23881 found 3 best."""

MEMORY_BYTES = 1 << 26
"""For logits in memory at once: some hundred slots, below which reading the head takes longer than using it. A GPU is
given 32 times as much."""

CACHED_LOGITS = 1 << 18
"""What a core's cache holds in float32: on a CPU, the passes over a chunk's logits are made a few slots at a time."""

OUTSIDE = 1 << 40
"""The rank of a label that the drafter cannot propose: beyond every tree and every recall."""

LARGEST_EXPONENT = 600.0
"""exp of it, times the slots of any block, is finite in float64."""


class SlotStatistics(NamedTuple):
    """Of each live slot; all float32 but the ranks. Only `loss_N` has a gradient.

    A label that the drafter cannot propose has rank OUTSIDE, an infinite `nll_N`, and no loss, whatever the mixture.
    `nll_N` is the label's negative log-likelihood, `rank_N` its 0-based rank (equal logits: the lower id first), and
    `top_values_NK` are the best log-probabilities, descending; the label is among them where its rank is below K.
    """

    loss_N: Tensor  # noqa: N815
    nll_N: Tensor  # noqa: N815
    rank_N: Tensor  # noqa: N815
    top_values_NK: Tensor  # noqa: N815


def slot_statistics(
    hidden_NH: Tensor,
    labels_N: Tensor,
    ends: Ends,
    *,
    loss: Mapping[str, float],
    final_NH: Tensor | None = None,
    top_k: int = 0,
    memory_bytes: int = 0,
) -> SlotStatistics:
    """One pass over the logits of all slots. `loss` holds the weights of a mixture, q being the drafter's distribution:

        ce  -log q(label)
        kl  KL(p || q), p being the verifier's distribution: the head applied to `final_NH`, its state before the label
        tv  1/2 sum |p - q| = 1 - a, a being the probability that a token drawn from q is accepted
        lk  l*kl + (1 - l)*tv, l = exp(-LK_ETA * a), which is a constant to the gradient (hybrid of arXiv 2602.23881;
            a is the slot's own, so that the loss of a slot does not depend on its batch)

    In a trimmed vocabulary p, too, is of its tokens alone, and sums up to 1 over these.
    `memory_bytes` bounds the logits in memory at once; 0: what suits the device.
    """
    on_cpu = hidden_NH.device.type == "cpu"
    if not compares_distributions(loss):
        final_NH = None
    elif final_NH is None:
        raise ValueError(f"loss {dict(loss)} compares distributions, without final states; set extraction.store_final")
    matrices = 2 if final_NH is None else 3  # logits, gradients, the verifier's
    num_bytes = matrices * ends.head_VH.element_size() + (0 if on_cpu else 2 * matrices * 4)  # and what is in float32
    chunk = max(
        1, (memory_bytes or (MEMORY_BYTES if on_cpu else MEMORY_BYTES << 5)) // (ends.draft_vocab_size * num_bytes)
    )
    cached = torch.get_num_threads() * max(1, CACHED_LOGITS // ends.draft_vocab_size)
    # reductions are in float32, whatever the caller's arithmetic
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return SlotStatistics(
            *_SlotStatistics.apply(
                hidden_NH,
                labels_N,
                final_NH,
                ends,
                dict.fromkeys(LOSSES, 0.0) | dict(loss),
                top_k,
                chunk,
                cached if on_cpu else chunk,
            )
        )


def compares_distributions(loss: Mapping[str, float]) -> bool:
    """Whether a mixture needs the verifier's distribution, beyond the labels."""
    return any(weight for name, weight in loss.items() if name != "ce")


class _SlotStatistics(torch.autograd.Function):
    """Gradient in the forward pass: the head is frozen, so d loss / d hidden is one row of H numbers per slot.

    Keeping it costs N*H instead of N*V, and the logits need not be computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        labels_N: Tensor,
        final_NH: Tensor | None,
        ends: Ends,
        loss: dict[str, float],
        top_k: int,
        chunk: int,
        tile: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        N = len(labels_N)
        labels_N = ends.places(labels_N)
        outside_N = None if ends.proposes_all else labels_N < 0
        if outside_N is not None:
            labels_N = labels_N.masked_fill(outside_N, 0)
        loss_N = hidden_NH.new_empty(N, dtype=torch.float32)
        nll_N = torch.empty_like(loss_N)
        rank_N = torch.empty_like(labels_N)
        top_values_NK = loss_N.new_empty(N, top_k)
        grad_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        for start in range(0, N, chunk):
            part = slice(start, min(start + chunk, N))
            logits_CV = ends.draft_logits(hidden_NH[part])
            final_CV = None if final_NH is None else ends.draft_logits(final_NH[part])
            grad_CV = None if grad_NH is None else torch.empty_like(logits_CV)
            for first in range(start, part.stop, tile):
                some = slice(first, min(first + tile, part.stop))
                inner = slice(first - start, some.stop - start)
                z_CV = logits_CV[inner].float()
                q_CV = z_CV.softmax(-1)
                # the largest probability is 1 / sum exp(z - max z): no exponential is taken twice
                lse_C = z_CV.amax(-1) - q_CV.amax(-1).log()
                nll_N[some] = lse_C - z_CV.gather(-1, labels_N[some, None])[:, 0]
                rank_N[some] = label_ranks(z_CV, labels_N[some])
                if top_k:
                    top_values_NK[some] = top_values(z_CV, top_k) - lse_C[:, None]
                loss_N[some] = loss["ce"] * nll_N[some]
                if final_CV is not None:
                    loss_N[some] += _compare(q_CV, z_CV, lse_C, final_CV[inner].float(), loss)
                elif grad_CV is not None:
                    q_CV.mul_(loss["ce"])
                if grad_CV is not None:  # of ce: q - 1 at the label; the other losses are in q_CV already
                    ce_C1 = q_CV.new_full((len(q_CV), 1), -loss["ce"])
                    grad_CV[inner] = q_CV.scatter_add_(-1, labels_N[some, None], ce_C1)
            if grad_NH is not None and grad_CV is not None:
                grad_NH[part] = ends.gradient(grad_CV, logits_CV)
        if outside_N is not None:
            nll_N.masked_fill_(outside_N, torch.inf)
            rank_N.masked_fill_(outside_N, OUTSIDE)
            loss_N.masked_fill_(outside_N, 0)
            if grad_NH is not None:
                grad_NH.masked_fill_(outside_N[:, None], 0)
        ctx.save_for_backward(grad_NH)
        ctx.mark_non_differentiable(nll_N, rank_N, top_values_NK)
        return loss_N, nll_N, rank_N, top_values_NK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_NH,) = ctx.saved_tensors
        return (grads[0][:, None] * grad_NH).to(grad_NH.dtype), *(None,) * 7


def _compare(q_CV: Tensor, z_CV: Tensor, lse_C: Tensor, verifier_CV: Tensor, loss: Mapping[str, float]) -> Tensor:
    """The part of the mixture that compares distributions; z and `verifier` are logits, lse = logsumexp(z).

    `q_CV`, the softmax of z, becomes the gradient of the mixture with respect to z, ce's -1 at the label apart:

        kl: q - p        tv: q * (s - m), m being 1 where q < p, s = sum m * q        ce: q - 1[label]
    """
    p_CV = verifier_CV.softmax(-1)
    verifier_lse_C = verifier_CV.amax(-1) - p_CV.amax(-1).log()
    work_CV = torch.sub(verifier_CV, z_CV).mul_(p_CV)
    kl_C = work_CV.sum(-1) + lse_C - verifier_lse_C
    tv_C = torch.sub(p_CV, q_CV, out=work_CV).relu_().sum(-1)
    blend_C = torch.exp(LK_ETA * (tv_C - 1))
    kl_weight_C = loss["kl"] + loss["lk"] * blend_C
    tv_weight_C = loss["tv"] + loss["lk"] * (1 - blend_C)

    below_CV = torch.gt(p_CV, q_CV, out=work_CV).mul_(q_CV)
    q_CV.mul_((loss["ce"] + kl_weight_C + tv_weight_C * below_CV.sum(-1))[:, None])
    q_CV.sub_(p_CV.mul_(kl_weight_C[:, None])).sub_(below_CV.mul_(tv_weight_C[:, None]))
    return kl_weight_C * kl_C + tv_weight_C * tv_C


def label_ranks(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """0-based rank of each label: tokens with a larger logit, and those with an equal one and a lower id."""
    if logits_NV.is_cuda:
        label_N1 = logits_NV.gather(-1, labels_N[:, None])
        lower_NV = torch.arange(logits_NV.shape[-1], device=labels_N.device) < labels_N[:, None]
        return ((logits_NV > label_N1) | ((logits_NV == label_N1) & lower_NV)).sum(-1)
    # on a CPU, numpy counts booleans ten times as fast, and a row in two parts needs no ids
    ranks = [
        np.count_nonzero(row_V[:label] >= row_V[label]) + np.count_nonzero(row_V[label:] > row_V[label])
        for row_V, label in zip(logits_NV.numpy(), labels_N.tolist(), strict=True)
    ]
    return torch.tensor(ranks, dtype=torch.long)


def top_values(logits_NV: Tensor, count: int) -> Tensor:
    """The largest of each row, descending. On a CPU numpy parts a row three times as fast as torch finds its best."""
    if logits_NV.is_cuda:
        return logits_NV.topk(count).values
    best_NK = np.partition(logits_NV.numpy(), -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(best_NK, axis=-1)[:, ::-1].copy())


def slot_weights(
    kind: str, live_AS: Tensor, *, nll_AS: Tensor, rank_AS: Tensor, gamma: float, alpha: float, budget: int
) -> tuple[Tensor, Tensor]:
    """(weights_AS, normaliser_A): detached float32 weights, 0 at dead slots, and each block's share of the number that
    the weighted sum is divided by. What dead slots hold does not matter: a block lives up to its first. A live slot
    whose label is OUTSIDE has no loss and counts in no divisor; the slots behind it have theirs.

    decay: exp(-(k-1)/gamma) for slot k = 1..S; uniform: 1; both are divided by the sum of the weights.

    dpace and tree: w_j = sum_{m>=j} prod_{i<=m} q~_i over the live slots m, q~ = (1-alpha) * q + alpha (D-PACE, arXiv
    2605.18810): what is gained by slot j is every longer prefix that it holds up. They are divided by the number of
    slots with a loss, as their own sum would cancel what they say: that blocks with good prospects count more.

    dpace: q_i = exp(-nll_i), the probability that slot i is right. tree: that its label prefix is in a tree of `budget`
    if the prefix before it is, from the ranks r of the labels. Prefixes with ranks <= r in each slot, and their own
    prefixes, are at least as probable, so the tree takes D_i = sum_{m<=i} prod_{j<=m} (r_j + 1) nodes at least before
    prefix i is among them. This bound is softened to P_i = budget / (budget + D_i), 1/2 where the bound just fits, so
    that slots a little out of reach still count; q_i = P_i / P_{i-1} <= 1.
    """
    trained_AS = live_AS & (rank_AS < OUTSIDE)
    if kind in ("dpace", "tree"):
        if kind == "dpace":
            q_AS = torch.exp(-nll_AS.detach())
        else:
            prefixes_AS = torch.log1p(rank_AS.double()).cumsum(-1).clamp_(max=LARGEST_EXPONENT).exp_()
            nodes_AS = budget + prefixes_AS.cumsum(-1)
            before_AS = torch.nn.functional.pad(nodes_AS[..., :-1], (1, 0), value=budget)
            q_AS = (before_AS / nodes_AS).float()
        reach_AS = ((1 - alpha) * q_AS + alpha).cumprod(-1) * live_AS
        return reach_AS.flip(-1).cumsum(-1).flip(-1) * trained_AS, trained_AS.sum(-1)
    weights_AS = trained_AS.float()
    if kind == "decay":
        weights_AS = weights_AS * torch.exp(-torch.arange(live_AS.shape[-1], device=live_AS.device) / gamma)
    return weights_AS, weights_AS.sum(-1)
