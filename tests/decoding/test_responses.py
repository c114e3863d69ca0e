"""The record of a response and its file."""

from pathlib import Path

import pytest
from evaluated_small import response, some_responses

from dflash.decoding.responses import RESPONSES, Response, content_hash, read_responses, write_responses


def test_responses_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    bare = Response(
        id="p", set="s", category="c", content="x", num_tokens=1, truncated=False, accepted={"chain": (), "tree8": ()}
    )
    for written in ([*some_responses(3), response("one", num_tokens=2), response("two", drawn=True)], [bare], []):
        write_responses(tmp_path, written)
        assert read_responses(tmp_path) == written


def test_a_damaged_or_missing_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"responses\.parquet: No such file .* run the evaluation stage again"):
        read_responses(tmp_path)
    write_responses(tmp_path, some_responses(3))
    whole = (tmp_path / RESPONSES).read_bytes()
    (tmp_path / RESPONSES).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"responses\.parquet: unreadable") as error:
        read_responses(tmp_path)
    assert "\n" not in str(error.value)


def test_the_content_of_a_response_is_its_prompt_and_its_tokens() -> None:
    assert content_hash([1, 2], [3]) == content_hash([1, 2], [3])
    assert len({content_hash([1, 2], [3]), content_hash([1], [2, 3]), content_hash([1, 2], [4])}) == 3
