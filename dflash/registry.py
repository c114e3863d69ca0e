"""Registry: drafters in a folder, an object store or on the hub, under names that others ask for.

    drafters/drafter-<hash>/…          the files of each, and last of all files.json: their sizes and checksums
    latest.json  champion.json         which drafter that is now, written when all of it is there

The hash is that of the checksums, so that a name never stands for two contents, and what comes out is what went in. On
the hub a drafter is a commit: its files at the top, where engines look for them; `latest` is main, `champion` and the
drafter's name are tags.
Nothing is sent but by `push`; credentials come from the environment alone. Knows no model.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.config import bucket_url
from dflash.export.importing import check_sums
from dflash.inputs import HUB
from dflash.manifests import DAMAGED_MANIFEST, MANIFEST, file_sha256, home, text_sha256, write_atomically

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

log = logging.getLogger(__name__)

ALIASES = ("latest", "champion")
LATEST, CHAMPION = ALIASES
FILES = "files.json"
DRAFTERS = "drafters"
OWN_NAME = r"drafter-[0-9a-f]{12}"
PART_BYTES = 1 << 20


class FileEntry(BaseModel):
    """One file of a drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int
    sha256: str


class Listing(BaseModel):
    """All files of a drafter, by their paths within its folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    files: dict[str, FileEntry]

    @property
    def name(self) -> str:
        content = json.dumps({name: entry.sha256 for name, entry in sorted(self.files.items())})
        return f"drafter-{text_sha256(content)[:12]}"


class Alias(BaseModel):
    """Which drafter an alias stands for."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    drafter: str = Field(pattern=f"^{OWN_NAME}$")
    set: str


class Pushed(NamedTuple):
    """A drafter that is in a registry now; `sent` are the bytes of its files that were not there yet (hub: in main)."""

    drafter: str
    aliases: tuple[str, ...]
    sent: int


class Store(Protocol):
    """Where a registry lies: names with slashes in them, and bytes. What is put is there whole or not at all."""

    def sizes(self, prefix: str) -> dict[str, int]: ...
    def read(self, name: str) -> bytes | None: ...
    def stream(self, name: str, offset: int) -> Iterator[bytes]: ...
    def put(self, name: str, content: Path | bytes) -> None: ...


class FolderStore:
    """A registry in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def refuse_others(self) -> None:
        """Raises ValueError where the folder holds something, but no drafters."""
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []
        if names and DRAFTERS not in names:
            raise ValueError(f"{self.folder} holds {names[0]}, so it is no registry of drafters; give another place")

    def sizes(self, prefix: str) -> dict[str, int]:
        paths = [path for path in (self.folder / prefix).rglob("*") if path.is_file() and not path.name.startswith(".")]
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def stream(self, name: str, offset: int) -> Iterator[bytes]:
        with (self.folder / name).open("rb") as file:
            file.seek(offset)
            while part := file.read(PART_BYTES):
                yield part

    def put(self, name: str, content: Path | bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            write_atomically(path, content)
            return
        aside = path.with_name(f".{path.name}.part")
        with content.open("rb") as source, aside.open("wb") as target:
            shutil.copyfileobj(source, target, PART_BYTES)
            target.flush()
            os.fsync(target.fileno())
        aside.replace(path)


def push(source: Path, target: str, *, champion: bool) -> Pushed:
    """Bring a drafter's folder into a registry and make it `latest`, and the `champion` where asked.

    `target` is a folder, s3://bucket/path, gs://bucket/path or hub:OWNER/NAME. What is there already, by its checksum,
    is not sent again, so that an interrupted push is continued by the same call, and a damaged one mended. Raises
    ValueError, in one line, for what is no drafter or not whole, for an artifact that was not exported, for a target
    that holds something else, and where it cannot be written.
    """
    source = source.expanduser()
    listing = _list(source)
    if target.startswith(HUB):
        return _push_to_hub(source, _hub_id(target), listing, champion=champion)
    store, prefix = store_of(target), f"{DRAFTERS}/{listing.name}"
    with _problems(target):
        if isinstance(store, FolderStore):
            store.refuse_others()
        here, sent = store.sizes(prefix), 0
        known = store.read(f"{prefix}/{FILES}") is not None
        for name, entry in sorted(listing.files.items()):
            if not _holds(store, f"{prefix}/{name}", entry, size=here.get(f"{prefix}/{name}")):
                if known:
                    log.warning("%s/%s/%s is not as it was pushed; it is sent again", target, prefix, name)
                store.put(f"{prefix}/{name}", source / name)
                sent += entry.size
        store.put(f"{prefix}/{FILES}", listing.model_dump_json(indent=1).encode())
        aliases = ALIASES if champion else (LATEST,)
        for alias in aliases:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            store.put(f"{alias}.json", Alias(drafter=listing.name, set=now).model_dump_json(indent=1).encode())
    log.info("%s is %s in %s; bytes sent: %d", listing.name, " and ".join(aliases), target, sent)
    return Pushed(listing.name, aliases, sent)


def pull(source: str, folder: Path, *, name: str) -> str:
    """Bring a drafter out of a registry into a new folder; returns the drafter's name there.

    `name` is latest, champion, or the drafter's own. Files come into a hidden folder beside, each is compared with its
    checksum, and the folder gets its name when all are whole: an interrupted pull is continued by the same call. Raises
    ValueError, in one line, for a name that is not there, a file that is missing or other than pushed, and a folder
    that holds something else.
    """
    folder = folder.expanduser().absolute()
    (home() / "locks").mkdir(parents=True, exist_ok=True)
    with FileLock(home() / "locks" / f"pull-{text_sha256(str(folder))[:12]}.lock"):
        if source.startswith(HUB):
            return _pull_from_hub(_hub_id(source), folder, name=name)
        store = store_of(source)
        with _problems(source):
            name = _resolve(store, source, name)
            prefix = f"{DRAFTERS}/{name}"
            content = store.read(f"{prefix}/{FILES}")
            if content is None:
                raise ValueError(f"{source}/{prefix} was never pushed whole; push it again")
            listing = _listing(content, place=f"{source}/{prefix}/{FILES}")
            if listing.name != name:
                raise ValueError(f"{source}/{prefix}/{FILES} is of {listing.name}, not of {name}; push it again")
            if _is_there(folder, listing):
                return name
            aside = folder.with_name(f".{folder.name}.pull")
            aside.mkdir(parents=True, exist_ok=True)
            for file, entry in sorted(listing.files.items()):
                _fetch(store, f"{prefix}/{file}", aside / file, entry, place=f"{source}/{prefix}/{file}")
            _drop_others(aside, listing)
            _publish(aside, folder)
    log.info("%s of %s is in %s", name, source, folder)
    return name


def store_of(place: str) -> Store:
    """Raises ValueError for a URL of an unknown kind, or with credentials in it."""
    if "://" not in place:
        return FolderStore(Path(place).expanduser())
    from dflash.hidden.remote import Objects  # loads zarr and obstore: only for those who need them

    return Objects(bucket_url(place))


@contextmanager
def _problems(place: str) -> Iterator[None]:
    """What the world outside says, as one line with the place."""
    try:
        yield
    except OSError as error:
        said = " ".join(str(error).split())
        shown = said if place in said else f"{place}: {said}"
        raise ValueError(f"{shown}; check the place and your rights there, then run again") from None


def _holds(store: Store, name: str, entry: FileEntry, *, size: int | None) -> bool:
    """Whether a stored file of this size is that one; read whole where the size is right."""
    if size != entry.size:
        return False
    found = hashlib.sha256()
    try:
        for part in store.stream(name, 0):
            found.update(part)
    except FileNotFoundError:  # removed just now
        return False
    return found.hexdigest() == entry.sha256


def _list(source: Path) -> Listing:
    """The files of a drafter's folder, hidden ones left out. Raises ValueError where it is none, or not whole."""
    if any((source / name).is_file() for name in (MANIFEST, DAMAGED_MANIFEST)):
        raise ValueError(f"{source} is an artifact; export it first: dflash export {source} --to FOLDER")
    if not (source / "config.json").is_file() or not any(source.glob("*.safetensors")):
        raise ValueError(
            f"{source} holds no config.json and .safetensors, so it is no drafter; make one with dflash export"
        )
    check_sums(source)
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    names = {path.relative_to(source).as_posix(): path for path in paths}
    shown = {name: path for name, path in names.items() if not any(part.startswith(".") for part in name.split("/"))}
    if FILES in shown:
        raise ValueError(f"{source / FILES}: a registry has a file of this name; rename it")
    return Listing(
        files={name: FileEntry(size=path.stat().st_size, sha256=file_sha256(path)) for name, path in shown.items()}
    )


def _listing(content: bytes, *, place: str) -> Listing:
    try:
        listing = Listing.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{place} is damaged ({error.errors()[0]['msg']}); push the drafter again") from None
    for name in listing.files:
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name or path.parts[0].startswith("."):
            raise ValueError(f"{place} names {name!r}, which is no file of a drafter; do not trust this registry")
    return listing


def _is_own(name: str) -> bool:
    """Whether a name is a drafter's own, not an alias. Raises ValueError where it is neither."""
    if name not in ALIASES and not re.fullmatch(OWN_NAME, name):
        raise ValueError(f"{name!r} is unknown; give {LATEST}, {CHAMPION} or a drafter's own, drafter-0123456789ab")
    return name not in ALIASES


def _resolve(store: Store, source: str, name: str) -> str:
    """The drafter that an alias stands for, or the name itself."""
    if _is_own(name):
        return name
    content = store.read(f"{name}.json")
    if content is None:
        others = [alias for alias in ALIASES if store.read(f"{alias}.json")]
        hint = f"it has {' and '.join(others)}" if others else "it has no drafter yet: dflash push FOLDER TARGET"
        raise ValueError(f"{source} has no {name}; {hint}")
    try:
        return Alias.model_validate_json(content).drafter
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"the registry is damaged: {source}/{name}.json has {first['input']!r} ({first['msg']}); push again"
        ) from None


def _fetch(store: Store, name: str, path: Path, entry: FileEntry, *, place: str) -> None:
    """One file, from where an earlier attempt came to, compared with its checksum; twice where it is not the same."""
    if path.exists() and path.stat().st_size == entry.size and file_sha256(path) == entry.sha256:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    for attempt in range(2):
        if attempt or (part.exists() and part.stat().st_size > entry.size):
            part.unlink(missing_ok=True)
        with part.open("ab") as file:
            if file.tell() < entry.size:
                try:
                    for content in store.stream(name, file.tell()):
                        file.write(content)
                except FileNotFoundError:
                    raise ValueError(f"{place} is missing; push the drafter again") from None
        if part.stat().st_size == entry.size and file_sha256(part) == entry.sha256:
            part.replace(path)
            return
    size = part.stat().st_size
    part.unlink()
    raise ValueError(f"{place} differs from its checksum ({size} of {entry.size} bytes); push the drafter again")


def _is_there(folder: Path, listing: Listing) -> bool:
    """Whether the folder is that drafter already. Raises ValueError where it holds something else."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder that does not exist")
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    if not found:
        return False
    same = found.keys() == listing.files.keys()
    if same and all(file_sha256(path) == listing.files[name].sha256 for name, path in found.items()):
        return True
    raise ValueError(f"{folder} holds something else than {listing.name}; give a folder that does not exist")


def _drop_others(folder: Path, listing: Listing) -> None:
    """What an earlier attempt at another drafter left."""
    for path in list(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in listing.files:
            path.unlink()


def _publish(aside: Path, folder: Path) -> None:
    for path in aside.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    aside.replace(folder)  # over an empty one, too


def _hub_id(place: str) -> str:
    name = place.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"{place}: give {HUB}OWNER/NAME")
    return name


def _hub_token() -> str:
    return os.environ.get("HF_TOKEN", "").strip()  # a line end from a file would be refused as a header


def _push_to_hub(source: Path, repo: str, listing: Listing, *, champion: bool) -> Pushed:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile

    if not (token := _hub_token()):
        raise ValueError(f"{HUB}{repo}: HF_TOKEN is not set; put a token that may write there into the environment")
    api = HfApi(token=token)
    with _hub_problems(repo, token):
        api.create_repo(repo, private=True, exist_ok=True)
        tree = api.list_repo_tree(repo, recursive=True)
        there = {file.path: file for file in tree if isinstance(file, RepoFile) and file.path != ".gitattributes"}
    if there and FILES not in there:
        raise ValueError(f"{HUB}{repo} holds {min(there)}, but no drafter that was pushed; give another name")
    with _hub_problems(repo, token):
        added = [CommitOperationAdd(name, source / name) for name in listing.files]
        added.append(CommitOperationAdd(FILES, listing.model_dump_json(indent=1).encode()))
        gone = [CommitOperationDelete(name) for name in sorted(there.keys() - {*listing.files, FILES})]
        commit = api.create_commit(repo, [*added, *gone], commit_message=listing.name)  # all of it or nothing
        for tag in (listing.name, CHAMPION) if champion else (listing.name,):
            _tag(api, repo, tag, commit.oid, token=token)
    new = [name for name, entry in listing.files.items() if not _hub_holds(there.get(name), source / name, entry)]
    sent = sum(listing.files[name].size for name in new)
    return Pushed(listing.name, ALIASES if champion else (LATEST,), sent)


def _hub_holds(file: "RepoFile | None", path: Path, entry: FileEntry) -> bool:
    """Whether a file on the hub is that one. The hub has checksums of large files, and of small ones git's."""
    if file is None or file.size != entry.size:
        return False
    if file.lfs:
        return file.lfs.sha256 == entry.sha256
    return file.blob_id == hashlib.sha1(b"blob %d\0" % entry.size + path.read_bytes()).hexdigest()


def _tag(api: "HfApi", repo: str, tag: str, commit: str, *, token: str) -> None:
    """Make a tag lead to a commit. The hub moves none, so an old one is deleted first, and put back on a failure."""
    before = next((ref.target_commit for ref in api.list_repo_refs(repo).tags if ref.name == tag), None)
    if before == commit:
        return
    if before:
        api.delete_tag(repo, tag=tag)
    try:
        api.create_tag(repo, tag=tag, revision=commit)
    except BaseException:
        if before:
            try:
                api.create_tag(repo, tag=tag, revision=before, exist_ok=True)
            except Exception as error:  # the first one is raised
                said = _redacted(error, token)
                log.warning("%s%s has no %s now, it was commit %s; push again (%s)", HUB, repo, tag, before, said)
        raise


def _pull_from_hub(repo: str, folder: Path, *, name: str) -> str:
    from huggingface_hub import HfApi

    token = _hub_token()
    own = _is_own(name)
    aside = folder.with_name(f".{folder.name}.pull")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something already; give a folder that does not exist")
    api = HfApi(token=token or False)
    with _hub_problems(repo, token):
        # the commit first: a download by name takes what an earlier attempt left for it where the hub is not reachable
        commit = api.repo_info(repo, revision="main" if name == LATEST else name).sha
        api.snapshot_download(repo, revision=commit, local_dir=aside)
    shutil.rmtree(aside / ".cache", ignore_errors=True)  # the client's own
    if not (aside / FILES).is_file():
        raise ValueError(f"{HUB}{repo} has no {FILES}: it was not pushed by dflash; give its hub id to dflash import")
    listing = _listing((aside / FILES).read_bytes(), place=f"{HUB}{repo}/{FILES}")
    if own and listing.name != name:
        raise ValueError(f"{HUB}{repo} has {listing.name} under the tag {name}; push {name} again")
    for file, entry in listing.files.items():
        if not (aside / file).is_file() or file_sha256(aside / file) != entry.sha256:
            raise ValueError(f"{HUB}{repo}/{file} is missing or differs from its checksum; push the drafter again")
    _drop_others(aside, listing)
    _publish(aside, folder)
    return listing.name


@contextmanager
def _hub_problems(repo: str, token: str) -> Iterator[None]:
    """What the hub's client says, as one line with the place."""
    try:
        yield
    # whatever it is: which HTTP package is underneath, and so how a missing network looks, changes with the version
    except Exception as error:
        raise _of_hub(repo, error, token) from None


def _of_hub(repo: str, error: Exception, token: str) -> ValueError:
    return ValueError(
        f"{HUB}{repo}: {_redacted(error, token)}; check the name, the network and HF_TOKEN in the environment"
    )


def _redacted(error: Exception, token: str) -> str:
    """The error in one line. The token is taken out as it is and as it is quoted, while the text is whole."""
    reason = str(error)
    for shown in (token, repr(token)[1:-1]) if token else ():
        reason = reason.replace(shown, "…")
    return f"{type(error).__name__}: {' '.join(reason.split())[:200] or 'no reason given'}"
