"""Another project's side of a check, as a process in an environment of its own: loads an exported drafter, and drafts.

    python benchmarks/engines.py ENGINE CASE          ENGINE: zlab, specforge, speculators or vllm

A case (benchmarks/interop.py writes it) is a folder with an exported drafter, the path of its verifier, and prompts.
What an engine finds goes into CASE/ENGINE.safetensors and CASE/ENGINE.json. Which hidden
states are taken, how a block is laid out, where the mask token comes from, is all theirs. Each project is imported only
where it is asked for; ours never is.

T tokens, F features, W block size, S drafted slots, V vocabulary
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    engine, case = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((case / "case.json").read_text())
    torch.set_num_threads(settings["threads"])
    tensors, found = ENGINES[engine](case, settings)
    if tensors:
        save_file(tensors, case / f"{engine}.safetensors")
    (case / f"{engine}.json").write_text(json.dumps(found))


def _verifier(settings: dict[str, Any], ids_T: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
    """Loaded by Transformers, and all its hidden states of the tokens."""
    from transformers import AutoModelForCausalLM

    verifier = AutoModelForCausalLM.from_pretrained(settings["verifier"], dtype=torch.float32).eval()
    return verifier, verifier(ids_T[None], output_hidden_states=True).hidden_states


def _keys(info: dict[str, Any]) -> dict[str, list[str]]:
    return {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}


@torch.inference_mode()
def zlab(case: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """z-lab's package, whose name is `dflash` too."""
    from dflash.model import DFlashDraftModel, extract_context_feature

    load = {"dtype": torch.float32, "output_loading_info": True}
    drafter, info = DFlashDraftModel.from_pretrained(settings["exported"], **load)
    ids_T = load_file(case / "ids.safetensors")["ids"]
    verifier, states = _verifier(settings, ids_T[:-1])
    hidden = drafter.eval()(
        target_hidden=extract_context_feature(states, drafter.target_layer_ids),
        noise_embedding=_block(verifier, ids_T[-1], drafter.mask_token_id, drafter.block_size),
        position_ids=torch.arange(len(ids_T) - 1 + drafter.block_size)[None],
    )
    return {"logits": drafter.compute_logits(hidden, verifier.lm_head)[0, 1:].contiguous()}, _keys(info)


@torch.inference_mode()
def specforge(case: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from specforge.modeling.auto import AutoDraftModel
    from specforge.modeling.draft.dflash import extract_context_feature

    load = {"dtype": torch.float32, "output_loading_info": True, "attn_implementation": "sdpa"}
    drafter, info = AutoDraftModel.from_pretrained(settings["exported"], **load)
    ids_T = load_file(case / "ids.safetensors")["ids"]
    verifier, states = _verifier(settings, ids_T[:-1])
    hidden = drafter.eval()(
        target_hidden=extract_context_feature(states, drafter.target_layer_ids),
        noise_embedding=_block(verifier, ids_T[-1], drafter.mask_token_id, drafter.block_size),
        position_ids=torch.arange(len(ids_T) - 1 + drafter.block_size)[None],
        is_causal=False,
    )
    return {"logits": verifier.lm_head(hidden)[0, 1:].contiguous()}, _keys(info)


def _block(verifier: Any, anchor_id: Tensor, mask_token_id: int, size: int) -> Tensor:
    ids_1W = torch.full((1, size), mask_token_id)
    ids_1W[0, 0] = anchor_id
    return verifier.get_input_embeddings()(ids_1W)


@torch.inference_mode()
def speculators(case: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its layer ids count the embedding; it takes the verifier's embedding and head from where the config says."""
    from speculators import SpeculatorModelConfig
    from speculators.models.dflash import core
    from transformers import PreTrainedModel

    def config() -> Any:
        found = SpeculatorModelConfig.from_pretrained(settings["exported"])
        found.transformer_layer_config._attn_implementation = "eager"
        return found

    plain = PreTrainedModel.from_pretrained.__func__  # theirs returns no account of the weights
    _, info = plain(core.DFlashDraftModel, settings["exported"], config=config(), output_loading_info=True)
    load = {"config": config(), "dtype": torch.float32}
    drafter = core.DFlashDraftModel.from_pretrained(settings["exported"], **load).float().eval()
    ids_T = load_file(case / "ids.safetensors")["ids"]
    anchor = len(ids_T) - 1
    padded_T = torch.cat([ids_T, ids_T.new_zeros(drafter.block_size)])  # whole blocks only
    _, states = _verifier(settings, padded_T)
    features_1TF = torch.cat([states[layer] for layer in drafter.target_layer_ids], dim=-1)
    core.select_anchors = lambda *_: (torch.tensor([anchor]), torch.ones(1, dtype=torch.bool))
    _, logits_1WV, *_ = drafter._backbone_forward(
        features_1TF,
        padded_T[None],
        torch.ones(1, len(padded_T)),
        states[-1],
        torch.zeros(1, len(padded_T), dtype=torch.long),
        max_anchors=1,
    )
    return {"logits": logits_1WV[0, 1:].contiguous()}, _keys(info)


def vllm(_: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Decodes the prompts greedily with the drafter; its counters say how many drafts there were, and what was kept."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=settings["verifier"],
        dtype="float32",
        max_model_len=settings["max_length"],
        max_num_seqs=1,
        enforce_eager=True,
        gpu_memory_utilization=0.2,  # on a CPU, of its memory: the default is more than a machine in use has left
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "dflash",
            "model": settings["exported"],
            "num_speculative_tokens": settings["block_size"] - 1,
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=settings["max_new_tokens"])
    texts, counts = [], []

    def counted() -> list[float]:
        values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        return [values.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens")]

    for prompt in settings["prompts"]:
        before = counted()
        done = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        texts.append(list(done[0].outputs[0].token_ids))
        counts.append([int(after - then) for after, then in zip(counted(), before, strict=True)])
    return {}, {"ids": texts, "drafts": [drafts for drafts, _ in counts], "accepted": [kept for _, kept in counts]}


ENGINES: dict[str, Callable[[Path, dict[str, Any]], tuple[dict[str, Tensor], dict[str, Any]]]] = {
    "zlab": zlab,
    "specforge": specforge,
    "speculators": speculators,
    "vllm": vllm,
}

if __name__ == "__main__":
    main()
