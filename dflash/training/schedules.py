"""What changes with the step: learning rate, feature noise, seeds. Numbers in, numbers out."""

import hashlib
import math


def learning_rate_factor(step: int, *, total: int, warmup_share: float, kind: str, decay_share: float) -> float:
    """Factor of the peak at 0-based `step`: linear up, 1 at the end of the warmup, 0 at `total`.

    In between `cosine` and `linear` fall all the way; `wsd` stays at 1 until the last `decay_share` of all steps, then
    falls linearly.
    """
    warmup = round(total * warmup_share)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    falling_from = max(warmup, total - round(total * decay_share)) if kind == "wsd" else warmup
    fallen = max(0, step - falling_from) / max(1, total - falling_from)
    return 0.5 * (1 + math.cos(math.pi * fallen)) if kind == "cosine" else 1 - fallen


def noise_std(step: int, *, total: int, warmup_share: float, start: float, end: float) -> float:
    """Deviation of the feature noise: 0 to `start` in the warmup, then linearly to `end` at the last."""
    warmup = round(total * warmup_share)
    if step < warmup:
        return start * step / warmup
    return start + (end - start) * (step - warmup) / max(1, total - 1 - warmup)


def derived_seed(*parts: int) -> int:
    """A seed for one purpose, a function of its parts alone: nothing random needs to be saved in a checkpoint."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
