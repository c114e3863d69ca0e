"""The history file: a row per report, whoever writes at the same time."""

import multiprocessing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from evaluated_small import VERIFIER, response, small_report, some_responses

from dflash.decoding.history import append, history_path, read_history, series

IDENTITY = VERIFIER["identity"]
START = datetime(2026, 1, 1, tzinfo=UTC)


def add(number: int) -> bool:
    return append(small_report(some_responses(4)), key=f"evaluation-{number}", created=START + timedelta(days=number))


def test_a_report_is_a_row_and_appended_again_it_is_still_one(home: Path) -> None:
    report = small_report(some_responses(4))
    assert read_history(IDENTITY).is_empty()
    assert append(report, key="evaluation-1", created=START)
    assert not append(report, key="evaluation-1", created=START + timedelta(days=1))
    (row,) = read_history(IDENTITY).to_dicts()
    assert (row["report"], row["created"], row["drafter"], row["responses"]) == (
        "evaluation-1", START, "training-1", 4,
    )  # fmt: skip
    assert [part["method"] for part in row["methods"]] == report["methods"]
    assert row["methods"][0]["acceptance_length"] == report["acceptance_length"]["chain"]
    assert [row["methods"][0]["low"], row["methods"][0]["high"]] == report["overall"]["interval"]["chain"]


def test_verifiers_have_histories_of_their_own_and_one_response_has_no_interval(home: Path) -> None:
    report = small_report([response("p")], verifier=VERIFIER | {"identity": "another"})
    append(report, key="evaluation-1", created=START)
    assert read_history(IDENTITY).is_empty()
    assert read_history("another")["methods"][0][0]["low"] is None


def test_rows_are_in_the_order_of_time(home: Path) -> None:
    for number in (3, 1, 2):
        add(number)
    history = read_history(IDENTITY)
    assert history["report"].to_list() == ["evaluation-1", "evaluation-2", "evaluation-3"]
    shown = series(history, like=small_report(some_responses(4)))["chain"]
    assert [when for when, _ in shown] == [START + timedelta(days=n) for n in (1, 2, 3)]


def test_what_was_measured_otherwise_is_not_in_one_line_with_a_report(home: Path) -> None:
    report = small_report(some_responses(4))
    others = [
        small_report(some_responses(5)),
        small_report(some_responses(4), verifier=VERIFIER | {"dtype": "bfloat16"}),
        report | {"schema_version": 0},
        report | {"hidden_states": {"bundled": "extraction-of-other-taps"}},
    ]
    for day, other in enumerate(others):
        append(other, key=f"evaluation-{day}", created=START + timedelta(days=day))
    shown = series(read_history(IDENTITY), like=report)
    assert shown == {m: [(START + timedelta(days=3), report["acceptance_length"][m])] for m in report["methods"]}


def test_nothing_is_lost_when_several_processes_append(home: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        added = pool.map(add, [*range(12), *range(12)], chunksize=1)
    assert sum(added) == 12
    assert read_history(IDENTITY).height == 12


def test_a_damaged_history_is_named_and_left_as_it_is(home: Path) -> None:
    add(1)
    path = history_path(IDENTITY)
    damaged = path.read_bytes()[:-20]
    path.write_bytes(damaged)
    for attempt in (lambda: read_history(IDENTITY), lambda: add(2)):
        with pytest.raises(ValueError, match=rf"{path}: the history is unreadable .*; move it away") as error:
            attempt()
        assert "\n" not in str(error.value)
    assert path.read_bytes() == damaged
    path.rename(path.with_suffix(".damaged"))
    assert add(2)
    pl.DataFrame({"other": [1]}).write_parquet(path)
    with pytest.raises(ValueError, match="other columns"):
        add(3)
