"""Replay: every round of a response recomputed from the drafter alone, without the verifier.

Under greedy verification the committed text is the verifier's own, whatever was drafted. So with the hidden states of
a response at hand, what each round would have accepted follows from one teacher-forced pass over all anchors, and the
rounds are a walk through it. A tree accepts a slot if the label prefix is among its nodes, and the first b nodes of a
larger tree are the tree of budget b, so one pass serves every budget. Knows no file and no verifier.

A anchors, S slots, K candidates per slot, T tokens, H hidden, V vocabulary, N = A * S
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dflash.decoding.acceptance import CHAIN, Acceptance, method_name, walk_rounds
from dflash.decoding.ddtree import accepted_within, best_first, chain, label_order, top_tokens
from dflash.drafter.model import Context, Drafter, Ends
from dflash.hidden.store import RowStates

ANCHORS_PER_PASS = 128
LOGITS_PER_PASS = 2**26  # 256 MB of float32


def response_span(loss_mask_T: Tensor) -> tuple[int, int]:
    """[first, end) of the last contiguous run of supervised tokens: the response that is replayed."""
    supervised = loss_mask_T.bool().tolist()
    assert any(supervised), "a row without supervised tokens is dropped when it is tokenized"
    end = len(supervised) - supervised[::-1].index(True)
    first = end - [*supervised[:end][::-1], False].index(False)
    return first, end


def draft_tokens(
    drafter: Drafter, ends: Ends, anchor_ids_A: Tensor, *, anchors_A: Tensor, context: Context, k: int
) -> tuple[Tensor, Tensor]:
    """The drafter's k best tokens of each slot after each anchor: float32 log-probabilities (A, S, k) and ids."""
    hidden_ASH = drafter.draft(ends, anchor_ids_A, anchors_A=anchors_A, context=context)
    hidden_NH = hidden_ASH.flatten(0, 1)
    parts = [
        top_tokens(ends.logits(part_NH).float().log_softmax(-1), k)
        for part_NH in hidden_NH.split(max(1, LOGITS_PER_PASS // ends.vocab_size))
    ]
    values_NK, ids_NK = (torch.cat(part) for part in zip(*parts, strict=True))
    return values_NK.unflatten(0, hidden_ASH.shape[:2]), ids_NK.unflatten(0, hidden_ASH.shape[:2])


@torch.no_grad()
def replay(drafter: Drafter, ends: Ends, row: RowStates, *, budgets: Sequence[int]) -> dict[str, list[int]]:
    """The accepted count of each round of a row's response, for the chain and the tree of each budget.

    Rounds are those of `acceptance.walk_rounds`; the response is `response_span`, its last token the end. A response of
    one token has no rounds.
    """
    device = drafter.fc.weight.device
    first, end = response_span(row.loss_mask_T)
    ids_T = row.input_ids_T[:end].to(device, torch.int64)
    context = drafter.context(row.features_TF[: end - 1].to(device))
    slots_S = torch.arange(1, drafter.config.block_size, device=device)
    accepted_at: dict[str, list[int]] = {method: [] for method in (CHAIN, *map(method_name, budgets))}
    for start in range(first, end - 1, ANCHORS_PER_PASS):
        anchors_A = torch.arange(start, min(start + ANCHORS_PER_PASS, end - 1), device=device)
        values_ASK, candidates_ASK = draft_tokens(
            drafter,
            ends,
            ids_T[anchors_A],
            anchors_A=anchors_A,
            context=context,
            k=min(max(budgets, default=1), ends.vocab_size),
        )
        labels_AS = anchors_A[:, None] + slots_S
        live_AS = labels_AS < end
        labels_AS = ids_T[labels_AS.clamp(max=end - 1)]
        order_AS = label_order(chain(values_ASK, candidates_ASK), labels_AS, live_AS)
        accepted_at[CHAIN] += accepted_within(order_AS, len(slots_S)).tolist()
        if budgets:
            trees = best_first(values_ASK, candidates_ASK, budget=max(budgets))
            order_AS = label_order(trees, labels_AS, live_AS)
            for budget in budgets:
                accepted_at[method_name(budget)] += accepted_within(order_AS, budget).tolist()
    return {method: walk_rounds(accepted, num_tokens=end - first) for method, accepted in accepted_at.items()}


def replay_rows(
    drafter: Drafter, ends: Ends, rows: Iterable[RowStates], *, budgets: Sequence[int]
) -> dict[str, Acceptance]:
    """Replay of many rows, summed: the acceptance of each method, for validation."""
    totals = {method: Acceptance() for method in (CHAIN, *map(method_name, budgets))}
    for row in rows:
        first, end = response_span(row.loss_mask_T)
        for method, accepted in replay(drafter, ends, row, budgets=budgets).items():
            totals[method] += Acceptance.of_response(
                accepted, num_tokens=end - first, num_slots=drafter.config.block_size - 1
            )
    return totals
