"""The processes that train together: who is who, sums over all of them, weights held in shares. One is a special case.

Started by torchrun, which sets the environment that is read here. Knows tensors and drafters; no batch, file or step.

ddp: every rank holds all weights, and gradients are summed once per step. fsdp: each holds its share of every matrix
(FSDP2); gradients are averaged into shares during the backward pass.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash.devices import resolve_device
from dflash.drafter.model import Drafter

T = TypeVar("T")
DEADLINE = timedelta(minutes=10)
"""For the slowest rank in anything that all do together; saving and validation lie in between."""


@dataclass(frozen=True)
class Ranks:
    """This process among `world`, and the device it computes on."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum each over all ranks, in place and at the same time."""
        if self.world > 1:
            works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks what the first one has, in place."""
        for tensor in tensors if self.world > 1 else ():
            distributed.broadcast(tensor, 0)

    def any(self, flag: bool) -> bool:
        """Whether it is true at any rank; all learn the same."""
        if self.world == 1:
            return flag
        flags = torch.tensor(float(flag))
        distributed.all_reduce(flags)
        return bool(flags)

    def share(self, value: T) -> T:
        """What the first rank has."""
        return self.gather(value)[0]

    def gather(self, value: T) -> list[T]:
        """What each rank has, in order; small things only."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Meet the ranks that torchrun started, if it did. Each of several takes a GPU of its own where `device` allows."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks(resolve_device(device))
        return
    own = resolve_device(device)
    if own.type == "cuda":
        own = resolve_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(own)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo", timeout=DEADLINE)
    yield Ranks(own, distributed.get_rank(), world)
    distributed.destroy_process_group()  # not after an exception: others may wait for us, and must notice that we left


def shard(drafter: Drafter, ranks: Ranks, *, dtype: torch.dtype) -> None:
    """Replace the weights by this rank's shares, in place; they stay float32, and are gathered in `dtype` when used."""
    # that outputs which are views must not be changed in place, which nothing here does
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    parts = [part for layer in drafter.layers for part in (cast(nn.Module, layer.self_attn), layer)]
    for module in (*parts, drafter):  # attention apart: context and blocks are two calls of it
        fully_shard(module, mesh=mesh, mp_policy=policy)
        for method in ("context", "draft"):
            if hasattr(module, method):
                register_fsdp_forward_method(module, method)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, whether it is held in shares or not; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: Tensor) -> Tensor:
    """The part of it that this rank holds: a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_held(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has, held as `like` is."""
    tensor = tensor.to(like.device)
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)  # nothing is sent
    return tensor


def load_weights(drafter: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put whole weights into a drafter, however it holds them. Raises ValueError where they are not its own."""
    held = {name: (tuple(tensor.shape), tensor) for name, tensor in drafter.state_dict().items()}
    if {name: shape for name, (shape, _) in held.items()} != {name: tuple(t.shape) for name, t in weights.items()}:
        raise ValueError("the checkpoint's weights are not those of a drafter of these settings; begin anew")
    drafter.load_state_dict({name: as_held(tensor, held[name][1]) for name, tensor in weights.items()})
