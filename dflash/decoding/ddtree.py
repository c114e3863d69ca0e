"""Draft trees. Arrays in, arrays out: nothing here knows a model, a tokenizer or a file.

One pass of the drafter gives a distribution per slot. The tree of budget N is the set of the N most probable prefixes,
a prefix's probability being the product of its tokens' (DDTree, arXiv 2604.12989): the set of that size with the
largest expected accepted length under the drafter. The root (the anchor) is not a node.

B blocks, S slots, V vocabulary, K candidates per slot, N nodes, M = N + 1 the root and the nodes
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

ABSENT = torch.iinfo(torch.int64).max
"""The order of a prefix that is not in the tree: beyond every budget."""


@dataclass(frozen=True)
class Trees:
    """One tree per block, nodes best first; a parent precedes its children, so the first b nodes are a tree as well.

    `parents_BN` holds the node's number within the block, -1 for the root. `depths_BN` is the slot, 1..S.
    `scores_BN` is the prefix's log-probability, summed from the root; -inf marks the end of a tree with fewer than N
    nodes, where the other arrays mean nothing.
    """

    tokens_BN: Tensor  # noqa: N815
    parents_BN: Tensor  # noqa: N815
    depths_BN: Tensor  # noqa: N815
    scores_BN: Tensor  # noqa: N815


def top_tokens(logprobs_BSV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best tokens of each slot: values (B, S, k) descending and their ids, equal values by the lowest id."""
    num_tokens = logprobs_BSV.shape[-1]
    more_BSK, ids_BSK = logprobs_BSV.topk(min(k + 1, num_tokens), dim=-1)
    values_BSK, ids_BSK = more_BSK[..., :k], ids_BSK[..., :k].contiguous()
    # topk picks and orders freely among equal values: mend the slots where it took some
    equal_BSK = more_BSK[..., 1:] == more_BSK[..., :-1]
    tied_BS, torn_BS = equal_BSK.any(-1), equal_BSK[..., k - 1 :].any(-1)
    if tied_BS.any():
        ids_RK, by_id = ids_BSK[tied_BS].sort(dim=-1)
        by_value = values_BSK[tied_BS].gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices
        ids_BSK[tied_BS] = ids_RK.gather(-1, by_value)
    if torn_BS.any():  # some that equal the last one taken were left out: take the lowest ids of all of them
        last_R1 = values_BSK[torn_BS][..., -1:]
        backwards_V = torch.arange(num_tokens, 0, -1, device=ids_BSK.device)
        lowest_RK = backwards_V.where(logprobs_BSV[torn_BS] == last_R1, 0).topk(k, dim=-1).indices
        above_R1 = (values_BSK[torn_BS] > last_R1).sum(-1, keepdim=True)
        place_RK = torch.arange(k, device=ids_BSK.device) - above_R1
        ids_BSK[torn_BS] = lowest_RK.gather(-1, place_RK.clamp(min=0)).where(place_RK >= 0, ids_BSK[torn_BS])
    return values_BSK, ids_BSK


def root_only(num_blocks: int, *, device: torch.device) -> Trees:
    """Trees without a node: the verifier decodes alone."""
    none = torch.zeros(num_blocks, 0, dtype=torch.int64, device=device)
    return Trees(none, none, none, none.float())


def chain(values_BSK: Tensor, ids_BSK: Tensor) -> Trees:
    """The best token of each slot, one below the other: plain DFlash (arXiv 2602.06036)."""
    num_blocks, num_slots = ids_BSK.shape[:2]
    steps_BN = torch.arange(num_slots, device=ids_BSK.device).expand(num_blocks, -1)
    return Trees(ids_BSK[..., 0], steps_BN - 1, steps_BN + 1, values_BSK[..., 0].cumsum(-1))


def best_first(values_BSK: Tensor, ids_BSK: Tensor, *, budget: int) -> Trees:
    """The `budget` most probable prefixes: by score descending, then depth, then their parent's number, then rank.

    `values_BSK` are log-probabilities (<= 0), descending within a slot; K >= min(budget, V) or the tree is not the best
    one. N is `budget`, or less where the slots have not so many prefixes.
    """
    # the same trees in two ways: in few large steps, which are mostly sorting, or in N small ones for all blocks
    num_blocks, num_slots, num_candidates = values_BSK.shape
    bits = max(budget, num_candidates).bit_length()  # of a node's number, and of a rank
    many = values_BSK.device.type == "cpu" and num_blocks > 32 and num_slots + 2 < 1 << max(0, 31 - 2 * bits)
    if many and not (values_BSK[..., -1] == -torch.inf).any():  # values descend: there is no other
        return _node_by_node(values_BSK, ids_BSK, budget, bits)
    return _level_by_level(values_BSK, ids_BSK, budget)


@lru_cache
def _pairs(num_parents: int, num_candidates: int, budget: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The (parent, rank) pairs of a level that can matter: the same for every block."""
    pairs = [(i, j) for i in range(num_parents) for j in range(min(num_candidates, budget // (i + 1)))]
    parent_C, rank_C = torch.tensor(pairs, device=device).unbind(-1)
    return parent_C, rank_C


def _level_by_level(values_BSK: Tensor, ids_BSK: Tensor, budget: int) -> Trees:
    """A prefix among the best N has a parent among the N best of its own level, and the child of rank j of parent i is
    preceded by all children of rank <= j of parents <= i, so only (i+1)(j+1) <= budget can matter.
    """
    num_blocks, num_slots, num_candidates = values_BSK.shape
    best_BP = values_BSK.new_zeros(num_blocks, 1)  # P parents: at first the root
    scores, tokens, parents, depths = [], [], [], []
    start = -1  # where the parents' level lies in the concatenated levels; the root is before them
    for slot in range(num_slots):
        parent_C, rank_C = _pairs(best_BP.shape[1], num_candidates, budget, values_BSK.device)
        score_BC = best_BP[:, parent_C] + values_BSK[:, slot, rank_C]
        score_BC, order_BC = score_BC.sort(dim=-1, descending=True, stable=True)
        best_BP, picked_BP = score_BC[:, :budget], order_BC[:, :budget]
        scores.append(best_BP)
        tokens.append(ids_BSK[:, slot].gather(-1, rank_C[picked_BP]))
        parents.append(start + parent_C[picked_BP])
        depths.append(torch.full_like(picked_BP, slot + 1))
        start = sum(level.shape[1] for level in scores[:-1])
    # levels are concatenated shallow first and each is in order, so a stable sort by score gives the total order
    scores_BN, order_BN = torch.cat(scores, dim=-1).sort(dim=-1, descending=True, stable=True)
    number_BN = order_BN.argsort(dim=-1)
    order_BN = order_BN[:, :budget]
    parents_BN = torch.cat(parents, dim=-1).gather(-1, order_BN)
    return Trees(
        tokens_BN=torch.cat(tokens, dim=-1).gather(-1, order_BN),
        parents_BN=number_BN.gather(-1, parents_BN.clamp(min=0)).where(parents_BN >= 0, -1),
        depths_BN=torch.cat(depths, dim=-1).gather(-1, order_BN),
        scores_BN=scores_BN[:, :budget],
    )


def _node_by_node(values_BSK: Tensor, ids_BSK: Tensor, budget: int, bits: int) -> Trees:
    """N steps, each of which takes the best prefix of every block that is not in its tree yet. Values are finite.

    That is some node's best child of those that are not: one candidate per node and the root. It is a number whose
    order is that of prefixes: its upper half are the bits of the cost, -score, its lower half depth, parent and rank,
    of which the last two have `bits` bits each.
    As float64, of which a minimum is found some ten times sooner than of int64. A step is many small operations, whose
    number is its price: each writes to where its result is needed.
    """
    num_blocks, num_slots, num_candidates = values_BSK.shape
    num_nodes, level = 0, 1
    for _ in range(num_slots):
        level = min(level * num_candidates, budget)
        num_nodes = min(num_nodes + level, budget)
    # beyond the last rank, and beyond the last slot, nothing is possible; the first row is that of depth 1
    row = num_candidates + 1
    costs_XB = torch.nn.functional.pad(values_BSK.abs(), (0, 1, 1, 1), value=torch.inf).flatten(1).T.contiguous()
    mask, deepest = (1 << bits) - 1, (1 << 31 - 2 * bits) - 1

    def halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
        place, cost_bits = numbers.view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
        return place, cost_bits.view(torch.float32)

    taken_MB = torch.zeros(num_nodes + 1, num_blocks, dtype=torch.float64)  # the root costs nothing
    place_MB, cost_MB = halves(taken_MB)
    candidates_MB = torch.full_like(taken_MB, torch.inf)
    candidate_place_MB, candidate_cost_MB = halves(candidates_MB)
    candidate_place_MB[0], candidate_cost_MB[0] = 1 << 2 * bits, costs_XB[row]
    sibling_B = torch.empty_like(taken_MB[0])
    sibling_place_B, sibling_cost_B = halves(sibling_B)
    next_costs_XB = costs_XB[1:]  # of the prefix whose own cost is at a place, the next one's
    at_2B = torch.empty(2, num_blocks, dtype=torch.int64)
    cost_2B = torch.empty(2, num_blocks)
    for node in range(1, num_nodes + 1):
        torch.amin(candidates_MB[:node], 0, out=taken_MB[node])
        number_B, place_B = taken_MB[node].view(torch.int64), place_MB[node]
        parent_1B = (number_B >> bits).bitwise_and_(mask)[None]
        slot_B = (number_B >> 2 * bits).bitwise_and_(deepest).mul_(row)
        # instead of the prefix: its parent's next child, and its own best one
        torch.add(slot_B, number_B & mask, out=at_2B[0])
        torch.add(slot_B, row - 1, out=at_2B[1])
        torch.gather(next_costs_XB, 0, at_2B, out=cost_2B)
        torch.add(cost_2B[0], cost_MB.gather(0, parent_1B)[0], out=sibling_cost_B)
        torch.add(cost_2B[1], cost_MB[node], out=candidate_cost_MB[node])
        torch.add(place_B, 1, out=sibling_place_B)
        torch.bitwise_and(place_B, deepest << 2 * bits, out=candidate_place_MB[node])
        candidate_place_MB[node] += (1 << 2 * bits) + (node << bits)
        candidates_MB.scatter_(0, parent_1B, sibling_B[None])
    taken_BN = place_MB[1:].T.long()
    depths_BN, ranks_BN = taken_BN >> 2 * bits, taken_BN & mask
    return Trees(
        tokens_BN=ids_BSK.flatten(1).gather(-1, (depths_BN - 1) * num_candidates + ranks_BN),
        parents_BN=(taken_BN >> bits & mask) - 1,
        depths_BN=depths_BN,
        scores_BN=-cost_MB[1:].T,
    )


def ancestors(trees: Trees) -> Tensor:
    """Which of root and nodes each of them may attend to (B, M, M): itself, its ancestors and the root."""
    parents_BM = torch.nn.functional.pad(trees.parents_BN + 1, (1, 0))
    num_blocks, size = parents_BM.shape
    at_BM = torch.arange(size, device=parents_BM.device).expand(num_blocks, -1)
    visible_BMM = torch.zeros(num_blocks, size, size, dtype=torch.bool, device=parents_BM.device)
    for _ in range(int(trees.depths_BN.max()) + 1 if size > 1 else 1):
        visible_BMM.scatter_(-1, at_BM[..., None], True)
        at_BM = parents_BM.gather(-1, at_BM)
    return visible_BMM


def walk(trees: Trees, choices_BM: Tensor, *, num_slots: int) -> Tensor:
    """Follow the verifier from the root for as long as its choice is a node: the node at each depth (B, S), or ABSENT.

    `choices_BM` holds the token that the verifier puts after the root (column 0) and after each node (1 + its number);
    -1 where it puts none. Numbers grow with the depth, so a tree of budget b accepts as many slots as are below b.
    """
    at_B1 = torch.full_like(choices_BM[:, :1], -1)
    path_BS = torch.full((len(choices_BM), num_slots), ABSENT, dtype=torch.int64, device=choices_BM.device)
    node_N = torch.arange(trees.tokens_BN.shape[1], device=choices_BM.device)
    exists_BN = trees.scores_BN > -torch.inf
    for slot in range(num_slots if len(node_N) else 0):
        choice_B1 = choices_BM.gather(-1, (at_B1 + 1).where(at_B1 != ABSENT, 0))
        match_BN = exists_BN & (trees.parents_BN == at_B1) & (trees.tokens_BN == choice_B1)
        at_B1 = node_N.where(match_BN, ABSENT).amin(-1, keepdim=True)
        path_BS[:, slot] = at_B1[:, 0]
    return path_BS


def label_order(trees: Trees, labels_BS: Tensor, live_BS: Tensor) -> Tensor:
    """The number of the label prefix of each depth in its tree (B, S), ABSENT where the tree lacks it.

    The first slot that is not live ends the prefix. One tree of the largest budget serves every smaller one.
    """
    num_slots = labels_BS.shape[1]
    labels_BS = labels_BS.where(live_BS, -1)
    after_BM = torch.nn.functional.pad(trees.depths_BN, (1, 0))  # what follows a node of depth d is label d, from 0
    choices_BM = labels_BS.gather(-1, after_BM.clamp(max=num_slots - 1)).where(after_BM < num_slots, -1)
    return walk(trees, choices_BM, num_slots=num_slots)


def accepted_within(order_BS: Tensor, budget: int) -> Tensor:
    """How many leading slots a tree of that budget accepts (B,), from the orders in a tree at least as big."""
    return (order_BS < budget).sum(-1)
