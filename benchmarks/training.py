"""Speed and memory of one training step, ours against other trainers'; one JSON line.

    python benchmarks/training.py [--rounds 7] [--anchors 64] [--tokens 1024] …
    python benchmarks/training.py --shape qwen3-8b --device cuda        on a GPU, against SpecForge's flex path
    python benchmarks/training.py --sweep docs/plots                    ours over anchors, tokens, vocabulary

The same drafter, data, anchors and loss (its value is compared), a full step each: forward, loss, backward, clipping,
AdamW. `steps_per_second_*` is our speed over SpecForge's, `peak_memory_*` our memory over its: the peak of what the
process holds beyond its imported libraries (weights, moments, batch, activations). Trainers are processes that take
turns, one step each, so that no two work at once; medians of the ratios of each round. `metric_overhead_*` is the share
of our step that metrics take, in CPU seconds. `detail` has absolute numbers, memory with the libraries, CPU seconds
(steadier where others use the machine), and speculators, which works through the rows one at a time. On a GPU, `mfu` is
the useful work per second over `--peak-tflops`.

`--sweep` prints a table of the CPU seconds of a step and of its attention, and draws it into a folder, on logarithmic
axes.
"""

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import peers
import torch

from dflash import plots
from dflash.config import TrainingConfig
from dflash.drafter.shape import DrafterConfig

OURS, RIVAL, OTHER = "dflash", "specforge", "speculators"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden": 512, "mlp": 1536, "heads": 8, "kv_heads": 4, "head_dim": 64, "vocabulary": 32_000,
        "tokens": 1024, "anchors": 64, "batch": 4, "dtypes": ["fp32", "bf16"], "trainers": [OURS, RIVAL, OTHER],
    },
    "qwen3-8b": {
        "hidden": 4096, "mlp": 12_288, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocabulary": 151_936,
        "tokens": 3072, "anchors": 512, "batch": 1, "dtypes": ["bf16"], "trainers": [OURS, RIVAL],
    },
}  # fmt: skip
SWEEP = {
    "anchors": [16, 32, 64, 128, 256, 512],
    "tokens": [512, 1024, 2048, 4096, 8192],
    "vocabulary": [8_000, 16_000, 32_000, 64_000, 152_000],
}
TAPS = [1, 7, 13, 19, 25]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="where the options below are not given")
    for name in ("hidden", "mlp", "heads", "kv-heads", "head-dim", "vocabulary"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tokens", type=int, help="of a row; a quarter is the prompt")
    parser.add_argument("--anchors", type=int, help="per row")
    parser.add_argument("--batch", type=int, help="rows")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--trainers", nargs="+", choices=[OURS, RIVAL, OTHER])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU in bfloat16 (H100 and H200: 989)")
    parser.add_argument("--sweep", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    given = {name: value for name, value in vars(args).items() if value is not None}
    args = argparse.Namespace(**SHAPES[args.shape] | given)
    print(sweep(args) if "sweep" in given else json.dumps(measure(args)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {}
    detail: dict[str, Any] = {"shape": {name: value for name, value in vars(args).items() if isinstance(value, int)}}
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            write_case(Path(folder), DTYPES[dtype], args)
            measured = take_turns(Path(folder), args.trainers, rounds=args.rounds)
            detail[dtype] = {name: summary(steps) for name, steps in measured.items()}
            if args.device == "cpu":
                record[f"metric_overhead_{dtype}"] = metric_overhead(Path(folder), rounds=args.rounds)
        if args.device == "cuda":
            for numbers in detail[dtype].values():
                numbers["mfu"] = useful_flops(args) / numbers["seconds_per_step"] / args.peak_tflops / 1e12
        if RIVAL in measured:
            loss, norm = (1e-5, 1e-5) if dtype == "fp32" else (2e-3, 2e-2)
            check(measured, loss=loss, norm=norm)
            ours, theirs = measured[OURS], measured[RIVAL]
            ratios = ratio_of(theirs, ours, "seconds")
            record[f"steps_per_second_{dtype}"] = round(statistics.median(ratios), 3)
            record[f"peak_memory_{dtype}"] = round(beyond_libraries(ours) / beyond_libraries(theirs), 3)
            detail[dtype]["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
            detail[dtype]["cpu_seconds_ratio"] = round(statistics.median(ratio_of(theirs, ours, "cpu_seconds")), 3)
    return record | {"detail": detail}


def write_case(folder: Path, dtype: str, args: argparse.Namespace) -> None:
    shape = DrafterConfig.from_verifier(
        {
            "vocab_size": args.vocabulary,
            "hidden_size": args.hidden,
            "intermediate_size": args.mlp,
            "num_hidden_layers": 28,
            "num_attention_heads": args.heads,
            "num_key_value_heads": args.kv_heads,
            "head_dim": args.head_dim,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        block_size=args.block,
        num_layers=args.layers,
        mask_token_id=args.vocabulary - 1,
        target_layer_ids=TAPS,
    )
    peers.write_case(
        folder,
        shape,
        lengths=[args.tokens] * args.batch,
        prompt=args.tokens // 4,
        anchors=anchors(args),
        dtype=dtype,
        device=args.device,
        threads=args.threads,
        slot_weights="decay",
        gamma=10.0,
        alpha=0.5,
        learning_rate=6e-4,
    )


def anchors(args: argparse.Namespace) -> torch.Tensor:
    """(B, A), ascending, behind the prompt; with whole blocks, as speculators has no others."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.arange(args.tokens // 4, args.tokens - args.block)
    rows = [choices[torch.randperm(len(choices), generator=generator)[: args.anchors]] for _ in range(args.batch)]
    return torch.stack(rows).sort(1).values


def take_turns(folder: Path, names: list[str], *, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every step of every trainer; the first of each only warms up."""
    with ExitStack() as stack:
        running = [stack.enter_context(closing(peers.Trainer(name, folder))) for name in names]
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for trainer in running:
                steps[trainer.name].append(trainer.step() | trainer.memory)
    return steps


def metric_overhead(folder: Path, *, rounds: int) -> float:
    """The share of a step's CPU time that goes into metrics, those of logged steps included, as often as they are."""
    with closing(peers.Trainer(OURS, folder)) as trainer:
        trainer.step()
        taken = [(trainer.step(), trainer.step("logged")["cpu_seconds"]) for _ in range(rounds)]
    step = statistics.median(plain["cpu_seconds"] for plain, _ in taken)
    always = statistics.median(plain["metrics_cpu_seconds"] for plain, _ in taken)
    logged = statistics.median(logged - plain["cpu_seconds"] for plain, logged in taken)
    return round((always + logged / TrainingConfig.model_fields["log_every"].default) / step, 4)


def check(measured: dict[str, list[dict[str, float]]], **tolerances: float) -> None:
    """All must compute the same: loss and gradient norm of the first step, made from weights that they share."""
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
        "seconds_per_step": round(statistics.median(step["seconds"] for step in steps[1:]), 4),
        "cpu_seconds_per_step": round(statistics.median(step["cpu_seconds"] for step in steps[1:]), 4),
        "peak_mb": round(steps[-1]["peak_mb"]),
        "peak_beyond_libraries_mb": round(beyond_libraries(steps)),
        "peak_beyond_loaded_mb": round(steps[-1]["peak_mb"] - steps[-1]["loaded_mb"]),
    }


def visible_keys(args: argparse.Namespace) -> int:
    """Of all blocks: the context before each anchor, and each block itself."""
    return int((anchors(args) + args.block).sum())


def useful_flops(args: argparse.Namespace) -> float:
    """Of a step, without what is computed twice: products of trained weights count three times (forward, gradient of
    the weights, gradient of the input), the frozen head and `fc`, whose input has no gradient, twice."""
    context, blocks = args.batch * args.tokens, args.batch * args.anchors * args.block
    q, kv = args.heads * args.head_dim, args.kv_heads * args.head_dim
    layer = args.hidden * (2 * q + 2 * kv + 3 * args.mlp) * blocks + args.hidden * 2 * kv * context
    attention = 2 * q * args.block * visible_keys(args)
    head = args.hidden * args.vocabulary * args.batch * args.anchors * (args.block - 1)
    return 2 * (3 * args.layers * (layer + attention) + 2 * head + 2 * len(TAPS) * args.hidden**2 * context)


def sweep(args: argparse.Namespace) -> str:
    """A Markdown table, ours alone and one row a batch; the figure goes into args.sweep."""
    args.batch = 1
    lines = [
        "| anchors | tokens | vocabulary | step (s) | attention (s) | visible keys | attention per visible key (µs) |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    series: dict[str, list[tuple[float, float]]] = {}
    for name, values in SWEEP.items():
        for value in values:
            point = argparse.Namespace(**vars(args) | {name: value})
            with tempfile.TemporaryDirectory() as folder:
                write_case(Path(folder), DTYPES[args.dtypes[0]], point)
                with closing(peers.Trainer(OURS, Path(folder))) as trainer:
                    trainer.step()
                    steps = [trainer.step() for _ in range(args.rounds)]
            seconds = statistics.median(step["cpu_seconds"] for step in steps)
            attention = statistics.median(step["attention_cpu_seconds"] for step in steps)
            keys = visible_keys(point)
            shape = f"| {point.anchors} | {point.tokens} | {point.vocabulary:,} "
            lines.append(f"{shape}| {seconds:.2f} | {attention:.3f} | {keys:,} | {1e6 * attention / keys:.2f} |")
            series.setdefault(name, []).append((value / SWEEP[name][0], seconds))
            if name != "vocabulary":
                series.setdefault(f"{name}*", []).append((value / SWEEP[name][0], attention))
    draw(series, args.sweep, threads=args.threads)
    return "\n".join(lines)


def draw(series: dict[str, list[tuple[float, float]]], folder: Path, *, threads: int) -> None:
    title, ylabel = "Cost of a step (* of its attention alone)", f"CPU seconds (threads: {threads})"
    figure = plots.lines(series, title=title, xlabel="times the smallest value", ylabel=ylabel)
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    folder.mkdir(parents=True, exist_ok=True)
    plots.save(figure, folder, "training_cost")


if __name__ == "__main__":
    main()
