"""Where tensors live, and that they leave. Knows torch and nothing else."""

import torch


def give_back() -> None:
    """Return the memory of tensors that are gone to the GPUs, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU. Raises ValueError for a device this machine lacks."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise ValueError(f"device: {name!r} is unknown; give auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: {name!r} asked for, but {torch.cuda.device_count()} GPUs are visible; give auto or cpu"
        )
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(index or 0))
