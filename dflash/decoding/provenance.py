"""What hidden states were made from, as far as it is still here: under which conditions, and from which prompts.

Reads manifests and corpora. Knows no model and no report.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from dflash.lineage import Lineage
from dflash.manifests import Manifest

log = logging.getLogger(__name__)


def thinking(variables: Mapping[str, Any]) -> str:
    """What a template's variables make of thinking, in the words of `verifier.thinking`: on, off, or default."""
    asked = variables.get("enable_thinking", "default")
    return {True: "on", False: "off"}[asked] if isinstance(asked, bool) else str(asked)


def conditions(made: Lineage, identity: str, *, dtype: str, chat: dict[str, Any]) -> dict[str, Any]:
    """How the answers were made that hidden states of this identity are of. `chat` is the store's; None is not known.

    `template` is the hash of tokenizer, chat template and chat options.
    """
    sources = _sources(made, identity)
    tokenization, generation = sources.get("tokenization"), sources.get("generation")
    return {
        "dtype": dtype,
        "template": tokenization and tokenization.inputs.get("tokenizer"),
        "thinking": thinking(chat.get("options", {}).get("variables", {})) if chat else None,
        "max_new_tokens": generation and generation.config.get("max_new_tokens"),
    }


def overlap(made: Lineage, identity: str, prompts: Iterable[list[int]]) -> int | None:
    """How many of these prompts, as token ids, begin a conversation that hidden states of this identity are of; None
    where their corpus is gone.
    """
    corpus = _sources(made, identity).get("tokenization")
    if corpus is None or not (corpus.path / "corpus.parquet").exists():
        return None
    asked = [",".join(map(str, ids)) for ids in prompts]
    supervised = pl.col("loss_mask").list.arg_max()  # the first one
    known = (
        pl.scan_parquet(corpus.path / "corpus.parquet")
        .filter(supervised.is_in(list({ids.count(",") + 1 for ids in asked})))
        .select(pl.col("input_ids").list.head(supervised).cast(pl.List(pl.String)).list.join(","))
        .filter(pl.col("input_ids").is_in(asked))
        .collect(engine="streaming")
    )
    trained = set(known["input_ids"])
    return sum(ids in trained for ids in asked)


def _sources(made: Lineage, identity: str) -> dict[str, Manifest]:
    """The hidden states and what they were made from, by stage, as far as it is there."""
    return {equal[0].stage: equal[0] for equal in made.ancestry(made.inputs([identity]))}


def differences(trained: dict[str, Any], evaluated: dict[str, Any]) -> list[str]:
    """Each condition that is known on both sides and not the same, as a sentence."""
    return [
        f"{name}: {trained[name]} in training, {value} here. A drafter may do worse, or better, under conditions that "
        "it was not trained for."
        for name, value in evaluated.items()
        if None not in (trained[name], value) and trained[name] != value
    ]
