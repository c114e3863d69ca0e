"""The order in which shards are made, their names, and what an extraction is said to take before it starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_small import make_corpus, pinned, save_verifier
from hypothesis import given
from hypothesis import strategies as st

from dflash.config import ExtractionConfig
from dflash.hidden import extraction
from dflash.hidden.planning import ShardPlan, longest_first, missing, plan_shards
from dflash.hidden.probing import SHARE, seconds_per_token
from dflash.manifests import Key
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier

CONFIG = ExtractionConfig(target_layer_ids=[0, 2], storage_dtype="float32", shard_tokens=60)
KEY = Key(stage="extraction", recipe=1, config={}, inputs={})


def shard(number: int, tokens: int, *, count: int = 240) -> ShardPlan:
    return ShardPlan(key=KEY, location="", number=number, count=count, tokens=tokens, rows=[])


@pytest.fixture
def verifier(tmp_path: Path, home: Path) -> PinnedVerifier:
    return pinned(save_verifier(tmp_path / "verifier"))


def test_a_shard_is_named_by_its_number_and_its_size() -> None:
    assert shard(16, 1_900_000).name == "017/240 · 1.9M tokens"
    assert shard(0, 40_123, count=5).name == "1/5 · 40k tokens"
    assert shard(8, 10_400_000, count=80).name == "09/80 · 10M tokens"
    assert shard(0, 873, count=1).name == "1/1 · 873 tokens"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_the_order_leaves_the_workers_at_most_one_of_the_small_shards_apart(
    tokens: list[int], num_workers: int
) -> None:
    plans = longest_first([shard(number, count) for number, count in enumerate(tokens)])
    assert sorted(plan.number for plan in plans) == list(range(len(tokens)))
    busy: list[list[int]] = [[] for _ in range(num_workers)]
    for plan in plans:  # each goes to the worker that is free first
        min(busy, key=sum).append(plan.tokens)
    for worker in busy:
        assert sum(worker) - (worker[-1] if worker else 0) <= min(map(sum, busy))
        assert worker == sorted(worker, reverse=True)


def test_shards_that_are_there_are_not_missing(verifier: PinnedVerifier) -> None:
    corpus = make_corpus([9, 30, 12, 4, 25, 8, 16, 11])
    plans = plan_shards(CONFIG, corpus, verifier)
    assert missing(plans) == plans
    extraction.extract_shard(plans[1], CONFIG, corpus, verifier)
    assert missing(plans) == [plan for plan in plans if plan.number != 1]


class Watched(Verifier):
    """A verifier that remembers the shapes of its batches."""

    def forward(self, input_ids_BT: torch.Tensor, **options: Any) -> Any:
        shapes.append(tuple(input_ids_BT.shape))
        return super().forward(input_ids_BT, **options)


shapes: list[tuple[int, ...]] = []


@pytest.mark.parametrize(("batch_tokens", "shape"), [(100, (2, 40)), (10_000, (5, 40)), (1, (1, 40))])
def test_the_probe_is_a_batch_of_the_longest_rows_and_a_small_part_of_the_work(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch, batch_tokens: int, shape: tuple[int, int]
) -> None:
    corpus = make_corpus([10] * 200 + [40] * 50)
    config = CONFIG.model_copy(update={"batch_tokens": batch_tokens})
    loaded = load_verifier(verifier)
    loaded.__class__ = Watched
    monkeypatch.setattr(extraction, "loaded_verifier", lambda _: loaded)
    shapes.clear()
    assert seconds_per_token(plan_shards(config, corpus, verifier), config, corpus, verifier) > 0
    assert shapes[1:] == [shape]
    assert shape[0] * shape[1] <= max(40, corpus.summary["tokens"] // SHARE)
