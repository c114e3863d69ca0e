"""The second half of a gated MLP, with its gradient: down(silu(gate) * up). Tensors in, tensors out.

Keeps gate and up, and computes their product again when its gradient is asked for: it is as wide as both, and cheap.

N any leading dimensions, I width of the MLP, H hidden
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def gated_down(gate_NI: Tensor, up_NI: Tensor, weight_HI: Tensor) -> Tensor:
    """(N, H). In the inputs' dtype, whatever that of the weight, as under autocast."""
    return _GatedDown.apply(gate_NI, up_NI, weight_HI)


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight.to(gate.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weight = ctx.saved_tensors
        opened = F.silu(gate)
        grad_weight = grad_out.flatten(0, -2).mT @ (opened * up).flatten(0, -2)
        grad = grad_out @ weight.to(gate.dtype)
        grad_up = opened.mul_(grad)
        grad_gate = torch.ops.aten.silu_backward(grad.mul_(up), gate)
        return grad_gate, grad_up, grad_weight.to(weight.dtype)
