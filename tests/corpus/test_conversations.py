import json
import subprocess
import sys
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.corpus.conversations import (
    normalised,
    parse,
    to_columns,
    words,
)
from dflash.corpus.records import CONVERSATIONS, OPEN, Conversation, Rejected, canonical_json

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def conversation(row: dict[str, Any], answers: str = "generate", category: str = "") -> Conversation:
    return parse(row, answers=answers, category=category, origin="sources", source="data/chats.v2.jsonl:7")[0]


def kept(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = conversation(row, "keep").messages
    assert messages is not None
    return messages


def rejected(row: dict[str, Any], answers: str = "generate") -> Rejected:
    with pytest.raises(Rejected) as caught:
        conversation(row, answers)
    assert "\n" not in str(caught.value)
    return caught.value


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


PAIR = [user("Why?"), assistant("Because.")]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("messages", {"messages": PAIR}),
        (
            "conversations",
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        ),
        ("conversations", {"conversations": PAIR}),
        ("prompt/response", {"prompt": "Why?", "response": "Because."}),
        ("prompt/response", {"prompt": "Why?", "completion": "Because."}),
        ("prompt/response", {"prompt": PAIR[:1], "completion": PAIR[1:]}),
        ("instruction/input/output", {"instruction": "Why?", "input": "", "output": "Because."}),
        ("question/answer", {"question": "Why?", "answer": "Because."}),
        ("problem/solution", {"problem": "Why?", "solution": "Because.", "answer": "B"}),
    ],
)
def test_pairs_of_every_schema_give_the_same_conversation(name: str, row: dict[str, Any]):
    found, schema = parse(row, answers="keep", category="", origin="o", source="f.jsonl:1")
    assert schema == name
    assert found.messages == PAIR
    assert found.id == conversation({"messages": PAIR}, "keep").id


WRITE = ["Compose a travel blog post.", "Start every sentence with A."]
MATH = "Convert $(0,3)$ to polar coordinates."
EVALUATION_SETS = {
    "Spec-Bench": ({"question_id": 81, "category": "writing", "turns": WRITE}, WRITE, "writing"),
    "MT-Bench": ({"question_id": 81, "category": "writing", "turns": WRITE, "reference": ["", ""]}, WRITE, "writing"),
    "HuggingFaceH4/mt_bench_prompts": (
        {"category": "writing", "prompt": WRITE, "reference": [], "prompt_id": 36},
        WRITE,
        "writing",
    ),
    "GSM8K": ({"question": "How many clips?", "answer": "48/2 = 24\n#### 24"}, ["How many clips?"], "chats"),
    "HuggingFaceH4/MATH-500": (
        {
            "problem": MATH,
            "solution": r"We have that $r = 3.$",
            "answer": r"\left( 3, \frac{\pi}{2} \right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/807.json",
        },
        [MATH],
        "chats",
    ),
    "HumanEval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():\n",
            "entry_point": "f",
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate): ...",
        },
        ["def f():\n"],
        "chats",
    ),
    "Alpaca": (
        {"instruction": "Translate.", "input": "Hello", "output": "Hallo", "text": "Below is an instruction …"},
        ["Translate.\n\nHello"],
        "chats",
    ),
}


@pytest.mark.parametrize(("row", "asked", "category"), EVALUATION_SETS.values(), ids=EVALUATION_SETS)
def test_a_row_of_each_usual_evaluation_set_is_its_user_turns(row: dict[str, Any], asked: list[str], category: str):
    found = parse(row, answers="generate", category="", origin="o", source="data/chats.jsonl:7")[0]
    assert found.messages == [turn for text in asked for turn in (user(text), OPEN)]
    assert found.category == category


def test_a_list_of_texts_as_prompt_has_no_answer_to_keep():
    assert rejected({"prompt": WRITE, "response": "Aloha."}, "keep").reason == "no_answer"


def test_the_first_known_column_decides_and_nulls_are_no_columns():
    row = {"messages": None, "prompt": "Why?", "text": "Why? Because.", "response": None}
    assert conversation(row).messages == [user("Why?"), OPEN]


def test_turns_are_questions_with_an_open_answer_each():
    assert conversation({"turns": ["Write.", "Again."]}).messages == [user("Write."), OPEN, user("Again."), OPEN]
    assert rejected({"turns": ["Write."]}, "keep").reason == "no_answer"


def test_an_input_follows_its_instruction_and_a_system_column_comes_first():
    row = {"system_prompt": "Be brief.", "instruction": "Add.", "input": "1, 2", "output": "3"}
    system = {"role": "system", "content": "Be brief."}
    assert kept(row) == [system, user("Add.\n\n1, 2"), assistant("3")]
    own = {"role": "system", "content": "Be long."}
    assert kept({"system": "Be brief.", "messages": [own, *PAIR]}) == [own, *PAIR]


def test_raw_text_and_token_ids_are_kept_as_they_are_and_are_their_own_group():
    text = conversation({"text": " Once.\n"}, "keep")
    assert (text.text, text.messages, text.group) == (" Once.\n", None, text.id)
    ids = conversation({"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]}, "keep")
    assert (ids.input_ids, ids.loss_mask, ids.group) == ([5, 6, 7], [False, True, True], ids.id)
    assert ids.id != conversation({"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}, "keep").id


@pytest.mark.parametrize("row", [{"text": "Once."}, {"input_ids": [5], "loss_mask": [1]}])
def test_rows_without_turns_cannot_be_answered_and_the_remedy_is_named(row: dict[str, Any]):
    with pytest.raises(
        ValueError, match=r"^data/chats.v2.jsonl:7: .*set answers: keep for the source sources"
    ) as caught:
        conversation(row)
    assert not isinstance(caught.value, Rejected)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("u", "u_"),
        ("ua", "u_"),
        ("uaua", "u_u_"),
        ("suau", "su_u_"),
        ("uaa", "u_"),
        ("uaat", "uaat_"),
        ("uat", "uat_"),
        ("uata", "uat_"),
        ("uataua", "uat_u_"),
        ("au", "au_"),  # a greeting has no prompt: nothing to write it from
        ("uas", "u_s_"),
    ],
)
def test_what_the_verifier_writes(roles: str, expected: str):
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    found = conversation({"messages": [{"role": names[r], "content": "x"} for r in roles]}).messages
    assert found is not None
    assert "".join("_" if m == OPEN else m["role"][0] for m in found) == expected


def test_answers_that_will_be_replaced_are_not_judged():
    row = {"messages": [user("Why?"), {"role": "assistant", "content": {"odd": 1}}, user("So?"), assistant("")]}
    assert conversation(row).messages == [user("Why?"), OPEN, user("So?"), OPEN]


@pytest.mark.parametrize(
    ("given", "role"),
    [
        ("human", "user"), ("User ", "user"), ("prompter", "user"), ("GPT", "assistant"), ("chatgpt", "assistant"),
        ("bing", "assistant"), ("bard", "assistant"), ("model", "assistant"), ("developer", "system"),
        ("function", "tool"), ("observation", "tool"), ("function_response", "tool"), ("ipython", "tool"),
    ],
)  # fmt: skip
def test_known_role_names_are_mapped(given: str, role: str):
    row = {"conversations": [{"from": given, "value": "Hi"}, *PAIR]}
    assert kept(row)[0] == {"role": role, "content": "Hi"}


def test_a_function_call_becomes_a_tool_call():
    value = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    turns = [("human", "Rain?"), ("function_call", value), ("observation", "yes"), ("gpt", "It rains.")]
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "yes"}
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert kept(row) == [user("Rain?"), called, result, assistant("It rains.")]
    assert conversation(row).messages == [user("Rain?"), called, result, OPEN]


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"name": "weather", "arguments": {"city": "Oslo"}},
    ],
)
def test_tool_calls_of_any_form_are_the_same_call(call: dict[str, Any]):
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "", "tool_call_id": "c1", "name": "weather"}
    assert kept({"messages": [user("Rain?"), called, result]}) == [
        user("Rain?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, result,
    ]  # fmt: skip


def test_tools_are_a_list_or_its_json_and_change_the_identity():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    native, text = (conversation({"messages": PAIR, "tools": value}) for value in (tools, json.dumps(tools)))
    assert native == text
    assert native.tools == tools
    without = [conversation({"messages": PAIR, "tools": value}) for value in (None, "", [], "[]")]
    assert {c.id for c in without} == {conversation({"messages": PAIR}).id}
    assert native.id != without[0].id


def test_tools_and_arguments_keep_the_order_of_their_keys_that_templates_print():
    tools = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": {}}}]
    call = {"name": "weather", "arguments": '{"town": "Oslo", "at": "noon"}'}
    row = {"messages": [user("Rain?"), assistant("", tool_calls=[call])], "tools": tools}
    found = conversation(row, "keep")
    columns = dict(zip(CONVERSATIONS.names(), to_columns(found), strict=True))
    assert columns["tools"] == canonical_json(tools)
    [called] = json.loads(columns["messages"])[1]["tool_calls"]
    assert list(called["function"]["arguments"]) == ["town", "at"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_one_name(name: str):
    row = {"messages": [user("Why?"), assistant("Because.", **{name: "Hm."})]}
    assert kept(row) == [user("Why?"), assistant("Because.", reasoning_content="Hm.")]


def test_text_parts_are_joined_and_an_empty_system_turn_says_nothing():
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?", "image": None}]
    row = {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": parts}, PAIR[1]]}
    assert kept(row) == PAIR


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("unknown_schema", {"body": "Why?"}),
        ("unknown_schema", {}),
        ("unknown_role", {"messages": [user("Why?"), {"role": "narrator", "content": "Hm."}]}),
        ("unknown_role", {"messages": [{"role": ["user"], "content": "Hm."}]}),
        ("unknown_role", {"messages": [{"content": "Hm."}]}),
        ("bad_content", {"messages": ["Why?"]}),
        ("bad_content", {"messages": "Why?"}),
        ("bad_content", {"messages": [{"role": "user", "content": 3}]}),
        ("bad_content", {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}),
        ("bad_content", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("bad_content", {"question": {"text": "Why?"}}),
        ("empty", {"messages": []}),
        ("empty", {"turns": []}),
        ("empty", {"prompt": " \n"}),
        ("empty", {"messages": [user(""), PAIR[1]]}),
        ("empty", {"messages": [{"role": "user"}]}),
        ("empty", {"messages": [PAIR[1]]}),
        ("bad_tools", {"messages": PAIR, "tools": "{"}),
        ("bad_tools", {"messages": PAIR, "tools": {"name": "weather"}}),
        ("bad_tools", {"messages": PAIR, "tools": ["weather"]}),
        ("bad_tools", {"messages": PAIR, "tools": [{"since": b"bytes"}]}),
        ("bad_encoding", {"prompt": "half \ud83d of a pair"}),
        ("bad_encoding", {"prompt": "a \0 character"}),
    ],
)
def test_unusable_rows_are_rejected_under_their_reason(reason: str, row: dict[str, Any]):
    assert rejected(row).reason == reason


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("no_answer", {"prompt": "Why?"}),
        ("no_answer", {"messages": PAIR[:1]}),
        ("empty", {"prompt": "Why?", "response": ""}),
        ("empty", {"messages": [user("Why?"), dict(OPEN)]}),
        ("empty", {"text": "  "}),
        ("empty", {"input_ids": [], "loss_mask": []}),
        ("bad_content", {"text": ["Once."]}),
        ("bad_content", {"input_ids": [1, 2]}),
        ("bad_content", {"input_ids": [1, 2], "loss_mask": [1]}),
        ("bad_content", {"input_ids": [1, -2], "loss_mask": [1, 1]}),
        ("bad_content", {"input_ids": [1, 2**31], "loss_mask": [1, 1]}),
        ("bad_content", {"input_ids": [1, 2.0], "loss_mask": [1, 1]}),
        ("bad_content", {"input_ids": [1, 2], "loss_mask": [1, 2]}),
        ("bad_tools", {"messages": [user("Why?"), assistant("", tool_calls=[{"function": {"arguments": "{}"}}])]}),
        ("bad_tools", {"messages": [user("Why?"), assistant("", tool_calls=[{"name": "f", "arguments": "{"}])]}),
        ("bad_tools", {"messages": [user("Why?"), assistant("", tool_calls=[{"name": "f", "arguments": "[1]"}])]}),
        ("bad_tools", {"conversations": [{"from": "function_call", "value": "weather(Oslo)"}]}),
    ],
)
def test_rows_whose_answers_cannot_be_kept_are_rejected_under_their_reason(reason: str, row: dict[str, Any]):
    assert rejected(row, "keep").reason == reason


def test_a_backslash_before_u0000_is_no_nul_character():
    assert conversation({"prompt": "write \\u0000"}).messages == [user("write \\u0000"), OPEN]


def test_long_values_do_not_end_up_in_messages():
    for row in ({"x" * 10**6: 1}, {"messages": [{"role": "x" * 10**6}]}, {"prompt": [{"type": "x" * 10**6}]}):
        assert len(str(rejected(row))) < 400


def test_categories_come_from_the_source_else_the_row_else_the_file():
    row = {"prompt": "Why?", "category": "own"}
    assert conversation(row, category="of the source").category == "of the source"
    assert conversation(row).category == "own"
    for odd in (None, "", " ", 3, "a\nb", "\ud83d"):
        assert conversation(row | {"category": odd}).category == "chats"


def test_an_id_is_of_the_content_alone():
    one, two = ({"prompt": "Why?", "category": "a", "n": 1}, {"n": 2, "messages": PAIR})
    assert conversation(one).id == conversation(two).id != conversation({"prompt": "Why? "}).id
    assert len(conversation(one).id) == 32
    assert conversation(two).id != conversation(two, "keep").id


def test_a_group_is_what_the_assistant_did_not_write():
    other = {"messages": [user("Why?"), assistant("No idea.")]}
    assert conversation({"messages": PAIR}, "keep").group == conversation(other, "keep").group
    assert conversation({"messages": PAIR}, "keep").group == conversation({"messages": PAIR}).group
    assert conversation({"messages": PAIR}, "keep").id != conversation(other, "keep").id
    assert conversation({"prompt": "Why?"}).group != conversation({"prompt": "How?"}).group


TEXTS = st.text(max_size=8)
ROLES = st.sampled_from(
    ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "narrator", "", None, 3]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from(["[]", "{}", "\ud800", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": ANYTHING, "arguments": ANYTHING})})
TURNS = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXTS | ANYTHING},
    optional={
        "value": ANYTHING,
        "from": ROLES,
        "tool_calls": st.lists(CALLS, max_size=2) | ANYTHING,
        "thinking": ANYTHING,
    },
)
VALUES = st.lists(TURNS, max_size=4) | ANYTHING | st.lists(st.integers(0, 3), max_size=3)
COLUMNS = ("messages", "conversations", "prompt", "response", "instruction", "input", "output", "question", "answer")
MORE_COLUMNS = ("turns", "text", "input_ids", "loss_mask", "tools", "system", "category")
ROWS = st.dictionaries(
    st.sampled_from(COLUMNS + MORE_COLUMNS),
    VALUES,
    max_size=4,
)


@given(ROWS, st.sampled_from(["generate", "keep"]))
def test_any_row_is_a_conversation_that_survives_its_columns_or_is_rejected(row: dict[str, Any], answers: str):
    try:
        found = conversation(row, answers)
    except Rejected:
        return
    except ValueError as error:
        assert "set answers: keep" in str(error)  # noqa: PT017
        return
    [columns] = pl.DataFrame([to_columns(found)], schema=CONVERSATIONS, orient="row").iter_rows(named=True)
    for name in ("messages", "tools"):
        columns[name] = columns[name] and json.loads(columns[name])
    assert repr(Conversation(**columns)) == repr(found)  # NaN is not equal to itself
    assert [found.messages, found.text, found.input_ids].count(None) == 2
    if found.messages is not None:
        assert all(m["content"] is not None or (answers == "generate" and m == OPEN) for m in found.messages)
        assert answers == "keep" or found.messages[-1] == OPEN


def test_normalised_texts_differ_in_no_case_space_or_unicode_form():
    assert normalised("  Straße\u00a0\tCAFÉ ﬁne\n") == normalised("STRASSE cafe\u0301 fine") == "strasse café fine"


@given(st.text())
def test_normalising_again_changes_nothing(text: str):
    assert normalised(normalised(text)) == normalised(text)


def test_words_are_runs_of_letters_and_digits_and_single_characters_of_scripts_without_spaces():
    assert words("It's 3.5 km, isn't_it?") == ["it", "s", "3", "5", "km", "isn", "t", "it"]
    assert words("你好GPT4です Ｏｋ") == ["你", "好", "gpt4", "で", "す", "ok"]
    assert words("Ελλάδα, Россия — 한국어 …") == ["ελλάδα", "россия", "한국어"]


@given(st.text())
def test_words_are_blind_to_what_normalising_removes(text: str):
    assert words(normalised(text)) == words(text)


def test_reading_conversations_does_not_load_torch():
    heavy = "('torch', 'transformers', 'datasets')"
    code = f"import dflash.corpus.sources, sys; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
