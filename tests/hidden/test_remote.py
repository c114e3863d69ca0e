"""Hidden states in an object store: in memory, and on a real S3 server on loopback. They read as local ones do."""

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hidden_small import make_corpus, pinned, save_verifier

from dflash.config import ExtractionConfig
from dflash.hidden import planning
from dflash.hidden.extraction import extract_shard, seal
from dflash.hidden.raw import ArrayReader, ArrayWriter, write_group
from dflash.hidden.store import REMOTE, HiddenStates, verify_shard
from dflash.keys import extraction_key
from dflash.manifests import MANIFEST, Artifact, Damaged, find, home, load_manifest, verify
from dflash.pinning import PinnedVerifier
from tests.conftest import free_port
from tests.s3 import SECRET, new_bucket

obstore = pytest.importorskip("obstore", reason="object stores need the extra cloud")
from zarr.storage import ObjectStore

from dflash.hidden import remote

LENGTHS = [9, 30, 12, 4, 25, 8, 16, 11]
LOCAL = ExtractionConfig(
    target_layer_ids=[0, 2], storage_dtype="bfloat16", store_final=True, top_k=3, shard_tokens=45, batch_tokens=40
)


@pytest.fixture(params=["memory", "s3"])
def storage(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/some/where"
    return new_bucket(request.getfixturevalue("s3"))


@pytest.fixture(scope="module")
def verifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture
def verifier(home: Path, verifier_folder: Path) -> PinnedVerifier:
    return pinned(verifier_folder)


def extract(verifier: PinnedVerifier, config: ExtractionConfig) -> tuple[Artifact, list[int]]:
    """As a run does it: shards that are there and whole are kept. Returns the artifact and which shards were made."""
    corpus, made, shards = make_corpus(LENGTHS), [], []
    for plan in planning.plan_shards(config, corpus, verifier):
        shard = find(plan.key, location=plan.location)
        if shard is None:
            made.append(plan.number)
            shard = extract_shard(plan, config, corpus, verifier)
        shards.append(shard)
    return seal(shards, config, corpus, verifier), made


def stored_at(storage: str) -> ExtractionConfig:
    return ExtractionConfig.model_validate({**LOCAL.model_dump(), "storage": storage})


def read_all(artifact: Artifact) -> dict[str, tuple[Any, ...]]:
    states = HiddenStates.open(artifact.path)
    return {row.id: states.read(i) for i, row in enumerate(states.rows)}


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def objects(shard: Path) -> tuple[Any, dict[str, str]]:
    """The bucket, and the paths of a shard's objects in it by their names in the shard."""
    bucket, prefix = remote._place(remote.load(shard / REMOTE).url)
    paths = [found["path"] for page in obstore.list(bucket, prefix) for found in page]
    return bucket, {path.removeprefix(f"{prefix}/"): path for path in paths}


def test_what_is_read_is_what_a_local_store_gives_bit_for_bit(verifier: PinnedVerifier, storage: str) -> None:
    local, made = extract(verifier, LOCAL)
    assert made == [0, 1, 2]
    expected = read_all(local)
    nbytes = local.summary["bytes"]
    shutil.rmtree(local.path)
    artifact, made = extract(verifier, stored_at(storage))
    assert made == [0, 1, 2]
    assert artifact.key == local.key  # where the bytes lie decides nothing
    assert artifact.summary["bytes"] == nbytes
    found = read_all(artifact)
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)

    states = HiddenStates.open(artifact.path)
    order = [5, 0, 3, 7, 2, 6, 1, 4]
    with ThreadPoolExecutor(4) as pool:
        for number, row in zip(order, pool.map(states.read, order), strict=True):
            assert same(row, expected[states.rows[number].id])
    for batch, _ in states.stream(
        [order[:4], order[4:]], [states.buffers(200) for _ in range(3)], device=None, verify=False
    ):
        assert len(batch.lengths) == 4
    assert batch.input_ids_P[: batch.lengths[0]].tolist() == expected[states.rows[2].id][1].tolist()
    assert extract(verifier, stored_at(storage))[1] == []


def test_little_stays_here_and_any_zarr_reader_opens_what_is_there(verifier: PinnedVerifier, storage: str) -> None:
    artifact, _ = extract(verifier, stored_at(storage))
    for shard in sorted((artifact.path / "shards").iterdir()):
        assert {path.name for path in shard.iterdir()} == {MANIFEST, REMOTE, "zarr.json"}
    verify(artifact, deep=True)
    states = HiddenStates.open(artifact.path)
    row = states.rows[3]
    url = remote.load(artifact.path / f"shards/{row.shard:04d}" / REMOTE).url
    assert url.startswith(f"{storage}/{artifact.key}/shards/{row.shard:04d}-")
    bucket, prefix = remote._place(url)
    group = remote.zarr.open_group(ObjectStore(bucket, read_only=True), path=prefix, mode="r")
    assert group["input_ids"][row.start : row.start + row.length].tolist() == states.read(3).input_ids_T.tolist()
    assert group.attrs["format"] == "dflash-hidden-states"


def last_byte_gone(bucket: Any, path: str) -> None:
    obstore.put(bucket, path, bytes(obstore.get(bucket, path).bytes())[:-1])


DAMAGES: dict[str, tuple[str, Callable[[Any, str], None]]] = {
    "array missing": ("features/c/0/0", lambda bucket, path: obstore.delete(bucket, path)),
    "array cut off": ("greedy_ids/c/0", last_byte_gone),
    "metadata missing": ("topk_ids/zarr.json", lambda bucket, path: obstore.delete(bucket, path)),
    "not committed": (MANIFEST, lambda bucket, path: obstore.delete(bucket, path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_redone_alone(verifier: PinnedVerifier, storage: str, damage: str) -> None:
    name, spoil = DAMAGES[damage]
    artifact, _ = extract(verifier, stored_at(storage))
    expected = read_all(artifact)
    bucket, paths = objects(artifact.path / "shards/0001")
    spoil(bucket, paths[name])
    with pytest.raises(Damaged, match=f"shards/0001: {storage}.*/{name}: .*; its manifest is set aside") as caught:
        HiddenStates.open(artifact.path)
    assert "\n" not in str(caught.value)
    again, made = extract(verifier, stored_at(storage))
    assert made == [1]
    found = read_all(again)
    assert all(same(found[name], expected[name]) for name in expected)
    assert not list(again.path.rglob("*.damaged"))


@pytest.mark.parametrize("damage", ["array missing", "array cut off"])
def test_what_goes_missing_after_opening_is_an_error_and_not_zeros(
    verifier: PinnedVerifier, storage: str, damage: str
) -> None:
    name, spoil = DAMAGES[damage]
    artifact, _ = extract(verifier, stored_at(storage))
    states = HiddenStates.open(artifact.path)
    victim, other = (next(i for i, row in enumerate(states.rows) if row.shard == shard) for shard in (1, 0))
    states.read(victim)
    bucket, paths = objects(artifact.path / "shards/0001")
    spoil(bucket, paths[name])
    with pytest.raises(Damaged, match=f"shards/0001: .*{name}: (missing|.* bytes, expected)"):
        states.read(victim)
    states.read(other)
    assert extract(verifier, stored_at(storage))[1] == [1]


@pytest.mark.parametrize("name", ["features/c/0/0", "final/c/0/0", "topk_logprobs/c/0/0", "input_ids/c/0"])
def test_a_flipped_bit_is_found_by_reading_and_by_a_deep_check(
    verifier: PinnedVerifier, storage: str, name: str
) -> None:
    artifact, _ = extract(verifier, stored_at(storage))
    states = HiddenStates.open(artifact.path)
    shard = artifact.path / "shards/0002"
    bucket, paths = objects(shard)
    content = bytearray(obstore.get(bucket, paths[name]).bytes())
    content[5] ^= 1
    obstore.put(bucket, paths[name], bytes(content))
    verify_shard(shard)  # sizes are right
    victim = next(i for i, row in enumerate(states.rows) if row.shard == 2)
    manifest = (shard / MANIFEST).read_bytes()
    with pytest.raises(Damaged, match=r"shards/0002: .*checksum.*; its manifest is set aside"):
        states.read_into([victim], states.buffers(100), verify=False)
    assert not (shard / MANIFEST).exists()
    (shard / MANIFEST).write_bytes(manifest)
    with pytest.raises(Damaged, match=f"{name}: content differs from its checksum; its manifest is set aside"):
        verify_shard(shard, deep=True)
    extract(verifier, stored_at(storage))
    for number in range(3):
        verify_shard(artifact.path / f"shards/{number:04d}", deep=True)


def make_group(folder: Path, *, num_tokens: int = 300, chunk: int = 64, file: int = 2**15) -> Path:
    folder.mkdir()
    values = np.random.default_rng(0).integers(0, 2**16, (num_tokens, 512), dtype="uint16")
    options: dict[str, Any] = {"row_shape": (512,), "dtype": "uint16", "chunk": chunk, "file": file}
    for name in ("features", "other"):
        writer = ArrayWriter(folder / name, dimension_names=["token", "channel"], attributes={}, **options)
        with writer:
            writer.append(values)
    write_group(folder, {})
    return folder


KILLED = """
import sys
from pathlib import Path
from dflash.hidden import remote
remote.move(Path(sys.argv[1]), sys.argv[2], record=Path(sys.argv[1]) / "remote.json")
"""


def test_an_upload_killed_midway_leaves_nothing_that_counts_and_is_done_again(s3: str, tmp_path: Path) -> None:
    folder, destination = make_group(tmp_path / "one", num_tokens=40_000), f"{new_bucket(s3)}/0000"
    bucket, prefix = remote._place(destination)

    def uploaded() -> list[str]:
        return [found["path"] for page in obstore.list(bucket, prefix.rpartition("/")[0]) for found in page]

    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder), destination], env=os.environ) as process:
        deadline = time.monotonic() + 60
        while not uploaded():  # the first of two large arrays
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
    assert uploaded()
    assert not [path for path in uploaded() if path.endswith(MANIFEST)]
    assert not (folder / REMOTE).exists()
    expected = ArrayReader(folder / "features").read(0, 40_000)
    shard = remote.move(folder, destination, record=folder / REMOTE)
    remote.check(folder / REMOTE, deep=True)
    assert len(uploaded()) == len(shard.files) + 1
    assert np.array_equal(remote.RemoteArray(folder / REMOTE, "features").read(0, 40_000), expected)


def test_two_uploads_at_once_are_as_good_as_one(storage: str, tmp_path: Path) -> None:
    folders = [make_group(tmp_path / name) for name in ("one", "two", "three")]
    expected = ArrayReader(folders[0] / "other").read(17, 211)
    with ThreadPoolExecutor(3) as pool:
        moved = list(pool.map(lambda folder: remote.move(folder, f"{storage}/0", record=folder / REMOTE), folders))
    assert moved[0] == moved[1] == moved[2]
    for folder in folders:
        remote.check(folder / REMOTE, deep=True)
        assert np.array_equal(remote.RemoteArray(folder / REMOTE, "other").read(17, 211), expected)


def test_any_run_of_rows_is_read_across_chunks_and_files(storage: str, tmp_path: Path) -> None:
    folder = make_group(tmp_path / "one", chunk=8, file=64)
    expected = ArrayReader(folder / "features").read(0, 300)
    remote.move(folder, f"{storage}/0", record=folder / REMOTE)
    array = remote.RemoteArray(folder / REMOTE, "features")
    for start, stop in [(0, 300), (0, 1), (7, 9), (8, 16), (63, 65), (64, 64), (50, 201), (299, 300), (300, 300)]:
        assert np.array_equal(array.read(start, stop), expected[start:stop])


def test_other_content_does_not_touch_what_is_there(storage: str, tmp_path: Path) -> None:
    one, two = make_group(tmp_path / "one"), make_group(tmp_path / "two", num_tokens=301)
    first, second = (remote.move(folder, f"{storage}/0", record=folder / REMOTE) for folder in (one, two))
    assert first.url != second.url
    for folder in (one, two):
        remote.check(folder / REMOTE, deep=True)


def test_spawned_processes_read_the_same(verifier: PinnedVerifier, s3: str) -> None:
    artifact, _ = extract(verifier, stored_at(new_bucket(s3)))
    states = HiddenStates.open(artifact.path)
    expected = [sum_of_features(pickle.dumps(states), number) for number in range(3)]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert list(processes.map(sum_of_features, [pickle.dumps(states)] * 3, range(3))) == expected


def sum_of_features(opened: bytes, number: int) -> float:
    return pickle.loads(opened).read(number).features_TF.double().sum().item()


def test_a_shard_made_again_elsewhere_leaves_nothing_of_its_former_place(
    verifier: PinnedVerifier, storage: str
) -> None:
    corpus, config = make_corpus(LENGTHS), stored_at(storage)
    plans = planning.plan_shards(LOCAL, corpus, verifier)
    artifact, _ = extract(verifier, LOCAL)
    expected = read_all(artifact)
    for chosen in (config, LOCAL):
        shards = [extract_shard(plan, chosen if plan.number else LOCAL, corpus, verifier) for plan in plans]
        assert all(
            same(states, expected[name]) for name, states in read_all(seal(shards, LOCAL, corpus, verifier)).items()
        )
        for shard in shards:
            named = {MANIFEST, *load_manifest(shard.path).files}
            assert {
                path.relative_to(shard.path).as_posix() for path in shard.path.rglob("*") if path.is_file()
            } == named
            assert (shard.path / REMOTE).exists() == bool(shard.summary["shard"] and chosen.storage)


def test_only_shards_being_written_need_space_here(
    verifier: PinnedVerifier, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, corpus = stored_at(storage), make_corpus(LENGTHS)
    plans = planning.plan_shards(config, corpus, verifier)
    largest = planning.estimate(config, max(plan.tokens for plan in plans), verifier)
    assert largest < planning.estimate(config, sum(LENGTHS), verifier)
    usage = planning.shutil.disk_usage("/")._replace(free=largest)
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda _: usage)
    planning.check_space(config, plans, verifier)
    with pytest.raises(ValueError, match="are free; set DFLASH_HOME"):
        planning.check_space(LOCAL, plans, verifier)


def test_credentials_are_written_nowhere(
    verifier: PinnedVerifier, s3: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level("DEBUG"):
        storage = new_bucket(s3)
        artifact, _ = extract(verifier, stored_at(storage))
        read_all(artifact)
        with pytest.raises(OSError, match="NoSuchBucket") as caught:
            remote.move(make_group(tmp_path / "one"), "s3://no-such-bucket/0", record=tmp_path / "record")
    assert SECRET not in str(caught.value) + caplog.text
    assert "\n" not in str(caught.value)
    assert not [path for path in home().rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    bucket, paths = objects(artifact.path / "shards/0000")
    assert not [path for path in paths.values() if SECRET.encode() in bytes(obstore.get(bucket, path).bytes())]


@pytest.mark.parametrize(
    "url", [f"s3://me:{SECRET}@bucket/path", f"gs://{SECRET}@bucket", f"s3://bucket/path?signature={SECRET}"]
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    from flows.recipes import load_recipe

    with pytest.raises(ValueError, match=r"extraction.storage: the address holds a user or password") as caught:
        load_recipe("demo", [f"extraction.storage={url}"])
    assert SECRET not in str(caught.value)


def test_memory_is_refused_where_training_is_another_process() -> None:
    from flows.recipes import load_recipe

    with pytest.raises(ValueError, match=r"extraction.storage memory:// ends with its process, .*; set a bucket"):
        load_recipe("demo", ["extraction.storage=memory://states"])


@pytest.mark.parametrize("url", ["ftp://host/path", "/a/folder", "s3://", "s3:///path", "bucket"])
def test_what_is_no_object_store_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown; expected s3://bucket/path, gs://bucket/path or memory://"):
        stored_at(url)


def test_a_store_that_cannot_be_listed_is_refused_before_the_verifier_is_loaded(
    verifier: PinnedVerifier, s3: str, verifier_folder: Path
) -> None:
    corpus, config = make_corpus(LENGTHS), stored_at("s3://no-such-bucket-either/path")
    without_weights = verifier.model_copy(update={"path": str(verifier_folder / "nowhere")})
    with pytest.raises(
        ValueError, match=r"extraction.storage: s3://no-such-bucket-either/path: .*NoSuchBucket"
    ) as caught:
        extract_shard(planning.plan_shards(config, corpus, verifier)[0], config, corpus, without_weights)
    assert "\n" not in str(caught.value)
    assert find(extraction_key(config, corpus, verifier)) is None


def test_a_store_that_does_not_answer_is_no_damage(
    verifier: PinnedVerifier, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, _ = extract(verifier, stored_at(new_bucket(s3)))
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        remote._bucket.cache_clear()
        with pytest.raises(OSError, match="shards/0000-") as caught:
            HiddenStates.open(artifact.path)
    assert not isinstance(caught.value, Damaged)
    remote._bucket.cache_clear()
    assert len(read_all(artifact)) == len(LENGTHS)


def test_without_the_package_one_line_says_how_to_get_it() -> None:
    script = "import sys; sys.modules['obstore'] = None; import dflash.hidden.remote"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.stderr.splitlines()[-1] == ("ValueError: object stores need a package: pip install 'dflash[cloud]'")
