"""Micro-batches: which rows form which optimizer step, rows read ahead and padded, noise on their features.

Reads rows through a function; knows neither the store nor the model.

B batch, T tokens, F features (K taps of H)
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash.corpus.bucketing import epoch_batches, rank_steps

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
    """Rows padded at their ends; `lengths_B` says where."""

    features_BTF: Tensor  # noqa: N815
    input_ids_BT: Tensor  # noqa: N815
    loss_mask_BT: Tensor  # noqa: N815
    greedy_ids_BT: Tensor  # noqa: N815
    lengths_B: Tensor  # noqa: N815

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})


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
    """Stack rows into one batch, zeros after each row's end."""
    return Batch(
        features_BTF=pad_sequence([row.features_TF for row in states], batch_first=True),
        input_ids_BT=pad_sequence([row.input_ids_T.long() for row in states], batch_first=True),
        loss_mask_BT=pad_sequence([row.loss_mask_T.bool() for row in states], batch_first=True),
        greedy_ids_BT=pad_sequence([row.greedy_ids_T.long() for row in states], batch_first=True),
        lengths_B=torch.tensor([len(row.input_ids_T) for row in states]),
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


def add_noise(features_BTF: Tensor, *, num_taps: int, std: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise of `std` times the RMS of each tap, taken per token: a few tokens have enormous features."""
    if std == 0:
        return features_BTF
    taps_BTKH = features_BTF.float().unflatten(-1, (num_taps, -1))
    rms_BTK1 = taps_BTKH.square().mean(-1, keepdim=True).sqrt()
    noise_BTKH = torch.randn(taps_BTKH.shape, generator=generator, device=taps_BTKH.device)
    return taps_BTKH.addcmul(noise_BTKH, rms_BTK1, value=std).flatten(-2)
