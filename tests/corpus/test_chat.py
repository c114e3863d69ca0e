"""Template styles as small Jinja files, and a real byte-level BPE tokenizer with the special tokens of all of them."""

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash.config import VerifierConfig
from dflash.corpus.chat import Chat, load_chat, rows_of, rows_of_turns
from dflash.corpus.records import Rejected, Row, Turn
from dflash.pinning import PinnedVerifier, pin

TEMPLATES = Path(__file__).parent / "templates"
SPLIT = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDS = {  # style: bos, eos, and further end tokens as in a generation config
    "chatml": (None, "<|im_end|>", []),
    "qwen3": (None, "<|im_end|>", ["<|endoftext|>"]),
    "opened_think": (None, "<|im_end|>", []),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|end_of_text|>"]),
    "mistral": ("<s>", "</s>", []),
    "gemma": ("<bos>", "<eos>", ["<end_of_turn>"]),
    "phi": (None, "<|endoftext|>", ["<|end|>"]),
    "glm": (None, "<|endoftext|>", ["<|user|>", "<|observation|>"]),
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", []),
    "harmony": (None, "<|return|>", ["<|call|>"]),
    "marked": (None, "<|im_end|>", []),
    "plain": (None, "<|endoftext|>", []),
}
ADDED = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<eos>",
    "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|observation|>",
    "[gMASK]", "<sop>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>",
]  # fmt: skip
NEVER_MERGED = {"qwen3", "harmony"}  # what an answer looks like changes once it is history

TEXT = (
    "How many apples are left? Two and two are four, so four apples are left.\n\nThe answer is:\n"
    "I think that's right.\n\n    indented  twice\n\n\n\n assistant user system think"
)
Q1, A1 = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two and two: four."}
Q2, A2 = {"role": "user", "content": "Right?\n"}, {"role": "assistant", "content": "I think that's right.\n\nYes"}
SYSTEM = {"role": "system", "content": "The apples are left."}


def make_tokenizer(*, prefix_space: bool = False) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    if prefix_space:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        bpe.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(i) for i in range(32, 127)] + ["\n", "▁"]
    else:
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([TEXT] * 9, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    bpe.add_special_tokens(ADDED)
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")])
    return bpe


BYTE_LEVEL = make_tokenizer().to_str()


def make_chat(style: str, *, fast: str = BYTE_LEVEL, template: str | None = None, **options: Any) -> Chat:
    bos, eos, further = ENDS[style]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(fast), bos_token=bos, eos_token=eos, name_or_path=style
    )
    tokenizer.chat_template = template or (TEMPLATES / f"{style}.jinja").read_text()
    return Chat(tokenizer, eos_ids=tokenizer.convert_tokens_to_ids(further), **options)


CHATS = {style: make_chat(style) for style in ENDS}


def rows(chat: Chat, messages: list[dict], *, tools=None, turns="merge", mask_empty_thinking=True) -> list[Row]:
    (outcome,) = rows_of(chat, [(messages, tools)], turns=turns, mask_empty_thinking=mask_empty_thinking)
    if isinstance(outcome, Rejected):
        raise outcome
    return outcome


def said(chat: Chat, row: Row) -> list[str]:
    return [chat.tokenizer.decode(row.input_ids[a:b]) for a, b in row.spans]


def slow_ids(chat: Chat, text: str) -> list[int]:
    return chat.tokenizer.encode(text, add_special_tokens=False)


def slow_rows(chat: Chat, messages: list[dict]) -> list[Row]:
    """The definition, through Transformers: prompt ids, then the ids of what follows, up to the first end token."""
    made = []
    for turn, place in enumerate(i for i, m in enumerate(messages) if m["role"] == "assistant"):
        prompt = chat.tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, tokenize=False)
        whole = chat.tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)
        assert whole.startswith(prompt)
        before, after = slow_ids(chat, prompt), slow_ids(chat, whole[len(prompt) :])
        ends = [i + 1 for i, token in enumerate(after) if token in chat.eos_ids]
        after = after[: ends[0] if ends else None]
        made.append(Row(before + after, [(len(before), len(before) + len(after))], turn))
    return made


@pytest.mark.parametrize("style", sorted(set(ENDS) - {"marked"}))
def test_a_row_per_answer_is_what_serving_would_show_and_the_answer_by_itself(style: str):
    chat = CHATS[style]
    assert rows(chat, [Q1, A1, Q2, A2], turns="each", mask_empty_thinking=False) == slow_rows(chat, [Q1, A1, Q2, A2])


@pytest.mark.parametrize("style", sorted(ENDS))
def test_a_conversation_is_one_row_unless_its_template_rewrites_earlier_answers(style: str):
    chat = CHATS[style]
    messages = [Q1, A1, Q2, A2]
    made = rows(chat, messages)
    if style in NEVER_MERGED:
        assert [row.turn for row in made] == [0, 1]
        assert made == rows(chat, messages, turns="each")
        return
    (row,) = made
    assert row.turn is None
    assert row.input_ids == rows(chat, messages, turns="last")[0].input_ids
    each = rows(chat, messages, turns="each")
    assert [r.input_ids[a:b] for r in each for a, b in r.spans] == [row.input_ids[a:b] for a, b in row.spans]
    assert row.input_ids[: each[0].spans[0][0]] == each[0].input_ids[: each[0].spans[0][0]]


@pytest.mark.parametrize(
    ("style", "first", "last"),
    [
        ("chatml", "Two and two: four.<|im_end|>", "I think that's right.\n\nYes<|im_end|>"),
        ("qwen3", "Two and two: four.<|im_end|>", "I think that's right.\n\nYes<|im_end|>"),
        ("opened_think", "Two and two: four.<|im_end|>", "I think that's right.\n\nYes<|im_end|>"),
        ("llama3", "Two and two: four.<|eot_id|>", "I think that's right.\n\nYes<|eot_id|>"),
        ("mistral", " Two and two: four.</s>", " I think that's right.\n\nYes</s>"),
        ("gemma", "Two and two: four.<end_of_turn>", "I think that's right.\n\nYes<end_of_turn>"),
        ("phi", "Two and two: four.<|end|>", "I think that's right.\n\nYes<|end|>"),
        ("glm", "\n<think></think>\nTwo and two: four.", "\n<think></think>\nI think that's right.\n\nYes"),
        ("deepseek_r1", "Two and two: four.<｜end▁of▁sentence｜>", "I think that's right.\n\nYes<｜end▁of▁sentence｜>"),
        (
            "harmony",
            "<|channel|>final<|message|>Two and two: four.<|return|>",
            "<|channel|>final<|message|>I think that's right.\n\nYes<|return|>",
        ),
    ],
)
def test_supervised_is_what_the_verifier_says_and_its_end_token_and_nothing_more(style: str, first: str, last: str):
    chat = CHATS[style]
    assert [text for row in rows(chat, [Q1, A1, Q2, A2]) for text in said(chat, row)] == [first, last]
    assert [text for row in rows(chat, [Q1, A1, Q2, A2], turns="last") for text in said(chat, row)] == [last]


def test_generation_markers_say_which_characters_are_supervised():
    chat = CHATS["marked"]
    (row,) = rows(chat, [SYSTEM, Q1, A1, Q2, A2])
    assert said(chat, row) == [A1["content"], "<|im_end|>", A2["content"], "<|im_end|>"]
    assert [said(chat, row) for row in rows(chat, [Q1, A1, Q2, A2], turns="each")] == [
        [A1["content"], "<|im_end|>"], [A2["content"], "<|im_end|>"]
    ]  # fmt: skip
    silent = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if no %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(Rejected, match="markers leave out an assistant message") as caught:
        rows(make_chat("marked", template=silent), [Q1, A1])
    assert caught.value.reason == "no_supervised"


@pytest.mark.parametrize("style", sorted(ENDS))
@pytest.mark.parametrize("messages", [[Q1], [Q1, A1, Q2], [SYSTEM, Q1]])
def test_prompts_are_those_of_transformers(style: str, messages: list[dict]):
    chat = CHATS[style]
    if style == "gemma" and messages[0] is SYSTEM:
        with pytest.raises(
            Rejected, match=r"template refuses the conversation \(System role not supported\)"
        ) as caught:
            chat.prompt_ids(messages)
        assert caught.value.reason == "template_error"
        return
    rendered = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert chat.prompt_ids(messages) == rendered["input_ids"]
    assert all(type(token) is int for token in chat.prompt_ids(messages))


# texts that meet token boundaries: white space at the ends, newlines, and pieces of many bytes
PIECES = ["a", " ", "\n", "\r", "é", "🍎", ".", "4", "'s", "s", "<think>", "\u0301", "<|im_start|>"]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
spoken = texts.map(lambda text: f"{text}x").filter(lambda text: "<|im_start|>" not in text)
conversations = st.lists(st.tuples(texts, spoken), min_size=1, max_size=3)


@pytest.mark.parametrize(
    "style", sorted(set(ENDS) - {"qwen3", "harmony", "deepseek_r1", "marked", "glm", "opened_think"})
)
@given(conversation=conversations)
def test_any_text_joined_or_not_is_the_slow_definition(style: str, conversation: list[tuple[str, str]]):
    chat = CHATS[style]
    messages = [
        {"role": role, "content": text}
        for pair in conversation
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    expected = slow_rows(chat, messages)
    assert rows(chat, messages, turns="each") == expected
    assert rows(chat, messages, turns="last") == expected[-1:]
    made = rows(chat, messages)
    if len(made) > 1:
        assert made == expected
        return
    (row,) = made
    assert row.input_ids == expected[-1].input_ids
    assert len(row.spans) == len(expected)
    for (start, end), alone in zip(row.spans, expected, strict=True):
        assert row.input_ids[:end] == alone.input_ids
        assert (start, end) == alone.spans[0]


def test_ids_that_run_across_a_boundary_make_a_row_per_answer():
    chat = CHATS["chatml"]
    messages = [Q1, {"role": "assistant", "content": "\nTwo"}, Q2, A2]
    assert len(slow_ids(chat, "\n\n")) == 1
    assert rows(chat, messages) == slow_rows(chat, messages)
    (row,) = rows(chat, [Q1, {"role": "assistant", "content": " Two"}, Q2, A2])
    assert said(chat, row)[0] == " Two<|im_end|>"


def test_an_answer_begins_where_its_prompt_ends_even_if_its_ids_are_found_earlier():
    fast = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "aa": 2}, merges=[("a", "a")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    chat = Chat(tokenizer, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    pairs = (("user", "a"), ("assistant", "aa"), ("user", "b"), ("assistant", "b"))
    messages = [{"role": role, "content": text} for role, text in pairs]
    # the later prompt is aa|a|b: an aa lies at its beginning, but the answer aa is not there
    assert rows(chat, messages) == [Row([0, 2], [(1, 2)], 0), Row([2, 0, 1, 1], [(3, 4)], 1)]


def test_a_template_that_rewrites_the_beginning_makes_a_row_per_answer():
    counting = "{{ (messages | length + 1) // 2 }}" + (TEMPLATES / "chatml.jinja").read_text()
    chat = make_chat("chatml", template=counting)
    # the number is the same in an answer's prompt and with the answer, and as long in the next prompt
    assert [row.turn for row in rows(chat, [Q1, {"role": "assistant", "content": "x"}, Q2, A2])] == [0, 1]


def test_a_tokenizer_that_adds_a_space_to_texts_adds_none_to_answers():
    chat = make_chat("chatml", fast=make_tokenizer(prefix_space=True).to_str())
    (row,) = rows(chat, [Q1, A1])
    whole = chat.tokenizer.apply_chat_template([Q1, A1], tokenize=False)
    end = whole.rindex("<|im_end|>") + len("<|im_end|>")
    assert chat.tokenizer.decode(row.input_ids) == chat.tokenizer.decode(slow_ids(chat, whole[:end]))
    assert chat.tokenizer.convert_ids_to_tokens(row.input_ids)[row.spans[0][0]].startswith("T")


def test_text_that_the_tokenizer_normalises_is_still_the_answer():
    composing = Tokenizer.from_str(BYTE_LEVEL)
    composing.normalizer = normalizers.NFC()
    (row,) = rows(make_chat("chatml", fast=composing.to_str()), [Q1, {"role": "assistant", "content": "e\u0301"}])
    assert said(CHATS["chatml"], row) == ["\u00e9<|im_end|>"]


def test_thinking_stays_with_its_own_answer_only():
    chat = CHATS["qwen3"]
    thought = A1 | {"reasoning_content": "two plus two"}
    first, last = rows(chat, [Q1, thought, Q2, A2])
    assert said(chat, first) == ["<think>\ntwo plus two\n</think>\n\nTwo and two: four.<|im_end|>"]
    assert "two plus two" not in chat.tokenizer.decode(last.input_ids)
    # the thinking may as well be in the content
    assert rows(chat, [Q1, A1 | {"content": f"<think>two plus two</think>{A1['content']}"}]) == [
        Row(first.input_ids, first.spans)
    ]
    channels = CHATS["harmony"]
    (row,) = rows(channels, [Q1, thought])
    assert said(channels, row) == [
        "<|channel|>analysis<|message|>two plus two<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Two and two: four.<|return|>"
    ]


def test_an_inserted_empty_think_block_is_supervised_only_on_request():
    block = "<think>\n\n</think>\n\n"
    for style, opened in (("qwen3", ""), ("opened_think", "<think>\n")):
        chat = CHATS[style]
        (masked,) = rows(chat, [Q1, A1])
        (whole,) = rows(chat, [Q1, A1], mask_empty_thinking=False)
        assert said(chat, masked) == [f"{A1['content']}<|im_end|>"]
        assert said(chat, whole) == [f"{(block + A1['content']).removeprefix(opened)}<|im_end|>"]
        off = make_chat(style, variables={"enable_thinking": False})
        assert rows(off, [Q1, A1], mask_empty_thinking=False) == [masked]
        assert off.tokenizer.decode(off.prompt_ids([Q1])).endswith(block)


def test_calls_are_said_by_the_assistant_and_results_are_not():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    }
    result = {"role": "tool", "content": "four left", "tool_call_id": "1"}
    messages = [Q1, call, result, A1]
    for style, spelt in (
        ("qwen3", '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'),
        ("llama3", '{"name": "add", "parameters": {"a": 2}}<|eot_id|>'),
    ):
        chat = CHATS[style]
        texts = [text for row in rows(chat, messages, tools=tools) for text in said(chat, row)]
        assert texts[0] == spelt
        assert texts[1].startswith(A1["content"])
        assert "four left" in chat.prompt_text(messages[:3], tools)
        assert '"type": "object"' in chat.prompt_text(messages[:3], tools)
    with pytest.raises(Rejected, match="does not write the assistant's call of tool 'add'"):
        rows(CHATS["chatml"], messages, tools=tools)


def test_a_tokenizer_may_have_a_template_for_tools():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(BYTE_LEVEL), eos_token="<|im_end|>")
    tokenizer.chat_template = {
        name: (TEMPLATES / f"{style}.jinja").read_text()
        for name, style in (("default", "chatml"), ("tool_use", "qwen3"))
    }
    chat = Chat(tokenizer)
    assert chat.prompt_text([Q1]) == CHATS["chatml"].prompt_text([Q1])
    assert chat.prompt_text([Q1], [{"name": "add"}]) == CHATS["qwen3"].prompt_text([Q1], [{"name": "add"}])


@pytest.mark.parametrize(
    ("style", "messages", "reason", "message"),
    [
        ("gemma", [SYSTEM, Q1, A1], "template_error", "System role not supported"),
        ("mistral", [Q1, Q2, A1], "template_error", "roles must alternate"),
        ("chatml", [Q1, Q2], "no_supervised", "no assistant message"),
        ("llama3", [A1], "template_error", ""),
        ("chatml", [Q1, A1 | {"content": "Two<|im_end|> x"}], "template_error", "that begins 'Two<|im_end|> x'"),
        ("deepseek_r1", [Q1, A1 | {"content": "<think>two</think>Four."}], "template_error", "as 'Four.<｜end▁of"),
    ],
)  # fmt: skip
def test_conversations_without_a_right_row_are_rejected(style: str, messages: list[dict], reason: str, message: str):
    chat = CHATS[style]
    if messages == [A1]:
        chat = make_chat(style, template="{{ messages[0].content }}")
    good, bad = rows_of(chat, [([Q1, A1], None), (messages, None)], turns="merge", mask_empty_thinking=True)
    assert isinstance(bad, Rejected)
    assert bad.reason == reason
    assert message in str(bad)
    assert isinstance(good, list) or messages == [A1]


def test_an_answer_that_no_served_prompt_leads_to_is_rejected():
    forced = make_chat("deepseek_r1", variables={"forced": True})
    # and thinking that the prompt opens is the prompt's, even where a prompt without thinking would open nothing
    opening = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ '<think>' if enable_thinking is not false }}{% endif %}"
    )
    thought = {"role": "assistant", "content": "<think>two</think>Four."}
    chat = make_chat("chatml", template=opening)
    assert said(chat, rows(chat, [Q1, thought])[0]) == ["two</think>Four.<|im_end|>"]
    with pytest.raises(Rejected, match=r"opens an answer with '.*<think>\\n', but writes this one otherwise"):
        rows(forced, [Q1, A1])


def test_a_dropped_answer_is_noticed():
    with pytest.raises(Rejected, match="writes an answer that begins 'Two and two: four.' as '<|im_end|>'"):
        template = "{% for m in messages %}{{ m.content if m.role == 'user' }}<|im_end|>{% endfor %}"
        rows(make_chat("chatml", template=template), [Q1, A1])
    template = "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"
    with pytest.raises(Rejected, match="leaves no supervised token"):
        rows(make_chat("chatml", template=template), [Q1, A1])


def test_the_system_prompt_goes_before_conversations_that_have_none():
    chat = make_chat("chatml", system_prompt=SYSTEM["content"])
    assert chat.prompt_ids([Q1]) == CHATS["chatml"].prompt_ids([SYSTEM, Q1])
    own = {"role": "system", "content": "Be brief."}
    assert chat.prompt_ids([own, Q1]) == CHATS["chatml"].prompt_ids([own, Q1])
    assert rows(chat, [Q1, A1, Q2, A2]) == rows(CHATS["chatml"], [SYSTEM, Q1, A1, Q2, A2])


def test_only_variables_that_the_template_reads_are_accepted():
    chat = make_chat("llama3", variables={"date_string": "1 May 2025"})
    assert "Today Date: 1 May 2025" in chat.prompt_text([Q1])
    with pytest.raises(ValueError, match=r"does not read enable_thinking, mood; it knows: date_string \("):
        make_chat("llama3", variables={"mood": "good", "date_string": "", "enable_thinking": True})
    own = "{% set tone = tone or 'calm' %}{% if tone %}{% set local = 1 %}{{ local }}{% endif %}{{ tone }}"
    assert make_chat("chatml", template=own, variables={"tone": "loud"}).prompt_text([Q1]) == "1loud"
    with pytest.raises(ValueError, match=r"does not read local; it knows: tone \("):
        make_chat("chatml", template=own, variables={"local": 2})
    with pytest.raises(ValueError, match="does not read messages; it knows: none"):
        make_chat("chatml", variables={"messages": []})


def test_a_template_that_asks_for_the_day_is_warned_about(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        make_chat("chatml", template="{{ strftime_now('%d') }}")
    assert "may write today's date" in caplog.text


def test_a_malformed_template_is_refused_with_its_line():
    with pytest.raises(ValueError, match=r"the chat template is malformed: line 2: .*; correct verifier.template"):
        make_chat("chatml", template="\n{% for %}")


def test_an_empty_prompt_is_rejected():
    with pytest.raises(Rejected, match="empty prompt") as rejected:
        make_chat("chatml", template="{{ messages[1:] | map(attribute='content') | join }}").prompt_ids([Q1])
    assert rejected.value.reason == "template_error"


def test_a_tokenizer_without_template_is_refused():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(BYTE_LEVEL), name_or_path="tiny")
    with pytest.raises(ValueError, match="tiny: the tokenizer has no chat template; use an instruction-tuned"):
        Chat(bare)
    assert Chat(bare, template="{{ messages[0].content }}").prompt_ids([Q1]) == slow_ids(
        Chat(bare, template="x"), "How many?"
    )


def test_a_verifiers_chat_has_its_template_options_and_end_tokens(verifier_folder: Path, tmp_path: Path):
    template = tmp_path / "other.jinja"
    template.write_text("{{ mood }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}")
    config = VerifierConfig(
        model=str(verifier_folder), template=str(template), template_options={"mood": "good"}, system_prompt="Hi"
    )
    chat = load_chat(pin(config))
    assert chat.prompt_text([Q1]) == "good<|start|>system\nHi<|end|><|start|>user\nHow many?<|end|>"
    plain = load_chat(pin(VerifierConfig(model=str(verifier_folder))))
    assert plain.eos_ids == {plain.tokenizer.convert_tokens_to_ids("<|end|>")}
    assert plain.template_sha256 != chat.template_sha256


def test_a_tokenizer_that_cannot_be_loaded_is_named(verifier: PinnedVerifier, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"the tokenizer in {tmp_path} cannot be loaded"):
        load_chat(verifier.model_copy(update={"path": str(tmp_path)}))


def test_an_answer_becomes_a_message_of_its_text_or_of_its_parts():
    chat = make_chat("opened_think")
    ids = slow_ids(chat, "two plus two\n</think>\n\nFour.<|im_end|>")
    assert chat.message_of(ids) == {"role": "assistant", "content": "two plus two\n</think>\n\nFour."}
    chat.tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>\n", "close": "\n</think>"},
            "content": {"close": "<|im_end|>"},
        },
    }
    message = chat.message_of(ids, prompt_ids=chat.prompt_ids([Q1]))
    assert {name: text.strip() for name, text in message.items()} == {
        "role": "assistant", "reasoning_content": "two plus two", "content": "Four."
    }  # fmt: skip


def test_served_turns_are_joined_while_prompts_repeat_them():
    turns = [Turn([1, 2], [3, 9]), Turn([1, 2, 3, 9, 4], [5, 9]), Turn([1, 2, 3, 9, 4, 5, 9, 6], [7])]
    assert rows_of_turns(turns, turns="merge") == [
        Row([1, 2, 3, 9, 4, 5, 9, 6, 7], [(2, 4), (5, 7), (8, 9)])
    ]  # fmt: skip
    each = [Row([1, 2, 3, 9], [(2, 4)], 0), Row([1, 2, 3, 9, 4, 5, 9], [(5, 7)], 1)]
    last = Row([1, 2, 3, 9, 4, 5, 9, 6, 7], [(8, 9)], 2)
    assert rows_of_turns(turns, turns="each") == [*each, last]
    assert rows_of_turns(turns, turns="last") == [last]
    # an answer cut by the limit has no end token; the next prompt closes it, and still repeats it
    assert rows_of_turns([Turn([1], [3]), Turn([1, 3, 9, 4], [5])], turns="merge") == [
        Row([1, 3, 9, 4, 5], [(1, 2), (4, 5)])
    ]  # fmt: skip


def test_served_turns_that_a_later_prompt_rewrites_have_rows_of_their_own():
    turns = [Turn([1, 2], [8, 3, 9]), Turn([1, 2, 3, 9, 4], [5, 9])]
    assert rows_of_turns(turns, turns="merge") == rows_of_turns(turns, turns="each")
    assert [row.turn for row in rows_of_turns(turns, turns="merge")] == [0, 1]
