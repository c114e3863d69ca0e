"""Rows of a source, one at a time: JSON lines, JSON, Parquet, compressed or from the hub. Knows not what a row means.

Memory does not grow with a file, nor with a line: one that is too long is skipped in pieces. A row that cannot be read
takes its place as a Rejected; where reading cannot go on, a ValueError names the file.
"""

import codecs
import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
import zstandard

from dflash.config import SourceConfig
from dflash.corpus.conversations import COLUMNS, SCHEMAS
from dflash.corpus.records import Rejected
from dflash.inputs import HUB, files_of, format_of, hub_name, hub_revision

MAX_ROW_BYTES = 16 * 2**20
BATCH_ROWS = 1024  # of Parquet, in memory at once as Python objects
SAMPLE_BYTES, SAMPLE_FILES, SAMPLE_ROWS = 4 * 2**20, 8, 100  # what estimates are made from
FRAME_BYTES = 512  # of a .zst file at a time: what repeats itself may come out 32,000 times as long
PIECE_BYTES = 2**16  # of a .json file at a time

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
    elif (folder := Path(hub_name(source))).is_dir():
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
    except (OSError, *DAMAGED) as error:
        raise _refusal(path, error, f" after row {number}") from None
    if not number:
        raise ValueError(f"{path}: the file is empty; give at least one row or leave the file out")


def _refusal(path: Path, error: Exception, place: str = "") -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{path}: gone{place}; leave the file in place while it is read")
    if isinstance(error, DAMAGED):
        reason = str(error).partition("\n")[0]
        return ValueError(f"{path}: damaged{place} ({reason}); fetch or write the file again")
    reason = getattr(error, "strerror", None) or str(error)
    return ValueError(f"{path}: cannot be read ({reason}); check its permissions")


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
                yield number, _too_large()
            elif not line.isspace():
                yield number, _row(line.rstrip())


def _too_large() -> Rejected:
    return Rejected("too_large", f"a row of more than {MAX_ROW_BYTES:,} bytes; split or remove it")


def _row(line: bytes) -> Row:
    if b"\0" in line:
        return Rejected("bad_encoding", "a NUL byte; save the file as UTF-8")
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Rejected("bad_encoding", f"byte {error.start + 1} is no UTF-8; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return Rejected("bad_json", f"{error.msg} at column {error.colno}; give one JSON object per row")
    except RecursionError:
        return Rejected("bad_json", "nested too deeply; give one flat JSON object per row")
    except ValueError as error:  # a number of thousands of digits
        return Rejected("bad_json", f"{error}; give one JSON object per row")
    if isinstance(value, dict):
        return value
    return Rejected("not_an_object", f"a JSON {type(value).__name__}; give an object with one of the known columns")


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with _opened(path) as (file, _):
        layout = _layout(file, path)
    if layout is None:
        yield from _line_rows(path)
        return
    number = 0
    with _opened(path) as (file, _):
        for value, mark in _elements(file, path, *layout):
            number += 1
            if len(value) > MAX_ROW_BYTES:
                yield number, _too_large()
            elif mark:
                yield number, _row(value)
            else:
                reason = "brackets or quotes that do not pair"
                raise ValueError(f"{path}:{number}: malformed JSON ({reason}); mend it, or give JSON lines")


def _layout(file: BinaryIO, path: Path) -> tuple[int, bytes] | None:
    """Where the rows of a .json file are: how many brackets deep, in the list of which name. None: each on a line.

    The first value decides, once it has ended: a list holds rows, and so does the one object of a file that has a list
    of objects and none of our columns. An object too large for a row is taken for that before its end.
    """
    lists: list[bytes] = []
    is_row = spread = False
    mark = b""
    values = _split(file, 1)
    for opening, value, mark in values:
        if opening.strip() == b"[":
            return 1, b""
        spread |= b"\n" in value
        if member := MEMBER.match(value):
            is_row |= member["name"].decode(errors="replace") in SCHEMAS
            if member["list"] and member["object"]:
                lists.append(member["name"])
        if mark in CLOSING or len(value) > MAX_ROW_BYTES:
            break
    ended = mark in CLOSING
    if not lists or is_row or (ended and next(values, None)):
        return (0, b"") if ended and spread else None
    if len(lists) > 1:
        raise _two_lists(path, *lists[:2])
    return 2, lists[0]


def _two_lists(path: Path, *names: bytes) -> ValueError:
    both = " and ".join(repr(name.decode(errors="replace")) for name in names)
    return ValueError(f"{path}: holds two lists of rows, {both}; save each as a file of its own")


def _elements(file: BinaryIO, path: Path, level: int, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The rows' texts at a place that `_layout` found, and the mark after each; none where brackets do not pair."""
    for opening, value, mark in _split(file, level):
        if level == 0:
            value += mark.strip(b",")
        elif level == 2 and mark:
            member = MEMBER.match(opening)
            if not member or not member["list"]:
                continue
            if member["name"] != name:
                if value.lstrip().startswith(b"{"):
                    raise _two_lists(path, name, member["name"])
                continue
        if level and (mark == b"}" or not opening.endswith(b"[")):
            mark = b""
        if value.strip() or not mark:
            yield value.strip(), mark


# name, and whether there is a list, and in it an object
MEMBER = re.compile(rb'\s*"(?P<name>(?:[^"\\]++|\\.)*+)"\s*:\s*(?P<list>\[)?\s*(?P<object>\{)?', re.DOTALL)
STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # the rest of a string, without its quote
TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
TO_MARK = re.compile(rb'(?:[^"\[\]{},]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
OPENING, CLOSING = (b"[", b"{"), (b"]", b"}")


def _split(file: BinaryIO, level: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """The values that are `level` brackets deep: what opens the last of these brackets, the value, the mark after it.

    Only brackets, commas and strings are told apart: what else is wrong in a value is its own affair. One of more than
    MAX_ROW_BYTES is given cut and without a mark, then skipped. So is what the file breaks off in, or ends with.
    """
    opening, text = b"", bytearray()
    depth = 0
    quoted = escaped = given = False
    while piece := file.read(PIECE_BYTES):
        start, at, escaped = 0, int(escaped), False
        while True:
            if quoted:
                at = _end(STRING, piece, at)
                if piece[at : at + 1] != b'"':
                    escaped = at < len(piece)
                    break
                quoted = False
                at += 1
            at = _end(TO_BRACKET if depth > level else TO_MARK, piece, at)
            mark = piece[at : at + 1]
            if not mark:
                break
            at += 1
            if mark == b'"':  # of a string that goes on in the next piece
                quoted = True
                continue
            depth += (mark in OPENING) - (mark in CLOSING)
            if (mark == b"," and depth == level) or (mark in CLOSING and depth == max(0, level - 1)):
                if not given:
                    yield opening, bytes(text + piece[start : at - 1]), mark
                given = False
            elif mark in OPENING and depth == level:
                opening = bytes(text + piece[start:at])
            elif depth >= level:
                continue
            text.clear()
            start = at
        text += piece[start:]
        if len(text) > MAX_ROW_BYTES and not given:
            yield opening, bytes(text), b""
            given = True
        if given:
            text.clear()
    if depth or quoted or text.strip():
        yield opening, bytes(text), b""


def _end(pattern: re.Pattern[bytes], piece: bytes, at: int) -> int:
    found = pattern.match(piece, at)
    assert found, "a pattern that may be empty matches anywhere"
    return found.end()


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    frame = pl.scan_parquet(path, glob=False)
    names = frame.collect_schema().names()
    known = [name for name in names if name in COLUMNS]
    number = 0
    for batch in frame.select(known or names).collect_batches(chunk_size=BATCH_ROWS, lazy=True):
        for row in batch.iter_rows(named=True):
            number += 1
            yield number, _written(row)


def _written(row: dict[str, Any]) -> Row:
    """The row of a table without the nulls that fill up its objects: in a column all have the same names."""
    return _too_large() if _size(row) > MAX_ROW_BYTES else _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(held) for name, held in value.items() if held is not None}
    if isinstance(value, list) and not _is_flat(value):
        return [_without_nulls(held) for held in value]
    return value


def _size(value: Any) -> int:
    """About how many characters are in the value; long lists of numbers are only measured by their length."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return len(value) if _is_flat(value) else sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1


def _is_flat(values: list[Any]) -> bool:
    return not values or isinstance(values[0], int | float)


READERS = {".jsonl": _line_rows, ".json": _json_rows, ".parquet": _parquet_rows}
UNPACK: dict[str, Any] = {".gz": lambda file: gzip.GzipFile(fileobj=file), ".zst": _Zstandard}


def _hub_rows(source: SourceConfig) -> Iterator[tuple[str, Row]]:
    datasets = _datasets(source)
    name = hub_name(source)
    revision = None if Path(name).is_dir() else hub_revision(source)
    number = 0
    try:
        rows = datasets.load_dataset(name, source.subset or None, split=source.split, revision=revision, streaming=True)
        if known := [column for column in rows.column_names or () if column in COLUMNS]:
            rows = rows.select_columns(known)
        for number, row in enumerate(rows, start=1):
            yield f"{source.path}:{number}", _written(row)
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
        hub_name(source), source.subset or None, revision=hub_revision(source)
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
        found = _estimate_parquet(files) if kind == ".parquet" else _estimate_text(files)
        rows, characters = rows + found[0], characters + found[1]
    return rows, characters


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, *DAMAGED) as error:
        raise _refusal(path, error) from None


def _estimate_text(paths: list[Path]) -> tuple[float, float]:
    """From the first megabytes of a few files, as if all bytes held as much."""
    rows = characters = consumed = 0
    for path in paths[:: -(-len(paths) // SAMPLE_FILES)]:
        with _named(path), _opened(path) as (file, packed):
            content = file.read(SAMPLE_BYTES)
            consumed += packed.tell()
        rows += _count(content, path)
        characters += len(content)
    scale = sum(path.stat().st_size for path in paths) / max(1, consumed)
    return scale * rows, scale * characters


def _count(content: bytes, path: Path) -> int:
    """How many rows are there before the content breaks off."""
    if format_of(path) == ".json" and (layout := _layout(io.BytesIO(content), path)):
        return sum(bool(mark) for _, mark in _elements(io.BytesIO(content), path, *layout))
    return content.count(b"\n") + (content[-1:] not in (b"\n", b""))


def _estimate_parquet(paths: list[Path]) -> tuple[float, float]:
    """Rows as the files say, characters by the first rows of a few of them."""
    rows, sample = 0, []
    for number, path in enumerate(paths):
        with _named(path):
            rows += pl.scan_parquet(path, glob=False).select(pl.len()).collect().item()
            if number % -(-len(paths) // SAMPLE_FILES) == 0:
                sample += [len(str(row)) for _, row in islice(_parquet_rows(path), SAMPLE_ROWS)]
    return rows, rows * sum(sample) / max(1, len(sample))
