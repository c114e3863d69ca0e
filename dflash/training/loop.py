"""Training: the stage and its loop. Opens one artifact, the hidden states, and never runs the verifier.

Weights and moments are float32; arithmetic is in the configured dtype. All random numbers are functions of (seed, step,
row) and of (seed, epoch), so that a checkpoint is weights, moments and counts, and a resumed run ends bit-identical.

R rows of the store, X groups that a row is in
"""

import json
import logging
import resource
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dflash.config import TrainingConfig
from dflash.decoding.replay import NotNumbers
from dflash.drafter.model import Ends
from dflash.hidden.store import HiddenStates, Row
from dflash.keys import RECIPES, training_key
from dflash.manifests import Artifact, Key, Progress, find, home, in_progress, load_manifest, silent
from dflash.pinning import PinnedVerifier, num_tokens
from dflash.training.batches import OptimizerStep, plan_steps
from dflash.training.checkpoints import mention_others, refuse_changes
from dflash.training.data import coverage, longest_batch, parts_of, refuse_mask_token, usable_rows
from dflash.training.launch import refuse_uneven_ranks
from dflash.training.metrics import Tally
from dflash.training.optimizers import average_and_clip, set_learning_rates, update_average
from dflash.training.passes import Passes, arithmetic, largest, rehearse
from dflash.training.publishing import publish_drafter
from dflash.training.ranks import Ranks, joined
from dflash.training.rows import last_row, resume_rows
from dflash.training.schedules import learning_rate_factor, noise_std
from dflash.training.start import new_state
from dflash.training.state import Counters, State, newest, plain_copy
from dflash.training.tracking import STEP, tracked_run
from dflash.training.validation import (
    deployment_metric,
    out_of_patience,
    replay_groups,
    scores_of,
    validation_row,
)

log = logging.getLogger(__name__)

BUFFERS = 4  # micro-batches in memory: one in use, and a reading thread for each of the others


class Stopped(Exception):
    """Training was asked to stop; a checkpoint is there and the same call continues."""


def train(
    config: TrainingConfig,
    hidden_states: Artifact,
    *,
    verifier: PinnedVerifier | None = None,
    group: str = "",
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> Artifact:
    """Train a drafter on extracted hidden states; continues from its last checkpoint if it was interrupted.

    Under torchrun every rank calls this with the same arguments, and all get the artifact. `verifier` is needed only
    where the drafter starts from its layers, and says which rows of a padded head are tokens; `group` is that of the
    W&B run. `should_stop` is asked after every step: where true at any rank, a checkpoint is saved and Stopped is
    raised at all. Raises ValueError for data or settings that cannot be trained with, FloatingPointError after too many
    steps whose loss or gradient was of no use, and where weights or drafts are not numbers any more.
    """
    key = training_key(config, hidden_states)
    with joined(config.device) as ranks, _alone(key, ranks, should_stop) as waited:
        refuse_uneven_ranks(config, ranks.world)
        if waited and (artifact := ranks.share(find(key) if ranks.first else None)):
            return artifact  # what the other one made
        return _train(config, hidden_states, verifier, key, ranks, group, progress, should_stop)


def _train(
    config: TrainingConfig,
    hidden_states: Artifact,
    verifier: PinnedVerifier | None,
    key: Key,
    ranks: Ranks,
    group: str,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> Artifact:
    folder, device = in_progress(key), ranks.device
    store = HiddenStates.open(hidden_states.path)
    train_rows, validation_rows = usable_rows(store)
    plan = _planned(config, store, train_rows, num_ranks=ranks.world)
    total = len(plan)
    settings = key.model_dump(mode="json", include={"recipe", "config", "inputs"})
    metric = deployment_metric(config.tree_budget)
    state = _begun(config, store, ranks, folder, verifier=verifier, rows=train_rows, settings=settings, metric=metric)
    # the loss is of all rows of a padded head, so that rows without a token become improbable; none of them is proposed
    dtype = getattr(torch, config.dtype)
    ends = Ends(store.frozen(), dtype=dtype, device=device, **store.info["logits"]).for_drafter(state.drafter)
    proposing = ends.for_drafter(state.drafter, num_tokens=num_tokens(verifier) if verifier else None)
    history = ranks.share(
        resume_rows(folder / "metrics.jsonl", step=state.step, expected=state.num_rows) if ranks.first else []
    )
    state.scores |= scores_of(history, metric)  # that of its own step is not in a checkpoint yet
    summary: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in state.drafter.parameters()),
        "rows": len(train_rows),
        "verifier": store.info["verifier"],
        "chat": store.info["chat"],
        "on_policy_share": store.info["on_policy_share"],
        "planned_steps": total,
    }
    if config.draft_vocab_size and ranks.first:
        shares = coverage(state.drafter, store, labels=config.labels, train=train_rows, validation=validation_rows)
        summary["draft_vocabulary"] = {"size": config.draft_vocab_size, "coverage": shares}
        log.info("%d tokens can be drafted; their share of the labels: %s", config.draft_vocab_size, shares)
    log.info(
        "%s: %d rows, %d steps from step %d, %s parameters, %s on %s, processes: %d",
        *(key, len(train_rows), total, state.step, f"{summary['parameters']:,}", config.dtype, device, ranks.world),
    )

    def record(row: dict[str, float]) -> None:
        history.append(row)
        if ranks.first:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            log_row(row)
            shown = {name.partition("/")[2]: value for name, value in row.items() if "@" not in name}
            log.info("%s", "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if name.count("/") < 2))

    def due(step: int) -> bool:
        return step % config.validate_every == 0 or step == total

    def save() -> None:
        state.num_rows = len(history)
        state.save(
            folder, ranks, settings=settings, metric=metric, keep_last=config.keep_last, keep_every=config.keep_every
        )

    def validate() -> None:
        if not validation_rows:
            log.info("step %d: no validation rows, so no validation", state.step)
            return
        row = _validated(config, store, state, proposing, ranks, rows=validation_rows, should_stop=should_stop)
        record(row)
        state.scores |= scores_of([row], metric)

    if not state.run_id.startswith(str(key)):  # begun anew, or continued from another key's checkpoint
        state.run_id = f"{key}-{secrets.token_hex(3)}"
    tracked = tracked_run(
        config.tracking if ranks.first else "disabled",
        run_id=state.run_id,
        project=config.project,
        name=config.run_name or run_name(config),
        group=group,
        settings=config.model_dump()
        | {"key": str(key), "data": load_manifest(hidden_states.path).inputs, "verifier": store.info["verifier"]}
        | {"hidden_states": hidden_states.identity, "world_size": ranks.world},
        history=history,
    )
    groups, groups_RX = parts_of(store.rows)
    compute = Passes(
        config,
        state.drafter,
        ends,
        device,
        num_taps=len(store.info["target_layer_ids"]),
        groups_RX=groups_RX,
        num_groups=len(groups),
    )
    passes = [step.passes(ranks.rank) for step in plan]
    buffers = [store.buffers(longest_batch(store, passes)) for _ in range(BUFFERS)]
    ahead = [one for step in passes[state.step :] for one in step]
    first = largest(ahead, store.rows, num_anchors=config.num_anchors, block_size=config.block_size)
    batches = store.stream([one.rows for one in first + ahead], buffers, device=device)
    with tracked as log_row, closing(batches):
        for one in first:
            several = len(ahead) > total - state.step
            rehearse(compute, one, next(batches)[0], store.rows, state.optimizers, accumulates=several)
        if state.step and due(state.step) and last_row(history, "validation").get(STEP) != state.step:
            validate()  # it was interrupted
        while state.step < total and not out_of_patience(state.scores, config.patience):
            t0, step, counters = time.perf_counter(), state.step, state.counters
            finished = step + 1
            factor = learning_rate_factor(
                step,
                total=total,
                warmup_share=config.warmup_share,
                kind=config.schedule,
                decay_share=config.decay_share,
            )
            std = noise_std(
                step, total=total, warmup_share=config.warmup_share, start=config.noise_start, end=config.noise_end
            )
            logging_now = finished % config.log_every == 0 or finished == total
            rows = [store.rows[row] for row in plan[step].rows]
            blocks = Tally()
            for one in passes[step]:
                states = counters.read(batches)
                blocks += compute.backward(one, states, step=step, std=std, tree_metrics=logging_now)
            loss = _take_step(config, state, blocks, ranks, factor=factor, rows=rows)
            counters.add_rows(rows)
            counters.seconds += time.perf_counter() - t0
            speed = counters.row_tokens / counters.seconds
            if logging_now:
                counters.together(ranks)
                now = {"train/epoch": plan[step].epoch, "train/lr": state.optimizers[0].defaults["lr"] * factor}
                now |= {"train/noise_std": std, "train/skipped": state.steadiness.skipped}
                record({STEP: finished} | now | counters.metrics(groups))
                state.counters = Counters(tokens=counters.tokens + counters.row_tokens)
            if ranks.first:
                progress(finished, total, note(finished, loss=loss, scores=state.scores, speed=speed, device=device))
            stopping = ranks.any(should_stop())
            if finished % config.save_every == 0 or due(finished) or stopping:
                save()
            if stopping:
                raise Stopped(f"stopped after step {finished} of {total}; run again to continue")
            if due(finished):
                validate()

    weights, artifact = state.weights(), None
    if ranks.first:
        artifact = publish_drafter(
            key,
            state,
            weights,
            folder=folder,
            store=store,
            ends=proposing,
            rows=[*validation_rows, *train_rows],
            dtype=dtype,
            metric=metric,
            summary=summary,
            history=history,
        )
        shutil.rmtree(folder)
    artifact = ranks.share(artifact)
    assert artifact is not None, "the first rank has published it"
    return artifact


def _planned(
    config: TrainingConfig, store: HiddenStates, rows: Sequence[int], *, num_ranks: int
) -> list[OptimizerStep]:
    return plan_steps(
        rows,
        [store.rows[row].length for row in rows],
        [store.rows[row].bucket for row in rows],
        max_tokens=config.max_tokens_per_batch,
        seed=config.seed,
        order=config.order,
        epochs=config.epochs,
        accumulation=config.accumulation,
        max_steps=config.max_steps,
        num_ranks=num_ranks,
    )


def _begun(
    config: TrainingConfig,
    store: HiddenStates,
    ranks: Ranks,
    folder: Path,
    *,
    verifier: PinnedVerifier | None,
    rows: Sequence[int],
    settings: dict[str, Any],
    metric: str,
) -> State:
    """As the newest checkpoint in the folder has it, or new.

    Raises ValueError for other settings than those that it was made with, and for rows that say the mask token.
    """
    checkpoint = newest(folder, ranks)
    state = new_state(config, store, ranks, verifier=verifier, continued=checkpoint is not None)
    if checkpoint is None:
        if ranks.first:
            mention_others(folder, settings)
        refuse_mask_token(store, rows[ranks.rank :: ranks.world], mask_token_id=config.mask_token_id)
        return state
    refuse_changes(checkpoint.settings, settings, folder=folder, step=checkpoint.step, accepted=config.accept_changes)
    same_optimizer = checkpoint.settings["config"]["optimizer"] == config.optimizer
    state.restore(checkpoint, ranks, metric=metric, same_optimizer=same_optimizer)
    return state


def _take_step(
    config: TrainingConfig, state: State, blocks: Tally, ranks: Ranks, *, factor: float, rows: Sequence[Row]
) -> float:
    """One optimizer step with the gradients of `blocks`, or none where they are of no use; returns the mean loss.

    `factor` is that of the learning rates, and `rows` are all that the step is of.
    """
    sums = torch.stack([blocks.loss, blocks.weight]).to(ranks.device)
    ranks.add_up([sums])
    parameters = list(state.drafter.parameters())
    norm = average_and_clip(parameters, weight=sums[1], clip_norm=config.clip_norm, ranks=ranks)
    grad_norm, loss_sum, weight = torch.stack([norm.double(), *sums]).tolist()
    loss = loss_sum / max(weight, 1e-9)
    state.step += 1
    objection = state.steadiness.objection(
        loss=loss, grad_norm=grad_norm, spike_factor=config.spike_factor, clip_norm=config.clip_norm
    )
    if objection:
        state.steadiness = state.steadiness.skipped_one()
        ids = ", ".join(row.id for row in rows)
        skip(state.step, objection, ids, state.steadiness.skipped, most=config.max_skipped, sound=state.sound(ranks))
    else:
        set_learning_rates(state.optimizers, factor=factor)
        for optimizer in state.optimizers:
            optimizer.step()
        if state.average:
            update_average(state.average, state.drafter, decay=config.ema)
        state.steadiness = state.steadiness.accepted(grad_norm)
        state.counters.steps += 1
        state.counters.blocks += blocks
        state.counters.grad_norm += grad_norm
    for optimizer in state.optimizers:
        optimizer.zero_grad()
    return loss


def _validated(
    config: TrainingConfig,
    store: HiddenStates,
    state: State,
    ends: Ends,
    ranks: Ranks,
    *,
    rows: Sequence[int],
    should_stop: Callable[[], bool],
) -> dict[str, float]:
    """A row of metrics from the replay of these rows with the weights that would be published; every rank must ask."""
    published = state.drafter
    if state.average or ranks.world > 1:
        published = plain_copy(state.drafter, state.weights())
    own_rows = rows[ranks.rank :: ranks.world]
    read = ((store.rows[row], store.read(row)) for row in own_rows if not should_stop())
    try:
        with arithmetic(config.dtype, ranks.device):
            groups = replay_groups(published, ends, read, tree_budget=config.tree_budget)
    except NotNumbers as error:
        raise FloatingPointError(
            f"step {state.step}: validation: {error.place}; lower the learning rate, or look for damage in the "
            "hidden states with dflash verify"
        ) from None
    if ranks.any(should_stop()):
        raise Stopped("stopped while validating; run again to continue")
    return validation_row(ranks.gather(groups), step=state.step)


def skip(step: int, objection: str, ids: str, skipped: int, *, most: int, sound: bool) -> None:
    """Says that a step is not taken, and why.

    Raises FloatingPointError where that is one too many, and where the weights are not `sound`: then no step is.
    """
    if skipped > most or not sound:
        why = f"{skipped} steps are more than training.max_skipped allows to skip"
        raise FloatingPointError(
            f"step {step}: {objection}; rows {ids}; {why if sound else 'the weights are not finite any more'}; "
            "lower the learning rate, or look at these rows"
        )
    log.warning("step %d is skipped: %s; rows %s", step, objection, ids)


def note(step: int, *, loss: float, scores: dict[int, float], speed: float, device: torch.device) -> str:
    """How it goes, for a progress bar: the acceptance length is that of the last validation."""
    tau = f"tau {scores[max(scores)]:.2f}, " if scores else ""
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"step {step:,}, loss {loss:.3f}, {tau}{speed:,.0f} tokens/s, {memory / 1e9:.1f} GB"


def run_name(config: TrainingConfig) -> str:
    """Such as v3-ddtree-g10-b95: recipe number, slot weights, beta 2, and the optimizer if it is not AdamW."""
    weights = f"g{config.gamma:g}" if config.slot_weights == "decay" else config.slot_weights
    beta2 = f"{config.beta2:.2f}" if round(config.beta2, 2) == config.beta2 else f"{config.beta2}"
    name = f"v{RECIPES['training']}-ddtree-{weights}-b{beta2.partition('.')[2]}"
    return name if config.optimizer == "adamw" else f"{name}-{config.optimizer}"


@contextmanager
def _alone(key: Key, ranks: Ranks, should_stop: Callable[[], bool]) -> Iterator[bool]:
    """Holds the trainer's own lock of a key, at the first rank; yields to all whether it had to wait.

    The task's lock ends with the task's process, but a trainer that lost its parent still finishes its step and saves.
    """
    (home() / "locks").mkdir(parents=True, exist_ok=True)
    lock = FileLock(home() / "locks" / f"{key}-trainer.lock")
    waited = False
    while not ranks.share(ranks.first and _acquired(lock, timeout=0.5 if waited else 0)):
        if not waited:
            log.info("%s is being trained by another process; waiting for it", key)
        waited = True
        if ranks.any(should_stop()):
            raise Stopped("stopped while waiting for another training of the same key")
    try:
        yield waited
    finally:
        lock.release()


def _acquired(lock: FileLock, *, timeout: float) -> bool:
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        return False
    return True
