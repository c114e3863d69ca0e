"""Training: the stage and its loop. Opens one artifact, the hidden states, and never loads the verifier.

Weights and moments are float32; arithmetic is in the configured dtype. All random numbers are functions of (seed, step)
and of (seed, epoch), so that a checkpoint is weights, moments and a step, and a resumed run ends bit-identical.

P tokens of all documents, F features, A anchors, S predicted slots, H hidden, N live slots
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dflash.config import TrainingConfig
from dflash.decoding.replay import replay_rows
from dflash.devices import resolve_device
from dflash.drafter.blocks import sample_anchors
from dflash.drafter.export import save_drafter
from dflash.drafter.losses import Tally
from dflash.drafter.model import Drafter, DrafterConfig, Ends
from dflash.hidden.store import HiddenStates, RowStates
from dflash.keys import training_key
from dflash.manifests import Artifact, Key, Progress, find, home, in_progress, publish, silent
from dflash.training.batches import Batch, add_noise, collate, plan_steps, read_ahead
from dflash.training.checkpoints import Checkpoint, load_newest, save_checkpoint
from dflash.training.objective import block_loss
from dflash.training.optimizers import (
    average_and_clip,
    load_state_tensors,
    make_optimizers,
    set_learning_rates,
    state_tensors,
)
from dflash.training.schedules import derived_seed, learning_rate_factor, noise_std
from dflash.training.tracking import STEP, tracked_run

log = logging.getLogger(__name__)


class Stopped(Exception):
    """Training was asked to stop; a checkpoint is there and the same call continues."""


@dataclass
class Counters:
    """What was counted: in all, and since the last logged row."""

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    row_tokens: int = 0
    seconds: float = 0.0
    grad_norm: float = 0.0
    blocks: Tally = field(default_factory=Tally)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Counters":
        return cls(**values | {"blocks": Tally(**values["blocks"])})


def train(
    config: TrainingConfig,
    hidden_states: Artifact,
    *,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> Artifact:
    """Train a drafter on extracted hidden states; continues from its last checkpoint if it was interrupted.

    `should_stop` is asked after every step: where true, a checkpoint is saved and Stopped is raised. Raises ValueError
    for data that cannot be trained on, FloatingPointError for a loss or gradient that is not finite.
    """
    key = training_key(config, hidden_states)
    with _alone(key, should_stop) as waited:
        if waited and (artifact := find(key)):
            return artifact  # what the other one made
        return _train(config, hidden_states, key, progress, should_stop)


def _train(
    config: TrainingConfig, hidden_states: Artifact, key: Key, progress: Progress, should_stop: Callable[[], bool]
) -> Artifact:
    folder = in_progress(key)
    store = HiddenStates.open(hidden_states.path)
    device = resolve_device(config.device)
    dtype = getattr(torch, config.dtype)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bfloat16")
    taps = store.info["target_layer_ids"]
    train_rows, validation_rows = usable_rows(store)
    plan = plan_steps(
        train_rows,
        [store.rows[row].length for row in train_rows],
        [store.rows[row].bucket for row in train_rows],
        max_tokens=config.max_tokens_per_batch,
        seed=config.seed,
        epochs=config.epochs,
        accumulation=config.accumulation,
        max_steps=config.max_steps,
    )
    total = len(plan)
    ends = Ends(store.frozen(), dtype=dtype, device=device, **store.info["logits"])
    shape = DrafterConfig.from_verifier(
        store.verifier_config,
        block_size=config.block_size,
        num_layers=config.num_layers,
        mask_token_id=config.mask_token_id,
        target_layer_ids=taps,
    )
    generator = torch.Generator().manual_seed(derived_seed(config.seed))
    drafter = Drafter(shape, generator=generator).to(device)
    parameters = list(drafter.parameters())
    num_parameters = sum(parameter.numel() for parameter in parameters)
    optimizers = make_optimizers(
        drafter,
        kind=config.optimizer,
        learning_rate=config.learning_rate,
        muon_learning_rate=config.muon_learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
    done, counters = 0, Counters()
    if checkpoint := load_newest(folder):
        drafter.load_state_dict(checkpoint.weights)
        load_state_tensors(drafter, optimizers, checkpoint.optimizer)
        done, counters = checkpoint.step, Counters.of(checkpoint.counters)
    history = resume_rows(folder / "metrics.jsonl", step=done)
    log.info(
        "%s: %d rows, %d steps from step %d, %s parameters, %s on %s",
        *(key, len(train_rows), total, done, f"{num_parameters:,}", config.dtype, device),
    )

    def load(rows: list[int]) -> Batch:
        states = [store.read(row) for row in rows]
        for row, state in zip(rows, states, strict=True):
            refuse_mask_token(state, mask_token_id=config.mask_token_id, row_id=store.rows[row].id)
        return collate(states)

    def record(row: dict[str, float]) -> None:
        history.append(row)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        log_row(row)
        log.info("%s", "  ".join(f"{name.rpartition('/')[2]} {value:.4g}" for name, value in row.items()))

    def due(step: int) -> bool:
        return step % config.validate_every == 0 or step == total

    def validate(step: int) -> None:
        if not validation_rows:
            log.info("step %d: no validation rows, so no validation", step)
            return
        rows = (store.read(row) for row in unless(should_stop, validation_rows))
        with autocast:
            methods = replay_rows(drafter, ends, rows, budgets=[config.tree_budget])
        taus = {method: acceptance.acceptance_length for method, acceptance in methods.items()}
        record({STEP: step} | {f"validation/acceptance_length/{name}": tau for name, tau in taus.items() if tau})

    tracked = tracked_run(
        config.tracking,
        run_id=str(key),
        project=config.project,
        name=config.run_name or run_name(config),
        settings=config.model_dump() | {"key": str(key), "hidden_states": hidden_states.identity},
    )
    batches = read_ahead(load, [rows for step in plan[done:] for rows in step.micro_batches])
    with tracked as log_row, closing(batches):
        if done and due(done) and not validated(history, done):
            validate(done)  # it was interrupted
        for step in range(done, total):
            t0 = time.perf_counter()
            factor = learning_rate_factor(step, total=total, warmup_share=config.warmup_share)
            std = noise_std(step, total=total, warmup_share=config.warmup_share, peak=config.noise_start)
            blocks = Tally()
            for rows in plan[step].micro_batches:
                # per row, so that a row meets the same anchors and noise whichever micro-batch it is in
                seeds = [[derived_seed(config.seed, step, row, use) for row in rows] for use in range(2)]
                batch = next(batches)
                anchors_A = sample_anchors(
                    batch.loss_mask_P,
                    batch.documents,
                    num_anchors=config.num_anchors,
                    generators=[torch.Generator().manual_seed(seed) for seed in seeds[0]],
                ).to(device)
                batch = batch.to(device)
                features_PF = add_noise(
                    batch.features_PF,
                    batch.documents,
                    num_taps=len(taps),
                    std=std,
                    generators=[torch.Generator(device).manual_seed(seed) for seed in seeds[1]],
                )
                with autocast:
                    loss, counted = block_loss(
                        drafter,
                        ends,
                        batch,
                        features_PF=features_PF,
                        anchors_A=anchors_A,
                        weights=config.slot_weights,
                        gamma=config.gamma,
                        alpha=config.dpace_alpha,
                    )
                loss.backward()
                blocks += counted
                counters.rows += len(batch.documents.lengths)
                counters.row_tokens += batch.documents.total
            grad_norm = average_and_clip(parameters, weight=blocks.weight, clip_norm=config.clip_norm)
            if not math.isfinite(grad_norm) or not math.isfinite(blocks.loss):
                ids = [store.rows[row].id for rows in plan[step].micro_batches for row in rows]
                raise FloatingPointError(
                    f"step {step + 1}: loss {blocks.loss}, gradient norm {grad_norm}; rows {', '.join(ids)}; "
                    "lower the learning rate, or look at these rows"
                )
            set_learning_rates(optimizers, factor=factor)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

            finished = step + 1
            counters.steps += 1
            counters.blocks += blocks
            counters.grad_norm += grad_norm
            counters.seconds += time.perf_counter() - t0
            if finished % config.log_every == 0 or finished == total:
                row = {STEP: finished, "train/epoch": plan[step].epoch, "train/lr": config.learning_rate * factor}
                record(row | {"train/noise_std": std} | averages(counters))
                counters = Counters(tokens=counters.tokens + counters.row_tokens)
            progress(finished, total, f"loss {blocks.loss / max(blocks.weight, 1e-9):.3f}")
            stopping = should_stop()
            if finished % config.save_every == 0 or due(finished) or stopping:
                state = state_tensors(drafter, optimizers)
                save_checkpoint(folder, Checkpoint(finished, drafter.state_dict(), state, asdict(counters)))
            if stopping:
                raise Stopped(f"stopped after step {finished} of {total}; run again to continue")
            if due(finished):
                validate(finished)

    summary: dict[str, Any] = {
        "steps": total,
        "tokens": counters.tokens,
        "parameters": num_parameters,
        "rows": len(train_rows),
        "verifier": store.info["verifier"],
        "chat": store.info["chat"],
        "on_policy_share": store.info["on_policy_share"],
    }
    summary |= {name: last_row(history, name) for name in ("train", "validation")}
    with publish(key, summary=summary) as (scratch, result):
        save_drafter(scratch, drafter.to(dtype))
        shutil.copyfile(folder / "metrics.jsonl", scratch / "metrics.jsonl")
    shutil.rmtree(folder)
    return result()


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


def refuse_mask_token(row: RowStates, *, mask_token_id: int, row_id: str) -> None:
    """Raises ValueError where the mask token is a supervised token or label: it must mean nothing else."""
    said_T = (row.input_ids_T[1:] == mask_token_id) | (row.greedy_ids_T[:-1] == mask_token_id)
    found_T = row.loss_mask_T[1:] & said_T
    if found_T.any():
        raise ValueError(
            f"training.mask_token_id: {mask_token_id} occurs in the supervised text of row {row_id}, "
            f"position {int(found_T.nonzero()[0]) + 1}; choose a reserved id that the verifier never says"
        )


def averages(counters: Counters) -> dict[str, float]:
    """A row of metrics from the sums since the last one."""
    return {f"train/{name}": value for name, value in counters.blocks.metrics().items()} | {
        "train/grad_norm": counters.grad_norm / counters.steps,
        "train/tokens_per_second": counters.row_tokens / counters.seconds,
        "batch/avg_seq_len": counters.row_tokens / counters.rows,
    }


def run_name(config: TrainingConfig) -> str:
    """Such as ddtree-g10-b95: slot weights, beta 2, and the optimizer if it is not AdamW."""
    weights = f"g{config.gamma:g}" if config.slot_weights == "decay" else config.slot_weights
    name = f"ddtree-{weights}-b{round(config.beta2 * 100)}"
    return name if config.optimizer == "adamw" else f"{name}-{config.optimizer}"


def resume_rows(path: Path, *, step: int) -> list[dict[str, float]]:
    """Cut the file of metrics back to those of a checkpoint and return them; a half-written last line goes too."""
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n") or (row := json.loads(line))[STEP] > step:
            break
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def validated(history: list[dict[str, float]], step: int) -> bool:
    return last_row(history, "validation").get(STEP) == step


def last_row(history: list[dict[str, float]], kind: str) -> dict[str, float]:
    """The newest row of "train" or "validation" metrics; {} where there is none."""
    rows = [row for row in history if any(name.startswith(f"{kind}/") and name != STEP for name in row)]
    return rows[-1] if rows else {}


def unless(should_stop: Callable[[], bool], rows: list[int]) -> Iterator[int]:
    """The rows, or Stopped as soon as that is asked for."""
    for row in rows:
        if should_stop():
            raise Stopped("stopped while validating; run again to continue")
        yield row


@contextmanager
def _alone(key: Key, should_stop: Callable[[], bool]) -> Iterator[bool]:
    """Holds the trainer's own lock of a key; yields whether it had to wait.

    The task's lock ends with the task's process, but a trainer that lost its parent still finishes its step and saves.
    """
    (home() / "locks").mkdir(parents=True, exist_ok=True)
    lock = FileLock(home() / "locks" / f"{key}-trainer.lock")
    waited = False
    while True:
        try:
            lock.acquire(timeout=0.5 if waited else 0)
            break
        except Timeout:
            if not waited:
                log.info("%s is being trained by another process; waiting for it", key)
            waited = True
        if should_stop():
            raise Stopped("stopped while waiting for another training of the same key")
    try:
        yield waited
    finally:
        lock.release()
