"""What changes with the step: learning rate, feature noise, seeds. Numbers in, numbers out."""

import hashlib
import math


def learning_rate_factor(step: int, *, total: int, warmup_share: float) -> float:
    """Factor of the peak at 0-based `step`: linear up, 1 at the end of the warmup, then a cosine to 0 at `total`."""
    warmup = round(total * warmup_share)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def noise_std(step: int, *, total: int, warmup_share: float, peak: float) -> float:
    """Deviation of the feature noise: linear from 0 at step 0 to `peak` at the end of the warmup, then flat."""
    warmup = round(total * warmup_share)
    return peak * min(1.0, step / warmup) if warmup else peak


def derived_seed(*parts: int) -> int:
    """A seed for one purpose, a function of its parts alone: nothing random needs to be saved in a checkpoint."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
