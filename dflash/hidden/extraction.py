"""Extraction stage: the verifier reads the corpus once, and its hidden states at the tap layers are stored in shards.

Plan, extract each shard, seal. A shard is an artifact of its own and the unit of retry and resume; the seal puts an
index and the verifier's frozen ends beside them, so that training needs nothing else. Knows no Zarr and no drafter.

B batch, T tokens, F features (taps x hidden size)
"""

import json
import logging
import shutil
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import save_file

from dflash.config import ExtractionConfig
from dflash.corpus.bucketing import padded_runs
from dflash.hidden.planning import ShardPlan, plan_shards
from dflash.hidden.store import DAMAGED_MANIFEST, RowStates, write_shard
from dflash.keys import extraction_key
from dflash.manifests import MANIFEST, Artifact, FileRecord, Progress, file_sha256, load_manifest, publish, silent
from dflash.pinning import PinnedVerifier, tap_layers
from dflash.verifier import Verifier, load_verifier

log = logging.getLogger(__name__)

FEATURES = (
    "features[t] are the outputs of the decoder layers target_layer_ids (0-based; Transformers' hidden_states[id + 1], "
    "before the final norm) at token t, side by side. greedy_ids[t] is the verifier's choice for the token after t."
)
_loading = threading.Lock()


@lru_cache(maxsize=1)
def _load(pinned: PinnedVerifier) -> Verifier:
    return load_verifier(pinned)


def _verifier(pinned: PinnedVerifier) -> Verifier:
    """Loaded once per process, until the seal."""
    with _loading:
        return _load(pinned)


def extract_shard(
    plan: ShardPlan,
    config: ExtractionConfig,
    corpus: Artifact,
    verifier: PinnedVerifier,
    *,
    progress: Progress = silent,
) -> Artifact:
    """Make one shard, whether or not it is there already. Raises ValueError for hidden states that no one could use."""
    layers = tap_layers(verifier.num_layers, config.num_taps, config.target_layer_ids)
    first = min(plan.rows)  # a shard is a run of the corpus, so the rest of the file need not be read
    run = pl.scan_parquet(corpus.path / "corpus.parquet").slice(first, len(plan.rows)).collect()
    rows = run[[row - first for row in plan.rows]]
    lengths = rows["length"].to_list()
    summary: dict[str, Any] = {"rows": rows.height, "tokens": plan.tokens, "shard": plan.number}
    with publish(plan.key, summary=summary, location=plan.location) as (folder, artifact):
        states = _states(
            rows,
            verifier=_verifier(verifier),
            layers=layers,
            final=config.store_final,
            top_k=config.top_k,
            batch_tokens=config.batch_tokens,
            progress=progress,
        )
        counts: list[tuple[int, int]] = []
        left_out = write_shard(
            folder,
            _counted(states, counts),
            ids=rows["id"].to_list(),
            lengths=lengths,
            num_taps=len(layers),
            hidden_size=verifier.hidden_size,
            storage_dtype=config.storage_dtype,
            store_final=config.store_final,
            top_k=config.top_k,
            vocab_size=verifier.vocab_size,
            max_left_out_share=config.max_left_out_share,
            attributes={
                "shard": plan.number,
                "target_layer_ids": layers,
                "verifier": verifier.identity,
                "verifier_dtype": verifier.dtype,
            },
        )
        summary["left_out"] = [entry.row for entry in left_out]
        kept = [count for row, count in enumerate(counts) if row not in summary["left_out"]]
        summary["supervised"], summary["on_policy"] = (sum(count[i] for count in kept) for i in (0, 1))
        summary["bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    (artifact().path / DAMAGED_MANIFEST).unlink(missing_ok=True)
    log.info("shard %s: %d rows, %d tokens, %d bytes", plan.name, rows.height, plan.tokens, summary["bytes"])
    for entry in left_out:
        log.warning("shard %s: row %s is left out: %s", plan.name, entry.id, entry.reason)
    return artifact()


def _states(
    rows: pl.DataFrame,
    *,
    verifier: Verifier,
    layers: list[int],
    final: bool,
    top_k: int,
    batch_tokens: int,
    progress: Progress,
) -> Iterator[RowStates]:
    """The states of each row, in order. Padded on the right, where causal attention makes a mask unnecessary."""
    lengths, done, total = rows["length"].to_list(), 0, int(rows["length"].sum())
    for batch in padded_runs(lengths, batch_tokens):
        part = rows[batch.start : batch.stop]
        ids = [torch.tensor(values) for values in part["input_ids"].to_list()]
        padded_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        found = [output.cpu() for output in verifier.forward(padded_BT, layers=layers, final=final, top_k=top_k)]
        features_BTF, greedy_BT, topk_ids_BTK, topk_logprobs_BTK, final_BTH = found
        for i, (ids_T, mask) in enumerate(zip(ids, part["loss_mask"].to_list(), strict=True)):
            length = len(ids_T)
            yield RowStates(
                features_BTF[i, :length],
                ids_T,
                torch.tensor(mask),
                greedy_BT[i, :length],
                final_BTH[i, :length] if final else None,
                topk_ids_BTK[i, :length] if top_k else None,
                topk_logprobs_BTK[i, :length] if top_k else None,
            )
            done += length
        progress(done, total, f"{done:,} of {total:,} tokens")


def _counted(states: Iterable[RowStates], counts: list[tuple[int, int]]) -> Iterator[RowStates]:
    """The same states; adds for each how many tokens are supervised, and how many of them the verifier would choose."""
    for row in states:
        supervised_T = row.loss_mask_T[1:]
        chosen_T = (row.input_ids_T[1:] == row.greedy_ids_T[:-1])[supervised_T]
        counts.append((int(supervised_T.sum()), int(chosen_T.sum())))
        yield row


def seal(
    shards: list[Artifact],
    config: ExtractionConfig,
    corpus: Artifact,
    verifier: PinnedVerifier,
    *,
    progress: Progress = silent,
) -> Artifact:
    """Put index, description and the verifier's frozen weights beside the shards: the extraction artifact."""
    plans = plan_shards(config, corpus, verifier)
    assert [shard.key for shard in shards] == [str(plan.key) for plan in plans], "the shards of another plan"
    key = extraction_key(config, corpus, verifier)
    layers = tap_layers(verifier.num_layers, config.num_taps, config.target_layer_ids)
    loaded = _verifier(verifier)
    whole = _index(pl.scan_parquet(corpus.path / "corpus.parquet").drop("input_ids", "loss_mask").collect(), plans)
    left_out = {plan.rows[i] for plan, shard in zip(plans, shards, strict=True) for i in shard.summary["left_out"]}
    index = whole[[row for row in range(whole.height) if row not in left_out]]
    supervised, on_policy = (sum(shard.summary[name] for shard in shards) for name in ("supervised", "on_policy"))
    states = {
        "features": FEATURES,
        "target_layer_ids": layers,
        "num_target_layers": verifier.num_layers,
        "hidden_size": verifier.hidden_size,
        "storage_dtype": config.storage_dtype,
        "store_final": config.store_final,
        "top_k": config.top_k,
        "verifier": {"name": verifier.name, "identity": verifier.identity, "dtype": verifier.dtype},
        "chat": corpus.summary["chat"],
        # of the supervised tokens, those that the verifier would choose greedily: low where answers are not its own
        "on_policy_share": on_policy / supervised,
    }
    known = {name: record for shard in shards for name, record in _records(shard).items()}
    summary = {
        "rows": index.height,
        "left_out": len(left_out),
        "tokens": int(index["length"].sum()),
        "shards": len(shards),
        "target_layer_ids": layers,
        "storage_dtype": config.storage_dtype,
        "on_policy_share": states["on_policy_share"],
        "bytes": sum(record.size for record in known.values()),
    }
    with publish(key, summary=summary, known=known) as (folder, artifact):
        index.write_parquet(folder / "index.parquet")
        weights = {name: weight.cpu().contiguous() for name, weight in loaded.frozen_weights().items()}
        save_file(weights, folder / "verifier.safetensors")
        shutil.copyfile(Path(verifier.path) / "config.json", folder / "verifier_config.json")
        (folder / "states.json").write_text(json.dumps(states, indent=1))
    for leftover in (artifact().path / "shards").glob(".*"):  # of attempts that were killed
        shutil.rmtree(leftover)
    _load.cache_clear()  # training wants the memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    progress(1, 1, f"{summary['tokens']:,} tokens")
    log.info("hidden states: %(rows)d rows, %(tokens)d tokens, %(bytes)d bytes, layers %(target_layer_ids)s", summary)
    log.info("%.1f%% of the supervised tokens are the verifier's own greedy choice", 100 * summary["on_policy_share"])
    return artifact()


def _index(corpus: pl.DataFrame, plans: list[ShardPlan]) -> pl.DataFrame:
    """The corpus, which comes without its tokens, and where the states of each row begin."""
    lengths = corpus["length"].to_list()
    shard, start = [0] * corpus.height, [0] * corpus.height
    for plan in plans:
        for row, begin in zip(plan.rows, accumulate((lengths[r] for r in plan.rows), initial=0), strict=False):
            shard[row], start[row] = plan.number, begin
    return corpus.with_columns(shard=pl.Series(shard, dtype=pl.Int32), start=pl.Series(start, dtype=pl.Int64))


def _records(shard: Artifact) -> dict[str, FileRecord]:
    """The files of a shard, its manifest included, by their names in the whole."""
    prefix, manifest = f"shards/{shard.path.name}", shard.path / MANIFEST
    stat = manifest.stat()
    own = FileRecord(size=stat.st_size, sha256=file_sha256(manifest), mtime_ns=stat.st_mtime_ns)
    return {f"{prefix}/{name}": record for name, record in load_manifest(shard.path).files.items()} | {
        f"{prefix}/{MANIFEST}": own
    }
