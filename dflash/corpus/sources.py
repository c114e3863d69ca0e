"""Rows of a source, one at a time: JSON lines, JSON, Parquet, compressed or from the hub. Knows not what a row means.

Memory does not grow with a file, nor with a line: one that is too long is skipped in pieces. A row that cannot be read
takes its place as a Rejected; where reading cannot go on, a ValueError names the file.
"""

import codecs
import gzip
import io
import json
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import ijson
import polars as pl
import zstandard

from dflash.config import SourceConfig
from dflash.corpus.conversations import COLUMNS
from dflash.corpus.records import Rejected
from dflash.inputs import HUB, files_of, format_of, hub_revision

MAX_ROW_BYTES = 16 * 2**20
BATCH_ROWS = 1024  # of Parquet, in memory at once as Python objects
SAMPLE_BYTES, SAMPLE_FILES, SAMPLE_ROWS = 4 * 2**20, 8, 100  # what estimates are made from
FRAME_BYTES = 512  # of a .zst file at a time: what repeats itself may come out 32,000 times as long

Row = dict[str, Any] | Rejected
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, pl.exceptions.PolarsError)


def read_rows(source: SourceConfig) -> Generator[tuple[str, Row], None, None]:
    """`file:row` (from 1; of JSON lines, the line) and the row, in order. Blank lines are no rows.

    Raises ValueError naming the file where there is none, or it is empty, damaged, unreadable or gone.
    """
    if source.path.startswith(HUB):
        yield from _hub_rows(source)
        return
    for path in files_of(source):
        yield from _file_rows(path)


def sample_rows(source: SourceConfig, *, count: int) -> list[tuple[str, Row]]:
    """The first rows of a source. Raises ValueError as `read_rows`."""
    with closing(read_rows(source)) as rows:
        return list(islice(rows, count))


def estimate_rows(source: SourceConfig) -> tuple[int, int]:
    """About how many (rows, characters) a source has, from sizes and samples; its limit is heeded.

    Where neither the hub nor a file says how many rows a hub dataset has, only the sampled ones are counted.
    """
    if not source.path.startswith(HUB):
        rows, characters = _estimate_files(files_of(source))
    elif (folder := Path(source.path.removeprefix(HUB))).is_dir():
        rows, characters = _estimate_files(files_of(source.model_copy(update={"path": str(folder)})))
    else:
        sample = sample_rows(source, count=SAMPLE_ROWS)
        rows = max(len(sample), _hub_size(source))
        characters = sum(len(str(row)) for _, row in sample) / max(1, len(sample)) * rows
    share = min(1.0, source.limit / rows) if source.limit and rows else 1.0
    return round(share * rows), round(share * characters)


def _file_rows(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        for number, row in READERS[format_of(path)](path):
            yield f"{path}:{number}", row
    except DAMAGED as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: damaged after row {number} ({reason}); fetch or write the file again") from None
    except FileNotFoundError:
        raise ValueError(f"{path}: gone after row {number}; leave the file in place while it is read") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    if not number:
        raise ValueError(f"{path}: the file is empty; give at least one row or leave the file out")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedReader, BinaryIO]]:
    """The unpacked content after its byte order mark, and the file itself, whose position says how far it is read."""
    with path.open("rb", buffering=0) as packed:
        content = UNPACK[path.suffix.lower()](packed) if path.suffix.lower() in UNPACK else packed
        with io.BufferedReader(content, 2**17) as file:
            if file.peek(3).startswith(codecs.BOM_UTF8):
                file.read(3)
            yield file, packed


class _Zstandard(io.RawIOBase):
    """The frames of a .zst file. The library's own reader takes a truncated file for a whole one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packed = self._ready = memoryview(b"")
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or memoryview(self._file.read(2**16))
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return 0
            # any window, as `zstd --long=31` makes
            self._frame = self._frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            piece, self._packed = self._packed[:FRAME_BYTES], self._packed[FRAME_BYTES:]
            self._ready = memoryview(self._frame.decompress(piece))
            if self._frame.eof:
                left = len(self._frame.unused_data)
                self._packed = memoryview(bytes(piece[len(piece) - left :]) + bytes(self._packed))
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _line_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with _opened(path) as (file, _):
        for number in numbers(1):
            line = file.readline(MAX_ROW_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                yield number, Rejected("too_large", f"a line of more than {MAX_ROW_BYTES:,} bytes; split or remove it")
            elif not line.isspace():
                yield number, _row(line.rstrip())


def _row(line: bytes) -> Row:
    if b"\0" in line:
        return Rejected("bad_encoding", "a NUL byte; save the file as UTF-8")
    try:
        return _object(json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Rejected("bad_encoding", f"byte {error.start + 1} is no UTF-8; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return Rejected("bad_json", f"{error.msg} at column {error.colno}; give one JSON object per line")
    except RecursionError:
        return Rejected("bad_json", "nested too deeply; give one flat JSON object per line")
    except ValueError as error:  # a number of thousands of digits
        return Rejected("bad_json", f"{error}; give one JSON object per line")


def _object(value: Any) -> Row:
    if isinstance(value, dict):
        return value
    return Rejected("not_an_object", f"a JSON {type(value).__name__}; give an object with one of the known columns")


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Elements of the file's list; a file without one is taken for JSON lines by another name."""
    with _opened(path) as (file, _):
        elements = _list_in(file)
    if elements is None:
        yield from _line_rows(path)
        return
    number = 0
    with _opened(path) as (file, _):
        try:
            for number, value in enumerate(ijson.items(file, elements, use_float=True), start=1):
                yield number, _object(value)
        except ijson.JSONError as error:
            reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            reason = reason.partition("\n")[0]
            raise ValueError(f"{path}:{number + 1}: malformed JSON ({reason}); mend it, or give JSON lines") from None


def _list_in(file: BinaryIO) -> str | None:
    """The ijson prefix of the elements of the file's list, be it the whole or what the one object holds.

    None where the file begins with a row itself.
    """
    key = ""
    try:
        for prefix, event, value in ijson.parse(file, multiple_values=True):
            if prefix == "" and event == "start_array":
                return "item"
            if event == "start_map" and key and prefix == f"{key}.item":
                return prefix
            if prefix == "" and event == "map_key":
                key = value
            if key in COLUMNS or (prefix == "" and event not in ("start_map", "map_key")):
                return None
    except ijson.JSONError:
        pass  # whoever reads the rows says where
    return None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    frame = pl.scan_parquet(path, glob=False)
    names = frame.collect_schema().names()
    known = [name for name in names if name in COLUMNS]
    number = 0
    for batch in frame.select(known or names).collect_batches(chunk_size=BATCH_ROWS, lazy=True):
        for row in batch.iter_rows(named=True):
            number += 1
            yield number, row


READERS = {".jsonl": _line_rows, ".json": _json_rows, ".parquet": _parquet_rows}
UNPACK: dict[str, Any] = {".gz": lambda file: gzip.GzipFile(fileobj=file), ".zst": _Zstandard}


def _hub_rows(source: SourceConfig) -> Iterator[tuple[str, Row]]:
    datasets = _datasets(source)
    name = source.path.removeprefix(HUB)
    revision = None if Path(name).is_dir() else hub_revision(source)
    number = 0
    try:
        rows = datasets.load_dataset(name, source.subset or None, split=source.split, revision=revision, streaming=True)
        if known := [column for column in rows.column_names or () if column in COLUMNS]:
            rows = rows.select_columns(known)
        for number, row in enumerate(rows, start=1):
            yield f"{source.path}:{number}", row
    # not every OSError: where the network fails, trying again helps
    except (datasets.exceptions.DatasetsError, FileNotFoundError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{source.path}: cannot be read after row {number} ({reason:.300}); check name, subset and split"
        ) from error
    if not number:
        raise ValueError(
            f"{source.path}: the dataset is empty; check subset {source.subset!r} and split {source.split!r}"
        )


def _hub_size(source: SourceConfig) -> int:
    """Rows of a hub dataset's split as its card says, or 0."""
    builder = _datasets(source).load_dataset_builder(
        source.path.removeprefix(HUB), source.subset or None, revision=hub_revision(source)
    )
    split = (builder.info.splits or {}).get(source.split)
    return split.num_examples or 0 if split else 0


def _datasets(source: SourceConfig) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError(f"{source.path}: needs the package datasets; run: pip install 'dflash[hub]'") from None
    return datasets


def _estimate_files(paths: list[Path]) -> tuple[float, float]:
    kinds = defaultdict(list)
    for path in paths:
        kinds[path.suffix.lower()].append(path)
    rows = characters = 0.0
    for kind, files in kinds.items():
        estimate = _estimate_parquet if kind == ".parquet" else _estimate_text
        try:
            found = estimate(files)
        except (OSError, *DAMAGED) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{files[0].parent}: a {kind} file cannot be read ({reason})") from None
        rows, characters = rows + found[0], characters + found[1]
    return rows, characters


def _estimate_text(paths: list[Path]) -> tuple[float, float]:
    """From the first megabytes of a few files, as if all bytes held as much."""
    rows = characters = consumed = 0
    for path in paths[:: -(-len(paths) // SAMPLE_FILES)]:
        with _opened(path) as (file, packed):
            content = file.read(SAMPLE_BYTES)
            consumed += packed.tell()
        elements = _list_in(io.BytesIO(content)) if format_of(path) == ".json" else None
        rows += _count(content, elements) if elements else content.count(b"\n") + (content[-1:] not in (b"\n", b""))
        characters += len(content)
    scale = sum(path.stat().st_size for path in paths) / max(1, consumed)
    return scale * rows, scale * characters


def _count(content: bytes, elements: str) -> int:
    """How many elements are there before the content breaks off."""
    found = 0
    try:
        for _ in ijson.items(io.BytesIO(content), elements):
            found += 1
    except ijson.JSONError:
        pass
    return found


def _estimate_parquet(paths: list[Path]) -> tuple[float, float]:
    """Rows as the files say, characters by the first rows of a few of them."""
    rows = sum(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item() for path in paths)
    sample = [
        len(str(row))
        for path in paths[:: -(-len(paths) // SAMPLE_FILES)]
        for _, row in islice(_parquet_rows(path), SAMPLE_ROWS)
    ]
    return rows, rows * sum(sample) / max(1, len(sample))
