"""Checkpoints: a folder per step, written aside, renamed when whole, checked by content when read.

Holds tensors and a few numbers; no pickle, no random state (random numbers are functions of seed and step).
"""

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save_file
from torch import Tensor

from dflash.manifests import Damaged, file_sha256, text_sha256, write_atomically

log = logging.getLogger(__name__)

KEEP = 2
RECORD = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """State after `step` optimizer steps. `counters` is JSON-able and comes back exactly."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    counters: dict[str, Any]


def _folders(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder`/step-000200, then forget all but the newest two. An interruption leaves the older ones whole."""
    final = folder / f"step-{checkpoint.step:06d}"
    aside = folder / f".{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    files = {}
    for name in ("weights", "optimizer"):
        path = aside / f"{name}.safetensors"
        save_file({key: t.detach().contiguous() for key, t in getattr(checkpoint, name).items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = file_sha256(path)
    text = json.dumps({"step": checkpoint.step, "counters": checkpoint.counters, "files": files})
    write_atomically(aside / RECORD, json.dumps({"sha256": text_sha256(text), "text": text}))
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    for old in _folders(folder)[KEEP:]:
        shutil.rmtree(old)
    return final


def _read(folder: Path) -> Checkpoint:
    try:
        record = json.loads((folder / RECORD).read_text())
        if text_sha256(record["text"]) != record["sha256"]:
            raise ValueError(f"{RECORD} differs from its checksum")
        content = json.loads(record["text"])
        tensors = {}
        for name, digest in content["files"].items():
            if file_sha256(folder / name) != digest:
                raise ValueError(f"{name} differs from its checksum")
            tensors[name.removesuffix(".safetensors")] = load((folder / name).read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{folder}: {error}") from error
    return Checkpoint(content["step"], tensors["weights"], tensors["optimizer"], content["counters"])


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint; damaged ones are named in the log and removed. None where there is none."""
    for path in _folders(folder):
        try:
            return _read(path)
        except Damaged as error:
            log.error("damaged checkpoint removed, falling back to the one before: %s", error)
            shutil.rmtree(path)
    return None
