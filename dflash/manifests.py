"""Artifacts: what passes between stages, where it lies, how it is published and checked.

An artifact is a folder with a `manifest.json`; a folder without one does not exist. Files are written aside, moved into
place, and the manifest comes last. Knows nothing of models, tensors or Prefect.

    $DFLASH_HOME/artifacts/<stage>/<key>/…     the artifacts
    $DFLASH_HOME/in_progress/<key>/…           what an interrupted stage picks up again
    $DFLASH_HOME/history/ champions/           what evaluations said of drafters (dflash/decoding/)
    $DFLASH_HOME/verifiers/ pins/              verifiers that were converted, and hashes that are remembered
    $DFLASH_HOME/records/ locks/ prefect/      the orchestrator's; wandb/ is that of W&B
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
DAMAGED_MANIFEST = f"{MANIFEST}.damaged"  # of an artifact that a check set aside
HOST = socket.gethostname()  # in names of scratch, as machines that share a disk may have processes of equal numbers


class Damaged(ValueError):
    """An artifact that is missing, incomplete or not what its manifest says. Running its stage again mends it."""


class Progress(Protocol):
    """How a stage says how far it is; called often, must be cheap."""

    def __call__(self, done: float, total: float, note: str = "") -> None: ...


def silent(done: float, total: float, note: str = "") -> None:
    """The progress of those who do not look."""


class FileRecord(BaseModel):
    """One file of an artifact: bytes, content hash, and the time stamp that spares hashing it again."""

    model_config = ConfigDict(frozen=True)
    size: int
    sha256: str
    mtime_ns: int


class Artifact(BaseModel):
    """The small record that travels between stages; the bytes stay on disk.

    `key` is the fingerprint of all inputs and the folder's name. `identity` is what stages downstream build
    their keys from: the content's hash where bytes are deterministic, else the key.
    """

    model_config = ConfigDict(frozen=True)
    stage: str
    key: str
    identity: str
    location: str = Field(description="Folder, relative to the data root, so that a moved root stays valid.")
    summary: dict[str, Any] = Field(default_factory=dict, description="Facts for people and for the next stage.")

    @property
    def path(self) -> Path:
        return home() / self.location


class Manifest(Artifact):
    """An artifact's full record, written last into its folder."""

    recipe: int = Field(description="The stage's RECIPE number: bumped when its output would change.")
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, FileRecord]
    created: datetime

    @property
    def nbytes(self) -> int:
        return sum(record.size for record in self.files.values())

    def artifact(self) -> Artifact:
        return Artifact(**self.model_dump(include=set(Artifact.model_fields)))


class Key(BaseModel):
    """Everything that decides an artifact, and the name that follows from it."""

    model_config = ConfigDict(frozen=True)
    stage: str
    recipe: int
    config: dict[str, Any]
    inputs: dict[str, str]

    def __str__(self) -> str:
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return f"{self.stage}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def location(self) -> str:
        return f"artifacts/{self.stage}/{self}"


def called_by_inputs(manifest: Manifest) -> str:
    """The key that follows from what a manifest says of its inputs; an edited one may call itself otherwise."""
    return str(Key(**manifest.model_dump(include=set(Key.model_fields))))


def home() -> Path:
    """The data root: DFLASH_HOME, else a folder in the user's cache."""
    if chosen := os.environ.get("DFLASH_HOME"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "dflash"


def in_progress(key: Key | str) -> Path:
    """Where a stage keeps what it needs to continue after an interruption; made if missing."""
    path = home() / "in_progress" / str(key)
    path.mkdir(parents=True, exist_ok=True)
    return path


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Content hash, remembered by (size, time stamp) beside the data: hashing 16 GB on every run would be felt."""
    stat = path.stat()
    memo = home() / "pins" / f"{text_sha256(str(path.absolute()))[:16]}-{stat.st_size}-{stat.st_mtime_ns}"
    if memo.exists():
        return memo.read_text()
    digest = file_sha256(path)
    memo.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(memo, digest)
    return digest


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, content: str | bytes) -> None:
    """All of it or nothing, also after a power cut."""
    aside = path.with_name(f".{path.name}.{HOST}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _record(path: Path) -> FileRecord:
    stat = path.stat()
    return FileRecord(size=stat.st_size, sha256=file_sha256(path), mtime_ns=stat.st_mtime_ns)


def _files(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }


def is_running(pid: str) -> bool:
    """Whether a process of this machine has that number."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):  # someone else's process; no number
        return True
    return True


def is_held(lock: Path) -> bool:
    """Whether a process holds the lock of that file."""
    if not lock.exists():
        return False
    try:
        with FileLock(lock).acquire(timeout=0):
            return False
    except Timeout:
        return True


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove the scratch of attempts at `name` in the folder whose process, one of this machine, was killed."""
    for scratch in folder.glob(f".{name}.{HOST}.*"):
        if not is_running(scratch.name.rpartition(f".{HOST}.")[2]):
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def naming_a_full_disk(folder: Path) -> Iterator[None]:
    """An OSError with a remedy for whatever a library raises where the disk is full while it writes below `folder`."""
    try:
        yield
    except Exception as error:
        said = re.search(r"os error (\d+)", str(error))  # those written in Rust have the number in their text alone
        number = error.errno if isinstance(error, OSError) else int(said[1]) if said else None
        if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(home()).free
        raise OSError(
            number,
            f"{os.strerror(number)}: without what was written here {free:,} bytes are free, and a quota or a limit of "
            "the size of files may allow fewer; make room, or set DFLASH_HOME to a larger disk",
            str(folder),
        ) from error


@contextmanager
def publish(
    key: Key,
    *,
    summary: dict[str, Any],
    location: str = "",
    content_identity: bool = False,
    known: Mapping[str, FileRecord] | None = None,
) -> Iterator[tuple[Path, Callable[[], Artifact]]]:
    """Yields a scratch folder to write into and a function that returns the artifact once it is published.

    On a clean exit every entry of the folder is moved to its place, unless the same is there already, and the manifest
    is written last; on an exception nothing is left. `summary` may be filled while writing. `location` overrides the
    place (parts of a larger artifact). `content_identity`: the identity is the hash of the files instead of the key.
    `known` holds records of files that are in place already and belong to this artifact.
    """
    final = home() / (location or key.location)
    scratch = final.parent / f".{final.name}.{HOST}.{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)  # of an earlier process of this number
    remove_leftovers(final.parent, final.name)
    scratch.mkdir(parents=True)
    published: list[Artifact] = []

    def result() -> Artifact:
        assert published, "the artifact exists only after the with block"
        return published[0]

    with naming_a_full_disk(final):
        try:
            yield scratch, result
            files = {name: _record(path) for name, path in _files(scratch).items()} | dict(known or {})
            content = text_sha256(json.dumps(_hashes(files)))[:16]
            manifest = Manifest(
                **key.model_dump(exclude={"stage"}),
                stage=key.stage,
                key=str(key),
                identity=content if content_identity else str(key),
                location=location or key.location,
                summary=summary,
                files=files,
                created=datetime.now(UTC),
            )
            for name in _files(scratch):
                with (scratch / name).open("rb") as file:
                    os.fsync(file.fileno())
            lock = home() / "locks" / f"publish-{text_sha256(manifest.location)[:12]}.lock"
            lock.parent.mkdir(exist_ok=True)
            final.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                if there := _equal_one(manifest):
                    manifest = manifest.model_copy(update={"files": there.files})  # with their time stamps
                else:
                    _move_into_place(scratch, final)
                write_atomically(final / MANIFEST, manifest.model_dump_json(indent=1))
            published.append(manifest.artifact())
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _equal_one(wanted: Manifest) -> Manifest | None:
    """What is there, if it is whole and of equal content: whoever made it just now may be using it."""
    try:
        found = load_manifest(wanted.path)
        if found.key != wanted.key or _hashes(found.files) != _hashes(wanted.files):
            return None
        return verify(found.artifact(), deep=True)
    except Damaged:
        return None


def _hashes(files: Mapping[str, FileRecord]) -> dict[str, str]:
    return {name: record.sha256 for name, record in sorted(files.items())}


def _move_into_place(scratch: Path, final: Path) -> None:
    """While an artifact is being replaced it does not exist: its manifest goes first."""
    (final / MANIFEST).unlink(missing_ok=True)
    for entry in scratch.iterdir():
        target = final / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.replace(target)


def load_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact's folder. Raises Damaged where there is none or it cannot be read."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{folder}: no {MANIFEST}, so the artifact is incomplete; run its stage again") from None
    except ValueError as error:
        raise Damaged(f"{path}: unreadable ({str(error).splitlines()[0]}); run its stage again") from None


def verify(artifact: Artifact, *, deep: bool = False) -> Manifest:
    """Check that an artifact is there and whole; raises Damaged naming the file. Its manifest's time stamp says when.

    Sizes and time stamps first: a file touched since it was published is hashed, an untouched one is trusted unless
    `deep`. A file that was copied, and so has another time stamp but the right content, gets its time stamp back.
    """
    manifest = load_manifest(artifact.path)
    if manifest.key != artifact.key or manifest.identity != artifact.identity:
        raise Damaged(f"{artifact.path}: holds {manifest.key}, expected {artifact.key}; run its stage again")
    try:
        os.utime(artifact.path / MANIFEST)  # before the files are looked at, so that cleaning up leaves them
    except FileNotFoundError:
        raise Damaged(f"{artifact.path}: removed just now; run its stage again") from None
    check_files(artifact, manifest.files, deep=deep)
    return manifest


def check_files(artifact: Artifact, files: Mapping[str, FileRecord], *, deep: bool) -> None:
    """The same for some of its files."""
    for name, record in files.items():
        path = artifact.path / name
        try:
            stat = path.stat()
        except FileNotFoundError:
            raise Damaged(f"{path}: missing; run the {artifact.stage} stage again") from None
        if stat.st_size != record.size:
            raise Damaged(f"{path}: {stat.st_size} bytes, expected {record.size}; run the {artifact.stage} stage again")
        if deep or stat.st_mtime_ns != record.mtime_ns:
            if file_sha256(path) != record.sha256:
                raise Damaged(f"{path}: content differs from its checksum; run the {artifact.stage} stage again")
            os.utime(path, ns=(stat.st_atime_ns, record.mtime_ns))


def find(key: Key, *, location: str = "", deep: bool = False) -> Artifact | None:
    """The whole artifact of a key, or None where it was never made. Raises Damaged where it is there but not whole.

    An artifact of another key at that location is none of this one.
    """
    folder = home() / (location or key.location)
    if not (folder / MANIFEST).exists():
        return None
    manifest = load_manifest(folder)
    if manifest.key != str(key):
        return None
    verify(manifest, deep=deep)
    return manifest.artifact()


def manifests() -> list[Manifest]:
    """All artifacts under the data root, newest first; unreadable ones are warned of. Shards are parts, not listed."""
    found = []
    for path in sorted((home() / "artifacts").glob(f"*/*/{MANIFEST}")):
        if not path.parent.name.startswith("."):
            try:
                found.append(load_manifest(path.parent))
            except Damaged as damage:
                log.warning("%s", damage)
    return sorted(found, key=lambda manifest: manifest.created, reverse=True)
