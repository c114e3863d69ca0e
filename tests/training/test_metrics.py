import heapq
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.training.metrics import Tally, tally


def count(
    ranks: list, live: list, *, values: torch.Tensor | None = None, groups: list | None = None, **changes
) -> Tally:
    rank_AS, live_AS = torch.tensor(ranks), torch.tensor(live, dtype=torch.bool)
    settings = {
        "loss_A": torch.ones(len(ranks)),
        "weight_A": live_AS.sum(-1),
        "tree_budgets": (2, 5),
        "groups_AX": torch.tensor(groups if groups else [[] for _ in ranks], dtype=torch.long),
        "num_groups": 3 if groups else 0,
    }
    return tally(rank_AS=rank_AS, live_AS=live_AS, top_values_ASK=values, **(settings | changes))


RANKS = [[0, 3, 9], [7, 0, 0], [0, 0, 0]]
LIVE = [[1, 1, 1], [1, 1, 0], [0, 0, 0]]


def test_slots_blocks_leading_hits_and_conditional_acceptance_are_counted():
    metrics = count(RANKS, LIVE, loss_A=torch.tensor([4.0, 2.0, 0.0])).metrics()
    assert metrics["loss"] == 6 / 5
    assert metrics["accuracy"] == metrics["recall@1"] == 2 / 5
    assert metrics["top4_accuracy"] == 3 / 5
    assert metrics["top8_accuracy"] == 4 / 5
    assert metrics["recall@2"] == 2 / 5
    assert metrics["recall@16"] == 1
    assert (metrics["streak"], metrics["ddtree_streak4"], metrics["ddtree_streak8"]) == (1 / 2, 2 / 2, 4 / 2)
    assert metrics["acceptance/slot1"] == 1 / 2
    assert metrics["acceptance/slot2"] == 0


def test_what_was_not_measured_is_not_there():
    metrics = count(RANKS, LIVE).metrics()
    assert "acceptance/slot3" not in metrics  # no block got there
    assert not any("accept@" in name or "calibration" in name for name in metrics)
    assert count(RANKS, [[0, 0, 0]] * 3).metrics() == {}
    assert Tally().metrics() == {}
    assert Tally().loss.item() == 0


def test_sums_of_parts_are_those_of_the_whole_and_survive_a_file():
    whole = count(RANKS, LIVE, groups=[[0, 1], [2, 1], [0, 1]])
    parts = [count(RANKS[i : i + 1], LIVE[i : i + 1], groups=[g]) for i, g in enumerate([[0, 1], [2, 1], [0, 1]])]
    total = sum(parts, Tally())
    assert torch.equal(total.sums, whole.sums)
    again = Tally.of_json(total.to_json()) + Tally()
    assert torch.equal(again.sums, whole.sums)
    assert again.metrics() == whole.metrics()
    assert (whole.loss.item(), whole.weight.item()) == (3, 5)


def test_groups_are_told_apart_by_every_metric_but_those_of_slots():
    values = torch.zeros(3, 3, 5)
    counted = count(RANKS, LIVE, groups=[[0, 1], [2, 1], [0, 1]], values=values)
    metrics = counted.metrics(["category/a", "bucket/0", "category/b"])
    assert metrics["accuracy/category/a"] == 1 / 3
    assert metrics["accuracy/category/b"] == 1 / 2
    assert metrics["accuracy/bucket/0"] == metrics["accuracy"]
    assert (metrics["top8_accuracy/category/a"], metrics["top8_accuracy/category/b"]) == (2 / 3, 2 / 2)
    of_all = {name for name in metrics if "bucket" not in name and "category" not in name}
    assert {"ddtree_streak4", "recall@64", "ddtree_accept@5", "calibration@2", "acceptance/slot1"} <= of_all
    for group in ("category/a", "category/b", "bucket/0"):
        assert {name.removesuffix(f"/{group}") for name in metrics if name.endswith(f"/{group}")} == {
            name for name in of_all if "slot" not in name
        }


def best_prefixes(values: list[list[float]], budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """The most probable prefixes, one after the other from a heap: (-log-probability, ranks)."""
    heap = [(-values[0][rank], (rank,)) for rank in range(len(values[0]))]
    heapq.heapify(heap)
    taken = []
    while heap and len(taken) < budget:
        cost, prefix = heapq.heappop(heap)
        taken.append((cost, prefix))
        if len(prefix) < len(values):
            for rank, value in enumerate(values[len(prefix)]):
                heapq.heappush(heap, (cost - value, (*prefix, rank)))
    return taken


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 6), st.integers(1, 40))
def test_accepted_and_expected_lengths_are_those_of_the_best_first_tree(seed: int, slots: int, vocab: int, budget: int):
    generator = torch.Generator().manual_seed(seed)
    logp = (2 * torch.randn(5, slots, vocab, generator=generator)).log_softmax(-1).sort(-1, descending=True).values
    ranks = torch.randint(3, (5, slots), generator=generator).clamp(max=vocab - 1)
    lengths = torch.randint(slots + 1, (5,), generator=generator)
    live = torch.arange(slots) < lengths[:, None]
    small = max(1, budget // 3)
    top = logp[..., : min(budget, vocab)]
    metrics = count(ranks.tolist(), live.tolist(), values=top, tree_budgets=(small, budget)).metrics()
    blocks = [i for i in range(5) if lengths[i]]
    if not blocks:
        assert metrics == {}
        return
    for size in {small, budget}:
        accepted, expected = 0, 0.0
        for i in blocks:
            nodes = best_prefixes(logp[i].double().tolist(), size)
            prefixes = {prefix for _, prefix in nodes}
            label = tuple(ranks[i].tolist())
            accepted += sum(label[:depth] in prefixes for depth in range(1, int(lengths[i]) + 1))
            expected += sum(math.exp(-cost) for cost, prefix in nodes if len(prefix) <= lengths[i])
        assert metrics[f"ddtree_accept@{size}"] == pytest.approx(accepted / len(blocks))
        assert metrics[f"calibration@{size}"] == pytest.approx((expected - accepted) / len(blocks), abs=1e-5)
