"""What hidden states were made from, as far as it is still here: under which conditions, and from which prompts.

Reads manifests and corpora. Knows no model and no report.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import polars as pl

from dflash.manifests import Manifest, manifests

log = logging.getLogger(__name__)


def _sources(identity: str, known: Iterable[Manifest]) -> Iterator[Manifest]:
    """The artifact of an identity and, one after another, those it was made from; ends where one is gone."""
    by_identity = {manifest.identity: manifest for manifest in known}
    while found := by_identity.get(identity):
        yield found
        inputs = [found.inputs[name] for name in ("hidden_states", "corpus", "conversations") if name in found.inputs]
        if not inputs:
            return
        identity = inputs[0]


def thinking(variables: Mapping[str, Any]) -> str:
    """What a template's variables make of thinking, in the words of `verifier.thinking`: on, off, or default."""
    asked = variables.get("enable_thinking", "default")
    return {True: "on", False: "off"}[asked] if isinstance(asked, bool) else str(asked)


def conditions(identity: str, *, dtype: str, chat: dict[str, Any]) -> dict[str, Any]:
    """How the answers were made that an artifact's hidden states are of. `chat` is the store's; None is not known.

    `template` is the hash of tokenizer, chat template and chat options.
    """
    sources = {manifest.stage: manifest for manifest in _sources(identity, manifests())}
    tokenization, generation = sources.get("tokenization"), sources.get("generation")
    return {
        "dtype": dtype,
        "template": tokenization and tokenization.inputs.get("tokenizer"),
        "thinking": thinking(chat.get("options", {}).get("variables", {})) if chat else None,
        "max_new_tokens": generation and generation.config.get("max_new_tokens"),
    }


def overlap(identity: str, prompts: Iterable[list[int]]) -> int | None:
    """How many of these prompts, as token ids, begin a conversation that an artifact was made from; None where its
    corpus is gone.
    """
    corpus = next((m for m in _sources(identity, manifests()) if m.stage == "tokenization"), None)
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


def differences(trained: dict[str, Any], evaluated: dict[str, Any]) -> list[str]:
    """Each condition that is known on both sides and not the same, as a sentence."""
    return [
        f"{name}: {trained[name]} in training, {value} here. A drafter may do worse, or better, under conditions that "
        "it was not trained for."
        for name, value in evaluated.items()
        if None not in (trained[name], value) and trained[name] != value
    ]
