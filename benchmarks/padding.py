"""Padding by bucket edges, and runs of one bucket before and after interleaving, as one JSON line.

    python benchmarks/padding.py [--data spec_bench.jsonl gsm8k_train.jsonl]

A row is all texts of a JSON line (turns, question and answer, or messages), tokenized by the bundled verifier's
tokenizer. `padding_share`: every row padded to the longest of its bucket. `batch_padding_share`: to the longest of its
batch. `longest_run`: batches of one bucket in a row, in order of bucket (before) and in the order of training (after).
"""

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dflash.bundled import resolve
from dflash.config import VerifierConfig
from dflash.corpus.bucketing import bucket_edges, epoch_batches
from dflash.corpus.chat import load_chat
from dflash.pinning import pin


def text_of(row: dict[str, Any]) -> str:
    if "question" in row:
        return f"{row['question']}\n{row['answer']}"
    return "\n".join(row["turns"] if "turns" in row else [message["content"] for message in row["messages"]])


def equal_width(lengths: list[int], num_buckets: int) -> list[int]:
    bounds = np.linspace(min(lengths), max(lengths), num_buckets + 1)[1:-1]
    return sorted(set(bounds.astype(int).tolist()))


def share(padded: int, lengths: list[int]) -> float:
    return round(1 - sum(lengths) / padded, 4)


def measure(lengths: list[int], edges: list[int], *, max_tokens: int) -> dict[str, Any]:
    buckets = np.searchsorted(edges, lengths).tolist()
    longest: dict[int, int] = {}
    for length, bucket in zip(lengths, buckets, strict=True):
        longest[bucket] = max(longest.get(bucket, 0), length)
    batches = epoch_batches(lengths, buckets, max_tokens=max_tokens, seed=0, epoch=0)
    order = [buckets[batch[0]] for batch in batches]
    before, after = (max(len(list(run)) for _, run in groupby(names)) for names in (sorted(order), order))
    return {
        "edges": edges,
        "padding_share": share(sum(longest[bucket] for bucket in buckets), lengths),
        "batch_padding_share": share(sum(len(b) * max(lengths[row] for row in b) for b in batches), lengths),
        "batches": len(batches),
        "longest_run": {"before": before, "after": after},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", type=Path)
    parser.add_argument("--num-buckets", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=4096)
    args = parser.parse_args()
    files = args.data or [resolve("bundled:gsm8k-train"), resolve("bundled:evaluation")]
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    tokenizer = load_chat(pin(VerifierConfig(model="bundled:demo-verifier"))).tokenizer
    encodings = tokenizer.backend_tokenizer.encode_batch([text_of(row) for row in rows], add_special_tokens=False)
    lengths = [len(encoding) for encoding in encodings]
    methods = {
        "none": [],
        "equal_width": equal_width(lengths, args.num_buckets),
        "quantile": bucket_edges(lengths, args.num_buckets, method="quantile"),
        "optimal": bucket_edges(lengths, args.num_buckets, method="optimal"),
    }
    record: dict[str, Any] = {"rows": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
    for name, edges in methods.items():
        record[name] = measure(lengths, edges, max_tokens=max(args.max_tokens, max(lengths)))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
