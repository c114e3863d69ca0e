"""Live decoding against the verifier alone, and against replay."""

import math
from collections import Counter
from functools import cache

import pytest
import torch
from decoding_small import (
    DENSE,
    HYBRID,
    KINDS,
    LAYERS,
    VOCAB,
    WINDOW,
    make_drafter,
    make_ends,
    make_prompts,
    make_row,
    make_verifier,
    teach,
)

from dflash.decoding.live import Decoded, Method, decode, measure
from dflash.decoding.replay import replay, replay_responses
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
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
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
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_ids=stop_ids,
    )


def methods_of(kind: str) -> tuple[Method, ...]:
    return METHODS[:2] if kind in HYBRID else METHODS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_decoding_with_any_drafter_equals_the_verifier(kind: str, seed: int) -> None:
    verifier = make_verifier(kind, seed=seed)
    drafter, ends = make_drafter(verifier, seed=seed), make_ends(verifier)
    prompts = [*make_prompts(2, seed=seed), list(range(2 * WINDOW, 10 * WINDOW))]
    for prompt, alone in zip(prompts, verifier.generate(prompts, max_new_tokens=LONGEST), strict=True):
        for method in methods_of(kind):
            assert answer(verifier, drafter, ends, prompt, method).ids == alone.ids


@pytest.mark.parametrize(
    ("kind", "storage_dtype"),
    [*((kind, "float32") for kind in KINDS), *((kind, dtype) for kind in DENSE for dtype in ("bfloat16", "fp8"))],
)
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
    teach(drafter, ends, [row for row in rows if len(row.input_ids_T) > 24], steps=300 if kind in HYBRID else 120)
    seen: list[int] = []
    for prompt, response, row in list(zip(prompts, responses, rows, strict=True))[: 24 if kind in HYBRID else 12]:
        rounds = replay(drafter, ends, row, budgets=[1, 8, 64])
        for method in methods_of(kind)[1:5]:
            live = answer(verifier, drafter, ends, prompt, method, storage_dtype=storage_dtype)
            assert live.ids == response.ids
            assert live.accepted == rounds["chain" if method == "chain" else f"tree{method}"]
            seen += live.accepted
    assert len(seen) >= 200
    assert set(seen) >= {0, 1, 2, 3}, "the drafter must be partly right for this test to say anything"


@pytest.mark.parametrize("kind", HYBRID)
def test_a_running_state_has_no_branches(kind: str) -> None:
    verifier = make_verifier(kind)
    with pytest.raises(ValueError, match=r"tree of 8 nodes .*linear_attention.*decode the chain") as refusal:
        answer(verifier, make_drafter(verifier), make_ends(verifier), [3, 4], 8)
    assert "\n" not in str(refusal.value)


def test_plain_decoding_has_a_round_for_every_token_after_the_first() -> None:
    verifier = make_verifier(seed=0)
    out = answer(verifier, make_drafter(verifier), make_ends(verifier), [3, 4], "plain")
    assert out.accepted == [0] * (len(out.ids) - 1)
    assert out.calls == len(out.ids)


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
    assert answer(verifier, make_drafter(verifier), make_ends(verifier), prompt, 8) == Decoded([first], [], calls=1)


def test_a_stop_id_ends_the_answer_wherever_it_stands_in_a_block() -> None:
    prompt = [5, 17, 23]
    drafter, ends, ids = perfect(make_verifier(seed=0, eos=VOCAB - 2), prompt, 30)
    verifier = make_verifier(seed=0, eos=VOCAB - 2)
    for stop in set(ids):
        for method in METHODS[:5]:
            stopped = answer(verifier, drafter, ends, prompt, method, longest=30, stop_ids=frozenset({stop}))
            assert stopped.ids == ids[: ids.index(stop) + 1]


def test_the_mask_token_may_be_said() -> None:
    prompt = [5, 17, 23]
    verifier = make_verifier(seed=0)
    [alone] = verifier.generate([prompt], max_new_tokens=LONGEST)
    drafter, ends = make_drafter(verifier, mask_token_id=alone.ids[3]), make_ends(verifier)
    rounds = replay(drafter, ends, make_row(verifier, prompt, alone.ids), budgets=[8])
    for method, name in (("chain", "chain"), (8, "tree8")):
        live = answer(verifier, drafter, ends, prompt, method)  # type: ignore[arg-type]
        assert (live.ids, live.accepted) == (alone.ids, rounds[name])


def test_more_tokens_than_positions_are_refused_with_their_numbers() -> None:
    verifier = make_verifier()
    with pytest.raises(ValueError, match=r"500 tokens and .* up to 24 are more than .* 512 positions; shorten"):
        answer(verifier, make_drafter(verifier), make_ends(verifier), [3] * 500, "chain")
    assert len(answer(verifier, make_drafter(verifier), make_ends(verifier), [3] * 510, "chain", longest=2).ids) == 2


@cache
def partly_right() -> tuple[Verifier, Drafter, Ends]:
    """A verifier that answers as it likes, and a drafter that learned from such answers."""
    verifier = make_verifier(seed=2)
    ends, drafter, prompts = make_ends(verifier), make_drafter(verifier), make_prompts(24, seed=2)
    answers = verifier.generate(prompts, max_new_tokens=LONGEST, temperature=0.7, seeds=range(24))
    rows = [make_row(verifier, prompt, one.ids) for prompt, one in zip(prompts, answers, strict=True)]
    teach(drafter, ends, [row for row in rows if len(row.input_ids_T) > 24], steps=200)
    return verifier, drafter, ends


@pytest.mark.parametrize("method", ["plain", "chain", 8, 64])
def test_a_sampled_answer_is_the_one_that_the_verifier_draws_alone_and_replay_knows_its_rounds(method: Method) -> None:
    verifier, drafter, ends = partly_right()
    prompts = make_prompts(16, seed=2)
    alone = verifier.generate(prompts, max_new_tokens=LONGEST, temperature=0.7, top_p=0.9, seeds=range(16))
    accepted = 0
    for seed, (prompt, expected) in enumerate(zip(prompts, alone, strict=True)):
        live = answer(verifier, drafter, ends, prompt, method, temperature=0.7, top_p=0.9, seed=seed)
        assert live.ids == expected.ids
        if method != "plain":
            rounds = replay(drafter, ends, make_row(verifier, prompt, live.ids), budgets=[8, 64])
            assert live.accepted == rounds["chain" if method == "chain" else f"tree{method}"]
        accepted += sum(live.accepted)
    assert method == "plain" or accepted > 10


PROMPT = [5, 17, 23]
TEMPERATURE = 0.6


@cache
@torch.no_grad()
def exact_distribution(temperature: float) -> torch.Tensor:
    """P(second token, third token) of answers to PROMPT, as one of VOCAB^2 cells: all texts, one forward pass each."""
    verifier = partly_right()[0]
    token_V = torch.arange(VOCAB)

    def after(ids_BT: torch.Tensor) -> torch.Tensor:
        final_BTH = verifier.forward(ids_BT, layers=(), greedy=False, final=True).final_BTH
        return (verifier.logits(final_BTH[:, -1]).double() / temperature).softmax(-1)

    prompt = torch.tensor([PROMPT])
    first_V = after(prompt)[0]
    one_VT = torch.cat([prompt.expand(VOCAB, -1), token_V[:, None]], dim=-1)
    second_VV = after(one_VT)
    two_XT = torch.cat([one_VT.repeat_interleave(VOCAB, 0), token_V.repeat(VOCAB)[:, None]], dim=-1)
    third_VVV = after(two_XT).view(VOCAB, VOCAB, VOCAB)
    return torch.einsum("a,ab,abc->bc", first_V, second_VV, third_VVV).flatten()


def surprise(counts_X: torch.Tensor, expected_X: torch.Tensor) -> float:
    """Chi-square of cells that expect at least five (the rest is one): standard deviations above its mean."""
    few_X = expected_X < 5
    pairs = [*zip(counts_X[~few_X].tolist(), expected_X[~few_X].tolist(), strict=True)]
    pairs.append((float(counts_X[few_X].sum()), float(expected_X[few_X].sum())))
    freedom = len(pairs) - 1
    return (sum((seen - mean) ** 2 / mean for seen, mean in pairs) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("method", ["chain", 8, "rejection"])
def test_sampled_answers_have_the_verifiers_distribution(method: Method) -> None:
    verifier, drafter, ends = partly_right()
    endless = Verifier(verifier.model, None, eos_ids=frozenset())
    answers = [
        answer(endless, drafter, ends, PROMPT, method, longest=3, temperature=TEMPERATURE, seed=seed)
        for seed in range(1000)
    ]
    assert sum(sum(one.accepted) for one in answers) > 50, "drafts must be kept for this test to say anything"
    cells = Counter(one.ids[1] * VOCAB + one.ids[2] for one in answers)
    counts_X = torch.tensor([float(cells[cell]) for cell in range(VOCAB**2)])
    assert abs(surprise(counts_X, 1000 * exact_distribution(TEMPERATURE))) < 4
    assert surprise(counts_X, 1000 * exact_distribution(1.3 * TEMPERATURE)) > 8, "this test must be able to fail"


def test_replay_knows_how_many_rounds_rejection_takes_on_average() -> None:
    verifier, drafter, ends = partly_right()
    prompts = make_prompts(8, seed=2)
    errors, rounds, accepted = [], 0, 0
    for seed in range(160):
        prompt = prompts[seed % len(prompts)]
        live = answer(verifier, drafter, ends, prompt, "rejection", temperature=0.7, seed=seed)
        row = make_row(verifier, prompt, live.ids)
        [replayed] = replay_responses(drafter, ends, [row], budgets=[], temperature=0.7)
        assert replayed.rejection is not None
        errors.append(len(live.accepted) - replayed.rejection.rounds)
        rounds, accepted = rounds + len(live.accepted), accepted + sum(live.accepted)
        # each round but a cut last one commits a token more than it accepts
        assert len(live.ids) - 1 - 1 <= replayed.rejection.accepted + replayed.rejection.rounds <= len(live.ids) - 1 + 1
    errors_N = torch.tensor(errors)
    assert accepted > rounds / 5
    assert errors_N.std() > 0.5, "rounds vary by chance"
    assert abs(errors_N.mean()) < 4 * errors_N.std() / math.sqrt(len(errors))


def test_rejection_without_a_temperature_is_refused() -> None:
    verifier, drafter, ends = partly_right()
    with pytest.raises(ValueError, match=r"temperature 0.*raise it, or decode the chain"):
        answer(verifier, drafter, ends, PROMPT, "rejection")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_measured_decoding_is_the_same_decoding_with_its_time_split(kind: str) -> None:
    verifier = make_verifier(kind, seed=2)
    drafter, ends, prompts = make_drafter(verifier), make_ends(verifier), make_prompts(3, seed=2)
    methods = methods_of(kind)[1:4]
    plain, *others = measure(
        verifier,
        drafter,
        ends,
        prompts,
        methods=methods,
        layers=LAYERS,
        max_new_tokens=LONGEST,
        storage_dtype="float32",
    )
    assert (
        plain.calls == plain.tokens == sum(len(one.ids) for one in verifier.generate(prompts, max_new_tokens=LONGEST))
    )
    assert tuple(one.method for one in others) == methods
    for one in others:
        assert one.responses == [answer(verifier, drafter, ends, prompt, one.method) for prompt in prompts]
        assert set(one.seconds) == {"prefill", "draft", "tree", "verify", "commit"}
        assert min(one.seconds.values()) > 0
        again = 0 if kind == "qwen3" else sum(count < 5 for response in one.responses for count in response.accepted)
        assert one.calls == len(prompts) + one.rounds + again
