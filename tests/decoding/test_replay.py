"""Replay against its definition: draft round by round from a growing context."""

import pytest
import torch
from decoding_small import make_drafter, make_ends, make_prompts, make_row, make_verifier, teach

from dflash.decoding import replay as replay_module
from dflash.decoding.acceptance import Acceptance
from dflash.decoding.ddtree import best_first, chain
from dflash.decoding.replay import best_tokens, replay, replay_rows, response_span
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
def rounds_one_by_one(drafter: Drafter, ends: Ends, row: RowStates, *, budget: int | None) -> list[int]:
    """The chain's (no budget) or a tree's, by walking the nodes of each round's own tree."""
    anchor, end = response_span(row.loss_mask_T)
    rounds = []
    while anchor < end - 1:
        context = drafter.context(row.features_TF[:anchor])
        ids_A, anchors_A = row.input_ids_T[anchor : anchor + 1], torch.tensor([anchor])
        hidden_ASH = drafter.draft(ends, ids_A, anchors_A=anchors_A, context=context)
        candidates = best_tokens(ends, hidden_ASH, k=ends.vocab_size)
        trees = chain(*candidates) if budget is None else best_first(*candidates, budget=budget)
        tokens, parents = trees.tokens_BN[0].tolist(), trees.parents_BN[0].tolist()
        at, accepted = -1, 0
        for label in row.input_ids_T[anchor + 1 : end].tolist():
            found = [n for n in range(len(tokens)) if parents[n] == at and tokens[n] == label]
            if not found:
                break
            at, accepted = found[0], accepted + 1
        rounds.append(accepted)
        anchor += accepted + 1
    return rounds


def test_one_pass_gives_the_rounds_of_drafting_one_by_one(taught: tuple[Drafter, Ends, list[RowStates]]) -> None:
    drafter, ends, rows = taught
    seen: set[int] = set()
    for row in rows[:12]:
        rounds = replay(drafter, ends, row, budgets=BUDGETS)
        assert rounds["chain"] == rounds_one_by_one(drafter, ends, row, budget=None)
        for budget in BUDGETS:
            assert rounds[f"tree{budget}"] == rounds_one_by_one(drafter, ends, row, budget=budget)
        seen |= {accepted for counts in rounds.values() for accepted in counts}
    assert seen >= {0, 1, 2, 3}, "the drafter must be partly right for this test to say anything"


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


def test_the_response_is_the_last_supervised_run() -> None:
    assert response_span(torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0])) == (5, 8)
    assert response_span(torch.tensor([1, 1])) == (0, 2)
    assert response_span(torch.tensor([0, 0, 1])) == (2, 3)
