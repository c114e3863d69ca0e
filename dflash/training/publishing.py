"""The end of a training: the best weights become an artifact. Only the first rank comes here.

U draft vocabulary, H hidden
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.decoding.parity import REFERENCE, remember
from dflash.drafter.export import save_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import HiddenStates
from dflash.manifests import Artifact, Key, publish
from dflash.training.curves import draw_curves
from dflash.training.rows import last_row, of_all_rows
from dflash.training.state import State, plain_copy
from dflash.training.validation import best_weights

REMEMBERED_ROWS = 4  # held-out ones first, for the parity gate


def publish_drafter(
    key: Key,
    state: State,
    weights: dict[str, Tensor],
    *,
    folder: Path,
    store: HiddenStates,
    ends: Ends,
    rows: Sequence[int],
    dtype: torch.dtype,
    metric: str,
    summary: dict[str, Any],
    history: list[dict[str, float]],
) -> Artifact:
    """The best weights in `dtype`, with what they draft for the first of `rows`, all metrics and their plots.

    Best by `metric`: those of a checkpoint in `folder`, or `weights`, which are those of the last step, whole. `ends`
    propose what the drafter may.
    """
    chosen, weights = best_weights(folder, weights, state.scores, metric, last=state.step, average=bool(state.average))
    counters = state.counters
    summary = summary | {"steps": state.step, "tokens": counters.tokens + counters.row_tokens}
    summary |= {"skipped": state.steadiness.skipped, "best": chosen}
    summary |= {name: of_all_rows(last_row(history, name)) for name in ("train", "validation")}
    drafter = plain_copy(state.drafter, weights).to(dtype)
    with publish(key, summary=summary) as (scratch, result):
        save_drafter(scratch, drafter, head_UH=ends.draft_head_UH if drafter.kept_U is not None else None)
        _remember_drafts(scratch / REFERENCE, drafter, ends, store, rows)
        (scratch / "best.json").write_text(json.dumps(chosen, indent=1) + "\n")
        shutil.copyfile(folder / "metrics.jsonl", scratch / "metrics.jsonl")
        (scratch / "plots").mkdir()
        draw_curves(history, scratch / "plots")
    return result()


def _remember_drafts(path: Path, drafter: Drafter, ends: Ends, store: HiddenStates, rows: Sequence[int]) -> None:
    """For the parity gate: what the drafter drafts for some rows in the verifier's precision, in which it is served."""
    dtype, device = getattr(torch, store.info["verifier"]["dtype"]), drafter.fc.weight.device
    served = Ends(store.frozen(), dtype=dtype, device=device, **store.info["logits"])
    remember(
        path,
        drafter=drafter.to(dtype).eval(),
        ends=served.for_drafter(drafter, num_tokens=ends.draft_vocab_size),
        rows=[store.read(row) for row in rows[:REMEMBERED_ROWS]],
        storage_dtype=store.info["storage_dtype"],
    )
