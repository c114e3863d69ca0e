"""Draw the bundled prompt files, `gsm8k_train.jsonl`, `evaluation.jsonl` and `spec_bench.jsonl`.

    python scripts/sample_prompts.py GSM8K_TRAIN.jsonl GSM8K_TEST.jsonl SPEC_BENCH.jsonl dflash/assets/prompts

GSM8K: `train.jsonl`, `test.jsonl` of https://github.com/openai/grade-school-math (MIT).
Spec-Bench: `data/spec_bench/question.jsonl` of https://github.com/hemingkx/Spec-Bench (Apache-2.0).
Seeded: the same sources give the same files. The first N rows of both evaluation files hold each category in
proportion.
"""

import argparse
import json
import random
from pathlib import Path

from dflash.corpus.bucketing import interleave

NUM_TRAINING = 480
NUM_EVALUATION = {"gsm8k": 40, "math_reasoning": 16, "qa": 8, "reasoning": 8, "writing": 8}
SHORT = 400  # characters of the longest Spec-Bench prompt: the demo runs on two cores
NUM_SPEC_BENCH = 8  # of each of its 13 categories, of any length


def read(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def asked(prompts: list[tuple[str, str]]) -> list[dict]:
    return [{"category": category, "messages": [{"role": "user", "content": text}]} for category, text in prompts]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} prompts")


def of_each_category(rows: list[dict], *, without: set[str], rng: random.Random) -> list[dict]:
    """Spec-Bench rows with all their turns, by turns of each category; none that is one of the questions `without`."""
    pools: dict[str, list[list[str]]] = {}
    for row in rows:
        turns = [turn.strip() for turn in row["turns"]]
        if len(turns) > 1 or turns[0] not in without:
            pools.setdefault(row["category"], []).append(turns)
    chosen = {category: rng.sample(sorted(pools[category]), NUM_SPEC_BENCH) for category in sorted(pools)}
    return [{"category": name, "turns": chosen[name][i]} for i in range(NUM_SPEC_BENCH) for name in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k_train", type=Path)
    parser.add_argument("gsm8k_test", type=Path)
    parser.add_argument("spec_bench", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)

    spec_bench: dict[str, list[str]] = {}
    rows = read(args.spec_bench)
    for row in rows:
        text = row["turns"][0].strip()
        if len(text) < SHORT:
            spec_bench.setdefault(row["category"], []).append(text)
    # Spec-Bench's math_reasoning questions are GSM8K test questions too
    taken = {" ".join(text.split()) for text in spec_bench["math_reasoning"]}
    test = [row["question"].strip() for row in read(args.gsm8k_test)]
    pools = spec_bench | {"gsm8k": [text for text in test if " ".join(text.split()) not in taken]}
    chosen = {name: rng.sample(sorted(set(pools[name])), count) for name, count in NUM_EVALUATION.items()}
    order = interleave(list(NUM_EVALUATION.values()))
    evaluation = [(name, chosen[name].pop()) for name in (list(NUM_EVALUATION)[i] for i in order)]
    training = rng.sample(sorted({row["question"].strip() for row in read(args.gsm8k_train)}), NUM_TRAINING)

    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "gsm8k_train.jsonl", asked([("gsm8k", text) for text in training]))
    write(args.out / "evaluation.jsonl", asked(evaluation))
    write(args.out / "spec_bench.jsonl", of_each_category(rows, without={text for _, text in evaluation}, rng=rng))


if __name__ == "__main__":
    main()
