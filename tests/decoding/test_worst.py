"""Worst cases: which responses, and where in them."""

from evaluated_small import text

from dflash.decoding.acceptance import CHAIN, walk_rounds
from dflash.decoding.responses import Response
from dflash.decoding.worst import ROUNDS, worst_cases


def response(name: str, accepted_at: list[int]) -> Response:
    n = len(accepted_at) + 1
    rounds = tuple(walk_rounds(accepted_at, num_tokens=n))
    return Response(
        id=name, set="s", category="c", content="x", num_tokens=n, truncated=False, accepted={CHAIN: rounds}
    )


def cases(*responses: Response, num_cases: int = 5) -> list[dict[str, object]]:
    return worst_cases(
        responses,
        method=CHAIN,
        num_slots=9,
        prompt=lambda r: f"prompt of {r.id}",
        text=text,
        num_cases=num_cases,
    )


def test_the_lowest_acceptance_length_comes_first() -> None:
    good, bad, middling = (response(name, [count] * 60) for name, count in (("good", 3), ("bad", 0), ("middling", 1)))
    assert [case["id"] for case in cases(good, bad, middling)] == ["bad", "middling", "good"]
    assert [case["id"] for case in cases(good, bad, middling, num_cases=1)] == ["bad"]


def test_the_place_is_the_run_of_rounds_that_accepted_least() -> None:
    # 10 rounds of 3 accepted tokens, 8 of none, 10 of 3: the drafts die between tokens 40 and 48
    (case,) = cases(response("p", [3] * 40 + [0] * ROUNDS + [3] * 40))
    assert (case["start"], case["end"]) == (41, 49)
    assert (case["rounds_there"], case["accepted_there"], case["rounds"]) == (ROUNDS, 0, 28)
    assert case["prompt"] == "prompt of p"
    assert case["text"] == "".join(f"p[{at}] " for at in range(41, 49))
    assert str(case["before"]).endswith("p[39] p[40] ")
    assert case["missed"] == [f"p[{at}] " for at in range(41, 49)]


def test_missed_tokens_follow_the_accepted_ones_and_none_is_beyond_the_end() -> None:
    (case,) = cases(response("p", [1, 9, 2, 9, 9, 9, 9]))  # 0 -> 2 -> 5 -> 7: accepted 1, 2, 2, the last up to the end
    assert (case["rounds"], case["accepted_there"]) == (3, 5)
    assert case["missed"] == ["p[2] ", "p[5] "]
    assert case["text"] == "".join(f"p[{at}] " for at in range(1, 8))


def test_a_token_that_no_slot_was_for_is_not_missed() -> None:
    (case,) = cases(response("p", [9] * 10 + [2] * 20))  # 0 -> 10 -> 13 ...: the first round accepted all of its slots
    assert case["rounds"] == 8
    assert case["missed"] == [f"p[{at}] " for at in range(13, 31, 3)]


def test_short_responses_are_left_out_unless_all_are_short() -> None:
    short, long = response("short", [0] * 3), response("long", [1] * 60)
    assert [case["id"] for case in cases(short, long)] == ["long"]
    assert [case["id"] for case in cases(short)] == ["short"]
    assert cases(response("empty", [])) == []
    assert cases() == []
