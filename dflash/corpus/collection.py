"""Collection stage: the rows of all sources to one artifact of distinct, uncontaminated conversations.

Knows what makes a row a repetition, a leak of an evaluation prompt or one too many. Not how files are read
(`sources.py`), what a row means (`conversations.py`), nor what the verifier makes of a conversation.

Rows pass through once, in blocks. What stays in memory is one block and, per kept row, two hashes of eight bytes.
"""

import hashlib
import logging
import math
import shutil
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from dflash.config import GenerationConfig, SourceConfig
from dflash.corpus.conversations import normalised, parse, to_columns, words
from dflash.corpus.records import (
    CONVERSATIONS,
    HARMLESS,
    Conversation,
    Ledger,
    Rejected,
    TooManyDropped,
    canonical_json,
)
from dflash.corpus.sources import estimate_rows, read_rows, sample_rows
from dflash.keys import prompts_key
from dflash.manifests import Artifact, Key, Progress, publish, silent

log = logging.getLogger(__name__)

PART_ROWS = 16_384
PART_CHARACTERS = 1 << 26
"""A block ends at either, and a part file soon after: memory is bounded for many short rows and for few long ones."""

PLACE = CONVERSATIONS.names().index("source")

PEEK_ROWS = 1_000

GRAM = 13
STEP = 7
"""Any 13 words in a row hold a run of 7 that begins at a multiple of 7: only those need looking up in a prompt."""

TURN_WORDS = 5
"""A single turn of fewer, such as `Please continue.`, is said everywhere and gives no conversation away."""

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


class Usable(NamedTuple):
    """A row that can be used, as columns of CONVERSATIONS. Equal hashes: equal rows; of `near`, nearly equal ones."""

    columns: tuple[Any, ...]
    exact: int
    near: int


class Seen:
    """The hashes of the rows so far, sorted. Among five million rows, two agree by chance once in a million runs."""

    def __init__(self) -> None:
        self._sorted: Hashes = np.empty(0, np.uint64)

    def holds(self, hashes: Hashes) -> Flags:
        places = np.searchsorted(self._sorted, hashes)
        found: Flags = places < len(self._sorted)
        found[found] = self._sorted[places[found]] == hashes[found]
        return found

    def add(self, hashes: Hashes) -> None:
        new = np.unique(hashes[~self.holds(hashes)])
        self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, new), new)


@dataclass(frozen=True)
class Contaminants:
    """Word runs of the evaluation prompts: of 13 words, of 7, and what is too short for 13, compared as a whole."""

    grams: set[tuple[str, ...]] = field(default_factory=set)
    steps: set[tuple[str, ...]] = field(default_factory=set)
    short: set[tuple[str, ...]] = field(default_factory=set)

    def shared(self, turns: Sequence[str]) -> str:
        """The words that a prompt's turns have in common with an evaluation prompt; empty where it is clean."""
        said = [tuple(words(turn)) for turn in turns]
        for short in _short(said):
            if short in self.short:
                return " ".join(short)
        found = sum(said, ())
        for i in range(0, len(found) - STEP + 1, STEP):
            if found[i : i + STEP] in self.steps:
                for j in range(max(0, i + STEP - GRAM), min(i, len(found) - GRAM) + 1):
                    if found[j : j + GRAM] in self.grams:
                        return " ".join(found[j : j + GRAM])
        return ""


def _short(said: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """What is compared as a whole: a prompt of fewer than 13 words, and such a turn of at least 5."""
    whole: tuple[str, ...] = sum(said, ())
    turns = [turn for turn in said if TURN_WORDS <= len(turn) < GRAM]
    return [whole, *turns] if 0 < len(whole) < GRAM else turns


def contaminants_of(prompts: Iterable[Sequence[str]]) -> Contaminants:
    """What the turns of evaluation prompts are found by."""
    known = Contaminants()
    for turns in prompts:
        said = [tuple(words(turn)) for turn in turns]
        known.short.update(_short(said))
        found = sum(said, ())
        if len(found) >= GRAM:
            known.grams.update(found[i : i + GRAM] for i in range(len(found) - GRAM + 1))
            known.steps.update(found[i : i + STEP] for i in range(len(found) - STEP + 1))
    return known


def collect(
    config: GenerationConfig, contaminants: Sequence[SourceConfig] = (), *, progress: Progress = silent
) -> Artifact:
    """Distinct conversations in source order, as `prompts/part-*.parquet` (schema records.CONVERSATIONS).

    A source's rows after its limit are not read, nor is anything after `max_prompts` rows. Weighted sources are read to
    the end and then drawn from: the largest mix in which each has its share (within `max_prompts` where it is set), the
    rows with the smallest hashes first, so that more data replaces few. Raises ValueError for a source that cannot be
    read, where too large a share of rows is unusable and where none is left.
    """
    key = prompts_key(config, contaminants)
    known = contaminants_of(turns_of_contaminants(contaminants)) if config.decontaminate and contaminants else None
    weighted = any(source.weight for source in config.prompts)
    ledger, schemas = Ledger(), dict[str, Counter[str]]()
    summary: dict[str, Any] = {}
    with publish(key, summary=summary, content_identity=True) as (folder, artifact):
        parts = folder / "prompts"
        hashes = _gather(
            config.prompts,
            folder=folder / "read" if weighted else parts,
            deduplicate=config.deduplicate,
            most=0 if weighted else config.max_prompts,
            known=known,
            ledger=ledger,
            schemas=schemas,
            progress=progress,
        )
        if weighted:
            drawn = draw(hashes, weights=[source.weight for source in config.prompts], most=config.max_prompts)
        else:
            drawn = [np.ones(len(rows), np.bool_) for rows in hashes]
        for source, flags in zip(config.prompts, drawn, strict=True):
            ledger.keep(source.path, int(flags.sum()))
            ledger.drop(source.path, "not_drawn", int((~flags).sum()))
        summary |= ledger.summary() | {"schemas": {name: dict(counts) for name, counts in schemas.items()}}
        ledger.check(most=config.max_dropped_share, setting="generation.prompts")
        for source, rows in zip(config.prompts, hashes, strict=True):
            if source.weight and not len(rows):
                raise ValueError(f"{source.path}: has a weight but no row of its own to draw; leave this source out")
        for source, flags in zip(config.prompts, drawn, strict=True):
            if source.weight and not flags.any():
                raise ValueError(
                    f"{source.path}: its weight of {source.weight:g} gives it less than one row of the mix; "
                    "raise it" + ", or max_prompts, or limit the sources without a weight" * bool(config.max_prompts)
                )
        if not summary["rows"]:
            message = (
                f"{', '.join(source.path for source in config.prompts)}: none of {summary['rows_in']} rows can be used "
                f"({summary['dropped']}); the first: {next(iter(ledger.examples.values()), 'there is none')}"
            )
            raise TooManyDropped(message, summary)
        if weighted:
            _filter(folder / "read", parts, rows=np.concatenate(drawn))
        _check_unchanged(key, prompts_key(config, contaminants), [*config.prompts, *contaminants])
    for reason, count in ledger.totals().items():
        level = logging.INFO if reason in HARMLESS else logging.WARNING
        log.log(level, "%s: %d rows dropped; the first: %s", reason, count, ledger.examples.get(reason, "by its hash"))
    log.info("%(rows)d conversations from %(rows_in)d rows", summary)
    return artifact()


def _check_unchanged(before: Key, after: Key, sources: Sequence[SourceConfig]) -> None:
    """What was read under a key must be what the key says, or equal data would find something else in the cache."""
    for source, name in zip(sources, before.inputs, strict=False):
        if before.inputs[name] != after.inputs[name]:
            raise ValueError(f"{source.path}: changed while it was read; run again")


def peek(config: GenerationConfig) -> None:
    """Raises ValueError, before anything expensive, where the first rows of the sources show that `collect` will fail.

    That is certain where they are all there is, or none of them can be used; otherwise it warns of what is bad.
    """
    ledger, everything = Ledger(), True
    left: float = math.inf if any(source.weight for source in config.prompts) else config.max_prompts or math.inf
    for source in config.prompts:
        room = min(source.limit or math.inf, left)
        if room <= 0:
            everything = False
            break
        sample = sample_rows(source, count=PEEK_ROWS + 1)
        everything &= len(sample) <= PEEK_ROWS
        for place, found, _ in _parsed(sample[:PEEK_ROWS], source):
            if room <= 0:
                everything = False  # the others are only read in place of rows that repeat earlier ones
                break
            ledger.count(source.path)
            if isinstance(found, Rejected):
                ledger.drop(source.path, found.reason, example=f"{place}: {found}")
            else:
                ledger.keep(source.path)
                room, left = room - 1, left - 1
    certain = everything or not ledger.kept.total()
    try:
        ledger.check(
            most=config.max_dropped_share,
            setting=f"generation.prompts, in the first {PEEK_ROWS:,} rows of each source",
        )
    except TooManyDropped as error:
        if certain:
            raise
        log.warning("%s; the others are still to be read", error)


def turns_of_contaminants(contaminants: Sequence[SourceConfig]) -> Iterator[list[str]]:
    """What training prompts must not repeat. Unusable rows are the business of the evaluation set's own collection."""
    for source in contaminants:
        for _, found, _ in _parsed(read_rows(source), source):
            if isinstance(found, Conversation):
                yield _asked(found)


def draw(hashes: Sequence[Hashes], *, weights: Sequence[float], most: int) -> list[Flags]:
    """Which rows of each source are in the mix, by the hashes of its rows. `most` bounds their number; 0 does not."""
    # as decimals: with 0.7 and 0.3 as binary fractions, 70 and 30 rows would not be one mix
    shares = [Fraction(str(weight)) for weight in weights]
    size = min(len(found) / share for share, found in zip(shares, hashes, strict=True) if share)
    if most:
        unweighted = sum(len(found) for share, found in zip(shares, hashes, strict=True) if not share)
        size = min(size, max(0, most - unweighted) / sum(shares, Fraction()))
    flags, left = [], most or math.inf
    for share, found in zip(shares, hashes, strict=True):
        drawn = np.ones(len(found), np.bool_)
        if share:
            drawn[np.argsort(found, kind="stable")[math.floor(size * share) :]] = False
        drawn &= np.cumsum(drawn) <= left
        left -= int(drawn.sum())
        flags.append(drawn)
    return flags


def _parsed(
    rows: Iterable[tuple[str, dict[str, Any] | Rejected]], source: SourceConfig
) -> Iterator[tuple[str, Conversation | Rejected, str]]:
    """Place, conversation (or why there is none) and schema of each row."""
    for place, row in rows:
        if isinstance(row, Rejected):
            yield place, row, ""
            continue
        try:
            found, schema = parse(
                row, answers=source.answers, category=source.category, origin=source.path, source=place
            )
        except Rejected as rejected:
            yield place, rejected, ""
        else:
            yield place, found, schema


def _asked(conversation: Conversation) -> list[str]:
    """What users wrote, or the raw text. System prompts are left out: to share a common one is no contamination."""
    users = [message["content"] for message in conversation.messages or () if message["role"] == "user"]
    return users or [conversation.text or ""]


def _near(conversation: Conversation) -> int:
    """A hash of the conversation that is blind to case, spaces and Unicode form."""
    parts: list[Any] = [conversation.tools, conversation.input_ids, conversation.text]
    for message in conversation.messages or ():
        rest = {name: value for name, value in message.items() if name not in ("role", "content")}
        parts += [message["role"], message["content"], rest]
    pieces = [part if isinstance(part, str) else canonical_json(part) if part else "" for part in parts]
    text = "\0".join(normalised(piece) for piece in pieces)  # sources give no NUL: the pieces stay apart
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _usable(
    source: SourceConfig, *, near: bool, known: Contaminants | None, ledger: Ledger, schemas: dict[str, Counter[str]]
) -> Generator[Usable, None, None]:
    """The rows of a source that are conversations and no contaminants; the others are counted in the ledger."""
    recognised = schemas.setdefault(source.path, Counter())
    for place, found, schema in _parsed(read_rows(source), source):
        ledger.count(source.path)
        if isinstance(found, Rejected):
            ledger.drop(source.path, found.reason, example=f"{place}: {found}")
            continue
        recognised[schema] += 1
        if known and (shared := known.shared(_asked(found))):
            example = f"{place}: shares {shared!r} with an evaluation prompt"
            ledger.drop(source.path, "contaminated", example=example)
            continue
        exact = int(found.id[:16], 16)
        yield Usable(to_columns(found), exact, _near(found) if near else exact)


def _take(rows: Iterator[Usable], *, most: float) -> list[Usable]:
    """The next rows, until there are `most` of them or they fill a block; empty at the end."""
    block: list[Usable] = []
    size = 0
    while len(block) < most and size < PART_CHARACTERS and (row := next(rows, None)) is not None:
        block.append(row)
        size += _size(row.columns)
    return block


def _size(columns: tuple[Any, ...]) -> int:
    return sum(len(value) for value in columns if value is not None)


class Parts:
    """Part files that are written as rows come in; a new one begins when the last is full."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.num_rows = 0
        self._folder = folder
        self._num_parts = 0
        self._pending: list[tuple[Any, ...]] = []
        self._size = 0

    def add(self, columns: tuple[Any, ...]) -> None:
        self._pending.append(columns)
        self._size += _size(columns)
        self.num_rows += 1
        if len(self._pending) == PART_ROWS or self._size >= PART_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            columns = dict(zip(CONVERSATIONS, zip(*self._pending, strict=True), strict=True))
            path = self._folder / f"part-{self._num_parts:05d}.parquet"
            pl.DataFrame(columns, schema=CONVERSATIONS).write_parquet(path)
            self._num_parts += 1
            self._pending, self._size = [], 0


def _gather(
    sources: Sequence[SourceConfig],
    *,
    folder: Path,
    deduplicate: str,
    most: int,
    known: Contaminants | None,
    ledger: Ledger,
    schemas: dict[str, Counter[str]],
    progress: Progress,
) -> list[Hashes]:
    """Write the distinct rows of all sources, at most `most` (0: all), and return their hashes, source by source."""
    total = min(sum(estimate_rows(source)[0] for source in sources), most or math.inf)
    parts, exact_seen, near_seen = Parts(folder), Seen(), Seen()
    hashes: list[Hashes] = []
    for source in sources:
        kept_hashes = [np.empty(0, np.uint64)]
        room = min(source.limit or math.inf, most - parts.num_rows if most else math.inf)
        with closing(
            _usable(source, near=deduplicate == "near", known=known, ledger=ledger, schemas=schemas)
        ) as usable:
            # never more than there is room for: what cannot be kept is not even read
            while block := _take(usable, most=min(PART_ROWS, room)):
                exact = np.array([row.exact for row in block], np.uint64)
                near = np.array([row.near for row in block], np.uint64)
                new = _firsts(near) & ~near_seen.holds(near)
                near_seen.add(near[new])
                exact_seen.add(exact[new])
                for row, is_new, is_equal in zip(block, new, exact_seen.holds(exact), strict=True):
                    if is_new:
                        parts.add(row.columns)
                    elif deduplicate == "off":  # kept under a name of its own: later stages tell rows apart by id
                        parts.add((f"{row.columns[0]}-{parts.num_rows}", *row.columns[1:]))
                    else:
                        reason = "duplicate" if is_equal else "near_duplicate"
                        ledger.drop(source.path, reason, example=f"{row.columns[PLACE]}: repeats an earlier row")
                kept_hashes.append(exact if deduplicate == "off" else exact[new])
                room -= len(kept_hashes[-1])
                progress(min(ledger.rows_in.total(), total), total, f"{parts.num_rows:,} kept")
        hashes.append(np.concatenate(kept_hashes))
    parts.flush()
    return hashes


def _firsts(hashes: Hashes) -> Flags:
    """True where a value occurs for the first time."""
    flags = np.zeros(len(hashes), np.bool_)
    flags[np.unique(hashes, return_index=True)[1]] = True
    return flags


def _filter(read: Path, folder: Path, *, rows: Flags) -> None:
    """Move the flagged rows of one folder's part files into another's. One part is in memory at a time."""
    folder.mkdir()
    start = 0
    for path in sorted(read.iterdir()):
        frame = pl.read_parquet(path)
        frame.filter(pl.Series(rows[start : start + frame.height])).write_parquet(folder / path.name)
        start += frame.height
    shutil.rmtree(read)
