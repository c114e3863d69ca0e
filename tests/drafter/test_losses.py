import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dflash.decoding.ddtree import best_first, label_order
from dflash.drafter.losses import LK_ETA, label_ranks, slot_statistics, slot_weights, top_values
from dflash.drafter.model import Ends
from tests.drafter.small import make_ends

CE = {"ce": 1.0}
MIXTURE = {"ce": 0.3, "kl": 0.5, "tv": 0.7, "lk": 2.0}
PLAIN = {"scale": 1.0, "softcap": None}
SCALED = {"scale": 0.3, "softcap": 2.5}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LABELS = torch.randint(61, (23,), generator=torch.Generator().manual_seed(1))
UPSTREAM = torch.rand(23, generator=torch.Generator().manual_seed(2))


def losses_by_autograd(hidden: Tensor, final: Tensor, head: Tensor, *, scale: float, softcap: float | None) -> dict:
    """Every loss from its definition, in float64 and with all logits at once."""

    def log_probabilities(states: Tensor) -> Tensor:
        logits = states @ head.T * scale
        return (logits if softcap is None else torch.tanh(logits / softcap) * softcap).log_softmax(-1)

    q, p = log_probabilities(hidden), log_probabilities(final)
    kl, tv = (p.exp() * (p - q)).sum(-1), (p.exp() - q.exp()).abs().sum(-1) / 2
    blend = torch.exp(-LK_ETA * torch.minimum(p.exp(), q.exp()).sum(-1)).detach()
    ce = F.nll_loss(q, LABELS, reduction="none")
    return {"ce": ce, "kl": kl, "tv": tv, "lk": blend * kl + (1 - blend) * tv}


@pytest.mark.parametrize("rule", [PLAIN, SCALED], ids=["plain", "softcap"])
@pytest.mark.parametrize(
    "loss", [CE, {"kl": 1.0}, {"tv": 1.0}, {"lk": 1.0}, MIXTURE], ids=["ce", "kl", "tv", "lk", "all"]
)
def test_losses_and_gradients_are_those_of_the_definition_whatever_the_chunk(loss: dict, rule: dict):
    head = make_ends().head_VH
    ends = Ends({"embed_tokens.weight": head}, dtype=torch.float32, **rule)
    hidden, final = draw(23, 24, seed=0).requires_grad_(), 0.5 * draw(23, 24, seed=3)
    exact = hidden.detach().double().requires_grad_()
    parts = losses_by_autograd(exact, final.double(), head.double(), **rule)
    expected = sum(weight * parts[name] for name, weight in loss.items())
    (expected_grad,) = torch.autograd.grad((expected * UPSTREAM).sum(), exact)
    for memory_bytes in (1, 5000, 0):
        slots = slot_statistics(hidden, LABELS, ends, loss=loss, final_NH=final, memory_bytes=memory_bytes)
        (grad,) = torch.autograd.grad((slots.loss_N * UPSTREAM).sum(), hidden)
        torch.testing.assert_close(slots.loss_N.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slots.nll_N.double(), parts["ce"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-5)
        assert not slots.nll_N.requires_grad


def test_ranks_and_best_values_are_those_of_the_sorted_probabilities_whatever_the_chunk():
    ends, hidden = make_ends(), draw(23, 24, seed=0)
    values, order = ends.logits(hidden).log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    for memory_bytes in (1, 5000, 0):
        slots = slot_statistics(hidden, LABELS, ends, loss=CE, top_k=7, memory_bytes=memory_bytes)
        assert torch.equal(order.gather(1, slots.rank_N[:, None])[:, 0], LABELS)
        torch.testing.assert_close(slots.top_values_NK, values[:, :7], rtol=1e-5, atol=1e-5)


def test_a_drafter_that_says_what_the_verifier_says_has_no_loss_but_entropy():
    ends, final = make_ends(), draw(23, 24, seed=0)
    for name in ("kl", "tv", "lk"):
        hidden = final.clone().requires_grad_()
        slots = slot_statistics(hidden, LABELS, ends, loss={name: 1.0}, final_NH=final)
        slots.loss_N.sum().backward()
        torch.testing.assert_close(slots.loss_N, torch.zeros(23), rtol=0, atol=1e-5)
        torch.testing.assert_close(hidden.grad, torch.zeros(23, 24), rtol=0, atol=1e-5)


def test_losses_of_distributions_ask_for_final_states():
    with pytest.raises(ValueError, match=r"store_final"):
        slot_statistics(draw(4, 24, seed=0), LABELS[:4], make_ends(), loss={"ce": 1.0, "kl": 0.1})


def test_without_gradients_nothing_is_kept_and_no_slots_are_fine():
    ends = make_ends()
    with torch.no_grad():
        slots = slot_statistics(torch.randn(4, 24), torch.tensor([1, 2, 3, 4]), ends, loss=CE)
    assert not slots.loss_N.requires_grad
    assert slots.rank_N.dtype == torch.long
    hidden = torch.zeros(0, 24, requires_grad=True)
    slots = slot_statistics(hidden, torch.zeros(0, dtype=torch.long), ends, loss=CE, top_k=3)
    slots.loss_N.sum().backward()
    assert hidden.grad is not None
    assert slots.top_values_NK.shape == (0, 3)


@pytest.mark.parametrize("loss", [CE, {"lk": 1.0}], ids=["ce", "lk"])
def test_bfloat16_ends_reduce_in_float32_also_under_autocast(loss: dict):
    exact = make_ends()
    ends = Ends({"embed_tokens.weight": exact.head_VH}, dtype=torch.bfloat16)
    hidden, final = draw(23, 24, seed=0).bfloat16().requires_grad_(), draw(23, 24, seed=3).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        slots = slot_statistics(hidden, LABELS, ends, loss=loss, final_NH=final)
    q, p = (ends.logits(states).detach().double().log_softmax(-1) for states in (hidden, final))
    kl, tv = (p.exp() * (p - q)).sum(-1), (p.exp() - q.exp()).abs().sum(-1) / 2
    blend = torch.exp(-LK_ETA * (1 - tv))
    expected = F.nll_loss(q, LABELS, reduction="none") if loss == CE else blend * kl + (1 - blend) * tv
    assert slots.loss_N.dtype == torch.float32
    torch.testing.assert_close(slots.loss_N.double(), expected, rtol=1e-5, atol=1e-5)
    slots.loss_N.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


@given(st.lists(st.lists(st.integers(-3, 3), min_size=9, max_size=9), min_size=1, max_size=4), st.integers(1, 9))
def test_ranks_and_best_values_are_those_of_a_stable_sort(rows: list[list[int]], count: int):
    logits_NV = torch.tensor(rows, dtype=torch.float32)
    order_NV = logits_NV.argsort(dim=-1, descending=True, stable=True)  # equal ones: the lower id first
    for label in range(9):
        ranks_N = (order_NV == label).nonzero()[:, 1]
        assert torch.equal(label_ranks(logits_NV, torch.full((len(rows),), label)), ranks_N)
    assert torch.equal(top_values(logits_NV, count), logits_NV.topk(count).values)


LIVE = torch.tensor([[True, True, True], [True, False, False]])
NLL = torch.tensor([[0.1, 1.0, 2.0], [0.7, 0.0, 0.0]])
RANKS = torch.tensor([[0, 2, 40], [1, 0, 0]])


def weigh(kind: str, nll: Tensor = NLL, ranks: Tensor = RANKS, live: Tensor = LIVE, **changes) -> tuple[Tensor, Tensor]:
    settings = {"gamma": 4.0, "alpha": 0.3, "budget": 16}
    return slot_weights(kind, live, nll_AS=nll, rank_AS=ranks, **(settings | changes))


def test_decay_is_the_formula_and_uniform_is_asked_for():
    weights, normaliser = weigh("decay")
    expected = [[1.0, math.exp(-1 / 4), math.exp(-2 / 4)], [1.0, 0.0, 0.0]]
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert normaliser.tolist() == pytest.approx([1 + math.exp(-1 / 4) + math.exp(-2 / 4), 1])
    assert weigh("uniform")[0].tolist() == [[1, 1, 1], [1, 0, 0]]


def by_recurrence(q: list[float], *, alpha: float) -> list[float]:
    smooth = [(1 - alpha) * value + alpha for value in q]
    return [sum(math.prod(smooth[: m + 1]) for m in range(j, len(q))) for j in range(len(q))]


def test_dpace_is_the_formula_over_live_slots_and_is_not_divided_by_its_own_sum():
    nll = NLL.clone().requires_grad_()
    weights, normaliser = weigh("dpace", nll)
    for block, live in enumerate((3, 1)):
        expected = by_recurrence([math.exp(-value) for value in NLL[block, :live].tolist()], alpha=0.3)
        torch.testing.assert_close(weights[block], torch.tensor(expected + [0.0] * (3 - live)))
    assert normaliser.tolist() == [3, 1]
    assert not weights.requires_grad


def test_tree_weights_follow_the_nodes_that_must_come_before_the_label_prefix():
    weights, normaliser = weigh("tree")
    for block, nodes in enumerate(([1, 1 + 3, 1 + 3 + 3 * 41], [2])):
        stays = [16 / (16 + count) for count in nodes]
        q = [after / before for after, before in zip(stays, [1.0, *stays], strict=False)]
        expected = by_recurrence(q, alpha=0.3)
        torch.testing.assert_close(weights[block], torch.tensor(expected + [0.0] * (3 - len(nodes))))
    assert normaliser.tolist() == [3, 1]


def test_tree_weights_rise_with_the_budget_and_fall_with_a_rank_and_stay_finite():
    live = torch.ones(1, 127, dtype=torch.bool)
    worst = torch.full((1, 127), 200_000)
    for ranks in (worst, torch.zeros_like(worst)):
        weights, _ = weigh("tree", ranks=ranks, live=live, nll=torch.zeros(1, 127), alpha=0.0)
        assert weights.isfinite().all()
        larger, _ = weigh("tree", ranks=ranks, live=live, nll=torch.zeros(1, 127), alpha=0.0, budget=64)
        assert (larger >= weights).all()
        assert (larger > weights)[0, 0]
    assert weigh("tree")[0][0, 1] < weigh("tree", ranks=RANKS.clamp(max=2))[0][0, 1]


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 7))
def test_no_tree_takes_a_label_prefix_before_the_nodes_that_its_ranks_demand(seed: int, slots: int, vocab: int):
    generator = torch.Generator().manual_seed(seed)
    values = (2 * torch.randn(8, slots, vocab, generator=generator)).log_softmax(-1).sort(-1, descending=True).values
    ranks = torch.randint(vocab, (8, slots), generator=generator)
    trees = best_first(values, torch.arange(vocab).expand_as(values), budget=3000)
    order = label_order(trees, ranks, torch.ones_like(ranks, dtype=torch.bool))
    demanded = (ranks + 1).cumprod(-1).cumsum(-1)
    assert (order + 1 >= demanded).all()
