"""Which steps not to take: losses and gradients that are not finite or far off. Numbers in, a verdict out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RECENT = 100
ENOUGH = 20  # norms seen before there is a usual one


@dataclass(frozen=True)
class Steadiness:
    """The gradient norms of the last accepted steps, and how many steps were skipped. JSON-able by its fields."""

    norms: Sequence[float] = ()
    skipped: int = 0

    def objection(self, *, loss: float, grad_norm: float, spike_factor: float, clip_norm: float) -> str:
        """Why the step must not be taken; empty where it may. Spikes count from the 20th accepted norm on; 0: never.

        A gradient that clipping leaves as it is, is none: losses whose gradient is near zero at first may grow it.
        """
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"loss {loss:.6g}, gradient norm {grad_norm:.6g}"
        if not spike_factor or len(self.norms) < ENOUGH or grad_norm <= clip_norm:
            return ""
        if grad_norm > spike_factor * (usual := median(self.norms)):
            return f"gradient norm {grad_norm:.6g} is more than {spike_factor:g} times the usual {usual:.6g}"
        return ""

    def accepted(self, grad_norm: float) -> "Steadiness":
        return Steadiness([*self.norms, grad_norm][-RECENT:], self.skipped)

    def skipped_one(self) -> "Steadiness":
        return Steadiness(self.norms, self.skipped + 1)
