"""Drafters on disk, in the published format: `model.safetensors` and `config.json`. Knows nothing of training."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.drafter.model import Drafter
from dflash.drafter.shape import read_config
from dflash.drafter.vocabulary import MAPS, contradiction

HEAD = "lm_head.weight"
"""Beside a trimmed vocabulary: the rows of the verifier's head that are its tokens', since engines that share the
verifier's head share all of it."""


def save_drafter(folder: Path, drafter: Drafter, *, head_UH: Tensor | None = None) -> None:
    """Write the drafter, in the dtype it has, into a folder that exists; `head_UH` is for a trimmed vocabulary."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    if head_UH is not None:
        weights[HEAD] = head_UH.detach().to(drafter.fc.weight.dtype).cpu().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = drafter.config.to_json(dtype=str(drafter.fc.weight.dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def read_tensors(folder: Path, *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All tensors of a folder: of `model.safetensors`, or of the shards that its index names.

    Raises ValueError where a file is missing or not whole.
    """
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    names = [whole.name]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if outside := [name for name in names if Path(name).name != name]:
                raise ValueError(f"{outside[0]!r} is no file of this folder")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged ({error}); copy or download it again") from None
    elif not whole.exists():
        pickled = sorted(path.name for kind in ("*.bin", "*.pt") for path in folder.glob(kind))
        hint = f"; {pickled[0]} is not read, as it could run code: save it as safetensors" if pickled else ""
        raise ValueError(f"{whole} is missing; give the folder of a DFlash drafter{hint}")
    weights: dict[str, Tensor] = {}
    for path in (folder / name for name in names):
        if not path.exists():
            raise ValueError(f"{path} is missing, one of {len(names)} files that {index.name} names; download it again")
        try:
            weights |= load_file(path, device=str(device))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged ({error}); copy or train it again") from None
    return weights


def check_weights(place: Path, weights: Mapping[str, Tensor], drafter: Drafter) -> None:
    """Raises ValueError naming all weights that are missing, unknown, misshapen or of another kind than this drafter's,
    and maps of a draft vocabulary that contradict each other.
    """
    expected = drafter.state_dict()
    both = expected.keys() & weights.keys()
    problems = {
        "lacks": expected.keys() - weights.keys(),
        "has unknown": weights.keys() - expected.keys(),
        "has misshapen": (name for name in both if expected[name].shape != weights[name].shape),
        "has no numbers of the right kind in": (name for name in both if _kind(expected[name]) != _kind(weights[name])),
    }
    named = {problem: ", ".join(sorted(names)) for problem, names in problems.items()}
    if any(named.values()):
        listed = "; ".join(f"{problem} {names}" for problem, names in named.items() if names)
        raise ValueError(f"{place}: {listed}; is config.json its own?")
    if drafter.config.draft_vocab_size and (wrong := contradiction(*(weights[name] for name in MAPS))):
        raise ValueError(f"{place}: {wrong}; export or train the drafter again")


def _kind(tensor: Tensor) -> str:
    return "float" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"


def not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights that hold infinities, or what is no number."""
    return [name for name, weight in weights.items() if not weight.float().isfinite().all()]


def read_weights(folder: Path, drafter: Drafter, *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The weights of a folder for this drafter, without the head of a trimmed vocabulary: it is the verifier's.

    Raises ValueError as `read_tensors` and `check_weights` do.
    """
    weights = read_tensors(folder, device=device)
    if drafter.config.draft_vocab_size:
        weights.pop(HEAD, None)
    check_weights(folder / "model.safetensors", weights, drafter)
    return weights


def load_drafter(folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Drafter:
    """Read a drafter, ready for inference. Raises ValueError as `read_config` and `read_weights` do."""
    with torch.device("meta"):
        drafter = Drafter(read_config(folder))
    weights = read_weights(folder, drafter, device=device)
    cast = {name: tensor if name in MAPS else tensor.to(dtype) for name, tensor in weights.items()}
    drafter.load_state_dict(cast, assign=True)
    return drafter.eval().requires_grad_(False)
