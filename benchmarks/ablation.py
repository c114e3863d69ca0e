"""What helps training: one change at a time to a plain recipe, on the bundled verifier; a table in Markdown.

    python benchmarks/ablation.py [--steps 200] [--seeds 3] [--processes 2] [--only plain --only Muon]
    python benchmarks/ablation.py --seeds 1 --long 3 [--data GSM8K_TRAIN.jsonl]

Hidden states are made once by the pipeline's own stages; each run trains for a fixed number of steps, in a process with
one thread, and is judged by replaying the held-out evaluation prompts. Runs are appended to results.jsonl under
DFLASH_HOME/ablation as they finish; those that are there are not run again, so an interrupted table continues.

`--long N` runs the N best and the plain recipe for 10 times the steps. `--data` gives these 10 times the prompts: the
bundled ones are a 16th of GSM8K's training split, whose file has them all.

Intervals are 95 %, by drawing seeds and responses anew, both at once; differences are of the same seeds and responses.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import ExtractionConfig, GenerationConfig, Recipe, TokenizationConfig, TrainingConfig
from dflash.corpus.chunks import plan_chunks
from dflash.corpus.collection import collect
from dflash.decoding.acceptance import CHAIN, method_name
from dflash.decoding.statistics import percentile_interval, resampled_sums
from dflash.hidden.planning import plan_shards
from dflash.keys import extraction_key, generation_key, prompts_key, tokenization_key, training_key
from dflash.manifests import Artifact, Key, find, home
from dflash.pinning import PinnedVerifier, pin
from flows.recipes import load_recipe

BUDGETS = (16, 64)
METHODS = (CHAIN, *map(method_name, BUDGETS))
PLAIN = "plain"
LONG = 10
BUNDLED_PROMPTS = 480

PLAIN_RECIPE: dict[str, Any] = {
    # small steps, so that there are many in a minute of one thread: about five rows, 16 blocks of each
    "num_anchors": 16,
    "max_tokens_per_batch": 1024,
    # the production recipes' settings on a drafter of the demo's size, whose learning rate is the demo's
    "slot_weights": "decay",
    "gamma": 10.0,
    "optimizer": "adamw",
    "beta2": 0.95,
    "learning_rate": 0.003,
    "noise_start": 0.05,
    "noise_end": 0.05,
    "schedule": "cosine",
    "warmup_share": 0.1,
    "order": "interleaved",
    "labels": "greedy",
    "initialisation": "random",
}
MUON = {"optimizer": "muon"}
VERIFIER = {"initialisation": "verifier"}
DPACE = {"slot_weights": "dpace"}
TREE = {"slot_weights": "tree", "tree_budget": 64}
NO_WARMUP = {"warmup_share": 0.0}


def _loss(**weights: float) -> dict[str, Any]:
    return {"loss": {"ce": 0.0} | weights}


VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "gamma 4": {"gamma": 4.0},
    "gamma 7": {"gamma": 7.0},
    "gamma 20": {"gamma": 20.0},
    "uniform": {"slot_weights": "uniform"},
    "D-PACE": DPACE,
    "tree(64)": TREE,
    "noise 0": {"noise_start": 0.0, "noise_end": 0.0},
    "noise 0.05 to 0": {"noise_end": 0.0},
    # noise ramps with the warmup: a constant one has none, and is to be compared with the row above it
    "no warmup, noise 0": NO_WARMUP | {"noise_start": 0.0, "noise_end": 0.0},
    "no warmup, noise 0.05": NO_WARMUP,
    "beta2 0.999": {"beta2": 0.999},
    "Muon": MUON,
    "verifier's layers": VERIFIER,
    "Muon, verifier's layers": MUON | VERIFIER,
    "Muon, D-PACE": MUON | DPACE,
    "Muon, tree(64)": MUON | TREE,
    "Muon, verifier's layers, D-PACE": MUON | VERIFIER | DPACE,
    "Muon, verifier's layers, tree(64)": MUON | VERIFIER | TREE,
    "buckets shuffled": {"order": "shuffled"},
    "buckets sequential": {"order": "sequential"},
    "EMA 0.99": {"ema": 0.99},
    "WSD": {"schedule": "wsd"},
    "linear": {"schedule": "linear"},
    "labels of the data": {"labels": "data"},
    "KL": _loss(kl=1.0),
    "TV": _loss(tv=1.0),
    "LK": _loss(lk=1.0),
    "CE + KL": _loss(ce=0.5, kl=0.5),
    "CE + LK": _loss(ce=0.5, lk=0.5),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="not all variants")
    parser.add_argument("--long", type=int, default=0, metavar="N", help="the N best and the plain one, 10x the steps")
    parser.add_argument("--data", default="", help="prompts of the long runs")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the recipe demo")
    parser.add_argument("--run", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    recipe = load_recipe("demo", ["extraction.store_final=true", *_data(args), *args.set])
    if args.run:
        print(json.dumps(run(recipe, args, args.run[0], int(args.run[1]))))
        return
    results = home() / "ablation" / "results.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    verifier = pin(recipe.verifier)
    states, _ = hidden_states(recipe, verifier)
    names = _names(args, results)
    wanted = [(name, seed) for seed in range(args.seeds) for name in names]
    keys = {(name, seed): str(training_key(config(recipe, args, name, seed), states)) for name, seed in wanted}
    done = {row["key"] for row in read(results)}
    missing = [pair for pair in wanted if keys[pair] not in done]
    print(f"{len(wanted)} runs of {_steps(args)} steps, {len(missing)} to do; {results}", file=sys.stderr)
    failed = run_all(missing, args, results, extra=list(arguments if arguments is not None else sys.argv[1:]))
    rows = [row for row in read(results) if row["key"] in keys.values()]
    print(table(rows, names))
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {', '.join(f'{name} (seed {seed})' for name, seed in failed)}")


def _data(args: argparse.Namespace) -> list[str]:
    if not (args.long and args.data):
        return []
    return [f"generation.prompts=[{json.dumps(args.data)}]", f"generation.max_prompts={BUNDLED_PROMPTS * LONG}"]


def _steps(args: argparse.Namespace) -> int:
    return args.steps * (LONG if args.long else 1)


def _names(args: argparse.Namespace, results: Path) -> list[str]:
    if args.only:
        if unknown := sorted(set(args.only) - set(VARIANTS)):
            raise ValueError(f"--only: no variant {unknown[0]!r}; choose from {'; '.join(VARIANTS)}")
        return args.only
    if not args.long:
        return list(VARIANTS)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read(results):
        if row["steps"] == args.steps:
            rows[row["name"]].append(row)
    if PLAIN not in rows:
        raise ValueError(f"--long {args.long}: {results} has no runs of {args.steps} steps; make the table first")
    ranked = sorted(rows, key=lambda name: -float(np.mean(_taus(rows[name], METHODS[-1]))))
    return [PLAIN, *[name for name in ranked if name != PLAIN][: args.long]]


def config(recipe: Recipe, args: argparse.Namespace, name: str, seed: int) -> TrainingConfig:
    """The demo's training with the plain recipe's settings, a variant's, and a fixed number of steps."""
    steps = _steps(args)
    fixed = {"max_steps": steps, "epochs": steps, "validate_every": steps, "save_every": max(1, steps // 4)}
    fixed |= {"seed": seed, "tracking": "disabled", "device": "cpu", "log_every": 50}
    return TrainingConfig.model_validate(recipe.training.model_dump() | PLAIN_RECIPE | VARIANTS[name] | fixed)


def hidden_states(recipe: Recipe, verifier: PinnedVerifier) -> tuple[Artifact, Artifact]:
    """Of the training and of the evaluation prompts, made where they are missing, as the pipeline makes them."""
    training = _states(recipe.generation, recipe.tokenization, recipe.extraction, verifier, recipe.evaluation.prompts)
    evaluation = _states(
        recipe.evaluation_generation(), recipe.evaluation_tokenization(), recipe.extraction, verifier, []
    )
    return training, evaluation


def _states(
    generation: GenerationConfig,
    tokenization: TokenizationConfig,
    extraction: ExtractionConfig,
    verifier: PinnedVerifier,
    contaminants: list[Any],
) -> Artifact:
    from dflash.corpus import generation as answers
    from dflash.corpus.tokenization import tokenize
    from dflash.hidden import extraction as states

    prompts = _made(prompts_key(generation, contaminants), lambda: collect(generation, contaminants))
    chunks = [
        _made(plan.key, lambda plan=plan: answers.generate_chunk(plan, generation, prompts, verifier), plan.location)
        for plan in plan_chunks(generation, prompts, verifier)
    ]
    conversations = _made(
        generation_key(generation, prompts, verifier), lambda: answers.seal(chunks, generation, prompts, verifier)
    )
    corpus = _made(
        tokenization_key(tokenization, conversations, verifier),
        lambda: tokenize(tokenization, conversations, verifier),
    )
    shards = [
        _made(plan.key, lambda plan=plan: states.extract_shard(plan, extraction, corpus, verifier), plan.location)
        for plan in plan_shards(extraction, corpus, verifier)
    ]
    return _made(
        extraction_key(extraction, corpus, verifier), lambda: states.seal(shards, extraction, corpus, verifier)
    )


def _made(key: Key, make: Callable[[], Artifact], location: str = "") -> Artifact:
    return find(key, location=location) or make()


def run(recipe: Recipe, args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train one variant and replay the evaluation prompts: (accepted, rounds) of each response, by method."""
    import torch

    from dflash.decoding.replay import replay
    from dflash.drafter.export import load_drafter
    from dflash.drafter.model import Ends
    from dflash.hidden.store import HiddenStates
    from dflash.training.loop import train

    torch.set_num_threads(1)
    verifier = pin(recipe.verifier)
    states, evaluation = hidden_states(recipe, verifier)
    settings = config(recipe, args, name, seed)
    drafter = train(settings, states, verifier=verifier)
    store = HiddenStates.open(evaluation.path)
    model = load_drafter(drafter.path, dtype=torch.float32)
    ends = Ends(store.frozen(), dtype=torch.float32, **store.info["logits"])
    rounds: dict[str, list[tuple[int, int]]] = {method: [] for method in METHODS}
    for number in range(len(store.rows)):
        replayed = replay(model, ends, store.read(number), budgets=BUDGETS)
        for method in METHODS:
            rounds[method].append((sum(replayed[method]), len(replayed[method])))
    key = str(training_key(settings, states))
    return {"name": name, "seed": seed, "steps": settings.max_steps, "key": key, "responses": rounds}


def run_all(
    pairs: list[tuple[str, int]], args: argparse.Namespace, results: Path, *, extra: list[str]
) -> list[tuple[str, int]]:
    """Each in a process of its own, several at a time; rows are appended as they come. Returns those that failed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DFLASH_HOME": str(home())}

    def one(name: str, seed: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, __file__, *extra, "--run", name, str(seed)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    failed = []
    with ThreadPoolExecutor(max(1, args.processes)) as pool:
        waiting = {pool.submit(one, name, seed): (name, seed) for name, seed in pairs}
        for number, future in enumerate(as_completed(waiting), 1):
            name, seed = waiting[future]
            finished = future.result()
            if finished.returncode:
                failed.append((name, seed))
                said = (finished.stderr.strip().splitlines() or ["no output"])[-1]
            else:
                line = finished.stdout.strip().splitlines()[-1]
                with results.open("a") as file:
                    file.write(line + "\n")
                said = "  ".join(f"{method} {_taus([json.loads(line)], method)[0]:.3f}" for method in METHODS)
            print(f"{number} of {len(pairs)}: {name}, seed {seed}: {said}", file=sys.stderr, flush=True)
    return failed


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _sums(rows: Sequence[dict[str, Any]], method: str) -> np.ndarray:
    """(seeds, responses, 2) of accepted and rounds."""
    return np.array([row["responses"][method] for row in rows], dtype=np.float64)


def _taus(rows: Sequence[dict[str, Any]], method: str) -> list[float]:
    """Of each seed, over all responses."""
    return [float(1 + accepted / rounds) for accepted, rounds in _sums(rows, method).sum(1)]


def _resampled(rows: Sequence[dict[str, Any]], method: str) -> np.ndarray:
    """Mean tau over seeds of each resample of seeds and responses; the same draws for all variants of as many seeds."""
    sums_SR2 = _sums(rows, method)
    num_seeds, num_responses, _ = sums_SR2.shape
    sums_BS2 = resampled_sums(sums_SR2.swapaxes(0, 1).reshape(num_responses, -1), seed=0).reshape(-1, num_seeds, 2)
    taus_BS = 1 + sums_BS2[..., 0] / sums_BS2[..., 1]
    drawn_BS = np.random.default_rng(1).integers(num_seeds, size=taus_BS.shape)
    return np.take_along_axis(taus_BS, drawn_BS, 1).mean(1)


def table(rows: list[dict[str, Any]], names: Sequence[str]) -> str:
    """Markdown: tau of each variant, and by how much tree64 differs from the plain recipe."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        by_name[row["name"]].append(row)
    plain = by_name.get(PLAIN, [])
    lines = [
        f"| change | {' | '.join(METHODS)} | {METHODS[-1]}: more than {PLAIN} | seeds |",
        f"|---|{'---|' * len(METHODS)}---|--:|",
    ]
    for name in names:
        if mine := by_name[name]:
            cells = [_cell(np.mean(_taus(mine, method)), _resampled(mine, method)) for method in METHODS]
            same = [row["seed"] for row in mine] == [row["seed"] for row in plain]
            difference = "" if name == PLAIN or not same else _difference(mine, plain)
            lines.append(f"| {name} | {' | '.join(cells)} | {difference} | {len(mine)} |")
    return "\n".join(lines)


def _cell(value: float, resampled_B: np.ndarray, sign: str = "") -> str:
    low, high = percentile_interval(resampled_B)
    return f"{value:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def _difference(mine: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    method = METHODS[-1]
    value = np.mean(_taus(mine, method)) - np.mean(_taus(plain, method))
    return _cell(value, _resampled(mine, method) - _resampled(plain, method), "+")


if __name__ == "__main__":
    main()
