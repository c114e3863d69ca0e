import pytest
import torch

from dflash.drafter import attention
from dflash.drafter.attention import TILE, Visible, block_attention, chunked, dense, flex


def tensors(
    *, A: int, W: int, Q: int, K: int, D: int, P: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(A, W, Q, D), (A, W, K, D), (A, W, K, D), (K, P, D), (K, P, D)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def visible(first: list[int], end: list[int], *, window: int = 0) -> Visible:
    return Visible(torch.tensor(first), torch.tensor(end), 17, block_size=4, window=window)


def output_and_gradients(attend, inputs, seen):
    output = attend(*inputs, seen)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


RANGES = {
    "one document": ([0] * 6, [1, 2, 5, 16, 17, 17]),
    "three documents": ([0, 0, 5, 5, 5, 12], [2, 4, 6, 9, 11, 17]),
    "far apart": ([0, 0, 3, 8, 10, 14], [2, 4, 7, 12, 14, 17]),
    "no order, and blocks without context": ([5, 0, 12, 9, 0, 0], [9, 3, 12, 9, 17, 0]),
}


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("slack", [0, 4, 64])  # blocks one by one, a few or many together
def test_outputs_and_gradients_equal_the_dense_oracle(heads, ranges, window, slack, monkeypatch):
    monkeypatch.setattr(attention, "SLACK", slack)
    inputs = tensors(A=6, W=4, Q=heads[0], K=heads[1], D=6, P=17)
    seen = visible(*RANGES[ranges], window=window)
    results = [output_and_gradients(attend, inputs, seen) for attend in (chunked, dense)]
    for ours, oracle in zip(*results, strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-9, atol=1e-9)


def test_in_bfloat16_outputs_and_gradients_are_those_of_float32_but_for_rounding():
    inputs = tensors(A=6, W=4, Q=4, K=2, D=16, P=17, dtype=torch.float32)
    seen = visible(*RANGES["three documents"])
    exact = output_and_gradients(dense, inputs, seen)
    rounded = output_and_gradients(block_attention, [x.detach().bfloat16().requires_grad_() for x in inputs], seen)
    for ours, oracle in zip(rounded, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), oracle, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("window", [0, 6])
def test_perturbing_a_forbidden_key_changes_nothing_and_an_allowed_one_something(window):
    inputs = tensors(A=6, W=4, Q=4, K=2, D=6, P=17)
    first, end = RANGES["three documents"]
    seen = visible(first, end, window=window)
    with torch.no_grad():
        original = block_attention(*inputs, seen)
        for token in range(17):
            changed = [x.clone() for x in inputs]
            changed[3][:, token] += 1
            changed[4][:, token] -= 1
            output = block_attention(*changed, seen)
            for block in range(6):
                for slot in range(4):
                    lowest = max(first[block], end[block] + slot - (window - 1)) if window else first[block]
                    allowed = lowest <= token < end[block]
                    assert torch.equal(output[block, slot], original[block, slot]) != allowed


@pytest.mark.parametrize("window", [0, 6])
def test_a_slot_sees_all_of_its_own_block_or_with_a_window_those_up_to_itself_and_no_other_block(window):
    inputs = tensors(A=6, W=4, Q=4, K=2, D=6, P=17)
    seen = visible(*RANGES["three documents"], window=window)
    with torch.no_grad():
        original = block_attention(*inputs, seen)
        for slot in range(4):
            changed = [x.clone() for x in inputs]
            changed[1][3, slot] += 1
            changed[2][3, slot] -= 1
            differs_AW = (block_attention(*changed, seen) != original).flatten(2).any(-1)
            assert differs_AW[3].tolist() == [k >= slot or not window for k in range(4)]
            assert not differs_AW[[0, 1, 2, 4, 5]].any()


def test_a_block_without_visible_context_gives_numbers_and_gradients_and_so_do_no_blocks_at_all():
    for A in (1, 0):
        inputs = tensors(A=A, W=3, Q=2, K=1, D=4, P=5)
        seen = Visible(torch.zeros(A, dtype=torch.long), torch.zeros(A, dtype=torch.long), 5, block_size=3)
        assert all(part.isfinite().all() for part in output_and_gradients(block_attention, inputs, seen))


def test_the_work_is_that_of_the_context_actually_visible():
    ends = torch.arange(5, 4096, 8)

    def chunks(first, *, window=0):
        return Visible(first, ends, 4096, block_size=16, window=window).chunks

    zeros, documents = torch.zeros_like(ends), ends // 512 * 512
    for seen, visible_keys in (
        (chunks(zeros), ends),
        (chunks(documents), ends - documents),
        (chunks(zeros, window=256), ends.clamp(max=255)),
    ):
        pairs = [(c.blocks.stop - c.blocks.start) * (c.keys.stop - c.keys.start) for c in seen]
        assert sum(pairs) <= 1.25 * visible_keys.sum() + attention.SLACK * len(ends)
        assert 16 * max(pairs) <= attention.CHUNK_SCORES
    assert all(c.keys.start // 512 == (c.keys.stop - 1) // 512 for c in chunks(documents))  # never another document's


def wide_ranges(*, window: int, block_size: int) -> Visible:
    """Two documents of several tiles, 30 blocks in each."""
    end = torch.cat((torch.arange(270, 420, 5), torch.arange(451, 901, 15)))
    return Visible(end // 450 * 450, end, 910, block_size=block_size, window=window)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("block_size", [16, 5])  # 5: blocks across two tiles
def test_flex_attention_gives_the_oracles_outputs(window, block_size):
    inputs = [x.detach() for x in tensors(A=60, W=block_size, Q=4, K=2, D=16, P=910, dtype=torch.float32)]
    seen = wide_ranges(window=window, block_size=block_size)
    torch.testing.assert_close(flex(*inputs, seen, compiled=False), dense(*inputs, seen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("block_size", [16, 5])
def test_flex_attention_skips_the_tiles_that_no_block_sees_and_masks_none_that_all_see(window, block_size):
    seen = wide_ranges(window=window, block_size=block_size)
    visible = seen.dense_mask()
    queries, keys = -(-visible.shape[0] // TILE), -(-visible.shape[1] // TILE)
    padded = torch.zeros(queries * TILE, keys * TILE, dtype=torch.bool)
    padded[: visible.shape[0], : visible.shape[1]] = visible
    some = padded.unflatten(0, (queries, TILE)).unflatten(2, (keys, TILE)).any(3).any(1)
    mask = seen.block_mask
    assert torch.equal(mask.to_dense()[0, 0].bool(), some)
    assert not some.all()
    for query in range(queries):
        full = mask.full_kv_indices[0, 0, query, : mask.full_kv_num_blocks[0, 0, query]].tolist()
        for key in full:
            rows = visible[query * TILE : (query + 1) * TILE]
            assert rows[:, key * TILE : (key + 1) * TILE].all()
    if window == 0:
        assert mask.full_kv_num_blocks.sum() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has gradients on CUDA only")
@pytest.mark.parametrize("window", [0, 40])
def test_on_a_gpu_outputs_and_gradients_equal_the_dense_oracle(window):
    inputs = [
        x.detach().cuda().requires_grad_() for x in tensors(A=60, W=16, Q=4, K=2, D=64, P=910, dtype=torch.float32)
    ]
    seen = wide_ranges(window=window, block_size=16)
    seen = Visible(seen.first_A.cuda(), seen.end_A.cuda(), 910, block_size=16, window=window)
    results = []
    for attend in (block_attention, chunked, dense):
        output = attend(*inputs, seen)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for flexible, ours, oracle in zip(*results, strict=True):
        torch.testing.assert_close(flexible, oracle, rtol=1e-2, atol=1e-2)  # TF32 products
        torch.testing.assert_close(ours, oracle, rtol=1e-2, atol=1e-2)
