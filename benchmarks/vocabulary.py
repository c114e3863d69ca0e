"""Trimmed draft vocabularies: what they cost in acceptance length and save in the time of a draft.

    dflash run demo
    python benchmarks/vocabulary.py STATES EVALUATION      # the two extractions of that run, as dflash ls shows them

Trains the recipe's drafter anew for each size, on the same rows and with the same seed, and replays the evaluation set.
The time is the least of many drafts of one block after 128 tokens on one thread: what a drafter does before the tree.
Then the same of a head as large as Qwen3-0.6B's, which is where trimming is for.
"""

import argparse
import time
from collections.abc import Callable

import torch

from dflash.decoding.replay import best_tokens, replay_rows
from dflash.drafter.export import load_drafter
from dflash.drafter.model import Drafter, DrafterConfig, Ends
from dflash.hidden.store import HiddenStates
from dflash.manifests import Artifact, home, load_manifest
from dflash.training.loop import train
from flows.recipes import load_recipe

BUDGET = 64
QWEN3 = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


def least(run: Callable[[], object], *, times: int) -> float:
    """Milliseconds of the fastest of so many calls."""
    seconds = []
    for _ in range(times):
        t0 = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - t0)
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


def artifact_of(key: str) -> Artifact:
    return load_manifest(home() / "artifacts" / "extraction" / key).artifact()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", help="Key of the hidden states to train on.")
    parser.add_argument("evaluation", help="Key of those to evaluate on.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 1024, 512, 256])
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--times", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = HiddenStates.open(artifact_of(args.evaluation).path)
    whole = Ends(store.frozen(), dtype=torch.float32, **store.info["logits"])
    print(f"| tokens | of the labels | chain | tree {BUDGET} | draft (ms) |\n|---|---|---|---|---|", flush=True)
    for size in args.sizes:
        changes = [*args.set, f"training.draft_vocab_size={size}", "training.tracking=disabled"]
        made = train(load_recipe(args.recipe, changes).training, artifact_of(args.states))
        drafter = load_drafter(made.path, dtype=torch.float32)
        ends = whole.for_drafter(drafter)
        rows = (store.read(number) for number in range(len(store.rows)))
        found = replay_rows(drafter, ends, rows, budgets=[BUDGET])
        covered = made.summary.get("draft_vocabulary", {}).get("coverage", {}).get("validation", 1.0)
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
