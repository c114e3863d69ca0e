"""One trainer as a process: reads a case from a folder, then makes one optimizer step per line on its stdin.

    python benchmarks/trainers.py TRAINER FOLDER       TRAINER: dflash, specforge or speculators

A case (benchmarks/peers.py writes it) is a drafter in the published format, the verifier's ends, and a batch. Answers
are JSON lines on stdout: what is in memory once loaded, then loss, gradient norm, seconds and peak memory of each step.
Ours also says what attention and metrics took, and the line `logged` asks for a step whose metrics are logged, with
trees. Memory is the process's; on a GPU it is what was allocated there. dflash runs in the project's
environment, the peers in one of their own: each is imported only where it is asked for.

B batch, T tokens, P tokens without padding, F features, A anchors, S predicted slots, H hidden
"""

import ctypes
import importlib
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Step = Callable[..., tuple[float, float]]
"""Forward, loss, backward, clip, AdamW. Returns the loss and the norm of its gradient before clipping."""

CLIP_NORM = 1.0
BETAS = (0.9, 0.95)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not an answer
    logging.disable()
    warnings.simplefilter("ignore")
    trainer, folder = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((folder / "case.json").read_text())
    on_gpu = settings["device"] != "cpu"
    torch.set_num_threads(settings["threads"])
    modules, make_step = TRAINERS[trainer]
    for module in ("torch._dynamo", *modules):  # optimizers load the first when they are made
        importlib.import_module(module)
    libraries = 0.0 if on_gpu else _resident_mb()
    step = make_step(folder, settings)
    Path("/proc/self/clear_refs").write_text("5")  # from here on counts the peak
    loaded = torch.cuda.memory_allocated() / 2**20 if on_gpu else _resident_mb()
    answers.write(json.dumps({"libraries_mb": libraries, "loaded_mb": loaded}) + "\n")
    spent = _time_parts() if trainer == "dflash" else {}
    for line in sys.stdin:
        spent.update(dict.fromkeys(spent, 0.0))
        t0, cpu0 = time.perf_counter(), time.process_time()
        loss, norm = step(tree_metrics=True) if line.strip() == "logged" else step()
        if on_gpu:
            torch.cuda.synchronize()
        answer = {"loss": loss, "norm": norm}
        answer |= {"seconds": time.perf_counter() - t0, "cpu_seconds": time.process_time() - cpu0}
        answer["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else _status_mb("VmHWM")
        answers.write(json.dumps(answer | {f"{part}_cpu_seconds": seconds for part, seconds in spent.items()}) + "\n")


def _time_parts() -> dict[str, float]:
    """From now on, CPU seconds of this process by part of a step: attention, and what every step does for its metrics
    alone (ranks and sums)."""
    from dflash.drafter import losses
    from dflash.drafter.attention import _BlockAttention
    from dflash.training import objective

    spent = {"metrics": 0.0, "attention": 0.0}

    def time_it(part: str, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            t0 = time.process_time()
            result = function(*args, **kwargs)
            spent[part] += time.process_time() - t0
            return result

        setattr(owner, name, call if owner in (losses, objective) else staticmethod(call))

    time_it("metrics", losses, "label_ranks")
    time_it("metrics", objective, "tally")
    time_it("attention", _BlockAttention, "forward")
    time_it("attention", _BlockAttention, "backward")
    return spent


def _status_mb(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def _resident_mb() -> float:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not in use
    return _status_mb("VmRSS")


def dflash(folder: Path, settings: dict[str, Any]) -> Step:
    from dflash.drafter.blocks import Documents
    from dflash.drafter.export import load_drafter
    from dflash.drafter.model import Ends
    from dflash.training.batches import Batch
    from dflash.training.objective import block_loss

    dtype, device = getattr(torch, settings["dtype"]), settings["device"]
    drafter = load_drafter(folder, dtype=torch.float32, device=device).train().requires_grad_(True)
    ends = Ends(load_file(folder / "ends.safetensors"), dtype=dtype, device=device)
    data = load_file(folder / "batch.safetensors", device=device)
    inside_BT = torch.arange(data["input_ids"].shape[1], device=device) < data["lengths"][:, None]
    documents = Documents(tuple(data["lengths"].tolist()))
    batch = Batch(
        documents,
        features_PF=data["features"].to(dtype)[inside_BT],
        input_ids_P=data["input_ids"][inside_BT],
        loss_mask_P=data["loss_mask"][inside_BT],
        greedy_ids_P=data["input_ids"][inside_BT],
    )
    first_B1 = torch.tensor(documents.offsets[:-1], device=device)[:, None]
    anchors_A = (first_B1 + data["anchors"])[data["anchors"] >= 0]
    del data, inside_BT
    update = _adamw(drafter, settings)

    def step(*, tree_metrics: bool = False) -> tuple[float, float]:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            total, counted = block_loss(
                drafter,
                ends,
                batch,
                features_PF=batch.features_PF,
                anchors_A=anchors_A,
                labels="data",
                loss={"ce": 1.0},
                weights=settings["slot_weights"],
                gamma=settings["gamma"],
                alpha=settings["alpha"],
                tree_budget=64,
                tree_metrics=tree_metrics,
            )
        loss = total / counted.weight
        loss.backward()
        return loss.item(), float(update())

    return step


def specforge(folder: Path, settings: dict[str, Any]) -> Step:
    """OnlineDFlashModel; in bfloat16 with its own optimizer, which keeps float32 copies of the weights."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer
    from transformers import Qwen3Config

    dtype, device = getattr(torch, settings["dtype"]), settings["device"]
    attention = "sdpa" if device == "cpu" else "flex_attention"
    config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
    config._attn_implementation = attention
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    drafter.to(device, dtype).train()
    head, embedding = _ends(folder, dtype, device)
    data = load_file(folder / "batch.safetensors", device=device)
    features_BTF, mask_BT, anchors_BA = data["features"].to(dtype), data["loss_mask"].float(), data["anchors"]
    model = OnlineDFlashModel(
        drafter,
        head,
        embedding,
        mask_token_id=config.dflash_config["mask_token_id"],
        block_size=config.block_size,
        attention_backend=attention,
        num_anchors=features_BTF.shape[1],
        loss_decay_gamma=settings["gamma"],
        loss_type={"decay": "dflash", "dpace": "dpace"}[settings["slot_weights"]],
        dpace_alpha=settings["alpha"],
    )
    if not settings["all_anchors"]:
        model._sample_anchor_positions = lambda *_: (anchors_BA.clamp(min=0), anchors_BA >= 0)
    own = BF16Optimizer(drafter, settings["learning_rate"], max_grad_norm=CLIP_NORM) if dtype != torch.float32 else None
    plain = None if own else _adamw(drafter, settings)

    def step() -> tuple[float, float]:
        loss, _, _ = model(data["input_ids"], features_BTF, mask_BT)
        loss.backward()
        norm = own.step() if own else plain()
        return loss.item(), float(norm)

    return step


def speculators(folder: Path, settings: dict[str, Any]) -> Step:
    """DFlashDraftModel, eager, one row at a time: all rows packed into one would need a dense mask of their product.

    Its labels are its verifier's: final states that the head turns into the next token. Its loss is a mean over slots;
    here it is brought to the weighted mean. Anchors must leave room for their whole block.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from transformers import Qwen3Config

    assert (settings["slot_weights"], settings["device"]) == ("decay", "cpu")
    dtype = getattr(torch, settings["dtype"])
    published = json.loads((folder / "config.json").read_text())
    layers = Qwen3Config(**published)
    layers._attn_implementation = "eager"
    drafter = core.DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=published["vocab_size"],
            block_size=published["block_size"],
            aux_hidden_state_layer_ids=published["dflash_config"]["target_layer_ids"],
            mask_token_id=published["dflash_config"]["mask_token_id"],
        )
    )
    head, embedding = _ends(folder, torch.float32, "cpu")
    ends = {"embed_tokens.weight": embedding.weight, "verifier_norm.weight": torch.ones(layers.hidden_size)}
    ends |= {"lm_head.weight": head.weight, "verifier_lm_head.weight": head.weight}
    drafter.load_state_dict(load_file(folder / "model.safetensors") | ends)
    drafter.train()
    data = load_file(folder / "batch.safetensors")
    features_BTF, ids_BT = data["features"].to(dtype), data["input_ids"]
    final_BTH = head.weight[ids_BT.roll(-1, 1)].to(dtype)
    anchors_BA = data["anchors"]
    B, A = anchors_BA.shape
    S = published["block_size"] - 1
    weight = sum(math.exp(-k / settings["gamma"]) for k in range(S))
    update = _adamw(drafter, settings)
    loss_config = resolve_loss_config("ce", "eager")

    def step() -> tuple[float, float]:
        total = 0.0
        for b in range(B):
            core.select_anchors = lambda *_, b=b: (anchors_BA[b], torch.ones(A, dtype=torch.bool))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                _, mean, _ = drafter(
                    features_BTF[b : b + 1],
                    ids_BT[b : b + 1],
                    data["loss_mask"][b : b + 1].float(),
                    final_BTH[b : b + 1],
                    torch.zeros_like(ids_BT[b : b + 1]),
                    loss_config=loss_config,
                    gamma=settings["gamma"],
                    max_anchors=A,
                )
            loss = mean * S / weight / B
            loss.backward()
            total += loss.item()
        return total, float(update())

    return step


def _ends(folder: Path, dtype: torch.dtype, device: str) -> tuple[nn.Linear, nn.Embedding]:
    weights = {name: weight.to(device, dtype) for name, weight in load_file(folder / "ends.safetensors").items()}
    embedding = nn.Embedding.from_pretrained(weights["embed_tokens.weight"])
    head = nn.Linear(*reversed(weights["lm_head.weight"].shape), bias=False, device="meta")
    head.weight = nn.Parameter(weights["lm_head.weight"], requires_grad=False)
    return head, embedding


def _adamw(drafter: nn.Module, settings: dict[str, Any]) -> Callable[[], Tensor]:
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings["learning_rate"], betas=BETAS, weight_decay=0, fused=True)

    def update() -> Tensor:
        norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return update


TRAINERS: dict[str, tuple[tuple[str, ...], Callable[[Path, dict[str, Any]], Step]]] = {
    "dflash": (("dflash.drafter.export", "dflash.training.objective"), dflash),
    "specforge": (("specforge.algorithms.common.dflash_family_model", "specforge.optimizer"), specforge),
    "speculators": (("speculators.models.dflash.core", "speculators.losses"), speculators),
}
"""What each imports first, so that libraries are told from what training needs, and what makes its step."""

if __name__ == "__main__":
    main()
