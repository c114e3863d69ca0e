"""What a drafter's weights are before its first step. Knows drafters on disk and tensors; does not load a verifier."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dflash.drafter.export import read_weights
from dflash.drafter.model import Drafter
from dflash.drafter.shape import differences, read_config, refuse_problems
from dflash.drafter.vocabulary import MAPS

log = logging.getLogger(__name__)


@torch.no_grad()
def initialise(drafter: Drafter, source: str, *, verifier_layers: Mapping[str, Tensor] | None = None) -> list[str]:
    """Set the weights of a new drafter in place; returns the names of those that keep their random values.

    `random` keeps all. `verifier` takes `verifier_layers`, what `dflash.last_layers` gives, wherever name and
    shape agree, and passes the last tap on through `fc`; what stays random is named in one line of the log. Anything
    else is the folder of a drafter of the same shape: raises ValueError naming every difference of configs and weights.
    """
    own = drafter.weights()
    if source == "random":
        return sorted(own)
    if source != "verifier":
        drafter.load_state_dict(_of_folder(Path(source).expanduser(), drafter), strict=False)
        return []
    assert verifier_layers is not None, "whoever asks for the verifier's layers loads them"
    weights = {n: w for n, w in verifier_layers.items() if n in own and own[n].shape == w.shape}
    if drafter.config.hidden_size == drafter.config.verifier_hidden_size:
        fc_HF = torch.zeros_like(drafter.fc.weight)
        fc_HF[:, -len(fc_HF) :] = torch.eye(len(fc_HF))
        weights["fc.weight"] = fc_HF
    drafter.load_state_dict(weights, strict=False)
    kept = sorted(name for name in own.keys() - weights.keys() if own[name].ndim == 2)
    log.info(
        "the drafter starts as the verifier's last layers: %d of %d weights%s",
        *(len(weights), len(own), f"; at random start {', '.join(kept)}" if kept else ""),
    )
    return kept


def _of_folder(folder: Path, drafter: Drafter) -> dict[str, Tensor]:
    found = read_config(folder)
    problems = differences(drafter.config, found)
    weights: dict[str, Tensor] = {}
    try:
        with torch.device("meta"):
            shaped = Drafter(replace(drafter.config, draft_vocab_size=found.draft_vocab_size))
        weights = read_weights(folder, shaped)
    except ValueError as error:
        problems.append(str(error))
    refuse_problems(folder, problems)
    return {name: weight for name, weight in weights.items() if name not in MAPS}
