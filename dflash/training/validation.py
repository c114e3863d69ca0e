"""Held-out rows replayed, and which weights are best by that. Knows drafters and rows of metrics."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.decoding.acceptance import CHAIN, Acceptance, method_name
from dflash.decoding.replay import replay_rows
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import Row, RowStates
from dflash.manifests import Damaged
from dflash.training.checkpoints import best_step, read_checkpoint
from dflash.training.tracking import STEP

log = logging.getLogger(__name__)

PREFIX = "validation/acceptance_length/"


def deployment_metric(tree_budget: int) -> str:
    """The name of what a drafter is chosen by: its acceptance length as it will be deployed."""
    return PREFIX + (method_name(tree_budget) if tree_budget else CHAIN)


def replay_groups(
    drafter: Drafter, ends: Ends, rows: Iterable[tuple[Row, RowStates]], *, tree_budget: int
) -> dict[str, Acceptance]:
    """Of the chain and the tree, each over all rows and over those of every category and bucket: tree64/bucket/0.

    Every response of a row counts, also where it holds a conversation of many. Raises NotNumbers naming the row.
    """
    totals: dict[str, Acceptance] = defaultdict(Acceptance)
    for row, states in rows:
        budgets = [tree_budget] if tree_budget else []
        for method, acceptance in replay_rows(drafter, ends, [states], budgets=budgets, names=[row.id]).items():
            for part in ("", f"/category/{row.category}", f"/bucket/{row.bucket}"):
                totals[method + part] += acceptance
    return dict(totals)


def validation_row(parts: Sequence[Mapping[str, Acceptance]], *, step: int) -> dict[str, float]:
    """A row of metrics from what several ranks replayed; what had no round is not measured and not there."""
    totals: dict[str, Acceptance] = defaultdict(Acceptance)
    for part in parts:
        for name, acceptance in part.items():
            totals[name] += acceptance
    taus = {PREFIX + name: total.acceptance_length for name, total in sorted(totals.items())}
    return {STEP: step} | {name: tau for name, tau in taus.items() if tau is not None}


def scores_of(history: Iterable[Mapping[str, float]], metric: str) -> dict[int, float]:
    """The validated steps and their scores."""
    return {int(row[STEP]): row[metric] for row in history if metric in row}


def out_of_patience(scores: Mapping[int, float], patience: int) -> bool:
    """Whether the last `patience` validations brought nothing better; 0: never."""
    best = best_step(scores)
    return bool(patience) and best is not None and sum(step > best for step in scores) >= patience


def best_weights(
    folder: Path,
    weights: dict[str, Tensor],
    scores: Mapping[int, float],
    metric: str,
    *,
    last: int,
    average: bool,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What to publish and why: of the checkpoint of the best step, or `weights`, those of the last.

    Where that checkpoint is damaged it is the next best one, loudly.
    """
    damaged: list[int] = []
    while (chosen := choice(scores, metric, last=last, average=average, damaged=damaged))["step"] != last:
        try:
            checkpoint = read_checkpoint(folder, chosen["step"])
            return chosen, {**checkpoint.weights, **checkpoint.average}
        except Damaged as error:
            log.error("the checkpoint of the best step is damaged, the next best is published: %s", error)
            damaged.append(chosen["step"])
    return chosen, weights


def choice(
    scores: Mapping[int, float], metric: str, *, last: int, average: bool, damaged: Sequence[int] = ()
) -> dict[str, Any]:
    """Which step is published, and why; for people and for `best.json`. Those `damaged` were better and are lost."""
    weights = "moving average of the weights" if average else "weights"
    lost = f"; better, but damaged: step {', '.join(map(str, damaged))}" if damaged else ""
    left = {step: score for step, score in scores.items() if step not in damaged}
    best = best_step(left)
    if best is None:
        why = "there was nothing to validate on" if not scores else "no checkpoint that was validated is whole"
        reason = f"{why}: the {weights} of the last step{lost}"
        return {"step": last, "metric": metric, "value": None, "runner_up": None, "reason": reason}
    second = best_step({step: score for step, score in left.items() if step != best})
    return {
        "step": best,
        "metric": metric,
        "value": scores[best],
        "runner_up": {"step": second, "value": scores[second]} if second is not None else None,
        "reason": f"the {weights} with the highest acceptance length, by replay of all held-out rows (validations: "
        f"{len(scores)}; the first of equals){lost}",
    }
