"""Shards whose bulk lies in an object store: putting it there, checking it, reading it. The home of zarr and obstore.

`Objects` is for other files there.

Under a URL lies a shard's whole Zarr group, and as manifest.json, put last, its record: sizes and checksums. Without
that nothing there counts. The same record stays here, with the URL, as a small file. The URL ends in a hash of the
content, so that it is safe to upload twice, and twice at once: one name never has two contents. Credentials come from
the environment (AWS_…, GOOGLE_…) alone. Knows no tensors, and not what the rows mean.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
from pydantic import BaseModel, ConfigDict

from dflash.manifests import MANIFEST, Damaged, file_sha256, text_sha256

try:
    import obstore
except ImportError:
    raise ValueError("object stores need a package: pip install 'dflash[cloud]'") from None

import zarr
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import MemoryStore, from_url
from zarr.abc.store import ByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import ObjectStore, WrapperStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket
    from obstore.store import RetryConfig

PART_BYTES = 16 * 2**20  # of an upload; S3 allows 10,000 of them, and files have up to 16 GiB
REQUESTS = 32  # at once, of all readers of a process
RETRIES: "RetryConfig" = {"max_retries": 6, "retry_timeout": timedelta(minutes=3)}


class ObjectRecord(BaseModel):
    """One object: bytes and content hash."""

    model_config = ConfigDict(frozen=True)
    size: int
    sha256: str


class Record(BaseModel):
    """A shard in an object store."""

    model_config = ConfigDict(frozen=True)
    url: str
    files: dict[str, ObjectRecord]


class _Complete(WrapperStore[ObjectStore]):
    """What is not there is an error; Zarr takes it for zeros. Where the chunks of a file begin is asked for once."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._indices: dict[tuple[str, int], Buffer] = {}

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        index = (key, byte_range.suffix) if isinstance(byte_range, SuffixByteRequest) else None
        if index in self._indices:
            return self._indices[index]
        found = await super().get(key, prototype, byte_range)
        if found is None:
            raise Damaged(f"{key}: missing")
        if index is not None:
            self._indices[index] = found
        return found


@lru_cache(maxsize=8)
def _bucket(root: str) -> "Bucket":
    """Kept, since a memory:// has its objects only as long."""
    return MemoryStore() if root.startswith("memory:") else from_url(root, retry_config=RETRIES)


def _place(url: str) -> tuple["Bucket", str]:
    """The bucket, and the path in it."""
    parts = urlsplit(url)
    return _bucket(f"{parts.scheme}://{parts.netloc}"), parts.path.strip("/")


@contextmanager
def _short_errors(url: str) -> Iterator[None]:
    """The store's own errors fill a page; as OSError, since they may pass."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        reason = " ".join(str(error).partition("Debug source:")[0].split())
        raise OSError(
            f"{url}: {reason}; address and credentials come from the environment, such as AWS_ENDPOINT_URL, "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or GOOGLE_APPLICATION_CREDENTIALS"
        ) from error


def check_storage(storage: str) -> None:
    """Raises ValueError where the storage cannot be listed: it is known then before hours of work."""
    bucket, path = _place(storage)
    try:
        with _short_errors(storage):
            next(iter(obstore.list(bucket, path, chunk_size=1)), None)
    except OSError as error:
        raise ValueError(f"extraction.storage: {error}") from None


def move(folder: Path, destination: str, *, record: Path) -> Record:
    """Upload a shard, commit it, and drop its arrays here; `record`, a file of the folder, says where they are.

    The content's hash is added to the destination. What lies there already is written again, as it may be damaged.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {name: ObjectRecord(size=path.stat().st_size, sha256=file_sha256(path)) for name, path in paths.items()}
    content = text_sha256(json.dumps({name: file.sha256 for name, file in files.items()}))[:12]
    made = Record(url=f"{destination}-{content}", files=files)
    text = made.model_dump_json(indent=1).encode()
    bucket, prefix = _place(made.url)
    with _short_errors(made.url):
        for name, path in paths.items():
            obstore.put(bucket, f"{prefix}/{name}", path, chunk_size=PART_BYTES, max_concurrency=4)
        obstore.put(bucket, f"{prefix}/{MANIFEST}", text)
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    record.write_bytes(text)
    return made


def load(record: Path) -> Record:
    """The record that `move` wrote. Raises Damaged where it cannot be read."""
    try:
        return Record.model_validate_json(record.read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{record}: unreadable ({str(error).splitlines()[0]})") from None


def check(record: Path, *, deep: bool = False) -> None:
    """Raises Damaged where an object of the shard is missing or has another size; `deep` reads all for their checksums.

    Raises OSError where the store does not answer.
    """
    shard = load(record)
    bucket, prefix = _place(shard.url)
    committed = ObjectRecord(size=record.stat().st_size, sha256=file_sha256(record))
    with _short_errors(shard.url):
        sizes = {found["path"]: found["size"] for page in obstore.list(bucket, prefix) for found in page}
        for name, wanted in {MANIFEST: committed, **shard.files}.items():
            size = sizes.get(f"{prefix}/{name}")
            if size is None:
                raise Damaged(f"{shard.url}/{name}: missing")
            if size != wanted.size:
                raise Damaged(f"{shard.url}/{name}: {size} bytes, expected {wanted.size}")
            if deep and _sha256(bucket, f"{prefix}/{name}") != wanted.sha256:
                raise Damaged(f"{shard.url}/{name}: content differs from its checksum")


class Objects:
    """The objects under a URL, by what follows it. Raises OSError where the store does not answer or refuses."""

    def __init__(self, url: str) -> None:
        self._url = url
        with _short_errors(url):
            self._bucket, self._prefix = _place(url)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/")

    def sizes(self, prefix: str) -> dict[str, int]:
        """Of all objects under a prefix, by their names."""
        with _short_errors(self._url):
            pages = list(obstore.list(self._bucket, self._path(prefix) or None))
        start = len(self._prefix) + 1 if self._prefix else 0
        return {found["path"][start:]: found["size"] for page in pages for found in page}

    def read(self, name: str) -> bytes | None:
        """A small object; None where there is none."""
        with _short_errors(self._url):
            try:
                return bytes(obstore.get(self._bucket, self._path(name)).bytes())
            except (NotFoundError, FileNotFoundError):
                return None

    def stream(self, name: str, offset: int) -> Iterator[bytes]:
        """A large one from a byte on, in parts. Raises FileNotFoundError where there is none."""
        with _short_errors(self._url):
            try:
                found = obstore.get(self._bucket, self._path(name), options={"range": {"offset": offset}})
            except (NotFoundError, FileNotFoundError):
                missing = True
            else:
                missing = False
                yield from (bytes(part) for part in found.stream(min_chunk_size=PART_BYTES))
        if missing:
            raise FileNotFoundError(f"{self._url}/{name}")

    def put(self, name: str, content: Path | bytes) -> None:
        """All of it or nothing."""
        with _short_errors(self._url):
            obstore.put(self._bucket, self._path(name), content, chunk_size=PART_BYTES, max_concurrency=4)


def _sha256(bucket: "Bucket", path: str) -> str:
    digest = hashlib.sha256()
    for part in obstore.get(bucket, path).stream(min_chunk_size=PART_BYTES):
        digest.update(part)
    return digest.hexdigest()


class RemoteArray:
    """Reads runs of rows, as raw.ArrayReader does: from any thread, or pickled. Chunks are always checked, by Zarr.

    Raises Damaged for an array that is not whole, OSError where the store does not answer.
    """

    def __init__(self, record: Path, name: str) -> None:
        self._record = record
        self._url = f"{load(record).url}/{name}"
        with self._errors():
            array = _open(self._url)
        self.dtype, self._row_shape = array.dtype.newbyteorder("<"), array.shape[1:]

    def read(self, start: int, stop: int, *, verify: bool = True) -> np.ndarray:
        """Rows [start, stop) in memory of their own."""
        out = np.empty((stop - start, *self._row_shape), self.dtype)
        self.read_into(start, out, verify=verify)
        return out

    def read_into(self, start: int, out: np.ndarray, *, verify: bool = True) -> None:
        """Rows [start, start + len(out)) into `out`."""
        del verify
        with self._errors():
            array = _open(self._url)
            end, step = start + len(out), array.chunks[0]
            cuts = [start, *range(start - start % step + step, end, step), end]

            def read_chunk(first: int, last: int) -> None:
                out[first - start : last - start] = array[first:last]

            list(_requests().map(read_chunk, cuts[:-1], cuts[1:]))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with _short_errors(self._url):
                yield
        except Damaged:
            raise
        except (ValueError, OSError) as error:
            check(self._record)  # names the object where one is missing or cut off
            if isinstance(error, ValueError):
                raise Damaged(f"{self._url}: {error}") from None
            raise


@lru_cache(maxsize=1)
def _requests() -> ThreadPoolExecutor:
    """For chunks side by side: Zarr, before 3.3, asks for those of one file one after the other."""
    return ThreadPoolExecutor(REQUESTS, thread_name_prefix="object-store")


@lru_cache(maxsize=1024)
def _open(url: str) -> "zarr.Array":
    bucket, path = _place(url)
    return zarr.open_array(_Complete(ObjectStore(bucket, read_only=True)), path=path, mode="r", zarr_format=3)
