"""A deep check of all artifacts. What is damaged is set aside, so that the next run makes it again, and nothing else.

Shards and other parts of an artifact are checked, and set aside, by themselves.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from dflash.hidden.store import HiddenStates, check_parts, verify_shard
from dflash.manifests import (
    DAMAGED_MANIFEST,
    MANIFEST,
    Damaged,
    Manifest,
    called_by_inputs,
    check_files,
    home,
    load_manifest,
)


class Verdict(BaseModel):
    """What was found of an artifact, or of a part of one. `damage` is empty where it is whole."""

    stage: str
    fingerprint: str
    part: str = ""
    path: str
    bytes: int
    damage: str = ""


def verify_all() -> Iterator[Verdict]:
    """Read every byte of every artifact: parts first, then the wholes. Raises OSError where something is unreadable."""
    root = home() / "artifacts"
    folders = [
        path.parent
        for path in root.rglob(MANIFEST)
        if not any(name.startswith(".") for name in path.relative_to(root).parts)
    ]
    parts: dict[Path, bool] = {}  # whether they are whole
    for folder in sorted(folders, key=lambda folder: (-len(folder.parts), folder)):
        stage, *names = folder.relative_to(root).parts
        fingerprint = next((name for name in names if name.startswith(f"{stage}-")), folder.name)
        part = "/".join(name for name in names if name != fingerprint)
        verdict = Verdict(stage=stage, fingerprint=fingerprint, part=part, path=str(folder), bytes=0)
        try:
            manifest = load_manifest(folder)
            verdict.bytes = manifest.nbytes
            _check(folder, manifest, parts)
        except Damaged as damage:
            verdict.damage = str(damage)
            if (folder / MANIFEST).exists():  # a shard's is away already
                (folder / MANIFEST).rename(folder / DAMAGED_MANIFEST)
        parts[folder] = not verdict.damage
        yield verdict


def _check(folder: Path, manifest: Manifest, parts: Mapping[Path, bool]) -> None:
    """Raises Damaged. Files of `parts`, but for their manifests, were read before; of those not whole it was said."""
    key = called_by_inputs(manifest)
    if manifest.key != key or home() / manifest.location != folder:
        raise Damaged(f"{folder}: holds {manifest.key} of {manifest.location}, which its inputs call {key}")
    if folder.parent.name == "shards":
        verify_shard(folder, deep=True)
        return
    inside = {part for part in parts if folder in part.parents}
    damaged = {part for part in inside if not parts[part]}
    check_parts(manifest, but=damaged)
    own = {name: record for name, record in manifest.files.items() if not inside.intersection((folder / name).parents)}
    check_files(manifest, own, deep=True)
    if manifest.stage == "extraction" and not damaged:
        _check_lengths(folder)


def _check_lengths(folder: Path) -> None:
    """Raises Damaged where shards are of another format, or a row of the index is not where its shard has one."""
    try:
        states = HiddenStates.open(folder)
    except ValueError as error:
        raise Damaged(str(error)) from error
    rows: dict[int, set[tuple[int, int]]] = {}
    for row in states.rows:
        if row.shard not in rows:
            count = load_manifest(folder / "shards" / f"{row.shard:04d}").summary["rows"]
            rows[row.shard] = set(pairwise(states.array(row.shard, "offsets").read(0, count + 1).tolist()))
        if (row.start, row.start + row.length) not in rows[row.shard]:
            raise Damaged(f"{folder}: row {row.id} is not at {row.start} in shard {row.shard}; seal the shards again")
