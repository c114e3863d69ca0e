"""The record of report.json: what its numbers are, and that docs/report.md describes all of them."""

import dataclasses
import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from evaluated_small import LIVE, NUM_SLOTS, full_report, response, small_report, some_responses

from dflash.decoding.acceptance import Expected
from dflash.decoding.report import SCHEMA_VERSION
from dflash.decoding.responses import Response

DOCS = Path(__file__).parents[2] / "docs" / "report.md"


def by_hand() -> list[Response]:
    """Two responses of maths, one of another category that has no rounds; three slots."""
    made = [
        ("p1", "maths", 6, {"chain": (0, 1, 2), "tree4": (2, 2)}),
        ("p2", "maths", 2, {"chain": (0,), "tree4": (1,)}),
        ("p3", "a|b", 1, {"chain": (), "tree4": ()}),
    ]
    return [
        Response(id=i, set="s", category=c, content=i, num_tokens=n, truncated=i == "p2", accepted=accepted)
        for i, c, n, accepted in made
    ]


def test_totals_are_of_rounds_and_means_of_responses() -> None:
    report = small_report(by_hand(), num_slots=3)
    overall = report["overall"]
    assert report["acceptance_length"] == overall["acceptance_length"] == {"chain": 1 + 3 / 4, "tree4": 1 + 5 / 3}
    assert overall["per_response_mean"] == {"chain": (2 + 1) / 2, "tree4": (3 + 2) / 2}
    assert overall["rounds"] == {"chain": 4, "tree4": 3}
    assert overall["accepted"] == {"chain": 3, "tree4": 5}
    assert (overall["responses"], overall["tokens"]) == (3, 9)
    assert (overall["truncated"], overall["truncated_share"]) == (1, 1 / 3)
    categories = report["sets"]["s"]["categories"]
    assert categories["a|b"]["acceptance_length"] == {"chain": None, "tree4": None}
    assert overall["histogram"]["chain"] == [2, 1, 1, 0]
    assert overall["conditional_acceptance"]["chain"] == [
        {"slot": 1, "accepted": 2, "measured": 4, "share": 0.5},
        {"slot": 2, "accepted": 1, "measured": 2, "share": 0.5},
        {"slot": 3, "accepted": 0, "measured": 0, "share": None},
    ]


def test_what_was_not_recorded_is_null_and_not_zero() -> None:
    overall = small_report(by_hand(), num_slots=3)["overall"]
    assert overall["recall"] is None
    assert overall["on_policy_share"] is None
    assert overall["calibration"] == {"chain": None, "tree4": None}
    assert small_report(by_hand(), num_slots=3)["adviser"] is None


def test_the_token_that_the_prompt_gives_is_none_of_decoding() -> None:
    timing = {"plain": {"tokens": 12, "seconds": {"verify": 10.0}}, "chain": {"tokens": 7, "seconds": {"verify": 2.5}}}
    live = small_report(by_hand(), num_slots=3, live=LIVE | {"prompts": 2, "timing": timing})["live"]
    assert live["speedup"] == {"chain": (10 / 10) / (2.5 / 5)}


def test_sets_and_categories_add_up() -> None:
    responses = [response(f"p{n}", set_name="ab"[n % 2], category="xyz"[n % 3]) for n in range(12)]
    report = small_report(responses)
    for name in ("responses", "tokens", "truncated"):
        assert sum(numbers[name] for numbers in report["sets"].values()) == report["overall"][name]
        for numbers in report["sets"].values():
            assert sum(part[name] for part in numbers["categories"].values()) == numbers[name]
    assert list(report["sets"]) == ["a", "b"]
    assert list(report["sets"]["a"]["categories"]) == ["x", "y", "z"]


def test_intervals_hold_their_lengths_and_the_order_of_responses_changes_nothing() -> None:
    responses = some_responses(20)
    report = small_report(responses)
    for method, (low, high) in report["overall"]["interval"].items():
        assert low < report["acceptance_length"][method] < high
    shuffled = random.Random(0).sample(responses, len(responses))
    assert small_report(shuffled) == report


def test_calibration_counts_only_rounds_whose_slots_lie_within_the_response() -> None:
    # anchors 0, 3, 5, 7 of nine tokens with four slots: the last two rounds reach beyond the end
    one = Response(
        id="p", set="s", category="c", content="x", num_tokens=9, truncated=False,
        accepted={"chain": (2, 1, 1, 1)}, expected={"chain": (2.5, 0.5, 3.0, 3.0)},
    )  # fmt: skip
    assert small_report([one], num_slots=4)["overall"]["calibration"]["chain"] == {
        "rounds": 2,
        "expected": 1.5,
        "realised": 1.5,
        "bins": [
            {"from": 0, "rounds": 1, "expected": 0.5, "realised": 1},
            {"from": 2, "rounds": 1, "expected": 2.5, "realised": 2},
        ],
    }


def test_recall_is_hits_over_slots() -> None:
    parts = [
        dataclasses.replace(response("p1"), recall_hits=(1, 2, 3, 4, 5, 6), recall_slots=8),
        dataclasses.replace(response("p2"), recall_hits=(1, 1, 1, 1, 1, 1), recall_slots=2),
        dataclasses.replace(response("p3"), recall_hits=(), recall_slots=0),
    ]
    recall = small_report(parts)["overall"]["recall"]
    assert recall["slots"] == 10
    assert [at["k"] for at in recall["at"]] == [1, 2, 4, 8, 16, 64]
    assert [at["share"] for at in recall["at"]] == [0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


def test_rejection_sampling_is_a_ratio_of_sums_and_null_unless_all_responses_have_it() -> None:
    expected = [Expected(4.0, 2.0), Expected(1.5, 2.25), Expected(0.0, 0.0)]
    parts = [dataclasses.replace(response(f"p{n}"), rejection=one) for n, one in enumerate(expected)]
    rejection = small_report(parts)["overall"]["rejection"]
    assert (rejection["rounds"], rejection["accepted"]) == (5.5, 4.25)
    assert rejection["acceptance_length"] == 1 + 4.25 / 5.5
    low, high = rejection["interval"]
    assert 1 <= low < rejection["acceptance_length"] < high
    assert small_report([*parts, response("p9")])["overall"]["rejection"] is None
    assert small_report(parts[2:])["overall"]["rejection"]["acceptance_length"] is None


def test_one_response_has_no_interval_and_says_so() -> None:
    report = small_report([response("p")])
    assert set(report["overall"]["interval"].values()) == {None}
    assert any("One conversation" in note for note in report["notes"])


def test_notes_say_what_spoils_the_numbers() -> None:
    assert small_report([dataclasses.replace(r, truncated=False) for r in some_responses()])["notes"] == []
    cut = [dataclasses.replace(r, truncated=True) for r in some_responses()]
    assert any("Every response was cut" in note for note in small_report(cut)["notes"])
    most = [dataclasses.replace(r, truncated=n > 2) for n, r in enumerate(some_responses(12))]
    assert any("75% of the responses were cut" in note for note in small_report(most)["notes"])
    others = [dataclasses.replace(r, num_on_policy=r.num_tokens // 2) for r in some_responses()]
    assert any("50.00% of the tokens" in note for note in small_report(others)["notes"])
    assert small_report(others, conditions={"temperature": 0.7})["notes"] == []  # it draws others, too
    empty = [response("p1", num_tokens=1), response("p2", num_tokens=1)]
    assert any("there was no round" in note for note in small_report(empty)["notes"])


def test_the_measured_speedup_is_of_seconds_per_token() -> None:
    timing = {
        "plain": {"tokens": 10, "passes": 9, "seconds": {"verify": 5.0}},
        "chain": {"tokens": 20, "passes": 5, "seconds": {"draft": 1.0, "verify": 3.0}},
    }
    live = LIVE | {"timing": timing}
    assert small_report(some_responses(), live=live)["live"]["speedup"] == {"chain": 0.5 / 0.2}
    assert small_report(some_responses())["live"]["speedup"] is None


def test_no_responses_are_refused() -> None:
    with pytest.raises(ValueError, match="no response to report on; give prompts"):
        small_report([])


def paths(value: Any, names: dict[str, str], at: str = "") -> set[str]:
    """Every field of the record as docs/report.md writes it: overall.rounds.<method>."""
    if isinstance(value, list):
        found = {path for item in value for path in paths(item, names, f"{at}[]")}
        return found or {at}
    if not isinstance(value, dict):
        return {at}
    return {
        path for key, item in value.items() for path in paths(item, names, f"{at}.{names.get(key, key)}".lstrip("."))
    }


def fields(report: dict[str, Any]) -> set[str]:
    """Of a record, as docs/report.md writes them."""
    names = dict.fromkeys(["plain", *report["methods"]], "<method>")
    names |= dict.fromkeys(report["sets"], "<set>")
    names |= {category: "<category>" for numbers in report["sets"].values() for category in numbers["categories"]}
    return {
        re.sub(r"^(sets\.<set>\.categories\.<category>|sets\.<set>|overall)\.", "<numbers>.", path)
        for path in paths(json.loads(json.dumps(report)), names)
    }


def documented_fields() -> set[str]:
    text = DOCS.read_text().partition("## report.json")[2].partition("## responses.parquet")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))


def test_the_documentation_has_every_field_of_the_record_and_no_other() -> None:
    drawn = {"truncated": True, "rejection": Expected(20.0, 30.0)}
    report = full_report([dataclasses.replace(r, **drawn) for r in some_responses()])  # type: ignore[arg-type]
    assert documented_fields() == fields(report)
    assert report["num_slots"] == NUM_SLOTS


def test_other_fields_have_another_schema_version() -> None:
    digest = hashlib.sha256("\n".join(sorted(documented_fields())).encode()).hexdigest()[:8]
    assert (SCHEMA_VERSION, digest) == (3, "7da688c6"), "raise SCHEMA_VERSION, then write the new pair here"
    assert f"`schema_version` is {SCHEMA_VERSION}" in DOCS.read_text()
