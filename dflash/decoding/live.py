"""Live greedy decoding with a draft: one round loop, whatever the tree. Knows models, and no file.

A round: draft after the last committed token (the anchor), make a tree, let the verifier score anchor and tree in one
pass in which a node sees only its ancestors, follow the verifier's own choice through the tree, commit. The text is
the verifier's greedy text with any drafter; a good one needs fewer rounds.

T tokens, F features, N nodes, M = N + 1 the anchor and the nodes, C keys in the cache
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dflash.decoding.acceptance import cut
from dflash.decoding.ddtree import ABSENT, Trees, ancestors, best_first, chain, root_only, walk
from dflash.decoding.replay import draft_tokens
from dflash.drafter.model import Context, Drafter, Ends
from dflash.hidden.encoding import as_stored
from dflash.verifier import Verifier, compact

Method = Literal["plain", "chain"] | int
"""How to draft: not at all, the best token per slot, or a tree of that budget."""


@dataclass(frozen=True)
class Decoded:
    """A response's token ids (the end token included) and the accepted count of each of its rounds."""

    ids: list[int]
    accepted: list[int]


def _plant(method: Method, drafter: Drafter, ends: Ends, anchor_id: int, *, context: Context) -> Trees:
    """The one tree that this round verifies, without nodes that do not exist."""
    device = ends.embedding_VH.device
    if method == "plain":
        return root_only(1, device=device)
    anchors_A = torch.tensor([context.start + context.length], device=device)
    anchor_ids_A = torch.tensor([anchor_id], device=device)
    k = 1 if method == "chain" else min(method, ends.vocab_size)
    values_1SK, ids_1SK = draft_tokens(drafter, ends, anchor_ids_A, anchors_A=anchors_A, context=context, k=k)
    trees = chain(values_1SK, ids_1SK) if method == "chain" else best_first(values_1SK, ids_1SK, budget=method)
    size = int((trees.scores_BN > -torch.inf).sum())
    return Trees(*(part[:, :size] for part in (trees.tokens_BN, trees.parents_BN, trees.depths_BN, trees.scores_BN)))


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
) -> Decoded:
    """Answer one prompt greedily, up to the verifier's end token or `max_new_tokens` (>= 1) tokens.

    Rounds and their end are those of `acceptance`. `layers` are the taps the drafter was trained on. Features are
    rounded as in the store, to `storage_dtype`, before the drafter sees them. All models are on one device.
    """
    cache = verifier.new_cache()
    device = verifier.device
    prompt_1T = torch.tensor([prompt_ids], device=device)
    features_1TF, greedy_1T, *_ = verifier.forward(prompt_1T, layers=layers, cache=cache)
    context = drafter.context(as_stored(features_1TF[0], storage_dtype))
    ids = [int(greedy_1T[0, -1])]
    accepted: list[int] = []
    while ids[-1] not in verifier.eos_ids and len(ids) < max_new_tokens:
        trees = _plant(method, drafter, ends, ids[-1], context=context)
        anchor = context.length
        visible_MM = ancestors(trees)[0]
        visible_MC = torch.cat([visible_MM.new_ones(len(visible_MM), anchor), visible_MM], dim=-1)
        features_1MF, greedy_1M, *_ = verifier.forward(
            torch.cat([prompt_1T.new_tensor([[ids[-1]]]), trees.tokens_BN], dim=-1),
            layers=layers,
            attention_mask=visible_MC[None, None],
            position_ids=anchor + torch.nn.functional.pad(trees.depths_BN, (1, 0)),
            cache=cache,
        )

        path_S = walk(trees, greedy_1M, num_slots=drafter.config.block_size - 1)[0]
        nodes = path_S[path_S != ABSENT]
        kept = torch.nn.functional.pad(nodes + 1, (1, 0))  # of anchor and nodes, those now part of the text
        proposed = greedy_1M[0, kept].tolist()  # the accepted tokens and the bonus token
        remaining = min([max_new_tokens - len(ids)] + [i + 1 for i, t in enumerate(proposed) if t in verifier.eos_ids])
        num_accepted, num_committed = cut(len(nodes), remaining=remaining)
        ids += proposed[:num_committed]
        accepted.append(num_accepted)

        compact(cache, torch.cat([torch.arange(anchor, device=device), anchor + kept]))
        context.append(drafter.context(as_stored(features_1MF[0, kept], storage_dtype), start=anchor))
    return Decoded(ids, accepted)
