"""Extraction killed without warning, again and again, while it writes and while it publishes: what counts is whole."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hidden_small import make_corpus, pinned, save_verifier

from dflash.config import ExtractionConfig
from dflash.hidden.extraction import extract_shard, seal
from dflash.hidden.planning import plan_shards
from dflash.hidden.store import HiddenStates
from dflash.manifests import MANIFEST, Artifact, find, load_manifest, verify

CONTEXT = multiprocessing.get_context("forkserver")  # loads torch once, and is itself not threaded
CONTEXT.set_forkserver_preload(["dflash.hidden.extraction", "transformers.models.qwen3.modeling_qwen3"])
LENGTHS = [20 + i % 40 for i in range(240)]  # some 50 shards, so that the last kill still finds one to make
CONFIG = ExtractionConfig(target_layer_ids=[0, 2], storage_dtype="float32", shard_tokens=200, batch_tokens=100)


def extract(verifier: Path) -> Artifact:
    """As a run does it: shards that are there are kept."""
    torch.set_num_threads(1)
    pin, corpus = pinned(verifier), make_corpus(LENGTHS)
    plans = plan_shards(CONFIG, corpus, pin)
    shards = [find(plan.key, location=plan.location) or extract_shard(plan, CONFIG, corpus, pin) for plan in plans]
    return seal(shards, CONFIG, corpus, pin)


def extract_in(home: str, verifier: Path) -> None:
    os.environ["DFLASH_HOME"] = home
    extract(verifier)


def contents(artifact: Artifact) -> dict[str, str]:
    names = load_manifest(artifact.path).files.items()
    return {name: record.sha256 for name, record in names if not name.endswith(MANIFEST)}


def test_killed_at_any_moment_and_run_again_everything_is_whole(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, rng = save_verifier(tmp_path / "verifier"), random.Random(0)
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "undisturbed"))
    expected = contents(extract(verifier))
    monkeypatch.setenv("DFLASH_HOME", str(home))

    def shards(name: str) -> list[Path]:
        return list((home / "artifacts" / "extraction").glob(f"*/shards/{name}"))

    def finished() -> int:
        return len(shards(f"[0-9]*/{MANIFEST}"))

    def writing() -> bool:
        return finished() > before and any(path.stat().st_size for path in shards(".*/features/c/0/*"))

    def publishing() -> bool:
        return finished() > before and len(shards("[0-9]*")) > finished()

    def a_while_later() -> bool:
        if finished() <= before:
            return False
        time.sleep(rng.random() * 0.1)
        return True

    def holds(condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except FileNotFoundError:  # what is looked at is moved meanwhile
            return False

    def kill_when(condition: Callable[[], bool]) -> None:
        process = CONTEXT.Process(target=extract_in, args=(str(home), verifier))
        process.start()
        deadline = time.monotonic() + 60
        while not holds(condition):
            assert process.is_alive(), "it was to be killed before it ends"
            assert time.monotonic() < deadline
        process.kill()
        process.join()

    for condition in (writing, publishing, a_while_later, a_while_later):
        before = finished()
        kill_when(condition)
        for path in shards(f"[0-9]*/{MANIFEST}"):
            verify(load_manifest(path.parent), deep=True)
    before = finished()
    artifact = extract(verifier)
    assert before < len(shards(f"[0-9]*/{MANIFEST}")), "it was never killed too late to matter"
    assert contents(artifact) == expected
    verify(artifact, deep=True)
    assert not shards(".*"), "what was killed leaves nothing"
    states = HiddenStates.open(artifact.path)
    assert [len(states.read(i).input_ids_T) for i in range(len(states.rows))] == [row.length for row in states.rows]
