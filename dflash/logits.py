"""From the output of a verifier's LM head to its logits. Knows tensors only."""

from typing import NamedTuple

import torch


class LogitRule(NamedTuple):
    """From the LM head's output x to logits: `cap(scale * x)`, where cap(y) is `softcap * tanh(y / softcap)`, or y."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, head_output: torch.Tensor) -> torch.Tensor:
        scaled = head_output if self.scale == 1 else head_output * self.scale
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap
