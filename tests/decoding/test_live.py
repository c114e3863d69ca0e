"""Live decoding against the verifier alone, and against replay."""

import pytest
from decoding_small import LAYERS, VOCAB, make_drafter, make_ends, make_prompts, make_row, make_verifier, teach

from dflash.decoding.live import Decoded, Method, decode
from dflash.decoding.replay import replay
from dflash.drafter.model import Drafter, Ends
from dflash.verifier import Verifier

METHODS: tuple[Method, ...] = ("plain", "chain", 1, 8, 64, 300)
LONGEST = 24


def answer(
    verifier: Verifier,
    drafter: Drafter,
    ends: Ends,
    prompt: list[int],
    method: Method,
    *,
    longest: int = LONGEST,
    storage_dtype: str = "float32",
) -> Decoded:
    return decode(
        verifier,
        drafter,
        ends,
        prompt,
        layers=LAYERS,
        max_new_tokens=longest,
        method=method,
        storage_dtype=storage_dtype,
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_decoding_with_any_drafter_equals_the_verifier(kind: str, seed: int) -> None:
    verifier = make_verifier(kind, seed=seed)
    drafter, ends = make_drafter(verifier, seed=seed), make_ends(verifier)
    prompts = make_prompts(2, seed=seed)
    for prompt, alone in zip(prompts, verifier.generate(prompts, max_new_tokens=LONGEST), strict=True):
        for method in METHODS:
            assert answer(verifier, drafter, ends, prompt, method).ids == alone.ids


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16", "fp8"])
def test_replay_and_live_decoding_agree_on_every_round(kind: str, storage_dtype: str) -> None:
    verifier = make_verifier(kind, seed=2)
    ends = make_ends(verifier)
    prompts = make_prompts(24, seed=2)
    responses = verifier.generate(prompts, max_new_tokens=LONGEST)
    rows = [
        make_row(verifier, prompt, response.ids, storage_dtype=storage_dtype)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    drafter = make_drafter(verifier)
    teach(drafter, ends, [row for row in rows if len(row.input_ids_T) > 24], steps=120)
    seen: list[int] = []
    for prompt, response, row in list(zip(prompts, responses, rows, strict=True))[:12]:
        rounds = replay(drafter, ends, row, budgets=[1, 8, 64])
        for method, name in (("chain", "chain"), (1, "tree1"), (8, "tree8"), (64, "tree64")):
            live = answer(verifier, drafter, ends, prompt, method, storage_dtype=storage_dtype)
            assert live.ids == response.ids
            assert live.accepted == rounds[name]
            seen += live.accepted
    assert len(seen) >= 200
    assert set(seen) >= {0, 1, 2, 3}, "the drafter must be partly right for this test to say anything"


def test_plain_decoding_has_a_round_for_every_token_after_the_first() -> None:
    verifier = make_verifier(seed=0)
    out = answer(verifier, make_drafter(verifier), make_ends(verifier), [3, 4], "plain")
    assert out.accepted == [0] * (len(out.ids) - 1)


def perfect(verifier: Verifier, prompt: list[int], longest: int) -> tuple[Drafter, Ends, list[int]]:
    """A drafter that has learned one answer by heart."""
    drafter, ends = make_drafter(verifier), make_ends(verifier)
    [response] = verifier.generate([prompt], max_new_tokens=longest)
    teach(drafter, ends, [make_row(verifier, prompt, response.ids)], steps=250)
    return drafter, ends, response.ids


def test_accepted_tokens_are_cut_at_the_end_token_and_at_the_length_limit() -> None:
    # the end token is one that the verifier says in the middle of its answer: within what a round accepts
    prompt = [5, 17, 23]
    drafter, ends, ids = perfect(make_verifier(seed=0, eos=VOCAB - 2), prompt, 30)
    for method in ("chain", 64):
        whole = answer(make_verifier(seed=0, eos=VOCAB - 2), drafter, ends, prompt, method, longest=30)
        assert whole.ids == ids
        assert max(whole.accepted) == 5, "the drafter must know the answer for this test to say anything"
        for length in range(1, 30, 2):
            limited = answer(make_verifier(seed=0, eos=VOCAB - 2), drafter, ends, prompt, method, longest=length)
            ended_verifier = make_verifier(seed=0, eos=ids[length - 1])
            ended = answer(ended_verifier, drafter, ends, prompt, method, longest=30)
            end = ids.index(ids[length - 1]) + 1
            assert limited.ids == ids[:length]
            assert ended.ids == ids[:end]
            for out in (limited, ended):
                row = make_row(ended_verifier, prompt, out.ids)
                name = "chain" if method == "chain" else f"tree{method}"
                assert out.accepted == replay(drafter, ends, row, budgets=[64])[name]


def test_an_answer_that_is_only_the_end_token_has_no_rounds() -> None:
    prompt = [5, 17, 23]
    first = make_verifier(seed=0).generate([prompt], max_new_tokens=1)[0].ids[0]
    verifier = make_verifier(seed=0, eos=first)
    assert answer(verifier, make_drafter(verifier), make_ends(verifier), prompt, 8) == Decoded([first], [])
