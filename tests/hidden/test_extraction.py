"""Extraction end to end on a tiny real verifier: plans, shards, seal, reading, interruption and damage."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hidden_small import flip_a_byte, make_corpus, pinned, save_verifier

from dflash.config import ExtractionConfig
from dflash.corpus.bucketing import padded_runs
from dflash.corpus.chunks import MOST_CHUNKS
from dflash.hidden import extraction, planning, store
from dflash.hidden.extraction import extract_shard, seal
from dflash.hidden.planning import ShardPlan, check_space, estimate, plan_shards
from dflash.hidden.store import DAMAGED_MANIFEST, HiddenStates
from dflash.keys import extraction_key
from dflash.manifests import HOST, MANIFEST, Artifact, Damaged, find, home, load_manifest, verify
from dflash.pinning import PinnedVerifier
from dflash.verifier import load_verifier

LENGTHS = [9, 30, 12, 4, 25, 8, 16, 11]
CONFIG = ExtractionConfig(target_layer_ids=[0, 2], storage_dtype="float32", shard_tokens=45, batch_tokens=40)


@pytest.fixture(scope="session")
def verifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verifier_folder: Path) -> PinnedVerifier:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return pinned(verifier_folder)


def extract(
    corpus: Artifact, verifier: PinnedVerifier, config: ExtractionConfig = CONFIG
) -> tuple[Artifact, list[int]]:
    """As a run does it: shards that are there and whole are kept. Returns the artifact and which shards were made."""
    made, shards = [], []
    for plan in plan_shards(config, corpus, verifier):
        try:
            shard = find(plan.key, location=plan.location)
        except Damaged:
            shard = None
        if shard is None:
            made.append(plan.number)
            shard = extract_shard(plan, config, corpus, verifier)
        shards.append(shard)
    return seal(shards, config, corpus, verifier), made


def test_shards_are_runs_of_the_corpus_and_hold_every_row_once_shortest_first(verifier: PinnedVerifier) -> None:
    corpus = make_corpus(LENGTHS)
    lengths = pl.read_parquet(corpus.path / "corpus.parquet")["length"].to_list()
    plans = plan_shards(CONFIG, corpus, verifier)
    assert [plan.number for plan in plans] == list(range(len(plans)))
    assert len(plans) == 3
    assert sum(plan.tokens for plan in plans) == sum(LENGTHS)
    assert [row for plan in plans for row in sorted(plan.rows)] == list(range(len(LENGTHS)))
    for plan in plans:
        assert [lengths[row] for row in plan.rows] == sorted(lengths[row] for row in plan.rows)
        assert plan.tokens == sum(lengths[row] for row in plan.rows)
        assert ShardPlan.model_validate_json(plan.model_dump_json()) == plan
    assert len({str(plan.key) for plan in plans}) == 3


def test_shards_grow_rather_than_become_too_many(verifier: PinnedVerifier) -> None:
    plans = plan_shards(CONFIG.model_copy(update={"shard_tokens": 1}), make_corpus([3] * 1000), verifier)
    assert 50 <= len(plans) <= 60
    assert sum(len(plan.rows) for plan in plans) == 1000


def test_a_data_set_is_about_a_hundred_task_runs_at_most() -> None:
    assert planning.MOST_SHARDS + MOST_CHUNKS <= 100


def test_shards_of_a_cut_by_another_limit_do_not_pass_for_those_of_this_one(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(LENGTHS)
    monkeypatch.setattr(planning, "MOST_SHARDS", 3)
    config = CONFIG.model_copy(update={"shard_tokens": 30})  # too many, so that the limit decides their size
    first, _ = extract(corpus, verifier, config)
    monkeypatch.setattr(planning, "MOST_SHARDS", 2)
    (first.path / MANIFEST).unlink()
    again, made = extract(corpus, verifier, config)
    assert made == [0, 1]
    states = HiddenStates.open(again.path)
    assert [states.read(i).input_ids_T.tolist() for i in range(len(LENGTHS))] == (
        pl.read_parquet(corpus.path / "corpus.parquet")["input_ids"].to_list()
    )
    assert extract(corpus, verifier, config)[1] == []


def test_a_row_longer_than_a_shard_has_one_of_its_own(verifier: PinnedVerifier) -> None:
    plans = plan_shards(CONFIG.model_copy(update={"shard_tokens": 5}), make_corpus([30, 25, 28]), verifier)
    assert [len(plan.rows) for plan in plans] == [1, 1, 1]


def test_batches_are_bounded_by_their_padded_size() -> None:
    lengths = [2, 3, 3, 7, 8, 50]
    found = padded_runs(lengths, 16)
    assert [i for batch in found for i in batch] == list(range(6))
    assert [list(batch) for batch in found] == [[0, 1, 2], [3, 4], [5]]
    assert all(len(batch) * lengths[batch.stop - 1] <= 16 for batch in found[:2])


@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("verifier_dtype", ["float32", "bfloat16"])
def test_what_is_read_is_what_the_verifier_computes_for_each_row_alone(
    verifier: PinnedVerifier, verifier_folder: Path, storage_dtype: str, verifier_dtype: str
) -> None:
    verifier = pinned(verifier_folder, dtype=verifier_dtype)
    corpus = make_corpus(LENGTHS)
    artifact, made = extract(corpus, verifier, CONFIG.model_copy(update={"storage_dtype": storage_dtype}))
    assert made == [0, 1, 2]
    states = HiddenStates.open(artifact.path)
    alone = load_verifier(verifier)
    frame = pl.read_parquet(corpus.path / "corpus.parquet")
    assert len(states.rows) == frame.height
    for i, (row, wanted) in enumerate(zip(states.rows, frame.iter_rows(named=True), strict=True)):
        assert {name: getattr(row, name) for name in wanted if name in row._fields} == {
            name: value for name, value in wanted.items() if name in row._fields
        }
        read = states.read(i)
        assert read.input_ids_T.tolist() == wanted["input_ids"]
        assert read.loss_mask_T.tolist() == wanted["loss_mask"]
        assert read.features_TF.dtype == getattr(torch, storage_dtype)
        features, greedy, *_ = alone.forward(read.input_ids_T[None], layers=[0, 2])
        loose = "bfloat16" in (storage_dtype, verifier_dtype)
        torch.testing.assert_close(
            read.features_TF.float(), features[0].float(), rtol=2e-2 if loose else 1e-5, atol=5e-3 if loose else 1e-6
        )
        if verifier_dtype == "float32":
            assert torch.equal(read.greedy_ids_T, greedy[0])


def test_the_artifact_says_what_training_needs_to_know(verifier: PinnedVerifier, verifier_folder: Path) -> None:
    artifact, _ = extract(make_corpus(LENGTHS), verifier)
    states = HiddenStates.open(artifact.path)
    assert states.verifier_config == json.loads((verifier_folder / "config.json").read_text())
    assert states.info["target_layer_ids"] == [0, 2]
    assert states.info["num_target_layers"] == 4
    assert states.info["verifier"] == {
        "name": verifier.name, "identity": verifier.identity, "dtype": "float32", "revision": verifier.revision,
    }  # fmt: skip
    weights = load_verifier(verifier).frozen_weights()
    assert states.frozen().keys() == weights.keys() == {"embed_tokens.weight", "norm.weight"}
    assert all(torch.equal(weight, weights[name]) for name, weight in states.frozen().items())
    verify(artifact, deep=True)
    assert artifact.summary["tokens"] == sum(LENGTHS)
    assert find(extraction_key(CONFIG, make_corpus(LENGTHS), verifier)) == artifact


@pytest.mark.parametrize("store_final", [False, True])
def test_a_shard_alone_says_what_its_arrays_mean(verifier: PinnedVerifier, store_final: bool) -> None:
    artifact, _ = extract(make_corpus(LENGTHS), verifier, CONFIG.model_copy(update={"store_final": store_final}))
    info = HiddenStates.open(artifact.path).info
    found = json.loads((artifact.path / "shards" / "0001" / "zarr.json").read_text())["attributes"]
    for said in (info, found):
        assert "Transformers' hidden_states[id + 1], before the final norm" in said["features"]
        assert said["target_layer_ids"] == [0, 2]
        assert "the output of the verifier's final norm" in said.get("final", "") or not store_final
        assert ("final" in said) == store_final
        assert said["final_norm"] == {"kind": "RMS, w", "formula": "x / sqrt(mean(x^2) + eps) * w", "eps": 1e-6}


def test_an_untied_head_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    verifier = pinned(save_verifier(tmp_path / "untied", tied=False))
    artifact, _ = extract(make_corpus(LENGTHS[:2]), verifier)
    frozen = HiddenStates.open(artifact.path).frozen()
    assert not torch.equal(frozen["lm_head.weight"], frozen["embed_tokens.weight"])


def test_two_runs_write_identical_bytes(verifier: PinnedVerifier) -> None:
    corpus = make_corpus(LENGTHS)
    plan = plan_shards(CONFIG, corpus, verifier)[1]
    contents = []
    for _ in range(2):
        shard = extract_shard(plan, CONFIG, corpus, verifier)
        contents.append({name: (shard.path / name).read_bytes() for name in load_manifest(shard.path).files})
    assert contents[0] == contents[1]
    assert len(contents[0]) >= 11


def test_threads_read_what_one_reader_reads(verifier: PinnedVerifier) -> None:
    artifact, _ = extract(make_corpus(LENGTHS), verifier)
    one = HiddenStates.open(artifact.path)
    expected = [one.read(i) for i in range(len(LENGTHS))]
    many = HiddenStates.open(artifact.path)
    order = [i % len(LENGTHS) for i in range(64)]
    with ThreadPoolExecutor(4) as pool:
        for i, read in zip(order, pool.map(many.read, order), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(read[:4], expected[i][:4], strict=True))


def test_a_moved_data_root_stays_valid(verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, _ = extract(make_corpus(LENGTHS), verifier)
    moved = home().with_name("moved")
    home().rename(moved)
    assert len(HiddenStates.open(moved / artifact.location).rows) == len(LENGTHS)
    monkeypatch.setenv("DFLASH_HOME", str(moved))
    verify(artifact)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Any] = {
    "truncated": truncate,
    "flipped": lambda path: flip_a_byte(path, 100),
    "missing": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("array", ["features/c/0/0", "greedy_ids/c/0", "offsets/zarr.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_redone_alone(verifier: PinnedVerifier, damage: str, array: str) -> None:
    corpus = make_corpus(LENGTHS)
    artifact, _ = extract(corpus, verifier)
    shard = artifact.path / "shards/0001"
    before = {path: path.read_bytes() for path in shard.rglob("*/c/*") if path.is_file()}
    DAMAGES[damage](shard / array)
    with pytest.raises(Damaged, match="shards/0001"):
        HiddenStates.open(artifact.path)
    assert not (shard / MANIFEST).exists()
    assert (shard / DAMAGED_MANIFEST).exists()
    with pytest.raises(Damaged):
        find(extraction_key(CONFIG, corpus, verifier))
    again, made = extract(corpus, verifier)
    assert made == [1]
    assert again.key == artifact.key
    assert {path: path.read_bytes() for path in before} == before
    assert not (shard / DAMAGED_MANIFEST).exists()
    states = HiddenStates.open(again.path)
    assert [len(states.read(i).input_ids_T) for i in range(len(states.rows))] == [row.length for row in states.rows]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_after_opening_and_without_a_new_time_stamp_is_found_by_reading(
    verifier: PinnedVerifier, damage: str
) -> None:
    artifact, _ = extract(make_corpus(LENGTHS), verifier)
    states = HiddenStates.open(artifact.path)
    path = artifact.path / "shards/0002/features/c/0/0"
    stat = path.stat()
    DAMAGES[damage](path)
    if damage == "flipped":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        states = HiddenStates.open(artifact.path)  # size and time stamp are right
    victim = next(i for i, row in enumerate(states.rows) if row.shard == 2)
    untouched = next(i for i, row in enumerate(states.rows) if row.shard == 0)
    with pytest.raises(Damaged, match="shards/0002") as caught:
        states.read(victim)
    assert "\n" not in str(caught.value)
    states.read(untouched)
    assert not (path.parents[3] / MANIFEST).exists()
    _, made = extract(make_corpus(LENGTHS), verifier)
    assert made == [2]


def test_hidden_states_that_cannot_be_used_leave_nothing(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(LENGTHS)
    plan = plan_shards(CONFIG, corpus, verifier)[0]
    broken = load_verifier(verifier)
    broken.decoder.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    monkeypatch.setattr(extraction, "loaded_verifier", lambda _: broken)
    with pytest.raises(ValueError, match=r"row row\d\d: hidden states are not finite"):
        extract_shard(plan, CONFIG, corpus, verifier)
    assert find(plan.key, location=plan.location) is None
    assert not any((home() / plan.location).parent.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_to_do(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    corpus = make_corpus(LENGTHS)
    plan = plan_shards(CONFIG, corpus, verifier)[0]

    def full(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store.ArrayWriter, "append", full)
    with pytest.raises(OSError, match=r"[\d,]+ bytes are free, .* set DFLASH_HOME to a larger disk") as caught:
        extract_shard(plan, CONFIG, corpus, verifier)
    assert caught.value.errno == code
    assert str(home() / plan.location) in str(caught.value)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """As on a disk that is full then: Python ignores the signal, so that writing more is an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 6000])  # of the index, and of the verifier's weights
def test_a_disk_that_is_full_when_the_shards_are_sealed_is_named_with_what_to_do(
    verifier: PinnedVerifier, size: int
) -> None:
    corpus = make_corpus(LENGTHS)
    shards = [extract_shard(plan, CONFIG, corpus, verifier) for plan in plan_shards(CONFIG, corpus, verifier)]
    full = pytest.raises(OSError, match=r"[\d,]+ bytes are free, .* set DFLASH_HOME to a larger disk")
    with files_no_larger_than(size), full as caught:
        seal(shards, CONFIG, corpus, verifier)
    assert str(shards[0].path.parents[1]) in str(caught.value)
    assert {path.name for path in shards[0].path.parents[1].iterdir()} == {"shards"}
    artifact, made = extract(corpus, verifier)
    assert not made
    verify(artifact, deep=True)


KILLED = """
import os, signal, sys
from hidden_small import make_corpus, pinned
from dflash import manifests
from dflash.hidden import extraction
from dflash.config import ExtractionConfig
from pathlib import Path

moment, config = sys.argv[2], ExtractionConfig.model_validate_json(sys.argv[3])
verifier, corpus = pinned(Path(sys.argv[1])), make_corpus({lengths})
plans = extraction.plan_shards(config, corpus, verifier)
extraction.extract_shard(plans[0], config, corpus, verifier)
die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
if moment == "computing":
    extraction.extract_shard(plans[1], config, corpus, verifier, progress=die)
if moment == "publishing":
    manifests.write_atomically = die
    extraction.extract_shard(plans[1], config, corpus, verifier)
"""


@pytest.mark.parametrize("moment", ["computing", "publishing"])
def test_a_killed_extraction_keeps_its_finished_shards(
    verifier: PinnedVerifier, verifier_folder: Path, moment: str
) -> None:
    script = KILLED.format(lengths=LENGTHS)
    config = CONFIG.model_copy(update={"batch_tokens": 16})
    process = subprocess.run(
        [sys.executable, "-c", script, str(verifier_folder), moment, config.model_dump_json()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    artifact, made = extract(make_corpus(LENGTHS), verifier, config)
    assert made == [1, 2]
    assert {path.name for path in (artifact.path / "shards").iterdir()} == {"0000", "0001", "0002"}
    verify(artifact, deep=True)


def test_the_seal_leaves_the_scratch_of_those_who_are_at_work(verifier: PinnedVerifier) -> None:
    corpus = make_corpus(LENGTHS)
    plans = plan_shards(CONFIG, corpus, verifier)
    shards = [extract_shard(plan, CONFIG, corpus, verifier) for plan in plans]
    ended = subprocess.Popen(["true"])
    ended.wait()
    owners = (f"{HOST}.{ended.pid}", f"{HOST}.{os.getppid()}", f"another.{ended.pid}")
    scratch = [shards[0].path.with_name(f".0001.{owner}") for owner in owners]
    for folder in scratch:
        folder.mkdir()
    seal(shards, CONFIG, corpus, verifier)
    assert [folder.exists() for folder in scratch] == [False, True, True]


def test_the_estimate_is_close_to_the_bytes(verifier: PinnedVerifier) -> None:
    corpus = make_corpus([100] * 40)
    config = CONFIG.model_copy(update={"shard_tokens": 100_000})
    artifact, _ = extract(corpus, verifier, config)
    written = sum(path.stat().st_size for path in artifact.path.rglob("*") if path.is_file())
    assert estimate(config, 4000, verifier) == pytest.approx(written, rel=0.05)


def test_more_bytes_than_the_quota_or_the_disk_are_refused_with_the_numbers(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(LENGTHS)
    plans = plan_shards(CONFIG, corpus, verifier)
    check_space(CONFIG, plans, verifier)
    with pytest.raises(ValueError, match=r"disk_quota_gb: hidden states need about 4\.\d+e-05 GB, the quota is 1e-06"):
        check_space(CONFIG.model_copy(update={"disk_quota_gb": 1e-6}), plans, verifier)
    usage = planning.shutil.disk_usage(home())._replace(free=1000)
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"need about 4\.\d+e-05 GB more, 1e-06 GB are free; set DFLASH_HOME"):
        check_space(CONFIG, plans, verifier)
    extract(corpus, verifier)
    quota = CONFIG.model_copy(update={"disk_quota_gb": 1e-6})
    for config in (CONFIG, quota):
        check_space(config, plans, verifier)  # nothing is missing, so no space is needed


def test_space_is_asked_for_the_shards_that_are_made_at_a_time(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plan_shards(CONFIG, make_corpus(LENGTHS), verifier)
    moved = CONFIG.model_copy(update={"storage": "memory://"})
    cluster = moved.model_copy(update={"runner": "ray"})
    two = sum(sorted(plan.tokens for plan in plans)[-2:])
    usage = planning.shutil.disk_usage(home().parent)._replace(free=estimate(moved, two, verifier))
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda _: usage)
    check_space(moved.model_copy(update={"max_workers": 9}), plans, verifier)  # which is of clusters
    check_space(cluster.model_copy(update={"max_workers": 2}), plans, verifier)
    running = {"max_workers": 1, "address": "ray://head:10001"}  # and has workers of its own
    for changes in ({"max_workers": 3}, running):
        with pytest.raises(ValueError, match="are free; set DFLASH_HOME"):
            check_space(cluster.model_copy(update=changes), plans, verifier)


def test_batches_on_a_cpu_stay_small(verifier: PinnedVerifier) -> None:
    loaded = load_verifier(verifier)
    for asked, used in ((16_384, extraction.MOST_ON_CPU), (40, 40)):
        assert extraction.batch_tokens(CONFIG.model_copy(update={"batch_tokens": asked}), loaded) == used


def test_a_tap_layer_out_of_range_is_refused_before_anything_is_made(verifier: PinnedVerifier) -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids: layer 3 is out of range; .* taps are 0\.\.2"):
        plan_shards(CONFIG.model_copy(update={"target_layer_ids": [0, 3]}), make_corpus(LENGTHS), verifier)


@pytest.mark.parametrize("ids", [[2, 2], [2, 0], [-1]])
def test_a_choice_of_tap_layers_that_is_none_is_told_what_to_choose_from(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="choose from 0 to the verifier's last layer but one, each once, ascending"):
        ExtractionConfig(target_layer_ids=ids)
