"""Zarr v3 arrays without Zarr: sharded along the first axis, uncompressed, every chunk followed by its CRC-32C.

A file holds the chunks of so many rows one behind the other and ends with their index, which has a checksum too. Any
Zarr v3 reader opens such an array. Here rows go straight between the files and the caller's memory, since Zarr's own
machinery takes ten times as long for the same bytes. A file or chunk that is missing is an error, not zeros. Knows no
tensors, and not what the rows mean. (Zarr calls a file a shard, and its chunks inner chunks.)
"""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from awscrt.checksums import crc32c  # 65 GB/s where others do 33, and other threads run meanwhile

from dflash.manifests import Damaged, write_atomically

METADATA = "zarr.json"
CRC_BYTES = 4
NOWHERE = 2**64 - 1  # offset and size of a chunk that was not written
MOST_PARTS = 512  # of one call; Linux takes 1024
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]

_scratches = threading.local()


def write_group(folder: Path, attributes: Mapping[str, Any]) -> None:
    """Make the folder a Zarr group."""
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    write_atomically(folder / METADATA, json.dumps(metadata, indent=1))


def read_attributes(folder: Path) -> dict[str, Any]:
    """The attributes of a group or an array. Raises Damaged where its metadata is missing or unreadable."""
    return _metadata(folder).get("attributes", {})


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{path}: missing") from None
    except ValueError as error:
        raise Damaged(f"{path}: unreadable ({error})") from None


def _crc(parts: Sequence[np.ndarray | memoryview]) -> int:
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return crc


def _file_path(folder: Path, number: int, ndim: int) -> str:
    return f"{folder}/c/{number}" + "/0" * (ndim - 1)


class ArrayWriter:
    """Appends rows to a new array, with one chunk in memory. Use it in a `with` block.

    A file gets its name when it is whole, and the metadata come last; after an exception in the block there are none.
    `chunk` and `file` are in rows, the second a multiple of the first. Nothing is flushed to the device: whoever
    publishes the folder does that.
    """

    def __init__(
        self,
        folder: Path,
        *,
        row_shape: tuple[int, ...],
        dtype: str,
        chunk: int,
        file: int,
        dimension_names: Sequence[str],
        attributes: Mapping[str, Any],
    ) -> None:
        assert file % chunk == 0
        self.folder = folder
        self.num_rows = 0
        self._attributes = dict(attributes)
        self._dimension_names = list(dimension_names)
        self._file_rows = file
        self._chunk_VF = np.zeros((chunk, *row_shape), np.dtype(dtype).newbyteorder("<"))
        self._filled = 0
        self._index: list[tuple[int, int]] = []  # of the file being written
        self._number = 0
        self._handle: BinaryIO | None = None

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._close()
        finally:
            if self._handle is not None:
                with suppress(OSError):  # a full disk, of which the caller hears already
                    self._handle.close()
                os.unlink(self._handle.name)

    def append(self, rows: np.ndarray) -> None:
        """Add rows at the end; the caller may reuse their memory."""
        chunk = len(self._chunk_VF)
        while len(rows):
            taken = min(len(rows), chunk - self._filled)
            self._chunk_VF[self._filled : self._filled + taken] = rows[:taken]
            self._filled, rows = self._filled + taken, rows[taken:]
            self.num_rows += taken
            if self._filled == chunk:
                self._write_chunk()

    def _path(self) -> str:
        return _file_path(self.folder, self._number, self._chunk_VF.ndim)

    def _write_chunk(self) -> None:
        if self._handle is None:
            os.makedirs(os.path.dirname(self._path()), exist_ok=True)
            self._handle = open(f"{self._path()}.partial", "wb")  # noqa: SIM115 - outlives this call
        content = self._chunk_VF.reshape(-1).view(np.uint8)
        self._index.append((self._handle.tell(), content.nbytes + CRC_BYTES))
        self._handle.write(content.data)
        self._handle.write(_crc([content]).to_bytes(CRC_BYTES, "little"))
        self._filled = 0
        if len(self._index) * len(self._chunk_VF) == self._file_rows:
            self._finish_file()

    def _finish_file(self) -> None:
        assert self._handle is not None
        index = np.full((self._file_rows // len(self._chunk_VF), 2), NOWHERE, "<u8")
        index[: len(self._index)] = self._index
        content = index.reshape(-1).view(np.uint8)
        self._handle.write(content.data)
        self._handle.write(_crc([content]).to_bytes(CRC_BYTES, "little"))
        self._handle.close()
        os.replace(self._handle.name, self._path())
        self._handle, self._index, self._number = None, [], self._number + 1

    def _close(self) -> None:
        if self._filled:
            self._chunk_VF[self._filled :] = 0
            self._write_chunk()
        if self._handle is not None:
            self._finish_file()
        chunk, *row_shape = self._chunk_VF.shape
        metadata = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [self.num_rows, *row_shape],
            "data_type": self._chunk_VF.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [self._file_rows, *row_shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [chunk, *row_shape],
                        "codecs": CODECS,
                        "index_codecs": CODECS,
                        "index_location": "end",
                    },
                }
            ],
            "dimension_names": self._dimension_names,
            "attributes": self._attributes,
        }
        self.folder.mkdir(exist_ok=True)
        write_atomically(self.folder / METADATA, json.dumps(metadata, indent=1))


class ArrayReader:
    """Reads runs of rows. Opens a file for each run and keeps none open: use it from any thread, or pickle it.

    Raises ValueError for an array that is laid out otherwise, and Damaged, naming the file, for one that is not whole.
    """

    def __init__(self, folder: Path) -> None:
        metadata = _metadata(folder)
        self.folder = folder
        try:
            self.shape = tuple(metadata["shape"])
            (codec,) = metadata["codecs"]
            inner = codec["configuration"]
            self._file_rows, *file_shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
            self._chunk_rows, *chunk_shape = inner["chunk_shape"]
            self.dtype = np.dtype(metadata["data_type"]).newbyteorder("<")
            # one-byte types have no byte order, and Zarr then leaves it out
            codecs = [{"name": c["name"], **c.get("configuration", {"endian": "little"})} for c in inner["codecs"]]
            fits = (
                codec["name"] == "sharding_indexed"
                and inner.get("index_location", "end") == "end"
                and inner["index_codecs"] == CODECS
                and [c["name"] for c in codecs] == ["bytes", "crc32c"]
                and codecs[0]["endian"] == "little"
                and metadata["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "/"}}
                and tuple(file_shape) == tuple(chunk_shape) == self.shape[1:]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / METADATA}: not an array that is read here ({error!r}); read it with Zarr"
            ) from None
        if not fits:
            raise ValueError(
                f"{folder / METADATA}: only arrays sharded along the first axis, of bytes and crc32c, are read here; "
                "read it with Zarr"
            )
        self._row_bytes = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        self._chunk_bytes = self._chunk_rows * self._row_bytes
        self._offsets: dict[int, np.ndarray] = {}  # of the chunks of each file touched

    def read(self, start: int, stop: int, *, verify: bool = True) -> np.ndarray:
        """Rows [start, stop) in memory of their own."""
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        self.read_into(start, out, verify=verify)
        return out

    def read_into(self, start: int, out: np.ndarray, *, verify: bool = True) -> None:
        """Rows [start, start + len(out)) into `out`, which is contiguous. `verify`: check every chunk they touch."""
        end = start + len(out)
        if not 0 <= start <= end <= self.shape[0]:
            raise ValueError(f"{self.folder}: rows {start}..{end} of {self.shape[0]}")
        assert (out.dtype, out.shape[1:]) == (self.dtype, self.shape[1:])
        assert out.flags.c_contiguous
        content, done = out.reshape(-1).view(np.uint8).data, start
        while done < end:
            number = done // self._file_rows
            until = min(end, (number + 1) * self._file_rows)
            span = content[(done - start) * self._row_bytes : (until - start) * self._row_bytes]
            self._read_file(number, done - number * self._file_rows, span, verify=verify)
            done = until

    def _read_file(self, number: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Bytes of one file's rows from `start` on."""
        path = _file_path(self.folder, number, len(self.shape))
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise Damaged(f"{path}: missing") from None
        try:
            if number not in self._offsets:
                self._offsets[number] = self._read_index(fd, path)
            first, skip = divmod(start, self._chunk_rows)
            last = -(-(start * self._row_bytes + len(out)) // self._chunk_bytes)
            offsets = self._offsets[number][first:last]
            if (offsets == NOWHERE).any():
                raise Damaged(f"{path}: chunk {first + int((offsets == NOWHERE).argmax())} was never written")
            read = self._read_checked if verify else self._read_unchecked
            read(fd, path, offsets.tolist(), skip * self._row_bytes, out)
        finally:
            os.close(fd)

    def _read_checked(self, fd: int, path: str, offsets: list[int], skip: int, out: memoryview) -> None:
        """Chunk by chunk, so that the checksum finds its bytes in the processor's cache."""
        rim = _scratch(self._chunk_bytes + CRC_BYTES)  # what is read of a chunk only to check it, and its checksum
        done = 0
        for offset in offsets:
            part = out[done : done + self._chunk_bytes - skip]
            rest = self._chunk_bytes - len(part)
            parts, crc = [rim[:skip], part, rim[skip:rest]] if rest else [part], rim[rest : rest + CRC_BYTES]
            _fill(fd, [*parts, crc], offset, self._chunk_bytes + CRC_BYTES, path)
            if _crc(parts) != int.from_bytes(crc, "little"):
                raise Damaged(f"{path}: the chunk at byte {offset} differs from its checksum")
            done, skip = done + len(part), 0

    def _read_unchecked(self, fd: int, path: str, offsets: list[int], skip: int, out: memoryview) -> None:
        """In as few calls as there are gaps between the chunks."""
        rim, start, end, done, size = _scratch(CRC_BYTES), 0, -1, 0, 0
        parts: list[memoryview] = []
        for offset in offsets:
            part = out[done : done + self._chunk_bytes - skip]
            if offset != end or len(parts) >= MOST_PARTS:
                if parts:
                    _fill(fd, parts, start, size, path)
                parts, start, size = [], offset + skip, 0
            else:
                parts.append(rim)
                size += CRC_BYTES
            parts.append(part)
            done, size = done + len(part), size + len(part)
            end, skip = offset + self._chunk_bytes + CRC_BYTES, 0
        _fill(fd, parts, start, size, path)

    def _read_index(self, fd: int, path: str) -> np.ndarray:
        size, count = os.fstat(fd).st_size, self._file_rows // self._chunk_rows
        content = np.empty(16 * count + CRC_BYTES, np.uint8)
        if size < len(content):
            raise Damaged(f"{path}: {size} bytes, too few for an index")
        _fill(fd, [content.data], size - len(content), len(content), path)
        if _crc([content[:-CRC_BYTES]]) != int.from_bytes(content[-CRC_BYTES:], "little"):
            raise Damaged(f"{path}: the index differs from its checksum")
        index = content[:-CRC_BYTES].view("<u8").reshape(count, 2)
        written = index[index[:, 0] != NOWHERE]
        if (written[:, 1] != self._chunk_bytes + CRC_BYTES).any() or (written.sum(1) > size - len(content)).any():
            raise Damaged(f"{path}: the index does not fit the file")
        return index[:, 0].copy()


def _scratch(size: int) -> memoryview:
    """Memory of this thread, until its next call: fresh memory costs more than what is done with it here."""
    if len(getattr(_scratches, "memory", ())) < size:
        _scratches.memory = memoryview(bytearray(size))
    return _scratches.memory[:size]


def _fill(fd: int, parts: list[memoryview], offset: int, size: int, path: str) -> None:
    """Fill the parts, of so many bytes together, from the file; some file systems hand out less than was asked for."""
    while (got := os.preadv(fd, parts, offset)) < size:
        if not got:
            raise Damaged(f"{path}: ends at byte {offset}")
        offset, size = offset + got, size - got
        while got >= len(parts[0]):
            got -= len(parts[0])
            parts = parts[1:]
        parts = [parts[0][got:], *parts[1:]]
