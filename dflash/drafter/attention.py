"""Attention of anchored blocks over a shared context. Tensors in, tensors out: knows no weights and no tokens.

Each block of W queries sees a range of the context's keys, which ends before its anchor, and its own block. Three paths
with equal results: products per chunk of blocks (CPU, and single blocks anywhere), FlexAttention (CUDA), and a dense
oracle for tests.

P context tokens, A anchors (blocks), W block size, Q query heads, K key/value heads, G = Q/K, D head width
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

CHUNK_SCORES = 1 << 17
"""Scores of one head in memory at once: a few megabytes for all of them stay in a core's cache."""

SLACK = 32
"""Keys per block that may be looked at in vain, for the sake of larger products."""

TILE = 128
"""Queries, and keys, that FlexAttention takes or leaves together."""


@dataclass(frozen=True)
class Chunk:
    """Blocks next to each other that see nearly the same keys, both as slices, and what they do not see of these.

    `hidden` has the ends of `keys` that some block does not see: how many keys, as a slice, and for whom (C, W, keys).
    """

    blocks: slice
    keys: slice
    hidden: tuple[tuple[slice, Tensor], ...]


@dataclass(frozen=True)
class Visible:
    """What each block sees: of the context the keys first..end, and itself. One object serves all layers of a pass.

    With a `window`, slot k sees no key before end + k - (window - 1), and of its block the slots up to k. Cheapest if
    anchors ascend.
    """

    first_A: Tensor  # noqa: N815
    end_A: Tensor  # noqa: N815
    num_keys: int
    block_size: int
    window: int = 0

    def lowest_A(self, slot: int) -> Tensor:  # noqa: N802
        """The first key of the context that a slot of each block sees; the first slot's is the lowest of all."""
        return torch.maximum(self.first_A, self.end_A + slot - (self.window - 1)) if self.window else self.first_A

    def hidden_AWL(self, blocks: slice, keys: slice) -> Tensor:  # noqa: N802
        """Which of some keys of the context some blocks do not see; W is 1 without a window: all slots see the same."""
        tokens_L = torch.arange(keys.start, keys.stop, device=self.end_A.device)
        first_A1, end_A1 = self.first_A[blocks, None], self.end_A[blocks, None]
        if self.window:
            slots_W = torch.arange(self.block_size, device=self.end_A.device)
            first_A1 = torch.maximum(first_A1, end_A1 + slots_W - (self.window - 1))
        return (tokens_L < first_A1[..., None]) | (tokens_L >= end_A1[..., None])

    def dense_mask(self) -> Tensor:
        """(A*W, P + A*W): which keys, of the context and then of all blocks, each slot of each block sees."""
        A, W, P = len(self.end_A), self.block_size, self.num_keys
        block = torch.arange(A * W, device=self.end_A.device) // W
        own = block[:, None] == block
        if self.later_WW is not None:
            own &= ~self.later_WW.repeat(A, A)
        context_AWP = ~self.hidden_AWL(slice(None), slice(0, P)).expand(A, W, P)
        return torch.cat((context_AWP.flatten(0, 1), own), -1)

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
        lowest_A = self.lowest_A(0)
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
            # all blocks see the keys between; a window ends where its block's last slot sees least
            left = max(firsts[start:stop]) + (self.block_size - 1 if self.window else 0)
            right = min(ends[start:stop])
            parts = ((low, min(left, high)), (max(low, right), high)) if left < right else ((low, high),)
            blocks = slice(start, stop)
            hidden = tuple(
                (slice(first - low, end - low), self.hidden_AWL(blocks, slice(first, end)))
                for first, end in parts
                if first < end
            )
            chunks.append(Chunk(blocks, slice(low, high), hidden))
            start = stop
        return tuple(chunks)

    @cached_property
    def block_mask(self) -> BlockMask:
        """For FlexAttention, over the keys of the context and then those of all blocks; needs one block at least."""
        A, W, P, window = len(self.end_A), self.block_size, self.num_keys, self.window
        device, first_A, end_A = self.end_A.device, self.first_A, self.end_A
        tiles_X = torch.arange(-(-A * W // TILE), device=device)
        tiles_Y = torch.arange(-(-(P + A * W) // TILE), device=device)
        begin_Y, stop_Y = tiles_Y * TILE, (tiles_Y + 1) * TILE

        # the blocks that have queries in a tile; the last one is repeated where there are fewer
        inside = torch.arange((TILE + W - 2) // W + 1, device=device)
        last_X = (((tiles_X + 1) * TILE - 1) // W).clamp(max=A - 1)
        blocks_XN = torch.minimum(tiles_X[:, None] * TILE // W + inside, last_X[:, None])
        ranges = (end_A, self.lowest_A(0), self.lowest_A(W - 1))
        end_XN1, lowest_XN1, highest_XN1 = (part_A[blocks_XN][..., None] for part_A in ranges)
        full_XY = ((highest_XN1 <= begin_Y) & (end_XN1 >= stop_Y)).all(1)
        some_XY = (torch.maximum(lowest_XN1, begin_Y) < torch.minimum(end_XN1, stop_Y)).any(1)
        some_XY |= (P + blocks_XN[:, :1] * W < stop_Y) & (P + (last_X[:, None] + 1) * W > begin_Y)

        context = torch.tensor(P).to(device, non_blocking=True)  # a number would compile anew for each

        def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, slot = query // W, query % W
            low = first_A[block] if not window else torch.maximum(first_A[block], end_A[block] + slot - (window - 1))
            own = (key >= context) & ((key - context) // W == block)
            if window:
                own = own & ((key - context) % W <= slot)
            return own | ((key >= low) & (key < end_A[block]))

        def listed(tiles_XY: Tensor) -> tuple[Tensor, Tensor]:
            """How many key tiles each query tile has, and which, these first."""
            order_XY = tiles_XY.int().argsort(stable=True, dim=-1, descending=True)
            return tiles_XY.sum(-1, dtype=torch.int32)[None, None], order_XY.int()[None, None]

        return BlockMask.from_kv_blocks(
            *listed(some_XY & ~full_XY),
            *listed(full_XY),
            BLOCK_SIZE=TILE,
            mask_mod=sees,
            seq_lengths=(A * W, P + A * W),
        )


class _BlockAttention(torch.autograd.Function):
    """Keeps no scores: the backward pass computes them again, as FlashAttention does, one chunk of blocks at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, visible: Visible) -> Tensor:
        out = torch.empty_like(q)
        for chunk in visible.chunks:
            a, t = chunk.blocks, chunk.keys
            p = _probabilities(q[:, a], k[:, t], own_k[:, a], chunk, visible.later_WW)
            out[:, a] = _mixture(p, v[:, t], own_v[:, a])
        ctx.save_for_backward(q, k, v, own_k, own_v)
        ctx.visible = visible
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v = ctx.saved_tensors
        # chunks add up to the gradients of the context: in float32 at least
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        grad_q, grad_own_k, grad_own_v = (torch.empty_like(x) for x in (q, own_k, own_v))
        for chunk in ctx.visible.chunks:
            a, t = chunk.blocks, chunk.keys
            p = _probabilities(q[:, a], k[:, t], own_k[:, a], chunk, ctx.visible.later_WW)
            grad_p = _scores(grad_out[:, a], v[:, t], own_v[:, a])
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
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


def _scores(q_KCRD: Tensor, k_KLD: Tensor, own_KCWD: Tensor) -> Tensor:
    K, C, R, _ = q_KCRD.shape
    L, W = k_KLD.shape[1], own_KCWD.shape[2]
    scores_KCRX = q_KCRD.new_empty(K, C, R, L + W)
    torch.bmm(q_KCRD.reshape(K, C * R, -1), k_KLD.mT, out=scores_KCRX.view(K, C * R, L + W)[..., :L])
    scores_KCRX[..., L:] = q_KCRD @ own_KCWD.mT
    return scores_KCRX


def _probabilities(q_KCRD: Tensor, k_KLD: Tensor, own_KCWD: Tensor, chunk: Chunk, later_WW: Tensor | None) -> Tensor:
    scores_KCRX = _scores(q_KCRD, k_KLD, own_KCWD)
    W, L = own_KCWD.shape[2], k_KLD.shape[1]
    scores_KCGWX = scores_KCRX.unflatten(2, (-1, W))
    for part, hidden_CWL in chunk.hidden:
        scores_KCGWX[..., part].masked_fill_(hidden_CWL[:, None], float("-inf"))
    if later_WW is not None:
        scores_KCGWX[..., L:].masked_fill_(later_WW, float("-inf"))
    return scores_KCRX.softmax(-1)  # in bfloat16, too, it adds up in float32


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
    """Softmax attention over context and own block under one normalisation; the result has the shape of q.

    Costs about A * W * (visible keys + W) per head, never (A*W) squared. A block always sees itself, so that no row is
    empty, whatever its anchor. Scores are normalised in float32.
    """
    # a single block, as in live decoding, is two small products, whose shapes change with every round
    attend = flex if q_AWQD.is_cuda and len(q_AWQD) > 1 else chunked
    return attend(q_AWQD, k_block_AWKD, v_block_AWKD, k_KPD, v_KPD, visible)


def chunked(
    q_AWQD: Tensor, k_block_AWKD: Tensor, v_block_AWKD: Tensor, k_KPD: Tensor, v_KPD: Tensor, visible: Visible
) -> Tensor:
    """By products per chunk of blocks, of context and of own block."""
    A, W, Q, D = q_AWQD.shape
    K = k_KPD.shape[0]
    # queries of one key head side by side, blocks outside: both products are then views, and keys are never repeated
    q_KARD = q_AWQD.view(A, W, K, Q // K, D).permute(2, 0, 3, 1, 4).reshape(K, A, Q // K * W, D)
    own = [block_AWKD.permute(2, 0, 1, 3) for block_AWKD in (k_block_AWKD, v_block_AWKD)]
    out_KARD = _BlockAttention.apply(q_KARD * D**-0.5, k_KPD, v_KPD, *own, visible)
    return out_KARD.view(K, A, Q // K, W, D).permute(1, 3, 0, 2, 4).reshape(A, W, Q, D)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def flex(
    q_AWQD: Tensor,
    k_block_AWKD: Tensor,
    v_block_AWKD: Tensor,
    k_KPD: Tensor,
    v_KPD: Tensor,
    visible: Visible,
    *,
    compiled: bool = True,
) -> Tensor:
    """By FlexAttention, which skips tiles that no block sees. Not compiled it is as slow as the oracle."""
    A, W, Q, D = q_AWQD.shape
    K = k_KPD.shape[0]
    k, v = (
        torch.cat((context_KPD, block_AWKD.reshape(A * W, K, D).transpose(0, 1)), 1)[None]
        for context_KPD, block_AWKD in ((k_KPD, k_block_AWKD), (v_KPD, v_block_AWKD))
    )
    q = q_AWQD.reshape(1, A * W, Q, D).transpose(1, 2)
    attend: Any = _compiled() if compiled else flex_attention
    return attend(q, k, v, block_mask=visible.block_mask, enable_gqa=K < Q)[0].transpose(0, 1).reshape(A, W, Q, D)


def dense(
    q_AWQD: Tensor, k_block_AWKD: Tensor, v_block_AWKD: Tensor, k_KPD: Tensor, v_KPD: Tensor, visible: Visible
) -> Tensor:
    """By one (A*W) x (P + A*W) score matrix and one visibility mask: the oracle that tests compare with."""
    A, W, Q, D = q_AWQD.shape
    K = k_KPD.shape[0]
    q = q_AWQD.reshape(A * W, Q, D).transpose(0, 1)
    k = torch.cat((k_KPD, k_block_AWKD.reshape(A * W, K, D).transpose(0, 1)), 1)
    v = torch.cat((v_KPD, v_block_AWKD.reshape(A * W, K, D).transpose(0, 1)), 1)
    scores = q @ k.repeat_interleave(Q // K, 0).mT * D**-0.5
    out = scores.masked_fill(~visible.dense_mask(), float("-inf")).softmax(-1) @ v.repeat_interleave(Q // K, 0)
    return out.transpose(0, 1).reshape(A, W, Q, D)
