"""Sums and counts of rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.decoding.acceptance import CHAIN, Acceptance, anchors, cut, method_name, num_nodes, walk_rounds

NUM_SLOTS = 4
responses = st.lists(st.integers(0, NUM_SLOTS), min_size=1, max_size=40)  # what a round from each token would accept


def acceptance(accepted_at: list[int]) -> Acceptance:
    rounds = walk_rounds(accepted_at, num_tokens=len(accepted_at))
    return Acceptance.of_response(rounds, num_tokens=len(accepted_at), num_slots=NUM_SLOTS)


def test_rounds_start_after_the_first_token_and_end_with_the_last() -> None:
    assert walk_rounds([2, 9, 9, 0, 1, 9, 9], num_tokens=7) == [2, 0, 1]  # anchors 0, 3, 4, and 6 is the last
    assert walk_rounds([3], num_tokens=1) == []


def test_a_round_is_cut_at_the_end_of_the_response() -> None:
    assert cut(2, remaining=5) == (2, 3)
    assert cut(2, remaining=3) == (2, 3)  # the bonus token is the last
    assert cut(2, remaining=2) == (2, 2)  # the accepted tokens reach the end: no bonus
    assert cut(4, remaining=2) == (2, 2)  # accepted beyond the end is not counted
    assert walk_rounds([0, 4, 4, 4], num_tokens=4) == [0, 2]


@given(responses)
def test_every_token_but_the_first_is_accepted_or_a_bonus(accepted_at: list[int]) -> None:
    rounds = walk_rounds(accepted_at, num_tokens=len(accepted_at))
    last_has_bonus = sum(rounds) + len(rounds) == len(accepted_at) - 1
    assert last_has_bonus or sum(rounds) + len(rounds) == len(accepted_at)
    assert all(0 <= accepted <= NUM_SLOTS for accepted in rounds)


@given(responses)
def test_anchors_are_where_the_walk_was(accepted_at: list[int]) -> None:
    rounds = walk_rounds(accepted_at, num_tokens=len(accepted_at))
    starts = anchors(rounds, num_tokens=len(accepted_at))
    assert len(starts) == len(rounds)
    for start, accepted in zip(starts, rounds, strict=True):
        assert accepted == min(accepted_at[start], len(accepted_at) - 1 - start)


def test_a_round_has_as_many_nodes_verified_as_its_method_drafts() -> None:
    assert num_nodes(CHAIN, num_slots=15) == 15
    assert num_nodes(method_name(64), num_slots=15) == 64


@given(responses)
def test_the_acceptance_length_lies_between_one_and_the_block_size(accepted_at: list[int]) -> None:
    total = acceptance(accepted_at)
    if len(accepted_at) == 1:
        assert total.acceptance_length is None
        assert total.per_response_mean is None
    else:
        assert total.acceptance_length is not None
        assert 1 <= total.acceptance_length <= NUM_SLOTS + 1
        assert total.per_response_mean == total.acceptance_length


@given(responses, responses)
def test_a_sum_counts_rounds_not_averages(first: list[int], second: list[int]) -> None:
    a, b = acceptance(first), acceptance(second)
    total = a + b + Acceptance()
    assert (total.rounds, total.accepted, total.tokens) == (
        a.rounds + b.rounds,
        a.accepted + b.accepted,
        a.tokens + b.tokens,
    )
    assert total.responses == 2
    if total.rounds:
        assert total.acceptance_length == 1 + (a.accepted + b.accepted) / (a.rounds + b.rounds)
    lengths = [x.acceptance_length for x in (a, b) if x.acceptance_length is not None]
    assert total.per_response_mean == (pytest.approx(sum(lengths) / len(lengths)) if lengths else None)


def test_conditional_acceptance_leaves_out_what_lies_beyond_the_end() -> None:
    # six tokens: accepts 1 of 4 slots, then 2 of the 3 that are left, then nothing is left
    total = Acceptance.of_response([1, 2], num_tokens=6, num_slots=4)
    assert total.histogram == (0, 1, 1, 0, 0)
    assert total.measured == (2, 2, 1, 0)
    assert total.conditional_acceptance == (1.0, 0.5, 0.0, None)
    # the last round reaches the end: slot 3 does not exist and was not rejected
    assert Acceptance.of_response([2], num_tokens=3, num_slots=4).conditional_acceptance == (1.0, 1.0, None, None)
