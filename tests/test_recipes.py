"""A stage whose output changes must say so: bump its number in RECIPES, or caches serve what the code no longer makes.

After a bump: `DFLASH_UPDATE_GOLDEN=1 python -m pytest tests/test_recipes.py` pins the new output.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from dflash.bundled import resolve
from dflash.config import (
    EvaluationConfig,
    ExtractionConfig,
    GenerationConfig,
    SourceConfig,
    TokenizationConfig,
    TrainingConfig,
    VerifierConfig,
)
from dflash.corpus.tokenization import tokenize
from dflash.decoding.evaluation import evaluate
from dflash.hidden.extraction import extract_shard, plan_shards, seal
from dflash.hidden.store import HiddenStates
from dflash.keys import RECIPES
from dflash.manifests import silent
from dflash.pinning import pin
from dflash.training.loop import train
from tests.answered import answered

GOLDEN = Path(__file__).parent / "golden.json"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What each stage makes of eight prompts: digests of ids, digits of numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(tmp_path_factory.mktemp("golden")))
        prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
        prompts.write_text("\n".join(resolve("bundled:gsm8k-train").read_text().splitlines()[:8]))
        verifier = pin(VerifierConfig(model="bundled:demo-verifier", dtype="float32", device="cpu"))
        made: dict[str, Any] = {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums of another number of threads differ in their last bits, and training amplifies

        generation = GenerationConfig(prompts=[SourceConfig(path=str(prompts))], max_new_tokens=24, chunk_prompts=5)
        collected, conversations = answered(generation, verifier)
        rows = pl.read_parquet(collected.path / "prompts" / "*.parquet")
        made["prompts"] = digest(rows.drop("origin", "source").rows())
        served = pl.read_parquet(conversations.path / "conversations.parquet")
        made["generation"] = digest(served.select("id", "response_ids", "finish_reason").rows())

        corpus = tokenize(
            TokenizationConfig(max_length=256, validation_share=0.3, num_buckets=2), conversations, verifier
        )
        rows = pl.read_parquet(corpus.path / "corpus.parquet")
        made["tokenization"] = digest(rows.select("id", "split", "bucket", "input_ids", "loss_mask").rows())

        extraction = ExtractionConfig(num_taps=3, storage_dtype="float32", shard_tokens=600)
        plans = plan_shards(extraction, corpus, verifier)
        shards = [extract_shard(plan, extraction, corpus, verifier, progress=silent) for plan in plans]
        states = seal(shards, extraction, corpus, verifier, progress=silent)
        store = HiddenStates.open(states.path)
        read = [store.read(number) for number in range(len(store.rows))]
        made["extraction"] = {
            "greedy_ids": digest([row.greedy_ids_T.tolist() for row in read]),
            "mean_of_features": float(torch.cat([row.features_TF for row in read]).abs().mean()),
        }

        training = TrainingConfig(
            mask_token_id=3, num_layers=1, num_anchors=32, epochs=8, max_steps=8, dtype="float32", tracking="disabled",
            device="cpu", log_every=1, optimizer="adamw", learning_rate=0.001,
        )  # fmt: skip  # not Muon: it rounds to bfloat16, in which processors differ
        drafter = train(training, states, progress=silent, should_stop=lambda: False)
        lines = [json.loads(line) for line in (drafter.path / "metrics.jsonl").read_text().splitlines()]
        made["training"] = {"losses": [line["train/loss"] for line in lines if "train/loss" in line]}

        report = evaluate(
            EvaluationConfig(prompts=[SourceConfig(path=str(prompts))], budgets=[16, 64], live_prompts=1),
            drafter,
            states,
            verifier,
        )
        made["evaluation"] = json.loads((report.path / "report.json").read_text())["acceptance_length"]
        torch.set_num_threads(threads)
        yield made


@pytest.mark.parametrize("stage", RECIPES)
def test_the_output_of_a_stage_changes_only_with_its_recipe_number(outputs: dict[str, Any], stage: str) -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("DFLASH_UPDATE_GOLDEN"):
        golden[stage] = {"recipe": RECIPES[stage], "output": outputs[stage]}
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    expected = golden[stage]
    assert expected["recipe"] == RECIPES[stage], f"{stage} was bumped: pin its new output (see the top of this file)"
    assert close(outputs[stage], expected["output"]), (
        f"{stage} makes something else than before ({outputs[stage]}, was {expected['output']}): "
        f"bump RECIPES[{stage!r}] in dflash/keys.py and pin the new output (see the top of this file)"
    )


def close(a: Any, b: Any) -> bool:
    """Equal texts; numbers to four digits, since sums differ between processors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == b if isinstance(a, str) else a == pytest.approx(b, rel=1e-3)
