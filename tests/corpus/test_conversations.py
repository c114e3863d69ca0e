import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash.corpus.conversations import read_prompts

WriteFile = Callable[..., Path]
QUESTION = '{"question": "How many?"}'


def test_four_schemas_give_one(prompt_file: WriteFile):
    path = prompt_file(
        '{"messages": [{"role": "user", "content": "How many?"}]}',
        '{"prompt": "Why?", "category": "qa"}',
        '{"question": "Who?", "answer": "Nobody"}',
        '{"turns": ["Write.", "Write again."], "question_id": 81}',
        name="sample.jsonl",
    )
    prompts = read_prompts([path], limit=0)
    assert [p.messages for p in prompts] == [
        [{"role": "user", "content": text}] for text in ("How many?", "Why?", "Who?", "Write.")
    ]
    assert [p.category for p in prompts] == ["sample", "qa", "sample", "sample"]
    assert [p.source for p in prompts] == [f"{path}:{line}" for line in (1, 2, 3, 4)]


def test_answers_after_the_last_user_turn_are_cut_and_earlier_ones_kept(prompt_file: WriteFile):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B."},
        {"role": "user", "content": "C?"},
    ]
    answers = [{"role": "assistant", "content": ""}, {"role": "assistant", "content": "D."}]
    path = prompt_file(json.dumps({"messages": messages + answers}), json.dumps({"messages": messages}))
    [prompt] = read_prompts([path], limit=0)
    assert prompt.messages == messages


def test_an_id_depends_on_the_messages_alone(prompt_file: WriteFile):
    one = prompt_file(QUESTION, name="one.jsonl")
    two = prompt_file("", '{"category": "other", "prompt": "How many?"}', '{"prompt": "How many? "}', name="two.jsonl")
    [first] = read_prompts([one], limit=0)
    same, other = read_prompts([two], limit=0)
    assert first.id == same.id != other.id
    assert re.fullmatch("[0-9a-f]{16}", first.id)


def test_repeated_conversations_are_dropped_and_counted(prompt_file: WriteFile, caplog: pytest.LogCaptureFixture):
    path = prompt_file(QUESTION, '{"prompt": "Why?"}', QUESTION)
    with caplog.at_level("INFO"):
        assert len(read_prompts([path, path], limit=0)) == 2
    assert "2 prompts from 6 rows, 4 duplicates dropped" in caplog.text


def test_the_limit_counts_distinct_prompts_over_all_files(prompt_file: WriteFile):
    one = prompt_file(QUESTION, QUESTION, name="one.jsonl")
    two = prompt_file('{"prompt": "Why?"}', '{"prompt": "Who?"}', name="two.jsonl")
    assert [p.messages[0]["content"] for p in read_prompts([one, two], limit=2)] == ["How many?", "Why?"]


def test_separators_of_unicode_do_not_end_a_line(prompt_file: WriteFile):
    path = prompt_file('{"prompt": "a\u2028b\u0085c"}')
    assert read_prompts([path], limit=0)[0].messages[0]["content"] == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "Why?"', "malformed JSON .*one JSON object per line"),
        ('["Why?"]', "a JSON list; give one JSON object per line"),
        ('{"text": "Why?"}', r"keys \['text'\] hold no prompt; expected one of messages, prompt, question, turns"),
        (
            '{"messages": [{"role": "bot", "content": "Hi"}]}',
            "role 'bot' is unknown; expected one of system, user, assis",
        ),
        ('{"messages": ["Hi"]}', "role None is unknown; expected one of"),
        ('{"messages": []}', "the conversation is empty; give"),
        ('{"turns": []}', "the conversation is empty; give"),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}', "no user turn to answer; end it with one"),
        (
            '{"messages": [{"role": "user", "content": " "}]}',
            r"the content of message 1 \(user\) is ' '; give a non-emp",
        ),
        ('{"messages": [{"role": "user"}]}', r"the content of message 1 \(user\) is None; give a non-empty"),
        ('{"prompt": ""}', "'prompt' is ''; give a non-empty text"),
        ('{"question": 3}', "'question' is 3; give a non-empty text"),
        ('{"prompt": "Why?", "category": 3}', "the category is 3; give a non-empty text"),
        (r'{"prompt": "\ud83d"}', "no valid text .*; save the file as UTF-8"),
    ],
)
def test_bad_rows_are_refused_in_one_line_with_place_and_remedy(prompt_file: WriteFile, line: str, message: str):
    path = prompt_file(QUESTION, "", line)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:3: .*{message}") as caught:
        read_prompts([path], limit=0)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl:1: no valid text .*UTF-8"):
        read_prompts([path], limit=0)


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_a_file_without_rows_is_refused(prompt_file: WriteFile, lines: tuple[str, ...]):
    full, empty = prompt_file(QUESTION, name="full.jsonl"), prompt_file(*lines, name="empty.jsonl")
    with pytest.raises(ValueError, match=r"empty.jsonl:1: the prompt file is empty; give"):
        read_prompts([full, empty], limit=0)
