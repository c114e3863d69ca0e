"""Extraction stage: the verifier reads the corpus once, and its hidden states at the tap layers are stored in shards.

Plan, extract each shard, seal. A shard is an artifact of its own and the unit of retry and resume; the seal puts an
index and the verifier's frozen ends beside them, so that training needs nothing else. Knows no Zarr and no drafter.

B batch, T tokens, F features (taps x hidden size)
"""

import json
import logging
import math
import random
import shutil
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import polars as pl
import torch
from safetensors.torch import save_file

from dflash.config import ExtractionConfig
from dflash.corpus.bucketing import padded_runs
from dflash.devices import give_back
from dflash.hidden.planning import ShardPlan, plan_shards
from dflash.hidden.store import FINAL, LEDGER, REMOTE, RowStates, check_recorded, write_shard
from dflash.keys import extraction_key
from dflash.manifests import (
    MANIFEST,
    Artifact,
    FileRecord,
    Progress,
    file_sha256,
    load_manifest,
    publish,
    remove_leftovers,
    silent,
)
from dflash.pinning import PinnedVerifier, complete_settings, tap_layers
from dflash.verifier import LOGITS_AT_ONCE, Outputs, Verifier, describe_norm, load_verifier

log = logging.getLogger(__name__)

FEATURES = (
    "features[t] are the outputs of the decoder layers target_layer_ids (0-based; Transformers' hidden_states[id + 1], "
    "before the final norm) at token t, side by side."
)
GREEDY_IDS = {
    True: "greedy_ids[t] is the verifier's choice for the token after t.",
    False: "greedy_ids[t] is the token after t in the data (0 after the last): the verifier was not asked.",
}
LOGITS = "softcap * tanh(scale * head / softcap), or scale * head without softcap; head: the LM head's output"


class Limits(NamedTuple):
    """What a batch may change: a state relative to its norm, a choice to the way from the mean logit to the largest."""

    mean: float  # of the states of a row
    state: float  # of any token
    choice: float  # of any token


SPOT_CHECKS = 2  # rows of each shard that are computed again, alone
# Measured on 32 random layers, a batch against its rows alone: in bfloat16 0.06 of a token's state and 0.02 of a choice
# at most, 0.33 and 0.08 where tokens go to other experts; in float16 a sixth, in float32 4e-5. The state of another
# token, or of one that saw padding, is usually off by 1, as is a choice taken from elsewhere.
LIMITS = {"float32": Limits(1e-4, 0.01, 1e-3), "float16": Limits(0.02, 0.5, 0.02), "bfloat16": Limits(0.1, 0.5, 0.1)}
REROUTED = 0.01  # of the tokens, where there are experts: those may be beyond the limits of single tokens
# Tokens of a batch on a CPU. More make it no faster: they leave the cache and are padded more (measured on one thread:
# 512 and 1024 equal, 4096 takes 1.15 times as long, 16384 twice).
MOST_ON_CPU = 1024
_loading = threading.Lock()
_Item = TypeVar("_Item")


class _Batch(NamedTuple):
    """What the verifier said to some rows. Its numbers may be used when `wait` has returned."""

    rows: list[RowStates]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


@lru_cache(maxsize=1)
def _load(pinned: PinnedVerifier) -> Verifier:
    return load_verifier(pinned)


def loaded_verifier(pinned: PinnedVerifier) -> Verifier:
    """Loaded once per process, until the seal."""
    with _loading:
        return _load(pinned)


def batch_tokens(config: ExtractionConfig, verifier: Verifier) -> int:
    """Padded tokens of a batch, of which a CPU is given fewer."""
    return min(config.batch_tokens, MOST_ON_CPU) if verifier.device.type == "cpu" else config.batch_tokens


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
    if config.storage:
        from dflash.hidden import remote  # loads zarr, which others do without

        remote.check_storage(config.storage)
    loaded = loaded_verifier(verifier)
    checked = random.Random(str(plan.key)).sample(range(rows.height), min(SPOT_CHECKS, rows.height))
    kept_back: dict[int, RowStates] = {}
    summary: dict[str, Any] = {"rows": rows.height, "tokens": plan.tokens, "shard": plan.number}
    counts: list[tuple[int, int]] = []
    batches = _batches(
        rows,
        verifier=loaded,
        layers=layers,
        greedy=config.greedy,
        final=config.store_final,
        top_k=config.top_k,
        batch_tokens=batch_tokens(config, loaded),
    )
    with (
        publish(plan.key, summary=summary, location=plan.location) as (folder, artifact),
        closing(_ahead(batches)) as computed,
    ):
        states = _in_order(computed, total=plan.tokens, progress=progress)
        left_out = write_shard(
            folder,
            _counted(states, counts, checked=checked, kept_back=kept_back),
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
                **_conventions(config, loaded),
            },
        )
        summary["left_out"] = [entry.row for entry in left_out]
        for row in sorted(kept_back.keys() - set(summary["left_out"])):
            if fault := spot_check(loaded, kept_back[row], layers=layers, greedy=config.greedy):
                raise ValueError(f"shard {plan.name}: row {rows['id'][row]}: {fault}")
        kept = [count for row, count in enumerate(counts) if row not in summary["left_out"]]
        summary["supervised"], summary["on_policy"] = (sum(count[i] for count in kept) for i in (0, 1))
        summary["bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if config.storage:
            destination = f"{config.storage}/{plan.key.inputs['extraction']}/shards/{plan.number:04d}"
            summary["url"] = remote.move(folder, destination, record=folder / REMOTE).url
        made = {MANIFEST, *(path.name for path in folder.iterdir())}
    for path in artifact().path.iterdir():  # a manifest set aside, arrays that an object store has now
        if path.name not in made:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    log.info("shard %s: %d rows, %d tokens, %d bytes", plan.name, rows.height, plan.tokens, summary["bytes"])
    for entry in left_out:
        log.warning("shard %s: row %s is left out: %s", plan.name, entry.id, entry.reason)
    return artifact()


def _conventions(config: ExtractionConfig, verifier: Verifier) -> dict[str, Any]:
    """What the arrays mean, for whoever reads them with nothing of this library."""
    final = {"final": f"final[t] is {FINAL}, at token t."} if config.store_final else {}
    norm = describe_norm(verifier.final_norm)
    return {"features": FEATURES, "greedy_ids": GREEDY_IDS[config.greedy], **final, "final_norm": norm}


def _batches(
    rows: pl.DataFrame,
    *,
    verifier: Verifier,
    layers: Sequence[int],
    greedy: bool,
    final: bool,
    top_k: int,
    batch_tokens: int,
) -> Iterator[_Batch]:
    """The states of the rows, in order. Padded on the right, where causal attention makes a mask unnecessary."""
    for batch in padded_runs(rows["length"].to_list(), batch_tokens):
        part = rows[batch.start : batch.stop]
        ids = [torch.tensor(values) for values in part["input_ids"].to_list()]
        masks = [torch.tensor(values) for values in part["loss_mask"].to_list()]
        padded_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        outputs = verifier.forward(padded_BT, layers=layers, greedy=greedy, final=final, top_k=top_k)
        if not greedy:
            outputs = outputs._replace(greedy_BT=torch.nn.functional.pad(padded_BT[:, 1:], (0, 1)))
        # from a GPU into pinned memory, while the next batch is computed
        outputs = Outputs._make(output.to("cpu", non_blocking=True) for output in outputs)
        copied = None
        if verifier.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(verifier.device))
        states = [
            RowStates(
                outputs.features_BTF[i, : len(ids_T)],
                ids_T,
                mask_T,
                outputs.greedy_BT[i, : len(ids_T)],
                outputs.final_BTH[i, : len(ids_T)] if final else None,
                outputs.topk_ids_BTK[i, : len(ids_T)] if top_k else None,
                outputs.topk_logprobs_BTK[i, : len(ids_T)] if top_k else None,
            )
            for i, (ids_T, mask_T) in enumerate(zip(ids, masks, strict=True))
        ]
        yield _Batch(states, copied)


def _ahead(items: Iterator[_Item]) -> Generator[_Item, None, None]:
    """The same items, each computed in a thread of its own while the one before it is in use."""
    end: Any = object()
    with ThreadPoolExecutor(1, thread_name_prefix="verifier") as pool:
        following = pool.submit(next, items, end)
        while (item := following.result()) is not end:
            following = pool.submit(next, items, end)
            yield item


def _in_order(batches: Iterator[_Batch], *, total: int, progress: Progress) -> Iterator[RowStates]:
    done = 0
    for batch in batches:
        batch.wait()
        yield from batch.rows
        done += sum(len(row.input_ids_T) for row in batch.rows)
        progress(done, total, f"{done:,} of {total:,} tokens")


def _counted(
    states: Iterable[RowStates],
    counts: list[tuple[int, int]],
    *,
    checked: Sequence[int],
    kept_back: dict[int, RowStates],
) -> Iterator[RowStates]:
    """The same states; adds for each how many tokens are supervised, and how many of them the verifier would choose.

    Copies of those to be `checked` are `kept_back`.
    """
    for number, row in enumerate(states):
        supervised_T = row.loss_mask_T[1:]
        chosen_T = (row.input_ids_T[1:] == row.greedy_ids_T[:-1])[supervised_T]
        counts.append((int(supervised_T.sum()), int(chosen_T.sum())))
        if number in checked:
            kept_back[number] = RowStates._make(None if part is None else part.clone() for part in row)
        yield row


def spot_check(verifier: Verifier, row: RowStates, *, layers: Sequence[int], greedy: bool) -> str:
    """How what is stored of a row differs from what the verifier gives to it alone; empty where they agree.

    Without `greedy` the row's choices are not the verifier's.
    """
    chosen = greedy or row.topk_ids_TK is not None
    final = chosen or row.final_TH is not None
    alone = verifier.forward(row.input_ids_T[None], layers=layers, greedy=False, final=final)
    names = [f"layer {layer}" for layer in layers]
    batched, exact = (
        list(states_TF.split(verifier.hidden_size, -1)) for states_TF in (row.features_TF, alone.features_BTF[0].cpu())
    )
    if row.final_TH is not None:
        names, batched, exact = [*names, "the final norm"], [*batched, row.final_TH], [*exact, alone.final_BTH[0].cpu()]
    dtype = str(verifier.dtype).removeprefix("torch.")
    limits = LIMITS[dtype]
    remedy = f"is expected of {dtype}; set extraction.batch_tokens to 1, or choose another verifier.attn_implementation"
    rerouted = math.ceil(REROUTED * len(row.input_ids_T)) if verifier.has_experts else 0
    for name, batched_TH, exact_TH in zip(names, batched, exact, strict=True):
        error_T, norm_T = (x.float().norm(dim=-1) for x in (batched_TH - exact_TH, exact_TH))
        error_T = error_T / norm_T.clamp(min=1e-30)
        if not (error := error_T.mean().item()) <= limits.mean:  # nan is not
            return (
                f"alone, its states after {name} differ by {error:.2g} of their norm from those in a batch, at most "
                f"{limits.mean:g} {remedy}"
            )
        error, token = _largest(error_T, but=rerouted)
        if not error <= limits.state:
            return (
                f"alone, its state after {name} at token {token} differs by {error:.2g} of its norm from that in a "
                f"batch, at most {limits.state:g} {remedy}"
            )
    if chosen:
        error, token = _largest(_choice_errors(verifier, row, alone.final_BTH[0], greedy=greedy), but=rerouted)
        if not error <= limits.choice:
            return (
                f"alone, the verifier's likeliest tokens after token {token} differ by {error:.2g} of its logits' "
                f"range from those in a batch, at most {limits.choice:g} {remedy}"
            )
    return ""


def _largest(error_T: torch.Tensor, *, but: int) -> tuple[float, int]:
    """The largest error but so many, and its token."""
    errors, tokens = error_T.topk(min(1 + but, len(error_T)))
    return errors[-1].item(), int(tokens[-1])


def _choice_errors(verifier: Verifier, row: RowStates, final_TH: torch.Tensor, *, greedy: bool) -> torch.Tensor:
    """How far below the likeliest token, by the logits of these states, is the row's choice after each token; and how
    far from theirs are its log-probabilities, if it has any. As a share of the way from the mean logit to the largest.

    The logits of a bounded number of positions exist at a time.
    """
    errors = []
    at_once = max(1, LOGITS_AT_ONCE // verifier.head.weight.shape[0])
    for start in range(0, len(final_TH), at_once):
        part = slice(start, start + at_once)
        logits_PV = verifier.logits(final_TH[part])
        best_P = logits_PV.amax(-1)
        error_P = torch.zeros_like(best_P)
        if greedy:
            chosen_P1 = row.greedy_ids_T[part, None].to(logits_PV.device)
            error_P = best_P - logits_PV.gather(-1, chosen_P1)[:, 0]
        if row.topk_ids_TK is not None and row.topk_logprobs_TK is not None:
            ids_PK, stored_PK = (x[part].to(logits_PV.device) for x in (row.topk_ids_TK, row.topk_logprobs_TK))
            logprobs_PV = logits_PV.log_softmax(-1)
            # theirs, and none that is likelier was left out
            for exact_PK in (logprobs_PV.gather(-1, ids_PK), logprobs_PV.topk(ids_PK.shape[1]).values):
                error_P = error_P.maximum((stored_PK - exact_PK).abs().amax(-1))
        errors.append(error_P / (best_P - logits_PV.mean(-1)).clamp(min=1e-30))
    return torch.cat(errors).cpu()


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
    for shard in shards:
        check_recorded(shard)
    key = extraction_key(config, corpus, verifier)
    layers = tap_layers(verifier.num_layers, config.num_taps, config.target_layer_ids)
    loaded = loaded_verifier(verifier)
    whole = _index(pl.scan_parquet(corpus.path / "corpus.parquet").drop("input_ids", "loss_mask").collect(), plans)
    left_out = {plan.rows[i] for plan, shard in zip(plans, shards, strict=True) for i in shard.summary["left_out"]}
    index = whole[[row for row in range(whole.height) if row not in left_out]]
    if not index.height:
        entry = json.loads((shards[0].path / LEDGER).read_text())[0]
        raise ValueError(
            f"no row is left: all {whole.height} are left out, the first ({entry['id']}): {entry['reason']}"
        )
    supervised, on_policy = (sum(shard.summary[name] for shard in shards) for name in ("supervised", "on_policy"))
    states = {
        **_conventions(config, loaded),
        "logits": loaded.logit_rule._asdict(),
        "logits_are": LOGITS,
        "target_layer_ids": layers,
        "num_target_layers": verifier.num_layers,
        "hidden_size": verifier.hidden_size,
        "storage_dtype": config.storage_dtype,
        "store_final": config.store_final,
        "top_k": config.top_k,
        "verifier": {name: getattr(verifier, name) for name in ("name", "identity", "dtype", "revision")},
        "chat": corpus.summary["chat"],
        # of the supervised tokens, those that the verifier would choose greedily: low where answers are not its own,
        # and unknown where it was not asked
        "on_policy_share": on_policy / supervised if config.greedy else None,
    }
    known = {name: record for shard in shards for name, record in records_of(shard).items()}
    summary = {
        "rows": index.height,
        "left_out": len(left_out),
        "tokens": int(index["length"].sum()),
        "shards": len(shards),
        "target_layer_ids": layers,
        "storage_dtype": config.storage_dtype,
        "on_policy_share": states["on_policy_share"],
        "bytes": sum(shard.summary["bytes"] for shard in shards),
    }
    with publish(key, summary=summary, known=known) as (folder, artifact):
        index.write_parquet(folder / "index.parquet")
        weights = {name: weight.cpu().contiguous() for name, weight in loaded.frozen_weights().items()}
        save_file(weights, folder / "verifier.safetensors")
        settings = complete_settings(Path(verifier.path), trust_remote_code=verifier.trust_remote_code)
        (folder / "verifier_config.json").write_text(json.dumps(settings, indent=2))
        (folder / "states.json").write_text(json.dumps(states, indent=1))
    remove_leftovers(artifact().path / "shards")
    del loaded, weights  # training wants the memory
    _load.cache_clear()
    give_back()
    progress(1, 1, f"{summary['tokens']:,} tokens")
    log.info("hidden states: %(rows)d rows, %(tokens)d tokens, %(bytes)d bytes, layers %(target_layer_ids)s", summary)
    if config.greedy:
        log.info("%.1f%% of the supervised tokens are the verifier's own greedy choice", 100 * on_policy / supervised)
    return artifact()


def _index(corpus: pl.DataFrame, plans: list[ShardPlan]) -> pl.DataFrame:
    """The corpus, which comes without its tokens, and where the states of each row begin."""
    lengths = corpus["length"].to_list()
    shard, start = [0] * corpus.height, [0] * corpus.height
    for plan in plans:
        for row, begin in zip(plan.rows, accumulate((lengths[r] for r in plan.rows), initial=0), strict=False):
            shard[row], start[row] = plan.number, begin
    return corpus.with_columns(shard=pl.Series(shard, dtype=pl.Int32), start=pl.Series(start, dtype=pl.Int64))


def records_of(shard: Artifact) -> dict[str, FileRecord]:
    """The files of a shard, its manifest included, by their names in the whole."""
    prefix, manifest = f"shards/{shard.path.name}", shard.path / MANIFEST
    stat = manifest.stat()
    own = FileRecord(size=stat.st_size, sha256=file_sha256(manifest), mtime_ns=stat.st_mtime_ns)
    return {f"{prefix}/{name}": record for name, record in load_manifest(shard.path).files.items()} | {
        f"{prefix}/{MANIFEST}": own
    }
