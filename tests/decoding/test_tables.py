"""Tables and markdown: rounding, names of rows, and a definition below each."""

import dataclasses

from evaluated_small import full_report, response, small_report, some_responses
from test_report import by_hand

from dflash.decoding.tables import headline, markdown, records, tables, terminal_rows


def test_the_terminal_table_has_a_row_per_category_and_one_for_all() -> None:
    report = small_report(by_hand(), num_slots=3)
    header, rows = terminal_rows(report)
    assert header == ["category", "chain", "tree 4", "rounds (chain)", "tokens"]
    assert rows == [
        ["a|b", "not measured", "not measured", "0", "1"],
        ["maths", "1.75", "2.67", "4", "8"],
        ["all", "1.75", "2.67", "4", "9"],
    ]
    assert records(report)[1] == dict(zip(header, rows[1], strict=True))


def test_a_single_category_is_everything() -> None:
    rows = terminal_rows(small_report(by_hand()[:2], num_slots=3))[1]
    assert rows == [["maths", "1.75", "2.67", "4", "8"]]


def test_categories_of_several_sets_are_told_apart_and_sets_have_sums() -> None:
    responses = [
        response("p1", set_name="a"),
        response("p2", set_name="b"),
        response("p3", set_name="b", category="qa"),
    ]
    names = [row[0] for row in terminal_rows(small_report(responses))[1]]
    assert names == ["a: maths", "b: maths", "b: qa", "b", "all"]


def test_the_markdown_says_not_measured_and_defines_each_table() -> None:
    text = markdown(small_report(by_hand(), num_slots=3))
    assert "| a\\|b | not measured | not measured | 0 | 1 |" in text
    assert "| 3 | not measured | 0.0% | 0 |" in text
    assert "no prompt was decoded live" in text
    for section in text.split("\n## ")[1:]:
        assert len(section.strip().splitlines()[-1]) > 30, "a definition follows the table"


def test_lengths_stand_with_their_intervals() -> None:
    report = small_report(some_responses())
    low, high = report["overall"]["interval"]["chain"]
    expected = f"{report['acceptance_length']['chain']:.2f} ({low:.2f} to {high:.2f})"
    first = tables(report)[0]
    assert first.rows[-1][:2] == ["all", expected]
    assert headline(report)[0] == ("acceptance length, chain", expected)


def test_every_section_with_data_has_a_table() -> None:
    titles = [table.title for table in tables(full_report(some_responses()))]
    assert titles == [
        "Acceptance length", "Responses", "Mean over responses", "Rounds", "Conditional acceptance by slot",
        "Rounds by accepted tokens", "Recall", "Calibration", "Expected speedup", "Expected speedup by slots used",
        "Live decoding", "Measured speedup",
    ]  # fmt: skip
    assert [table.title for table in tables(small_report(by_hand(), num_slots=3))] == titles[:6]
    for table in tables(full_report(some_responses())):
        assert {len(row) for row in table.rows} == {len(table.header)}, table.title


def test_live_runs_and_speedups_are_listed() -> None:
    report = full_report(some_responses())
    text = markdown(report)
    assert "| p1 | maths | tree 64 | 60 | 20 | yes | no |" in text
    assert headline(report)[-1] == ("speedup, measured, tree 64", "2.00x")
    assert "| tree 64 | 2.00x | 11.8 | 0.50 s | 0.25 s | 4.00 s | 0.25 s | 66.1% |" in text
    assert "| plain | 1.00x | 5.9 | 0.00 s | 0.00 s | 10.00 s | 0.00 s | 0.0% |" in text
    report["live"]["speedup"] = None
    best = report["adviser"]["best"]
    assert headline(report)[-1] == (f"speedup, predicted, tree {best['method'][4:]}", f"{best['speedup']:.2f}x")
    assert "| tree 512 |" in text
    assert headline(report | {"adviser": None})[-1] == ("speedup", "not measured")


def test_text_of_worst_cases_cannot_break_the_markdown() -> None:
    report = full_report(some_responses())
    report["worst"] = [report["worst"][0] | {"text": "a|b\n```\n# c", "id": "x\n|y<b>*z"}]
    line = next(line for line in markdown(report).splitlines() if line.startswith("* x"))
    assert line.startswith(r"* x \|y\<b>\*z (")
    assert line.endswith("`a|b ''' # c`")
    report["worst"][0]["text"] = "\n\n"
    assert "from token 1: ` `" in markdown(report).replace(f"{report['worst'][0]['start']}: `", "1: `")


def test_names_are_shown_as_they_are() -> None:
    report = full_report([dataclasses.replace(one, category="_a_b_ ~c~ &lt;") for one in some_responses(4)])
    report["verifier"]["name"] = "~/my_models/*new*"
    report["notes"] = ["thinking: <none> in training"]
    text = markdown(report)
    assert r"| \_a_b\_ \~c\~ \&lt; |" in text
    assert r"Verifier \~/my_models/\*new\* (" in text
    assert r"> thinking: \<none> in training" in text


def test_a_drafter_that_is_never_right_has_the_length_one() -> None:
    nothing = dataclasses.replace(response("p"), accepted={"chain": (0,) * 59}, expected={})
    report = small_report([nothing])
    assert headline(report)[0] == ("acceptance length, chain", "1.00")
