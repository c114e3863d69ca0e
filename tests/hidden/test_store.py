"""One shard on disk: what is written comes back, whatever the layout, and nothing unusable is written."""

from pathlib import Path

import pytest
import torch
import zarr

from dflash.hidden import store
from dflash.hidden.store import RowStates, layout, write_shard

TAPS, HIDDEN = 3, 8
LENGTHS = [5, 40, 17, 1, 30]


def states(lengths: list[int] = LENGTHS) -> list[RowStates]:
    generator = torch.Generator().manual_seed(0)
    return [
        RowStates(
            torch.randn(n, TAPS * HIDDEN, generator=generator),
            torch.randint(0, 99, (n,), generator=generator),
            torch.rand(n, generator=generator) < 0.5,
            torch.randint(0, 99, (n,), generator=generator),
        )
        for n in lengths
    ]


def write(folder: Path, rows: list[RowStates], *, dtype: str = "float32", lengths: list[int] = LENGTHS) -> None:
    write_shard(
        folder, rows, ids=[f"r{i}" for i in range(len(lengths))], lengths=lengths, num_taps=TAPS, hidden_size=HIDDEN,
        storage_dtype=dtype, attributes={"shard": 0},
    )  # fmt: skip


@pytest.mark.parametrize(("width", "expected"), [(6 * 576, (256, 38_656)), (6 * 4096, (32, 5_440))])
def test_chunks_and_files_have_the_measured_sizes(width: int, expected: tuple[int, int]) -> None:
    assert layout(2 * width, 10**9) == expected


def test_a_file_is_no_larger_than_its_tokens_need() -> None:
    assert layout(1920, 1000) == (512, 1024)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("file_bytes", [2**28, 16 * TAPS * HIDDEN * 4])
def test_what_is_written_is_what_any_zarr_reader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, file_bytes: int
) -> None:
    monkeypatch.setattr(store, "CHUNK_BYTES", 1)
    monkeypatch.setattr(store, "SHARD_FILE_BYTES", file_bytes)
    rows = states()
    write(tmp_path, rows, dtype=dtype)
    group = zarr.open_group(tmp_path, mode="r", zarr_format=3)
    assert group.attrs["shard"] == 0
    assert group["offsets"][:].tolist() == [0, 5, 45, 62, 63, 93]
    stored = torch.from_numpy(group["features"][:])
    expected = torch.cat([row.features_TF for row in rows]).to(getattr(torch, dtype))
    assert torch.equal(stored.view(expected.dtype), expected)
    assert group["features"].attrs["logical_dtype"] == dtype
    for name, column in (("input_ids", 1), ("loss_mask", 2), ("greedy_ids", 3)):
        assert torch.equal(torch.from_numpy(group[name][:]).long(), torch.cat([row[column] for row in rows]).long())
    for _, array in group.arrays():
        codecs = str(array.metadata.to_dict()["codecs"])
        assert "crc32c" in codecs
        assert "zstd" not in codecs


def broken(row: RowStates, change: str) -> RowStates:
    features = row.features_TF.clone()
    if change == "nan":
        features[3, 1] = float("nan")
    elif change == "inf":
        features[0, 0] = float("inf")
    elif change == "zero tap":
        features[:, HIDDEN : 2 * HIDDEN] = 0
    elif change == "short":
        features = features[:-1]
    return row._replace(features_TF=features)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nan", "row r2: hidden states are not finite"),
        ("inf", "row r2: hidden states are not finite"),
        ("zero tap", "row r2: tap 1 is zero throughout"),
        ("short", "row r2: states of shapes"),
    ],
)
def test_states_no_one_could_use_are_refused_by_the_name_of_their_row(
    tmp_path: Path, change: str, message: str
) -> None:
    rows = states()
    rows[2] = broken(rows[2], change)
    with pytest.raises(ValueError, match=message) as caught:
        write(tmp_path, rows)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [4, 6])
def test_a_wrong_number_of_rows_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match="announced"):
        write(tmp_path, (states() + states())[:count])
