import torch
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash.drafter.norms import rms_norm, rms_norm_rotated
from dflash.drafter.rope import frequencies
from dflash.drafter.shape import rope_parameters


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def angles(rope: dict[str, object], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    radians = frequencies(rope, head_dim=16)
    turned = positions[:, None, None].double() * torch.cat((radians, radians))
    return turned.cos(), turned.sin()


def test_the_norm_is_that_of_torch_and_so_is_its_gradient():
    x, weight = draw(5, 7, 24).requires_grad_(), draw(24, seed=1).requires_grad_()
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (24,), weight, 1e-3))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))


def test_the_rotated_norm_is_that_of_qwen3():
    rope = rope_parameters({"rope_theta": 1e6})
    x, weight = draw(40, 3, 16), draw(16, seed=1)
    cos, sin = angles(rope, torch.arange(40))
    theirs = Qwen3RotaryEmbedding(Qwen3Config(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    normed = F.rms_norm(x, (16,), weight, 1e-6).transpose(0, 1)[None]  # batch, heads, positions, head width
    expected, _ = apply_rotary_pos_emb(normed, normed, *theirs(normed, torch.arange(40)[None]))
    ours = rms_norm_rotated(x, weight, 1e-6, cos, sin).transpose(0, 1)[None]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_partial_rotation_leaves_the_rest_alone_and_gradients_are_right():
    rope = rope_parameters({"rope_theta": 1e4, "partial_rotary_factor": 0.25})
    x, weight = draw(6, 2, 16).requires_grad_(), draw(16, seed=1).requires_grad_()
    cos, sin = angles(rope, 3 * torch.arange(6))
    assert cos.shape == (6, 1, 4)
    plain, turned = rms_norm(x, weight, 1e-6), rms_norm_rotated(x, weight, 1e-6, cos, sin)
    assert torch.equal(turned[..., 4:], plain[..., 4:])
    assert not torch.isclose(turned[1:, :, :4], plain[1:, :, :4]).all()
    torch.testing.assert_close(turned[..., :4].norm(dim=-1), plain[..., :4].norm(dim=-1))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm_rotated(x, weight, 1e-6, cos, sin), (x, weight))
    # scaled angles (YaRN's attention factor) are no rotation: the gradient must carry the factor as well
    assert torch.autograd.gradcheck(lambda x: rms_norm_rotated(x, weight, 1e-6, 1.3 * cos, 1.3 * sin), (x,))


def test_in_bfloat16_it_is_computed_in_float32_and_rounded_once():
    x, weight = draw(50, 3, 16).bfloat16(), draw(16, seed=1, dtype=torch.float32)
    cos, sin = (part.float() for part in angles(rope_parameters({}), torch.arange(50) + 2000))
    exact = rms_norm_rotated(x.float(), weight, 1e-6, cos, sin)
    assert torch.equal(rms_norm_rotated(x, weight, 1e-6, cos, sin), exact.bfloat16())
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight, 1e-6).bfloat16())
