import pytest
import torch

from dflash.drafter.attention import block_attention, dense_attention


def tensors(*, B: int, A: int, W: int, Q: int, K: int, D: int, T: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, A, W, Q, D), (B, A, W, K, D), (B, A, W, K, D), (B, K, T, D), (B, K, T, D)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("start", [0, 3])
def test_outputs_and_gradients_equal_the_dense_oracle(heads, start):
    inputs = tensors(B=2, A=5, W=4, Q=heads[0], K=heads[1], D=6, T=17)
    anchors = torch.tensor([[1, 2, 5, 16, 40], [0, 3, 3, 9, 17]])
    results = []
    for attention in (block_attention, dense_attention):
        output = attention(*inputs, anchors_BA=anchors, start=start)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    for ours, oracle in zip(*results, strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-9, atol=1e-9)


def test_a_block_without_visible_context_gives_numbers_and_gradients():
    inputs = tensors(B=1, A=1, W=3, Q=2, K=1, D=4, T=5)
    output = block_attention(*inputs, anchors_BA=torch.tensor([[0]]))
    assert all(part.isfinite().all() for part in [output, *torch.autograd.grad(output.sum(), inputs)])
