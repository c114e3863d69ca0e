"""What an evaluation found for each response: the record that every number of a report follows from, and its file.

Knows no model and no report. `responses.parquet` lies beside report.json, so that two drafters can be compared response
by response.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from dflash.corpus.records import request_name
from dflash.decoding.acceptance import Acceptance, Expected
from dflash.parquet import read_parquet

RESPONSES = "responses.parquet"
RECALL_AT = (1, 2, 4, 8, 16, 64)
"""The K of top-K recall: how often the verifier's token is among the drafter's K best of a slot."""


def content_hash(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
    """What makes two responses the same one: the token ids of prompt and response."""
    return hashlib.sha256(json.dumps([list(prompt_ids), list(response_ids)]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Response:
    """One response of an evaluation set, as replayed with one drafter. The same fields are the columns of its file.

    `accepted` has the accepted count of each round, by method (chain, tree16, …). What follows it may be missing, which
    is "not measured": `expected`, the drafter's own expectation of each round's accepted count, cut by nothing (the sum
    of the probabilities of the round's nodes); `chain_at`, what a round of the chain from each token but the last
    would accept; `recall_hits`, by K of RECALL_AT, among `recall_slots` slots within the response; `num_on_policy`, how
    many of its tokens are the verifier's own greedy choice; `rejection`, what rejection sampling expects.
    """

    id: str
    set: str
    category: str
    content: str
    num_tokens: int
    truncated: bool
    accepted: Mapping[str, tuple[int, ...]]
    expected: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    chain_at: tuple[int, ...] = ()
    recall_hits: tuple[int, ...] = ()
    recall_slots: int = 0
    num_on_policy: int | None = None
    rejection: Expected | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for the same response in the report of another drafter."""
        return self.set, self.id, self.content

    @property
    def conversation(self) -> tuple[str, str]:
        """The same for all answers of a conversation, whose rows have ids `<conversation>#<turn>`."""
        return self.set, self.id.partition("#")[0]

    @property
    def request(self) -> str:
        """The name that the verifier was asked under."""
        conversation, _, turn = self.id.partition("#")
        return request_name(conversation, int(turn or 0))

    def acceptance(self, method: str, *, num_slots: int) -> Acceptance:
        return Acceptance.of_response(self.accepted[method], num_tokens=self.num_tokens, num_slots=num_slots)


def _by_method(values: pl.DataType) -> pl.List:
    return pl.List(pl.Struct({"method": pl.String(), "rounds": pl.List(values)}))


COLUMNS = pl.Schema(
    {
        "id": pl.String(),
        "set": pl.String(),
        "category": pl.String(),
        "content": pl.String(),
        "num_tokens": pl.Int64(),
        "truncated": pl.Boolean(),
        "accepted": _by_method(pl.Int32()),
        "expected": _by_method(pl.Float64()),
        "chain_at": pl.List(pl.Int32()),
        "recall_hits": pl.List(pl.Int64()),
        "recall_slots": pl.Int64(),
        "num_on_policy": pl.Int64(),
        "rejection": pl.Struct({"rounds": pl.Float64(), "accepted": pl.Float64()}),
    }
)
BY_METHOD = ("accepted", "expected")


def write_responses(folder: Path, responses: Sequence[Response]) -> None:
    """Write responses.parquet."""
    rows = [
        {name: getattr(response, name) for name in COLUMNS}
        | {n: [{"method": m, "rounds": v} for m, v in getattr(response, n).items()] for n in BY_METHOD}
        | {"rejection": response.rejection._asdict() if response.rejection else None}
        for response in responses
    ]
    pl.DataFrame(rows, schema=COLUMNS).write_parquet(folder / RESPONSES)


def read_responses(folder: Path) -> list[Response]:
    """The responses of a report's folder. Raises ValueError naming the file where it is missing or unreadable."""
    path = folder / RESPONSES
    try:
        frame = read_parquet(path, COLUMNS)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; run the evaluation stage again") from None
    return [
        Response(
            **row
            | {name: {part["method"]: tuple(part["rounds"]) for part in row[name]} for name in BY_METHOD}
            | {name: tuple(row[name]) for name in ("chain_at", "recall_hits")}
            | {"rejection": Expected(**row["rejection"]) if row["rejection"] else None}
        )
        for row in frame.iter_rows(named=True)
    ]
