"""The champion of a verifier, and the log of promotions."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dflash.decoding.champions import Champion, champion_of, promote, promotions

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def crown(number: int, *, instead_of: Champion | None) -> Champion:
    return promote(
        "v",
        drafter=f"training-{number}",
        report=f"evaluation-{number}",
        reason="better",
        promoted=NOW,
        instead_of=instead_of,
    )


def test_a_verifier_has_one_champion_and_a_log_of_all(home: Path) -> None:
    assert champion_of("v") is None
    assert promotions("v") == []
    first = crown(1, instead_of=None)
    second = crown(2, instead_of=first)
    assert champion_of("v") == second
    assert promotions("v") == [first, second]
    assert champion_of("another") is None


def test_promoting_the_champion_again_changes_nothing(home: Path) -> None:
    first = crown(1, instead_of=None)
    assert crown(1, instead_of=first) == first
    assert crown(1, instead_of=None) == first
    assert len(promotions("v")) == 1


def test_a_verdict_against_a_former_champion_promotes_nobody(home: Path) -> None:
    first = crown(1, instead_of=None)
    second = crown(2, instead_of=first)
    with pytest.raises(ValueError, match=r"champion is training-2, not training-1 any more; compare training-3"):
        crown(3, instead_of=first)
    with pytest.raises(ValueError, match=r"champion is training-2, not nobody"):
        crown(3, instead_of=None)
    assert champion_of("v") == second
    assert len(promotions("v")) == 2


def test_a_reason_of_several_lines_is_one_line_of_the_log(home: Path) -> None:
    reason = "over all\u2028and\x85by\x0ccategory\nas well"
    promote("v", drafter="training-1", report="evaluation-1", reason=reason, promoted=NOW, instead_of=None)
    assert [one.reason for one in promotions("v")] == [reason]


def test_damage_is_one_line_with_its_remedy_and_the_remedy_works(home: Path) -> None:
    first = crown(1, instead_of=None)
    alias, log = home / "champions" / "v.json", home / "champions" / "v.jsonl"
    alias.write_text(alias.read_text()[:30])
    with pytest.raises(ValueError, match=r"v\.json: unreadable .* write the last line of .*v\.jsonl into it") as error:
        champion_of("v")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="unreadable"):
        crown(2, instead_of=first)
    alias.write_text(log.read_text().splitlines()[-1])
    assert champion_of("v") == first
    log.write_text(log.read_text() + '{"drafter": "training-2"}\n')
    with pytest.raises(ValueError, match=r"v\.jsonl:2: unreadable .*; remove the line"):
        promotions("v")


@pytest.mark.parametrize("cut", [1, 10, -3, -1])
def test_a_line_that_a_crash_has_cut_is_left_out_loudly_and_the_next_one_is_whole(
    home: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    first = crown(1, instead_of=None)
    alias, log = home / "champions" / "v.json", home / "champions" / "v.jsonl"
    before, whole = alias.read_bytes(), log.read_bytes()
    promote("v", drafter="training-é", report="r", reason="better", promoted=NOW, instead_of=first)
    alias.write_bytes(before)  # which is written after the log
    log.write_bytes(whole + log.read_bytes()[len(whole) :][:cut])
    known = len(promotions("v"))
    assert known == (2 if cut == -1 else 1), "all but the end of the line is there"
    assert [record.message for record in caplog.records] == (
        [] if cut == -1 else [f"{log}:2: left out, as it has no end: nothing was promoted by it"]
    )
    third = crown(3, instead_of=first)
    assert promotions("v")[-1] == third == champion_of("v")
    assert len(promotions("v")) == known + 1
