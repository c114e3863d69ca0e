"""The DFlash drafter (arXiv 2602.06036): a few Qwen3-style layers that predict a block of tokens in one pass.

Knows tensors only: no tokenizer, no files, no loss. Weight names are those of the published drafters.

    context = drafter.context(features)                  keys and values of every layer, from the verifier's taps
    hidden  = drafter.draft(ends, ids, anchors_A=…)      one hidden state per predicted slot; ends.draft_logits(hidden)

P tokens of all documents, F features (taps * hidden), H hidden, A anchors of all documents, W block size,
S = W-1 predicted slots, V vocabulary, U draft vocabulary (V, or a part of it), Q query heads, K key/value heads,
D head width
"""

from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.drafter.attention import Visible, block_attention
from dflash.drafter.blocks import Documents
from dflash.drafter.gated import gated_down
from dflash.drafter.norms import rms_norm, rms_norm_rotated
from dflash.drafter.published import SLIDING
from dflash.drafter.rope import frequencies
from dflash.drafter.shape import INITIAL_STD, DrafterConfig
from dflash.drafter.vocabulary import MAPS, kept_tokens, maps_of
from dflash.logits import LogitRule


class Ends:
    """The verifier's frozen embedding and LM head, between which a drafter works.

    A drafter may propose a part of the tokens only (`for_drafter`). These have places of their own, 0..U-1, which are
    what `draft_logits` are of; `ids` and `places` lead from one to the other.
    """

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
        self.kept_U: Tensor | None = None  # None: the first U ids
        self.draft_head_UH, self.draft_bias_U = self.head_VH, self.bias_V

    def for_drafter(self, drafter: "Drafter", *, num_tokens: int | None = None) -> "Ends":
        """The same ends with the tokens that the drafter proposes: of a trimmed vocabulary, or the first `num_tokens`.

        What a padded head has beyond the tokenizer's tokens is never proposed then; None: all rows are tokens.
        """
        ends = copy(self)
        ends.kept_U = None if drafter.kept_U is None else drafter.kept_U.to(self.head_VH.device)
        rows: Tensor | slice = slice(num_tokens) if ends.kept_U is None else ends.kept_U
        ends.draft_head_UH = self.head_VH[rows]
        ends.draft_bias_U = None if self.bias_V is None else self.bias_V[rows]
        return ends

    @property
    def vocab_size(self) -> int:
        return self.head_VH.shape[0]

    @property
    def draft_vocab_size(self) -> int:
        return self.draft_head_UH.shape[0]

    @property
    def proposes_all(self) -> bool:
        return self.draft_vocab_size == self.vocab_size

    def ids(self, places: Tensor) -> Tensor:
        """The verifier's ids of the tokens at these places."""
        return places if self.kept_U is None else self.kept_U[places]

    def places(self, ids: Tensor) -> Tensor:
        """The places of these ids, -1 where the drafter cannot propose them."""
        if self.kept_U is None:
            return ids if self.proposes_all else ids.where(ids < self.draft_vocab_size, -1)
        places = torch.searchsorted(self.kept_U, ids).clamp_(max=self.draft_vocab_size - 1)
        return places.where(self.kept_U[places] == ids, -1)

    def over_all(self, mass: Tensor) -> Tensor:
        """(…, U) to (…, V): numbers of the tokens at the places as numbers of all ids, 0 for the others."""
        if self.proposes_all:
            return mass
        kept_U = torch.arange(self.draft_vocab_size, device=mass.device) if self.kept_U is None else self.kept_U
        return mass.new_zeros(*mass.shape[:-1], self.vocab_size).index_copy_(-1, kept_U, mass)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding_VH)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, H) to (…, V), in the ends' dtype: the verifier's own where `hidden` is its final state."""
        return self.rule.apply(F.linear(hidden.to(self.head_VH.dtype), self.head_VH, self.bias_V))

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """(…, H) to (…, U): the same, of the tokens that the drafter can propose."""
        return self.rule.apply(F.linear(hidden.to(self.head_VH.dtype), self.draft_head_UH, self.draft_bias_U))

    def gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """d loss / d hidden, from d loss / d draft logits and these logits."""
        if self.rule.softcap is not None:
            grad = grad * (1 - (logits / self.rule.softcap).square())
        if self.rule.scale != 1:
            grad = grad * self.rule.scale
        return grad.to(self.head_VH.dtype) @ self.draft_head_UH


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
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def rotated(self, x_NQD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rms_norm_rotated(x_NQD, self.weight, self.eps, cos, sin)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, *, kind: str) -> None:
        super().__init__()
        self.head_dim = D = config.head_dim
        self.window = config.sliding_window if kind == SLIDING else 0
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * D)
        self.k_proj = Linear(config.hidden_size, config.num_key_value_heads * D)
        self.v_proj = Linear(config.hidden_size, config.num_key_value_heads * D)
        self.o_proj = Linear(config.num_attention_heads * D, config.hidden_size)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def context(self, ctx_PH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k_PKD = self.k_norm.rotated(self.heads(self.k_proj(ctx_PH)), cos, sin)
        return k_PKD.transpose(0, 1), self.heads(self.v_proj(ctx_PH)).transpose(0, 1)

    def forward(
        self, x_AWH: Tensor, cos: Tensor, sin: Tensor, k_KPD: Tensor, v_KPD: Tensor, visible: dict[int, Visible]
    ) -> Tensor:
        q_AWQD = self.q_norm.rotated(self.heads(self.q_proj(x_AWH)), cos, sin)
        k_AWKD = self.k_norm.rotated(self.heads(self.k_proj(x_AWH)), cos, sin)
        v_AWKD = self.heads(self.v_proj(x_AWH))
        return self.o_proj(block_attention(q_AWQD, k_AWKD, v_AWKD, k_KPD, v_KPD, visible[self.window]).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return gated_down(self.gate_proj(x), self.up_proj(x), self.down_proj.weight)


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig, *, kind: str) -> None:
        super().__init__()
        self.self_attn = Attention(config, kind=kind)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_AWH: Tensor, *attention: Any) -> Tensor:
        x_AWH = x_AWH + self.self_attn(self.input_layernorm(x_AWH), *attention)
        return x_AWH + self.mlp(self.post_attention_layernorm(x_AWH))


class Drafter(nn.Module):
    """Matrices start as N(0, 0.02) drawn from `generator` (default: seed 0), norms as ones.

    `embed_proj` and `head_proj` are matrices only where the drafter is not as wide as the verifier.
    """

    def __init__(self, config: DrafterConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        width, outside = config.hidden_size, config.verifier_hidden_size
        self.fc = Linear(len(config.target_layer_ids) * outside, width)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.embed_proj = nn.Identity() if width == outside else Linear(outside, width)
        self.layers = nn.ModuleList(Layer(config, kind=kind) for kind in config.layer_types)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.head_proj = nn.Identity() if width == outside else Linear(width, outside)
        if config.draft_vocab_size:
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        if not self.fc.weight.is_meta:
            generator = generator or torch.Generator().manual_seed(0)
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)

    @property
    def kept_U(self) -> Tensor | None:  # noqa: N802
        """The ids of the tokens that it can propose, ascending; None: all."""
        return kept_tokens(self.get_buffer("d2t")) if self.config.draft_vocab_size else None

    def keep(self, kept_U: Tensor) -> None:
        """Set the draft vocabulary: ascending ids, as many as the config says."""
        for name, values in maps_of(kept_U, vocab_size=self.config.vocab_size).items():
            self.get_buffer(name).copy_(values)

    def weights(self) -> dict[str, Tensor]:
        """What is trained: the state but for what describes the draft vocabulary."""
        return {name: weight for name, weight in self.state_dict().items() if name not in MAPS}

    def _layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions for all heads, float32. Made anew: no buffer that a meta device could empty."""
        radians = frequencies(self.config.rope, head_dim=self.config.head_dim).to(positions.device, non_blocking=True)
        angles = positions[..., None, None].float() * torch.cat((radians, radians))
        scale = self.config.rope.get("attention_factor", 1.0)
        return angles.cos() * scale, angles.sin() * scale

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
        before its anchor, and itself: see DrafterConfig. Cheapest if anchors ascend.
        """
        tokens_A = anchors_A - context.start
        first_A, _ = context.documents.around(tokens_A)
        # strictly before the anchor: when drafting, the verifier has not produced the anchor's own features yet
        visible = {
            window: Visible(first_A, tokens_A, context.length, block_size=blocks_AWH.shape[1], window=window)
            for window in {layer.self_attn.window for layer in self._layers()}
        }
        slots_W = torch.arange(blocks_AWH.shape[1], device=anchors_A.device)
        cos, sin = self._rope((anchors_A - first_A)[:, None] + slots_W)
        x_AWH = self.embed_proj(blocks_AWH)
        for layer, k_KPD, v_KPD in zip(self._layers(), context.keys, context.values, strict=True):
            x_AWH = layer(x_AWH, cos, sin, k_KPD, v_KPD, visible)
        return self.head_proj(self.norm(x_AWH))

    def draft(self, ends: Ends, anchor_ids_A: Tensor, *, anchors_A: Tensor, context: Context) -> Tensor:
        """Hidden states (A, S, H) of the slots after each anchor: the blocks are [anchor id, mask, mask, …]."""
        assert (ends.kept_U is None) == (not self.config.draft_vocab_size), "ends that are not for this drafter"
        ids_AW = anchor_ids_A.new_full((len(anchor_ids_A), self.config.block_size), self.config.mask_token_id)
        ids_AW[:, 0] = anchor_ids_A
        return self.forward(ends.embed(ids_AW), anchors_A=anchors_A, context=context)[:, 1:]
