"""Prompt files to prompts: four row schemas in, one out. Knows nothing of tokenizers, models or Prefect."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.manifests import text_sha256

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
SCHEMAS = ("messages", "prompt", "question", "turns")


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user turn. `id` is the hash of its messages, `source` is `file:line`."""

    id: str
    category: str
    messages: list[dict[str, str]]
    source: str = field(default="", compare=False)


def canonical_json(messages: list[dict[str, str]]) -> str:
    """The one spelling of a conversation: what ids are hashes of, and what Parquet files hold."""
    return json.dumps(messages, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} is {value!r}; give a non-empty text or remove the row")
    return value


def _messages(turns: Any) -> list[dict[str, str]]:
    """Role and content of each message, up to the last user turn: the answer after it is the verifier's to give."""
    if not isinstance(turns, list):
        raise ValueError(f"messages is a {type(turns).__name__}; give a list of messages that ends with a user turn")
    if not turns:
        raise ValueError("the conversation is empty; give a list of messages that ends with a user turn")
    for turn in turns:
        role = turn.get("role") if isinstance(turn, dict) else None
        if role not in ROLES:
            raise ValueError(f"role {role!r} is unknown; expected one of {', '.join(ROLES)}")
    kept = list(turns)
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    if not kept or kept[-1]["role"] != "user":
        raise ValueError("the conversation has no user turn to answer; end it with one or remove the row")
    return [
        {"role": turn["role"], "content": _text(turn.get("content"), f"the content of message {i} ({turn['role']})")}
        for i, turn in enumerate(kept, start=1)
    ]


def _user(text: Any, what: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(text, what)}]


def _parse(line: bytes, *, category: str, source: str) -> Prompt:
    """One line of a prompt file. Raises ValueError without the place; the caller knows it."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON ({error.msg}, column {error.colno}); give one JSON object per line") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply; give one flat JSON object per line") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}; give one JSON object per line")
    schema = next((name for name in SCHEMAS if name in row), None)
    if schema == "messages":
        messages = _messages(row["messages"])
    elif schema == "turns":
        if not isinstance(row["turns"], list) or not row["turns"]:
            raise ValueError("the conversation is empty; give a list of user turns or remove the row")
        messages = _user(row["turns"][0], "the first turn")
    elif schema is not None:
        messages = _user(row[schema], f"{schema!r}")
    else:
        raise ValueError(f"keys {sorted(row)} hold no prompt; expected one of {', '.join(SCHEMAS)}")
    category = _text(row.get("category", category), "the category")
    return Prompt(text_sha256(canonical_json(messages))[:16], category, messages, source)


def read_prompts(paths: Sequence[Path], *, limit: int) -> list[Prompt]:
    """The distinct prompts of JSONL files, in file order; the first `limit` of them, or all if it is 0.

    A row holds `messages` (a list of role and content; other keys of a message are not read), `prompt`, `question` or
    `turns` (only the first is used), and may hold a `category` (else the file's name). Assistant turns after the last
    user turn are cut off. Blank lines are skipped; a repeated conversation is dropped and counted in the log.
    Raises ValueError naming file and line for a row that cannot be read, and for a file without rows.
    """
    prompts: dict[str, Prompt] = {}
    num_rows = 0
    for path in paths:
        rows_before = num_rows
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                source = f"{path}:{number}"
                try:
                    prompt = _parse(line, category=path.stem, source=source)
                except (UnicodeDecodeError, UnicodeEncodeError) as error:  # no UTF-8, or half of a surrogate pair
                    raise ValueError(f"{source}: no valid text ({error.reason}); save the file as UTF-8") from None
                except ValueError as error:
                    raise ValueError(f"{source}: {error}") from None
                num_rows += 1
                prompts.setdefault(prompt.id, prompt)
                if len(prompts) == limit:
                    break
        if num_rows == rows_before:
            raise ValueError(f"{path}:1: the prompt file is empty; give at least one JSON row or leave the file out")
        if len(prompts) == limit:
            break
    log.info("%d prompts from %d rows, %d duplicates dropped", len(prompts), num_rows, num_rows - len(prompts))
    return list(prompts.values())
