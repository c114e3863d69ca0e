"""Micro-batches: which rows form which optimizer step at which rank, rows as a batch, noise on their features.

Knows neither the store nor the model.

P tokens of all rows of a micro-batch, F features (K taps of H)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dflash.corpus.bucketing import epoch_batches, rank_steps
from dflash.drafter.blocks import Documents
from dflash.training.schedules import derived_seed

if TYPE_CHECKING:
    from dflash.hidden.store import PackedStates


class Pass(NamedTuple):
    """A micro-batch, whether it counts, and how often each of its rows was met earlier in the same step.

    A row is in a step again where that spans several epochs.
    """

    rows: list[int]
    counts: bool
    earlier: list[int]


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step: the row numbers of each rank's micro-batches, and the epoch its first one belongs to."""

    epoch: int
    hands: list[list[list[int]]]

    @property
    def rows(self) -> list[int]:
        return [row for hand in self.hands for batch in hand for row in batch]

    def passes(self, rank: int) -> list[Pass]:
        """What a rank computes: as many passes as the rank with the most micro-batches.

        A rank that is out of batches, in the last step, repeats one for nothing: all ranks must meet in every pass.
        """
        met: Counter[int] = Counter()
        counting: list[list[Pass]] = []
        for hand in self.hands:
            counting.append([])
            for batch in hand:
                counting[-1].append(Pass(batch, True, [met[row] for row in batch]))
                met.update(batch)
        spare = (counting[rank] or counting[0] or counting[-1])[0]._replace(counts=False)
        return counting[rank] + [spare] * (max(map(len, counting)) - len(counting[rank]))


@dataclass(frozen=True)
class Batch:
    """Rows one after the other, without padding: the documents. `final_PH` only where it was stored."""

    documents: Documents
    features_PF: Tensor  # noqa: N815
    input_ids_P: Tensor  # noqa: N815
    loss_mask_P: Tensor  # noqa: N815
    greedy_ids_P: Tensor  # noqa: N815
    final_PH: Tensor | None = None  # noqa: N815

    @classmethod
    def of(cls, states: "PackedStates") -> "Batch":
        """Views of them; the likeliest tokens are of no use here."""
        return cls(Documents(states.lengths), *states[:5])

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
    order: str,
    epochs: int,
    accumulation: int,
    max_steps: int,
    num_ranks: int = 1,
) -> list[OptimizerStep]:
    """All optimizer steps of a run, in order; `max_steps` 0 means all epochs. `lengths` and `buckets` are per row.

    A step takes the next `accumulation` batches, also across the end of an epoch; the very last may have fewer. What is
    in a step does not depend on the number of ranks, a divisor of `accumulation`, that they are dealt to.
    """
    batches = (
        (epoch, batch)
        for epoch in range(epochs)
        for batch in epoch_batches(lengths, buckets, max_tokens=max_tokens, seed=seed, epoch=epoch, order=order)
    )
    planned = list(islice(batches, max_steps * accumulation or None))
    steps = rank_steps(
        [batch for _, batch in planned], lengths, num_ranks=num_ranks, accumulation=accumulation // num_ranks
    )
    return [
        OptimizerStep(
            planned[n * accumulation][0],
            [[[rows[i] for i in batch] for batch in micro_batches] for micro_batches in hands],
        )
        for n, hands in enumerate(steps)
    ]


def row_generators(
    rows: Sequence[int], earlier: Sequence[int], *, seed: int, device: torch.device | str
) -> list[torch.Generator]:
    """One for each row, a function of (seed, row): a row meets the same numbers whatever batch or rank it is in.

    Other ones each time where it was met `earlier` in the step.
    """
    parts = ((row, *[times] * (times > 0)) for row, times in zip(rows, earlier, strict=True))
    return [torch.Generator(device).manual_seed(derived_seed(seed, *part)) for part in parts]


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
