"""What lies under the data root, and what of it may go. Knows no stage's files and no Prefect.

Kept is what someone may come back to, and all that it was made from: the champions and the newest drafters with their
reports, what was used lately, and what a run uses now. A run says that it is active by a lock that the operating system
drops with its process:

    $DFLASH_HOME/locks/runs/<seconds since 1970>-<run>.lock
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel

from dflash.corpus.chunks import CHUNKS
from dflash.decoding.champions import champion_of
from dflash.lineage import Lineage, is_chunk, lineage
from dflash.manifests import HOST, Manifest, home, is_held, is_running

DAY = 86_400.0
GB = 10**9
QUOTA = "DFLASH_QUOTA_GB"
CHECKPOINTS = "step-*/checkpoint.json"


class Item(BaseModel):
    """One folder that is kept or may go. `keep` says why it is kept; it is empty where the folder may go."""

    stage: str
    fingerprint: str
    path: str
    bytes: int
    used: float
    keep: str = ""


# --- runs that are active


def protect_run(run: str) -> FileLock:
    """Say that a run is active: what it uses from now on stays, until the lock is released or the process ends."""
    folder = home() / "locks" / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{time.time():.0f}-{run}.lock", thread_local=False)
    lock.acquire(timeout=60)  # someone may be looking whether it is held
    return lock


def oldest_active_run() -> float:
    """When the oldest active run began; infinity where none is. Files of ended runs are removed."""
    begun = float("inf")
    for path in (home() / "locks" / "runs").glob("*.lock"):
        if is_held(path):
            begun = min(begun, float(path.name.partition("-")[0]))
        elif time.time() - float(path.name.partition("-")[0]) > DAY:  # a younger one may be about to be locked
            path.unlink(missing_ok=True)
    return begun


# --- what may go


def survey(*, days: float, last: int) -> list[Item]:
    """Everything under `artifacts` and `in_progress`, and whether it may go.

    Kept are champions and the `last` newest drafters with their reports, what was used in the last `days` days, what
    active runs use, and all that was made from. Raises ValueError where it cannot be known who the champions are.
    """
    made = lineage(set_aside=True)
    begun = oldest_active_run()
    recent = min(time.time() - days * DAY, begun - 1)
    why: dict[str, str] = {}

    def keep(roots: Iterable[Manifest], reason: str) -> None:
        """The roots for that reason, and what they were made from."""
        waiting = [(root, reason) for root in roots]
        while waiting:
            manifest, because = waiting.pop()
            if manifest.key in why:
                continue
            why[manifest.key] = because
            below = [*made.inputs(manifest.inputs.values()), *made.chunks(manifest)]
            waiting += [(one, f"for {manifest.key}") for one in below]

    def with_reports(drafters: Sequence[Manifest], reason: str) -> None:
        keep(drafters, reason)
        keys = {drafter.key for drafter in drafters}
        keep((m for m in made.manifests if m.stage == "evaluation" and m.inputs.get("drafter") in keys), reason)

    champions = [found for path in (home() / "champions").glob("*.json") if (found := champion_of(path.stem))]
    named = {name for champion in champions for name in (champion.drafter, champion.report)}
    with_reports([m for m in made.manifests if m.key in named], "champion")
    drafters = sorted((m for m in made.manifests if m.stage == "training"), key=lambda m: m.created, reverse=True)
    with_reports(drafters[:last], f"one of the last {last} drafters")
    used = {manifest.key: last_used(manifest.path) for manifest in made.manifests}
    keep((m for m in made.manifests if used[m.key] >= begun - 1), "used by a run")
    keep((m for m in made.manifests if used[m.key] >= recent), "used lately")
    keep((m for m in made.manifests if _is_locked(m.key)), "in use")

    items = []
    for folder in _folders(home() / "in_progress"):
        item = _item("in progress", folder, recent=recent)
        if item.keep:
            keep(made.inputs(_needed(folder)), f"for {folder.name}")
        items.append(item)
    whole = {manifest.path for manifest in made.manifests}
    items += [
        Item(
            stage=f"{m.stage} chunk" if is_chunk(m) else m.stage,
            fingerprint=m.key,
            path=str(m.path),
            bytes=size(m.path),
            used=used[m.key],
            keep=why.get(m.key, ""),
        )
        for m in made.manifests
    ]
    for parent in [*_folders(home() / "artifacts"), home() / CHUNKS]:
        items += [
            _item("incomplete", folder, recent=recent)
            for folder in _folders(parent, hidden=True)
            if folder not in whole and folder != home() / CHUNKS
        ]
    return sorted(items, key=lambda item: (bool(item.keep), -item.bytes))


def _folders(parent: Path, *, hidden: bool = False) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and (hidden or not path.name.startswith(".")))


def _item(stage: str, folder: Path, *, recent: float) -> Item:
    """Of a folder without manifest: work that was begun, or what is left of it."""
    used, keep = last_used(folder), ""
    name, _, pid = folder.name.lstrip(".").rpartition(f".{HOST}.")
    if name:  # the scratch of a process of this machine
        keep = "being written" if is_running(pid) else ""
    elif _is_locked(folder.name):
        keep = "in use"
    elif used >= recent:
        keep = "used lately"
    return Item(stage=stage, fingerprint=folder.name, path=str(folder), bytes=size(folder), used=used, keep=keep)


def _is_locked(key: str) -> bool:
    """Whether someone makes the artifact of that key, or a part of what is in progress for it."""
    return any(is_held(path) for path in _locks(key))


def _locks(name: str) -> list[Path]:
    """Of an artifact, or of what is in progress for it: the task's, and the trainer's own."""
    key = name.removesuffix("-fresh")  # answers that are asked for anew
    return [home() / "locks" / f"{key}.lock", home() / "locks" / f"{key}-trainer.lock"]


def _needed(folder: Path) -> list[str]:
    """Inputs of a training that was interrupted, from its newest checkpoint; none where there is no readable one."""
    for path in sorted(folder.glob(CHECKPOINTS), reverse=True):
        try:
            return list(json.loads(json.loads(path.read_text())["text"])["settings"]["inputs"].values())
        except (OSError, ValueError, KeyError):  # training falls back to the one before, too
            continue
    return []


def last_used(folder: Path) -> float:
    """When it, or a part of it, was written or last found by a run: the newest time stamp in it."""
    newest = folder.stat().st_mtime
    for path in _walk(folder):
        newest = max(newest, path.lstat().st_mtime)
    return newest


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in _walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            if path.exists() or path.is_symlink():  # a run may have taken it away meanwhile
                yield path


def remove(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Remove what may go of a survey: (removed, left because someone began to use it since)."""
    removed: list[Item] = []
    left: list[Item] = []
    for item in items:
        if not item.keep:
            (removed if _remove(Path(item.path), item.used) else left).append(item)
    return removed, left


def _remove(folder: Path, used: float) -> bool:
    (home() / "locks").mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:  # a run that makes or looks for it waits, and then makes it again
            for lock in _locks(folder.name):
                held.enter_context(FileLock(lock).acquire(timeout=0))
        except Timeout:
            return False
        if not folder.exists() or last_used(folder) > used:
            return False
        # all at once, and looked at again: a run that uses a part of it does not wait for the lock of the whole
        aside = folder.with_name(f".{folder.name.lstrip('.')}.{HOST}.{os.getpid()}")
        folder.rename(aside)
        if last_used(aside) > used and not folder.exists():
            aside.rename(folder)
            return False
        shutil.rmtree(aside)
        (home() / "records" / folder.name).unlink(missing_ok=True)
    return True


# --- how much there is


def usage_and_quota() -> tuple[int, int | None]:
    """Bytes under the data root, and the quota of DFLASH_QUOTA_GB; (0, None) where there is no quota.

    Raises ValueError for a quota that is no number.
    """
    text = os.environ.get(QUOTA)
    if not text:
        return 0, None
    try:
        quota = float(text)
    except ValueError:
        raise ValueError(f"{QUOTA}={text}: give a number of GB, such as 500") from None
    return size(home()), round(quota * GB)


def over_quota(used: int, quota: int) -> str:
    """What to say when there is more than the quota."""
    return f"{home()} holds {used / GB:.3g} GB, more than the {quota / GB:g} GB of {QUOTA}; dflash gc shows what may go"


def facts(manifest: Manifest, made: Lineage) -> Mapping[str, object]:
    """All there is to say of an artifact: its manifest, what its inputs are, what was made from it."""
    champions = [path.stem for path in (home() / "champions").glob("*.json")]
    return {
        "stage": manifest.stage,
        "fingerprint": manifest.key,
        "identity": manifest.identity,
        "path": str(manifest.path),
        "bytes": size(manifest.path),
        "files": len(manifest.files),
        "created": manifest.created.isoformat(timespec="seconds"),
        "used": datetime.fromtimestamp(last_used(manifest.path), UTC).isoformat(timespec="seconds"),
        "recipe": manifest.recipe,
        "config": manifest.config,
        "inputs": {
            name: ", ".join(one.key for one in made.inputs([value])) or value for name, value in manifest.inputs.items()
        },
        "used_by": [one.key for one in made.used_by(manifest)],
        "champion_of": [name for name in champions if (c := champion_of(name)) and c.drafter == manifest.key],
        "summary": manifest.summary,
    }
