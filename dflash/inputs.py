"""Which files a source of conversations names, and what identifies their content. Reads no row.

A file, a folder or a glob of conversation files, a bundled sample, or a Hugging Face dataset (`hub:OWNER/NAME`).
"""

import glob
import os
from functools import cache
from pathlib import Path

from dflash.bundled import resolve
from dflash.config import SourceConfig
from dflash.manifests import remembered_sha256

HUB = "hub:"
FORMATS = (".jsonl", ".ndjson", ".json", ".parquet")
COMPRESSIONS = (".gz", ".zst")


def format_of(path: Path) -> str:
    """The format by the file's name, `.jsonl`, `.json` or `.parquet`. Raises ValueError for another one."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if packed:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if packed and suffix == ".parquet":
        raise ValueError(f"{path}: a Parquet file is compressed inside, and only read as such; unpack it")
    if suffix not in FORMATS:
        raise ValueError(
            f"{path}: unknown kind of file; expected {', '.join(FORMATS)}, maybe with {' or '.join(COMPRESSIONS)}"
        )
    return ".jsonl" if suffix == ".ndjson" else suffix


def category_of(path: Path) -> str:
    """The category of rows that name none: the file's name without its endings."""
    return path.name.partition(".")[0] or path.name


def files_of(source: SourceConfig) -> list[Path]:
    """The files of a source that is no hub dataset, sorted. Raises ValueError where there are none, or one is odd."""
    try:
        files = _files(source.path)
    except PermissionError as error:
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror}); change its permissions") from None
    for path in files:
        format_of(path)
    return files


def _files(name: str) -> list[Path]:
    if any(character in name for character in "*?[") and not os.path.lexists(name):
        found = [Path(name) for name in sorted(glob.glob(str(Path(name).expanduser()), recursive=True))]
        files = [path for path in found if path.is_file()]
        if not files:
            raise ValueError(f"{name}: no file matches this pattern")
        return files
    path = resolve(name)
    if path.is_dir():
        files = _files_in(path)
        if not files:
            raise ValueError(f"{path}: the folder holds no {', '.join(FORMATS)} file")
        return files
    if path.is_file():
        return [path]
    raise ValueError(f"{path}: no such prompt file; give a file, folder, glob, bundled:NAME or hub:OWNER/NAME")


def _files_in(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:  # unasked, walking is silent about a folder that cannot be read
        raise ValueError(f"{error.filename}: the folder cannot be read ({error.strerror}); change its permissions")

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]  # such as .git: not even walked through
        found += [Path(place) / name for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file() and _is_conversations(path))


def _is_conversations(path: Path) -> bool:
    try:
        format_of(path)
    except ValueError:
        return False
    return True


def identity_of(source: SourceConfig) -> str:
    """What the source's rows are: hashes of its files, or the pinned revision of a hub dataset."""
    if source.path.startswith(HUB):
        name = hub_name(source)
        # of a local folder only the name, which gives rows their category: where it lies changes nothing
        shown = category_of(Path(name)) if Path(name).is_dir() else name
        return f"{HUB}{shown}:{source.subset}:{source.split}:{hub_revision(source)}"
    try:
        return ",".join(f"{category_of(path)}:{remembered_sha256(path)}" for path in files_of(source))
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror}); change its permissions") from None


def hub_name(source: SourceConfig) -> str:
    """What follows `hub:`, a dataset's name or a folder. Raises ValueError where nothing does."""
    name = source.path.removeprefix(HUB).strip()
    if not name:
        raise ValueError(f"{source.path}: no dataset is named; give {HUB}OWNER/NAME, or {HUB} and a downloaded folder")
    return name


def hub_revision(source: SourceConfig) -> str:
    """The commit of a hub dataset; for a local folder in its place, the hash of its files."""
    name = hub_name(source)
    if Path(name).is_dir():
        return identity_of(source.model_copy(update={"path": name}))
    return _commit(name, source.revision)


@cache  # asked once per process: the rows that are read are those of the key
def _commit(name: str, revision: str) -> str:
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    # whatever it is: which HTTP package is underneath, and so how a missing network looks, changes with the version
    except Exception as error:
        raise ValueError(
            f"{HUB}{name} at {revision!r}: not reachable on the hub ({type(error).__name__}); check the name "
            "and the network, or give the path of a downloaded folder"
        ) from error
