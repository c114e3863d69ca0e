"""Forward and backward of a micro-batch, with the anchors and the noise of its step. Takes no optimizer step.

All random numbers are functions of (seed, step, row): the same pass gives the same gradient whenever it is made.

P tokens of all documents, F features, A anchors, R rows of the store, X groups that a row is in
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.config import TrainingConfig
from dflash.drafter.blocks import sample_anchors
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import PackedStates
from dflash.training.batches import Batch, Pass, add_noise, row_generators
from dflash.training.metrics import Tally
from dflash.training.objective import block_loss
from dflash.training.schedules import derived_seed

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


def arithmetic(dtype: str, device: torch.device) -> torch.autocast:
    """Float32 weights are used in `dtype` within."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
