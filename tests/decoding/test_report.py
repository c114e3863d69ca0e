"""The report's numbers and tables."""

from typing import Any

from dflash.decoding.acceptance import Acceptance
from dflash.decoding.report import markdown, summarise, terminal_rows


def response(accepted: list[int], num_tokens: int) -> Acceptance:
    return Acceptance.of_response(accepted, num_tokens=num_tokens, num_slots=3)


def report() -> dict[str, Any]:
    nothing = {method: response([], 1) for method in ("chain", "tree4")}
    maths = {
        "chain": response([0, 1, 2], 6) + response([0], 2),
        "tree4": response([2, 2], 6) + response([1], 2),
    }
    numbers = summarise({"maths": maths, "a|b": nothing}, budgets=[4], num_slots=3)
    return numbers | {
        "drafter": "training-1",
        "hidden_states": "extraction-1",
        "verifier": {"name": "tiny", "identity": "abc", "dtype": "float32"},
        "live": {"prompts": 0, "text_equal": None, "rounds_equal": None, "runs": []},
    }


def test_totals_are_of_rounds_and_means_of_responses() -> None:
    numbers = report()
    assert numbers["acceptance_length"] == {"chain": 1 + 3 / 4, "tree4": 1 + 5 / 3}
    assert numbers["overall"]["per_response_mean"] == {"chain": (2 + 1) / 2, "tree4": (3 + 2) / 2}
    assert numbers["overall"]["rounds"] == {"chain": 4, "tree4": 3}
    assert (numbers["overall"]["responses"], numbers["overall"]["tokens"]) == (3, 9)
    assert numbers["categories"]["a|b"]["acceptance_length"] == {"chain": None, "tree4": None}
    assert numbers["histogram"]["chain"] == [2, 1, 1, 0]
    assert numbers["conditional_acceptance"]["chain"] == [
        {"slot": 1, "accepted": 2, "measured": 4, "share": 0.5},
        {"slot": 2, "accepted": 1, "measured": 2, "share": 0.5},
        {"slot": 3, "accepted": 0, "measured": 0, "share": None},
    ]


def test_the_terminal_table_has_a_row_per_category_and_one_for_all() -> None:
    header, rows = terminal_rows(report())
    assert header == ["category", "chain", "tree 4", "rounds (chain)", "tokens"]
    assert rows == [
        ["a|b", "not measured", "not measured", "0", "1"],
        ["maths", "1.75", "2.67", "4", "8"],
        ["all", "1.75", "2.67", "4", "9"],
    ]


def test_a_single_category_is_everything() -> None:
    one = {method: response([1], 3) for method in ("chain", "tree4")}
    assert terminal_rows(summarise({"maths": one}, budgets=[4], num_slots=3))[1] == [
        ["maths", "2.00", "2.00", "1", "3"]
    ]


def test_the_markdown_says_not_measured_and_defines_each_table() -> None:
    text = markdown(report())
    assert "| maths | 1.75 | 2.67 | 4 | 8 |" in text
    assert "| a\\|b | not measured | not measured | 0 | 1 |" in text
    assert "| 3 | not measured | 0.0% | 0 |" in text
    assert "no prompt was decoded live" in text
    for section in text.split("\n## ")[1:]:
        assert len(section.strip().splitlines()[-1]) > 30, "a definition follows the table"


def test_live_runs_are_listed() -> None:
    run = {"id": "p1", "category": "maths", "method": "tree4", "tokens": 7, "rounds": 2, "accepted": 4}
    runs = [run | {"text_equal": True, "rounds_equal": False}]
    text = markdown(report() | {"live": {"prompts": 1, "text_equal": True, "rounds_equal": False, "runs": runs}})
    assert "| p1 | maths | tree 4 | 7 | 2 | yes | no |" in text
