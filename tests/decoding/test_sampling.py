"""Rejection sampling and what it expects, against all that can happen."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.decoding.acceptance import walk_rounds
from dflash.decoding.sampling import Sampling, expected_rounds, kept


@settings(max_examples=40)
@given(num_anchors=st.integers(0, 3), num_slots=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_expected_rounds_are_the_mean_over_everything_that_can_be_kept(
    num_anchors: int, num_slots: int, seed: int
) -> None:
    kept_AS = torch.rand(num_anchors, num_slots, generator=torch.Generator().manual_seed(seed)).double()
    inside_AS = torch.arange(num_anchors)[:, None] + torch.arange(1, num_slots + 1) <= num_anchors
    kept_AS = kept_AS * inside_AS
    rounds = accepted = total = 0.0
    for outcome in itertools.product([0, 1], repeat=num_anchors * num_slots):
        is_kept_AS = torch.tensor(outcome).view(num_anchors, num_slots)
        probability = float(kept_AS.where(is_kept_AS.bool(), 1 - kept_AS).prod())
        counts = walk_rounds(is_kept_AS.cumprod(-1).sum(-1).tolist(), num_tokens=num_anchors + 1)
        total += probability
        rounds += probability * len(counts)
        accepted += probability * sum(counts)
    assert total == pytest.approx(1)
    assert expected_rounds(kept_AS) == pytest.approx((rounds, accepted))


def test_a_token_is_kept_as_often_as_the_distributions_overlap() -> None:
    generator = torch.Generator().manual_seed(0)
    p_V, q_V = (torch.randn(30, generator=generator).double().softmax(-1) for _ in range(2))
    assert (p_V * kept(p_V.log(), q_V.log())).sum() == pytest.approx(float(torch.minimum(p_V, q_V).sum()))


def test_what_is_kept_or_replaced_has_the_distribution_p_and_a_replacement_is_another_token() -> None:
    generator, number = torch.Generator().manual_seed(1), 100_000
    logits_MV, draft_SV = torch.randn(2, 5, generator=generator), torch.randn(1, 5, generator=generator)
    p_MV = (logits_MV.double() / 0.8).softmax(-1)
    # one response whose tokens are so many independent slots
    sampling = Sampling.seeded(
        0, num_tokens=number + 1, beyond=0, temperature=0.8, top_p=1.0, device=torch.device("cpu")
    )
    tokens_M = torch.arange(number + 1)
    drafted_S, q_SV = sampling.draft(draft_SV.expand(number, -1), tokens_M[:-1])
    choices_M = sampling.keep_or_replace(
        torch.cat([logits_MV[:1].expand(number, -1), logits_MV[1:]]), tokens_M, draft_S=drafted_S, q_SV=q_SV
    )
    frequency_V = choices_M[:-1].bincount(minlength=5) / number
    assert (frequency_V - p_MV[0]).abs().max() < 4 * 0.5 / number**0.5
    assert (drafted_S.bincount(minlength=5) / number - p_MV[0]).abs().max() > 0.05, "q is another distribution"
    overlap = float(torch.minimum(p_MV[0], q_SV[0]).sum())
    assert float((choices_M[:-1] == drafted_S).double().mean()) == pytest.approx(overlap, abs=4 * 0.5 / number**0.5)
