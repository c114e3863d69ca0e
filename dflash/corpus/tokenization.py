"""Tokenization stage: conversations to rows of token ids with a supervised mask, a split and a length bucket.

The ids are those the verifier served, so nothing is tokenized twice; here they are joined, cut, counted and sorted.
"""

import hashlib
import logging
from typing import Any

import polars as pl

from dflash.config import TokenizationConfig
from dflash.corpus.bucketing import assign, bucket_edges
from dflash.keys import tokenization_key
from dflash.manifests import Artifact, Progress, publish, silent
from dflash.pinning import PinnedVerifier

log = logging.getLogger(__name__)

COLUMNS = ["id", "category", "split", "bucket", "length", "num_supervised", "input_ids", "loss_mask"]
SPLIT_SALT = "dflash/split/"


def split_of(id: str, *, validation_share: float) -> str:
    """`validation` or `train`, by hash: a conversation keeps its side when data is added, or the share only grows."""
    digest = hashlib.sha256((SPLIT_SALT + id).encode()).digest()
    return "validation" if int.from_bytes(digest[:8]) / 2**64 < validation_share else "train"


def tokenize(
    config: TokenizationConfig, conversations: Artifact, verifier: PinnedVerifier, *, progress: Progress = silent
) -> Artifact:
    """Build `corpus.parquet`, ordered by bucket and id: prompt and response ids, the response supervised.

    Raises ValueError where no row has enough supervised tokens, and where a split that was asked for is empty.
    """
    key = tokenization_key(config, conversations, verifier)
    source = conversations.path / "conversations.parquet"
    served = pl.read_parquet(source)
    rows = _join(served, max_length=config.max_length).filter(pl.col("num_supervised") >= config.min_supervised)
    if rows.is_empty():
        raise ValueError(
            f"{source}: no supervised tokens at all: each of {served.height} rows has fewer than min_supervised "
            f"{config.min_supervised} within max_length {config.max_length}; let the verifier answer longer "
            "(generation.max_new_tokens) or raise tokenization.max_length"
        )
    rows = rows.with_columns(
        split=pl.Series([split_of(id, validation_share=config.validation_share) for id in rows["id"]])
    )
    splits = {name: rows.filter(split=name).height for name in ("train", "validation")}
    if splits["train"] == 0:
        raise ValueError(
            f"{source}: validation_share {config.validation_share} leaves none of {rows.height} rows for training; "
            "lower it or give more prompts"
        )
    if config.validation_share > 0 and splits["validation"] == 0:
        log.warning("none of %d rows fell into validation_share %g", rows.height, config.validation_share)
    edges = bucket_edges(rows["length"].to_list(), config.num_buckets)
    rows = rows.with_columns(bucket=pl.Series(assign(rows["length"].to_list(), edges), dtype=pl.Int32))
    num_truncated = int(rows["truncated"].sum())
    rows = rows.select(COLUMNS).sort("bucket", "id")
    summary = {
        "rows": rows.height,
        "rows_in": served.height,
        "dropped": {"too_few_supervised": served.height - rows.height},
        "truncated": num_truncated,
        "tokens": int(rows["length"].sum()),
        "supervised": int(rows["num_supervised"].sum()),
        "splits": splits,
        "edges": edges,
        "buckets": _bucket_table(rows),
    }
    log.info("%(rows)d of %(rows_in)d rows kept, dropped %(dropped)s, %(truncated)d truncated", summary)
    log.info("%(tokens)d tokens, %(supervised)d supervised; splits %(splits)s; bucket edges %(edges)s", summary)
    with publish(key, summary=summary, content_identity=True) as (folder, artifact):
        rows.write_parquet(folder / "corpus.parquet")
    progress(served.height, served.height, f"{summary['tokens']:,} tokens")
    return artifact()


def _join(served: pl.DataFrame, *, max_length: int) -> pl.DataFrame:
    """Prompt and response as one row of at most `max_length` tokens; True in `loss_mask` marks the response."""
    prompt = pl.col("prompt_ids").list.len().cast(pl.Int32)
    whole = prompt + pl.col("response_ids").list.len().cast(pl.Int32)
    rows = served.with_columns(
        input_ids=pl.concat_list("prompt_ids", "response_ids").list.head(max_length),
        length=whole.clip(upper_bound=max_length),
        num_prompt=prompt.clip(upper_bound=max_length),
        truncated=whole > max_length,
    ).with_columns(num_supervised=pl.col("length") - pl.col("num_prompt"))
    mask = pl.concat_list(pl.lit(False).repeat_by("num_prompt"), pl.lit(True).repeat_by("num_supervised"))
    return rows.with_columns(loss_mask=mask)


def _bucket_table(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Per bucket: rows, tokens, shortest and longest row, and the padding if all rows were padded to the longest."""
    length = pl.col("length").cast(pl.Int64)
    table = (
        rows.group_by("bucket")
        .agg(rows=pl.len(), tokens=length.sum(), shortest=length.min(), longest=length.max())
        .with_columns(padding_share=(1 - pl.col("tokens") / (pl.col("rows") * pl.col("longest"))).round(4))
    )
    return table.sort("bucket").to_dicts()
