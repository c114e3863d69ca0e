"""The last layers of a verifier, for a drafter to start from. Knows a loaded verifier; no drafter and no file."""

from typing import Any

import torch

from dflash.verifier import Verifier


def last_layers(verifier: Verifier, count: int) -> dict[str, torch.Tensor]:
    """Weights of the last `count` decoder layers, and the final norm, under the names that a drafter's have.

    `layers.0` is the first of these. What a layer has under another name, or does not have, is left out; so are biases
    and norms that do more than scale. Norms that scale by 1 + weight are converted.
    """
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    found: dict[str, torch.Tensor | None] = {"norm": _scale(verifier.final_norm)}
    for i, layer in enumerate(list(verifier.decoder.layers)[-count:]):
        modules = dict(layer.named_modules())
        norms = {name: name for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm")}
        # the one before the MLP; where there is none before attention, what follows attention is something else
        if "input_layernorm" in modules:
            before_mlp = "pre_feedforward_layernorm"
            norms["post_attention_layernorm"] = before_mlp if before_mlp in modules else "post_attention_layernorm"
        for ours, theirs in norms.items():
            found[f"layers.{i}.{ours}"] = _scale(modules.get(theirs))
        for name in projections:
            found[f"layers.{i}.{name}"] = getattr(modules.get(name), "weight", None)
    return {f"{name}.weight": weight.detach() for name, weight in found.items() if weight is not None}


@torch.no_grad()
def _scale(norm: Any) -> torch.Tensor | None:
    """What an RMS norm multiplies by: its weight, or 1 + weight. None where it is not one of these."""
    weight = getattr(norm, "weight", None)
    if weight is None or isinstance(norm, torch.nn.LayerNorm):
        return None
    scaled = norm(torch.ones_like(weight, dtype=torch.float32))  # whose root mean square is 1
    candidates = (weight, 1 + weight.float())
    return next((scale for scale in candidates if torch.allclose(scaled, scale.float(), rtol=1e-4, atol=1e-5)), None)
