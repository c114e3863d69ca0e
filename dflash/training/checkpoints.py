"""Checkpoints: a folder per step, written aside, renamed when whole, checked by content when read.

Holds tensors and a few numbers; no pickle, no random state (random numbers are functions of seed and step). Knows no
number of processes: what several hold in shares is whole here.

The folder is that of the training's key, so other settings never find it. To continue with other settings all the same,
copy the old key's folder to the name of the new key's and set `training.accept_changes`.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file
from torch import Tensor

from dflash.manifests import Damaged, file_sha256, text_sha256, write_atomically

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
    """Write `folder`/step-000200. An interruption leaves the older ones whole."""
    final = _folder(folder, checkpoint.step)
    aside = folder / f".{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    files = {}
    for name in TENSORS:
        path = aside / f"{name}.safetensors"
        save_file({key: t.detach().contiguous() for key, t in getattr(checkpoint, name).items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = file_sha256(path)
    content = {"step": checkpoint.step, "counters": checkpoint.counters, "settings": checkpoint.settings}
    text = json.dumps(content | {"files": files})
    write_atomically(aside / RECORD, json.dumps({"sha256": text_sha256(text), "text": text}))
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    return final


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
    """Raises Damaged where it is not there or not what was written."""
    path = _folder(folder, step)
    try:
        record = json.loads((path / RECORD).read_text())
        if text_sha256(record["text"]) != record["sha256"]:
            raise ValueError(f"{RECORD} differs from its checksum")
        content: dict[str, Any] = json.loads(record["text"])
        tensors: dict[str, Any] = {}
        for name, digest in content.pop("files").items():
            if file_sha256(path / name) != digest:
                raise ValueError(f"{name} differs from its checksum")
            tensors[name.removesuffix(".safetensors")] = load((path / name).read_bytes())
        return Checkpoint(**content, **tensors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: {error}") from error


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint; damaged ones are named in the log and removed. None where there is none."""
    for step in saved_steps(folder):
        try:
            return read_checkpoint(folder, step)
        except Damaged as error:
            log.error("damaged checkpoint removed, falling back to the one before: %s", error)
            shutil.rmtree(_folder(folder, step))
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
