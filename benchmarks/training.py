"""Speed and memory of one training step, ours against other trainers; one JSON line.

    python benchmarks/training.py [--rounds 7] [--anchors 64] [--tokens 1024] …

The same drafter, data, anchors and loss (its value is compared), a full step each: forward, loss, backward, clipping,
AdamW. `steps_per_second_*` is our speed over SpecForge's, `peak_memory_*` our memory over its: the peak of what the
process holds beyond its imported libraries (weights, moments, batch, activations). Trainers are processes that take
turns, one step each, so that no two work at once; medians of the ratios of each round. `detail` has absolute numbers,
memory with the libraries, and speculators, which works through the rows one at a time.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import peers
import torch

from dflash.drafter.model import DrafterConfig

OURS, RIVAL, OTHER = "dflash", "specforge", "speculators"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=1024, help="of a row; a quarter is the prompt")
    parser.add_argument("--anchors", type=int, default=64, help="per row")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--trainers", nargs="+", default=[OURS, RIVAL, OTHER])
    args = parser.parse_args()
    record: dict[str, Any] = {}
    detail: dict[str, Any] = {"shape": {name: value for name, value in vars(args).items() if isinstance(value, int)}}
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            write_case(Path(folder), dtype, args)
            measured = compare(Path(folder), args.trainers, rounds=args.rounds)
        short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
        detail[short] = {name: summary(steps) for name, steps in measured.items()}
        if RIVAL in measured:
            check_losses(measured, loss=1e-5 if dtype == "float32" else 2e-3, norm=1e-5 if dtype == "float32" else 2e-2)
            ours, theirs = measured[OURS], measured[RIVAL]
            ratios = ratio_of(theirs, ours, "seconds")
            record[f"steps_per_second_{short}"] = round(statistics.median(ratios), 3)
            record[f"peak_memory_{short}"] = round(beyond_libraries(ours) / beyond_libraries(theirs), 3)
            detail[short]["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
            detail[short]["cpu_seconds_ratio"] = round(statistics.median(ratio_of(theirs, ours, "cpu_seconds")), 3)
    print(json.dumps(record | {"detail": detail}))


def write_case(folder: Path, dtype: str, args: argparse.Namespace) -> None:
    heads = args.hidden // 64
    shape = DrafterConfig.from_verifier(
        {
            "vocab_size": args.vocabulary,
            "hidden_size": args.hidden,
            "intermediate_size": 3 * args.hidden,
            "num_hidden_layers": 28,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": 64,
            "max_position_embeddings": max(4096, args.tokens),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        block_size=args.block,
        num_layers=args.layers,
        mask_token_id=args.vocabulary - 1,
        target_layer_ids=[1, 7, 13, 19, 25],
    )
    generator = torch.Generator().manual_seed(0)
    # whole blocks: speculators has no others
    choices = torch.arange(args.tokens // 4, args.tokens - args.block)
    rows = [choices[torch.randperm(len(choices), generator=generator)[: args.anchors]] for _ in range(args.batch)]
    peers.write_case(
        folder,
        shape,
        lengths=[args.tokens] * args.batch,
        prompt=args.tokens // 4,
        anchors=torch.stack(rows).sort(1).values,
        dtype=dtype,
        threads=args.threads,
        slot_weights="decay",
        gamma=10.0,
        alpha=0.5,
        learning_rate=6e-4,
    )


def compare(folder: Path, names: list[str], *, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every step of every trainer, in turns; the first of each only warms up."""
    running = [peers.Trainer(name, folder) for name in names]
    try:
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for trainer in running:
                steps[trainer.name].append(trainer.step() | trainer.memory)
        return steps
    finally:
        for trainer in running:
            trainer.close()


def check_losses(measured: dict[str, list[dict[str, float]]], **tolerances: float) -> None:
    """All trainers must compute the same: the loss and the gradient's norm at the weights that they share."""
    ours = measured[OURS][0]
    for name, (first, *_) in measured.items():
        for what, tolerance in tolerances.items():
            if abs(first[what] / ours[what] - 1) > tolerance:
                raise ValueError(f"{what} of {name} is {first[what]}, ours {ours[what]}: they do not train the same")


def ratio_of(steps: list[dict[str, float]], others: list[dict[str, float]], name: str) -> list[float]:
    """Of each round but the first, which warms up."""
    return [a[name] / b[name] for a, b in zip(steps, others, strict=True)][1:]


def beyond_libraries(steps: list[dict[str, float]]) -> float:
    return steps[-1]["peak_mb"] - steps[-1]["libraries_mb"]


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    return {
        "loss": steps[0]["loss"],
        "gradient_norm": steps[0]["norm"],
        "last_loss": steps[-1]["loss"],
        "seconds_per_step": round(statistics.median(step["seconds"] for step in steps[1:]), 4),
        "cpu_seconds_per_step": round(statistics.median(step["cpu_seconds"] for step in steps[1:]), 4),
        "peak_mb": round(steps[-1]["peak_mb"]),
        "peak_beyond_libraries_mb": round(beyond_libraries(steps)),
        "peak_beyond_loaded_mb": round(steps[-1]["peak_mb"] - steps[-1]["loaded_mb"]),
    }


if __name__ == "__main__":
    main()
