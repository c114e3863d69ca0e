import pytest
import torch
from torch.nn import functional as F

from dflash.drafter.gated import gated_down


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 10), (3, 4, 10), (6, 10))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def test_it_is_the_gated_product_behind_a_projection_and_so_is_its_gradient():
    gate, up, weight = inputs()
    torch.testing.assert_close(gated_down(gate, up, weight), (F.silu(gate) * up) @ weight.mT)
    assert torch.autograd.gradcheck(gated_down, (gate, up, weight))


def test_it_keeps_its_inputs_and_nothing_else():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        tensors = inputs()
        gated_down(*tensors)
    assert [tensor.data_ptr() for tensor in kept] == [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_float32_weight_meets_bfloat16_inputs_as_under_autocast(autocast):
    gate, up, weight = inputs(torch.float32)
    gate, up = gate.detach().bfloat16().requires_grad_(), up.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = gated_down(gate, up, weight)
    assert output.dtype == torch.bfloat16
    grads = torch.autograd.grad(output.float().square().sum(), (gate, up, weight))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16, torch.float32]
    exact = (F.silu(gate.float()) * up.float()) @ weight.bfloat16().float().mT
    torch.testing.assert_close(output.float(), exact, rtol=0.02, atol=0.05)
