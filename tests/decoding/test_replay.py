"""Replay against its definition: draft round by round from a growing context."""

import copy

import pytest
import torch
from decoding_small import make_drafter, make_ends, make_prompts, make_row, make_verifier, teach
from evaluated_small import recall_hits

from dflash.decoding import replay as replay_module
from dflash.decoding.acceptance import Acceptance
from dflash.decoding.ddtree import Trees, best_first, chain
from dflash.decoding.replay import (
    best_tokens,
    replay,
    replay_responses,
    replay_rows,
    response_span,
    response_spans,
)
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import RowStates

BUDGETS = (1, 2, 8, 64)


@pytest.fixture(scope="module")
def taught() -> tuple[Drafter, Ends, list[RowStates]]:
    verifier = make_verifier(seed=2)
    prompts = make_prompts(24, seed=2)
    rows = [
        make_row(verifier, prompt, response.ids)
        for prompt, response in zip(prompts, verifier.generate(prompts, max_new_tokens=40), strict=True)
    ]
    drafter, ends = make_drafter(verifier), make_ends(verifier)
    teach(drafter, ends, [row for row in rows if len(row.input_ids_T) > 30], steps=60)
    return drafter, ends, rows


@torch.no_grad()
def tree_at(drafter: Drafter, ends: Ends, row: RowStates, anchor: int, *, budget: int | None) -> Trees:
    """The chain (no budget) or the tree of a round from that token, drafted from the context before it."""
    context = drafter.context(row.features_TF[:anchor])
    ids_A, anchors_A = row.input_ids_T[anchor : anchor + 1], torch.tensor([anchor])
    candidates = best_tokens(ends, drafter.draft(ends, ids_A, anchors_A=anchors_A, context=context), k=ends.vocab_size)
    return chain(*candidates) if budget is None else best_first(*candidates, budget=budget)


def rounds_one_by_one(
    drafter: Drafter, ends: Ends, row: RowStates, *, budget: int | None
) -> tuple[list[int], list[float]]:
    """What each round accepts, by walking the nodes of its own tree, and the sum of their probabilities."""
    anchor, end = response_span(row.loss_mask_T)
    rounds, expected = [], []
    while anchor < end - 1:
        trees = tree_at(drafter, ends, row, anchor, budget=budget)
        tokens, parents = trees.tokens_BN[0].tolist(), trees.parents_BN[0].tolist()
        at, accepted = -1, 0
        for label in row.input_ids_T[anchor + 1 : end].tolist():
            found = [n for n in range(len(tokens)) if parents[n] == at and tokens[n] == label]
            if not found:
                break
            at, accepted = found[0], accepted + 1
        rounds.append(accepted)
        expected.append(float(trees.scores_BN.exp().sum()))
        anchor += accepted + 1
    return rounds, expected


def test_one_pass_gives_the_rounds_of_drafting_one_by_one(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    seen: set[int] = set()
    replays = replay_responses(drafter, ends, rows[:12], budgets=BUDGETS)
    for row, replayed in zip(rows[:12], replays, strict=True):
        for method, budget in (("chain", None), *((f"tree{budget}", budget) for budget in BUDGETS)):
            rounds, expected = rounds_one_by_one(drafter, ends, row, budget=budget)
            assert replayed.accepted[method] == rounds
            assert replayed.expected[method] == pytest.approx(expected, rel=1e-4)
            seen |= set(rounds)
    assert seen >= {0, 1, 2, 3}, "the drafter must be partly right for this test to say anything"


def test_accepted_at_is_what_a_round_from_each_token_accepts(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    row = next(row for row in rows if len(row.input_ids_T) > 40)
    first, end = response_span(row.loss_mask_T)
    [replayed] = replay_responses(drafter, ends, [row], budgets=[8])
    assert replayed.num_tokens == end - first
    for number, anchor in enumerate(range(first, end - 1)):
        drafted = tree_at(drafter, ends, row, anchor, budget=None).tokens_BN[0].tolist()
        same = [a == b for a, b in zip(drafted, row.input_ids_T[anchor + 1 : end].tolist(), strict=False)]
        assert replayed.accepted_at["chain"][number] == [*same, False].index(False)
    assert len(replayed.accepted_at["tree8"]) == end - first - 1


@torch.no_grad()
def test_recall_counts_the_labels_among_the_best_of_their_slots(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    row = next(row for row in rows if len(row.input_ids_T) > 40)
    first, end = response_span(row.loss_mask_T)
    ranks = []
    for anchor in range(first, end - 1):
        context = drafter.context(row.features_TF[:anchor])
        ids_A, anchors_A = row.input_ids_T[anchor : anchor + 1], torch.tensor([anchor])
        logits_SV = ends.logits(drafter.draft(ends, ids_A, anchors_A=anchors_A, context=context)[0])
        for logits_V, label in zip(logits_SV, row.input_ids_T[anchor + 1 : end].tolist(), strict=False):
            ranks.append(int((logits_V > logits_V[label]).sum()))
    [replayed] = replay_responses(drafter, ends, [row], budgets=[8])
    assert replayed.recall_slots == len(ranks)
    assert replayed.recall_hits == recall_hits(ranks)
    assert 0 < replayed.recall_hits[0] < replayed.recall_hits[-1] == len(ranks)  # 64 are more than there are tokens


def test_rows_replayed_together_are_as_each_row_alone(
    taught: tuple[Drafter, Ends, list[RowStates]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, ends, rows = taught
    alone = [one for row in rows for one in replay_responses(drafter, ends, [row], budgets=BUDGETS, temperature=0.5)]
    for tokens in (4096, 100, 1):
        monkeypatch.setattr(replay_module, "TOKENS_PER_PASS", tokens)
        together = list(replay_responses(drafter, ends, rows, budgets=BUDGETS, temperature=0.5))
        for one, other in zip(together, alone, strict=True):
            assert (one.accepted, one.accepted_at, one.recall_hits) == (
                other.accepted,
                other.accepted_at,
                other.recall_hits,
            )
            for method in one.expected:
                assert one.expected[method] == pytest.approx(other.expected[method], rel=1e-4)
            assert one.rejection == pytest.approx(other.rejection, rel=1e-4)


def test_logits_that_are_not_numbers_are_an_error_that_names_row_and_token(
    taught: tuple[Drafter, Ends, list[RowStates]],
) -> None:
    drafter, ends, rows = taught
    row, token = next(
        (row, token)
        for row in rows
        for token in range(response_span(row.loss_mask_T)[0] + 3, len(row.input_ids_T) - 1)
        if row.input_ids_T[token] not in row.input_ids_T[:token]
    )
    broken = copy.copy(ends)
    broken.embedding_VH = ends.embedding_VH.clone()
    broken.embedding_VH[row.input_ids_T[token]] = torch.nan
    sound = [other for other in rows if row.input_ids_T[token] not in other.input_ids_T][:2]
    message = f"after token {token} are not numbers; .*dflash verify$"
    with pytest.raises(ValueError, match="^replay: row 2: .*" + message):
        list(replay_responses(drafter, broken, [*sound, row], budgets=[8]))
    with pytest.raises(ValueError, match="^replay: that one: .*" + message):
        list(replay_responses(drafter, broken, [sound[0], row], budgets=[], names=["this one", "that one"]))


def test_rejection_is_replayed_from_final_states(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    [replayed] = replay_responses(drafter, ends, rows[:1], budgets=[])
    assert replayed.rejection is None
    with pytest.raises(ValueError, match=r"row 0 has no final states.*extraction.store_final"):
        list(replay_responses(drafter, ends, [rows[0]._replace(final_TH=None)], budgets=[], temperature=1.0))


def test_anchors_in_chunks_change_nothing(
    taught: tuple[Drafter, Ends, list[RowStates]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, ends, rows = taught
    whole = [replay(drafter, ends, row, budgets=BUDGETS) for row in rows[:6]]
    monkeypatch.setattr(replay_module, "ANCHORS_PER_PASS", 5)
    monkeypatch.setattr(replay_module, "LOGITS_PER_PASS", 3 * ends.vocab_size)
    assert [replay(drafter, ends, row, budgets=BUDGETS) for row in rows[:6]] == whole


def test_each_budget_replayed_alone_accepts_the_same(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    for row in rows[:6]:
        together = replay(drafter, ends, row, budgets=BUDGETS)
        for budget in BUDGETS:
            alone = replay(drafter, ends, row, budgets=[budget])
            assert alone == {"chain": together["chain"], f"tree{budget}": together[f"tree{budget}"]}
        assert replay(drafter, ends, row, budgets=[]) == {"chain": together["chain"]}


def test_many_rows_are_summed(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    totals = replay_rows(drafter, ends, rows[:8], budgets=[8])
    for method, total in totals.items():
        lists = [replay(drafter, ends, row, budgets=[8])[method] for row in rows[:8]]
        assert (total.rounds, total.accepted) == (sum(map(len, lists)), sum(map(sum, lists)))
        assert (total.responses, total.tokens) == (8, sum(int(row.loss_mask_T.sum()) for row in rows[:8]))
    assert replay_rows(drafter, ends, [], budgets=[8])["tree8"] == Acceptance()


def test_the_end_of_the_response_hides_what_follows(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    row = next(row for row in rows if len(row.input_ids_T) > 40)
    shorter = RowStates(row.features_TF[:30], row.input_ids_T[:30], row.loss_mask_T[:30], row.greedy_ids_T[:30])
    mask_T = row.loss_mask_T & (torch.arange(len(row.loss_mask_T)) < 30)
    masked = RowStates(row.features_TF, row.input_ids_T, mask_T, row.greedy_ids_T)
    assert replay(drafter, ends, masked, budgets=BUDGETS) == replay(drafter, ends, shorter, budgets=BUDGETS)


def test_a_response_of_one_token_has_no_rounds(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    row = next(row for row in rows if row.loss_mask_T.sum() == 1)
    assert replay(drafter, ends, row, budgets=[8]) == {"chain": [], "tree8": []}
    assert replay_rows(drafter, ends, [row], budgets=[8])["chain"].acceptance_length is None


def test_all_responses_of_a_row_are_summed_each_with_what_came_before_it(
    taught: tuple[Drafter, Ends, list[RowStates]],
) -> None:
    drafter, ends, rows = taught
    row = next(row for row in rows if len(row.input_ids_T) > 40)
    first, end = response_span(row.loss_mask_T)
    at_T = torch.arange(len(row.loss_mask_T))
    masks = [row.loss_mask_T & (at_T < first + 12), row.loss_mask_T & (at_T >= first + 15)]
    both = row._replace(loss_mask_T=masks[0] | masks[1])
    assert response_spans(both.loss_mask_T) == [(first, first + 12), (first + 15, end)]
    alone = [replay(drafter, ends, row._replace(loss_mask_T=mask_T), budgets=[8]) for mask_T in masks]
    for method, total in replay_rows(drafter, ends, [both], budgets=[8]).items():
        lists = [rounds[method] for rounds in alone]
        assert all(lists)
        assert (total.responses, total.tokens) == (2, int(both.loss_mask_T.sum()))
        assert (total.rounds, total.accepted) == (sum(map(len, lists)), sum(map(sum, lists)))


def test_the_response_is_the_last_supervised_run() -> None:
    assert response_spans(torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0])) == [(1, 3), (5, 8)]
    assert response_span(torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0])) == (5, 8)
    assert response_span(torch.tensor([1, 1])) == (0, 2)
    assert response_span(torch.tensor([0, 0, 1])) == (2, 3)
