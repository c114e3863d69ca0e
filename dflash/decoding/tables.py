"""A report's record to tables, for the terminal, for a UI and as markdown. Numbers are rounded here, nowhere else."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dflash.decoding.acceptance import CHAIN
from dflash.decoding.adviser import PLAIN
from dflash.decoding.responses import RECALL_AT

ALL = "all"
NOT_MEASURED = "not measured"
WORST = (
    "The responses of the lowest acceptance length, each with the run of rounds in it that accepted least, and the "
    "tokens there that the drafter did not foresee."
)


class Table(NamedTuple):
    """A table of texts with the definition of its numbers. The first column names the row."""

    title: str
    header: list[str]
    rows: list[list[str]]
    definition: str


def heading(method: str) -> str:
    """A method as people read it: tree 16."""
    return f"tree {method.removeprefix('tree')}" if method.startswith("tree") else method


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1%}"


def _factor(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}x"


def _milliseconds(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{1000 * value:,.2f} ms"


def _same(value: bool | None) -> str:
    return NOT_MEASURED if value is None else "yes" if value else "no"


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    return _number(value) + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def category_name(report: Mapping[str, Any], set_name: str, category: str) -> str:
    """A category as the tables call it: with its set, where there are several."""
    return category if len(report["sets"]) == 1 else f"{set_name}: {category}"


def groups(report: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and numbers of the categories, of each set where there are several, and of everything, each once."""
    sets = report["sets"]
    found = []
    for name, numbers in sets.items():
        found += [(category_name(report, name, c), part) for c, part in numbers["categories"].items()]
        if len(sets) > 1 and len(numbers["categories"]) > 1:
            found.append((name, numbers))
    return found if len(found) == 1 else [*found, (ALL, report["overall"])]


def terminal_rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the short table: acceptance length per category, with the rounds and tokens behind it."""
    methods = report["methods"]
    header = ["category", *map(heading, methods), "rounds (chain)", "tokens"]
    rows = [
        [
            name,
            *(_number(numbers["acceptance_length"][method]) for method in methods),
            f"{numbers['rounds'][CHAIN]:,}",
            f"{numbers['tokens']:,}",
        ]
        for name, numbers in groups(report)
    ]
    return header, rows


def records(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """The short table as a list of rows by column name, as table artifacts of a UI take it."""
    header, rows = terminal_rows(report)
    return [dict(zip(header, row, strict=True)) for row in rows]


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Every table of the report for which there is data, in reading order."""
    methods, overall = report["methods"], report["overall"]
    headings = [heading(method) for method in methods]
    found = [
        Table(
            "Acceptance length",
            ["category", *headings, "rounds (chain)", "tokens"],
            [
                [
                    name,
                    *(_with_interval(numbers["acceptance_length"][m], numbers["interval"][m]) for m in methods),
                    f"{numbers['rounds'][CHAIN]:,}",
                    f"{numbers['tokens']:,}",
                ]
                for name, numbers in groups(report)
            ],
            "1 + accepted / rounds, over all rounds of the category. A round is one draft and one verification; the 1 "
            "is the token that the verifier adds of its own. Accepted tokens beyond the end of a response never count. "
            "The chain is the drafter's best token of each slot; tree N is its N most probable prefixes. In brackets "
            "the 95 % interval of a bootstrap over conversations; with a single one there is none.",
        ),
        Table(
            "Responses",
            ["category", "responses", "conversations", "tokens", "cut at the limit", "on policy"],
            [
                [
                    name,
                    f"{numbers['responses']:,}",
                    f"{numbers['conversations']:,}",
                    f"{numbers['tokens']:,}",
                    _share(numbers["truncated_share"]),
                    _share(numbers["on_policy_share"]),
                ]
                for name, numbers in groups(report)
            ],
            "A conversation has a response for each turn asked. Cut at the limit: responses that ended because of the "
            "longest length allowed. On policy: tokens that are the verifier's own greedy choice after the "
            "tokens before them.",
        ),
        Table(
            "Mean over responses",
            ["category", *headings, "responses"],
            [
                [
                    name,
                    *(_number(numbers["per_response_mean"][method]) for method in methods),
                    f"{numbers['responses']:,}",
                ]
                for name, numbers in groups(report)
            ],
            "The mean of each response's own acceptance length, as papers print it: every response weighs the same, "
            "however long. Responses without a round (of one token) are left out.",
        ),
        Table(
            "Rounds",
            ["category", *headings, "tokens"],
            [
                [name, *(f"{numbers['rounds'][method]:,}" for method in methods), f"{numbers['tokens']:,}"]
                for name, numbers in groups(report)
            ],
            "Passes of the verifier that the responses take, beside the one that reads the prompt and gives the first "
            "token. Decoding without a draft takes one for each token after the first.",
        ),
        Table(
            "Conditional acceptance by slot",
            ["slot", *headings, "measured (chain)"],
            [
                [
                    str(slot + 1),
                    *(_share(overall["conditional_acceptance"][method][slot]["share"]) for method in methods),
                    f"{overall['conditional_acceptance'][CHAIN][slot]['measured']:,}",
                ]
                for slot in range(report["num_slots"])
            ],
            "How often a slot was accepted in the rounds that had accepted all slots before it. Slots beyond the end "
            "of a response do not count; a slot that no round reached is not measured. A tree has at most as many "
            "levels as nodes, so a small one never accepts late slots.",
        ),
        Table(
            "Rounds by accepted tokens",
            ["accepted", *headings],
            [
                [str(count), *(f"{overall['histogram'][method][count]:,}" for method in methods)]
                for count in range(report["num_slots"] + 1)
            ],
            "How many rounds accepted so many drafted tokens.",
        ),
    ]
    if overall["recall"]:
        found.append(
            Table(
                "Recall",
                ["category", *(f"top {k}" for k in RECALL_AT), "slots"],
                [
                    [name, *(_share(at["share"]) for at in numbers["recall"]["at"]), f"{numbers['recall']['slots']:,}"]
                    for name, numbers in groups(report)
                    if numbers["recall"]
                ],
                "How often the token of the response is among the drafter's K most probable of its slot, over all "
                "slots of all blocks, whatever was accepted before them.",
            )
        )
    if overall["rejection"]:
        found.append(
            Table(
                "Rejection sampling",
                ["category", "acceptance length", "rounds"],
                [
                    [
                        name,
                        _with_interval(numbers["rejection"]["acceptance_length"], numbers["rejection"]["interval"]),
                        f"{numbers['rejection']['rounds']:,.1f}",
                    ]
                    for name, numbers in groups(report)
                ],
                "What an engine that draws its drafts and keeps or replaces them (speculative sampling) takes for the "
                "same responses, in the mean over its random numbers. The tables above are of sample and match: the "
                "most likely drafts, kept where the verifier draws the same tokens.",
            )
        )
    if any(overall["calibration"].values()):
        found.append(
            Table(
                "Calibration",
                ["method", "expected", "realised", "rounds"],
                [
                    [heading(method), _number(part["expected"]), _number(part["realised"]), f"{part['rounds']:,}"]
                    for method, part in overall["calibration"].items()
                    if part
                ],
                "Accepted tokens per round: as the drafter expects them (the sum of the probabilities of its nodes) "
                "and as they came, over the rounds whose slots all lie within the response. A drafter that expects "
                "more than it gets is overconfident, and its trees grow in the wrong places.",
            )
        )
    return [*found, *_advice(report["adviser"]), *_live(report["live"])]


def _advice(adviser: Mapping[str, Any] | None) -> list[Table]:
    if not adviser:
        return []

    def cells(row: Mapping[str, Any]) -> list[str]:
        length, seconds = _number(row["acceptance_length"]), _milliseconds(row["seconds_per_round"])
        return [length, seconds, _factor(row["speedup"])]

    best = adviser["best"]
    advice = (
        "No method is faster than plain decoding."
        if best["method"] == PLAIN
        else f"Best: {heading(best['method'])}, {_factor(best['speedup'])}."
    )
    found = [
        Table(
            "Expected speedup",
            ["method", "acceptance length", "a round", "speedup"],
            [[heading(row["method"]), *cells(row)] for row in adviser["methods"]],
            f"{advice} Against plain decoding, from the rounds above and {adviser['source']} costs: "
            f"{_milliseconds(adviser['draft_seconds'])} for a draft, {_milliseconds(adviser['verify'][0][1])} for the "
            "verifier's pass over one token. Costs beyond the largest tree that was timed are not guessed.",
        )
    ]
    if adviser["best_slots"]:
        found.append(
            Table(
                "Expected speedup by slots used",
                ["slots", "acceptance length", "a round", "speedup"],
                [[str(row["slots"]), *cells(row)] for row in adviser["slots"]],
                f"Best: {adviser['best_slots']['slots']} slots, {_factor(adviser['best_slots']['speedup'])}. The "
                "chain, of which only so many slots are verified; the draft costs the same. A drafter of a smaller "
                "block would be another drafter.",
            )
        )
    return found


def _live(live: Mapping[str, Any]) -> list[Table]:
    if not live["prompts"]:
        return []
    found = [
        Table(
            "Live decoding",
            ["prompt", "category", "method", "tokens", "rounds", "same text", "same rounds"],
            [
                [
                    run["id"],
                    run["category"],
                    heading(run["method"]),
                    f"{run['tokens']:,}",
                    f"{run['rounds']:,}",
                    "near-tie" if run["near_tie"] else _same(run["text_equal"]),
                    _same(run["rounds_equal"]),
                ]
                for run in live["runs"]
            ],
            f"{live['prompts']} of the prompts, decoded again by verifier and drafter together. Same text: token for "
            "token the stored response, which the verifier gave alone; near-tie: another text, from a token on that "
            "the verifier likes as well as the stored one, up to rounding. Same rounds: where the text is the same, as "
            "many as in replay, each accepting as many tokens. Both are expected in float32, near-ties excepted; in "
            "lower precision there are more of them.",
        )
    ]
    if live["speedup"]:
        parts = list(live["timing"][PLAIN]["seconds"])
        found.append(
            Table(
                "Measured speedup",
                ["method", "speedup", "tokens/s", *parts, "passes saved"],
                [
                    [
                        heading(method),
                        _factor(live["speedup"].get(method, 1.0)),
                        f"{(timed['tokens'] - live['prompts']) / sum(timed['seconds'].values()):,.1f}",
                        *(f"{timed['seconds'][part]:,.2f} s" for part in parts),
                        _share(1 - timed["passes"] / live["timing"][PLAIN]["passes"]),
                    ]
                    for method, timed in live["timing"].items()
                ],
                "Wall time per token of plain decoding over that of each method, by the same verifier in the same run, "
                "and where the time went, without the pass over the prompt and the token that it gives. Passes saved: "
                "of the verifier, against plain decoding.",
            )
        )
    return found


def title(report: Mapping[str, Any]) -> str:
    return f"Acceptance of {report['drafter']}"


def introduction(report: Mapping[str, Any]) -> str:
    """What was measured, in two sentences."""
    overall, verifier = report["overall"], report["verifier"]
    return (
        f"Verifier {verifier['name']} ({verifier['identity']}, {verifier['dtype']}), block size "
        f"{report['num_slots'] + 1}. {overall['responses']:,} responses of {overall['tokens']:,} tokens, "
        f"replayed from {', '.join(report['hidden_states'].values())}."
    )


def best_tree(report: Mapping[str, Any]) -> str | None:
    """The tree of the greatest acceptance length, the smallest of equals; None where none was measured."""
    lengths = report["acceptance_length"]
    trees = [method for method in report["methods"] if method != CHAIN and lengths[method] is not None]
    return max(trees, key=lengths.__getitem__, default=None)


def headline(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The three numbers that a reader came for: of the chain, of the best tree, and the speedup."""
    overall, best = report["overall"], best_tree(report)
    found = [
        (f"acceptance length, {heading(m)}", _with_interval(overall["acceptance_length"][m], overall["interval"][m]))
        for m in (CHAIN, best)
        if m
    ]
    measured, adviser = report["live"]["speedup"], report["adviser"]
    if measured:
        method = max(measured, key=measured.__getitem__)
        return [*found, (f"speedup, measured, {heading(method)}", _factor(measured[method]))]
    if adviser:
        name = heading(adviser["best"]["method"])
        return [*found, (f"speedup, predicted, {name}", _factor(adviser["best"]["speedup"]))]
    return [*found, ("speedup", NOT_MEASURED)]


def escaped(text: str) -> str:
    """Text that a markdown table or list item shows as it is, on one line."""
    return " ".join(re.sub(r"[\\|<*\[`~&]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text).split())


def code(text: str) -> str:
    """Text as a code span, on one line; there a backslash is itself."""
    return "`" + (" ".join(text.replace("`", "'").split()) or " ") + "`"


def markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(escaped, cells)) + " |"

    rule = "|---|" + "--:|" * (len(table.header) - 1)
    return "\n".join([f"## {table.title}", "", line(table.header), rule, *map(line, table.rows), "", table.definition])


def markdown(report: Mapping[str, Any]) -> str:
    """report.md: the tables, each with the definition of its numbers below it."""
    sections = [f"# {escaped(title(report))}", escaped(introduction(report))]
    sections += [f"* {name}: **{value}**" for name, value in headline(report)]
    sections += [f"> {escaped(note)}" for note in report["notes"]]
    sections += map(markdown_table, tables(report))
    if report["worst"]:
        sections += ["## Worst cases", WORST]
        sections += [
            f"* {escaped(case['id'])} ({escaped(case['category'])}), {heading(case['method'])}: "
            f"{_number(case['acceptance_length'])} over {case['rounds']:,} rounds; {case['accepted_there']} accepted "
            f"in the {case['rounds_there']} rounds from token {case['start']:,}: {code(case['text'])}"
            for case in report["worst"]
        ]
    if not report["live"]["prompts"]:
        sections.append(f"## Live decoding\n\n{NOT_MEASURED}: no prompt was decoded live.")
    return "\n\n".join(sections) + "\n"
