"""Micro-batches: which rows form which optimizer step, rows read ahead and packed, noise on their features.

Reads rows through a function; knows neither the store nor the model.

P tokens of all rows of a micro-batch, F features (K taps of H)
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.corpus.bucketing import epoch_batches, rank_steps
from dflash.drafter.blocks import Documents

if TYPE_CHECKING:
    from dflash.hidden.store import RowStates

READ_AHEAD = 2


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step: the row numbers of its micro-batches, and the epoch its first one belongs to."""

    epoch: int
    micro_batches: list[list[int]]


@dataclass(frozen=True)
class Batch:
    """Rows one after the other, without padding: the documents. `final_PH` only where it was stored."""

    documents: Documents
    features_PF: Tensor  # noqa: N815
    input_ids_P: Tensor  # noqa: N815
    loss_mask_P: Tensor  # noqa: N815
    greedy_ids_P: Tensor  # noqa: N815
    final_PH: Tensor | None = None  # noqa: N815

    def to(self, device: torch.device) -> "Batch":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(self.documents, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


def plan_steps(
    rows: Sequence[int],
    lengths: Sequence[int],
    buckets: Sequence[int],
    *,
    max_tokens: int,
    seed: int,
    epochs: int,
    accumulation: int,
    max_steps: int,
) -> list[OptimizerStep]:
    """All optimizer steps of a run, in order; `max_steps` 0 means all epochs. `lengths` and `buckets` are per row.

    A step takes the next `accumulation` batches, also across the end of an epoch; the very last may have fewer.
    """
    batches = (
        (epoch, batch)
        for epoch in range(epochs)
        for batch in epoch_batches(lengths, buckets, max_tokens=max_tokens, seed=seed, epoch=epoch)
    )
    planned = list(islice(batches, max_steps * accumulation or None))
    steps = rank_steps([batch for _, batch in planned], lengths, num_ranks=1, accumulation=accumulation)
    return [
        OptimizerStep(planned[n * accumulation][0], [[rows[i] for i in batch] for batch in micro_batches])
        for n, (micro_batches,) in enumerate(steps)
    ]


def collate(states: Sequence["RowStates"]) -> Batch:
    """Pack rows into one batch."""
    finals = [row.final_TH for row in states if row.final_TH is not None]
    return Batch(
        Documents(tuple(len(row.input_ids_T) for row in states)),
        features_PF=torch.cat([row.features_TF for row in states]),
        input_ids_P=torch.cat([row.input_ids_T for row in states]).long(),
        loss_mask_P=torch.cat([row.loss_mask_T for row in states]).bool(),
        greedy_ids_P=torch.cat([row.greedy_ids_T for row in states]).long(),
        final_PH=torch.cat(finals) if finals else None,
    )


def read_ahead(load: Callable[[list[int]], Batch], batches: Iterable[list[int]]) -> Generator[Batch, None, None]:
    """Load batches on one thread, a few ahead of the consumer; an exception of `load` is raised at its batch."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    pending: deque[Future[Batch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(load, batch))
            if len(pending) > READ_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def add_noise(
    features_PF: Tensor, documents: Documents, *, num_taps: int, std: float, generators: Sequence[torch.Generator]
) -> Tensor:
    """Gaussian noise of `std` times the RMS of each tap, taken per token: a few tokens have enormous features.

    One generator, of the features' device, per document: what is drawn for it does not depend on its company.
    """
    if std == 0:
        return features_PF
    noisy_PF = torch.empty_like(features_PF)
    parts = zip(features_PF.split(documents.lengths), noisy_PF.split(documents.lengths), generators, strict=True)
    for features_TF, noisy_TF, generator in parts:
        taps_TKH = features_TF.float().unflatten(-1, (num_taps, -1))
        rms_TK1 = taps_TKH.square().mean(-1, keepdim=True).sqrt()
        noise_TKH = torch.randn(taps_TKH.shape, generator=generator, device=taps_TKH.device)
        noisy_TF.copy_(noise_TKH.mul_(rms_TK1 * std).add_(taps_TKH).flatten(-2))
    return noisy_PF
