"""Choices of a verifier that samples: numbers and distributions in, token ids out. Knows no model and no tree.

Every token of a response has random numbers of its own, drawn before the first round. What a token becomes depends on
the text before it and on its own numbers alone, and given that text it has the verifier's distribution:

    sample and match  x ~ p, the same token for every drafter and every tree; a drafted token is accepted if it is x
    rejection         d ~ q, the drafter's; kept where u < p(d) / q(d), else x ~ max(p - q, 0) (arXiv 2211.17192)

M positions that the verifier has scored, S slots, V vocabulary, T tokens of a response
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.decoding.acceptance import Expected
from dflash.verifier import draw, likelihoods, pick, uniform


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one response are drawn. `choice_T` is what `Verifier.generate` draws them with."""

    temperature: float
    top_p: float
    choice_T: Tensor  # noqa: N815
    draft_T: Tensor  # noqa: N815
    keep_T: Tensor  # noqa: N815

    @classmethod
    def seeded(
        cls, seed: int, *, num_tokens: int, beyond: int, temperature: float, top_p: float, device: torch.device
    ) -> "Sampling":
        """For `num_tokens` tokens, and `beyond` more which may be drafted but are never committed."""
        generator = torch.Generator().manual_seed(seed)
        numbers = [torch.nn.functional.pad(uniform(generator, num_tokens), (0, beyond)).to(device) for _ in range(3)]
        return cls(temperature, top_p, *numbers)

    def draw(self, logits_MV: Tensor, tokens_M: Tensor) -> Tensor:
        """The verifier's choice (M) at each position; `tokens_M` is the number in the response of the token chosen."""
        return draw(logits_MV, self.choice_T[tokens_M], temperature=self.temperature, top_p=self.top_p)

    def draft(self, logits_SV: Tensor, tokens_S: Tensor) -> tuple[Tensor, Tensor]:
        """A token (S) for each slot from the drafter's logits, and what it was drawn from, q_SV."""
        mass_SV = likelihoods(logits_SV, temperature=self.temperature, top_p=1.0)
        return pick(mass_SV, self.draft_T[tokens_S]), mass_SV / mass_SV.sum(-1, keepdim=True)

    def keep_or_replace(self, logits_MV: Tensor, tokens_M: Tensor, *, draft_S: Tensor, q_SV: Tensor) -> Tensor:
        """The choice (M = S + 1) after the anchor and each drafted token: the next drafted one where it is kept.

        What replaces it is never itself: where it may be rejected, p - q is negative.
        """
        mass_MV = likelihoods(logits_MV, temperature=self.temperature, top_p=self.top_p)
        p_MV = mass_MV / mass_MV.sum(-1, keepdim=True)
        p_S, q_S = (part_SV.gather(-1, draft_S[:, None])[:, 0] for part_SV in (p_MV[:-1], q_SV))
        kept_S = self.keep_T[tokens_M[:-1]] * q_S < p_S
        left_MV = (p_MV - torch.nn.functional.pad(q_SV, (0, 0, 0, 1))).clamp(min=0)  # all of p after the last slot
        choices_M = pick(left_MV, self.choice_T[tokens_M])
        choices_M[:-1] = draft_S.where(kept_S, choices_M[:-1])
        return choices_M


def kept(log_p: Tensor, log_q: Tensor) -> Tensor:
    """min(1, q(x) / p(x)): how likely rejection sampling has kept a drafted token x, given that x was committed.

    Drafted and kept, with probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)); committed either way, with p(x).
    """
    return (log_q - log_p).clamp(max=0).exp()


def expected_rounds(kept_AS: Tensor) -> Expected:
    """What rejection sampling takes for a response whose anchors are all of its tokens but the last.

    `kept_AS[a, k-1]` is the probability that slot k was kept after anchor a if those before it were; 0 for slots beyond
    the end. Given the text, tokens were kept independently of each other, so anchors are a Markov chain, whose visits
    add up to the rounds.
    """
    num_anchors, num_slots = kept_AS.shape
    reached_AS = torch.nn.functional.pad(kept_AS.double().cumprod(-1), (1, 1))
    reached_AS[:, 0] = 1
    exactly_AS = (reached_AS[:, :-1] - reached_AS[:, 1:]).tolist()  # 0..S slots are kept
    visits = [1.0] + [0.0] * (num_anchors + num_slots)
    accepted = 0.0
    for anchor in range(num_anchors):
        for count, probability in enumerate(exactly_AS[anchor]):
            visits[anchor + count + 1] += visits[anchor] * probability
            accepted += visits[anchor] * probability * count
    return Expected(sum(visits[:num_anchors]), accepted)
