"""Trimmed draft vocabularies: what they cost in acceptance length and save in the time of a draft.

    dflash run demo
    python benchmarks/vocabulary.py STATES EVALUATION      # the two extractions of that run, as dflash ls shows them

Trains the recipe's drafter anew for each size, on the same rows and with the same seed, and replays the evaluation set;
with `--drafter KEY` that one, of the whole vocabulary, is trimmed instead, which takes seconds. The time is the least
of many drafts of one block after 128 tokens, computing on one thread: what a drafter does before the tree. Then the
same of a head as large as Qwen3-0.6B's, which is what trimming is for.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from dflash.config import TrainingConfig
from dflash.decoding.replay import best_tokens, replay_rows
from dflash.drafter.export import load_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.hidden.store import HiddenStates
from dflash.manifests import Artifact, home, load_manifest
from dflash.training.data import coverage
from dflash.training.loop import train
from dflash.training.start import draft_vocabulary
from flows.recipes import load_recipe

BUDGET = 64
QWEN3 = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


def least(run: Callable[[], object], *, times: int) -> float:
    """Milliseconds that the fastest of so many calls computes on this thread, however busy the machine is."""
    seconds = []
    for _ in range(times):
        t0 = time.thread_time()
        run()
        seconds.append(time.thread_time() - t0)
    return 1000 * min(seconds)


@torch.inference_mode()
def draft_ms(drafter: Drafter, ends: Ends, *, times: int) -> float:
    """Of one block: the drafter's pass, the logits, and the best tokens of each slot that a tree is made of."""
    width = drafter.fc.weight.shape[1]
    context = drafter.context(torch.randn(128, width, generator=torch.Generator().manual_seed(0)))

    def draft() -> None:
        hidden_ASH = drafter.draft(ends, torch.tensor([5]), anchors_A=torch.tensor([128]), context=context)
        best_tokens(ends, hidden_ASH, k=min(BUDGET, ends.draft_vocab_size))

    return least(draft, times=times)


def artifact_of(stage: str, key: str) -> Artifact:
    return load_manifest(home() / "artifacts" / stage / key).artifact()


def trimmed(whole: Drafter, states: Artifact, *, size: int) -> tuple[Drafter, float]:
    """The same weights with so many tokens (0: all), and the share of the held-out labels that these are."""
    if not size:
        return whole, 1.0
    store = HiddenStates.open(states.path)
    drafter = Drafter(replace(whole.config, draft_vocab_size=size)).eval()
    drafter.load_state_dict(whole.weights(), strict=False)
    vocabulary = {"mask_token_id": whole.config.mask_token_id, "draft_vocab_size": size}
    drafter.keep(draft_vocabulary(TrainingConfig(**vocabulary), store, None))
    held_out = [number for number, row in enumerate(store.rows) if row.split == "validation"]
    return drafter, coverage(drafter, store, labels="greedy", validation=held_out).get("validation", 1.0)


def trained(states: Artifact, *, recipe: str, changes: list[str], size: int) -> tuple[Drafter, float]:
    """Likewise, trained with them."""
    changes = [*changes, f"training.draft_vocab_size={size}", "training.tracking=disabled"]
    made = train(load_recipe(recipe, changes).training, states)
    covered = made.summary.get("draft_vocabulary", {}).get("coverage", {}).get("validation", 1.0)
    return load_drafter(made.path, dtype=torch.float32), covered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", help="Key of the hidden states to train on.")
    parser.add_argument("evaluation", help="Key of those to evaluate on.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 1024, 512, 256])
    parser.add_argument("--drafter", default="", help="Trim this one; empty: train.")
    parser.add_argument("--rows", type=int, default=0, help="Evaluate on the first N rows; 0: all.")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--times", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = HiddenStates.open(artifact_of("extraction", args.evaluation).path)
    states = artifact_of("extraction", args.states)
    whole = Ends(store.frozen(), dtype=torch.float32, **store.info["logits"])
    print(f"| tokens | of the labels | chain | tree {BUDGET} | draft (ms) |\n|---|---|---|---|---|", flush=True)
    for size in args.sizes:
        if args.drafter:
            full = load_drafter(artifact_of("training", args.drafter).path, dtype=torch.float32)
            drafter, covered = trimmed(full, states, size=size)
        else:
            drafter, covered = trained(states, recipe=args.recipe, changes=args.set, size=size)
        ends = whole.for_drafter(drafter)
        rows = (store.read(number) for number in range(args.rows or len(store.rows)))
        found = replay_rows(drafter, ends, rows, budgets=[BUDGET])
        taus = " | ".join(f"{one.acceptance_length:.3f}" for one in found.values())
        milliseconds = draft_ms(drafter, ends, times=args.times)
        print(f"| {ends.draft_vocab_size:,} | {covered:.2%} | {taus} | {milliseconds:.2f} |", flush=True)

    print("\n| tokens, head of Qwen3-0.6B's size | draft (ms) |\n|---|---|", flush=True)
    generator = torch.Generator().manual_seed(0)
    head = {"embed_tokens.weight": torch.randn(QWEN3["vocab_size"], QWEN3["hidden_size"], generator=generator)}
    settings = {"block_size": 16, "num_layers": 2, "mask_token_id": 151_669, "target_layer_ids": [1, 9, 17]}
    for size in (0, 65_536, 32_768, 16_384):
        shape = DrafterConfig.from_verifier(QWEN3, draft_vocab_size=size, **settings)
        drafter = Drafter(shape).eval()
        if size:
            drafter.keep(torch.arange(size) * (QWEN3["vocab_size"] // size))
        ends = Ends(head, dtype=torch.float32).for_drafter(drafter)
        print(f"| {ends.draft_vocab_size:,} | {draft_ms(drafter, ends, times=args.times // 10):.1f} |", flush=True)


if __name__ == "__main__":
    main()
