"""The shape of a drafter: from its verifier's config.json, or from a published one. RoPE (arXiv 2104.09864) included.

Knows configs as dictionaries. Does without torch, so that a plan can ask whether a shape works out.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash.drafter.published import DEFAULT_EPS, FULL, SLIDING, Published, checked

INITIAL_STD = 0.02
ROPE_THETA = 10_000.0
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The kinds of RoPE and the numbers that each cannot do without."""


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter; all but the block, the taps and the depth is the verifier's, unless asked for.

    A sliding layer has one bound, that of the authors' package (dflash 0.1.0) and of SpecForge 0.2.0: slot k of the
    block at anchor a sees the positions from a + k - (sliding_window - 1) on, of the context those before a, and of its
    block the slots up to k. So a full layer looks at its block in both directions, a sliding one only back.
    """

    vocab_size: int
    hidden_size: int
    verifier_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    """As `rope_parameters` gives them."""
    max_position_embeddings: int
    block_size: int
    layer_types: tuple[str, ...]
    sliding_window: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    draft_vocab_size: int = 0
    """Tokens that can be drafted; 0: all."""

    def __post_init__(self) -> None:
        """Raises ValueError for what no layer can be."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads are not a multiple of {self.num_key_value_heads} "
                "key/value heads; set num_key_value_heads to a divisor"
            )
        rotated = int(self.head_dim * self.rope["partial_rotary_factor"])
        if rotated % 2 or not rotated:
            raise ValueError(f"{rotated} of {self.head_dim} dimensions rotate; choose an even head_dim")
        if SLIDING in self.layer_types and self.sliding_window < self.block_size:
            raise ValueError(
                f"sliding_window {self.sliding_window} is smaller than a block of {self.block_size}; raise it"
            )
        if not 0 <= self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab_size} is no part of {self.vocab_size} tokens; choose fewer, "
                "or 0 for all"
            )

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @classmethod
    def from_verifier(
        cls,
        verifier_config: dict[str, Any],
        *,
        block_size: int,
        num_layers: int,
        mask_token_id: int,
        target_layer_ids: list[int],
        hidden_size: int = 0,
        intermediate_size: int = 0,
        num_attention_heads: int = 0,
        num_key_value_heads: int = 0,
        head_dim: int = 0,
        sliding_window: int = 0,
        sliding_layers: Sequence[int] = (),
        draft_vocab_size: int = 0,
    ) -> "DrafterConfig":
        """From the verifier's config.json, RoPE included; 0 and empty mean what DrafterShapeConfig says.

        Raises ValueError for a shape that does not work out, and for a kind of RoPE that is not known.
        """
        text = verifier_config.get("text_config", verifier_config)
        heads = text["num_attention_heads"]
        if not (intermediate_size := intermediate_size or text.get("intermediate_size") or 0):
            raise ValueError(
                "the verifier's config.json has no intermediate_size; set training.shape.intermediate_size"
            )
        if outside := [layer for layer in sliding_layers if not 0 <= layer < num_layers]:
            raise ValueError(f"training.shape.sliding_layers: {outside} are not among {num_layers} layers")
        if sliding_layers and not sliding_window:
            raise ValueError("training.shape.sliding_layers need a window; set training.shape.sliding_window")
        windowed = (sliding_layers or range(num_layers - 1)) if sliding_window else ()
        if sliding_window and not windowed:
            raise ValueError(
                f"training.shape.sliding_window: {sliding_window}, but the only layer, which is the last, sees all; "
                "set training.shape.sliding_layers to [0], or the window to 0"
            )
        return cls(
            vocab_size=text["vocab_size"],
            hidden_size=hidden_size or text["hidden_size"],
            verifier_hidden_size=text["hidden_size"],
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads or heads,
            num_key_value_heads=num_key_value_heads or text.get("num_key_value_heads") or heads,
            head_dim=head_dim or text.get("head_dim") or text["hidden_size"] // heads,
            rms_norm_eps=text.get("rms_norm_eps", DEFAULT_EPS),
            rope=rope_parameters(text),
            max_position_embeddings=text["max_position_embeddings"],
            block_size=block_size,
            layer_types=tuple(SLIDING if layer in windowed else FULL for layer in range(num_layers)),
            sliding_window=sliding_window,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
            num_target_layers=text["num_hidden_layers"],
            draft_vocab_size=draft_vocab_size,
        )

    def to_json(self, *, dtype: str) -> dict[str, Any]:
        """The published config.json; RoPE under the keys of Transformers 4 and of 5.

        `target_hidden_size` is there only where it differs from `hidden_size`: other engines do not know it; likewise
        `draft_vocab_size`, where the draft vocabulary is trimmed. An engine
        that builds on Transformers' Qwen3, as the authors' package does, rotates whole heads and does not look at
        `partial_rotary_factor`.
        """
        rope = {name: value for name, value in self.rope.items() if (name, value) != ("partial_rotary_factor", 1.0)}
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        settings = {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "dtype": dtype,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": INITIAL_STD,
            "intermediate_size": self.intermediate_size,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "rope_scaling": scaling if len(scaling) > 1 else None,
            "rope_theta": self.rope["rope_theta"],
            "sliding_window": self.sliding_window or None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": SLIDING in self.layer_types,
            "vocab_size": self.vocab_size,
        }
        if self.verifier_hidden_size != self.hidden_size:
            settings["target_hidden_size"] = self.verifier_hidden_size
        if self.draft_vocab_size:
            settings["draft_vocab_size"] = self.draft_vocab_size
        return settings

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> "DrafterConfig":
        """From a published config.json. Raises ValueError where a field is missing or is not one of ours."""
        found = checked(Published, settings)
        layers = found.num_hidden_layers
        types = tuple(found.layer_types or [FULL] * layers)
        given = {name: settings[name] for name in found.model_fields_set}
        config = cls.from_verifier(
            given | {"num_hidden_layers": found.num_target_layers},
            block_size=found.block_size,
            num_layers=layers,
            mask_token_id=found.dflash_config.mask_token_id,
            target_layer_ids=found.dflash_config.target_layer_ids,
        )
        draft_vocab_size = found.draft_vocab_size or 0
        return replace(
            config,
            layer_types=types,
            sliding_window=(found.sliding_window or 0) if SLIDING in types else 0,
            verifier_hidden_size=found.target_hidden_size or config.hidden_size,
            draft_vocab_size=0 if draft_vocab_size == config.vocab_size else draft_vocab_size,
        )


def differences(ours: DrafterConfig, theirs: DrafterConfig) -> list[str]:
    """`intermediate_size is 40, here 16` for everything in which weights of one do not fit the other."""
    here, there = asdict(ours), asdict(theirs)
    # nothing is computed from the longest text of a verifier, and any tokens can be drafted by the same weights
    fitting = ("max_position_embeddings", "draft_vocab_size")
    return [f"{n} is {there[n]}, here {v}" for n, v in here.items() if there[n] != v and n not in fitting]


def refuse_problems(folder: Path, problems: Sequence[str]) -> None:
    """Raises ValueError naming the problems, if any, for which training cannot start from the drafter of a folder."""
    if problems:
        raise ValueError(
            f"training.initialisation: the drafter in {folder} is another one: {'; '.join(problems)}; "
            "set training to its values, or choose another start"
        )


def read_config(folder: Path) -> DrafterConfig:
    """Raises ValueError where it is not a drafter's, or asks for what is not known here."""
    path = folder / "config.json"
    try:
        return DrafterConfig.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give the folder of a DFlash drafter") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def rope_parameters(settings: dict[str, Any]) -> dict[str, Any]:
    """All RoPE parameters of a config.json, of Transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

    Where layer types have different ones, those of full attention. Sections of a multimodal RoPE are left out: the
    three positions of a text token are equal, so that all sections rotate alike. Raises ValueError for kinds that are
    not in ROPE_FIELDS, and for numbers that are missing.
    """
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    given = given.get("full_attention") or given
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "default" if kind == "mrope" else kind
    if kind not in ROPE_FIELDS:
        raise ValueError(f"RoPE of type {kind!r} is not supported, only {', '.join(ROPE_FIELDS)}")
    theta = given.get("rope_theta") or settings.get("rope_theta") or ROPE_THETA
    partial = given.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
    rope = {"rope_type": kind, "rope_theta": float(theta), "partial_rotary_factor": float(partial)}
    known = {"original_max_position_embeddings": settings.get("max_position_embeddings")} | given
    if length := settings.get("original_max_position_embeddings"):
        known["original_max_position_embeddings"] = length
    if missing := [name for name in ROPE_FIELDS[kind] if known.get(name) is None]:
        raise ValueError(f"RoPE of type {kind!r} lacks {', '.join(missing)}")
    rope |= {name: known[name] for name in ROPE_FIELDS[kind]}
    return rope | _yarn_defaults(known) if kind == "yarn" else rope


def _yarn_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """What YaRN (arXiv 2309.00071) derives or assumes, made explicit; DeepSeek's mscales give one attention factor."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(given["factor"]) + 1.0 if given["factor"] > 1 else 1.0

    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        both = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = mscale(both[0]) / mscale(both[1]) if both[0] and both[1] else mscale(1.0)
    return {
        "attention_factor": attention_factor,
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "truncate": given.get("truncate", True),
    }
