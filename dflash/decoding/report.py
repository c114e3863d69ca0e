"""The report of an evaluation: sums and counts to a JSON record, and that record to tables. Knows no model, no store.

Numbers are kept as they are and rounded only where a table is printed. Without data they are null: "not measured".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash.decoding.acceptance import CHAIN, Acceptance, method_name

ALL = "all"
NOT_MEASURED = "not measured"

Totals = Mapping[str, Acceptance]
"""The acceptance of each method over one set of responses."""


def summarise(categories: Mapping[str, Totals], *, budgets: Sequence[int], num_slots: int) -> dict[str, Any]:
    """The numbers of report.json: per category and overall, by method (chain, tree16, …), slot and accepted count."""
    methods = [CHAIN, *map(method_name, budgets)]
    overall = {method: sum((totals[method] for totals in categories.values()), Acceptance()) for method in methods}
    return {
        "budgets": list(budgets),
        "num_slots": num_slots,
        "acceptance_length": {method: total.acceptance_length for method, total in overall.items()},
        "categories": {name: _numbers(totals) for name, totals in sorted(categories.items())},
        "overall": _numbers(overall),
        "histogram": {method: list(total.histogram) for method, total in overall.items()},
        "conditional_acceptance": {
            method: [
                {"slot": slot, "accepted": accepted, "measured": measured, "share": share}
                for slot, accepted, measured, share in zip(
                    range(1, num_slots + 1),
                    total.slot_accepted,
                    total.measured,
                    total.conditional_acceptance,
                    strict=True,
                )
            ]
            for method, total in overall.items()
        },
    }


def _numbers(totals: Totals) -> dict[str, Any]:
    return {
        "responses": totals[CHAIN].responses,
        "tokens": totals[CHAIN].tokens,
        "rounds": {method: total.rounds for method, total in totals.items()},
        "accepted": {method: total.accepted for method, total in totals.items()},
        "acceptance_length": {method: total.acceptance_length for method, total in totals.items()},
        "per_response_mean": {method: total.per_response_mean for method, total in totals.items()},
    }


def _heading(method: str) -> str:
    return method if method == CHAIN else f"tree {method.removeprefix('tree')}"


def _length(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1%}"


def _same(value: bool | None) -> str:
    return NOT_MEASURED if value is None else "yes" if value else "no"


def _sets(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The categories, then everything; a single category is everything."""
    categories = list(report["categories"].items())
    return categories if len(categories) == 1 else [*categories, (ALL, report["overall"])]


def terminal_rows(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the short table: acceptance length per category, with the rounds and tokens behind it."""
    methods = list(report["acceptance_length"])
    header = ["category", *map(_heading, methods), "rounds (chain)", "tokens"]
    rows = [
        [
            name,
            *(_length(numbers["acceptance_length"][method]) for method in methods),
            f"{numbers['rounds'][CHAIN]:,}",
            f"{numbers['tokens']:,}",
        ]
        for name, numbers in _sets(report)
    ]
    return header, rows


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], definition: str) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|---|" + "--:|" * (len(header) - 1)
    return "\n".join([f"## {title}", "", line(header), rule, *map(line, rows), "", definition])


def markdown(report: dict[str, Any]) -> str:
    """report.md: the tables, each with the definition of its numbers below it."""
    methods = list(report["acceptance_length"])
    headings = list(map(_heading, methods))
    overall, verifier = report["overall"], report["verifier"]
    header, rows = terminal_rows(report)
    sections = [
        f"# Acceptance of {report['drafter']}",
        f"Verifier {verifier['name']} ({verifier['identity']}, {verifier['dtype']}), block size "
        f"{report['num_slots'] + 1}. {overall['responses']:,} responses of {overall['tokens']:,} tokens, "
        f"replayed from {report['hidden_states']}.",
        _table(
            "Acceptance length",
            header,
            rows,
            "1 + accepted / rounds, over all rounds of the category. A round is one draft and one verification; the 1 "
            "is the token that the verifier adds of its own. Accepted tokens beyond the end of a response never count. "
            "The chain is the drafter's best token of each slot; tree N is its N most probable prefixes.",
        ),
        _table(
            "Mean over responses",
            ["category", *headings, "responses"],
            [
                [
                    name,
                    *(_length(numbers["per_response_mean"][method]) for method in methods),
                    f"{numbers['responses']:,}",
                ]
                for name, numbers in _sets(report)
            ],
            "The mean of each response's own acceptance length, as papers print it: every response weighs the same, "
            "however long. Responses without a round (of one token) are left out.",
        ),
        _table(
            "Rounds",
            ["category", *headings, "tokens"],
            [
                [name, *(f"{numbers['rounds'][method]:,}" for method in methods), f"{numbers['tokens']:,}"]
                for name, numbers in _sets(report)
            ],
            "Passes of the verifier that the responses take, beside the one that reads the prompt and gives the first "
            "token. Decoding without a draft takes one for each token after the first.",
        ),
        _table(
            "Conditional acceptance by slot",
            ["slot", *headings, "measured (chain)"],
            [
                [
                    str(slot + 1),
                    *(_share(report["conditional_acceptance"][method][slot]["share"]) for method in methods),
                    f"{report['conditional_acceptance'][CHAIN][slot]['measured']:,}",
                ]
                for slot in range(report["num_slots"])
            ],
            "How often a slot was accepted in the rounds that had accepted all slots before it. Slots beyond the end "
            "of a response do not count; a slot that no round reached is not measured. A tree has at most as many "
            "levels as nodes, so a small one never accepts late slots.",
        ),
        _table(
            "Rounds by accepted tokens",
            ["accepted", *headings],
            [
                [str(count), *(f"{report['histogram'][method][count]:,}" for method in methods)]
                for count in range(report["num_slots"] + 1)
            ],
            "How many rounds accepted so many drafted tokens.",
        ),
        _live(report["live"]),
    ]
    return "\n\n".join(sections) + "\n"


def _live(live: dict[str, Any]) -> str:
    if not live["prompts"]:
        return f"## Live decoding\n\n{NOT_MEASURED}: no prompt was decoded live."
    return _table(
        "Live decoding",
        ["prompt", "category", "method", "tokens", "rounds", "same text", "same rounds"],
        [
            [
                run["id"],
                run["category"],
                _heading(run["method"]),
                f"{run['tokens']:,}",
                f"{run['rounds']:,}",
                _same(run["text_equal"]),
                _same(run["rounds_equal"]),
            ]
            for run in live["runs"]
        ],
        f"{live['prompts']} of the prompts, decoded again by verifier and drafter together. Same text: token for token "
        "the stored response, which the verifier gave alone. Same rounds: as many rounds as in replay, each accepting "
        "as many tokens. Both are expected in float32; in lower precision near-ties may fall otherwise.",
    )
