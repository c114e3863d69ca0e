"""Replay: every round of a response recomputed from the drafter alone, without the verifier.

The committed text is the verifier's own, whatever was drafted, under greedy verification and where it samples and
matches. So with the hidden states of a response at hand, what each round would have accepted follows from one
teacher-forced pass over all anchors, and the rounds are a walk through it. A tree accepts a slot if the label prefix is
among its nodes, and the first b nodes of a larger tree are the tree of budget b, so one pass serves every budget.
Under rejection sampling the rounds depend on chance even when the text is given; their expectation does not.
Knows no file and no verifier.

A anchors, S slots, K candidates per slot, T tokens of a row, P tokens of several rows, H hidden, V vocabulary,
U draft vocabulary
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from dflash.decoding.acceptance import CHAIN, Acceptance, Expected, anchors, method_name, walk_rounds
from dflash.decoding.ddtree import accepted_within, best_first, chain, label_order, top_tokens
from dflash.decoding.responses import RECALL_AT
from dflash.decoding.sampling import expected_rounds, kept
from dflash.drafter.blocks import Documents
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import RowStates

ANCHORS_PER_PASS = 256
TOKENS_PER_PASS = 4096
LOGITS_PER_PASS = 2**26  # 256 MB of float32


@dataclass(frozen=True)
class Replayed:
    """What became of one response of `num_tokens`, by method (chain, tree16, …).

    `accepted` has the accepted count of each round, `expected` the drafter's own expectation of it, cut by nothing: the
    sum of the probabilities of the round's nodes. `accepted_at` has the accepted count of a round from each token but
    the last. `recall_hits` counts, for each K of RECALL_AT, the slots whose label is among the drafter's K most
    probable tokens, of `recall_slots` slots within the response. `rejection` is None where it was not asked for.
    """

    num_tokens: int
    accepted: dict[str, list[int]]
    expected: dict[str, list[float]]
    accepted_at: dict[str, list[int]]
    recall_hits: tuple[int, ...]
    recall_slots: int
    rejection: Expected | None = None


class NotNumbers(ValueError):
    """The drafter's logits after a token of a row are not numbers; `place` says where."""

    def __init__(self, name: str, token: int) -> None:
        self.place = f"{name}: the drafter's logits after token {token} are not numbers"
        super().__init__(
            f"replay: {self.place}; train the drafter again, or look for damage in the hidden states with dflash verify"
        )


def response_spans(loss_mask_T: Tensor) -> list[tuple[int, int]]:
    """[first, end) of every contiguous run of supervised tokens, in their order: the responses of a row."""
    edges_T = torch.nn.functional.pad(loss_mask_T.bool().int(), (1, 1)).diff()
    firsts, ends = ((edges_T == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
    assert firsts, "a row without supervised tokens is dropped when it is tokenized"
    return list(zip(firsts, ends, strict=True))


def response_span(loss_mask_T: Tensor) -> tuple[int, int]:
    """The last of them: the response that is replayed where not all are."""
    return response_spans(loss_mask_T)[-1]


def best_tokens(ends: Ends, hidden_ASH: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """The drafter's k best tokens of each slot: float32 log-probabilities (A, S, k) and ids."""
    parts = [
        top_tokens(ends.draft_logits(part_NH).float().log_softmax(-1), k)
        for part_NH in hidden_ASH.flatten(0, 1).split(max(1, LOGITS_PER_PASS // ends.draft_vocab_size))
    ]
    values_NK, places_NK = (torch.cat(part) for part in zip(*parts, strict=True))
    shape = hidden_ASH.shape[:2]
    return values_NK.unflatten(0, shape), ends.ids(places_NK).unflatten(0, shape)


def log_draft_probabilities(ends: Ends, hidden: Tensor, ids: Tensor, *, temperature: float) -> Tensor:
    """As `log_probabilities`, of the drafter; -inf for tokens that it cannot propose."""
    places = ends.places(ids)
    found = log_probabilities(ends, hidden, places.clamp(min=0), temperature=temperature, logits=ends.draft_logits)
    return found.masked_fill(places < 0, -torch.inf)


def log_probabilities(
    ends: Ends, hidden: Tensor, ids: Tensor, *, temperature: float, logits: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Of one token each, `ids` (…), under the logits of `hidden` (…, H) at a temperature; float64.

    The verifier's, or other `logits` of the same hidden states, with ids of their own.
    """
    parts = [
        ((logits or ends.logits)(part_NH).double() / temperature).log_softmax(-1).gather(-1, ids_N[:, None])[:, 0]
        for part_NH, ids_N in zip(
            *(x.split(max(1, LOGITS_PER_PASS // ends.vocab_size)) for x in (hidden.flatten(0, -2), ids.flatten())),
            strict=True,
        )
    ]
    return torch.cat(parts).view(ids.shape)


def replay_responses(
    drafter: Drafter,
    ends: Ends,
    rows: Iterable[RowStates],
    *,
    budgets: Sequence[int],
    temperature: float = 0.0,
    names: Iterable[str] | None = None,
    every: bool = False,
) -> Iterator[Replayed]:
    """Replay rows, in their order; as many at a time as make a pass of TOKENS_PER_PASS.

    Rounds are those of `acceptance.walk_rounds`; the response is `response_span`, its last token the end, or with
    `every` each of `response_spans`, after all that came before it. A response of one token has no rounds. Above
    temperature 0, `rejection` is what rejection sampling expects: of responses that were drawn at that temperature, and
    whose final states are stored.

    Raises NotNumbers naming the row where the drafter's logits are none, ValueError where final states are missing.
    """
    group: list[_Response] = []
    num_tokens = 0
    for name, row in zip(names or map("row {}".format, count()), rows, strict=False):
        spans = response_spans(row.loss_mask_T) if every else [response_span(row.loss_mask_T)]
        for response in (_Response(name, row, *span) for span in spans):
            num_tokens += response.end
            if group and num_tokens > TOKENS_PER_PASS:
                yield from _replay_together(drafter, ends, group, budgets=budgets, temperature=temperature)
                group, num_tokens = [], response.end
            group.append(response)
    if group:
        yield from _replay_together(drafter, ends, group, budgets=budgets, temperature=temperature)


def replay(drafter: Drafter, ends: Ends, row: RowStates, *, budgets: Sequence[int]) -> dict[str, list[int]]:
    """The accepted count of each round of a row's response, for the chain and the tree of each budget."""
    [replayed] = replay_responses(drafter, ends, [row], budgets=budgets)
    return replayed.accepted


def replay_rows(
    drafter: Drafter,
    ends: Ends,
    rows: Iterable[RowStates],
    *,
    budgets: Sequence[int],
    names: Iterable[str] | None = None,
) -> dict[str, Acceptance]:
    """Replay of all responses of many rows, summed: the acceptance of each method, for validation."""
    totals = {method: Acceptance() for method in (CHAIN, *map(method_name, budgets))}
    for response in replay_responses(drafter, ends, rows, budgets=budgets, names=names, every=True):
        for method, accepted in response.accepted.items():
            totals[method] += Acceptance.of_response(
                accepted, num_tokens=response.num_tokens, num_slots=drafter.config.block_size - 1
            )
    return totals


@dataclass(frozen=True)
class _Response:
    """A row, and the tokens [first, end) of it that are replayed."""

    name: str
    row: RowStates
    first: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.first

    def blocks(self, num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each anchor, its id, and the labels (A, S) of its slots with those that live: within the response."""
        ids_T = self.row.input_ids_T[: self.end].long()
        anchors_A = torch.arange(self.first, self.end - 1)
        at_AS = anchors_A[:, None] + torch.arange(1, num_slots + 1)
        return anchors_A, ids_T[anchors_A], ids_T[at_AS.clamp(max=self.end - 1)], at_AS < self.end


@torch.no_grad()
def _replay_together(
    drafter: Drafter, ends: Ends, group: Sequence[_Response], *, budgets: Sequence[int], temperature: float
) -> Iterator[Replayed]:
    device, num_slots = drafter.fc.weight.device, drafter.config.block_size - 1
    features_PF = torch.cat([one.row.features_TF[: one.end - 1].to(device) for one in group])
    documents = Documents(tuple(one.end - 1 for one in group))
    context = drafter.context(features_PF, documents)
    sizes = [one.num_tokens - 1 for one in group]
    number_A = torch.arange(len(group)).repeat_interleave(torch.tensor(sizes))
    offset_A = torch.tensor(documents.offsets)[number_A].to(device)
    anchors_A, ids_A, labels_AS, live_AS = (
        torch.cat(part).to(device) for part in zip(*(one.blocks(num_slots) for one in group), strict=True)
    )

    methods = (CHAIN, *map(method_name, budgets))
    counts, masses, log_q = [], [], []
    for part in torch.arange(len(anchors_A), device=device).split(ANCHORS_PER_PASS):
        hidden_ASH = drafter.draft(ends, ids_A[part], anchors_A=(offset_A + anchors_A)[part], context=context)
        k = min(max([*budgets, RECALL_AT[-1]]), ends.draft_vocab_size)
        values_ASK, candidates_ASK = best_tokens(ends, hidden_ASH, k=k)
        for bad in part[values_ASK[..., 0].isnan().any(-1)][:1].tolist():
            raise NotNumbers(group[int(number_A[bad])].name, int(anchors_A[bad]))
        order_AS = label_order(chain(values_ASK, candidates_ASK), labels_AS[part], live_AS[part])
        accepted = [accepted_within(order_AS, num_slots)]
        expected = [values_ASK[..., 0].double().cumsum(-1).exp().sum(-1)]
        if budgets:
            trees = best_first(values_ASK, candidates_ASK, budget=max(budgets))
            order_AS = label_order(trees, labels_AS[part], live_AS[part])
            mass_AN = trees.scores_BN.double().exp().cumsum(-1)
            accepted += [accepted_within(order_AS, budget) for budget in budgets]
            expected += [mass_AN[:, min(budget, mass_AN.shape[1]) - 1] for budget in budgets]
        found_ASK = (candidates_ASK[..., : RECALL_AT[-1]] == labels_AS[part][..., None]) & live_AS[part][..., None]
        rank_AS = found_ASK.byte().argmax(-1).where(found_ASK.any(-1), RECALL_AT[-1])
        hits = [(rank_AS < best).sum(-1) for best in RECALL_AT]
        counts.append(torch.stack([*accepted, *hits], dim=-1))
        masses.append(torch.stack(expected, dim=-1))
        if temperature > 0:
            log_q.append(log_draft_probabilities(ends, hidden_ASH, labels_AS[part], temperature=temperature))

    each = [torch.cat(parts).cpu().split(sizes) for parts in (counts, masses, [live_AS], log_q) if parts]
    for one, counts_AX, masses_AM, own_live_AS, *own_log_q in zip(group, *each, strict=True):
        accepted_at = dict(zip(methods, counts_AX[:, : len(methods)].T.tolist(), strict=True))
        rounds = {m: walk_rounds(at, num_tokens=one.num_tokens) for m, at in accepted_at.items()}
        starts = {m: anchors(accepted, num_tokens=one.num_tokens) for m, accepted in rounds.items()}
        yield Replayed(
            num_tokens=one.num_tokens,
            accepted=rounds,
            expected={m: masses_AM[starts[m], number].tolist() for number, m in enumerate(methods)},
            accepted_at=accepted_at,
            recall_hits=tuple(counts_AX[:, len(methods) :].sum(0).tolist()),
            recall_slots=int(own_live_AS.sum()),
            rejection=_rejection(one, ends, own_log_q[0], own_live_AS, temperature=temperature) if own_log_q else None,
        )


def _rejection(one: _Response, ends: Ends, log_q_AS: Tensor, live_AS: Tensor, *, temperature: float) -> Expected:
    if one.row.final_TH is None:
        raise ValueError(
            f"replay: {one.name} has no final states, from which rejection sampling is replayed; extract the hidden "
            "states again with extraction.store_final"
        )
    device = ends.embedding_VH.device
    final_AH = one.row.final_TH[one.first : one.end - 1].to(device)  # each gives the distribution of the next token
    next_A = one.row.input_ids_T[one.first + 1 : one.end].long().to(device)
    log_p_A = log_probabilities(ends, final_AH, next_A, temperature=temperature).cpu()
    num_anchors, num_slots = log_q_AS.shape
    at_AS = torch.arange(num_anchors)[:, None] + torch.arange(num_slots)
    log_p_AS = log_p_A[at_AS.clamp(max=num_anchors - 1)]
    return expected_rounds(kept(log_p_AS, log_q_AS) * live_AS)
