"""Forward and backward of a micro-batch, with the anchors and the noise of its step; the largest one as a rehearsal.

Takes no optimizer step.

All random numbers are functions of (seed, step, row): the same pass gives the same gradient whenever it is made.

P tokens of all documents, F features, A anchors, R rows of the store, X groups that a row is in
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dflash.config import TrainingConfig
from dflash.drafter.blocks import sample_anchors
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import PackedStates, Row
from dflash.training.batches import Batch, Pass, add_noise, row_generators
from dflash.training.metrics import Tally
from dflash.training.objective import block_loss
from dflash.training.optimizers import missing_moments
from dflash.training.schedules import derived_seed

log = logging.getLogger(__name__)

ANCHORS, NOISE = 0, 1  # purposes of random numbers


@dataclass(frozen=True)
class Passes:
    """What all passes of a training have in common. `groups_RX` holds the numbers of each row's groups."""

    config: TrainingConfig
    drafter: Drafter
    ends: Ends
    device: torch.device
    num_taps: int
    groups_RX: Tensor  # noqa: N815
    num_groups: int

    def backward(self, one: Pass, states: PackedStates, *, step: int, std: float, tree_metrics: bool) -> Tally:
        """Add the gradient of these rows' loss to those that are there. Nothing is counted of a pass for nothing."""
        config, batch = self.config, Batch.of(states)
        anchors_A = sample_anchors(
            batch.loss_mask_P,
            batch.documents,
            num_anchors=config.num_anchors,
            generators=self._generators(one, step, ANCHORS, device=torch.device("cpu")),
        ).to(self.device)
        batch = batch.to(self.device)
        features_PF = add_noise(
            batch.features_PF,
            batch.documents,
            num_taps=self.num_taps,
            std=std,
            generators=self._generators(one, step, NOISE, device=self.device),
        )
        with arithmetic(config.dtype, self.device):
            loss, counted = block_loss(
                self.drafter,
                self.ends,
                batch,
                features_PF=features_PF,
                anchors_A=anchors_A,
                labels=config.labels,
                loss=config.loss.model_dump(),
                weights=config.slot_weights,
                gamma=config.gamma,
                alpha=config.dpace_alpha,
                tree_budget=config.tree_budget,
                tree_metrics=tree_metrics,
                memory_bytes=config.loss_memory_mb * 2**20,
                groups_DX=self.groups_RX[one.rows].to(self.device, non_blocking=True),
                num_groups=self.num_groups,
            )
        (loss if one.counts else loss * 0).backward()
        return counted if one.counts else Tally()

    def _generators(self, one: Pass, step: int, purpose: int, *, device: torch.device) -> list[torch.Generator]:
        seed = derived_seed(self.config.seed, step, purpose)
        return row_generators(one.rows, one.earlier, seed=seed, device=device)


class Size(NamedTuple):
    """Of a micro-batch; there may be fewer anchors where a row has several responses."""

    tokens: int
    anchors: int


def size_of(one: Pass, rows: Sequence[Row], *, num_anchors: int) -> Size:
    members = [rows[number] for number in one.rows]
    return Size(
        tokens=sum(row.length for row in members),
        anchors=sum(min(num_anchors, max(0, row.num_supervised - 1)) for row in members),
    )


def largest(passes: Iterable[Pass], rows: Sequence[Row], *, num_anchors: int, block_size: int) -> list[Pass]:
    """The one with most positions in the drafter: tokens, and the slots of blocks. None where there is none."""

    def positions(one: Pass) -> int:
        size = size_of(one, rows, num_anchors=num_anchors)
        return size.tokens + size.anchors * block_size

    return sorted(passes, key=positions)[-1:]


def rehearse(
    compute: Passes,
    one: Pass,
    states: PackedStates,
    rows: Sequence[Row],
    optimizers: Sequence[Optimizer],
    *,
    accumulates: bool,
) -> None:
    """Forward and backward for nothing, with all that a step can need, so that too little memory is noticed now.

    `rows` are those of the store; `accumulates` says that a step has several passes. Changes no weight and no moment,
    and leaves no gradient. Raises MemoryError where memory does not suffice, which may be for what else is in it now;
    every rank of several must come here.
    """
    t0, config = time.perf_counter(), compute.config
    size = size_of(one, rows, num_anchors=config.num_anchors)
    try:
        # a later step begins with moments, which optimizers make in their first one, and with gradients of other passes
        held = missing_moments(optimizers)
        for weight in compute.drafter.parameters() if accumulates else ():
            weight.grad = torch.zeros_like(weight)
        compute.backward(one, states, step=0, std=max(config.noise_start, config.noise_end), tree_metrics=True)
        del held
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"training.max_tokens_per_batch: the largest micro-batch, of {size.tokens:,} tokens and {size.anchors:,} "
            f"anchors, does not fit into memory ({'. '.join(str(error).split('. ')[:2])}); lower it, or "
            "training.num_anchors"
        ) from error
    for optimizer in optimizers:
        optimizer.zero_grad()
    log.info(
        "the largest micro-batch fits into memory: %s tokens, %s anchors; tried in %.1f s",
        *(f"{size.tokens:,}", f"{size.anchors:,}", time.perf_counter() - t0),
    )


def arithmetic(dtype: str, device: torch.device) -> torch.autocast:
    """Float32 weights are used in `dtype` within."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
