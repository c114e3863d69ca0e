import math

import pytest
import torch
from torch.nn import functional as F

from dflash.drafter.losses import Tally, label_ranks, slot_statistics, slot_weights, tally
from dflash.drafter.model import Ends
from tests.drafter.small import make_ends


def test_statistics_and_gradient_equal_full_cross_entropy_whatever_the_chunk():
    ends = make_ends()
    hidden = torch.randn(23, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.randint(61, (23,), generator=torch.Generator().manual_seed(1))
    upstream = torch.rand(23, generator=torch.Generator().manual_seed(2))
    expected = F.cross_entropy(ends.logits(hidden), labels, reduction="none")
    (expected_grad,) = torch.autograd.grad((expected * upstream).sum(), hidden)
    for chunk in (1, 5, 23, 0):
        nll, ranks = slot_statistics(hidden, labels, ends, chunk=chunk)
        (grad,) = torch.autograd.grad((nll * upstream).sum(), hidden)
        torch.testing.assert_close(nll, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
        order = ends.logits(hidden).argsort(-1, descending=True)
        assert torch.equal(order.gather(1, ranks[:, None])[:, 0], labels)


def test_without_gradients_nothing_is_kept_and_no_slots_are_fine():
    ends = make_ends()
    with torch.no_grad():
        nll, ranks = slot_statistics(torch.randn(4, 24), torch.tensor([1, 2, 3, 4]), ends)
    assert not nll.requires_grad
    assert ranks.dtype == torch.long
    hidden = torch.zeros(0, 24, requires_grad=True)
    nll, ranks = slot_statistics(hidden, torch.zeros(0, dtype=torch.long), ends)
    nll.sum().backward()
    assert hidden.grad is not None


def test_bfloat16_ends_reduce_in_float32():
    exact = make_ends()
    ends = Ends({"embed_tokens.weight": exact.head_VH}, dtype=torch.bfloat16)
    hidden = torch.randn(9, 24, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    labels = torch.arange(9)
    nll, _ = slot_statistics(hidden, labels, ends)
    expected = F.cross_entropy(ends.logits(hidden).float(), labels, reduction="none")
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, expected, rtol=1e-5, atol=1e-5)


def test_ties_rank_the_lower_id_first():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]] * 5)
    assert label_ranks(logits, torch.arange(5)).tolist() == [3, 0, 1, 2, 4]


LIVE = torch.tensor([[[True, True, True], [True, False, False]]])
NLL = torch.tensor([[[0.1, 1.0, 2.0], [0.7, 0.0, 0.0]]])


def test_decay_is_the_formula_and_uniform_is_asked_for():
    weights, normaliser = slot_weights("decay", LIVE, NLL, gamma=4.0, alpha=0.5)
    expected = [[1.0, math.exp(-1 / 4), math.exp(-2 / 4)], [1.0, 0.0, 0.0]]
    torch.testing.assert_close(weights[0], torch.tensor(expected))
    assert normaliser.item() == pytest.approx(2 + math.exp(-1 / 4) + math.exp(-2 / 4))
    assert slot_weights("uniform", LIVE, NLL, gamma=4.0, alpha=0.5)[0].tolist() == [[[1, 1, 1], [1, 0, 0]]]


def test_dpace_is_the_formula_over_live_slots_and_is_not_divided_by_its_own_sum():
    nll = NLL.clone().requires_grad_()
    weights, normaliser = slot_weights("dpace", LIVE, nll, gamma=4.0, alpha=0.3)
    for block, live in enumerate((3, 1)):
        q = [0.7 * math.exp(-value) + 0.3 for value in NLL[0, block].tolist()]
        expected = [sum(math.prod(q[: m + 1]) for m in range(j, live)) if j < live else 0.0 for j in range(3)]
        torch.testing.assert_close(weights[0, block], torch.tensor(expected))
    assert normaliser.item() == 4
    assert not weights.requires_grad


def test_tally_counts_slots_blocks_and_leading_hits():
    ranks = torch.tensor([[[0, 3, 9], [7, 0, 0], [0, 0, 0]]])
    live = torch.tensor([[[True, True, True], [True, True, False], [False, False, False]]])
    once = tally(loss=torch.tensor(6.0), weight=torch.tensor(3.0), rank_BAS=ranks, live_BAS=live)
    assert once == Tally(6, 3, slots=5, blocks=2, top1=2, top4=3, top8=4, streak1=1, streak4=2, streak8=4)
    metrics = (once + once).metrics()
    assert metrics["loss"] == 2.0
    assert metrics["accuracy"] == 2 / 5
    assert metrics["ddtree_streak8"] == 2.0
    assert Tally().metrics() == {}
