"""Draft vocabularies: the part of the verifier's tokens that a drafter can propose. Knows counts and ids only.

Its tokens are numbered by their places, which are in the order of their ids. Stored as in the speculators format: `t2d`
(V) says which ids are in it, `d2t` (U) by how much each token's id is larger than its place.

V vocabulary of the verifier, U draft vocabulary
"""

from collections.abc import Collection

import torch
from torch import Tensor

MAPS = ("t2d", "d2t")
"""The names of what describes a draft vocabulary among a drafter's weights."""


def choose_tokens(counts_V: Tensor, *, size: int, always: Collection[int], num_tokens: int) -> Tensor:
    """(U,) the ids to keep, ascending: those of `always`, then the most frequent, of equals the lower id.

    Ids from `num_tokens` on are rows of a padded head, which no text has; they are kept only where `always` names them.
    Raises ValueError where `size` is too small for `always`, or more than there are tokens.
    """
    named = sorted({token for token in always if token < len(counts_V)})
    possible = num_tokens + sum(token >= num_tokens for token in named)
    if not len(named) < size <= possible:
        raise ValueError(
            f"training.draft_vocab_size: {size} is not between {len(named) + 1} (mask and end tokens, and another one) "
            f"and {possible}, which is all there are; choose another one, or 0 for the verifier's whole vocabulary"
        )
    order_V = counts_V[:num_tokens].argsort(descending=True, stable=True)
    others = order_V[~torch.isin(order_V, torch.tensor(named, dtype=order_V.dtype))]
    return torch.cat([torch.tensor(named, dtype=torch.int64), others[: size - len(named)]]).sort().values


def maps_of(kept_U: Tensor, *, vocab_size: int) -> dict[str, Tensor]:
    """`t2d` and `d2t` of these ids, which ascend."""
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool, device=kept_U.device)
    t2d_V[kept_U] = True
    return {"t2d": t2d_V, "d2t": kept_U - torch.arange(len(kept_U), device=kept_U.device)}


def kept_tokens(d2t_U: Tensor) -> Tensor:
    """(U,) the id of each place."""
    return d2t_U + torch.arange(len(d2t_U), device=d2t_U.device)


def contradiction(t2d_V: Tensor, d2t_U: Tensor) -> str:
    """What is wrong with a pair of maps; empty where they describe one vocabulary."""
    kept_U = kept_tokens(d2t_U)
    if len(kept_U) and not 0 <= int(kept_U.min()) <= int(kept_U.max()) < len(t2d_V):
        return f"d2t leads to ids from {int(kept_U.min())} to {int(kept_U.max())} in a vocabulary of {len(t2d_V)}"
    if (kept_U[1:] <= kept_U[:-1]).any():
        return "d2t leads to ids that do not ascend"
    if not torch.equal(t2d_V.nonzero()[:, 0], kept_U):
        return f"t2d has {int(t2d_V.sum())} tokens, which are not the {len(kept_U)} of d2t"
    return ""
