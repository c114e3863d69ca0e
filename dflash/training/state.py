"""What lives while a drafter is trained, and goes into its checkpoints: weights, moments, averages, counts.

Weights may be held in shares by several ranks; in a checkpoint they are whole, so that any number of ranks continues.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dflash.drafter.model import Drafter
from dflash.hidden.store import PackedStates, Row
from dflash.training.checkpoints import Checkpoint, forget_checkpoints, load_newest, read_checkpoint, save_checkpoint
from dflash.training.metrics import Tally
from dflash.training.optimizers import load_state_tensors, state_tensors
from dflash.training.ranks import Ranks, as_held, load_weights, own, whole
from dflash.training.spikes import Steadiness


@dataclass
class Counters:
    """What was counted since the last logged row, and all tokens before. Seconds are this rank's, the rest everyone's;
    only the tally is in parts, which `together` brings to the first rank.
    """

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    row_tokens: int = 0
    bucket_tokens: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    waiting: float = 0.0
    passes: int = 0
    read_ahead: int = 0
    grad_norm: float = 0.0
    blocks: Tally = field(default_factory=Tally)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Counters":
        return cls(**values | {"blocks": Tally.of_json(values["blocks"])})

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"blocks": self.blocks.to_json()}

    def read(self, batches: Iterator[tuple[PackedStates, int]]) -> PackedStates:
        """The next batch, whose wait is counted."""
        t0 = time.perf_counter()
        states, ready = next(batches)
        self.waiting += time.perf_counter() - t0
        self.read_ahead += ready
        self.passes += 1
        return states

    def add_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            bucket = str(row.bucket)
            self.bucket_tokens[bucket] = self.bucket_tokens.get(bucket, 0) + row.length
        self.rows += len(rows)
        self.row_tokens += sum(row.length for row in rows)

    def together(self, ranks: Ranks) -> None:
        """Every rank must ask."""
        parts = ranks.gather(self.blocks.to_json())
        self.blocks = sum(map(Tally.of_json, parts), Tally()) if ranks.first else Tally()

    def metrics(self, groups: Sequence[str]) -> dict[str, float]:
        """A row of metrics from the sums, also of the groups of these names. What was not measured is not there."""
        row = {f"train/{name}": value for name, value in self.blocks.metrics(groups).items()}
        if self.steps:
            row["train/grad_norm"] = self.grad_norm / self.steps
        row |= {
            "train/tokens_per_second": self.row_tokens / self.seconds,
            "train/waiting_share": self.waiting / self.seconds,
            "train/read_ahead": self.read_ahead / self.passes,
            "batch/avg_seq_len": self.row_tokens / self.rows,
        }
        tokens = sorted(self.bucket_tokens.items())
        return row | {f"batch/bucket/{bucket}": count / self.row_tokens for bucket, count in tokens}


@dataclass
class State:
    """After `step` optimizer steps. `average` is the moving average of the weights; empty where none is kept.

    `scores` are those of the validated steps, `num_rows` counts the rows of metrics so far, and `run_id` is what
    tracking knows this training by: one that begins anew is another run.
    """

    drafter: Drafter
    optimizers: list[Optimizer]
    average: dict[str, Tensor]
    step: int = 0
    counters: Counters = field(default_factory=Counters)
    steadiness: Steadiness = field(default_factory=Steadiness)
    scores: dict[int, float] = field(default_factory=dict)
    num_rows: int = 0
    run_id: str = ""

    def weights(self) -> dict[str, Tensor]:
        """Those to publish, whole; every rank must ask."""
        return {name: whole(weight) for name, weight in (self.drafter.state_dict() | self.average).items()}

    def sound(self, ranks: Ranks) -> bool:
        """Whether all weights are finite; every rank must ask."""
        return not ranks.any(not all(own(weight).isfinite().all() for weight in self.drafter.parameters()))

    def save(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        settings: dict[str, Any],
        metric: str,
        keep_last: int,
        keep_every: int,
    ) -> None:
        """A checkpoint in the folder, and older ones forgotten; every rank must ask, the first one writes.

        `metric` is what the scores are of: to a run with another one they say nothing. Raises FloatingPointError where
        weights are not finite: nobody could go on from them.
        """
        if not self.sound(ranks):
            raise FloatingPointError(f"step {self.step}: the weights are not finite any more; lower the learning rate")
        self.counters.together(ranks)
        checkpoint = Checkpoint(
            self.step,
            weights={name: whole(weight) for name, weight in self.drafter.state_dict().items()},
            average={name: whole(weight) for name, weight in self.average.items()},
            optimizer=state_tensors(self.drafter, self.optimizers),
            counters={
                "counters": self.counters.to_json(),
                "steadiness": asdict(self.steadiness),
                "scores": {metric: self.scores},
                "num_rows": self.num_rows,
                "run_id": self.run_id,
            },
            settings=settings,
        )
        if ranks.first:
            save_checkpoint(folder, checkpoint)
            forget_checkpoints(folder, keep_last=keep_last, keep_every=keep_every, scores=self.scores)
        ranks.share(None)  # no one leaves before it is written

    def restore(self, checkpoint: Checkpoint, ranks: Ranks, *, metric: str, same_optimizer: bool) -> None:
        """Put back what `save` wrote. Moments of another kind of optimizer are of no use: these start anew."""
        load_weights(self.drafter, checkpoint.weights)
        for name, held in self.average.items():
            self.average[name] = as_held((checkpoint.average or checkpoint.weights)[name], held)
        if same_optimizer:
            load_state_tensors(self.drafter, self.optimizers, checkpoint.optimizer)
        self.step = checkpoint.step
        self.counters = Counters.of(checkpoint.counters["counters"])
        if not ranks.first:
            self.counters.blocks = Tally()
        self.steadiness = Steadiness(**checkpoint.counters["steadiness"])
        scores = checkpoint.counters.get("scores", {}).get(metric, {})  # earlier checkpoints have none of these
        self.scores = {int(step): score for step, score in scores.items()}
        self.num_rows = checkpoint.counters.get("num_rows", 0)
        self.run_id = checkpoint.counters.get("run_id", "")


def newest(folder: Path, ranks: Ranks) -> Checkpoint | None:
    """The newest whole checkpoint, the same at all ranks; only the first judges and sets damaged ones aside."""
    found = load_newest(folder) if ranks.first else None
    step = ranks.share(found.step if found else None)
    return found if step is None or found else read_checkpoint(folder, step)


def plain_copy(drafter: Drafter, weights: Mapping[str, Tensor]) -> Drafter:
    """A drafter of the same shape with these whole weights, which are not copied."""
    with torch.device("meta"):
        copy = Drafter(drafter.config)
    copy.load_state_dict(weights, assign=True)
    return copy
