"""RMS norm, and RMS norm followed by rotary positions, each with its gradient. Tensors in, tensors out.

Computed in float32 whatever the dtype. Both keep their input and nothing else: autograd would keep half a dozen.

N any leading dimensions, Q heads, D width of a norm, R dimensions that rotate
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x_ND, weight_D, eps, None, None)


def rms_norm_rotated(x_NQD: Tensor, weight_D: Tensor, eps: float, cos_N1R: Tensor, sin_N1R: Tensor) -> Tensor:
    """The norm of each head, then the leading R dimensions rotated: as in Llama and Qwen, halves against each other."""
    return _Norm.apply(x_NQD, weight_D, eps, cos_N1R, sin_N1R)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        normed = _unit(x, eps)[0].mul_(weight)
        if cos is not None and sin is not None:
            _rotate_(normed, cos, sin)
        return normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        unit, inverse_rms = _unit(x, ctx.eps)
        grad = grad_out.to(unit.dtype, copy=True)
        if cos is not None:
            _rotate_(grad, cos, -sin)
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        grad.mul_(weight)
        along = (grad * unit).mean(-1, keepdim=True)
        grad_x = grad.addcmul_(unit, along, value=-1).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None, None


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, and what it was multiplied by; float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * inverse_rms, inverse_rms


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place; the gradient is the rotation back."""
    R = cos.shape[-1]
    low, high = x[..., : R // 2], x[..., R // 2 : R]
    cos, sin = cos[..., : R // 2], sin[..., : R // 2]  # both halves are the same
    turned = low * cos
    turned.addcmul_(high, sin, value=-1)
    high.mul_(cos).addcmul_(low, sin)
    low.copy_(turned)
