"""Drafters on disk, in the published format: `model.safetensors` and `config.json`. Knows nothing of training."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash.drafter.model import Drafter, DrafterConfig


def save_drafter(folder: Path, drafter: Drafter) -> None:
    """Write the drafter, in the dtype it has, into a folder that exists."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = drafter.config.to_json(dtype=str(drafter.fc.weight.dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_drafter(folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Drafter:
    """Read a drafter, ready for inference. Raises ValueError naming weights that are missing, unknown or misshapen."""
    config = DrafterConfig.from_json(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        drafter = Drafter(config)
    weights = load_file(folder / "model.safetensors", device=str(device))
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for problem, names in (
        ("lacks", sorted(expected.keys() - found.keys())),
        ("has unknown", sorted(found.keys() - expected.keys())),
        ("has misshapen", sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])),
    ):
        if names:
            raise ValueError(f"{folder / 'model.safetensors'}: {problem} {', '.join(names)}; is config.json its own?")
    drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    return drafter.eval().requires_grad_(False)
