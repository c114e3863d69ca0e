"""Tokenization stage: conversations to rows of token ids with a supervised mask, a split and a length bucket.

Answers keep the ids that the verifier served; only the data's own answers are rendered and tokenized (`chat.py`). Rows
pass through in slices, each of which becomes a part file, so that neither text nor ids ever fill the memory.
"""

import hashlib
import json
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import polars as pl

from dflash.config import TokenizationConfig
from dflash.corpus.bucketing import bucket_edges
from dflash.corpus.chat import Chat, load_chat, rows_of, rows_of_turns
from dflash.corpus.records import Ledger, Rejected, Row, Turn, spans_of
from dflash.corpus.workers import follow_parent
from dflash.keys import tokenization_key
from dflash.manifests import Artifact, Progress, publish, silent
from dflash.pinning import PinnedVerifier

log = logging.getLogger(__name__)

CORPUS = pl.Schema(
    {
        "id": pl.String(),
        "category": pl.String(),
        "split": pl.String(),
        "bucket": pl.Int32(),
        "length": pl.Int32(),
        "num_supervised": pl.Int32(),
        "input_ids": pl.List(pl.Int32()),
        "loss_mask": pl.List(pl.Boolean()),
    }
)
"""Columns of the corpus. The id is the conversation's; of a row that holds one of several answers, `id#turn`."""

PART = pl.Schema({name: kind for name, kind in CORPUS.items() if name != "bucket"})
PART_ROWS = 2048  # of a part file and of a row group of the corpus: 30 MB at 3,072 tokens
AT_ONCE = 256  # rows that are Python objects at a time, which take ten times the memory
WORTH_WORKERS = 50_000  # rows to tokenize; with fewer, workers (seconds each to start) make it slower
SPLIT_SALT = "dflash/split/"


def split_of(group: str, *, validation_share: float) -> str:
    """`validation` or `train`, by hash: a conversation keeps its side when data is added, or the share only grows."""
    digest = hashlib.sha256((SPLIT_SALT + group).encode()).digest()
    return "validation" if int.from_bytes(digest[:8]) / 2**64 < validation_share else "train"


def tokenize(
    config: TokenizationConfig, conversations: Artifact, verifier: PinnedVerifier, *, progress: Progress = silent
) -> Artifact:
    """Build `corpus.parquet` (columns CORPUS), ordered by bucket, the order of the conversations within.

    Raises ValueError where more rows are dropped than allowed, where none is left, and where a split is empty that
    must not be.
    """
    source = conversations.path / "conversations.parquet"
    scan = pl.scan_parquet(source)
    total, to_tokenize = scan.select(pl.len(), to_tokenize=pl.col("turn").is_null().sum()).collect().row(0)
    workers = config.workers or (os.cpu_count() or 1 if to_tokenize >= WORTH_WORKERS else 1)
    make = partial(
        _make_part,
        verifier=verifier,
        turns=config.turns,
        mask_empty_thinking=config.mask_empty_thinking,
        max_length=config.max_length,
        min_supervised=config.min_supervised,
        validation_share=config.validation_share,
    )
    summary: dict[str, Any] = {}
    with (
        publish(tokenization_key(config, conversations, verifier), summary=summary, content_identity=True) as (
            folder,
            artifact,
        ),
        TemporaryDirectory(dir=folder) as aside,
    ):
        counts, t0 = Counts(), perf_counter()
        for part in _make_parts(_slices(scan), make, folder=Path(aside), workers=min(workers, -(-total // PART_ROWS))):
            counts.add(part)
            seconds = perf_counter() - t0
            speed = f"{counts.rows_read / seconds:,.0f} rows/s, {counts.tokens / seconds:,.0f} tokens/s"
            progress(counts.rows_read, total, f"{counts.tokens:,} tokens, {speed}")
        _check(counts.ledger, config, source=source)
        log.info("%d rows to %d tokens by %d processes, %s", total, counts.tokens, workers, speed)
        parts = pl.scan_ipc(sorted(Path(aside).iterdir()))  # cheaper than Parquet to read once per bucket
        rows = parts.select("split", "length", "num_supervised").collect()
        splits = _splits(rows["split"], config, source=source)
        edges = config.edges or bucket_edges(rows["length"], config.num_buckets, method=config.bucketing)
        buckets = _bucket_table(rows.with_columns(bucket=_bucket(edges)))
        in_order = [parts.filter(_bucket(edges) == n).with_columns(bucket=n) for n in range(len(edges) + 1)]
        pl.concat(in_order).select(pl.col(name).cast(kind) for name, kind in CORPUS.items()).sink_parquet(
            folder / "corpus.parquet", row_group_size=PART_ROWS, maintain_order=True
        )
        summary |= counts.ledger.summary() | {
            "truncated": counts.truncated,
            "tokens": counts.tokens,
            "supervised": int(rows["num_supervised"].sum()),
            "splits": splits,
            "edges": edges,
            "padding_share": round(1 - counts.tokens / sum(b["rows"] * b["longest"] for b in buckets), 4),
            "buckets": buckets,
            "chat": {
                "template_sha256": counts.template_sha256,
                "options": verifier.chat.model_dump(exclude={"template"}),
            },
        }
    log.info("%(rows)d of %(rows_in)d rows kept, dropped %(dropped)s, %(truncated)d truncated", summary)
    log.info("%(tokens)d tokens, %(supervised)d supervised; splits %(splits)s; bucket edges %(edges)s", summary)
    return artifact()


@dataclass
class Counts:
    """What became of some rows. `template_sha256` is of the chat template, where any of them went through it."""

    rows_read: int = 0
    template_sha256: str | None = None
    tokens: int = 0
    truncated: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def add(self, other: "Counts") -> None:
        self.rows_read += other.rows_read
        self.template_sha256 = self.template_sha256 or other.template_sha256
        self.tokens += other.tokens
        self.truncated += other.truncated
        self.ledger.add(other.ledger)


def _slices(scan: pl.LazyFrame) -> Iterator[pl.DataFrame]:
    """Runs of PART_ROWS rows, the same on any machine."""
    rest = pl.DataFrame(schema=scan.collect_schema())
    for batch in scan.collect_batches(chunk_size=PART_ROWS, maintain_order=True):
        *complete, rest = _runs(pl.concat([rest, batch]), PART_ROWS)
        yield from complete
    if rest.height:
        yield rest


def _runs(frame: pl.DataFrame, num_rows: int) -> list[pl.DataFrame]:
    """Cut into runs of `num_rows`, or a few more: the answers of a conversation stay together."""
    runs = []
    while (begins := (frame["turn"][num_rows:].fill_null(0) == 0).arg_true()).len():
        cut = num_rows + begins[0]
        runs.append(frame[:cut])
        frame = frame[cut:]
    return [*runs, frame]


def _make_parts(
    slices: Iterator[pl.DataFrame], make: Callable[[pl.DataFrame, Path], Counts], *, folder: Path, workers: int
) -> Iterator[Counts]:
    """Make the part file of each slice, in this process or in several, a few slices ahead; results come in order."""
    paths = (folder / f"{number:06d}.arrow" for number in count())
    if workers <= 1:
        yield from map(make, slices, paths)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker)
    pending: deque[Future[Counts]] = deque()
    try:
        for frame, path in zip(slices, paths, strict=False):
            pending.append(pool.submit(make, frame, path))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker per core already
    follow_parent()


@lru_cache(maxsize=1)
def _chat(verifier: PinnedVerifier) -> Chat:
    return load_chat(verifier)


def _make_part(
    frame: pl.DataFrame,
    path: Path,
    *,
    verifier: PinnedVerifier,
    turns: str,
    mask_empty_thinking: bool,
    max_length: int,
    min_supervised: int,
    validation_share: float,
) -> Counts:
    """Tokenize some conversations into the file `path` (columns PART)."""
    counts, made = Counts(rows_read=frame.height), []
    limit = partial(_cut, max_length=max_length, min_supervised=min_supervised, vocab_size=verifier.vocab_size)
    for run in _runs(frame, AT_ONCE):
        facts, rows = [], []
        for head, result in _rows(run, verifier=verifier, turns=turns, mask_empty_thinking=mask_empty_thinking):
            split = split_of(head["group"], validation_share=validation_share)
            for row in [result] if isinstance(result, Rejected) else result:
                counts.ledger.count(head["origin"])
                cut = row if isinstance(row, Rejected) else limit(row)
                if isinstance(cut, Rejected):
                    counts.ledger.drop(head["origin"], cut.reason, example=f"{head['source']}: {cut}")
                    continue
                counts.ledger.keep(head["origin"])
                counts.tokens += len(cut.input_ids)
                counts.truncated += cut is not row
                id = head["id"] if cut.turn is None else f"{head['id']}#{cut.turn}"
                facts.append((id, head["category"], split))
                rows.append(cut)
        made.append(_frame(facts, rows))
    if frame["messages"].is_not_null().any():
        counts.template_sha256 = _chat(verifier).template_sha256
    pl.concat(made).write_ipc(path, compression="zstd")
    return counts


def _frame(facts: list[tuple[str, str, str]], rows: list[Row]) -> pl.DataFrame:
    """Columns PART, of (id, category, split) and rows. Ids go through flat arrays: a third of the time of lists."""
    lengths = [len(row.input_ids) for row in rows]
    ids = np.fromiter(chain.from_iterable(row.input_ids for row in rows), dtype=np.int32, count=sum(lengths))
    mask = np.zeros(len(ids), dtype=bool)
    for first, row in zip(accumulate(lengths, initial=0), rows, strict=False):
        for start, end in row.spans:
            mask[first + start : first + end] = True
    tokens = pl.DataFrame({"row": np.repeat(np.arange(len(rows)), lengths), "input_ids": ids, "loss_mask": mask})
    lists = tokens.group_by("row", maintain_order=True).agg(
        "input_ids", "loss_mask", length=pl.len(), num_supervised=pl.col("loss_mask").sum()
    )
    columns = pl.DataFrame(facts, schema=["id", "category", "split"], orient="row").hstack(lists)
    return columns.select(pl.col(name).cast(kind) for name, kind in PART.items())


def _rows(
    frame: pl.DataFrame, *, verifier: PinnedVerifier, turns: str, mask_empty_thinking: bool
) -> list[tuple[dict[str, Any], list[Row] | Rejected]]:
    """The rows of each conversation, beside its first row in the frame."""
    conversations: list[list[dict[str, Any]]] = []
    for row in frame.iter_rows(named=True):
        if row["turn"]:  # a further answer of the conversation before it
            conversations[-1].append(row)
        else:
            conversations.append([row])
    results: dict[int, list[Row] | Rejected] = {}
    messages, texts = [], []
    for number, (head, *_) in enumerate(conversations):
        if head["turn"] is not None:
            answers = [Turn(row["prompt_ids"], row["response_ids"]) for row in conversations[number]]
            results[number] = rows_of_turns(answers, turns=turns)
        elif head["input_ids"] is not None:
            results[number] = [Row(head["input_ids"], spans_of(head["loss_mask"]))]
        elif head["text"] is not None:
            texts.append(number)
        else:
            messages.append(number)
    if messages:
        heads = [conversations[number][0] for number in messages]
        batch = [(json.loads(head["messages"]), json.loads(head["tools"] or "null")) for head in heads]
        chat = _chat(verifier)
        results |= zip(
            messages, rows_of(chat, batch, turns=turns, mask_empty_thinking=mask_empty_thinking), strict=True
        )
    if texts:
        tokenizer = _chat(verifier).tokenizer.backend_tokenizer
        encodings = tokenizer.encode_batch_fast([conversations[number][0]["text"] for number in texts])
        # nothing was asked here: all is supervised that has a token before it
        results |= zip(texts, ([Row(e.ids, [(1, len(e.ids))])] for e in encodings), strict=True)
    return [(head, results[number]) for number, (head, *_) in enumerate(conversations)]


def _cut(row: Row, *, max_length: int, min_supervised: int, vocab_size: int) -> Row | Rejected:
    """The row, or its first `max_length` tokens; Rejected where training could not use it."""
    if not any(start < end for start, end in row.spans):
        return Rejected("no_supervised", "no token is supervised")
    wrong = next((id for id in (min(row.input_ids), max(row.input_ids)) if not 0 <= id < vocab_size), None)
    if wrong is not None:
        return Rejected("id_out_of_vocabulary", f"id {wrong} is not in the verifier's vocabulary of {vocab_size}")
    if len(row.input_ids) > max_length:
        spans = [(start, min(end, max_length)) for start, end in row.spans if start < max_length]
        row = Row(row.input_ids[:max_length], spans, row.turn)
    num_supervised = sum(end - start for start, end in row.spans)
    # a block opens at a supervised token after the first of the row, and predicts at least the next one
    opens = any(end - max(start, 1) >= 2 for start, end in row.spans)
    if num_supervised < min_supervised or not opens:
        found = f"{num_supervised} supervised tokens{'' if opens else ', no two of them neighbours'}"
        return Rejected("too_few_supervised", f"{found}, within {len(row.input_ids)} tokens")
    return row


def _check(ledger: Ledger, config: TokenizationConfig, *, source: Path) -> None:
    """Log what was dropped; raises ValueError where it is all, or more than `max_dropped_share`."""
    dropped, num_rows = ledger.totals(), ledger.rows_in.total()
    for reason, number in dropped.items():
        log.warning("%d rows dropped: %s, first %s", number, reason, ledger.examples[reason])
    if dropped.keys() <= {"no_supervised", "too_few_supervised"} and not ledger.kept.total():
        raise ValueError(
            f"{source}: no supervised tokens at all: each of {num_rows} rows has fewer than min_supervised "
            f"{config.min_supervised} within max_length {config.max_length}; let the verifier answer longer "
            "(generation.max_new_tokens) or raise tokenization.max_length"
        )
    most = config.max_dropped_share if ledger.kept.total() else 0
    ledger.check(most=most, setting="tokenization.max_dropped_share")


def _splits(splits: pl.Series, config: TokenizationConfig, *, source: Path) -> dict[str, int]:
    """Rows per split. Raises ValueError where none is left for training."""
    counts = {name: int((splits == name).sum()) for name in ("train", "validation")}
    if counts["train"] == 0:
        raise ValueError(
            f"{source}: validation_share {config.validation_share} leaves none of {len(splits)} rows for training; "
            "lower it or give more prompts"
        )
    if config.validation_share > 0 and counts["validation"] == 0:
        log.warning("none of %d rows fell into validation_share %g", len(splits), config.validation_share)
    return counts


def _bucket(edges: list[int]) -> pl.Expr:
    """Bucket of each `length`: 0 up to `edges[0]`, `len(edges)` above the last edge."""
    return pl.sum_horizontal(pl.lit(0), *(pl.col("length") > edge for edge in edges)).cast(pl.Int32)


def _bucket_table(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Per bucket: rows, tokens, shortest and longest row, and the padding if all rows were padded to the longest."""
    length = pl.col("length").cast(pl.Int64)
    table = (
        rows.group_by("bucket")
        .agg(rows=pl.len(), tokens=length.sum(), shortest=length.min(), longest=length.max())
        .with_columns(padding_share=(1 - pl.col("tokens") / (pl.col("rows") * pl.col("longest"))).round(4))
    )
    return table.sort("bucket").to_dicts()
