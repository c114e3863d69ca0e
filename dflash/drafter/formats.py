"""How other projects write a DFlash drafter: their config.json and weight names made the published ones, and back.

Knows dictionaries and tensors; reads no file and no verifier. The published layout (z-lab's package 0.1.0, SpecForge
0.2.0, vLLM, SGLang) is that of DrafterConfig.to_json. Beside it there are

    speculators   layers in `transformer_layer_config`; tap ids count from the embedding, so they are ours + 1
    torchspec     everything at the top; `num_target_layers` is the number of taps there
"""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import Field, PositiveInt
from torch import Tensor

from dflash.drafter.published import SLIDING, PositiveNumber, Published, Settings, checked
from dflash.drafter.shape import DrafterConfig
from dflash.pinning import tap_layers

log = logging.getLogger(__name__)

PUBLISHED, SPECULATORS, TORCHSPEC = "dflash", "speculators", "torchspec"
FORMATS = (PUBLISHED, SPECULATORS)
"""Those that a drafter is exported to."""
SPECULATORS_VERSION = "0.9.0"
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
PREFIX = "draft_model."  # of weights that were saved with what trained them
RENAMED = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}  # TorchSpec's
BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")
"""The verifier's weights and the vocabulary, which some formats carry along."""
HARMLESS = {  # of dflash_config
    "mask_token_id", "target_layer_ids", "block_size",
    "output_multiplier", "final_logit_softcapping",  # the verifier's own rule is used for logits
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {"input_embedding_scale": (None, 1), "use_aux_hidden_state": (None, True)}
"""Of dflash_config and the top level, what may be there with these values; others of OTHER_METHODS must be off."""
OTHER_METHODS = (
    "attention_bias", "attention_sink_bias", "attention_value_scale", "causal", "conv_kernel_size",
    "enable_confidence_head", "markov_rank", "projector_type", "pure_draft_prefix_len", "sample_from_anchor",
    "selector_rank", "shift_label", "use_swa",
)  # fmt: skip


class Named(Settings):
    name_or_path: str | None = None


class Proposal(Settings):
    verifier: Named | None = None


class Origin(Settings):
    """Where the speculators format says which verifier a drafter is for."""

    speculators_config: Proposal | None = None


class Speculators(Origin):
    transformer_layer_config: dict[str, Any]
    aux_hidden_state_layer_ids: list[int] = Field(min_length=1)
    block_size: Any
    mask_token_id: Any
    draft_vocab_size: Any
    sample_from_anchor: Any = False
    sliding_window_non_causal: bool | None = None


class Plain(Settings):
    dflash_config: dict[str, Any] | None = None


class TorchSpec(Plain):
    target_num_hidden_layers: PositiveInt
    num_target_layers: int = Field(ge=1, le=1000)
    target_layer_ids: list[int] | None = None
    rope_theta: PositiveNumber


def format_of(settings: Mapping[str, Any]) -> str:
    """Which format a config.json is of. Raises ValueError for a drafter of another method."""
    if "speculators_model_type" in settings:
        if settings["speculators_model_type"] != "dflash":
            raise ValueError(f"a speculator of type {settings['speculators_model_type']!r}; only dflash is known here")
        return SPECULATORS
    architectures = settings.get("architectures") or []
    if not isinstance(architectures, list) or any(name not in ARCHITECTURES for name in architectures):
        raise ValueError(f"architectures {architectures!r} are unknown; only {ARCHITECTURES[0]} is known here")
    return TORCHSPEC if settings.get("target_num_hidden_layers") else PUBLISHED


def as_published(settings: Mapping[str, Any], *, num_target_layers: int, block_size: int = 0) -> dict[str, Any]:
    """A config.json of any known format as the published one, for a verifier of so many layers.

    `block_size` is for a format that does not say it, 0 where it is not given. Raises ValueError, naming the field,
    for what is missing, contradicts itself or the arguments, or is no part of the method as it is known here.
    """
    found = READ[format_of(settings)](settings)
    _refuse_others(found)
    method = found.get("dflash_config") or {}
    blocks = found.get("block_size") or method.get("block_size") or block_size
    if not blocks:
        raise ValueError("has no block_size; give the one that it was trained with")
    if block_size and blocks != block_size:
        raise ValueError(f"has block_size {blocks}, not {block_size}")
    mask_token_id = method.get("mask_token_id", found.get("mask_token_id"))
    if mask_token_id is None:
        raise ValueError("has no mask_token_id; add it to its dflash_config")
    chosen = method.get("target_layer_ids") or found.get("target_layer_ids") or []
    published = {"num_target_layers": num_target_layers, **found, "block_size": blocks}
    published["dflash_config"] = {"mask_token_id": mask_token_id, "target_layer_ids": chosen}
    shape = checked(Published, published)
    if shape.num_target_layers != num_target_layers:
        raise ValueError(f"it is for a verifier of {shape.num_target_layers} layers, not of {num_target_layers}")
    published["dflash_config"]["target_layer_ids"] = tap_layers(num_target_layers, shape.num_hidden_layers, chosen)
    return published


def _published(settings: Mapping[str, Any]) -> dict[str, Any]:
    checked(Plain, settings)
    return dict(settings)


def _speculators(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = checked(Speculators, settings)
    layers, ids = dict(found.transformer_layer_config), found.aux_hidden_state_layer_ids
    if min(ids) < 1:
        raise ValueError(f"aux_hidden_state_layer_ids {ids} hold the embedding, 0, which is no tap here")
    types = layers.get("layer_types")
    if isinstance(types, list) and SLIDING in types and found.sliding_window_non_causal:
        layers["is_causal"] = False
    method = {"mask_token_id": found.mask_token_id, "target_layer_ids": [layer - 1 for layer in ids]}
    extra = {"sample_from_anchor": found.sample_from_anchor}
    shape = {"block_size": found.block_size, "draft_vocab_size": found.draft_vocab_size}
    return layers | shape | {"dflash_config": method | extra}


def _torchspec(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = checked(TorchSpec, settings)
    layers = found.target_num_hidden_layers
    return dict(settings) | {
        "num_target_layers": layers,
        "target_layer_ids": tap_layers(layers, found.num_target_layers, found.target_layer_ids or []),
        # its rotation knows nothing else
        "rope_parameters": {"rope_type": "default", "rope_theta": settings["rope_theta"]},
        "rope_scaling": None,
        "layer_types": None,
    }


READ = {PUBLISHED: _published, SPECULATORS: _speculators, TORCHSPEC: _torchspec}


def _refuse_others(settings: Mapping[str, Any]) -> None:
    method = settings.get("dflash_config") or {}
    for name, value in {**settings, **method}.items():
        if (name in OTHER_METHODS and value) or (name in NEUTRAL and value not in NEUTRAL[name]):
            raise ValueError(f"{name} {value!r} is no part of the method as it is known here")
    if settings.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {settings['hidden_act']!r} is unknown; drafters here have silu")
    if unknown := sorted(method.keys() - HARMLESS - set(OTHER_METHODS) - NEUTRAL.keys()):
        log.warning("config.json: dflash_config has %s, which is unknown here and left out", ", ".join(unknown))


def own_weights(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The drafter's weights under the published names, and those that are the verifier's."""
    own: dict[str, Tensor] = {}
    borrowed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        name = name.removeprefix(PREFIX)
        for theirs, ours in RENAMED.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        (borrowed if name in BORROWED else own)[name] = weight
    return own, borrowed


def speculators_config(config: DrafterConfig, *, dtype: str, verifier: str, architectures: list[str]) -> dict[str, Any]:
    """config.json of the speculators format (0.9.0). `verifier` is a hub id or a folder.

    Raises ValueError for layers with a window: engines that read this format give all layers one kind of mask.
    """
    if SLIDING in config.layer_types:
        raise ValueError(
            f"layers with a window ({', '.join(config.layer_types)}) beside others cannot be told apart in the "
            f"{SPECULATORS} format; export to {PUBLISHED}"
        )
    layers = config.to_json(dtype=dtype)
    for name in ("architectures", "block_size", "dflash_config", "draft_vocab_size", "num_target_layers"):
        layers.pop(name, None)
    return {
        "architectures": [ARCHITECTURES[0]],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        # vLLM 0.32 reads false as: every layer is causal, full attention too
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }
