"""Speed of reading shuffled rows of hidden states into batch buffers, and the bytes they take; one JSON line.

    python benchmarks/extraction_read.py [--megabytes 500] [--hidden 1024] [--taps 5] [--reading-rounds 9]

Synthetic rows, warm files. `memmap_read` is the speed of HiddenStates.stream, two reading threads, with every
checksum verified, and `memmap_read_unverified` without, both over that of copying the same rows from one np.memmap into
the same buffers on one thread; `safetensors_read` is the verified speed over that of a safetensors file per row, which
holds the same four tensors and is not checked. `one_thread` has the same without threads. From the memmap come features
alone. `bf16_bytes` and `fp8_bytes` are bytes on disk over those of bfloat16 features alone. The readers alternate;
medians of the rounds' ratios.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dflash.hidden.raw import read_attributes
from dflash.hidden.store import ARRAYS, HiddenStates, Row, RowStates, write_shard


def make_rows(lengths: Sequence[int], width: int) -> list[RowStates]:
    generator = torch.Generator().manual_seed(0)
    return [
        RowStates(
            torch.randn(n, width, generator=generator).bfloat16(),
            torch.arange(n),
            torch.arange(n) > n // 2,
            torch.arange(n),
        )
        for n in lengths
    ]


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def store_of(folder: Path, rows: list[RowStates], *, taps: int, hidden: int, storage_dtype: str) -> HiddenStates:
    lengths, shard = [len(row.input_ids_T) for row in rows], folder / "shards" / "0000"
    shard.mkdir(parents=True)
    write_shard(
        shard,
        rows,
        ids=[str(i) for i in range(len(rows))],
        lengths=lengths,
        num_taps=taps,
        hidden_size=hidden,
        storage_dtype=storage_dtype,
        attributes={},
    )
    starts = accumulate(lengths, initial=0)
    index = [
        Row(str(i), "", "train", 0, n, n, 0, start) for i, (n, start) in enumerate(zip(lengths, starts, strict=False))
    ]
    return HiddenStates(folder, info={}, rows=index, attributes=read_attributes(shard), remote=frozenset())


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading")
    group.add_argument("--megabytes", type=int, default=500)
    group.add_argument("--hidden", type=int, default=1024)
    group.add_argument("--taps", type=int, default=5)
    group.add_argument("--reading-rounds", type=int, default=9)
    group.add_argument("--batch", type=int, default=4, help="rows per batch")


def run(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)  # else copies would have more threads than are said
    width, rng, lengths = args.taps * args.hidden, random.Random(0), []
    while sum(lengths) * width * 2 < args.megabytes * 10**6:
        lengths.append(min(4096, max(16, round(rng.lognormvariate(6.5, 0.8)))))
    gigabytes = sum(lengths) * width * 2 / 10**9
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), args, lengths, gigabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    print(json.dumps(run(parser.parse_args())))


def measure(folder: Path, args: argparse.Namespace, lengths: list[int], gigabytes: float) -> dict[str, object]:
    rows, width = make_rows(lengths, args.taps * args.hidden), args.taps * args.hidden
    wrote = time.process_time()
    store = store_of(folder / "bf16", rows, taps=args.taps, hidden=args.hidden, storage_dtype="bfloat16")
    wrote = time.process_time() - wrote
    wrote_fp8 = time.process_time()
    small = store_of(folder / "fp8", rows, taps=args.taps, hidden=args.hidden, storage_dtype="fp8")
    wrote_fp8 = time.process_time() - wrote_fp8
    with (folder / "flat").open("wb") as file:
        for row in rows:
            file.write(row.features_TF.view(torch.uint8).numpy().data)
    mapped = np.memmap(folder / "flat", np.uint16, "r").reshape(-1, width)
    for i, row in enumerate(rows):
        save_file(dict(zip(ARRAYS, row[:4], strict=False)), folder / f"{i}.safetensors")
    del rows
    order = random.Random(1).sample(range(len(lengths)), len(lengths))
    batches = [order[i : i + args.batch] for i in range(0, len(order), args.batch)]
    most = max(sum(lengths[i] for i in batch) for batch in batches)
    buffers, *more_buffers = [store.buffers(most) for _ in range(3)]

    def packed(copy: Callable[[int, torch.Tensor], None]) -> None:
        """The same batches in the same memory, features only."""
        for batch in batches:
            total = sum(lengths[i] for i in batch)
            for i, out_TF in zip(batch, buffers.features_TF[:total].split([lengths[i] for i in batch]), strict=True):
                copy(i, out_TF)

    def from_memmap(i: int, out_TF: torch.Tensor) -> None:
        start = store.rows[i].start
        np.copyto(out_TF.view(torch.uint16).numpy(), mapped[start : start + lengths[i]])

    def from_safetensors(i: int, out_TF: torch.Tensor) -> None:
        with safe_open(folder / f"{i}.safetensors", "pt") as file:
            out_TF.copy_(file.get_tensor("features"))
            for memory, name in zip(buffers[1:4], ARRAYS[1:4], strict=True):
                memory[: lengths[i]].copy_(file.get_tensor(name))

    def from_store(opened: HiddenStates, *, verify: bool) -> None:
        for batch in batches:
            opened.read_into(batch, buffers, verify=verify)

    def streamed(*, verify: bool) -> None:
        for _ in store.stream(batches, [buffers, *more_buffers], device=None, verify=verify):
            pass

    readers: dict[str, Callable[[], None]] = {
        "memmap": lambda: packed(from_memmap),
        "verified": lambda: from_store(store, verify=True),
        "unverified": lambda: from_store(store, verify=False),
        "safetensors": lambda: packed(from_safetensors),
        "fp8": lambda: from_store(small, verify=True),
        "stream": lambda: streamed(verify=True),
        "stream_unverified": lambda: streamed(verify=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in readers}
    for round_number in range(args.reading_rounds + 1):
        for name, read in readers.items():
            wall, cpu = time.perf_counter(), time.process_time()
            read()
            if round_number:  # the first only warms up
                seconds[name].append(time.perf_counter() - wall)
                cpu_seconds[name].append(time.process_time() - cpu)
    median = {name: statistics.median(values) for name, values in seconds.items()}

    def ratio(base: str, ours: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[base], seconds[ours], strict=True)), 3)

    return {
        "memmap_read": ratio("memmap", "stream"),
        "memmap_read_unverified": ratio("memmap", "stream_unverified"),
        "safetensors_read": ratio("safetensors", "stream"),
        "one_thread": {
            "memmap_read": ratio("memmap", "verified"),
            "memmap_read_unverified": ratio("memmap", "unverified"),
            "safetensors_read": ratio("safetensors", "verified"),
            "safetensors_read_unverified": ratio("safetensors", "unverified"),
            "fp8_read": ratio("memmap", "fp8"),
        },
        "bf16_bytes": round(disk_bytes(folder / "bf16") / gigabytes / 10**9, 4),
        "fp8_bytes": round(disk_bytes(folder / "fp8") / gigabytes / 10**9, 4),
        "cpu_seconds_per_gb": {
            name: round(statistics.median(values) / gigabytes, 3) for name, values in cpu_seconds.items()
        }
        | {"write": round(wrote / gigabytes, 3), "write_fp8": round(wrote_fp8 / gigabytes, 3)},
        "gb_per_second": {name: round(gigabytes / value, 2) for name, value in median.items()},
        "spread": {name: round(max(values) / min(values), 2) for name, values in seconds.items()},
        "files": sum(path.is_file() for path in (folder / "bf16").rglob("*")),
        "rows": len(lengths),
        "gb": round(gigabytes, 3),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
