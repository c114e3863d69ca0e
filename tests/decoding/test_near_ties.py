"""Near-ties: told from real differences by the verifier's own logits, in a report and without one."""

import logging
from typing import Any

import pytest
import torch
from decoding_small import LAYERS, make_drafter, make_ends, make_row, make_verifier

from dflash.corpus.records import Sampling
from dflash.decoding.evaluation import Answer, _compared
from dflash.decoding.live import decode
from dflash.decoding.near_ties import NEAR_TIE, coarser, divergence
from dflash.decoding.replay import replay
from dflash.decoding.responses import Response
from dflash.verifier import Verifier

PROMPT = [5, 9, 2]


class Twins:
    """A verifier that cannot tell two tokens apart, and its two answers: one of the lower id, one of the other."""

    def __init__(self) -> None:
        self.verifier: Verifier = make_verifier(seed=3)
        [plain] = self.verifier.generate([PROMPT], max_new_tokens=20)
        # the twin of the token in the middle of the answer has a larger id, which greedy decoding never takes
        self.at = next(at for at in range(6, 16) if plain.ids[at] < 40)
        self.twin = next(token for token in range(40, 60) if token not in plain.ids)
        head_VH = self.verifier.model.get_parameter("lm_head.weight").data
        head_VH[self.twin] = head_VH[plain.ids[self.at]]
        self.taken = plain.ids
        prefix = [*plain.ids[: self.at], self.twin]
        [rest] = self.verifier.generate([PROMPT + prefix], max_new_tokens=20 - len(prefix))
        self.stored = prefix + rest.ids

    def compared(self, stored: list[int], *, dtype: str = "float32") -> dict[str, Any]:
        """Live decoding of what is stored, as a report has it."""
        drafter, ends = make_drafter(self.verifier), make_ends(self.verifier)
        row = make_row(self.verifier, PROMPT, stored)
        response = Response(
            id="p1", set="s", category="c", content="x", num_tokens=len(stored), truncated=True,
            accepted={name: tuple(rounds) for name, rounds in replay(drafter, ends, row, budgets=[]).items()},
        )  # fmt: skip
        decoded = decode(
            self.verifier, drafter, ends, PROMPT, layers=LAYERS, max_new_tokens=len(stored), method="chain",
            storage_dtype="float32",
        )  # fmt: skip
        answer = Answer(PROMPT, stored, len(stored))
        return _compared(
            self.verifier, response, answer, decoded, method="chain", dtype=dtype, sampling=Sampling(len(stored))
        )


@pytest.fixture(scope="module")
def twins() -> Twins:
    return Twins()


def test_a_stored_text_that_chose_otherwise_at_a_tie_is_counted_and_no_error(
    twins: Twins, caplog: pytest.LogCaptureFixture
) -> None:
    run = twins.compared(twins.stored)
    assert (run["text_equal"], run["near_tie"], run["rounds_equal"]) == (False, True, None)
    assert f"left the stored response at token {twins.at} of {len(twins.stored)}" in caplog.text
    assert caplog.text.strip().endswith("a near-tie")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run = twins.compared(twins.taken)
    assert (run["text_equal"], run["near_tie"], run["rounds_equal"]) == (True, False, True)
    assert not caplog.records


def test_a_text_that_the_verifier_would_not_write_is_an_error_in_float32_only(twins: Twins) -> None:
    stored = [*twins.taken[: twins.at], (twins.taken[twins.at] + 1) % 40, *twins.taken[twins.at + 1 :]]
    with pytest.raises(AssertionError, match=rf"p1: .* at token {twins.at} of .* no near-tie \(0.001\)"):
        twins.compared(stored)
    run = twins.compared(stored, dtype="float16")
    assert (run["text_equal"], run["near_tie"]) == (False, False)


def test_the_margin_is_of_the_less_likely_token_at_the_first_difference(twins: Twins) -> None:
    ids = torch.tensor([PROMPT + twins.taken[: twins.at]])
    final_H = twins.verifier.forward(ids, layers=(), final=True).final_BTH[0, -1]
    logits_V = twins.verifier.logits(final_H[None])[0]
    found = divergence(twins.verifier, PROMPT, twins.taken, [*twins.taken[: twins.at], 11, 11])
    assert found
    assert found.at == twins.at
    assert found.margin == pytest.approx(float(logits_V.max() - logits_V[11]))
    assert divergence(twins.verifier, PROMPT, twins.taken, twins.taken) is None
    ended = divergence(twins.verifier, PROMPT, twins.taken, twins.taken[:-1])
    assert ended
    assert ended == (len(twins.taken) - 1, float("inf"))


def test_the_coarser_precision_decides() -> None:
    assert coarser("float32", "float32") == "float32"
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float32") == "bfloat16"
    assert coarser("float16", "fp8") == "fp8"
    assert list(NEAR_TIE.values()) == sorted(NEAR_TIE.values())
