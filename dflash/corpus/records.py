"""What the corpus stages hand to each other: conversations, requests and responses, rows of token ids, the ledger.

Knows no file format, no tokenizer and no model.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import polars as pl

Message = dict[str, Any]
"""`role` (system, user, assistant, tool), `content`, and where there are any `reasoning_content` (text), `tool_calls`
(list), `tool_call_id` and `name`."""

OPEN: Message = {"role": "assistant", "content": None}
"""An answer that the verifier is to write."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One usable row of a source. Exactly one of `messages`, `text` and `input_ids` is there.

    `id` is the hash of all of it, `group` of what the assistant did not write: equal groups stay in one split.
    `origin` is the source's path as configured, `source` the place, `file:row`, for people.
    """

    id: str
    group: str
    category: str
    origin: str
    source: str
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    loss_mask: list[bool] | None = None


CONVERSATIONS = pl.Schema(
    {
        "id": pl.String(),
        "group": pl.String(),
        "category": pl.String(),
        "origin": pl.String(),
        "source": pl.String(),
        "messages": pl.String(),  # canonical JSON
        "tools": pl.String(),  # canonical JSON
        "text": pl.String(),
        "input_ids": pl.List(pl.Int32()),
        "loss_mask": pl.List(pl.Boolean()),
    }
)
"""Columns of the prompts artifact. Null where a conversation has no such part."""

ANSWERS = pl.Schema(
    {
        "id": pl.String(),  # of the conversation
        "turn": pl.Int32(),  # of its generated answers, from 0
        "prompt_ids": pl.List(pl.Int32()),
        "response_ids": pl.List(pl.Int32()),  # as served; the end token included if it was generated
        "finish_reason": pl.String(),  # stop, length
        "ids_from": pl.String(),  # Response.origin
        "message": pl.String(),  # the answer as a message, canonical JSON
    }
)
"""Columns of a chunk's answers: one row per generated answer."""


Request = tuple[str, list[int]]
"""What the verifier is to answer: a name, which seeds the sampling, and the token ids of a prompt."""


def request_name(conversation: str, turn: int) -> str:
    """Of a conversation's answers, from 0."""
    return f"{conversation}/{turn}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is drawn; `temperature` 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def seed_of(self, name: str) -> int:
        """The seed of one answer, 32 bits: its own, so that neither its neighbours nor the order of work change it."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:4])


@dataclass(frozen=True, slots=True)
class Response:
    """A verifier's answer: token ids (the end token included where it was generated), and `stop` (ended by itself) or
    `length` (cut). `origin` says where the ids are from: `served` by the verifier, `retokenized` from the served text,
    or `mismatch` where those do not decode to that text again.
    """

    ids: list[int]
    finish_reason: str
    origin: str = "served"


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: the ids the verifier saw before it, and the ids of the answer itself."""

    prompt_ids: list[int]
    response_ids: list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and the [start, end) spans of them that are supervised. `turn` is None for a whole conversation."""

    input_ids: list[int]
    spans: list[tuple[int, int]]
    turn: int | None = None


class Rejected(ValueError):
    """A conversation that cannot be used, and the `reason` under which it is counted. The text has no place in it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type["Rejected"], tuple[str, str]]:
        return Rejected, (self.reason, str(self))  # workers send it to the process that counts


class TooManyDropped(ValueError):
    """More of the data is unusable than the configuration allows. `summary` is the ledger's."""

    def __init__(self, message: str, summary: dict[str, Any]) -> None:
        super().__init__(message)
        self.summary = summary

    def __reduce__(self) -> tuple[type["TooManyDropped"], tuple[str, dict[str, Any]]]:
        return TooManyDropped, (str(self), self.summary)


HARMLESS = ("duplicate", "near_duplicate", "not_drawn")
"""Reasons that say nothing bad about the data: repeated rows, and rows a weight or limit left out."""


@dataclass
class Ledger:
    """The conservation law of a stage, per source: rows in = kept + dropped by reason. Sums and counts only."""

    rows_in: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def count(self, source: str, number: int = 1) -> None:
        self.rows_in[source] += number

    def keep(self, source: str, number: int = 1) -> None:
        self.kept[source] += number

    def drop(self, source: str, reason: str, number: int = 1, *, example: str = "") -> None:
        """`example` is `place: what is wrong`, remembered for the first row of each reason."""
        if number:
            self.dropped.setdefault(source, Counter())[reason] += number
            if example:
                self.examples.setdefault(reason, example)

    def add(self, other: "Ledger") -> None:
        """Count what another ledger counted, as later rows."""
        for source, number in other.rows_in.items():
            self.count(source, number)
            self.keep(source, other.kept[source])
            for reason, dropped in other.dropped.get(source, {}).items():
                self.drop(source, reason, dropped, example=other.examples.get(reason, ""))

    def totals(self) -> dict[str, int]:
        """Dropped rows by reason, over all sources, most frequent first."""
        return dict(sum(self.dropped.values(), Counter()).most_common())

    def summary(self) -> dict[str, Any]:
        """`rows_in`, `rows`, `dropped`, and `sources`: one such record per source. Checks the conservation law."""
        sources: dict[str, dict[str, Any]] = {
            name: {"rows_in": count, "rows": self.kept[name], "dropped": dict(self.dropped.get(name, {}))}
            for name, count in self.rows_in.items()
        }
        for name, record in sources.items():
            lost = record["rows_in"] - record["rows"] - sum(record["dropped"].values())
            assert lost == 0, f"{lost} rows of {name} are neither kept nor dropped: {record}"
        return {
            "rows_in": self.rows_in.total(),
            "rows": self.kept.total(),
            "dropped": self.totals(),
            "sources": sources,
        }

    def check(self, *, most: float, setting: str) -> None:
        """Raises TooManyDropped with counts and first examples where a larger share than `most` is unusable."""
        bad = {reason: count for reason, count in self.totals().items() if reason not in HARMLESS}
        if sum(bad.values()) > most * self.rows_in.total():
            counts = "; ".join(
                f"{reason} {count}" + (f" ({self.examples[reason]})" if reason in self.examples else "")
                for reason, count in bad.items()
            )
            raise TooManyDropped(
                f"{setting}: {sum(bad.values())} of {self.rows_in.total()} rows dropped, more than {most:g}: {counts}",
                self.summary(),
            )


def conservation_table(summary: dict[str, Any]) -> str:
    """A ledger's summary as a Markdown table: a row per source, a column per reason."""
    reasons = list(summary["dropped"])
    lines = ["| source | rows in | kept |" + "".join(f" {reason} |" for reason in reasons)]
    lines.append("|---|--:|--:|" + "--:|" * len(reasons))
    whole = {"rows_in": summary["rows_in"], "rows": summary["rows"], "dropped": summary["dropped"]}
    for name, record in [*summary["sources"].items(), ("all", whole)]:
        counts = "".join(f" {record['dropped'].get(reason, 0):,} |" for reason in reasons)
        shown = name.replace("|", "\\|")
        lines.append(f"| {shown} | {record['rows_in']:,} | {record['rows']:,} |{counts}")
    return "\n".join(lines)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: it is called for every row


def canonical_json(value: Any) -> str:
    """The one spelling of messages and tools: what ids are hashes of, and what Parquet files hold.

    Keys stay in their order: templates print tools and arguments in it, so another order is another text.
    """
    return _encode(value)


def spans_of(mask: Iterable[bool]) -> list[tuple[int, int]]:
    """The runs of True, as [start, end)."""
    spans: list[tuple[int, int]] = []
    start = None
    for position, supervised in enumerate([*mask, False]):
        if supervised and start is None:
            start = position
        elif not supervised and start is not None:
            spans.append((start, position))
            start = None
    return spans
