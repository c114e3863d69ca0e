"""The DFlash drafter (arXiv 2602.06036): a few Qwen3-style layers that predict a block of tokens in one pass.

Knows tensors only: no tokenizer, no files, no loss. Weight names are those of the published drafters.

    context = drafter.context(features)                  keys and values of every layer, from the verifier's taps
    hidden  = drafter.draft(ends, ids, anchors_A=…)      one hidden state per predicted slot; ends.logits(hidden)

P tokens of all documents, F features (taps * hidden), H hidden, A anchors of all documents, W block size,
S = W-1 predicted slots, V vocabulary, Q query heads, K key/value heads, D head width
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.drafter.attention import Visible, block_attention
from dflash.drafter.blocks import Documents
from dflash.logits import LogitRule


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter; everything but the block, the taps and the depth is the verifier's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    @classmethod
    def from_verifier(
        cls,
        verifier_config: dict[str, Any],
        *,
        block_size: int,
        num_layers: int,
        mask_token_id: int,
        target_layer_ids: list[int],
    ) -> "DrafterConfig":
        """From the verifier's config.json. Raises ValueError for scaled RoPE, which a drafter would have to share."""
        text = verifier_config.get("text_config", verifier_config)
        heads = text["num_attention_heads"]
        return cls(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(text),
            max_position_embeddings=text["max_position_embeddings"],
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
            num_target_layers=text["num_hidden_layers"],
        )

    def to_json(self, *, dtype: str) -> dict[str, Any]:
        """The published config.json; RoPE under the key of transformers 4 and of 5."""
        return {
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
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> "DrafterConfig":
        """From a published config.json. Raises ValueError where a field is missing or RoPE is scaled."""
        try:
            return cls.from_verifier(
                settings | {"num_hidden_layers": settings["num_target_layers"]},
                block_size=settings["block_size"],
                num_layers=settings["num_hidden_layers"],
                mask_token_id=settings["dflash_config"]["mask_token_id"],
                target_layer_ids=settings["dflash_config"]["target_layer_ids"],
            )
        except KeyError as error:
            raise ValueError(f"the drafter's config.json has no {error}; is it a DFlash drafter?") from None


def _rope_theta(settings: dict[str, Any]) -> float:
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"RoPE of type {kind!r} is not supported yet; use a verifier with plain RoPE")
    return float(rope.get("rope_theta") or settings.get("rope_theta") or 10_000.0)


class Ends:
    """The verifier's frozen embedding and LM head, between which a drafter works."""

    def __init__(
        self,
        frozen: dict[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """`frozen` holds `embed_tokens.weight` and, where the verifier has them, `lm_head.weight` and `lm_head.bias`.

        `scale` and `softcap` are the verifier's rule from the head's output to its logits.
        """
        own = {name: weight.to(device=device, dtype=dtype) for name, weight in frozen.items()}
        self.embedding_VH = own["embed_tokens.weight"]
        self.head_VH = own.get("lm_head.weight", self.embedding_VH)
        self.bias_V = own.get("lm_head.bias")
        self.rule = LogitRule(scale, softcap)

    @property
    def vocab_size(self) -> int:
        return self.head_VH.shape[0]

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding_VH)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, H) to (…, V), in the ends' dtype: the verifier's own where `hidden` is its final state."""
        return self.rule.apply(F.linear(hidden.to(self.head_VH.dtype), self.head_VH, self.bias_V))

    def gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """d loss / d hidden, from d loss / d logits and these logits."""
        if self.rule.softcap is not None:
            grad = grad * (1 - (logits / self.rule.softcap).square())
        if self.rule.scale != 1:
            grad = grad * self.rule.scale
        return grad.to(self.head_VH.dtype) @ self.head_VH


@dataclass
class Context:
    """What a drafter knows of documents: each layer's keys (RoPE applied) and values, KPD.

    A single document may begin at a position `start` and may grow.
    """

    documents: Documents
    start: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.documents.total

    def append(self, other: "Context") -> "Context":
        """Continue, in place, with the positions that follow; returns itself."""
        assert other.start == self.start + self.length, f"gap: {self.start}+{self.length}, then {other.start}"
        self.documents = Documents((self.length + other.length,))
        self.keys = [torch.cat(pair, 1) for pair in zip(self.keys, other.keys, strict=True)]
        self.values = [torch.cat(pair, 1) for pair in zip(self.values, other.values, strict=True)]
        return self


class Linear(nn.Linear):
    """No bias, and no initialisation of its own: that would draw from the global random state."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Computed in float32 whatever the dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def _rope(positions: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), each positions.shape + (head_dim,), in float32: bfloat16 frequencies err by radians at 2,048."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[..., None].float() * frequencies
    return torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves rotated against each other, as in Llama and Qwen; float32 inside."""
    low, high = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = D = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * D)
        self.k_proj = Linear(config.hidden_size, config.num_key_value_heads * D)
        self.v_proj = Linear(config.hidden_size, config.num_key_value_heads * D)
        self.o_proj = Linear(config.num_attention_heads * D, config.hidden_size)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def context(self, ctx_PH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k_KPD = self.k_norm(self.heads(self.k_proj(ctx_PH))).transpose(0, 1)
        return _rotate(k_KPD, cos, sin), self.heads(self.v_proj(ctx_PH)).transpose(0, 1)

    def forward(
        self, x_AWH: Tensor, cos: Tensor, sin: Tensor, k_KPD: Tensor, v_KPD: Tensor, visible: Visible
    ) -> Tensor:
        q_AWQD = _rotate(self.q_norm(self.heads(self.q_proj(x_AWH))), cos, sin)
        k_AWKD = _rotate(self.k_norm(self.heads(self.k_proj(x_AWH))), cos, sin)
        v_AWKD = self.heads(self.v_proj(x_AWH))
        return self.o_proj(block_attention(q_AWQD, k_AWKD, v_AWKD, k_KPD, v_KPD, visible).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_AWH: Tensor, *attention: Any) -> Tensor:
        x_AWH = x_AWH + self.self_attn(self.input_layernorm(x_AWH), *attention)
        return x_AWH + self.mlp(self.post_attention_layernorm(x_AWH))


class Drafter(nn.Module):
    """Matrices start as N(0, 0.02) drawn from `generator` (default: seed 0), norms as ones."""

    def __init__(self, config: DrafterConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not self.fc.weight.is_meta:
            generator = generator or torch.Generator().manual_seed(0)
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=0.02, generator=generator)

    def _layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return _rope(positions, head_dim=self.config.head_dim, theta=self.config.rope_theta)

    def context(self, features_PF: Tensor, documents: Documents | None = None, *, start: int = 0) -> Context:
        """Keys and values of the verifier's features; not layer-normed per layer.

        Without `documents` all are of one, at the positions `start`, `start`+1, …
        """
        ctx_PH = self.hidden_norm(self.fc(features_PF.to(self.fc.weight.dtype)))
        context = Context(documents or Documents((len(ctx_PH),)), start)
        cos, sin = self._rope(start + context.documents.positions_P(ctx_PH.device))
        for layer in self._layers():
            k_KPD, v_KPD = layer.self_attn.context(ctx_PH, cos, sin)
            context.keys.append(k_KPD)
            context.values.append(v_KPD)
        return context

    def forward(self, blocks_AWH: Tensor, *, anchors_A: Tensor, context: Context) -> Tensor:
        """Final hidden states (A, W, H) of embedded blocks that lie at the tokens anchor, anchor+1, … of the context.

        The first token of the context has the number `context.start`. A block sees its own document's context strictly
        before its anchor, and itself in both directions. Cheapest if anchors ascend.
        """
        W = blocks_AWH.shape[1]
        tokens_A = anchors_A - context.start
        first_A, _ = context.documents.around(tokens_A)
        # strictly before the anchor: when drafting, the verifier has not produced the anchor's own features yet
        visible = Visible.between(first_A, tokens_A, queries=W * self.config.num_attention_heads)
        positions_AW = (anchors_A - first_A)[:, None] + torch.arange(W, device=anchors_A.device)
        cos, sin = (part_AWD[:, :, None] for part_AWD in self._rope(positions_AW))
        x_AWH = blocks_AWH
        for layer, k_KPD, v_KPD in zip(self._layers(), context.keys, context.values, strict=True):
            x_AWH = layer(x_AWH, cos, sin, k_KPD, v_KPD, visible)
        return self.norm(x_AWH)

    def draft(self, ends: Ends, anchor_ids_A: Tensor, *, anchors_A: Tensor, context: Context) -> Tensor:
        """Hidden states (A, S, H) of the slots after each anchor: the blocks are [anchor id, mask, mask, …]."""
        ids_AW = anchor_ids_A.new_full((len(anchor_ids_A), self.config.block_size), self.config.mask_token_id)
        ids_AW[:, 0] = anchor_ids_A
        return self.forward(ends.embed(ids_AW), anchors_A=anchors_A, context=context)[:, 1:]
