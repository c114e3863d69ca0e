"""Conversations to token ids by the verifier's chat template, and the spans of them that the verifier said.

Where an answer begins and ends is read off rendered prefixes of the conversation, or the template's own
`{% generation %}` markers, never off text patterns. Knows nothing of files, stages or models.

Of answer i, `prompt` is the text that serving would show the verifier (the messages before it, and the template's
opening of an answer), `whole` the text with the answer. Everything is made of two operations:

* a row is the ids of a prompt, as serving would make them, followed by the ids of what comes after it in `whole`;
* several answers share a row only where the last one's prompt contains the earlier ones unchanged, ids included.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from jinja2 import TemplateError

from dflash.corpus.records import Message, Rejected, Row, Turn
from dflash.corpus.templates import Template, check_variables, read_template
from dflash.pinning import PinnedVerifier

log = logging.getLogger(__name__)

Conversations = Sequence[tuple[list[Message], list[dict[str, Any]] | None]]

REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template, being code, may raise at a conversation it was not written for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Rendered texts of answer number `turn`; `prompt` is how `whole` begins.

    `spans` are the characters of `whole` that the verifier said (less, where an end token comes earlier).
    """

    message: Message
    turn: int
    prompt: str
    whole: str
    spans: list[tuple[int, int]]

    def is_rest(self) -> bool:
        """Whether all that follows the prompt is the answer, so that no token's place need be known."""
        return self.spans == [(len(self.prompt), len(self.whole))]


class Chat:
    """A tokenizer with its template and options. The tokenizer is this object's own."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        system_prompt: str = "",
        variables: dict[str, Any] | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """`template` replaces the tokenizer's own; `variables` are further ones of the template.

        Raises ValueError where there is no template, where it is malformed, and for variables it does not read.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        if not tokenizer.is_fast:
            raise ValueError(f"{tokenizer.name_or_path}: the tokenizer has no tokenizer.json; convert it to a fast one")
        if not (template or tokenizer.chat_template):
            raise ValueError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template; use an instruction-tuned verifier, "
                "put a chat_template.jinja beside its tokenizer files, or set verifier.template"
            )
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.eos_ids = frozenset([*eos_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])])
        # some tokenizers have a template of its own for conversations with tools
        self._plain = read_template(tokenizer.get_chat_template(template))
        self._with_tools = read_template(tokenizer.get_chat_template(template, tools=[{}]))
        texts = dict.fromkeys([self._plain.text, self._with_tools.text])
        self.template_sha256 = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        check_variables(variables or {}, [self._plain, self._with_tools])
        if "strftime_now" in self._plain.given | self._with_tools.given:
            log.warning("the chat template may write today's date; ids then depend on the day they are made")
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(variables or {})}
        self._render_jinja: Any = render_jinja_template
        self._fast = tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._added_ids = frozenset(self._fast.get_added_tokens_decoder())
        self._ids = lru_cache(4096)(lambda text: self._fast.encode(text, add_special_tokens=False).ids)
        # a tokenizer that puts a space before a text's first word is shown answers after a newline, which is taken off
        newline = self._ids("\n")
        self._lead = "" if self._ids("\na") == newline + self._ids("a") else "\n"
        self._num_lead = len(newline) if self._lead else 0

    def prompt_text(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The conversation up to where the assistant begins. Raises Rejected where the template refuses it."""
        return self._render([self._prepared(messages)], tools, prompt=True)[0][0]

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Its token ids, as serving makes them. Raises Rejected where the template refuses the conversation."""
        ids = list(self._fast.encode(self.prompt_text(messages, tools), add_special_tokens=False).ids)
        if not ids:
            raise Rejected("template_error", "the verifier's chat template makes an empty prompt of the conversation")
        return ids

    def message_of(self, response_ids: Sequence[int], *, prompt_ids: Sequence[int] = ()) -> Message:
        """An answer as a message: its parts where the tokenizer can tell them apart, else its text as content.

        Some templates begin the answer themselves (with `<think>`, say); then the parts need `prompt_ids`.
        """
        if getattr(self.tokenizer, "response_template", None) is not None:
            try:
                parsed = self.tokenizer.parse_response(list(response_ids), prefix=self.tokenizer.decode(prompt_ids))
            except ValueError:  # an answer that breaks the form; its text is an answer all the same
                parsed = None
            if parsed:
                reasoning = parsed.pop("thinking", None)
                known = {} if reasoning is None else {"reasoning_content": reasoning}
                return {"content": "", **known, **parsed, "role": "assistant"}
        return {
            "role": "assistant",
            "content": self.tokenizer.decode(list(response_ids), skip_special_tokens=True),
        }

    def answers(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, last: bool, mask_empty_thinking: bool
    ) -> list[Answer]:
        """Every assistant message with its texts, or only the last one. Raises Rejected where one cannot be told."""
        messages = self._prepared(messages)
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not places:
            raise Rejected("no_supervised", "the conversation has no assistant message")
        first = len(places) - 1 if last else 0
        places = places[first:]
        before = [messages[:place] for place in places]
        prompts = self._render(before, tools, prompt=True)
        wholes = self._render([messages[: place + 1] for place in places], tools, prompt=False)
        # an empty think block that the template inserts is how it opens an answer without thinking
        unthinking: list[str | None] = [None] * len(places)
        template = self._template(tools)
        on = self._variables.get("enable_thinking", True)
        if mask_empty_thinking and on and "enable_thinking" in template.variables:
            unthinking = [text for text, _ in self._render(before, tools, prompt=True, enable_thinking=False)]
        parts = zip(places, prompts, wholes, unthinking, strict=True)
        return [
            _answer(messages[place], turn, *prompt, *whole, marked=template.marked, unthinking=opening)
            for turn, (place, prompt, whole, opening) in enumerate(parts, start=first)
        ]

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Ids of whole prompts."""
        return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_places(self, texts: list[str]) -> list[Any]:
        """The same as encodings that know the characters of each token, which costs a quarter more."""
        return list(self._fast.encode_batch(texts, add_special_tokens=False))

    def encode_answers(self, answers: Sequence[Answer]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Of each answer the ids of what follows its prompt, up to and with the first end token, and the spans of
        them that the verifier said.
        """
        texts = [answer.whole[len(answer.prompt) :] for answer in answers]
        places = not all(answer.is_rest() for answer in answers)
        encode = self._fast.encode_batch if places else self._fast.encode_batch_fast
        encodings = encode([self._lead + text for text in texts], add_special_tokens=False)
        encoded = []
        for answer, text, encoding in zip(answers, texts, encodings, strict=True):
            ids, lead, skipped = encoding.ids, len(self._lead), self._num_lead
            if skipped and ids[:skipped] != self._ids("\n"):  # it became one with the answer's own first characters
                encoding = self._fast.encode(text, add_special_tokens=False)
                ids, lead, skipped = encoding.ids, 0, 0
            stop = self._end(ids, skipped)
            stop = len(ids) if stop is None else stop
            spans = [(skipped, stop)]
            if not answer.is_rest():
                shift = len(answer.prompt) - lead
                spans = [_token_span(encoding, start - shift, end - shift) for start, end in answer.spans]
            kept = [(start - skipped, min(end, stop) - skipped) for start, end in spans if start < min(end, stop)]
            encoded.append((ids[skipped:stop], kept))
        return encoded

    def places_in_prompt(
        self, answers: Sequence[Answer], encoding: Any, alone: Sequence[tuple[list[int], list[tuple[int, int]]]]
    ) -> list[int] | None:
        """Where the ids of all answers but the last begin within the last one's prompt, of which `encoding` is.

        `alone` are the answers by themselves. None where that prompt does not repeat the earlier prompts and answers
        id by id.
        """
        text, ids = answers[-1].prompt, encoding.ids
        places = []
        for answer, (own, _) in zip(answers[:-1], alone, strict=True):
            begin = len(answer.prompt)
            first = encoding.char_to_token(begin)
            repeated = text.startswith(answer.prompt) and first is not None and ids[first : first + len(own)] == own
            if not repeated or not self._is_edge(text, encoding, first, begin):
                return None
            places.append(first)
        return places

    def check(self, answers: Sequence[Answer], spoken: list[list[int]]) -> list[Rejected | None]:
        """What is wrong with the supervised ids of each answer: none at all, or not what the message says."""
        texts = self._fast.decode_batch(spoken, skip_special_tokens=False)
        return [self._wrong(answer, ids, text) for answer, ids, text in zip(answers, spoken, texts, strict=True)]

    def _wrong(self, answer: Answer, ids: list[int], text: str) -> Rejected | None:
        if not ids:
            return Rejected("no_supervised", "the template leaves no supervised token of an answer")
        message = answer.message
        content = message.get("content") or ""
        if content.strip() not in text:
            # templates reformat, tokenizers normalise, and a prompt may open the answer (with `<think>`, say): what
            # counts is that every character comes back
            again = self._fast.decode(self._ids(content), skip_special_tokens=False)
            if not any(_ends_in(said, text, before=answer.prompt[-32:]) for said in (content, again)):
                return Rejected(
                    "template_error",
                    f"the template writes an answer that begins {content.strip()[:40]!r} as {text[:40]!r}; "
                    "set answers: generate for this source, or give another verifier.template",
                )
        for call in message.get("tool_calls") or []:
            name = call.get("function", call).get("name", "")
            if name not in text:
                return Rejected("template_error", f"the template does not write the assistant's call of tool {name!r}")
        return None

    def _end(self, ids: list[int], start: int) -> int | None:
        """The position after the first end token from `start` on: there generation stops, whatever a template adds."""
        places = [ids.index(end, start) + 1 for end in self.eos_ids if end in ids[start:]]
        return min(places, default=None)

    def _is_edge(self, text: str, encoding: Any, token: int, place: int) -> bool:
        """Whether the text before `place` has, by itself, exactly the ids before `token`.

        Tokenizers cut texts at added tokens first and look at each piece by itself. So ids agree up to the last added
        token before the place, and only the few characters since then are compared.
        """
        ids = encoding.ids
        since = next((i for i in range(token - 1, 0, -1) if ids[i] in self._added_ids), 0)
        return bool(self._ids(text[encoding.token_to_chars(since)[0] if since else 0 : place]) == ids[since:token])

    def _prepared(self, messages: list[Message]) -> list[Message]:
        """Without empty fields, which templates would print; reasoning under both names that templates read."""
        prepared = []
        for message in messages:
            message = {name: value for name, value in message.items() if value is not None}
            if "reasoning_content" in message:
                message.setdefault("thinking", message["reasoning_content"])
            prepared.append(message)
        if self.system_prompt and not (prepared and prepared[0]["role"] == "system"):
            prepared.insert(0, {"role": "system", "content": self.system_prompt})
        return prepared

    def _template(self, tools: list[dict[str, Any]] | None) -> Template:
        return self._with_tools if tools else self._plain

    def _render(
        self, conversations: list[list[Message]], tools: list[dict[str, Any]] | None, *, prompt: bool, **more: Any
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Texts, and the spans of each that the template's markers hold. Transformers compiles a template once."""
        template = self._template(tools)
        try:
            texts, marks = self._render_jinja(
                conversations,
                tools=tools or None,
                chat_template=template.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=template.marked,
                **{**self._variables, **more},
            )
        except REFUSALS as error:
            cause = " ".join(str(error).split())[:200]
            raise Rejected(
                "template_error", f"the verifier's chat template refuses the conversation ({cause}); change its turns"
            ) from error
        return list(zip(texts, marks or [[] for _ in texts], strict=True))


def load_chat(verifier: PinnedVerifier) -> Chat:
    """The verifier's tokenizer with its template and chat options. Raises ValueError where they do not fit."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(verifier.path, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(
            f"verifier.model: the tokenizer in {verifier.path} cannot be loaded ({cause}); get it again"
        ) from error
    return Chat(
        tokenizer,
        template=verifier.chat.template,
        system_prompt=verifier.chat.system_prompt,
        variables=dict(verifier.chat.variables),
        eos_ids=verifier.special_ids["eos"],
    )


def rows_of(
    chat: Chat, conversations: Conversations, *, turns: str, mask_empty_thinking: bool
) -> list[list[Row] | Rejected]:
    """Rows of each conversation (messages and tools), every assistant message supervised, or why it has none.

    `turns`: `merge` makes one row of a conversation, or one per answer where the template rewrites earlier turns or
    ids run across a boundary; `each` one per answer; `last` only the last answer's. A row ends with its last answer.
    """
    outcome: list[list[Row] | Rejected | None] = []
    rendered: list[list[Answer]] = []
    for messages, tools in conversations:
        try:
            answers = chat.answers(messages, tools, last=turns == "last", mask_empty_thinking=mask_empty_thinking)
            rendered.append(answers)
            outcome.append(None)
        except Rejected as rejected:
            rendered.append([])
            outcome.append(rejected)

    every = [(i, turn) for i, answers in enumerate(rendered) for turn in range(len(answers))]
    said = dict(zip(every, chat.encode_answers([rendered[i][turn] for i, turn in every]), strict=True))
    prompts: dict[tuple[int, int], list[int]] = {}
    joined: dict[int, list[int]] = {}  # of conversations in one row: where each answer begins
    candidates = [i for i, answers in enumerate(rendered) if turns == "merge" and len(answers) > 1]
    encodings = chat.encode_with_places([rendered[i][-1].prompt for i in candidates])
    for i, encoding in zip(candidates, encodings, strict=True):
        last = len(rendered[i]) - 1
        prompts[i, last] = encoding.ids
        places = chat.places_in_prompt(rendered[i], encoding, [said[i, turn] for turn in range(last)])
        if places is not None:
            joined[i] = [*places, len(encoding)]
    missing = [(i, turn) for i, turn in every if i not in joined and (i, turn) not in prompts]
    prompts.update(zip(missing, chat.encode_prompts([rendered[i][turn].prompt for i, turn in missing]), strict=True))

    rows: list[list[Row]] = []
    for i, answers in enumerate(rendered):
        if i in joined:
            parts = [said[i, turn][1] for turn in range(len(answers))]
            spans = [(begin + a, begin + b) for begin, part in zip(joined[i], parts, strict=True) for a, b in part]
            last = len(answers) - 1
            rows.append([Row(prompts[i, last] + said[i, last][0], spans)])
            continue
        whole = turns == "merge" and len(answers) == 1
        rows.append([])
        for turn, answer in enumerate(answers):
            ids, part = said[i, turn]
            begin = len(prompts[i, turn])
            spans = [(begin + a, begin + b) for a, b in part]
            rows[i].append(Row(prompts[i, turn] + ids, spans, None if whole else answer.turn))

    spoken = [list(chain.from_iterable(ids[a:b] for a, b in part)) for ids, part in (said[place] for place in every)]
    faults = chat.check([rendered[i][turn] for i, turn in every], spoken)
    for (i, _), fault in zip(every, faults, strict=True):
        outcome[i] = outcome[i] or fault
    return [made if fault is None else fault for fault, made in zip(outcome, rows, strict=True)]


def rows_of_turns(served: Sequence[Turn], *, turns: str) -> list[Row]:
    """Rows of answers as they were served, in order; the ids stay as they are. `turns` as in `rows_of`.

    Merged only where every prompt repeats the ids of the prompt and the answer before it.
    """
    ids = [turn.prompt_ids + turn.response_ids for turn in served]
    spans = [(len(turn.prompt_ids), len(whole)) for turn, whole in zip(served, ids, strict=True)]
    if turns == "last":
        return [Row(ids[-1], spans[-1:], len(served) - 1)]
    repeated = (turn.prompt_ids[: len(whole)] == whole for whole, turn in zip(ids, served[1:], strict=False))
    if turns == "merge" and all(repeated):
        return [Row(ids[-1], spans)]
    return [Row(whole, [span], turn) for turn, (whole, span) in enumerate(zip(ids, spans, strict=True))]


def _answer(
    message: Message,
    turn: int,
    prompt: str,
    marks_before: list[tuple[int, int]],
    whole: str,
    marks: list[tuple[int, int]],
    *,
    marked: bool,
    unthinking: str | None,
) -> Answer:
    if unthinking is not None and whole.startswith(unthinking):
        prompt = max(unthinking, prompt if whole.startswith(prompt) else "", key=len)
    spans = marks[len(marks_before) :] if marked else [(len(prompt), len(whole))]
    if not spans:
        raise Rejected("no_supervised", "the template's generation markers leave out an assistant message")
    if not whole.startswith(prompt):
        if not marked:
            raise Rejected(
                "template_error",
                f"the template opens an answer with {prompt[-24:]!r}, but writes this one otherwise: no served answer "
                "looks like that; set verifier.thinking, or answers: generate for this source",
            )
        prompt = whole[: spans[0][0]]
    start = len(prompt)
    return Answer(message, turn, prompt, whole, [(max(a, start), b) for a, b in spans])


def _token_span(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """The tokens that have characters of [start, end)."""
    first = next((t for t in map(encoding.char_to_token, range(max(start, 0), end)) if t is not None), None)
    if first is None:
        return 0, 0
    stop = first
    while stop < len(encoding) and encoding.token_to_chars(stop)[0] < end:
        stop += 1
    return first, stop


def _ends_in(said: str, text: str, *, before: str) -> bool:
    """Whether `said` is there but for white space, begun in `before` or in `text` and ended in `text`."""
    said, text, before = ("".join(part.split()) for part in (said, text, before))
    place = (before + text).rfind(said)
    return place >= 0 and place + len(said) > len(before)
