"""Attention of anchored blocks over a shared context. Tensors in, tensors out: knows no weights and no tokens.

Each block of W queries sees the context keys at positions strictly before its anchor, and all of its own block.

B batch, A anchors (blocks), W block size, T context tokens, Q query heads, K key/value heads, G = Q/K, D head width
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _BlockAttention(torch.autograd.Function):
    """Keeps no scores: the backward pass computes them again, as in FlashAttention, one row of the batch at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, hidden: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for b in range(len(q)):
            out[b] = _mixture(_probabilities(q[b], k[b], own_k[b], hidden[b]), v[b], own_v[b])
        ctx.save_for_backward(q, k, v, own_k, own_v, hidden, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, hidden, out = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grad_own_k, grad_own_v = torch.empty_like(own_k), torch.empty_like(own_v)
        inner = (grad_out * out).sum(-1, keepdim=True)  # = sum over keys of p * dp (arXiv 2205.14135, eq. 4)
        for b in range(len(q)):
            p = _probabilities(q[b], k[b], own_k[b], hidden[b])
            grad_scores = _scores(grad_out[b], v[b], own_v[b]).sub_(inner[b]).mul_(p)
            grad_q[b] = _mixture(grad_scores, k[b], own_k[b])
            grad_k[b], grad_own_k[b] = _collected(grad_scores, q[b], k.shape[2])
            grad_v[b], grad_own_v[b] = _collected(p, grad_out[b], k.shape[2])
        return grad_q, grad_k, grad_v, grad_own_k, grad_own_v, None


# One row of the batch. X = T + W: a block's keys are the context and itself. R = G * W: the queries of a key head.


def _scores(q_KARD: Tensor, k_KTD: Tensor, own_KAWD: Tensor) -> Tensor:
    K, A, R, _ = q_KARD.shape
    T, W = k_KTD.shape[1], own_KAWD.shape[2]
    scores_KARX = q_KARD.new_empty(K, A, R, T + W)
    torch.bmm(q_KARD.reshape(K, A * R, -1), k_KTD.mT, out=scores_KARX.view(K, A * R, T + W)[..., :T])
    scores_KARX[..., T:] = q_KARD @ own_KAWD.mT
    return scores_KARX


def _probabilities(q_KARD: Tensor, k_KTD: Tensor, own_KAWD: Tensor, hidden_AT: Tensor) -> Tensor:
    scores_KARX = _scores(q_KARD, k_KTD, own_KAWD)
    scores_KARX[..., : k_KTD.shape[1]].masked_fill_(hidden_AT[:, None], float("-inf"))
    wide = torch.promote_types(q_KARD.dtype, torch.float32)
    return scores_KARX.softmax(-1, dtype=wide).to(q_KARD.dtype)


def _mixture(weights_KARX: Tensor, values_KTD: Tensor, own_KAWD: Tensor) -> Tensor:
    """Sum over keys: (K, A, R, D)."""
    K, A, R, X = weights_KARX.shape
    T = values_KTD.shape[1]
    mixed_KARD = (weights_KARX.view(K, A * R, X)[..., :T] @ values_KTD).view(K, A, R, -1)
    return mixed_KARD.add_(weights_KARX[..., T:] @ own_KAWD)


def _collected(weights_KARX: Tensor, queries_KARD: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """Sum over queries, the transpose of a mixture: (K, T, D) for the context, (K, A, W, D) for each block's own."""
    K, A, R, X = weights_KARX.shape
    return (
        weights_KARX.view(K, A * R, X)[..., :T].mT @ queries_KARD.reshape(K, A * R, -1),
        weights_KARX[..., T:].mT @ queries_KARD,
    )


def block_attention(
    q_BAWQD: Tensor,
    k_block_BAWKD: Tensor,
    v_block_BAWKD: Tensor,
    k_context_BKTD: Tensor,
    v_context_BKTD: Tensor,
    *,
    anchors_BA: Tensor,
    start: int = 0,
) -> Tensor:
    """Softmax attention in two parts, context and own block, under one normalisation; the result has the shape of q.

    `start` is the position of the first context key. Scores cost A*W*(T+W) per head, never (A*W) squared. A block
    always sees itself, so that no row is empty, whatever its anchor. Scores are normalised in float32.
    """
    B, A, W, Q, D = q_BAWQD.shape
    K, T = k_context_BKTD.shape[1:3]
    G = Q // K
    # queries of one key head side by side, blocks outermost: both products are then views, and keys are never repeated
    q_BKARD = q_BAWQD.view(B, A, W, K, G, D).permute(0, 3, 1, 4, 2, 5).reshape(B, K, A, G * W, D)
    own = [block_BAWKD.permute(0, 3, 1, 2, 4) for block_BAWKD in (k_block_BAWKD, v_block_BAWKD)]
    # strictly before the anchor: when drafting, the verifier has not produced the anchor's own features yet
    hidden_BAT = torch.arange(start, start + T, device=q_BAWQD.device) >= anchors_BA[..., None]
    out_BKARD = _BlockAttention.apply(q_BKARD * D**-0.5, k_context_BKTD, v_context_BKTD, *own, hidden_BAT)
    return out_BKARD.view(B, K, A, G, W, D).permute(0, 2, 4, 1, 3, 5).reshape(B, A, W, Q, D)


def dense_attention(
    q_BAWQD: Tensor,
    k_block_BAWKD: Tensor,
    v_block_BAWKD: Tensor,
    k_context_BKTD: Tensor,
    v_context_BKTD: Tensor,
    *,
    anchors_BA: Tensor,
    start: int = 0,
) -> Tensor:
    """The same by one (A*W) x (T + A*W) score matrix and one visibility mask: the oracle that tests compare with."""
    B, A, W, Q, D = q_BAWQD.shape
    K, T = k_context_BKTD.shape[1:3]
    q = q_BAWQD.reshape(B, A * W, Q, D).transpose(1, 2)
    k = torch.cat((k_context_BKTD, k_block_BAWKD.reshape(B, A * W, K, D).transpose(1, 2)), 2)
    v = torch.cat((v_context_BKTD, v_block_BAWKD.reshape(B, A * W, K, D).transpose(1, 2)), 2)
    block = torch.arange(A * W) // W
    sees_context = torch.arange(start, start + T) < anchors_BA.repeat_interleave(W, 1)[..., None]
    sees_block = (block[:, None] == block).expand(B, -1, -1)
    visible = torch.cat((sees_context, sees_block), -1)[:, None]
    scores = q @ k.repeat_interleave(Q // K, 1).mT * D**-0.5
    out = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v.repeat_interleave(Q // K, 1)
    return out.transpose(1, 2).reshape(B, A, W, Q, D)
