"""The frozen verifier: load, taps, final state, logits, answers, and a cache that can go back.

Knows nothing of corpora, stores or drafters. The final state is what comes out of the
decoder, its last norm included, so that the logits are the LM head's output times `scale`, soft-capped: LogitRule.

B batch, T tokens, F features (taps x hidden size), H hidden, K most likely tokens, N query tokens, V vocabulary,
M keys in a cache
"""

import inspect
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
)
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.utils import logging as transformers_logging

from dflash.corpus.records import Response
from dflash.devices import resolve_device
from dflash.logits import LogitRule
from dflash.pinning import PinnedVerifier, layer_kinds

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()

LOGITS_AT_ONCE = 2**26  # elements; 128 MiB in bfloat16
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
LOGITS_MAY_DIFFER = 0.02  # relative to the largest: two ways to round in bfloat16
ROLLED_BACK = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "embedding_norm")
EPSILONS = ("variance_epsilon", "eps", "epsilon")
NORMS = {
    "RMS, w": "x / sqrt(mean(x^2) + eps) * w",
    "RMS, 1 + w": "x / sqrt(mean(x^2) + eps) * (1 + w)",
    "layer": "(x - mean(x)) / sqrt(variance(x) + eps) * w",
}
NORMS_MAY_DIFFER = 0.05  # relative: far more than bfloat16 rounds


def logit_rule(config: Any) -> LogitRule:
    """The rule of a Transformers text config; families call the same thing by different names."""
    scale = 1.0
    for name in (*MULTIPLIERS, *DIVISORS):
        value = getattr(config, name, None) or 1.0
        divides = name in DIVISORS and config.model_type != "hyperclovax"  # whose logits_scaling is a factor
        scale *= 1 / value if divides else value
    softcaps = [value for name in SOFTCAPS if (value := getattr(config, name, None))]
    return LogitRule(scale, softcaps[0] if softcaps else None)


class Outputs(NamedTuple):
    """Of one pass, per position; what was not asked for is empty."""

    features_BTF: torch.Tensor  # noqa: N815
    greedy_BT: torch.Tensor  # noqa: N815
    topk_ids_BTK: torch.Tensor  # noqa: N815
    topk_logprobs_BTK: torch.Tensor  # noqa: N815
    final_BTH: torch.Tensor  # noqa: N815


class _LastTap(Exception):
    """Raised by a hook where nothing behind the last tap is wanted."""


class Verifier:
    """A causal language model in eval mode, without gradients. One thread at a time runs it; others wait."""

    def __init__(self, model: Any, tokenizer: Any, *, eos_ids: frozenset[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.decoder = model.get_decoder()
        self.head = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.hidden_size: int = config.hidden_size
        self.layer_kinds = layer_kinds(config.to_dict() | {"layer_types": getattr(config, "layer_types", None)})
        self.window: int | None = getattr(config, "sliding_window", None)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.logit_rule = logit_rule(config)
        self.has_experts = any(name.endswith(".experts") for name, _ in self.decoder.named_modules())
        parameters = inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"  # renamed within Transformers 5
        self._lock = threading.Lock()  # hooks of one call must not see another's layers

    @torch.no_grad()
    def forward(
        self,
        input_ids_BT: torch.Tensor,
        *,
        layers: Sequence[int],
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DynamicCache | None = None,
        greedy: bool = True,
        final: bool = False,
        top_k: int = 0,
    ) -> Outputs:
        """Outputs of the decoder layers `layers`, side by side, and of each position's next token what is asked for:
        the greedy choice, the final state, the `top_k` most likely ids and their log-probabilities (float32).

        The output of layer i is what Transformers calls `hidden_states[i + 1]`. `attention_mask` is None (causal, which
        is enough for rows padded on the right), the usual (B, keys) padding mask, or a boolean (1, 1, N, keys) "may
        attend" mask, which layers with a window narrow; keys in `cache` count. At equal logits the lowest id is the
        choice. Where features alone are asked for and no cache is filled, the layers behind the last tap do not run.
        """
        hidden_BTH, taps = self._run(
            input_ids_BT,
            layers=layers,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            only_taps=bool(layers) and cache is None and not (greedy or final or top_k),
        )
        none_B0H = hidden_BTH[:, :0]
        return Outputs(
            torch.cat(taps, dim=-1) if taps else hidden_BTH.new_empty(*hidden_BTH.shape[:2], 0),
            *self._choose(hidden_BTH if greedy or top_k else none_B0H, top_k=top_k),
            final_BTH=hidden_BTH if final else none_B0H,
        )

    def _run(
        self,
        input_ids_BT: torch.Tensor,
        *,
        layers: Sequence[int],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: DynamicCache | None,
        only_taps: bool = False,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Final states, and the taps in the order of `layers`. With `only_taps` there are no final states (B, 0, H)."""
        masks: Any = None if attention_mask is None else attention_mask.to(self.device)
        if masks is not None and masks.ndim == 4:
            assert position_ids is not None, "a tree's nodes do not lie one after the other"
            masks = self._masks_by_kind(masks, position_ids.to(self.device))
        taps: dict[int, torch.Tensor] = {}

        def tap(layer: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                taps[layer] = (output[0] if isinstance(output, tuple) else output).to(self.device)
                if only_taps and len(taps) == len(layers):
                    raise _LastTap

            return hook

        # models without attention know no such argument, and a cache that no one asked for is not passed
        cached = {} if cache is None else {self._cache_argument: cache}

        with self._lock:
            hooks = [self.decoder.layers[layer].register_forward_hook(tap(layer)) for layer in layers]
            try:
                output = self.decoder(
                    input_ids=input_ids_BT.to(self.device),
                    attention_mask=masks,
                    position_ids=None if position_ids is None else position_ids.to(self.device),
                    use_cache=cache is not None,
                    **cached,
                )
                hidden_BTH = output.last_hidden_state.to(self.device)
            except _LastTap:
                hidden_BTH = taps[layers[0]][:, :0]
            finally:
                for hook in hooks:
                    hook.remove()
        return hidden_BTH, [taps[layer] for layer in layers]

    def _masks_by_kind(self, visible_11NM: torch.Tensor, positions_1N: torch.Tensor) -> Any:
        """What the decoder adds to its scores: one mask, or where its layers differ, one for each kind of them."""
        window = self.window

        def additive(visible: torch.Tensor) -> torch.Tensor:
            # because a boolean mask means "may attend" to one attention back end and is added by another
            never = torch.finfo(self.dtype).min
            return torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill(~visible, never)

        if window is None or "sliding_attention" not in self.layer_kinds:
            return additive(visible_11NM)
        cached = visible_11NM.shape[-1] - positions_1N.shape[-1]
        positions_M = torch.cat([torch.arange(cached, device=self.device), positions_1N[0]])
        near_1NM = positions_M > positions_1N[..., None] - window
        near_11NM = additive(visible_11NM & near_1NM)
        if self.layer_kinds == ["sliding_attention"]:
            return near_11NM
        return {"full_attention": additive(visible_11NM), "sliding_attention": near_11NM}

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own logits (…, V) of final states (…, H), in float32: as many as are asked for, all at once."""
        return self.logit_rule.apply(self.head(hidden).to(hidden.device, torch.float32))

    def _choose(self, hidden_BTH: torch.Tensor, *, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Greedy ids (B, T), and ids and log-probabilities (B, T, K) of the most likely tokens, best first.

        The logits of a bounded number of positions exist at a time.
        """
        positions = max(1, LOGITS_AT_ONCE // self.head.weight.shape[0])
        parts = []
        for chunk_PH in hidden_BTH.flatten(0, 1).split(positions):
            head_PV = self.head(chunk_PH)
            none_P0 = head_PV[:, :0].float()
            likely = most_likely(self.logit_rule.apply(head_PV.float()), top_k) if top_k else (none_P0.long(), none_P0)
            # not argmax, which takes five times as long for bfloat16 on a CPU
            parts.append((head_PV.max(-1).indices, *likely))
        shape = hidden_BTH.shape[:2]
        greedy_P, ids_PK, logprobs_PK = (torch.cat(part).to(self.device) for part in zip(*parts, strict=True))
        return greedy_P.view(shape), ids_PK.view(*shape, top_k), logprobs_PK.view(*shape, top_k)

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: list[list[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seeds: Sequence[int] = (),
    ) -> list[Response]:
        """Answers to a batch of prompts, cut after the first end token: greedy, or drawn at a `temperature` above 0.

        Then each prompt has a seed of its own, and its answer does not depend on the others. A loop of its own, because
        a model's generation_config may ask for repetition penalties and the like, and a drafter must learn what the
        verifier itself would say. Raises ValueError for ids that the verifier's embedding does not have.
        """
        largest, num_ids = max(map(max, prompt_ids)), self.model.get_input_embeddings().weight.shape[0]
        if largest >= num_ids:  # a GPU would not only fail, but be of no use to this process any more
            raise ValueError(f"id {largest} of a prompt is outside of the verifier's vocabulary of {num_ids}")
        longest = max(map(len, prompt_ids))
        pads = [longest - len(ids) for ids in prompt_ids]
        ids_BT = torch.tensor([[0] * pad + ids for pad, ids in zip(pads, prompt_ids, strict=True)], device=self.device)
        mask_BM = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=self.device)
        position_ids = (mask_BM.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        answers: list[list[int]] = [[] for _ in prompt_ids]
        running = list(range(len(prompt_ids)))  # rows of the batch that have not ended
        if temperature > 0:
            # on the CPU, whose generator gives the same numbers on every machine
            draws_BN = torch.stack([uniform(torch.Generator().manual_seed(seed), max_new_tokens) for seed in seeds]).to(
                self.device
            )
            assert len(draws_BN) == len(prompt_ids), "a seed for each prompt"
        for step in range(max_new_tokens):
            padded = bool((mask_BM == 0).any())
            hidden_BTH, _ = self._run(
                ids_BT,
                layers=(),
                attention_mask=mask_BM if padded else None,
                position_ids=position_ids,
                cache=cache,
            )
            if temperature > 0:
                logits_BV = self.logits(hidden_BTH[:, -1])
                chosen = draw(logits_BV, draws_BN[running, step], temperature=temperature, top_p=top_p).tolist()
            else:
                chosen = self._choose(hidden_BTH[:, -1:], top_k=0)[0][:, 0].tolist()
            for row, token in zip(running, chosen, strict=True):
                answers[row].append(token)
            alive = [i for i, token in enumerate(chosen) if token not in self.eos_ids]
            if not alive:
                break
            if len(alive) < len(running):
                kept = torch.tensor(alive, device=self.device)
                cache.reorder_cache(kept)  # type: ignore[arg-type]  # of all selections the one that running states know
                mask_BM, position_ids = mask_BM[kept], position_ids[kept]
                running = [running[i] for i in alive]
            ids_BT = torch.tensor([[chosen[i]] for i in alive], device=self.device)
            mask_BM = torch.cat([mask_BM, mask_BM.new_ones(len(alive), 1)], dim=1)
            position_ids = position_ids[:, -1:] + 1
        return [Response(ids, "stop" if ids[-1] in self.eos_ids else "length") for ids in answers]

    @property
    def final_norm(self) -> torch.nn.Module:
        """What makes the final state of the last layer's output."""
        return next(getattr(self.decoder, name) for name in FINAL_NORMS if hasattr(self.decoder, name))

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """What a drafter works between: embedding, final norm and, unless it is the embedding itself, the LM head."""
        embedding = self.model.get_input_embeddings().weight
        weights = {"embed_tokens.weight": embedding, "norm.weight": self.final_norm.weight}
        if self.head.weight is not embedding:
            weights["lm_head.weight"] = self.head.weight
        if getattr(self.head, "bias", None) is not None:
            weights["lm_head.bias"] = self.head.bias
        return {name: weight.detach() for name, weight in weights.items()}

    @property
    def has_running_state(self) -> bool:
        """Whether some layers remember by a state: one for all branches of a tree, so that trees cannot be verified."""
        return bool(running_states(self.new_cache()))

    def new_cache(self) -> DynamicCache:
        """An empty cache for live decoding, which can go back: layers that look back a limited way keep every key too.

        Raises ValueError for a verifier whose layers remember in a way that is not known here.
        """
        cache = DynamicCache(config=self.model.config)
        unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in ROLLED_BACK}
        unknown |= {"chunked_attention"}.intersection(self.layer_kinds)
        if unknown:
            raise ValueError(
                f"live decoding rolls the cache back, which this verifier's {', '.join(sorted(unknown))} layers do not "
                "allow; set evaluation.live_prompts to 0 (replay works for every verifier)"
            )
        cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
        return cache


@torch.no_grad()
def describe_norm(norm: Any) -> dict[str, Any]:
    """Kind, formula and epsilon of a norm with weights w, JSON-ready: by what it does to a vector, whatever its name.

    None for what is not known.
    """
    x_H = torch.linspace(-1, 3, len(norm.weight), dtype=norm.weight.dtype, device=norm.weight.device)
    normed_H, x_H, weight_H = norm(x_H[None])[0].float(), x_H.float(), norm.weight.float()
    unit_H = torch.nn.functional.rms_norm(x_H, x_H.shape)
    found = {
        "RMS, w": unit_H * weight_H,
        "RMS, 1 + w": unit_H * (1 + weight_H),
        "layer": torch.nn.functional.layer_norm(x_H, x_H.shape) * weight_H,
    }
    kind = min(found, key=lambda kind: float((found[kind] - normed_H).norm()))
    known = (found[kind] - normed_H).norm() <= NORMS_MAY_DIFFER * normed_H.norm()
    return {
        "kind": kind if known else None,
        "formula": NORMS[kind] if known else None,
        "eps": next((getattr(norm, name) for name in EPSILONS if hasattr(norm, name)), None),
    }


def most_likely(logits_PV: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities (P, K), best first and, among equals, the lowest id first."""
    ids_PK = logits_PV.topk(top_k).indices.sort().values
    best_PK, order_PK = logits_PV.gather(-1, ids_PK).sort(descending=True, stable=True)
    return ids_PK.gather(-1, order_PK), best_PK - logits_PV.logsumexp(-1, keepdim=True)


def uniform(generator: torch.Generator, number: int) -> torch.Tensor:
    """Numbers in [0, 1), of which 53 bits are random."""
    return torch.rand(number, generator=generator, dtype=torch.float64)


def likelihoods(logits_BV: torch.Tensor, *, temperature: float, top_p: float) -> torch.Tensor:
    """softmax(logits / temperature), not yet divided by its sum, cut to the most likely tokens that reach mass `top_p`.

    In float64.
    """
    logits_BV = logits_BV.double()
    # less the maximum first, or a temperature close to 0 overflows
    mass_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature).exp()
    if top_p < 1:
        sorted_BV, order_BV = mass_BV.sort(dim=-1, descending=True, stable=True)
        more_likely_BV = sorted_BV.cumsum(-1) - sorted_BV
        outside_BV = more_likely_BV >= top_p * mass_BV.sum(-1, keepdim=True)
        mass_BV = mass_BV.scatter(-1, order_BV, sorted_BV.masked_fill(outside_BV, 0))
    return mass_BV


def pick(mass_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Token ids (B) drawn in proportion to their mass, by inverting the cumulative distribution in the order of ids.

    One number in [0, 1) decides, and small differences in logits hardly ever change the choice, as they would where
    tokens are ordered by probability.
    """
    cumulative_BV = mass_BV.cumsum(-1)
    # in (0, total], so that the first token that reaches it has mass of its own
    reached_B1 = (1 - uniform_B)[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, reached_B1)[:, 0]


def draw(logits_BV: torch.Tensor, uniform_B: torch.Tensor, *, temperature: float, top_p: float) -> torch.Tensor:
    """Token ids (B) drawn from `likelihoods`, as `pick` does."""
    return pick(likelihoods(logits_BV, temperature=temperature, top_p=top_p), uniform_B)


def compact(cache: DynamicCache, kept_N: torch.Tensor, *, start: int) -> None:
    """Of the keys from position `start` on, keep those at `start + kept_N` (ascending), in every layer."""
    layers: list[Any] = list(cache.layers)  # all of them hold keys and values, and nothing else: see `running_states`
    for layer in layers:
        for part_BHMD in (layer.keys, layer.values):
            at_N = kept_N.to(part_BHMD.device)
            part_BHMD[..., start : start + len(at_N), :] = part_BHMD[..., start:, :].index_select(-2, at_N)
        layer.keys, layer.values = (part[..., : start + len(kept_N), :] for part in (layer.keys, layer.values))


class RunningState(NamedTuple):
    """What a layer remembers beside keys, or instead of them; how it was a token ago cannot be read from it."""

    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]


def running_states(cache: DynamicCache) -> dict[int, RunningState]:
    """Copies of the states that are not keys, by layer; empty where all layers keep keys and nothing else."""

    def copies(states: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
        return {number: state.clone() for number, state in states.items() if state is not None}

    layers: list[Any] = list(cache.layers)
    return {
        number: RunningState(copies(layer.conv_states), copies(layer.recurrent_states))
        for number, layer in enumerate(layers)
        if hasattr(layer, "conv_states")
    }


def go_back(cache: DynamicCache, states: Mapping[int, RunningState], *, length: int) -> None:
    """The cache as it was when it had `length` keys and these states, which are its own from then on."""
    layers: list[Any] = list(cache.layers)
    for number, layer in enumerate(layers):
        if number in states:
            layer.conv_states |= states[number].conv
            layer.recurrent_states |= states[number].recurrent
        if hasattr(layer, "keys"):
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


REMEDIES = {
    "trust_remote_code": "set verifier.trust_remote_code if you trust the code that comes with it",
    "attention": "choose another verifier.attn_implementation",
    "accelerate": "pip install accelerate",
    "does not recognize": "a newer Transformers may know it",
    "unrecognized": "give a causal language model",
}


def load_verifier(pinned: PinnedVerifier) -> Verifier:
    """The model of a pinned folder, on its device or devices.

    Raises ValueError for one that cannot be loaded, lacks weights, holds some of another shape or not finite, or
    computes its logits or layers in a way that is not known here: its hidden states would be of no use to a drafter.
    """
    device = resolve_device(pinned.device)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": pinned.trust_remote_code}
    options = local | {"dtype": getattr(torch, pinned.dtype), "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # they are refused below, by name
    if pinned.device_map:
        options["device_map"] = pinned.device_map
    if pinned.attn_implementation != "auto":
        options["attn_implementation"] = pinned.attn_implementation
    try:
        config = AutoConfig.from_pretrained(pinned.path, **local)
        own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        causal = own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        model, report = auto.from_pretrained(pinned.path, **options)
        tokenizer = AutoTokenizer.from_pretrained(pinned.path, **local)
    except (SafetensorError, ValueError, OSError, KeyError, ImportError) as error:
        cause = " ".join(str(error).split())
        remedy = next((remedy for sign, remedy in REMEDIES.items() if sign in cause.lower()), "get the model again")
        raise ValueError(f"verifier.model: {pinned.path} cannot be loaded ({cause[:200]}); {remedy}") from error
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ValueError(
            f"verifier.model: {pinned.path} holds {len(mismatched)} weights of the wrong shape, such as {name} of "
            f"{list(found)}, where config.json asks for {list(expected)}; get the model again"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"verifier.model: {pinned.path} lacks {len(missing)} weights of {type(model).__name__}, such as "
            f"{missing[0]}; get the model again"
        )
    eos_ids = {*pinned.special_ids["eos"], *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    log.info("verifier %s on %s, end tokens %s", pinned, pinned.device_map or device, sorted(eos_ids))
    verifier = Verifier(model if pinned.device_map else model.to(device), tokenizer, eos_ids=frozenset(eos_ids))
    if fault := find_fault(verifier):
        raise ValueError(f"verifier.model: {pinned.path} {fault}")
    return verifier


@torch.no_grad()
def find_fault(verifier: Verifier) -> str:
    """Why the hidden states of this verifier would be of no use, with what to do; empty where they are sound.

    Looks at every weight, and compares a short text's taps and logits with what the whole model makes of it.
    """
    kind = type(verifier.model).__name__
    if verifier.head is None or not hasattr(verifier.decoder, "layers"):
        return f"is a {kind}, which has no LM head behind decoder layers; give a causal language model"
    for name, weight in verifier.model.named_parameters():
        if weight.is_meta:
            return f"does not fit onto the devices ({name} was left out); use more of them, or verifier.device cpu"
        if weight.element_size() > 1 and not torch.stack(torch.aminmax(weight)).isfinite().all():
            return f"holds weights that are not finite in {weight.dtype}, such as {name}; get it again"
    text_1T = torch.arange(1, 9, device=verifier.device)[None] % verifier.head.weight.shape[0]
    taps = range(len(verifier.decoder.layers) - 1)
    states = verifier.forward(text_1T, layers=taps, greedy=False, final=True)
    logits_1TV = verifier.model(input_ids=text_1T).logits.float()
    if states.features_BTF.shape != (*text_1T.shape, len(taps) * verifier.hidden_size):
        return f"is a {kind}, whose layers do not put out one hidden state per token; choose another verifier"
    if not (states.features_BTF.isfinite().all() and logits_1TV.isfinite().all()):
        return f"puts out values that are not finite in {verifier.dtype}; try another verifier.dtype"
    if not states.features_BTF.unflatten(-1, (len(taps), -1)).any(-1).all():
        return f"is a {kind}, some of whose layers put out zeros; choose another verifier"
    if (verifier.logits(states.final_BTH) - logits_1TV).abs().max() > LOGITS_MAY_DIFFER * logits_1TV.abs().max():
        return f"is a {kind}, whose logits are not those of {verifier.logit_rule}; choose another verifier"
    return ""
