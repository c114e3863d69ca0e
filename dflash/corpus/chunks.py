"""Which conversations the verifier has to answer, in which chunks, and which it answered before.

Reads the prompts and the chunks there are; loads no model.
"""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from dflash.config import GenerationConfig
from dflash.corpus.records import ANSWERS, OPEN, Message, canonical_json
from dflash.keys import chunk_key
from dflash.manifests import MANIFEST, Artifact, Damaged, Key, Manifest, home, load_manifest, verify
from dflash.pinning import PinnedVerifier

MOST_CHUNKS = 40  # a task run each, as the shards: about 100 in all; with more a graph is hard to read
CHUNKS = "artifacts/generation/chunks"


class ChunkPlan(BaseModel):
    """One chunk before it is answered: a run of the conversations that have answers to be written."""

    model_config = ConfigDict(frozen=True)
    key: Key
    location: str
    number: int
    count: int = Field(description="Chunks of the whole.")
    start: int = Field(description="Its first row in the prompts.")
    stop: int = Field(description="The row after its last.")
    rows: int = Field(description="Conversations to answer; rows in between without open answers are not counted.")

    @property
    def name(self) -> str:
        return f"{self.number + 1} of {self.count}"


def plan_chunks(config: GenerationConfig, prompts: Artifact, verifier: PinnedVerifier) -> list[ChunkPlan]:
    """Cut the conversations with open answers, in their order, into chunks of `chunk_prompts`.

    The size doubles until there are few enough of them, so that most appended data leaves earlier chunks as they are;
    where it does not, the answers are found one by one.
    """
    ids = scan_prompts(prompts).with_row_index("row").filter(has_open()).select("row", "id").collect(engine="streaming")
    size = config.chunk_prompts
    while ids.height > size * MOST_CHUNKS:
        size *= 2
    chunks = list(ids.iter_slices(size)) if ids.height else []
    keys = [chunk_key(config, chunk["id"].to_list(), verifier) for chunk in chunks]
    return [
        ChunkPlan(
            key=key,
            location=f"{CHUNKS}/{key}",
            number=number,
            count=len(chunks),
            start=chunk["row"][0],
            stop=chunk["row"][-1] + 1,
            rows=chunk.height,
        )
        for number, (chunk, key) in enumerate(zip(chunks, keys, strict=True))
    ]


def answered_before(key: Key, ids: pl.Series) -> list[Path]:
    """Files of whole chunks, newest first, with answers to some of these conversations by the same verifier, asked in
    the same way. An answer depends on its conversation alone, so it is worth as much in another chunk.
    """
    found = []
    for path in (home() / CHUNKS).glob(f"*/{MANIFEST}"):
        try:
            manifest = load_manifest(path.parent)
            if _asking(manifest) == _asking(key):
                found.append(verify(manifest))
        except Damaged:  # of no use here; whoever needs that chunk says so
            continue
    found.sort(key=lambda manifest: manifest.created, reverse=True)
    files = [one.path / name for one in found for name in sorted(one.files) if name.endswith(".parquet")]
    wanted = pl.col("id").is_in(ids.implode())
    return [file for file in files if pl.scan_parquet(file).select(wanted.any()).collect().item()]


def _asking(key: Key | Manifest) -> tuple[object, ...]:
    """Of a chunk's key, all but which conversations it is of."""
    config = {name: value for name, value in key.config.items() if name != "chunk"}
    inputs = {name: value for name, value in key.inputs.items() if name != "conversations"}
    return key.stage, key.recipe, config, inputs


def whole_answers(files: list[Path], wanted: Mapping[str, int]) -> pl.DataFrame:
    """From these files, the answers to conversations by id where all of them are there, as many as `wanted` says."""
    left = dict(wanted)
    found = [pl.DataFrame(schema=ANSWERS)]
    for file in files:
        counts = pl.DataFrame(
            {"id": list(left), "wanted": list(left.values())}, schema={"id": pl.String, "wanted": pl.UInt32}
        )
        answers = pl.scan_parquet(file).filter(pl.col("id").is_in(counts["id"].implode())).collect()
        whole = counts.join(answers.group_by("id").len("wanted"), on=["id", "wanted"])
        found.append(answers.join(whole, on="id", how="semi"))
        for id in whole["id"]:
            del left[id]
    return pl.concat(found)


def scan_prompts(prompts: Artifact) -> pl.LazyFrame:
    """The rows of a prompts artifact, in their order."""
    names = sorted(name for name in load_manifest(prompts.path).files if name.startswith("prompts/"))
    return pl.scan_parquet([prompts.path / name for name in names])


def has_open() -> pl.Expr:
    """Whether a row of the prompts seems to have open answers.

    No text looks like one, because its quotes are escaped; but the arguments of a tool call may, which does no harm.
    """
    return pl.col("messages").str.contains(canonical_json(OPEN), literal=True).fill_null(False)


def open_places(messages: list[Message]) -> list[int]:
    """Where in a conversation the verifier's answers go."""
    return [position for position, message in enumerate(messages) if message == OPEN]
