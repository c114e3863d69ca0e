"""The frozen verifier: load, taps, greedy choices, answers, and a cache whose keys can be selected.

The home of Transformers. Knows nothing of corpora, stores or drafters.

B batch, T tokens, F features (taps x hidden size), N query tokens, V vocabulary, M keys in a cache
"""

import inspect
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from dflash.corpus.records import Response
from dflash.devices import resolve_device
from dflash.pinning import PinnedVerifier

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()

LOGITS_AT_ONCE = 2**26  # elements; 128 MiB in bfloat16


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
        self.hidden_size: int = model.config.get_text_config().hidden_size
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the decoder layers `layers`, side by side (B, T, F), and the greedy next token of each position.

        The output of layer i is what Transformers calls `hidden_states[i + 1]`. `attention_mask` is None (causal, which
        is enough for rows padded on the right), the usual (B, keys) padding mask, or a boolean (1, 1, N, keys) "may
        attend" mask; keys in `cache` count. At equal logits the lowest id is the choice.
        """
        hidden_BTH, taps = self._run(
            input_ids_BT, layers=layers, attention_mask=attention_mask, position_ids=position_ids, cache=cache
        )
        features_BTF = torch.cat(taps, dim=-1) if taps else hidden_BTH.new_empty(*hidden_BTH.shape[:2], 0)
        return features_BTF, self._greedy(hidden_BTH)

    def _run(
        self,
        input_ids_BT: torch.Tensor,
        *,
        layers: Sequence[int],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: DynamicCache | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Final-normed hidden states, and the taps in the order of `layers`."""
        if attention_mask is not None and attention_mask.ndim == 4:
            # additive, because a boolean mask means "may attend" to one attention back end and is added by another
            never = torch.finfo(self.dtype).min
            attention_mask = torch.zeros(attention_mask.shape, dtype=self.dtype, device=self.device).masked_fill(
                ~attention_mask.to(self.device), never
            )
        taps: dict[int, torch.Tensor] = {}

        def tap(layer: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                taps[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        with self._lock:
            hooks = [self.decoder.layers[layer].register_forward_hook(tap(layer)) for layer in layers]
            try:
                output = self.decoder(
                    input_ids=input_ids_BT.to(self.device),
                    attention_mask=None if attention_mask is None else attention_mask.to(self.device),
                    position_ids=None if position_ids is None else position_ids.to(self.device),
                    use_cache=cache is not None,
                    **{self._cache_argument: cache},
                )
            finally:
                for hook in hooks:
                    hook.remove()
        return output.last_hidden_state, [taps[layer] for layer in layers]

    def _greedy(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        """Most likely token ids (B, T); the logits of a bounded number of positions exist at a time."""
        positions = max(1, LOGITS_AT_ONCE // self.head.weight.shape[0])
        chunks = hidden_BTH.flatten(0, 1).split(positions)
        return torch.cat([self.head(chunk).argmax(-1) for chunk in chunks]).view(hidden_BTH.shape[:2])

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
            draws_BN = torch.stack([_uniform(seed, max_new_tokens) for seed in seeds]).to(self.device)
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
                logits_BV = self._logits(hidden_BTH[:, -1])
                chosen = draw(logits_BV, draws_BN[running, step], temperature=temperature, top_p=top_p).tolist()
            else:
                chosen = self._greedy(hidden_BTH[:, -1:])[:, 0].tolist()
            for row, token in zip(running, chosen, strict=True):
                answers[row].append(token)
            alive = [i for i, token in enumerate(chosen) if token not in self.eos_ids]
            if not alive:
                break
            if len(alive) < len(running):
                kept = torch.tensor(alive, device=self.device)
                cache.batch_select_indices(kept)
                mask_BM, position_ids = mask_BM[kept], position_ids[kept]
                running = [running[i] for i in alive]
            ids_BT = torch.tensor([[chosen[i]] for i in alive], device=self.device)
            mask_BM = torch.cat([mask_BM, mask_BM.new_ones(len(alive), 1)], dim=1)
            position_ids = position_ids[:, -1:] + 1
        return [Response(ids, "stop" if ids[-1] in self.eos_ids else "length") for ids in answers]

    def _logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """What the model itself makes of final hidden states; what some families do after the head keeps the order."""
        config = self.model.config.get_text_config()
        logits_BV = self.head(hidden_BH).double()
        logits_BV = logits_BV * (getattr(config, "logit_scale", None) or 1)  # Cohere
        logits_BV = logits_BV / (getattr(config, "logits_scaling", None) or 1)  # Granite
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits_BV = cap * torch.tanh(logits_BV / cap)
        return logits_BV

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """What a drafter works between: embedding, final norm and, unless it is the embedding itself, the LM head."""
        embedding = self.model.get_input_embeddings().weight
        weights = {"embed_tokens.weight": embedding, "norm.weight": self.decoder.norm.weight}
        if self.head.weight is not embedding:
            weights["lm_head.weight"] = self.head.weight
        return {name: weight.detach() for name, weight in weights.items()}

    def new_cache(self) -> DynamicCache:
        """An empty cache for live decoding, every layer of which keeps every key, so that `compact` can select.

        Raises ValueError for a verifier with layers that look back a limited way or keep a running state.
        """
        kinds = set(getattr(self.model.config.get_text_config(), "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            limited = ", ".join(sorted(kinds - {"full_attention"}))
            raise ValueError(
                f"live decoding rolls the cache back, which this verifier's {limited} layers do not allow; "
                "set evaluation.live_prompts to 0 (replay works for every verifier)"
            )
        return DynamicCache()


def _uniform(seed: int, number: int) -> torch.Tensor:
    return torch.rand(number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(logits_BV: torch.Tensor, uniform_B: torch.Tensor, *, temperature: float, top_p: float) -> torch.Tensor:
    """Token ids (B) drawn from softmax(logits / temperature), cut to the most likely tokens that reach mass `top_p`.

    By inverting the cumulative distribution in the order of ids: one number in [0, 1) decides, and small differences
    in logits hardly ever change the choice, as they would where tokens are ordered by probability.
    """
    logits_BV = logits_BV.double()
    # less the maximum first, or a temperature close to 0 overflows
    mass_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature).exp()
    if top_p < 1:
        sorted_BV, order_BV = mass_BV.sort(dim=-1, descending=True, stable=True)
        more_likely_BV = sorted_BV.cumsum(-1) - sorted_BV
        outside_BV = more_likely_BV >= top_p * mass_BV.sum(-1, keepdim=True)
        mass_BV = mass_BV.scatter(-1, order_BV, sorted_BV.masked_fill(outside_BV, 0))
    cumulative_BV = mass_BV.cumsum(-1)
    # in (0, total], so that the first token that reaches it has mass of its own
    reached_B1 = (1 - uniform_B)[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, reached_B1)[:, 0]


def compact(cache: DynamicCache, keep_N: torch.Tensor) -> None:
    """Keep the keys at the absolute positions `keep_N`, in that order, in every layer; the others are forgotten."""
    layers: list[Any] = list(cache.layers)  # all of them hold keys and values: see new_cache
    for layer in layers:
        layer.keys = layer.keys.index_select(-2, keep_N.to(layer.keys.device))
        layer.values = layer.values.index_select(-2, keep_N.to(layer.values.device))


def load_verifier(pinned: PinnedVerifier) -> Verifier:
    """The model of a pinned folder, on its device."""
    device = resolve_device(pinned.device)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            pinned.path, dtype=getattr(torch, pinned.dtype), local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(pinned.path, local_files_only=True)
    except (SafetensorError, ValueError, OSError, KeyError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(f"verifier.model: {pinned.path} cannot be loaded ({cause}); get the model again") from error
    eos_ids = {*pinned.special_ids["eos"], *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    log.info("verifier %s on %s, end tokens %s", pinned, device, sorted(eos_ids))
    return Verifier(model.to(device), tokenizer, eos_ids=frozenset(eos_ids))
