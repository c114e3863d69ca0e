"""Rows of a source to conversations: nine schemas in, one out. Knows no file format, no tokenizer and no model."""

import json
import re
import unicodedata
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dflash.corpus.records import OPEN, Conversation, Message, Rejected, canonical_json
from dflash.inputs import category_of
from dflash.manifests import text_sha256

FUNCTION_CALL = "function_call"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "instruction"), "user"),
    **dict.fromkeys(
        (
            "assistant",
            "gpt",
            "chatgpt",
            "gpt-3.5",
            "gpt-4",
            "gpt4",
            "bing",
            "bard",
            "claude",
            "model",
            "bot",
            "ai",
            "llm",
        ),
        "assistant",
    ),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    FUNCTION_CALL: "assistant",
}
"""What roles are called elsewhere. A turn of role function_call is an assistant's whose text is the call."""

SCHEMAS = ("messages", "conversations", "prompt", "instruction", "question", "problem", "turns", "text", "input_ids")
"""The column that names a row's schema; the first that is there counts."""

COMPANIONS = {
    "prompt": ("response", "completion"),
    "instruction": ("output", "response"),
    "question": ("answer", "response"),
    "problem": ("solution", "answer"),
}
"""Where the answer to a column is: the first that is there counts."""

NAMES = {
    "prompt": "prompt/response",
    "instruction": "instruction/input/output",
    "question": "question/answer",
    "problem": "problem/solution",
    "input_ids": "input_ids+loss_mask",
}
SYSTEM = ("system", "system_prompt")
REASONING = ("reasoning_content", "reasoning", "thinking")
COLUMNS = frozenset(
    (*SCHEMAS, *sum(COMPANIONS.values(), ()), *SYSTEM, *("input", "context", "loss_mask", "tools", "category"))
)
"""All columns that are read."""

NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # in JSON, where an escaped backslash may stand before u0000


def parse(
    row: dict[str, Any], *, answers: Literal["generate", "keep"], category: str, origin: str, source: str
) -> tuple[Conversation, str]:
    """The conversation of a row, and the name of the row's schema. A null is read as if the column were not there.

    `category`, where it is not empty, is that of all rows; otherwise it is the row's own, or else the name of the file
    in `source` (`file:row`). With answers `generate` the answers are open (content None) and only calls of tools stay
    as they are. Raises Rejected for a row that cannot be used, and ValueError where its schema has nothing to answer.
    """
    row = {name: value for name, value in row.items() if value is not None}
    schema = next((name for name in SCHEMAS if name in row), None)
    if schema is None:
        columns = ", ".join(sorted(row))
        raise Rejected(
            "unknown_schema", f"columns {columns!r:.200} hold no conversation; expected one of {', '.join(SCHEMAS)}"
        )
    name = NAMES.get(schema, schema)
    own = row.get("category")
    label = category or (own if isinstance(own, str) and own.strip() and own.isprintable() else "")
    conversation = partial(
        Conversation, category=label or category_of(Path(source.rpartition(":")[0])), origin=origin, source=source
    )
    if schema in ("text", "input_ids"):
        if answers == "generate":
            raise ValueError(
                f"{source}: a row of {name} has no turn to answer; set answers: keep for the source {origin}"
            )
        if schema == "text":
            text = _text(row["text"], "the text")
            digest = _digest(["text", text])
            return conversation(id=digest, group=digest, text=text), name
        ids, mask = _pretokenized(row)
        digest = _digest(["input_ids", ids, mask])
        return conversation(id=digest, group=digest, input_ids=ids, loss_mask=mask), name
    turns = _turns(row, schema)
    if answers == "generate":
        turns = _open(turns)
    messages = [message for number, turn in enumerate(turns, start=1) for message in _message(turn, number)]
    if answers == "keep" and not any(m["role"] == "assistant" and m["content"] is not None for m in messages):
        raise Rejected("no_answer", "no assistant turn to keep; add one, or set answers: generate")
    tools = _tools(row.get("tools"))
    others = [message if message["role"] != "assistant" else {"role": "assistant"} for message in messages]
    digest, group = _digest([messages, tools]), _digest([others, tools])
    return conversation(id=digest, group=group, messages=messages, tools=tools), name


def _digest(value: Any) -> str:
    """What an id is. Raises Rejected for what cannot be written: text that is no Unicode, a value that is no JSON."""
    try:
        text = canonical_json(value)
        digest = text_sha256(text)[:32]
    except UnicodeEncodeError:
        raise Rejected("bad_encoding", "half of a surrogate pair in a text; write it as UTF-8") from None
    except (TypeError, RecursionError) as error:
        raise Rejected(
            "bad_tools", f"a value that is no JSON ({error}); give texts, numbers, lists and objects"
        ) from None
    if "\\u0000" in text and NUL.search(text):
        raise Rejected("bad_encoding", "a NUL character in a text; remove it")
    return digest


def _turns(row: dict[str, Any], schema: str) -> list[Any]:
    """The turns of a row in the form of `messages`; what they hold is not looked at yet."""
    if schema in ("messages", "conversations"):
        turns = _listed(row[schema], schema)
    elif schema == "turns" or (schema == "prompt" and _is_texts(row["prompt"])):
        turns = [turn for text in _listed(row[schema], schema) for turn in ({"role": "user", "content": text}, OPEN)]
    else:
        turns = _side(row[schema], "user")
        if schema == "instruction" and (given := row.get("input", row.get("context"))):
            both = f"{_text(row[schema], 'the instruction')}\n\n{_text(given, 'the input')}"
            turns = [{"role": "user", "content": both}]
        answer = next((row[name] for name in COMPANIONS[schema] if name in row), None)
        turns = turns + (_side(answer, "assistant") if answer is not None else [])
    system = next((row[name] for name in SYSTEM if row.get(name)), None)
    if system is None or any(_role(turn) == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system}, *turns]


def _listed(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Rejected("bad_content", f"{what} is a {type(value).__name__}; give a list")
    if not value:
        raise Rejected("empty", f"{what} is an empty list; remove the row")
    return value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _side(value: Any, role: str) -> list[Any]:
    """One side of a pair: the content of a turn, or turns already."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and ("role" in value[0] or "from" in value[0]):
        return value
    return [{"role": role, "content": value}]


def _role(turn: Any) -> str:
    """Our name for a turn's role. Raises Rejected for an unknown one."""
    if not isinstance(turn, dict):
        raise Rejected("bad_content", f"a turn is a {type(turn).__name__}; give an object with role and content")
    given = turn.get("role") or turn.get("from")
    role = ROLES.get(given.strip().lower()) if isinstance(given, str) else None
    if role is None:
        raise Rejected("unknown_role", f"role {given!r:.40} is unknown; rename it to user, assistant, system or tool")
    return role


def _open(turns: Sequence[Any]) -> list[Any]:
    """Turns in which every answer is the verifier's to write; calls of tools, and what came before any user, stay."""
    roles = [_role(turn) for turn in turns]
    if "user" not in roles:
        raise Rejected("empty", "no user turn to answer; add one or remove the row")
    opened = [] if roles[-1] == "assistant" else [OPEN]
    first = roles.index("user")
    following: str | None = None
    for number in range(len(turns) - 1, -1, -1):
        if roles[number] != "assistant" or number < first or following == "tool":
            opened.append(turns[number])
        elif following != "assistant":
            opened.append(OPEN)
        elif opened[-1] is not OPEN:  # what was said before a call; before an answer it is part of the answer to come
            opened.append(turns[number])
        following = roles[number]
    return opened[::-1]


def _message(turn: Any, number: int) -> list[Message]:
    """The turn as a message in our words; none for an empty system turn, which says nothing."""
    if turn is OPEN:  # this very object: a turn of the data that looks like it is an empty one
        return [dict(OPEN)]
    role = _role(turn)
    given = turn["content"] if turn.get("content") is not None else turn.get("value")
    calls: Any = turn.get("tool_calls") or []
    if (turn.get("role") or turn.get("from")).strip().lower() == FUNCTION_CALL:
        given, calls = None, given
    content = _content(given, f"the content of turn {number} ({role})")
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        if calls:
            message["tool_calls"] = _tool_calls(calls)
        reasoning = next((turn[name] for name in REASONING if turn.get(name)), None)
        if reasoning is not None:
            message["reasoning_content"] = _text(reasoning, f"the reasoning of turn {number}")
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str) and turn[key]:
            message[key] = turn[key]
    if not content.strip():
        if role == "system":
            return []
        if role == "user" or (role == "assistant" and "tool_calls" not in message):
            raise Rejected("empty", f"the content of turn {number} ({role}) is empty; remove the row")
    return [message]


def _text(value: Any, what: str) -> str:
    text = _content(value, what)
    if not text.strip():
        raise Rejected("empty", f"{what} is empty; remove the row")
    return text


def _content(value: Any, what: str) -> str:
    """A text, or the text of a list of text parts."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        texts = [part.get("text") for part in value]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    kind = type(value).__name__
    if isinstance(value, list):
        kind += f" of {', '.join(str(p.get('type') if isinstance(p, dict) else type(p).__name__) for p in value[:4])}"
    raise Rejected("bad_content", f"{what} is a {kind:.80}; give a text or a list of text parts")


def _parsed(value: Any, what: str) -> Any:
    """What a JSON text stands for; anything else stands for itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Rejected("bad_tools", f"{what} is no JSON ({error}); give JSON or the value itself") from None


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    calls = _parsed(value, "a tool call")
    return [_tool_call(call) for call in (calls if isinstance(calls, list) else [calls])]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Rejected("bad_tools", "a tool call has no function name; give function.name and function.arguments")
    arguments = _parsed(function.get("arguments") or {}, f"the arguments of a call of {function['name']}")
    if not isinstance(arguments, dict):
        raise Rejected("bad_tools", f"the arguments of a call of {function['name']} are no object; name each of them")
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made | {"id": call["id"]} if isinstance(call.get("id"), str) else made


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _parsed(value or None, "tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("bad_tools", "tools are no list of objects; give a list, or its JSON text")
    return tools


def _pretokenized(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int} or (ids and not 0 <= min(ids) <= max(ids) < 2**31):
        raise Rejected("bad_content", "input_ids are no list of token ids")
    if not isinstance(mask, list) or not set(map(type, mask)) <= {int, bool} or not set(mask) <= {0, 1}:
        raise Rejected("bad_content", "loss_mask is no list of 0 and 1")
    if len(ids) != len(mask):
        raise Rejected("bad_content", f"{len(ids)} input_ids and {len(mask)} values of loss_mask; give one for each")
    if not ids:
        raise Rejected("empty", "input_ids are empty; remove the row")
    return ids, [bool(supervised) for supervised in mask]


def to_columns(conversation: Conversation) -> tuple[Any, ...]:
    """The values of a row of CONVERSATIONS."""
    c = conversation
    messages = None if c.messages is None else canonical_json(c.messages)
    tools = None if c.tools is None else canonical_json(c.tools)
    return (c.id, c.group, c.category, c.origin, c.source, messages, tools, c.text, c.input_ids, c.loss_mask)


def normalised(text: str) -> str:
    """The text without differences of case, white space and Unicode form."""
    return " ".join(_folded(text).split())


def _folded(text: str) -> str:
    if text.isascii():
        return text.lower()
    # twice: folding the case of a composed character may leave one that has another composed form
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


# kana and Han: scripts that put no space between words
_ALONE = re.compile(r"[\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_RUN = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Runs of letters and digits, case folded; each kana or Han character is a word."""
    folded = _folded(text)
    return _RUN.findall(folded if folded.isascii() else _ALONE.sub(r" \g<0> ", folded))
