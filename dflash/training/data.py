"""Which rows of the hidden states are trained on, and what is asked of them first. Knows the store; runs no drafter.

V vocabulary
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dflash.drafter.model import Drafter
from dflash.hidden.store import HiddenStates, Row
from dflash.training.batches import Pass

log = logging.getLogger(__name__)


def usable_rows(store: HiddenStates) -> tuple[list[int], list[int]]:
    """Row numbers for training and for validation. Raises ValueError where no training row has a legal anchor."""
    train_rows = [number for number, row in enumerate(store.rows) if row.split == "train"]
    validation_rows = [number for number, row in enumerate(store.rows) if row.split == "validation"]
    # an anchor and its first slot: two supervised tokens in a row
    usable = [number for number in train_rows if store.rows[number].num_supervised >= 2]
    log.info(
        "%d training rows = %d usable + %d without a legal anchor; %d validation rows",
        *(len(train_rows), len(usable), len(train_rows) - len(usable), len(validation_rows)),
    )
    if not usable:
        raise ValueError(
            f"none of {len(train_rows)} training rows has a legal anchor (two supervised tokens in a row); "
            "generate longer responses or raise tokenization.max_length"
        )
    return usable, validation_rows


def label_counts(store: HiddenStates, rows: Iterable[int], *, labels: str, vocab_size: int) -> Tensor:
    """(V,) how often each token is the label of a supervised one. Reads ids and masks of whole shards."""
    counts_V = np.zeros(vocab_size, np.int64)
    for number, members in rows_by_shard(store, rows).items():
        ids_P, mask_P, greedy_P = store.whole(number, "input_ids", "loss_mask", "greedy_ids")
        counted_P = np.zeros(len(ids_P), bool)
        for row in members:
            counted_P[row.start + 1 : row.start + row.length] = True
        counted = np.flatnonzero(counted_P & mask_P.astype(bool))
        said = greedy_P[counted - 1] if labels == "greedy" else ids_P[counted]
        counts_V += np.bincount(said, minlength=vocab_size)
    return torch.from_numpy(counts_V)


def coverage(drafter: Drafter, store: HiddenStates, *, labels: str, **rows: Iterable[int]) -> dict[str, float]:
    """The share of the labels of some rows that can be drafted, by the rows' name; not of rows without labels."""
    shares = {}
    for name, some in rows.items():
        counts_V = label_counts(store, some, labels=labels, vocab_size=drafter.config.vocab_size)
        if total := int(counts_V.sum()):
            shares[name] = int(counts_V[drafter.get_buffer("t2d").cpu()].sum()) / total
    return shares


def parts_of(rows: Sequence[Row]) -> tuple[list[str], Tensor]:
    """The names of categories and buckets, and for each row the numbers of its own."""
    names = [(f"category/{row.category}", f"bucket/{row.bucket}") for row in rows]
    groups = sorted({name for pair in names for name in pair})
    return groups, torch.tensor([[groups.index(name) for name in pair] for pair in names])


def longest_batch(store: HiddenStates, passes: Iterable[Iterable[Pass]]) -> int:
    """Tokens of the largest micro-batch; 1 where there is none."""
    return max((sum(store.rows[row].length for row in one.rows) for step in passes for one in step), default=1)


def refuse_mask_token(store: HiddenStates, rows: Iterable[int], *, mask_token_id: int) -> None:
    """Raises ValueError where the mask token is a supervised token or label of a row: it must mean nothing else.

    Reads ids and masks of whole shards, once, before the first step: a thousandth of what the states take.
    """
    for shard_number, members in rows_by_shard(store, rows).items():
        ids_P, mask_P, greedy_P = store.whole(shard_number, "input_ids", "loss_mask", "greedy_ids")
        said_P = (ids_P[1:] == mask_token_id) | (greedy_P[:-1] == mask_token_id)
        found = np.flatnonzero(mask_P[1:].astype(bool) & said_P) + 1
        for row in members if len(found) else []:
            inside = found[(found > row.start) & (found < row.start + row.length)]
            if len(inside):
                raise ValueError(
                    f"training.mask_token_id: {mask_token_id} occurs in the supervised text of row {row.id}, "
                    f"position {inside[0] - row.start}; choose a reserved id that the verifier never says"
                )


def rows_by_shard(store: HiddenStates, rows: Iterable[int]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for number in rows:
        found[store.rows[number].shard].append(store.rows[number])
    return found
