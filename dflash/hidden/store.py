"""Hidden states on disk: writing one shard, reading single rows. The home of Zarr; knows no model.

A shard is a Zarr v3 group: `features` (tokens, taps x hidden), `input_ids`, `loss_mask`, `greedy_ids`, and `offsets`,
the first token of each row. Every chunk carries a CRC, and a shard counts only with its manifest, because Zarr itself
reads a missing file as zeros. bfloat16, which Zarr lacks, is stored as the bits of uint16.

T tokens, F features (taps x hidden size)
"""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
import zarr
from safetensors.torch import load_file
from zarr.codecs import Crc32cCodec

from dflash.manifests import MANIFEST, Damaged, Manifest, load_manifest, verify

CHUNK_BYTES = 2 * 2**20
SHARD_FILE_BYTES = 256 * 2**20
DAMAGED_MANIFEST = f"{MANIFEST}.damaged"
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "bfloat16": {
        "logical_dtype": "bfloat16",
        "bit_layout": "SEEEEEEEEMMMMMMM",
        "endian": "little",
        "decode": "torch.from_numpy(a).view(torch.bfloat16)",
    },
    "float32": {"logical_dtype": "float32"},
}


class RowStates(NamedTuple):
    """One conversation: features in the stored precision, ids and greedy choices as int64, mask as bool, all on CPU."""

    features_TF: torch.Tensor  # noqa: N815
    input_ids_T: torch.Tensor  # noqa: N815
    loss_mask_T: torch.Tensor  # noqa: N815
    greedy_ids_T: torch.Tensor  # noqa: N815


class Row(NamedTuple):
    """Where a conversation lies, and what is known of it without reading it."""

    id: str
    category: str
    split: str
    bucket: int
    length: int
    num_supervised: int
    shard: int
    start: int


def layout(row_bytes: int, num_tokens: int) -> tuple[int, int]:
    """(tokens per chunk, tokens per file): chunks of at most 2 MiB, files of at most 256 MiB."""
    chunk = max(16, min(512, 2 ** (max(1, CHUNK_BYTES // row_bytes).bit_length() - 1)))
    file = chunk * max(1, SHARD_FILE_BYTES // row_bytes // chunk)
    return chunk, min(file, -(-num_tokens // chunk) * chunk)


def write_shard(
    folder: Path,
    rows: Iterable[RowStates],
    *,
    ids: Sequence[str],
    lengths: Sequence[int],
    num_taps: int,
    hidden_size: int,
    storage_dtype: str,
    attributes: Mapping[str, Any],
) -> None:
    """Write the rows, in order, as a Zarr group into an empty folder; holds one file's worth of features in memory.

    Raises ValueError, naming the row by its `ids`, for values that are not finite, a tap that is zero throughout, a
    length other than announced, and a wrong number of rows.
    """
    num_tokens, width = sum(lengths), num_taps * hidden_size
    dtype = np.dtype("<u2" if storage_dtype == "bfloat16" else "<f4")
    chunk, file = layout(width * dtype.itemsize, num_tokens)
    group = zarr.create_group(folder, zarr_format=3, attributes=dict(attributes))
    features = group.create_array(
        "features",
        shape=(num_tokens, width),
        chunks=(chunk, width),
        shards=(file, width),
        dtype=dtype,
        fill_value=0,
        filters=None,
        compressors=[Crc32cCodec()],
        dimension_names=("token", "feature"),
        attributes=ATTRIBUTES[storage_dtype],
        config={"write_empty_chunks": True},
    )
    columns = {
        "input_ids": np.empty(num_tokens, "<i4"),
        "loss_mask": np.empty(num_tokens, "u1"),
        "greedy_ids": np.empty(num_tokens, "<i4"),
        "offsets": np.cumsum([0, *lengths], dtype="<i8"),
    }
    buffer, filled, start = np.empty((file, width), dtype), 0, 0  # a file is written whole: Zarr rewrites it otherwise
    count = 0
    for count, row in enumerate(rows, start=1):
        if count > len(lengths):
            raise ValueError(f"{folder}: more rows than the {len(lengths)} announced")
        _check(row, name=ids[count - 1], length=lengths[count - 1], num_taps=num_taps, hidden_size=hidden_size)
        span = slice(columns["offsets"][count - 1], columns["offsets"][count])
        columns["input_ids"][span] = row.input_ids_T.numpy()
        columns["loss_mask"][span] = row.loss_mask_T.numpy()
        columns["greedy_ids"][span] = row.greedy_ids_T.numpy()
        rest = _to_numpy(row.features_TF, storage_dtype)
        while len(rest):
            taken = min(len(rest), file - filled)
            buffer[filled : filled + taken] = rest[:taken]
            filled, rest = filled + taken, rest[taken:]
            if filled == file:
                features[start : start + file] = buffer
                start, filled = start + file, 0
    if count != len(lengths):
        raise ValueError(f"{folder}: {count} rows, {len(lengths)} announced")
    if filled:
        features[start : start + filled] = buffer[:filled]
    for name, values in columns.items():
        array = group.create_array(
            name,
            shape=values.shape,
            chunks=values.shape,
            dtype=values.dtype,
            fill_value=0,
            filters=None,
            compressors=[Crc32cCodec()],
            config={"write_empty_chunks": True},
        )
        array[:] = values


def _to_numpy(features_TF: torch.Tensor, storage_dtype: str) -> np.ndarray:
    stored = features_TF.to(getattr(torch, storage_dtype)).contiguous()
    return (stored.view(torch.uint16) if storage_dtype == "bfloat16" else stored).numpy()


def _check(row: RowStates, *, name: str, length: int, num_taps: int, hidden_size: int) -> None:
    shapes = [tuple(tensor.shape) for tensor in row]
    if shapes != [(length, num_taps * hidden_size), (length,), (length,), (length,)]:
        raise ValueError(f"row {name}: states of shapes {shapes} for {length} tokens and {num_taps} x {hidden_size}")
    if not torch.isfinite(row.features_TF).all():
        raise ValueError(f"row {name}: hidden states are not finite; try another verifier.dtype, such as bfloat16")
    alive_K = row.features_TF.view(length, num_taps, hidden_size).any(dim=2).any(dim=0)
    if not alive_K.all():
        dead = alive_K.tolist().index(False)
        raise ValueError(f"row {name}: tap {dead} is zero throughout; choose other extraction.target_layer_ids")


@dataclass(frozen=True)
class _Shard:
    features: Any  # zarr.Array
    input_ids: np.ndarray
    loss_mask: np.ndarray
    greedy_ids: np.ndarray


class HiddenStates:
    """The hidden states of a corpus, read row by row. `info` is its states.json, `rows` its index in corpus order.

    May be read from several threads at once. Ids and masks of the shards touched stay in memory (9 bytes per token).
    """

    def __init__(self, folder: Path, *, info: dict[str, Any], rows: list[Row]) -> None:
        self.folder = folder
        self.info = info
        self.rows = rows
        self._dtype: torch.dtype = getattr(torch, info["storage_dtype"])
        self._shards: dict[int, _Shard] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> "HiddenStates":
        """Open an extraction artifact whose files are all there and untouched; raises Damaged otherwise.

        A damaged shard loses its manifest, so that the next extraction redoes that shard and no other.
        """
        manifest = load_manifest(folder)
        for shard in sorted((folder / "shards").glob("[0-9]*")):
            part = load_manifest(shard)
            try:
                _verify(part, shard)
            except Damaged as damage:
                raise _set_aside(shard, damage) from damage
        _verify(manifest, folder)
        info = json.loads((folder / "states.json").read_text())
        index = pl.read_parquet(folder / "index.parquet").select(Row._fields)
        return cls(folder, info=info, rows=[Row(*values) for values in index.iter_rows()])

    @property
    def verifier_config(self) -> dict[str, Any]:
        """The verifier's config.json."""
        return json.loads((self.folder / "verifier_config.json").read_text())

    def frozen(self) -> dict[str, torch.Tensor]:
        """The verifier's `embed_tokens.weight`, `norm.weight` and, where it is not tied, `lm_head.weight`."""
        return load_file(self.folder / "verifier.safetensors")

    def read(self, row_number: int) -> RowStates:
        """The states of one row of `rows`, every byte checked against its CRC; raises Damaged naming the shard."""
        row = self.rows[row_number]
        folder = self._shard_folder(row.shard)
        span = slice(row.start, row.start + row.length)
        try:
            shard = self._shard(row.shard)
            features = np.ascontiguousarray(shard.features[span])
        except (ValueError, FileNotFoundError) as error:  # what Zarr raises for a wrong CRC, and for no metadata
            raise _set_aside(folder, error) from error
        features_TF = torch.from_numpy(features)
        if self._dtype == torch.bfloat16:
            features_TF = features_TF.view(torch.bfloat16)
        if not features.any():  # never written so: the file is gone, which Zarr reads as zeros
            raise _set_aside(folder, Damaged("a file of the array 'features' is missing"))
        return RowStates(
            features_TF,
            torch.from_numpy(shard.input_ids[span].astype(np.int64)),
            torch.from_numpy(shard.loss_mask[span].astype(bool)),
            torch.from_numpy(shard.greedy_ids[span].astype(np.int64)),
        )

    def _shard_folder(self, number: int) -> Path:
        return self.folder / "shards" / f"{number:04d}"

    def _shard(self, number: int) -> _Shard:
        with self._lock:
            if number not in self._shards:
                group: Any = zarr.open_group(self._shard_folder(number), mode="r", zarr_format=3)
                columns = {name: np.asarray(group[name][:]) for name in ("input_ids", "loss_mask", "greedy_ids")}
                self._shards[number] = _Shard(group["features"], **columns)
            return self._shards[number]


def _verify(manifest: Manifest, folder: Path) -> None:
    """As manifests.verify, for a folder that may have been moved from under its data root."""
    verify(manifest.model_copy(update={"location": str(folder.absolute())}))


def _set_aside(shard: Path, cause: Exception) -> Damaged:
    """Take a shard's manifest away, so that it counts as missing; returns the error to raise."""
    with suppress(FileNotFoundError):  # another reader was first
        (shard / MANIFEST).rename(shard / DAMAGED_MANIFEST)
    return Damaged(f"{shard}: {cause}; its manifest is set aside: the next extraction redoes this shard and no other")
