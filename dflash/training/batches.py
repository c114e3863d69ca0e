"""Micro-batches: which rows form which optimizer step at which rank, rows as a batch, noise on their features.

Knows neither the store nor the model.

P tokens of all rows of a micro-batch, F features (K taps of H)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.corpus.bucketing import epoch_batches, rank_steps
from dflash.drafter.blocks import Documents
from dflash.training.schedules import derived_seed

if TYPE_CHECKING:
    from dflash.hidden.store import PackedStates


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step: the row numbers of each rank's micro-batches, and the epoch its first one belongs to."""

    epoch: int
    hands: list[list[list[int]]]

    @property
    def rows(self) -> list[int]:
        return [row for hand in self.hands for batch in hand for row in batch]

    def passes(self, rank: int) -> list[tuple[list[int], bool]]:
        """What a rank computes, and whether it counts: as many passes as the rank with the most micro-batches.

        A rank that is out of batches, in the last step, repeats one for nothing: all ranks must meet in every pass.
        """
        hand = self.hands[rank]
        spare = (hand or self.hands[0] or self.hands[-1])[0]
        idle = max(map(len, self.hands)) - len(hand)
        return [(batch, True) for batch in hand] + [(spare, False)] * idle


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


def row_generators(rows: Sequence[int], *, seed: int, device: torch.device | str) -> list[torch.Generator]:
    """One for each row, a function of (seed, row): a row meets the same numbers whatever batch or rank it is in."""
    return [torch.Generator(device).manual_seed(derived_seed(seed, row)) for row in rows]


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
