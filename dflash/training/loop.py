"""Training: the stage and its loop. Opens one artifact, the hidden states, and never runs the verifier.

Weights and moments are float32; arithmetic is in the configured dtype. All random numbers are functions of (seed, step,
row) and of (seed, epoch), so that a checkpoint is weights, moments and counts, and a resumed run ends bit-identical.

P tokens of all documents, F features, A anchors, V vocabulary, U draft vocabulary
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
from dflash.decoding.parity import REFERENCE, remember
from dflash.decoding.replay import NotNumbers
from dflash.drafter.blocks import sample_anchors
from dflash.drafter.export import save_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import HiddenStates
from dflash.keys import RECIPES, training_key
from dflash.manifests import Artifact, Key, Progress, find, home, in_progress, load_manifest, publish, silent
from dflash.pinning import PinnedVerifier, num_tokens
from dflash.training.batches import Batch, add_noise, plan_steps, row_generators
from dflash.training.checkpoints import refuse_changes
from dflash.training.curves import draw_curves
from dflash.training.data import coverage, longest_batch, parts_of, refuse_mask_token, usable_rows
from dflash.training.launch import refuse_uneven_ranks
from dflash.training.metrics import Tally
from dflash.training.objective import block_loss
from dflash.training.optimizers import average_and_clip, set_learning_rates, update_average
from dflash.training.ranks import Ranks, joined, own
from dflash.training.rows import last_row, of_all_rows, resume_rows
from dflash.training.schedules import derived_seed, learning_rate_factor, noise_std
from dflash.training.start import new_state
from dflash.training.state import Counters, newest, plain_copy
from dflash.training.tracking import STEP, tracked_run
from dflash.training.validation import (
    best_weights,
    deployment_metric,
    out_of_patience,
    replay_groups,
    scores_of,
    validation_row,
)

log = logging.getLogger(__name__)

BUFFERS = 4  # micro-batches in memory: one in use, and a reading thread for each of the others
REMEMBERED_ROWS = 4  # held-out ones first, for the parity gate
ANCHORS, NOISE = 0, 1  # purposes of random numbers


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
        order=config.order,
        epochs=config.epochs,
        accumulation=config.accumulation,
        max_steps=config.max_steps,
        num_ranks=ranks.world,
    )
    total = len(plan)
    checkpoint = newest(folder, ranks)
    state = new_state(config, store, ranks, verifier=verifier, continued=checkpoint is not None)
    parameters = list(state.drafter.parameters())
    settings = key.model_dump(mode="json", include={"recipe", "config", "inputs"})
    metric = deployment_metric(config.tree_budget)
    if checkpoint:
        refuse_changes(
            checkpoint.settings, settings, folder=folder, step=checkpoint.step, accepted=config.accept_changes
        )
        same_optimizer = checkpoint.settings["config"]["optimizer"] == config.optimizer
        state.restore(checkpoint, ranks, metric=metric, same_optimizer=same_optimizer)
    else:
        refuse_mask_token(store, train_rows[ranks.rank :: ranks.world], mask_token_id=config.mask_token_id)
    # the loss is of all rows of a padded head, so that rows without a token become improbable; none of them is proposed
    ends = Ends(store.frozen(), dtype=dtype, device=device, **store.info["logits"]).for_drafter(state.drafter)
    proposing = ends.for_drafter(state.drafter, num_tokens=num_tokens(verifier) if verifier else None)
    history = ranks.share(
        resume_rows(folder / "metrics.jsonl", step=state.step, expected=state.num_rows) if ranks.first else []
    )
    state.scores |= scores_of(history, metric)  # that of its own step is not in a checkpoint yet
    summary: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "rows": len(train_rows),
        "verifier": store.info["verifier"],
        "chat": store.info["chat"],
        "on_policy_share": store.info["on_policy_share"],
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

    def sound() -> bool:
        """Whether all weights are finite; every rank must ask."""
        return not ranks.any(not all(own(weight).isfinite().all() for weight in parameters))

    def save() -> None:
        if not sound():  # nobody could go on from them
            raise FloatingPointError(f"step {state.step}: the weights are not finite any more; lower the learning rate")
        state.num_rows = len(history)
        state.save(
            folder, ranks, settings=settings, metric=metric, keep_last=config.keep_last, keep_every=config.keep_every
        )

    def validate() -> None:
        if not validation_rows:
            log.info("step %d: no validation rows, so no validation", state.step)
            return
        published = state.drafter
        if state.average or ranks.world > 1:
            published = plain_copy(state.drafter, state.weights())
        own_rows = validation_rows[ranks.rank :: ranks.world]
        rows = ((store.rows[row], store.read(row)) for row in own_rows if not should_stop())
        try:
            with autocast:
                groups = replay_groups(published, proposing, rows, tree_budget=config.tree_budget)
        except NotNumbers as error:
            raise FloatingPointError(
                f"step {state.step}: validation: {error.place}; lower the learning rate, or look for damage in the "
                "hidden states with dflash verify"
            ) from None
        if ranks.any(should_stop()):
            raise Stopped("stopped while validating; run again to continue")
        row = validation_row(ranks.gather(groups), step=state.step)
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
    passes = [step.passes(ranks.rank) for step in plan]
    buffers = [store.buffers(longest_batch(store, passes)) for _ in range(BUFFERS)]
    ahead = [one.rows for step in passes[state.step :] for one in step]
    batches = store.stream(ahead, buffers, device=device)
    with tracked as log_row, closing(batches):
        if state.step and due(state.step) and last_row(history, "validation").get(STEP) != state.step:
            validate()  # it was interrupted
        while state.step < total and not out_of_patience(state.scores, config.patience):
            t0, step, counters = time.perf_counter(), state.step, state.counters
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
            logging_now = (step + 1) % config.log_every == 0 or step + 1 == total
            blocks = Tally()
            for rows, counts, earlier in passes[step]:
                t1 = time.perf_counter()
                states, ready = next(batches)
                counters.waiting += time.perf_counter() - t1
                counters.read_ahead += ready
                counters.passes += 1
                batch = Batch.of(states)
                anchors_A = sample_anchors(
                    batch.loss_mask_P,
                    batch.documents,
                    num_anchors=config.num_anchors,
                    generators=row_generators(
                        rows, earlier, seed=derived_seed(config.seed, step, ANCHORS), device="cpu"
                    ),
                ).to(device)
                batch = batch.to(device)
                features_PF = add_noise(
                    batch.features_PF,
                    batch.documents,
                    num_taps=len(taps),
                    std=std,
                    generators=row_generators(
                        rows, earlier, seed=derived_seed(config.seed, step, NOISE), device=device
                    ),
                )
                with autocast:
                    loss, counted = block_loss(
                        state.drafter,
                        ends,
                        batch,
                        features_PF=features_PF,
                        anchors_A=anchors_A,
                        labels=config.labels,
                        loss=config.loss.model_dump(),
                        weights=config.slot_weights,
                        gamma=config.gamma,
                        alpha=config.dpace_alpha,
                        tree_budget=config.tree_budget,
                        tree_metrics=logging_now,
                        memory_bytes=config.loss_memory_mb * 2**20,
                        groups_DX=groups_RX[rows].to(device, non_blocking=True),
                        num_groups=len(groups),
                    )
                (loss if counts else loss * 0).backward()
                if counts:
                    blocks += counted
            sums = torch.stack([blocks.loss, blocks.weight]).to(device)
            ranks.add_up([sums])
            norm = average_and_clip(parameters, weight=sums[1], clip_norm=config.clip_norm, ranks=ranks)
            grad_norm, loss_sum, weight = torch.stack([norm.double(), *sums]).tolist()
            mean_loss = loss_sum / max(weight, 1e-9)

            state.step = finished = step + 1
            objection = state.steadiness.objection(
                loss=mean_loss, grad_norm=grad_norm, spike_factor=config.spike_factor, clip_norm=config.clip_norm
            )
            if objection:
                state.steadiness = state.steadiness.skipped_one()
                ids = ", ".join(store.rows[row].id for row in plan[step].rows)
                skip(finished, objection, ids, state.steadiness.skipped, most=config.max_skipped, sound=sound())
            else:
                set_learning_rates(state.optimizers, factor=factor)
                for optimizer in state.optimizers:
                    optimizer.step()
                if state.average:
                    update_average(state.average, state.drafter, decay=config.ema)
                state.steadiness = state.steadiness.accepted(grad_norm)
                counters.steps += 1
                counters.blocks += blocks
                counters.grad_norm += grad_norm
            for optimizer in state.optimizers:
                optimizer.zero_grad()

            counters.add_rows([store.rows[row] for row in plan[step].rows])
            counters.seconds += time.perf_counter() - t0
            speed = counters.row_tokens / counters.seconds
            if logging_now:
                counters.together(ranks)
                now = {"train/epoch": plan[step].epoch, "train/lr": state.optimizers[0].defaults["lr"] * factor}
                now |= {"train/noise_std": std, "train/skipped": state.steadiness.skipped}
                record({STEP: finished} | now | counters.metrics(groups))
                state.counters = Counters(tokens=counters.tokens + counters.row_tokens)
            if ranks.first:
                progress(
                    finished, total, note(finished, loss=mean_loss, scores=state.scores, speed=speed, device=device)
                )
            stopping = ranks.any(should_stop())
            if finished % config.save_every == 0 or due(finished) or stopping:
                save()
            if stopping:
                raise Stopped(f"stopped after step {finished} of {total}; run again to continue")
            if due(finished):
                validate()

    weights, artifact = state.weights(), None
    if ranks.first:
        chosen, weights = best_weights(
            folder, weights, state.scores, metric, last=state.step, average=bool(state.average)
        )
        counters = state.counters
        summary |= {"steps": state.step, "planned_steps": total, "tokens": counters.tokens + counters.row_tokens}
        summary |= {"skipped": state.steadiness.skipped, "best": chosen}
        summary |= {name: of_all_rows(last_row(history, name)) for name in ("train", "validation")}
        with publish(key, summary=summary) as (scratch, result):
            drafter = plain_copy(state.drafter, weights).to(dtype)
            save_drafter(scratch, drafter, head_UH=ends.draft_head_UH if config.draft_vocab_size else None)
            _remember_drafts(scratch / REFERENCE, drafter, proposing, store, [*validation_rows, *train_rows])
            (scratch / "best.json").write_text(json.dumps(chosen, indent=1) + "\n")
            shutil.copyfile(folder / "metrics.jsonl", scratch / "metrics.jsonl")
            (scratch / "plots").mkdir()
            draw_curves(history, scratch / "plots")
        shutil.rmtree(folder)
        artifact = result()
    artifact = ranks.share(artifact)
    assert artifact is not None, "the first rank has published it"
    return artifact


def _remember_drafts(path: Path, drafter: Drafter, ends: Ends, store: HiddenStates, rows: Sequence[int]) -> None:
    """For the parity gate: what the drafter drafts for some rows in the verifier's precision, in which it is served."""
    dtype, device = getattr(torch, store.info["verifier"]["dtype"]), drafter.fc.weight.device
    served = Ends(store.frozen(), dtype=dtype, device=device, **store.info["logits"])
    remember(
        path,
        drafter=drafter.to(dtype).eval(),
        ends=served.for_drafter(drafter, num_tokens=ends.draft_vocab_size),
        rows=[store.read(row) for row in rows[:REMEMBERED_ROWS]],
        storage_dtype=store.info["storage_dtype"],
    )


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
