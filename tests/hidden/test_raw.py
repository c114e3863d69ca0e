"""Arrays written without Zarr are Zarr's, and its own are read; damage is noticed, and nothing half-written stays."""

import os
import pickle
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from hidden_small import flip_a_byte
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec

from dflash.hidden.raw import ArrayReader, ArrayWriter, read_attributes, write_group
from dflash.manifests import Damaged

SHAPES = {"uint16": (6,), "float32": (3,), "uint8": (5,), "int32": (), "int64": (), "int16": (2, 3)}


def values(num_rows: int, dtype: str, row_shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(num_rows).integers(0, 200, (num_rows, *row_shape)).astype(dtype)


def write(folder: Path, array: np.ndarray, *, chunk: int = 4, file: int = 12, step: int = 5) -> Path:
    names = ["token", "channel", "more"][: array.ndim]
    with ArrayWriter(
        folder, row_shape=array.shape[1:], dtype=array.dtype.name, chunk=chunk, file=file, dimension_names=names,
        attributes={"colour": "blue"},
    ) as writer:  # fmt: skip
        for start in range(0, len(array), step):
            writer.append(array[start : start + step])
    return folder


class Interrupting(np.ndarray):
    """An array during whose second half Ctrl-C is pressed."""

    def __new__(cls, array: np.ndarray) -> "Interrupting":
        return array.view(cls)

    def __getitem__(self, key: object) -> np.ndarray:
        if isinstance(key, slice) and (key.start or 0) > len(self) // 2:
            raise KeyboardInterrupt
        return np.asarray(self)[key]


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write_with_zarr(folder: Path, array: np.ndarray, *, chunk: int = 4, file: int = 12) -> Path:
    rest = array.shape[1:]
    zarr.create_array(
        folder, shape=array.shape, chunks=(chunk, *rest), shards=(file, *rest), dtype=array.dtype, fill_value=0,
        filters=None, compressors=[Crc32cCodec()], config={"write_empty_chunks": True},
    )[:] = array  # fmt: skip
    return folder


@pytest.mark.parametrize("dtype", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 4, 12, 13, 31])
@pytest.mark.parametrize("step", [1, 5, 100])
def test_zarr_reads_what_is_written(tmp_path: Path, dtype: str, num_rows: int, step: int) -> None:
    array = values(num_rows, dtype, SHAPES[dtype])
    found = zarr.open_array(write(tmp_path / "a", array, step=step), mode="r", zarr_format=3)
    assert found.dtype == array.dtype
    assert np.array_equal(found[:], array)
    assert found.metadata.dimension_names == ("token", "channel", "more")[: array.ndim]
    assert dict(found.attrs) == read_attributes(tmp_path / "a") == {"colour": "blue"}


@pytest.mark.parametrize("dtype", SHAPES)
def test_tensorstore_reads_what_is_written(tmp_path: Path, dtype: str) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    array = values(31, dtype, SHAPES[dtype])
    kvstore = {"driver": "file", "path": str(write(tmp_path / "a", array))}
    found = tensorstore.open({"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}).result()
    assert np.array_equal(found.read().result(), array)


@pytest.mark.parametrize("dtype", SHAPES)
def test_what_zarr_writes_is_read_and_the_files_are_the_same(tmp_path: Path, dtype: str) -> None:
    array = values(31, dtype, SHAPES[dtype])
    theirs, ours = write_with_zarr(tmp_path / "theirs", array), write(tmp_path / "ours", array)
    assert np.array_equal(ArrayReader(theirs).read(0, 31), array)
    files = {path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()}
    assert files == {path.relative_to(ours) for path in ours.rglob("*") if path.is_file()}
    for name in files - {Path("zarr.json")}:
        assert (theirs / name).read_bytes() == (ours / name).read_bytes()


def test_a_group_is_zarrs(tmp_path: Path) -> None:
    write_group(tmp_path, {"answer": 42})
    write(tmp_path / "a", values(3, "int32", ()))
    group = zarr.open_group(tmp_path, mode="r", zarr_format=3)
    assert group.attrs["answer"] == read_attributes(tmp_path)["answer"] == 42
    assert [name for name, _ in group.arrays()] == ["a"]


@settings(max_examples=60)
@given(st.data())
def test_any_run_of_rows_is_read_from_any_layout(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    num_rows, chunk = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    array = values(num_rows, "uint16", (3,))
    folder = write(tmp_path_factory.mktemp("any") / "a", array, chunk=chunk, file=chunk * data.draw(st.integers(1, 4)))
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    for verify in (True, False):
        assert np.array_equal(ArrayReader(folder).read(start, stop, verify=verify), array[start:stop])


def test_a_run_outside_the_array_is_refused(tmp_path: Path) -> None:
    reader = ArrayReader(write(tmp_path / "a", values(31, "uint16", (6,))))
    with pytest.raises(ValueError, match=r"rows 30..32 of 31"):
        reader.read(30, 32)


DAMAGES = {
    "flipped": (lambda path: flip_a_byte(path, 60), "c/1/0: the chunk at byte 52 differs from its checksum"),
    "flipped checksum": (
        lambda path: flip_a_byte(path, 4 * 12),
        "c/1/0: the chunk at byte 0 differs from its checksum",
    ),
    "flipped index": (lambda path: flip_a_byte(path, 3 * 52 + 1), "c/1/0: the index differs from its checksum"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "c/1/0: the index differs from its checksum"),
    "emptied": (lambda path: path.write_bytes(b""), "c/1/0: 0 bytes, too few for an index"),
    "missing": (lambda path: path.unlink(), "c/1/0: missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    array = values(31, "uint16", (6,))
    folder = write(tmp_path / "a", array)
    harm, message = DAMAGES[damage]
    harm(folder / "c/1/0")
    reader = ArrayReader(folder)
    with pytest.raises(Damaged, match=message):
        reader.read(5, 25)
    assert np.array_equal(reader.read(0, 12), array[:12])
    assert np.array_equal(reader.read(24, 31), array[24:])
    if damage not in ("flipped", "flipped checksum"):  # which only verifying finds
        with pytest.raises(Damaged, match=message):
            reader.read(5, 25, verify=False)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_cut_after_its_index_was_read_is_found(tmp_path: Path, verify: bool) -> None:
    folder = write(tmp_path / "a", values(31, "uint16", (6,)))
    reader = ArrayReader(folder)
    reader.read(0, 31)
    os.truncate(folder / "c/1/0", 60)
    with pytest.raises(Damaged, match="c/1/0: ends at byte 60"):
        reader.read(13, 20, verify=verify)


def test_an_index_that_points_outside_its_file_is_found(tmp_path: Path) -> None:
    """The index of a longer array, whole and with the right checksum, on a shorter file."""
    long = write(tmp_path / "long", values(12, "uint16", (6,))) / "c/0/0"
    short = write(tmp_path / "short", values(4, "uint16", (6,)))
    (short / "c/0/0").write_bytes((short / "c/0/0").read_bytes()[:52] + long.read_bytes()[3 * 52 :])
    with pytest.raises(Damaged, match="the index does not fit the file"):
        ArrayReader(short).read(0, 4)


def test_chunks_that_zarr_left_out_are_missing_not_zeros(tmp_path: Path) -> None:
    array = values(12, "uint16", (6,))
    array[4:8] = 0
    zarr.create_array(
        tmp_path / "a", shape=array.shape, chunks=(4, 6), shards=(12, 6), dtype="uint16", fill_value=0, filters=None,
        compressors=[Crc32cCodec()],
    )[:] = array  # fmt: skip
    with pytest.raises(Damaged, match="c/0/0: chunk 1 was never written"):
        ArrayReader(tmp_path / "a").read(0, 12)


@pytest.mark.parametrize("content", ["", "{", None])
def test_metadata_that_cannot_be_read_are_damage(tmp_path: Path, content: str | None) -> None:
    folder = write(tmp_path / "a", values(3, "int32", ()))
    (folder / "zarr.json").unlink() if content is None else (folder / "zarr.json").write_text(content)
    with pytest.raises(Damaged, match=r"zarr\.json: (missing|unreadable)"):
        ArrayReader(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (4, 6), "compressors": None},
        {"chunks": (4, 6), "shards": (12, 6), "compressors": None},
        {"chunks": (4, 6), "shards": (12, 6)},
        {"chunks": (4, 3), "shards": (12, 6), "compressors": [Crc32cCodec()]},
        {"chunks": (4, 6), "shards": (12, 6), "compressors": [Crc32cCodec()], "serializer": BytesCodec(endian="big")},
    ],
)
def test_other_layouts_are_refused(tmp_path: Path, options: dict) -> None:
    zarr.create_array(tmp_path / "a", **{"shape": (31, 6), "dtype": "uint16", "fill_value": 0, **options})
    with pytest.raises(ValueError, match="read it with Zarr") as caught:
        ArrayReader(tmp_path / "a")
    assert not isinstance(caught.value, Damaged)
    assert "\n" not in str(caught.value)


def test_an_interrupted_writer_leaves_no_array_and_nothing_half_written(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", Interrupting(values(31, "uint16", (6,))))
    assert files_in(tmp_path) == ["a/c/0/0"]
    assert open_files() == before


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    array, before = values(20_000, "uint16", (6,)), open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # of one file, which to a writer is the same
    try:
        with pytest.raises(OSError):
            write(tmp_path / "a", array, chunk=500, file=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_in(tmp_path) == []
    assert open_files() == before


def test_threads_and_pickled_readers_read_the_same_and_leave_no_file_open(tmp_path: Path) -> None:
    array = values(400, "uint16", (6,))
    reader = ArrayReader(write(tmp_path / "a", array))
    before = open_files()
    start_together = threading.Barrier(4)

    def read(seed: int) -> None:
        start_together.wait()
        mine = pickle.loads(pickle.dumps(reader)) if seed % 2 else reader
        for start, stop in np.sort(np.random.default_rng(seed).integers(0, 401, (50, 2))):
            assert np.array_equal(mine.read(start, stop), array[start:stop])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert open_files() == before


def open_files() -> list[str]:
    return sorted(path for path in map(_target, Path("/proc/self/fd").iterdir()) if path)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # the handle that listed the folder
        return ""
