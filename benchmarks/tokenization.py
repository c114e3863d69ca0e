"""Speed of the tokenization stage on answers that are kept, against the tokenizer alone on the same texts; JSON line.

    python benchmarks/tokenization.py [--data gsm8k_train.jsonl] [--rows 60000]

`stage` is all of it: reading, rendering, tokenizing, masks, split, buckets, writing; workers' start included.
`encode_batch` is the Transformers tokenizer's backend on all cores, given the rendered texts. They alternate; medians.
Without data, every bundled prompt is answered by the next one. Rows are repeated up to the number asked for; with
`--longer N` an answer is N of them in a row, as long as reasoning models answer.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import polars as pl

from dflash.bundled import resolve
from dflash.config import GenerationConfig, SourceConfig, TokenizationConfig, VerifierConfig
from dflash.corpus.chat import load_chat
from dflash.corpus.collection import collect
from dflash.corpus.tokenization import tokenize
from dflash.manifests import Artifact, Key, publish
from dflash.pinning import pin

SERVED = {"turn": pl.Int32(), "prompt_ids": pl.List(pl.Int32()), "response_ids": pl.List(pl.Int32())}


def bundled_pairs(path: Path) -> Path:
    questions = [json.loads(line)["messages"][0] for line in resolve("bundled:gsm8k-train").read_text().splitlines()]
    answers = [{"role": "assistant", "content": message["content"]} for message in [*questions[1:], questions[0]]]
    lines = [json.dumps({"messages": pair}) for pair in zip(questions, answers, strict=True)]
    path.write_text("\n".join(lines))
    return path


def lengthened(messages: str, *, times: int) -> str:
    *before, answer = json.loads(messages)
    return json.dumps([*before, answer | {"content": "\n\n".join([answer["content"]] * times)}])


def conversations(data: list[str], *, rows: int, longer: int = 1) -> Artifact:
    sources = [SourceConfig(path=path, answers="keep") for path in data]
    prompts = collect(GenerationConfig(prompts=sources, deduplicate="off"))
    once = pl.read_parquet(prompts.path / "prompts" / "*.parquet")
    once = once.with_columns(messages=pl.Series([lengthened(text, times=longer) for text in once["messages"]]))
    whole = pl.concat([once] * -(-rows // once.height)).head(rows)
    key = Key(stage="generation", recipe=0, config={"rows": rows}, inputs={"prompts": prompts.identity})
    with publish(key, summary={}) as (folder, artifact):
        whole.with_columns(pl.lit(None, dtype=kind).alias(name) for name, kind in SERVED.items()).write_parquet(
            folder / "conversations.parquet"
        )
    return artifact()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--longer", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--verifier", default="bundled:demo-verifier")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DFLASH_HOME"] = folder
        verifier = pin(VerifierConfig(model=args.verifier))
        artifact = conversations(
            args.data or [str(bundled_pairs(Path(folder) / "pairs.jsonl"))], rows=args.rows, longer=args.longer
        )
        tokenizer = load_chat(verifier).tokenizer
        messages = pl.read_parquet(artifact.path / "conversations.parquet")["messages"]
        texts = [tokenizer.apply_chat_template(json.loads(text), tokenize=False) for text in messages]
        config = TokenizationConfig(workers=args.workers)
        stage, alone = [], []
        for _ in range(args.rounds):
            t0 = time.perf_counter()
            encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
            alone.append(time.perf_counter() - t0)
            tokens = sum(len(encoding) for encoding in encodings)
            del encodings
            t0 = time.perf_counter()
            summary = tokenize(config, artifact, verifier).summary
            stage.append(time.perf_counter() - t0)
    seconds = {"stage": statistics.median(stage), "encode_batch": statistics.median(alone)}
    record: dict[str, object] = {"rows": args.rows, "tokens": tokens, "kept_tokens": summary["tokens"]}
    for name, median in seconds.items():
        record[name] = {"rows_per_second": round(args.rows / median), "tokens_per_second": round(tokens / median)}
    record["share"] = round(seconds["encode_batch"] / seconds["stage"], 3)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
