"""Trees against the definition: all prefixes, sorted."""

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.decoding.ddtree import (
    ABSENT,
    Trees,
    accepted_within,
    ancestors,
    best_first,
    chain,
    label_order,
    root_only,
    top_tokens,
    walk,
)

BUDGETS = (1, 2, 3, 4, 7, 16, 200)


def brute_force(logprobs_SV: torch.Tensor) -> list[tuple[float, tuple[int, ...]]]:
    """(score, token ids) of every possible prefix: by score, then depth, then its parent's place, then rank."""
    values_SV, ids_SV = logprobs_SV.sort(dim=-1, descending=True, stable=True)
    values, ids = values_SV.numpy(), ids_SV.tolist()  # scores are summed in float32, as those of trees
    level: list[tuple[tuple[Any, ...], tuple[int, ...]]] = [((numpy.float32(0), 0, (), 0), ())]
    found = []
    for slot, depth in enumerate(range(1, len(ids) + 1)):
        level = [
            ((cost[0] - values[slot, rank], depth, cost, rank), (*tokens, ids[slot][rank]))
            for cost, tokens in level
            for rank in range(len(ids[slot]))
            if values[slot, rank] > -math.inf
        ]
        found += level
    return [(-float(cost[0]), tokens) for cost, tokens in sorted(found)]


def prefixes(trees: Trees, block: int) -> list[tuple[float, tuple[int, ...]]]:
    """The same of a tree, read from its parents."""
    found: list[tuple[float, tuple[int, ...]]] = []
    for token, parent, depth, score in zip(
        trees.tokens_BN[block].tolist(),
        trees.parents_BN[block].tolist(),
        trees.depths_BN[block].tolist(),
        trees.scores_BN[block].tolist(),
        strict=True,
    ):
        if score == -math.inf:
            continue
        assert parent < len(found), "a parent precedes its child"
        path = (*(found[parent][1] if parent >= 0 else ()), token)
        assert len(path) == depth
        found.append((score, path))
    return found


def tree_of(logprobs_BSV: torch.Tensor, budget: int) -> Trees:
    """Of these blocks, which are the same whether few or many are built at a time."""
    values_BSK, ids_BSK = top_tokens(logprobs_BSV, min(budget, logprobs_BSV.shape[-1]))
    few = best_first(values_BSK, ids_BSK, budget=budget)
    many = best_first(values_BSK.repeat(33, 1, 1), ids_BSK.repeat(33, 1, 1), budget=budget)
    assert few.scores_BN.shape == (len(logprobs_BSV), many.scores_BN.shape[1])
    exists_BN = few.scores_BN > -math.inf
    for name in ("scores_BN", "tokens_BN", "parents_BN", "depths_BN"):
        own, others = getattr(few, name), getattr(many, name)[-len(logprobs_BSV) :]
        assert torch.equal(own[exists_BN], others[exists_BN])
    assert torch.equal(exists_BN, many.scores_BN[: len(exists_BN)] > -math.inf)
    return few


@st.composite
def many_ties(draw: st.DrawFn) -> torch.Tensor:
    """Log-probabilities (B, S, V) from a few exact values, so that sums tie; some are impossible."""
    num_slots, vocab = draw(st.sampled_from([(1, 1), (1, 5), (2, 4), (3, 1), (3, 3), (4, 2), (4, 4)]))
    levels = st.sampled_from([0.0, -0.25, -0.5, -0.5, -1.0, -1.5, -2.0, -math.inf])
    values = draw(st.lists(levels, min_size=2 * num_slots * vocab, max_size=2 * num_slots * vocab))
    return torch.tensor(values).reshape(2, num_slots, vocab)


@st.composite
def distributions(draw: st.DrawFn) -> torch.Tensor:
    num_slots, vocab = draw(st.sampled_from([(1, 7), (3, 4), (4, 3), (5, 2)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0, 30.0]))
    return (torch.randn(3, num_slots, vocab, generator=generator) * scale).log_softmax(-1)


@settings(max_examples=150)
@given(logprobs_BSV=many_ties() | distributions(), budget=st.sampled_from(BUDGETS))
def test_the_tree_is_the_most_probable_prefixes(logprobs_BSV: torch.Tensor, budget: int) -> None:
    trees = tree_of(logprobs_BSV, budget)
    assert trees.tokens_BN.shape[1] <= budget
    for block, logprobs_SV in enumerate(logprobs_BSV):
        assert prefixes(trees, block) == brute_force(logprobs_SV)[:budget]


@settings(max_examples=60)
@given(logprobs_BSV=many_ties() | distributions())
def test_the_first_nodes_of_a_tree_are_the_smaller_tree(logprobs_BSV: torch.Tensor) -> None:
    largest = tree_of(logprobs_BSV, BUDGETS[-1])
    for budget in BUDGETS:
        smaller = tree_of(logprobs_BSV, budget)
        for block in range(len(logprobs_BSV)):
            assert prefixes(smaller, block) == prefixes(largest, block)[:budget]


@settings(max_examples=60)
@given(logprobs_BSV=many_ties() | distributions(), data=st.data())
def test_a_budget_accepts_the_label_prefixes_in_its_tree_and_never_fewer_than_a_smaller_one(
    logprobs_BSV: torch.Tensor, data: st.DataObject
) -> None:
    num_blocks, num_slots, vocab = logprobs_BSV.shape
    labels_BS = torch.tensor(
        data.draw(st.lists(st.integers(0, vocab - 1), min_size=num_blocks * num_slots, max_size=num_blocks * num_slots))
    ).reshape(num_blocks, num_slots)
    num_live = data.draw(st.integers(0, num_slots))
    live_BS = (torch.arange(num_slots) < num_live).expand(num_blocks, -1)
    order_BS = label_order(tree_of(logprobs_BSV, BUDGETS[-1]), labels_BS, live_BS)
    before = [0] * num_blocks
    for budget in BUDGETS:
        accepted = accepted_within(order_BS, budget).tolist()
        for block, labels in enumerate(labels_BS.tolist()):
            kept = {tokens for _, tokens in brute_force(logprobs_BSV[block])[:budget]}
            depths = [depth for depth in range(num_live + 1) if depth == 0 or tuple(labels[:depth]) in kept]
            assert accepted[block] == max(depths)
            assert accepted[block] >= before[block]
        before = accepted


@settings(max_examples=60)
@given(logprobs_BSV=distributions())
def test_a_tree_as_big_as_the_chain_expects_to_accept_at_least_as_much(logprobs_BSV: torch.Tensor) -> None:
    num_slots = logprobs_BSV.shape[1]
    alone_B = chain(*top_tokens(logprobs_BSV, 1)).scores_BN.exp().sum(-1)
    for budget in (num_slots, num_slots + 1, 64):
        assert (tree_of(logprobs_BSV, budget).scores_BN.exp().sum(-1) >= alone_B - 1e-6).all()


def test_a_big_tree_over_a_big_vocabulary_needs_only_its_best_candidates() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs_BSV = (3 * torch.randn(4, 15, 400, generator=generator)).log_softmax(-1)
    everything = best_first(*top_tokens(logprobs_BSV, 400), budget=300)
    enough = best_first(*top_tokens(logprobs_BSV, 300), budget=300)
    assert enough.tokens_BN.shape == (4, 300)
    for name in ("tokens_BN", "parents_BN", "depths_BN", "scores_BN"):
        assert torch.equal(getattr(enough, name), getattr(everything, name))


@pytest.mark.parametrize(("budget", "num_slots"), [(4096, 31), (2048, 127)])
def test_many_trees_may_be_as_large_as_settings_allow(budget: int, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs_BSV = torch.randn(1, num_slots, 64, generator=generator).log_softmax(-1)
    assert tree_of(logprobs_BSV, budget).tokens_BN.shape == (1, budget)


def test_blocks_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs_BSV = torch.randn(6, 4, 9, generator=generator).log_softmax(-1)
    together = tree_of(logprobs_BSV, 20)
    for block in range(6):
        assert prefixes(tree_of(logprobs_BSV[block : block + 1], 20), 0) == prefixes(together, block)


@settings(max_examples=100)
@given(logprobs_BSV=many_ties(), data=st.data())
def test_top_tokens_are_sorted_and_ties_go_to_the_lowest_id(logprobs_BSV: torch.Tensor, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, logprobs_BSV.shape[-1]))
    values, ids = logprobs_BSV.sort(dim=-1, descending=True, stable=True)
    got_values, got_ids = top_tokens(logprobs_BSV, k)
    assert torch.equal(got_values, values[..., :k])
    assert torch.equal(got_ids, ids[..., :k])


def test_the_chain_is_the_best_token_of_each_slot_one_below_the_other() -> None:
    logprobs_BSV = torch.tensor([[[0.1, 0.9], [0.5, 0.5], [0.8, 0.2]]]).log()
    trees = chain(*top_tokens(logprobs_BSV, 2))
    assert [tokens for _, tokens in prefixes(trees, 0)] == [(1,), (1, 0), (1, 0, 0)]
    assert trees.scores_BN[0].exp().tolist() == pytest.approx([0.9, 0.45, 0.36])


def test_a_node_sees_itself_its_ancestors_and_the_root() -> None:
    generator = torch.Generator().manual_seed(2)
    trees = tree_of((2 * torch.randn(3, 4, 9, generator=generator)).log_softmax(-1), 30)
    visible_BMM = ancestors(trees)
    for block in range(3):
        expected = torch.zeros(31, 31, dtype=torch.bool)
        for node in range(-1, 30):
            at = node
            while at >= 0:
                expected[node + 1, at + 1] = True
                at = int(trees.parents_BN[block, at])
            expected[node + 1, 0] = True
        assert torch.equal(visible_BMM[block], expected)
    assert ancestors(root_only(2, device=torch.device("cpu"))).tolist() == [[[True]], [[True]]]


def test_the_walk_follows_the_verifier_and_stops_where_its_choice_is_no_node() -> None:
    #        root -> 5 (0) -> 7 (2) ; root -> 6 (1) -> 7 (3); node 4 does not exist
    trees = Trees(
        tokens_BN=torch.tensor([[5, 6, 7, 7, 8]]),
        parents_BN=torch.tensor([[-1, -1, 0, 1, 3]]),
        depths_BN=torch.tensor([[1, 1, 2, 2, 3]]),
        scores_BN=torch.tensor([[-1.0, -2.0, -3.0, -4.0, -torch.inf]]).double(),
    )
    assert walk(trees, torch.tensor([[6, 0, 7, 0, 8, 0]]), num_slots=3).tolist() == [[1, 3, ABSENT]]
    assert walk(trees, torch.tensor([[5, 8, 7, 7, 8, 0]]), num_slots=3).tolist() == [[0, ABSENT, ABSENT]]
    assert walk(trees, torch.tensor([[-1, 7, 7, 7, 8, 0]]), num_slots=3).tolist() == [[ABSENT, ABSENT, ABSENT]]
    alone = root_only(1, device=torch.device("cpu"))
    assert walk(alone, torch.tensor([[6]]), num_slots=3).tolist() == [[ABSENT, ABSENT, ABSENT]]
