"""Live decoding with a draft: one round loop, whatever the tree and however tokens are chosen. Knows models, no file.

A round: draft after the last committed token (the anchor), make a tree, let the verifier score anchor and tree in one
pass in which a node sees only its ancestors, follow the verifier's own choices through the tree, commit. The text is
the verifier's own with any drafter (see `sampling`); a good one needs fewer rounds.

T tokens, F features, N nodes, M = N + 1 the anchor and the nodes, S slots, V vocabulary, U draft vocabulary
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from dflash.decoding.acceptance import cut
from dflash.decoding.ddtree import ABSENT, Trees, ancestors, best_first, chain, root_only, top_tokens, walk
from dflash.decoding.sampling import Sampling
from dflash.drafter.blocks import Documents
from dflash.drafter.model import Context, Drafter, Ends
from dflash.hidden.encoding import as_stored
from dflash.verifier import Outputs, Verifier, compact, go_back, running_states

PLAIN: Final = "plain"
Method = Literal["plain", "chain", "rejection"] | int
"""How to draft: not at all, the best token of each slot, a token of each slot drawn at the temperature and kept by
rejection sampling, or a tree of that budget."""

Step = Literal["prefill", "draft", "tree", "verify", "commit"]


@dataclass(frozen=True)
class Decoded:
    """A response's token ids (the end token included), the accepted count of each of its rounds, and the verifier's
    passes: one for the prompt, one for each round, and those by which a running state follows what was accepted.
    """

    ids: list[int]
    accepted: list[int]
    calls: int = 0


@torch.inference_mode()
def decode(
    verifier: Verifier,
    drafter: Drafter,
    ends: Ends,
    prompt_ids: list[int],
    *,
    layers: Sequence[int],
    max_new_tokens: int,
    method: Method,
    storage_dtype: str,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    done: Callable[[Step], None] = lambda _: None,
) -> Decoded:
    """Answer one prompt, up to an end token, one of `stop_ids`, or `max_new_tokens` (>= 1) tokens.

    Rounds and their end are those of `acceptance`. `layers` are the taps the drafter was trained on. Features are
    rounded as in the store, to `storage_dtype`, before the drafter sees them. All models are on one device. Greedy at
    temperature 0; above it, the answer is the one that `Verifier.generate` draws with this seed, except for rejection,
    where it is another draw from the same distribution. `done` hears of each step, so that others can look at a clock.

    Raises ValueError for more tokens than the verifier has positions, for a tree where the verifier's layers keep a
    running state, of which there is one and not one per branch, and for rejection at temperature 0.
    """
    cache = verifier.new_cache()
    running = verifier.has_running_state
    _check(verifier, len(prompt_ids), max_new_tokens, method=method, temperature=temperature)
    device, end_ids, num_slots = verifier.device, verifier.eos_ids | stop_ids, drafter.config.block_size - 1
    sampling = None
    if temperature > 0:
        sampling = Sampling.seeded(
            seed, num_tokens=max_new_tokens, beyond=num_slots, temperature=temperature, top_p=top_p, device=device
        )
    greedy, plain = sampling is None, method == PLAIN
    taps = () if plain else layers

    prompt_1T = torch.tensor([prompt_ids], device=device)
    seen = verifier.forward(prompt_1T, layers=taps, cache=cache, greedy=greedy, final=not greedy)
    context = Context(Documents(())) if plain else drafter.context(as_stored(seen.features_BTF[0], storage_dtype))
    last = seen._replace(greedy_BT=seen.greedy_BT[:, -1:], final_BTH=seen.final_BTH[:, -1:])
    ids = _choices(verifier, last, Draft(root_only(1, device=device)), sampling, at=0)[0].tolist()
    accepted: list[int] = []
    calls = 1
    done("prefill")
    while ids[-1] not in end_ids and len(ids) < max_new_tokens:
        anchor = len(prompt_ids) + len(ids) - 1
        logits_SU = None if plain else _draft_logits(drafter, ends, ids[-1], context=context)
        done("draft")

        draft = _plant(method, ends, logits_SU, sampling, at=len(ids), num_slots=num_slots, device=device)
        done("tree")

        states = {} if plain else running_states(cache)
        input_ids_1M = torch.cat([prompt_1T.new_tensor([[ids[-1]]]), draft.trees.tokens_BN], dim=-1)
        seen = verifier.forward(
            input_ids_1M,
            layers=taps,
            attention_mask=_visible(draft.trees, anchor) if isinstance(method, int) else None,  # else it is a path
            position_ids=anchor + pad(draft.trees.depths_BN, (1, 0)),
            cache=cache,
            greedy=greedy,
            final=not greedy,
        )
        choices_1M = _choices(verifier, seen, draft, sampling, at=len(ids))
        calls += 1
        done("verify")

        path_S = walk(draft.trees, choices_1M, num_slots=num_slots)[0]
        nodes = path_S[path_S != ABSENT]
        kept = pad(nodes + 1, (1, 0))  # of anchor and nodes, those now part of the text
        proposed = choices_1M[0, kept].tolist()  # the accepted tokens and the bonus token
        remaining = min([max_new_tokens - len(ids)] + [i + 1 for i, token in enumerate(proposed) if token in end_ids])
        num_accepted, num_committed = cut(len(nodes), remaining=remaining)
        ids += proposed[:num_committed]
        accepted.append(num_accepted)
        if not plain:
            context.append(drafter.context(as_stored(seen.features_BTF[0, kept], storage_dtype), start=anchor))
        if len(kept) < input_ids_1M.shape[1] and not running:
            compact(cache, kept, start=anchor)
        elif len(kept) < input_ids_1M.shape[1]:
            go_back(cache, states, length=anchor)
            verifier.forward(input_ids_1M[:, kept], layers=(), greedy=False, cache=cache)
            calls += 1
        done("commit")
    return Decoded(ids, accepted, calls)


def _check(verifier: Verifier, num_prompt: int, num_new: int, *, method: Method, temperature: float) -> None:
    if verifier.max_positions is not None and num_prompt + num_new > verifier.max_positions:
        raise ValueError(
            f"live decoding: a prompt of {num_prompt} tokens and an answer of up to {num_new} are more than the "
            f"verifier's {verifier.max_positions} positions; shorten the prompt or lower max_new_tokens"
        )
    if verifier.has_running_state and isinstance(method, int):
        raise ValueError(
            f"live decoding: a tree of {method} nodes has branches, but this verifier's "
            f"{', '.join(verifier.layer_kinds)} layers keep one running state; decode the chain (replay covers trees)"
        )
    if method == "rejection" and temperature <= 0:
        raise ValueError(
            f"live decoding: rejection sampling at temperature {temperature} has nothing to draw; raise it, or decode "
            "the chain"
        )


@dataclass(frozen=True)
class Draft:
    """The one tree that a round verifies, and what its tokens were drawn from, where they were drawn."""

    trees: Trees
    q_SV: Tensor | None = None  # noqa: N815


def _draft_logits(drafter: Drafter, ends: Ends, anchor_id: int, *, context: Context) -> Tensor:
    """(S, U) after the context's last token."""
    anchors_A = torch.tensor([context.start + context.length], device=ends.embedding_VH.device)
    hidden_1SH = drafter.draft(ends, anchors_A.new_tensor([anchor_id]), anchors_A=anchors_A, context=context)
    return ends.draft_logits(hidden_1SH[0]).float()


def _plant(
    method: Method,
    ends: Ends,
    logits_SU: Tensor | None,
    sampling: Sampling | None,
    *,
    at: int,
    num_slots: int,
    device: torch.device,
) -> Draft:
    """The draft of the response's tokens from number `at` on, without nodes that do not exist."""
    if logits_SU is None:
        return Draft(root_only(1, device=device))
    logprobs_1SU = logits_SU.log_softmax(-1)[None]
    if method == "rejection":
        assert sampling is not None
        drawn_S, q_SU = sampling.draft(logits_SU, torch.arange(at, at + num_slots, device=device))
        drawn_1S1 = drawn_S[None, :, None]
        return Draft(chain(logprobs_1SU.gather(-1, drawn_1S1), ends.ids(drawn_1S1)), ends.over_all(q_SU))
    num_best = min(method, logprobs_1SU.shape[-1]) if isinstance(method, int) else 1
    values_1SK, places_1SK = top_tokens(logprobs_1SU, num_best)
    if method == "chain":
        return Draft(chain(values_1SK, ends.ids(places_1SK)))
    assert isinstance(method, int)
    trees = best_first(values_1SK, ends.ids(places_1SK), budget=method)
    size = int((trees.scores_BN > -torch.inf).sum())
    parts = (trees.tokens_BN, trees.parents_BN, trees.depths_BN, trees.scores_BN)
    return Draft(Trees(*(part_BN[:, :size] for part_BN in parts)))


def _visible(trees: Trees, num_before: int) -> Tensor:
    """(1, 1, M, keys): everything before the anchor, and in the tree as `ancestors` says."""
    visible_MM = ancestors(trees)[0]
    return torch.cat([visible_MM.new_ones(len(visible_MM), num_before), visible_MM], dim=-1)[None, None]


def _choices(verifier: Verifier, seen: Outputs, draft: Draft, sampling: Sampling | None, *, at: int) -> Tensor:
    """What the verifier puts after anchor and nodes (1, M); after the anchor it is token `at` of the response."""
    if sampling is None:
        return seen.greedy_BT
    logits_MV = verifier.logits(seen.final_BTH[0])
    tokens_M = at + pad(draft.trees.depths_BN, (1, 0))[0]
    if draft.q_SV is None:
        return sampling.draw(logits_MV, tokens_M)[None]
    return sampling.keep_or_replace(logits_MV, tokens_M, draft_S=draft.trees.tokens_BN[0], q_SV=draft.q_SV)[None]


@dataclass(frozen=True)
class Measured:
    """Some prompts decoded by one method: the responses, and the wall time of all of them by step."""

    method: Method
    responses: list[Decoded]
    seconds: dict[Step, float]

    @property
    def tokens(self) -> int:
        return sum(len(response.ids) for response in self.responses)

    @property
    def rounds(self) -> int:
        return sum(len(response.accepted) for response in self.responses)

    @property
    def calls(self) -> int:
        return sum(response.calls for response in self.responses)


def measure(
    verifier: Verifier,
    drafter: Drafter,
    ends: Ends,
    prompts: Sequence[list[int]],
    *,
    methods: Sequence[Method],
    layers: Sequence[int],
    max_new_tokens: int | Sequence[int],
    storage_dtype: str,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
) -> list[Measured]:
    """Decode prompts one by one, each by every method in turn, so that a noisy machine is noisy for all of them.

    `max_new_tokens` is one number for all prompts, or each one's own.

    Plain decoding comes first, whether it is among the methods or not. Above temperature 0 each prompt has a seed. The
    first prompt is decoded once more before the clock counts.
    """
    each: list[Method] = [PLAIN, *(method for method in methods if method != PLAIN)]
    measured = [Measured(method, [], defaultdict(float)) for method in each]
    longest = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens

    def run(number: int, method: Method, seconds: dict[Step, float]) -> Decoded:
        before = _now(verifier.device)

        def lap(step: Step) -> None:
            nonlocal before
            now = _now(verifier.device)
            seconds[step] += now - before
            before = now

        return decode(
            verifier,
            drafter,
            ends,
            prompts[number],
            layers=layers,
            max_new_tokens=longest[number],
            method=method,
            storage_dtype=storage_dtype,
            temperature=temperature,
            seed=seeds[number] if seeds else 0,
            done=lap,
        )

    for one in measured:
        run(0, one.method, defaultdict(float))
    for number in range(len(prompts)):
        for one in measured:
            one.responses.append(run(number, one.method, one.seconds))
    return measured


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
