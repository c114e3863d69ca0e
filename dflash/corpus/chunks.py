"""Which conversations the verifier has to answer, and in which chunks. Reads the prompts, loads no model."""

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from dflash.config import GenerationConfig
from dflash.corpus.records import OPEN, Message, canonical_json
from dflash.keys import chunk_key
from dflash.manifests import Artifact, Key, load_manifest
from dflash.pinning import PinnedVerifier

MOST_CHUNKS = 64  # each is a task run; more of them make a server slow and a graph unreadable


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

    The size doubles until there are few enough of them, so that appended data leaves earlier chunks as they are.
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
            location=f"artifacts/generation/chunks/{key}",
            number=number,
            count=len(chunks),
            start=chunk["row"][0],
            stop=chunk["row"][-1] + 1,
            rows=chunk.height,
        )
        for number, (chunk, key) in enumerate(zip(chunks, keys, strict=True))
    ]


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
