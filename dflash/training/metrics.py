"""What training is judged by, as sums and counts over blocks: nothing leaves the device before it is printed.

Everything follows from the rank of each label and, for trees, from the best log-probabilities of each slot: the tree
is that of decoding, over ranks instead of tokens. Knows no drafter and no loss.

A blocks (one per anchor), S predicted slots, K candidates per slot, N nodes, M columns of sums, G groups of blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash.decoding.ddtree import accepted_within, best_first, label_order

RECALLS = (1, 2, 4, 8, 16, 64)
TOPS = (1, 4, 8)
"""Accuracy and streak count a label as right where it is among so many best tokens."""

TREE_BUDGETS = (16, 64, 256)


@dataclass(frozen=True)
class Tally:
    """Sums over blocks, additive; `Tally()` is of no blocks.

    `columns` names what is summed; the first row of `sums` (float64) is of all blocks, each further one of a group.
    """

    columns: tuple[str, ...] = ()
    sums: Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.float64))

    def __add__(self, other: "Tally") -> "Tally":
        """On the device of the newer one: what was restored from a file does not draw the sums to the host."""
        if not (self.columns and other.columns):
            return self if self.columns else other
        assert self.columns == other.columns, "tallies of different block sizes or budgets"
        return Tally(self.columns, self.sums.to(other.sums.device) + other.sums)

    @property
    def loss(self) -> Tensor:
        """The weighted sum, on the device."""
        return self.sums[0, :1].sum()

    @property
    def weight(self) -> Tensor:
        """What the weighted sum is to be divided by, on the device."""
        return self.sums[0, 1:2].sum()

    def to_json(self) -> dict[str, Any]:
        return {"columns": self.columns, "sums": self.sums.tolist()}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Tally":
        return cls(tuple(values["columns"]), torch.tensor(values["sums"], dtype=torch.float64))

    def metrics(self, groups: Sequence[str] = ()) -> dict[str, float]:
        """Averages by name, those of a group as `name/group`, but for slots. What was not measured is not there.

        `loss` is per unit of weight; `accuracy`, `top4_accuracy`, `top8_accuracy` and `recall@k` are shares of live
        slots whose label is among the top k; `streak`, `ddtree_streak4`, `ddtree_streak8` are leading live slots of a
        block with the label among the top 1, 4, 8. `acceptance/slot3` is the share of blocks that got slot 3 right, of
        those that got the slots before it right and live that long. `ddtree_accept@64` is how many slots of a block the
        best tree of 64 nodes accepts, and `calibration@64` how many more the drafter expected.
        """
        metrics = {}
        for group, row in zip(("", *groups), self.sums.tolist(), strict=False):
            sums = dict(zip(self.columns, row, strict=True))
            for name, value in _averages(sums).items():
                if not group:
                    metrics[name] = value
                elif "/" not in name:
                    metrics[f"{name}/{group}"] = value
        return metrics


def _averages(sums: dict[str, float]) -> dict[str, float]:
    """From one row of a tally."""

    def ratio(name: str, total: str, count: str) -> dict[str, float]:
        return {name: sums[total] / sums[count]} if sums[count] else {}

    if not sums:
        return {}
    averages = ratio("loss", "loss", "weight")
    for k in TOPS:
        averages |= ratio("accuracy" if k == 1 else f"top{k}_accuracy", f"hits{k}", "slots")
    for k in TOPS:
        averages |= ratio("streak" if k == 1 else f"ddtree_streak{k}", f"streak{k}", "blocks")
    for k in RECALLS:
        averages |= ratio(f"recall@{k}", f"hits{k}", "slots")
    for name in sums:
        kind, _, number = name.partition(":")
        if kind == "reached":
            averages |= ratio(f"acceptance/slot{number}", f"right:{number}", name)
        if kind == "accepted":
            averages |= ratio(f"ddtree_accept@{number}", name, "trees")
            averages |= ratio(f"calibration@{number}", f"surplus:{number}", "trees")
    return averages


def tally(
    *,
    loss_A: Tensor,
    weight_A: Tensor,
    rank_AS: Tensor,
    live_AS: Tensor,
    top_values_ASK: Tensor | None,
    tree_budgets: Sequence[int],
    groups_AX: Tensor,
    num_groups: int,
) -> Tally:
    """Count the blocks of one micro-batch.

    `loss_A` is each block's weighted sum and `weight_A` its share of the divisor. `top_values_ASK` are the best
    log-probabilities of every slot, dead ones too; None: no trees are built this time. `groups_AX` holds the numbers of
    the groups that a block is in.
    """
    right_AS = (live_AS & (rank_AS == 0)).cumprod(-1)
    reached_AS = live_AS & torch.nn.functional.pad(right_AS[:, :-1], (1, 0), value=1).bool()
    columns = {"loss": loss_A, "weight": weight_A, "slots": live_AS.sum(-1), "blocks": live_AS.any(-1)}
    columns |= {f"hits{k}": (live_AS & (rank_AS < k)).sum(-1) for k in RECALLS}
    columns |= {f"streak{k}": (live_AS & (rank_AS < k)).cumprod(-1).sum(-1) for k in TOPS}
    for slot in range(live_AS.shape[1]):
        columns |= {f"reached:{slot + 1}": reached_AS[:, slot], f"right:{slot + 1}": right_AS[:, slot]}
    columns |= _of_trees(rank_AS, live_AS, top_values_ASK, tree_budgets)
    sums_AM = torch.stack([column_A.detach().double() for column_A in columns.values()], -1)
    member_GA = (groups_AX == torch.arange(num_groups, device=groups_AX.device)[:, None, None]).any(-1)
    sums_GM = torch.cat([sums_AM.sum(0, keepdim=True), member_GA.double() @ sums_AM])
    return Tally(tuple(columns), sums_GM)


def _of_trees(
    rank_AS: Tensor, live_AS: Tensor, top_values_ASK: Tensor | None, budgets: Sequence[int]
) -> dict[str, Tensor]:
    """What each block's best tree of each budget accepts, and how much more is expected: all from the largest tree."""
    if top_values_ASK is None:
        none_A = torch.zeros_like(live_AS[:, 0])
        return {"trees": none_A} | {f"{kind}:{b}": none_A for b in budgets for kind in ("accepted", "surplus")}
    ranks_ASK = torch.arange(top_values_ASK.shape[-1], device=rank_AS.device).expand_as(top_values_ASK)
    trees = best_first(top_values_ASK, ranks_ASK, budget=max(budgets))
    order_AS = label_order(trees, rank_AS, live_AS)
    # the drafter expects to get as many slots as the sum of its prefixes' probabilities; beyond the end nothing counts
    lives_AN = (trees.scores_BN > -torch.inf) & (trees.depths_BN <= live_AS.sum(-1, keepdim=True))
    expected_AN = trees.scores_BN.double().exp().where(lives_AN, 0)
    columns = {"trees": live_AS.any(-1)}
    for budget in budgets:
        columns[f"accepted:{budget}"] = accepted_within(order_AS, budget)
        columns[f"surplus:{budget}"] = expected_AN[:, :budget].sum(-1) - columns[f"accepted:{budget}"]
    return columns
