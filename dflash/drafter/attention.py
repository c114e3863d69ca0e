"""Attention of anchored blocks over a shared context. Tensors in, tensors out: knows no weights and no tokens.

Each block of W queries sees a range of the context's keys, which ends before its anchor, and all of its own block.

P context tokens, A anchors (blocks), W block size, Q query heads, K key/value heads, G = Q/K, D head width
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_SCORES = 1 << 18
"""Scores of a head in memory at once."""

SLACK = 64
"""Keys per block that may be looked at in vain, for the sake of larger products."""


@dataclass(frozen=True)
class Chunk:
    """Blocks next to each other that see nearly the same keys: both as slices, and which of them each does not see."""

    blocks: slice
    keys: slice
    hidden_CWL: Tensor  # noqa: N815


@dataclass(frozen=True)
class Visible:
    """What each block sees: of the context the keys first..end, and itself. One object serves all layers of a pass.

    With a `window`, slot k sees no key before end + k - (window - 1), and of its block the slots up to k. Cheapest if
    anchors ascend.
    """

    first_A: Tensor  # noqa: N815
    end_A: Tensor  # noqa: N815
    block_size: int
    window: int = 0

    def hidden_AWL(self, blocks: slice, keys: slice) -> Tensor:  # noqa: N802
        """Which of some keys of the context some blocks do not see; W is 1 without a window: all slots see the same."""
        tokens_L = torch.arange(keys.start, keys.stop, device=self.end_A.device)
        first_A1, end_A1 = self.first_A[blocks, None], self.end_A[blocks, None]
        if self.window:
            slots_W = torch.arange(self.block_size, device=self.end_A.device)
            first_A1 = torch.maximum(first_A1, end_A1 + slots_W - (self.window - 1))
        return (tokens_L < first_A1[..., None]) | (tokens_L >= end_A1[..., None])

    @cached_property
    def later_WW(self) -> Tensor | None:  # noqa: N802
        """Which slots of its block (second) a slot (first) does not see; None: sees all."""
        if not self.window:
            return None
        slots_W = torch.arange(self.block_size, device=self.end_A.device)
        return slots_W > slots_W[:, None]

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Blocks in their order, as many together as see common keys, waste few, and are not too many."""
        lowest_A = torch.maximum(self.first_A, self.end_A - (self.window - 1)) if self.window else self.first_A
        firsts, ends = lowest_A.tolist(), torch.maximum(lowest_A, self.end_A).tolist()
        chunks = []
        start = 0
        while start < len(ends):
            low, high, seen, stop = firsts[start], ends[start], 0, start
            while stop < len(ends):
                first, end = firsts[stop], ends[stop]
                keys, count = max(high, end) - min(low, first), stop + 1 - start
                apart = first >= high or end <= low  # in another document, or farther than a window
                too_many = count * self.block_size * keys > CHUNK_SCORES
                wasteful = count * keys > 1.25 * (seen + end - first) + count * SLACK
                if count > 1 and (apart or too_many or wasteful):
                    break
                low, high, seen, stop = min(low, first), max(high, end), seen + end - first, stop + 1
            blocks, tokens = slice(start, stop), slice(low, high)
            chunks.append(Chunk(blocks, tokens, self.hidden_AWL(blocks, tokens)))
            start = stop
        return tuple(chunks)


class _BlockAttention(torch.autograd.Function):
    """Keeps no scores: the backward pass computes them again, as in FlashAttention, one chunk of blocks at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, visible: Visible) -> Tensor:
        out = torch.empty_like(q)
        for chunk in visible.chunks:
            a, t = chunk.blocks, chunk.keys
            p = _probabilities(q[:, a], k[:, t], own_k[:, a], chunk.hidden_CWL, visible.later_WW)
            out[:, a] = _mixture(p, v[:, t], own_v[:, a])
        ctx.save_for_backward(q, k, v, own_k, own_v, out)
        ctx.visible = visible
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, out = ctx.saved_tensors
        # chunks add up to the gradients of the context: in float32 at least
        grad_k, grad_v = (torch.zeros_like(x, dtype=_wide(x)) for x in (k, v))
        grad_q, grad_own_k, grad_own_v = (torch.empty_like(x) for x in (q, own_k, own_v))
        inner = (grad_out * out).sum(-1, keepdim=True)  # = sum over keys of p * dp (arXiv 2205.14135, eq. 4)
        for chunk in ctx.visible.chunks:
            a, t = chunk.blocks, chunk.keys
            p = _probabilities(q[:, a], k[:, t], own_k[:, a], chunk.hidden_CWL, ctx.visible.later_WW)
            grad_scores = _scores(grad_out[:, a], v[:, t], own_v[:, a]).sub_(inner[:, a]).mul_(p)
            grad_q[:, a] = _mixture(grad_scores, k[:, t], own_k[:, a])
            for weights, queries, grad, grad_own in (
                (grad_scores, q[:, a], grad_k, grad_own_k),
                (p, grad_out[:, a], grad_v, grad_own_v),
            ):
                from_context, grad_own[:, a] = _collected(weights, queries, t.stop - t.start)
                grad[:, t] += from_context
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_own_k, grad_own_v, None


# One chunk of C blocks and L keys. X = L + W: a block's keys are the context and itself. R = G * W: the queries of a
# key head.


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scores(q_KCRD: Tensor, k_KLD: Tensor, own_KCWD: Tensor) -> Tensor:
    K, C, R, _ = q_KCRD.shape
    L, W = k_KLD.shape[1], own_KCWD.shape[2]
    scores_KCRX = q_KCRD.new_empty(K, C, R, L + W)
    torch.bmm(q_KCRD.reshape(K, C * R, -1), k_KLD.mT, out=scores_KCRX.view(K, C * R, L + W)[..., :L])
    scores_KCRX[..., L:] = q_KCRD @ own_KCWD.mT
    return scores_KCRX


def _probabilities(
    q_KCRD: Tensor, k_KLD: Tensor, own_KCWD: Tensor, hidden_CWL: Tensor, later_WW: Tensor | None
) -> Tensor:
    scores_KCRX = _scores(q_KCRD, k_KLD, own_KCWD)
    W, L = own_KCWD.shape[2], k_KLD.shape[1]
    scores_KCGWX = scores_KCRX.unflatten(2, (-1, W))
    scores_KCGWX[..., :L].masked_fill_(hidden_CWL[:, None], float("-inf"))
    if later_WW is not None:
        scores_KCGWX[..., L:].masked_fill_(later_WW, float("-inf"))
    return scores_KCRX.softmax(-1, dtype=_wide(q_KCRD)).to(q_KCRD.dtype)


def _mixture(weights_KCRX: Tensor, values_KLD: Tensor, own_KCWD: Tensor) -> Tensor:
    """Sum over keys: (K, C, R, D)."""
    K, C, R, X = weights_KCRX.shape
    L = values_KLD.shape[1]
    mixed_KCRD = (weights_KCRX.view(K, C * R, X)[..., :L] @ values_KLD).view(K, C, R, -1)
    return mixed_KCRD.add_(weights_KCRX[..., L:] @ own_KCWD)


def _collected(weights_KCRX: Tensor, queries_KCRD: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """Sum over queries, the transpose of a mixture: (K, L, D) for the context, (K, C, W, D) for each block's own."""
    K, C, R, X = weights_KCRX.shape
    return (
        weights_KCRX.view(K, C * R, X)[..., :L].mT @ queries_KCRD.reshape(K, C * R, -1),
        weights_KCRX[..., L:].mT @ queries_KCRD,
    )


def block_attention(
    q_AWQD: Tensor, k_block_AWKD: Tensor, v_block_AWKD: Tensor, k_KPD: Tensor, v_KPD: Tensor, visible: Visible
) -> Tensor:
    """Softmax attention in two parts, context and own block, under one normalisation; the result has the shape of q.

    Costs about A * W * (visible keys + W) per head, never (A*W) squared. A block always sees itself, so that no row is
    empty, whatever its anchor. Scores are normalised in float32.
    """
    A, W, Q, D = q_AWQD.shape
    K = k_KPD.shape[0]
    # queries of one key head side by side, blocks outside: both products are then views, and keys are never repeated
    q_KARD = q_AWQD.view(A, W, K, Q // K, D).permute(2, 0, 3, 1, 4).reshape(K, A, Q // K * W, D)
    own = [block_AWKD.permute(2, 0, 1, 3) for block_AWKD in (k_block_AWKD, v_block_AWKD)]
    out_KARD = _BlockAttention.apply(q_KARD * D**-0.5, k_KPD, v_KPD, *own, visible)
    return out_KARD.view(K, A, Q // K, W, D).permute(1, 3, 0, 2, 4).reshape(A, W, Q, D)


def dense_attention(
    q_AWQD: Tensor, k_block_AWKD: Tensor, v_block_AWKD: Tensor, k_KPD: Tensor, v_KPD: Tensor, visible: Visible
) -> Tensor:
    """The same by one (A*W) x (P + A*W) score matrix and one visibility mask: the oracle that tests compare with."""
    A, W, Q, D = q_AWQD.shape
    K, P = k_KPD.shape[:2]
    q = q_AWQD.reshape(A * W, Q, D).transpose(0, 1)
    k = torch.cat((k_KPD, k_block_AWKD.reshape(A * W, K, D).transpose(0, 1)), 1)
    v = torch.cat((v_KPD, v_block_AWKD.reshape(A * W, K, D).transpose(0, 1)), 1)
    block, slot = torch.arange(A * W, device=q.device) // W, torch.arange(A * W, device=q.device) % W
    hidden_AWP = visible.hidden_AWL(slice(None), slice(0, P)).expand(A, W, P)
    own = block[:, None] == block
    if visible.window:
        own &= slot[:, None] >= slot
    seen = torch.cat((~hidden_AWP.flatten(0, 1), own), -1)
    scores = q @ k.repeat_interleave(Q // K, 0).mT * D**-0.5
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(Q // K, 0)
    return out.transpose(0, 1).reshape(A, W, Q, D)
