"""Which rows go into which shard, how many bytes that will be, and whether they fit. Reads lengths, loads no model."""

import logging
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from dflash.config import ExtractionConfig
from dflash.keys import extraction_key
from dflash.manifests import MANIFEST, Artifact, Key, home
from dflash.pinning import PinnedVerifier, tap_layers

log = logging.getLogger(__name__)

MOST_SHARDS = 60  # a task run each, as the chunks of answers: about 100 in all; with more a graph is hard to read
WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1 + 2 / 64}  # fp8: with the scale of 64 channels
GB = 10**9
REMEDY = "use fewer taps, fewer or shorter rows"


class ShardPlan(BaseModel):
    """One shard before it is made: a run of the corpus, shortest rows first."""

    model_config = ConfigDict(frozen=True)
    key: Key
    location: str
    number: int
    count: int = Field(description="Shards of the whole.")
    tokens: int
    rows: list[int] = Field(description="Row numbers in the corpus, in the order in which they are stored.")

    @property
    def name(self) -> str:
        """`017/240 · 1.9M tokens`"""
        return f"{self.number + 1:0{len(str(self.count))}}/{self.count} · {_short(self.tokens)} tokens"


def _short(count: int) -> str:
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 10 * size else f"{count / size:.0f}{unit}"
    return str(count)


def check_states(config: ExtractionConfig, verifier: PinnedVerifier) -> list[int]:
    """The tap layers. Raises ValueError for those that the verifier does not have, where it is too odd for fp8, and for
    more likely tokens than it has.
    """
    if config.top_k > verifier.vocab_size:
        raise ValueError(
            f"extraction.top_k: {config.top_k} tokens are more than the verifier's {verifier.vocab_size}; choose fewer"
        )
    if config.storage_dtype == "fp8" and verifier.hidden_size % 64:
        raise ValueError(
            f"extraction.storage_dtype: fp8 needs a hidden size divisible by 64, the verifier's is "
            f"{verifier.hidden_size}; use bfloat16"
        )
    return tap_layers(verifier.num_layers, config.num_taps, config.target_layer_ids)


def check_packages(config: ExtractionConfig) -> None:
    """Raises ValueError where the runner or the storage needs a package that is not here."""
    if config.runner != "inline" and not find_spec(f"prefect_{config.runner}"):
        raise ValueError(
            f"extraction.runner: {config.runner} needs the package prefect-{config.runner}; "
            f"pip install 'dflash[{config.runner}]'"
        )
    if config.storage and not find_spec("obstore"):
        raise ValueError("extraction.storage: object stores need a package: pip install 'dflash[cloud]'")


def plan_shards(config: ExtractionConfig, corpus: Artifact, verifier: PinnedVerifier) -> list[ShardPlan]:
    """Cut the corpus, in its order, into shards of about `shard_tokens`, larger ones where that would be too many.

    Raises ValueError for tap layers that the verifier does not have, and for fp8 where its width does not allow it.
    """
    check_states(config, verifier)
    whole = extraction_key(config, corpus, verifier)
    lengths = pl.read_parquet(corpus.path / "corpus.parquet", columns=["length"])["length"].to_list()
    size = max(config.shard_tokens, -(-sum(lengths) // MOST_SHARDS))
    grown = {"tokens": size} if size > config.shard_tokens else {}  # or the shards of another cut would pass for these
    groups: dict[int, list[int]] = {}
    before = 0
    for row, length in enumerate(lengths):
        groups.setdefault(before // size, []).append(row)
        before += length
    plans = [
        ShardPlan(
            key=Key(
                stage="extraction", recipe=whole.recipe, config={"shard": n, **grown}, inputs={"extraction": str(whole)}
            ),
            location=f"{whole.location}/shards/{n:04d}",
            number=n,
            count=len(groups),
            tokens=sum(lengths[row] for row in rows),
            rows=sorted(rows, key=lambda row: (lengths[row], row)),
        )
        for n, rows in enumerate(groups.values())
    ]
    log.info("%d rows of %d tokens in %d shards of about %d tokens", len(lengths), before, len(plans), size)
    return plans


def missing(plans: Sequence[ShardPlan]) -> list[ShardPlan]:
    """The shards that are not there. One that is there may yet turn out to be damaged."""
    return [plan for plan in plans if not (home() / plan.location / MANIFEST).exists()]


def longest_first(plans: Sequence[ShardPlan]) -> list[ShardPlan]:
    """The order in which several workers are done soonest: what is left for last is small (Graham 1969, LPT)."""
    return sorted(plans, key=lambda plan: (-plan.tokens, plan.number))


def estimate(config: ExtractionConfig, tokens: int, verifier: PinnedVerifier) -> int:
    """Bytes of the hidden states of so many tokens: all that is stored of each, and the verifier's two ends."""
    num_taps = len(tap_layers(verifier.num_layers, config.num_taps, config.target_layer_ids))
    per_token = num_taps * verifier.hidden_size * WIDTH[config.storage_dtype] + 4 + 1 + 4 + 8 * config.top_k
    if config.store_final:
        per_token += verifier.hidden_size * (4 if config.storage_dtype == "float32" else 2)
    overhead = 1.01  # chunk padding, checksums, shard indices: 0.1 to 0.4 % measured
    ends = 2 * verifier.vocab_size * verifier.hidden_size * WIDTH[verifier.dtype]
    return round(tokens * per_token * overhead + ends)


def check_quota(config: ExtractionConfig, nbytes: int) -> None:
    """Raises ValueError where so many bytes exceed the quota."""
    if config.disk_quota_gb and nbytes > config.disk_quota_gb * GB:
        raise ValueError(
            f"extraction.disk_quota_gb: hidden states need about {nbytes / GB:.3g} GB, the quota is "
            f"{config.disk_quota_gb:g} GB; raise it or {REMEDY}"
        )


def check_space(config: ExtractionConfig, plans: Sequence[ShardPlan], verifier: PinnedVerifier) -> None:
    """Raises ValueError, with the numbers, where the whole exceeds the quota or the missing shards the free space."""
    whole = estimate(config, sum(plan.tokens for plan in plans), verifier)
    to_make = missing(plans)
    if to_make:
        check_quota(config, whole)
    if config.storage:  # each is moved away before its worker begins the next
        to_make = longest_first(to_make)[: _most_at_once(config)]
    needed = estimate(config, sum(plan.tokens for plan in to_make), verifier) if to_make else 0
    home().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home()).free
    log.info("hidden states: %.3f GB, of which %.3f GB to write; %.1f GB free", whole / GB, needed / GB, free / GB)
    if needed > free:
        raise ValueError(
            f"{home()}: hidden states need about {needed / GB:.3g} GB more, {free / GB:.3g} GB are free; "
            f"set DFLASH_HOME to a larger disk or {REMEDY}"
        )


def _most_at_once(config: ExtractionConfig) -> int:
    """Shards in the making at a time; how many workers a running cluster has is not known here."""
    if config.runner == "inline":
        return 1
    return MOST_SHARDS if config.address else config.max_workers
