"""Optimizers of a drafter, their learning rates, averaged weights, and all state as named tensors.

Knows no schedule and no files. Weights may be held in shares by several ranks; what is named here is whole.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from dflash.training.ranks import Ranks, as_held, own, whole


def make_optimizers(
    drafter: nn.Module,
    *,
    kind: str,
    learning_rate: float,
    muon_learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> list[Optimizer]:
    """`adamw` for everything, or `muon` for the matrices, `fc` among them, and AdamW for the norms.

    Where matrices are held in shares, Muon's result is the same but for the rounding of its bfloat16 orthogonalisation.
    """
    matrices = [parameter for parameter in drafter.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in drafter.parameters() if parameter.ndim != 2]
    if kind == "adamw":
        return [AdamW(matrices + others, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)]
    return [
        Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True),
    ]


def missing_moments(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Memory, not filled, as large as the moments that the optimizers will make in their first step."""
    return [
        torch.empty_like(own(parameter))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not optimizer.state.get(parameter)
        for _ in range(2 if isinstance(optimizer, AdamW) else 1)
    ]


def set_learning_rates(optimizers: Sequence[Optimizer], *, factor: float) -> None:
    """`factor` times the peak that each optimizer was made with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor


def average_and_clip(parameters: Sequence[nn.Parameter], *, weight: Tensor, clip_norm: float, ranks: Ranks) -> Tensor:
    """Add up the ranks' gradients, divide by the step's total weight, then clip; returns the norm before clipping.

    One division for the whole step, so that micro-batches of any size, at any rank, add up to the same gradient.
    `weight` is that of all ranks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    weight = weight.float().clamp(min=torch.finfo(torch.float32).tiny)
    if any(gradient is not own(gradient) for gradient in gradients):
        weight = weight / ranks.world  # shares hold the average over ranks
    else:
        ranks.add_up(gradients)
    torch._foreach_div_([own(gradient) for gradient in gradients], weight)
    norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return whole(norm)


def update_average(average: Mapping[str, Tensor], drafter: nn.Module, *, decay: float) -> None:
    """Exponential moving average of the weights, in place: decay * average + (1 - decay) * weights."""
    weights = dict(drafter.named_parameters())
    names = list(average)
    torch._foreach_lerp_(
        [own(average[name]) for name in names], [own(weights[name].detach()) for name in names], 1 - decay
    )


def _states(drafter: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Optimizer, nn.Parameter]]:
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield names[parameter], optimizer, parameter


def state_tensors(drafter: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All optimizer state, whole, named `parameter:state`; every rank must ask."""
    return {
        f"{name}:{key}": whole(value)
        for name, optimizer, parameter in _states(drafter, optimizers)
        # sorted: ranks must ask for the same at the same time, and files come back in any order
        for key, value in sorted(optimizer.state[parameter].items())
    }


def load_state_tensors(drafter: nn.Module, optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put back what `state_tensors` gave, of optimizers of the same kinds."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, key = full_name.split(":")
        by_name.setdefault(name, {})[key] = tensor
    for name, optimizer, parameter in _states(drafter, optimizers):
        state = by_name.get(name, {})
        optimizer.state[parameter] = {key: as_held(tensor, parameter) for key, tensor in state.items()}
