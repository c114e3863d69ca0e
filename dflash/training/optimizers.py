"""Optimizers of a drafter, their learning rates, and their state as named tensors. Knows no schedule and no files."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


def make_optimizers(
    drafter: nn.Module,
    *,
    kind: str,
    learning_rate: float,
    muon_learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> list[Optimizer]:
    """`adamw` for everything, or `muon` for the matrices, `fc` among them, and AdamW for the norms."""
    matrices = [parameter for parameter in drafter.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in drafter.parameters() if parameter.ndim != 2]
    if kind == "adamw":
        return [AdamW(matrices + others, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)]
    return [
        Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True),
    ]


def set_learning_rates(optimizers: Sequence[Optimizer], *, factor: float) -> None:
    """`factor` times the peak that each optimizer was made with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor


def average_and_clip(parameters: Sequence[Tensor], *, weight: float, clip_norm: float) -> float:
    """Divide summed gradients by the step's total weight, then clip; returns the norm before clipping.

    One division for the whole step, so that micro-batches of any size add up to the same gradient.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_(gradients, max(weight, torch.finfo(torch.float32).tiny))
    norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm.item()


def _states(drafter: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Optimizer, nn.Parameter]]:
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield names[parameter], optimizer, parameter


def state_tensors(drafter: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All optimizer state, named `parameter:state`."""
    return {
        f"{name}:{key}": value
        for name, optimizer, parameter in _states(drafter, optimizers)
        for key, value in optimizer.state[parameter].items()
    }


def load_state_tensors(drafter: nn.Module, optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put back what `state_tensors` gave."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, key = full_name.split(":")
        by_name.setdefault(name, {})[key] = tensor
    for name, optimizer, parameter in _states(drafter, optimizers):
        optimizer.state[parameter] = {key: tensor.to(parameter.device) for key, tensor in by_name[name].items()}
