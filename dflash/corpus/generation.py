"""Generation stage: the verifier answers every turn of the prompts, and the token ids it served are kept as they are.

Chunks of conversations are answered, each an artifact of its own and the unit of retry; the seal puts prompts and
answers together. Knows which turns to answer and how to continue; not how a token is chosen or how a server is asked.
"""

import json
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from dflash.config import GenerationConfig
from dflash.corpus.answering import Workers, answer
from dflash.corpus.chat import Chat, load_chat
from dflash.corpus.chunks import (
    ChunkPlan,
    answered_before,
    has_open,
    open_places,
    plan_chunks,
    scan_prompts,
    whole_answers,
)
from dflash.corpus.records import (
    ANSWERS,
    CONVERSATIONS,
    Ledger,
    Message,
    Rejected,
    Request,
    Response,
    Sampling,
    canonical_json,
    request_name,
)
from dflash.corpus.serving import connect
from dflash.devices import give_back
from dflash.keys import generation_key
from dflash.manifests import Artifact, Progress, in_progress, publish, silent, write_atomically
from dflash.parquet import read_parquet
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier

log = logging.getLogger(__name__)

SCHEMA = pl.Schema({**CONVERSATIONS, **{name: kind for name, kind in ANSWERS.items() if name not in ("id", "message")}})
"""Columns of `conversations.parquet`: one row per generated answer, or per conversation that keeps its own answers."""

WINDOW = 4096  # conversations in memory at a time. A part of the chunks' format: their files hold that many
PART_ROWS = 8192  # of the sealed file; fixed, so that its bytes do not depend on chunks

Ask = Callable[[Sequence[Request]], list[Response | Rejected]]

_loading = threading.Lock()
_workers: dict[tuple[PinnedVerifier, tuple[str, ...]], Workers] = {}


@lru_cache(maxsize=1)
def _load(pinned: PinnedVerifier) -> Verifier:
    return load_verifier(pinned)


def _started(verifier: PinnedVerifier, devices: list[str]) -> Workers:
    key = (verifier, tuple(devices))
    if key not in _workers or not _workers[key].processes:  # they ended with an error
        _release()
        _workers[key] = Workers(verifier, devices)
    return _workers[key]


def _release() -> None:
    """Give back the memory of what was loaded for chunks; the stages after this one want it."""
    for workers in _workers.values():
        workers.close()
    _workers.clear()
    _load.cache_clear()
    give_back()


@contextmanager
def _backend(config: GenerationConfig, verifier: PinnedVerifier, chat: Chat) -> Iterator[tuple[Ask, int]]:
    """A function that answers requests, and how many it is best asked at once. Verifiers are loaded when it is called.

    They stay loaded for the next chunk, until the seal.
    """
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens, temperature=config.temperature, top_p=config.top_p, seed=config.seed
    )
    # A group is written when all of it is answered. Several batches each, so that few wait for the slowest.
    if config.backend == "openai":
        with connect(
            base_url=config.base_url,
            model=config.server_model,
            concurrency=config.concurrency,
            request_seconds=config.request_seconds,
            sampling=sampling,
            tokenizer=chat.tokenizer,
            eos_ids=chat.eos_ids,
        ) as server:
            yield server.answer, 4 * config.concurrency
    elif config.devices:

        def by_workers(requests: Sequence[Request]) -> list[Response | Rejected]:
            with _loading:  # while they answer, too: another run of this process may want to end them for its own
                workers = _started(verifier, config.devices)
                return workers.answer(requests, batch_size=config.batch_size, sampling=sampling)

        yield by_workers, 4 * config.batch_size * len(config.devices)
    else:

        def here(requests: Sequence[Request]) -> list[Response | Rejected]:
            with _loading:
                loaded = _load(verifier)
            return answer(requests, verifier=loaded, batch_size=config.batch_size, sampling=sampling)

        yield here, config.batch_size


def generate_chunk(
    plan: ChunkPlan,
    config: GenerationConfig,
    prompts: Artifact,
    verifier: PinnedVerifier,
    *,
    fresh: bool = False,
    progress: Progress = silent,
) -> Artifact:
    """Answer one chunk: `answers-*.parquet`, in the order of the conversations, and `dropped.json`.

    Finished groups of answers are kept until the artifact is published, and an interrupted run continues after them.
    Conversations that are answered in full in another chunk are not asked again, unless `fresh`.
    Raises RuntimeError where no prompt can be answered at all, and ConnectionError where a server stays away.
    """
    chat = load_chat(verifier)
    # of its own where all is to be answered anew: what lies in the other may be from before
    finished = in_progress(f"{plan.key}-fresh" if fresh else plan.key)
    conversations = scan_prompts(prompts).slice(plan.start, plan.stop - plan.start).filter(has_open())
    dropped: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"rows_in": 0, "rows": 0, "answers": 0, "tokens": 0, "taken_over": 0}
    ids = conversations.select("id").collect(engine="streaming")["id"]
    before = [] if fresh else answered_before(plan.key, ids)
    with (
        publish(plan.key, summary=summary, location=plan.location, content_identity=True) as (folder, artifact),
        _backend(config, verifier, chat) as (ask, at_once),
    ):
        for number, start in enumerate(range(0, plan.rows, WINDOW)):
            window = conversations.slice(start, WINDOW).collect(engine="streaming")
            dialogues = _dialogues(window)
            batches = finished / f"{number:05d}"
            batches.mkdir(exist_ok=True)
            summary["taken_over"] += _resume(dialogues, batches, before)
            for share in _answer(
                dialogues,
                chat=chat,
                ask=ask,
                at_once=at_once,
                max_prompt_tokens=config.max_prompt_tokens,
                folder=batches,
            ):
                done = start + share * window.height
                progress(done, plan.rows, f"{sum(d.tokens for d in dialogues.values()) + summary['tokens']:,} tokens")
            answers = _answers(batches)
            order = pl.DataFrame({"id": list(dialogues)}, schema={"id": pl.String})
            answers = order.join(answers.sort("turn"), on="id", how="inner", maintain_order="left_right")
            answers.write_parquet(folder / f"answers-{number:05d}.parquet")
            lost = [dialogue for dialogue in dialogues.values() if dialogue.end and not dialogue.answers]
            dropped += [dialogue.dropped() for dialogue in lost]
            _warn_of_cuts(dialogues)
            summary["rows_in"] += len(dialogues)
            summary["rows"] += len(dialogues) - len(lost)
            summary["answers"] += answers.height
            summary["tokens"] += int(answers["response_ids"].list.len().sum())
        reasons = Counter(record["reason"] for record in dropped)
        if not summary["rows"] and reasons["generation_failed"] > 1:
            raise RuntimeError(f"none of {len(dropped)} conversations could be answered: {dropped[-1]['message']}")
        summary["dropped"] = dict(reasons.most_common())
        (folder / "dropped.json").write_text(json.dumps(dropped, indent=1))
    shutil.rmtree(finished)
    facts = summary | {"name": plan.name}
    log.info(
        "chunk %(name)s: %(answers)d answers of %(tokens)d tokens, %(taken_over)d of them from other chunks, "
        "dropped %(dropped)s",
        facts,
    )
    return artifact()


@dataclass
class _Dialogue:
    """A conversation that is being answered: `answers` so far, and why there are no more of them, if so."""

    id: str
    origin: str
    source: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    places: list[int]
    answers: list[Message] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    end: Rejected | None = None

    def before(self, turn: int) -> list[Message]:
        return _filled(self.messages[: self.places[turn]], self.answers)

    def dropped(self) -> dict[str, Any]:
        assert self.end is not None
        return {
            "id": self.id,
            "origin": self.origin,
            "source": self.source,
            "reason": self.end.reason,
            "message": str(self.end),
            "prompt_tokens": self.prompt_tokens,
        }


def _filled(messages: list[Message], answers: list[Message]) -> list[Message]:
    filled = list(messages)
    for place, message in zip(open_places(messages), answers, strict=False):
        filled[place] = message
    return filled


def _dialogues(window: pl.DataFrame) -> dict[str, _Dialogue]:
    """By id, of which collection gives each conversation its own."""
    dialogues = {}
    for row in window.select("id", "origin", "source", "messages", "tools").iter_rows(named=True):
        messages = json.loads(row["messages"])
        tools = None if row["tools"] is None else json.loads(row["tools"])
        dialogues[row["id"]] = _Dialogue(
            row["id"], row["origin"], row["source"], messages, tools, open_places(messages)
        )
    return dialogues


def _answers(folder: Path) -> pl.DataFrame:
    """The answers in a chunk's folder. Damaged files are deleted: their answers are written again."""
    answers = [pl.DataFrame(schema=ANSWERS)]
    for file in sorted(folder.glob("group-*.parquet")):
        try:
            answers.append(read_parquet(file, ANSWERS))
        except ValueError as error:
            log.warning("%s: %s; deleted, its prompts are answered again", file, error)
            file.unlink()
    return pl.concat(answers)


def _write(rows: pl.DataFrame, folder: Path) -> Path:
    """Add a file, whole or not at all: what a killed run leaves behind is trusted by the next."""
    last = max(folder.glob("group-*.parquet"), default=None)
    number = int(last.stem.removeprefix("group-")) + 1 if last else 0
    parquet = BytesIO()
    rows.write_parquet(parquet)
    file = folder / f"group-{number:05d}.parquet"
    write_atomically(file, parquet.getvalue())
    return file


def _resume(dialogues: dict[str, _Dialogue], folder: Path, before: list[Path]) -> int:
    """Take up the answers in `folder`: by id and turn, because batch size and back end may have changed in between.

    And those in the files of other chunks, `before`, to conversations that have none here; returns how many.
    """
    there = _answers(folder)
    # an answer to what is lost must go too, because what follows may be another one now
    own = there.unique(["id", "turn"], keep="first").sort("id", "turn")
    own = own.filter(pl.col("turn") == pl.int_range(pl.len()).over("id"))
    begun = set(own["id"])
    others = whole_answers(before, {id: len(one.places) for id, one in dialogues.items() if id not in begun})
    answers = pl.concat([own, others])
    if others.height or own.height < there.height:
        old = list(folder.glob("group-*.parquet"))
        _write(answers, folder)
        for file in old:
            file.unlink()
    for id, message, length in (
        answers.sort("turn").select("id", "message", pl.col("response_ids").list.len()).iter_rows()
    ):
        dialogues[id].answers.append(json.loads(message))
        dialogues[id].tokens += length
    if own.height:
        log.info("%d answers were there before the interruption", own.height)
    return others.height


def _answer(
    dialogues: dict[str, _Dialogue], *, chat: Chat, ask: Ask, at_once: int, max_prompt_tokens: int, folder: Path
) -> Iterator[float]:
    """All first answers, then all second ones, and so on, adding one file per group; yields the share that is done."""
    total = sum(len(dialogue.places) for dialogue in dialogues.values())
    for turn in range(max((len(dialogue.places) for dialogue in dialogues.values()), default=0)):
        todo: list[tuple[_Dialogue, list[int]]] = []
        for dialogue in dialogues.values():
            if dialogue.end or len(dialogue.answers) > turn or len(dialogue.places) <= turn:
                continue
            try:
                prompt_ids = chat.prompt_ids(dialogue.before(turn), dialogue.tools)
                dialogue.prompt_tokens = len(prompt_ids)
                if len(prompt_ids) > max_prompt_tokens:
                    raise Rejected(
                        "prompt_too_long",
                        f"{len(prompt_ids)} tokens in the prompt, more than max_prompt_tokens {max_prompt_tokens}",
                    )
                todo.append((dialogue, prompt_ids))
            except Rejected as rejected:
                dialogue.end = rejected
        # Similar lengths together pad least; the longest first, so that too little memory shows at once.
        todo.sort(key=lambda item: (-len(item[1]), item[0].id))
        for start in range(0, len(todo), at_once):
            group = todo[start : start + at_once]
            results = ask([(request_name(dialogue.id, turn), prompt_ids) for dialogue, prompt_ids in group])
            rows = []
            for (dialogue, prompt_ids), result in zip(group, results, strict=True):
                if isinstance(result, Rejected):
                    dialogue.end = result
                    continue
                message = chat.message_of(result.ids, prompt_ids=prompt_ids)
                dialogue.answers.append(message)
                dialogue.tokens += len(result.ids)
                served = (prompt_ids, result.ids, result.finish_reason, result.origin)
                rows.append((dialogue.id, turn, *served, canonical_json(message)))
            _write(pl.DataFrame(rows, schema=ANSWERS, orient="row"), folder)
            yield sum(len(d.places if d.end else d.answers) for d in dialogues.values()) / total


def _warn_of_cuts(dialogues: dict[str, _Dialogue]) -> None:
    cut = [dialogue for dialogue in dialogues.values() if dialogue.end and dialogue.answers]
    if cut:
        log.warning("%d conversations end early, the first: %s: %s", len(cut), cut[0].source, cut[0].end)


@dataclass
class _Counts:
    """Sums over the sealed answers."""

    answers: int = 0
    turns_cut: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    finish: dict[str, int] = field(default_factory=dict)
    ids_from: dict[str, int] = field(default_factory=dict)

    def add(self, rows: pl.DataFrame) -> None:
        answers = rows.filter(pl.col("turn").is_not_null())
        self.answers += answers.height
        self.tokens += int(answers["response_ids"].list.len().sum())
        self.prompt_tokens += int(answers["prompt_ids"].list.len().sum())
        for counts, column in ((self.finish, "finish_reason"), (self.ids_from, "ids_from")):
            for value, count in answers[column].value_counts().sort(column).iter_rows():
                counts[value] = counts.get(value, 0) + count


def seal(
    chunks: list[Artifact],
    config: GenerationConfig,
    prompts: Artifact,
    verifier: PinnedVerifier,
    *,
    progress: Progress = silent,
) -> Artifact:
    """`conversations.parquet`: prompts and answers together, in the order of the prompts, columns as in SCHEMA.

    Raises ValueError where no conversation is left, and TooManyDropped where too few are.
    """
    plans = plan_chunks(config, prompts, verifier)
    assert [chunk.key for chunk in chunks] == [str(plan.key) for plan in plans], "the chunks of another plan"
    with _loading:
        _release()
    ledger, counts = Ledger(), _Counts()
    summary: dict[str, Any] = {}
    num_rows, done = scan_prompts(prompts).select(pl.len()).collect().item(), 0
    key = generation_key(config, prompts, verifier)
    with publish(key, summary=summary, content_identity=True) as (folder, artifact):
        parts = folder / "parts"
        parts.mkdir()

        def sealed() -> Iterator[pl.DataFrame]:
            nonlocal done
            for piece, answers, dropped in _pieces(prompts, plans, chunks, num_rows):
                yield _sealed(piece, answers, dropped, ledger, counts)
                done += piece.height
                progress(done, num_rows, f"{counts.tokens:,} tokens")

        for number, part in enumerate(_of_equal_height(sealed(), PART_ROWS)):
            part.write_parquet(parts / f"{number:06d}.parquet")
        _check(ledger, chunks, config)
        summary.update(ledger.summary(), **asdict(counts))
        whole = pl.scan_parquet(sorted(parts.iterdir()))
        whole.sink_parquet(folder / "conversations.parquet", row_group_size=PART_ROWS, maintain_order=True)
        shutil.rmtree(parts)
    log.info("%(rows)d of %(rows_in)d conversations with %(answers)d answers, dropped %(dropped)s", summary)
    log.info("%(tokens)d tokens after %(prompt_tokens)d, finish %(finish)s, ids %(ids_from)s", summary)
    return artifact()


def _pieces(
    prompts: Artifact, plans: list[ChunkPlan], chunks: list[Artifact], num_rows: int
) -> Iterator[tuple[pl.DataFrame, pl.DataFrame, dict[str, dict[str, Any]]]]:
    """All rows of the prompts in pieces of bounded size, each with the answers and losses of its conversations."""
    scan = scan_prompts(prompts)

    def slices(start: int, stop: int) -> Iterator[pl.DataFrame]:
        for first in range(start, stop, WINDOW):
            yield scan.slice(first, min(WINDOW, stop - first)).collect(engine="streaming")

    starts = [plan.start for plan in plans] + [num_rows]
    for piece in slices(0, starts[0]):
        yield piece, pl.DataFrame(schema=ANSWERS), {}
    for chunk, (start, stop) in zip(chunks, pairwise(starts), strict=True):
        dropped = {record["id"]: record for record in json.loads((chunk.path / "dropped.json").read_text())}
        answered = scan.slice(start, stop - start).select(open=has_open()).collect(engine="streaming")["open"]
        begins = answered.arg_true().gather_every(WINDOW).to_list()
        for number, (begin, end) in enumerate(pairwise([*begins, stop - start])):
            answers = pl.read_parquet(chunk.path / f"answers-{number:05d}.parquet")
            for piece in slices(start + begin, start + end):
                yield piece, answers, dropped


def _sealed(
    piece: pl.DataFrame, answers: pl.DataFrame, dropped: dict[str, dict[str, Any]], ledger: Ledger, counts: _Counts
) -> pl.DataFrame:
    """The rows of one piece: a row for each answer, and each conversation that keeps its own."""
    written: dict[str, list[Message]] = {}
    for id, message in answers.select("id", "message").iter_rows():
        written.setdefault(id, []).append(json.loads(message))
    filled: list[str | None] = []
    kept: list[bool] = []
    columns = piece.select("id", "origin", "source", "messages", has_open().alias("open"))
    for id, origin, source, text, maybe in columns.iter_rows():
        messages = json.loads(text) if maybe else []
        places = open_places(messages)
        answered = written.get(id, [])
        ledger.count(origin)
        kept.append(not places or bool(answered))
        if not kept[-1]:
            record = dropped[id]
            ledger.drop(origin, record["reason"], example=f"{source}: {record['message']}")
        else:
            ledger.keep(origin)
            if places:
                counts.turns_cut += len(places) - len(answered)
                # what comes after the last answer has none
                text = canonical_json(_filled(messages[: places[len(answered) - 1] + 1], answered))
        filled.append(text)
    rows = piece.with_columns(messages=pl.Series(filled, dtype=pl.String)).filter(pl.Series(kept, dtype=pl.Boolean))
    rows = rows.join(answers.drop("message"), on="id", how="left", maintain_order="left_right").select(SCHEMA.names())
    counts.add(rows)
    return rows


def _check(ledger: Ledger, chunks: list[Artifact], config: GenerationConfig) -> None:
    """Raises ValueError where too much was dropped, or everything."""
    totals = ledger.totals()
    if totals == {"prompt_too_long": ledger.rows_in.total()}:
        records = [record for chunk in chunks for record in json.loads((chunk.path / "dropped.json").read_text())]
        raise ValueError(
            f"{records[0]['source']}: all {len(records)} prompts from here on are longer than max_prompt_tokens "
            f"{config.max_prompt_tokens} (the shortest has {min(r['prompt_tokens'] for r in records)}); raise it"
        )
    for reason, example in ledger.examples.items():
        log.warning("%d conversations dropped, %s, the first: %s", totals[reason], reason, example)
    ledger.check(most=config.max_dropped_share, setting="generation.max_dropped_share")
    if not ledger.kept.total():
        raise ValueError(f"no conversation is left: {totals}; the first: {next(iter(ledger.examples.values()))}")


def _of_equal_height(frames: Iterator[pl.DataFrame], height: int) -> Iterator[pl.DataFrame]:
    """The same rows in frames of `height`, the last one shorter."""
    rest = pl.DataFrame(schema=SCHEMA)
    for frame in frames:
        rest = pl.concat([rest, frame])
        while rest.height >= height:
            yield rest.head(height).rechunk()
            rest = rest.slice(height)
    if rest.height:
        yield rest.rechunk()
