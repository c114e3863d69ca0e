"""The adviser: acceptance and costs to speedups."""

import pytest
from evaluated_small import BUDGETS, COSTS, NUM_SLOTS, response, some_responses

from dflash.decoding.acceptance import CHAIN
from dflash.decoding.adviser import Costs, advise
from dflash.decoding.responses import Response

FREE = Costs(draft_seconds=0, verify=((0, 1.0), (512, 1.0)), source="given")


def test_the_speedup_is_plain_time_over_time_of_rounds() -> None:
    # 9 tokens after the first in 4 rounds: 9 plain passes against 4 times a draft and a pass over 7 nodes
    one = Response(
        id="p", set="s", category="c", content="x", num_tokens=10, truncated=False, accepted={CHAIN: (2, 0, 3, 1)}
    )
    costs = Costs(draft_seconds=0.5, verify=((0, 2.0), (14, 4.0)), source="measured")
    advice = advise([one], num_slots=7, costs=costs)
    (chain,) = advice["methods"]
    assert chain == {
        "method": "chain",
        "nodes": 7,
        "acceptance_length": 1 + 6 / 4,
        "seconds_per_round": 3.5,
        "speedup": 9 * 2.0 / (4 * 3.5),
    }
    assert advice["best"] == {"method": "chain", "speedup": 18 / 14}


def test_where_everything_is_free_the_largest_tree_is_best_and_where_nodes_cost_it_is_not() -> None:
    responses = some_responses()
    free = advise(responses, num_slots=NUM_SLOTS, costs=FREE)
    assert free["best"]["method"] == f"tree{max(BUDGETS)}"
    costly = Costs(draft_seconds=0, verify=((0, 1.0), (10, 1.0), (64, 20.0), (512, 200.0)), source="given")
    assert advise(responses, num_slots=NUM_SLOTS, costs=costly)["best"]["method"] == "tree8"


def test_where_nothing_pays_plain_decoding_is_best() -> None:
    slow = Costs(draft_seconds=100, verify=((0, 1.0), (512, 1.0)), source="given")
    assert advise(some_responses(), num_slots=NUM_SLOTS, costs=slow)["best"] == {"method": "plain", "speedup": 1.0}


def test_costs_beyond_the_curve_are_not_guessed() -> None:
    by_method = {row["method"]: row for row in advise(some_responses(), num_slots=NUM_SLOTS, costs=COSTS)["methods"]}
    assert by_method["tree512"]["speedup"] is None
    assert by_method["tree512"]["acceptance_length"] > by_method["tree64"]["acceptance_length"]
    assert by_method["tree64"]["speedup"] > 1


def test_all_slots_used_are_the_chain() -> None:
    advice = advise(some_responses(), num_slots=NUM_SLOTS, costs=FREE)
    chain, last = advice["methods"][0], advice["slots"][-1]
    assert {name: last[name] for name in last if name != "slots"} == {n: chain[n] for n in chain if n != "method"}
    assert advice["best_slots"]["speedup"] == max(row["speedup"] for row in advice["slots"])


def test_fewer_slots_are_walked_anew() -> None:
    # the chain: 0 -> 4 -> 5 -> 6, and with 2 slots: 0 -> 3 -> 6, which is a round less
    chain_at = (3, 9, 9, 2, 0, 0)
    one = Response(
        id="p", set="s", category="c", content="x", num_tokens=7, truncated=False,
        accepted={CHAIN: (3, 0, 0)}, chain_at=chain_at,
    )  # fmt: skip
    rows = advise([one], num_slots=3, costs=FREE)["slots"]
    assert [row["acceptance_length"] for row in rows] == [1 + 2 / 4, 1 + 4 / 2, 1 + 3 / 3]
    assert [row["speedup"] for row in rows] == [6 / 4, 6 / 2, 6 / 3]
    assert [row["nodes"] for row in rows] == [1, 2, 3]


def test_without_counts_at_every_token_there_is_no_advice_on_slots() -> None:
    bare = Response(id="p", set="s", category="c", content="x", num_tokens=3, truncated=False, accepted={CHAIN: (1,)})
    advice = advise([bare], num_slots=NUM_SLOTS, costs=FREE)
    assert (advice["slots"], advice["best_slots"]) == ([], None)


def test_a_response_of_one_token_has_no_speedup() -> None:
    advice = advise([response("p", num_tokens=1)], num_slots=NUM_SLOTS, costs=FREE)
    assert [row["speedup"] for row in advice["methods"]] == [None] * 4
    assert advice["best"]["method"] == "plain"


@pytest.mark.parametrize("verify", [(), ((1, 1.0),), ((0, 1.0), (8, 1.0), (4, 1.0)), ((0, 1.0), (8, 0.0))])
def test_a_curve_that_is_none_is_refused(verify: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="costs"):
        Costs(draft_seconds=0, verify=verify, source="given")
