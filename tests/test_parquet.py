"""A damaged file is a ValueError of one line, whatever the damage does to the reader."""

import random
from pathlib import Path

import polars as pl
import pytest

from dflash.parquet import read_parquet

SCHEMA = pl.Schema({"name": pl.String(), "values": pl.List(pl.Struct({"a": pl.Int32(), "b": pl.List(pl.Float64())}))})


def test_files_are_read_as_they_were_written_and_damaged_ones_are_one_line(tmp_path: Path) -> None:
    rows = [{"name": f"row {n}", "values": [{"a": n, "b": [0.5] * n}] * (n % 3)} for n in range(40)]
    frame = pl.DataFrame(rows, schema=SCHEMA)
    path = tmp_path / "file.parquet"
    frame.write_parquet(path)
    assert read_parquet(path, SCHEMA).equals(frame)
    with pytest.raises(ValueError, match="of other columns"):
        read_parquet(path, pl.Schema({"name": pl.String()}))
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "absent.parquet", SCHEMA)

    whole, chance, said = path.read_bytes(), random.Random(0), []
    for _ in range(600):
        damaged = bytearray(whole)
        for at in chance.choices(range(len(whole)), k=chance.choice([1, 4, 16])):
            damaged[at] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            read_parquet(path, SCHEMA)  # values have no checksums: some damage is not seen
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 200
    assert not [line for line in said if "\n" in line or not line.startswith(("unreadable (", "of other columns"))]
