"""Checkpoints: a folder per step, written aside, renamed when whole, checked by content when read.

Holds tensors and a few numbers; no pickle, no random state (random numbers are functions of seed and step). Knows no
number of processes: what several hold in shares is whole here.

The folder is that of the training's key, so other settings never find it. To continue with other settings all the same,
copy the old key's folder to the name of the new key's and set `training.accept_changes`.

    in_progress/KEY/step-000200            a checkpoint
    in_progress/KEY/damaged-step-000200    one that was found damaged: none any more, for people to look at
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file
from torch import Tensor

from dflash.manifests import Damaged, file_sha256, home, is_held, naming_a_full_disk, text_sha256, write_atomically

log = logging.getLogger(__name__)

RECORD = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """State after `step` optimizer steps. `counters` and `settings` are JSON-able and come back exactly.

    `average` is the moving average of the weights; empty where none is kept.
    """

    step: int
    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    counters: dict[str, Any]
    settings: dict[str, Any]


TENSORS = ("weights", "average", "optimizer")


def _folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def saved_steps(folder: Path) -> list[int]:
    """Newest first."""
    return sorted((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), reverse=True)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder`/step-000200. An interruption leaves the older ones whole, and so does a full disk: OSError."""
    final = _folder(folder, checkpoint.step)
    aside = folder / f".{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with naming_a_full_disk(folder):
        try:
            _write(aside, checkpoint)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    return final


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    files = {}
    for name in TENSORS:
        path = folder / f"{name}.safetensors"
        save_file({key: t.detach().contiguous() for key, t in getattr(checkpoint, name).items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = file_sha256(path)
    content = {"step": checkpoint.step, "counters": checkpoint.counters, "settings": checkpoint.settings}
    text = json.dumps(content | {"files": files})
    write_atomically(folder / RECORD, json.dumps({"sha256": text_sha256(text), "text": text}))


def forget_checkpoints(folder: Path, *, keep_last: int, keep_every: int, scores: Mapping[int, float]) -> None:
    """Remove all but the newest `keep_last`, those of every `keep_every`-th step (0: none), and the best ones.

    `scores` are those of the validated steps. Best counts as of each of the newest, since training may have to continue
    from any of them.
    """
    steps = saved_steps(folder)
    newest = steps[:keep_last]
    best = {best_step({step: score for step, score in scores.items() if step <= last}) for last in newest}
    for step in steps[keep_last:]:
        if step not in best and not (keep_every and step % keep_every == 0):
            shutil.rmtree(_folder(folder, step))


def best_step(scores: Mapping[int, float]) -> int | None:
    """The step of the highest score, the first of equals; None where there is none."""
    return max(sorted(scores), key=lambda step: scores[step], default=None)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Raises Damaged where a file is missing or not what was written, ValueError where another version wrote it.

    OSError where the disk does not answer: that says nothing about the checkpoint, and trying again may help.
    """
    path = _folder(folder, step)
    try:
        content, files = _record(path)
        tensors: dict[str, Any] = {
            name: _tensors(path / f"{name}.safetensors", digest) for name, digest in files.items()
        }
    except FileNotFoundError as error:
        raise Damaged(f"{path}: {Path(error.filename).name} is missing") from error
    return Checkpoint(**content, **tensors)


def _record(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What a checkpoint holds beside tensors, and the checksums of the files of these."""
    try:
        record = json.loads((path / RECORD).read_bytes())
        text, digest = record["text"], record["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: {RECORD} cannot be read ({error})") from error
    if text_sha256(text) != digest:
        raise Damaged(f"{path}: {RECORD} differs from its checksum")
    content: dict[str, Any] = json.loads(text)
    files = {name.removesuffix(".safetensors"): sha256 for name, sha256 in content.pop("files", {}).items()}
    if unlike := sorted({*content, *files} ^ {field.name for field in fields(Checkpoint)}):
        raise ValueError(
            f"{path}: made by another version of dflash, which differs in {', '.join(unlike)}; continue with that "
            f"version, or remove {path.parent} to begin anew"
        )
    return content, files


def _tensors(path: Path, digest: str) -> dict[str, Tensor]:
    if file_sha256(path) != digest:
        raise Damaged(f"{path.parent}: {path.name} differs from its checksum")
    return load(path.read_bytes())


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint; damaged ones are named in the log and set aside. None where there is none.

    Raises ValueError and OSError as `read_checkpoint` does: then nothing has become of any checkpoint.
    """
    for step in saved_steps(folder):
        try:
            return read_checkpoint(folder, step)
        except Damaged as error:
            path = _folder(folder, step)
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)  # that of an earlier time
            path.rename(aside)
            log.error("damaged checkpoint set aside as %s, falling back to the one before: %s", aside.name, error)
    return None


def differing(saved: Mapping[str, Any], current: Mapping[str, Any], *, within: str = "") -> Iterable[str]:
    """`learning_rate: 0.001 -> 0.002` for every setting that is not the same."""
    for name in sorted(saved.keys() | current.keys()):
        before, now = saved.get(name), current.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from differing(before, now, within=f"{within}{name}.")
        elif before != now:
            yield f"{within}{name}: {before} -> {now}"


def refuse_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, folder: Path, step: int, accepted: bool
) -> None:
    """Raises ValueError naming the settings that differ from those a checkpoint was made with, unless `accepted`."""
    if changes := ", ".join(differing(saved, current)):
        if not accepted:
            raise ValueError(
                f"{_folder(folder, step)} was made with other settings ({changes}); set training.accept_changes to "
                f"continue from it all the same, or remove {folder} to begin anew"
            )
        log.warning("continuing from step %d with other settings, as asked: %s", step, changes)


def mention_others(folder: Path, current: Mapping[str, Any]) -> None:
    """Warn of the training on the same hidden states, with other settings, that was interrupted furthest, if any.

    It lies in a folder beside `folder`, which is that of the `current` settings and holds no checkpoint yet.
    """
    found = []
    for beside in folder.parent.glob("training-*"):
        with suppress(OSError, ValueError, KeyError):  # what cannot be read is no reason not to train
            [step] = saved_steps(beside)[:1]
            saved = _record(_folder(beside, step))[0]["settings"]
            same = saved["inputs"]["hidden_states"] == current["inputs"]["hidden_states"]
            if same and not is_held(home() / "locks" / f"{beside.name}-trainer.lock"):  # by one that trains it now
                found.append((step, beside, ", ".join(differing(saved, current))))
    if found:
        step, beside, changes = max(found)
        log.warning(
            "beginning anew, while %s was interrupted at step %d on the same hidden states (%s); to continue that one, "
            "run it with its settings, or stop this, copy what is in it to %s and set training.accept_changes",
            *(beside, step, changes, folder),
        )
