"""Attention of anchored blocks over a shared context. Tensors in, tensors out: knows no weights and no tokens.

Each block of W queries sees the context keys at positions strictly before its anchor, and all of its own block.

B batch, A anchors (blocks), W block size, T context tokens, Q query heads, K key/value heads, G = Q/K, D head width
"""

import torch
from torch import Tensor


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
    q_BKARD = q_BAWQD.view(B, A, W, K, G, D).permute(0, 3, 1, 4, 2, 5).reshape(B, K, A, G * W, D) * D**-0.5
    k_BKAWD, v_BKAWD = k_block_BAWKD.permute(0, 3, 1, 2, 4), v_block_BAWKD.permute(0, 3, 1, 2, 4)

    context_BKART = (q_BKARD.reshape(B, K, A * G * W, D) @ k_context_BKTD.mT).view(B, K, A, G * W, T)
    # strictly before the anchor: when drafting, the verifier has not produced the anchor's own features yet
    hidden_BAT = torch.arange(start, start + T, device=q_BAWQD.device) >= anchors_BA[..., None]
    context_BKART = context_BKART.masked_fill(hidden_BAT[:, None, :, None], float("-inf"))
    own_BKARW = q_BKARD @ k_BKAWD.mT
    p_BKARX = torch.cat((context_BKART, own_BKARW), -1).softmax(-1, dtype=torch.float32).to(v_block_BAWKD.dtype)
    out_BKARD = (p_BKARX[..., :T].reshape(B, K, A * G * W, T) @ v_context_BKTD).view(B, K, A, G * W, D)
    out_BKARD = out_BKARD + p_BKARX[..., T:] @ v_BKAWD
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
