"""One shard on disk and the rows of many: what is written comes back, whatever the layout, and nothing unusable is."""

import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import zarr
from hidden_small import flip_a_byte
from safetensors.torch import save_file

from dflash.hidden import store
from dflash.hidden.encoding import as_stored
from dflash.hidden.extraction import records_of
from dflash.hidden.store import HiddenStates, LeftOut, PackedStates, Row, RowStates, layout, write_shard
from dflash.manifests import MANIFEST, Damaged, Key, publish

TAPS, HIDDEN, VOCABULARY, TOP_K = 3, 64, 99, 4
LENGTHS = [5, 40, 17, 2, 30]
FULL = {"store_final": True, "top_k": TOP_K}


def states(lengths: list[int] = LENGTHS, *, seed: int = 0) -> list[RowStates]:
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=generator)

    return [
        RowStates(
            torch.randn(n, TAPS * HIDDEN, generator=generator),
            torch.arange(n) % VOCABULARY,
            torch.rand(n, generator=generator) < 0.5,
            ids(n),
            torch.randn(n, HIDDEN, generator=generator),
            ids(n, TOP_K),
            torch.randn(n, TOP_K, generator=generator).log_softmax(-1),
        )
        for n in lengths
    ]


def write(folder: Path, rows: list[RowStates], *, dtype: str = "float32", **options: Any) -> list[LeftOut]:
    settings = {"lengths": LENGTHS, "attributes": {"shard": 0}, "vocab_size": VOCABULARY, **FULL, **options}
    return write_shard(
        folder, rows, ids=[f"r{i}" for i in range(len(settings["lengths"]))], num_taps=TAPS, hidden_size=HIDDEN,
        storage_dtype=dtype, **settings,
    )  # fmt: skip


def decoded(array: Any, others: zarr.Group) -> torch.Tensor:
    """By what the attributes say, which is all that a stranger knows."""
    names = {"torch": torch, "a": array[:], "scales": others["scales"][:] if "scales" in others else None}
    return eval(array.attrs.get("decode", "torch.from_numpy(a)"), names)


@pytest.mark.parametrize(("width", "expected"), [(6 * 576, (64, 2_485_504)), (6 * 4096, (8, 349_520))])
def test_chunks_and_files_have_the_measured_sizes(width: int, expected: tuple[int, int]) -> None:
    assert layout(2 * width, 10**9) == expected


def test_a_file_is_no_larger_than_its_tokens_need() -> None:
    assert layout(960, 1000) == (512, 1024)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("file_bytes", [2**28, 1])
@pytest.mark.parametrize("options", [FULL, {"store_final": False, "top_k": 0}])
def test_any_zarr_reader_reads_what_is_written_by_its_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, file_bytes: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(store, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(store, "FILE_BYTES", file_bytes)
    rows = states()
    assert write(tmp_path, rows, dtype=dtype, **options) == []
    group = zarr.open_group(tmp_path, mode="r", zarr_format=3)
    assert group.attrs["shard"] == 0
    assert group["offsets"][:].tolist() == [0, 5, 45, 62, 64, 94]
    assert group.attrs["left_out"] == []
    kinds = {"features": dtype, "final": "float32" if dtype == "float32" else "bfloat16"}
    for name, column in zip(store.ARRAYS, zip(*rows, strict=True), strict=True):
        expected = torch.cat(column)
        if name in ("final", "topk_ids", "topk_logprobs") and options is not FULL:
            assert name not in group
            continue
        if name in kinds:
            expected = as_stored(expected, kinds[name])
        found = decoded(group[name], group)
        assert found.dtype == expected.dtype or name not in kinds
        assert torch.equal(found.to(expected.dtype), expected)
    for _, array in group.arrays():
        codecs = str(array.metadata.to_dict()["codecs"])
        assert "crc32c" in codecs
        assert "zstd" not in codecs


def test_fp8_is_as_precise_as_its_three_bits_and_says_how_precise(tmp_path: Path) -> None:
    rows = states()
    rows[1].features_TF[3] *= 1e4  # single tokens and channels of enormous size must not cost the others their bits
    for row in rows:
        row.features_TF[:, 70] *= 1e3
    rows[2].features_TF[4, :HIDDEN] = 0
    rows[4].features_TF[5] *= 1e-15
    write(tmp_path, rows, dtype="fp8")
    exact, read = (
        torch.cat([row.features_TF for row in rows]),
        as_stored(torch.cat([row.features_TF for row in rows]), "fp8"),
    )
    groups, errors = (x.double().unflatten(1, (-1, 64)) for x in (exact, read - exact))
    assert (errors.abs().amax(-1) <= groups.abs().amax(-1) / 2**4 * 1.01).all()
    taps, errors = (x.double().unflatten(1, (TAPS, -1)).norm(dim=-1) for x in (exact, read - exact))
    relative = (errors / taps)[taps > 0]
    stated = zarr.open_group(tmp_path, mode="r").attrs["fp8_error"]
    assert stated["max"] == pytest.approx(relative.max().item(), rel=1e-5)
    assert stated["rms"] == pytest.approx(relative.square().mean().sqrt().item(), rel=1e-5)
    assert stated["rms"] < 0.03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_a_batch_is_stored_as_its_rows_are(dtype: str) -> None:
    features_BTF = torch.stack([row.features_TF for row in states([9, 9, 9])]).half()
    assert torch.equal(as_stored(features_BTF, dtype), torch.stack([as_stored(row, dtype) for row in features_BTF]))


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 1.03), ("fp8", 1.03 * 0.52)])
def test_little_is_stored_besides_the_payload(tmp_path: Path, dtype: str, most: float) -> None:
    width, lengths = 576 // 64 * 64, [700] * 4
    rows = [row._replace(features_TF=torch.randn(700, 5 * width)) for row in states(lengths)]
    write_shard(
        tmp_path,
        rows,
        ids=["r"] * 4,
        lengths=lengths,
        num_taps=5,
        hidden_size=width,
        storage_dtype=dtype,
        attributes={},
    )
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert written <= most * sum(lengths) * 5 * width * 2


def change(row: RowStates, name: str) -> RowStates:
    """A row in which something is wrong."""
    features, greedy = row.features_TF.clone(), row.greedy_ids_T.clone()
    if name == "nan":
        features[3, 1] = float("nan")
    elif name == "inf":
        features[0, 0] = float("inf")
    elif name == "zero tap":
        features[:, HIDDEN : 2 * HIDDEN] = 0
    elif name == "constant tap":
        features[:, HIDDEN : 2 * HIDDEN] = features[0, HIDDEN : 2 * HIDDEN]
    elif name == "short":
        features = features[:-1]
    elif name == "id":
        greedy[:2] = torch.tensor([0, VOCABULARY])
    elif name == "negative id":
        return row._replace(input_ids_T=row.input_ids_T - 1)
    elif name == "final":
        return row._replace(final_TH=torch.zeros_like(row.features_TF[:, :HIDDEN]))
    elif name == "no final":
        return row._replace(final_TH=None)
    elif name == "top k":
        return row._replace(topk_ids_TK=torch.full((len(features), TOP_K), VOCABULARY + 2))
    elif name == "top k nan":
        return row._replace(topk_logprobs_TK=torch.full((len(features), TOP_K), float("nan")))
    elif name == "loud":
        features[:, :HIDDEN] *= 1000
    elif name == "quiet":
        features[:, 2 * HIDDEN :] /= 1000
    return row._replace(features_TF=features, greedy_ids_T=greedy)


REASONS = {
    "nan": "hidden states are not finite; try another verifier.dtype",
    "inf": "hidden states are not finite; try another verifier.dtype",
    "zero tap": "tap 1 is zero throughout",
    "constant tap": "tap 1 is the same for every token",
    "short": "states of shapes",
    "id": "greedy_ids from 0 to 99 in a vocabulary of 99",
    "negative id": "input_ids from -1 to 15 in a vocabulary of 99",
    "final": "the final state is zero throughout",
    "no final": "states of shapes",
    "top k": "topk_ids from 101 to 101 in a vocabulary of 99",
    "top k nan": "log-probabilities are not finite",
    "loud": "tap 0 has norms about",
    "quiet": "tap 2 has norms about",
}


@pytest.mark.parametrize("name", REASONS)
def test_states_no_one_could_use_are_refused_by_the_name_of_their_row(tmp_path: Path, name: str) -> None:
    rows = states()
    rows[2] = change(rows[2], name)
    with pytest.raises(ValueError, match=f"row r2: {REASONS[name]}.*max_left_out_share is 0") as caught:
        write(tmp_path, rows)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "zarr.json").exists()


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_few_of_them_are_left_out_and_the_others_are_as_without_them(tmp_path: Path, name: str, dtype: str) -> None:
    rows = states()
    write(tmp_path / "clean", rows, dtype=dtype)
    rows[2] = change(rows[2], name)
    left_out = write(tmp_path / "shard", rows, dtype=dtype, max_left_out_share=0.2)
    assert [(entry.row, entry.id) for entry in left_out] == [(2, "r2")]
    assert REASONS[name] in left_out[0].reason
    assert json.loads((tmp_path / "shard/ledger.json").read_text()) == [left_out[0]._asdict()]
    clean, shard = (zarr.open_group(tmp_path / name, mode="r", zarr_format=3) for name in ("clean", "shard"))
    assert shard.attrs["left_out"] == [2]
    assert not shard["loss_mask"][45:62].any()
    for array in ("features", *store.ARRAYS, "offsets"):
        assert (shard[array][:45] == clean[array][:45]).all()
        assert (shard[array][62:] == clean[array][62:]).all()


def test_more_than_the_share_fail_with_the_first_reason(tmp_path: Path) -> None:
    rows = states()
    rows[1], rows[3] = change(rows[1], "zero tap"), change(rows[3], "inf")
    with pytest.raises(ValueError, match=r"row r1: tap 1 is zero throughout.*is 0\.2, and this is number 2 of 5 rows"):
        write(tmp_path, rows, max_left_out_share=0.2)


def test_a_row_of_one_repeated_token_may_have_one_state_for_all(tmp_path: Path) -> None:
    rows = states()
    rows[2] = change(rows[2], "constant tap")._replace(input_ids_T=torch.full((17,), 7))
    assert write(tmp_path, rows) == []


def test_a_few_enormous_tokens_are_usual(tmp_path: Path) -> None:
    rows = states()
    for row in rows:
        row.features_TF[0] *= 1e4
    assert write(tmp_path, rows) == []


@pytest.mark.parametrize("count", [4, 6])
def test_a_wrong_number_of_rows_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match="announced"):
        write(tmp_path, (states() + states())[:count])


def make_artifact(*, dtype: str = "bfloat16", shards: int = 2, **options: Any) -> Path:
    """As extraction makes it: shards of the same lengths, their rows interleaved in the index."""
    key = Key(stage="extraction", recipe=1, config={"dtype": dtype, "shards": shards, **options}, inputs={})
    index, known = [], {}
    for shard in range(shards):
        part = Key(stage="extraction", recipe=1, config={"shard": shard}, inputs={"extraction": str(key)})
        with publish(part, summary={}, location=f"{key.location}/shards/{shard:04d}") as (folder, made):
            attributes = {"shard": shard, "verifier": "abc", "target_layer_ids": [0, 1, 2]}
            write(folder, states(seed=shard), dtype=dtype, attributes=attributes, **options)
        known |= records_of(made())
        for i, length in enumerate(LENGTHS):
            index.append(Row(f"{shard}-{i}", "maths", "train", 0, length, 1, shard, sum(LENGTHS[:i])))
    with publish(key, summary={}, known=known) as (folder, artifact):
        info = {"storage_dtype": dtype, "target_layer_ids": [0, 1, 2], "verifier": {"identity": "abc"}}
        (folder / "states.json").write_text(json.dumps(info))
        (folder / "verifier_config.json").write_text("{}")
        save_file({"embed_tokens.weight": torch.zeros(1)}, folder / "verifier.safetensors")
        pl.DataFrame(sorted(index, key=lambda row: row.id[2:])).write_parquet(folder / "index.parquet")
    return artifact().path


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))


def expected_rows(dtype: str, *, shards: int = 2) -> dict[str, RowStates]:
    final = "float32" if dtype == "float32" else "bfloat16"
    return {
        f"{shard}-{i}": row._replace(
            features_TF=as_stored(row.features_TF, dtype), final_TH=as_stored(row.final_TH, final)
        )
        for shard in range(shards)
        for i, row in enumerate(states(seed=shard))
    }


def same(a: RowStates, b: RowStates) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_rows_come_back_as_they_were_stored(dtype: str) -> None:
    opened, expected = HiddenStates.open(make_artifact(dtype=dtype)), expected_rows(dtype)
    for number, row in enumerate(opened.rows):
        assert same(opened.read(number), expected[row.id])


def test_what_was_not_stored_is_none() -> None:
    read = HiddenStates.open(make_artifact(store_final=False, top_k=0)).read(3)
    assert read.final_TH is None
    assert read.topk_ids_TK is None
    assert read.topk_logprobs_TK is None


def rows_in(batch: PackedStates) -> list[RowStates]:
    parts = [None if memory is None else memory.split(batch.lengths) for memory in batch[:-1]]
    return [RowStates._make(None if part is None else part[i] for part in parts) for i in range(len(batch.lengths))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_batch_holds_its_rows_one_after_the_other_also_in_used_buffers(dtype: str, verify: bool) -> None:
    opened, expected = HiddenStates.open(make_artifact(dtype=dtype)), expected_rows(dtype)
    buffers = opened.buffers(200)
    memory = [tensor.data_ptr() for tensor in buffers if tensor is not None]
    for numbers in ([2, 3, 2], [9, 0], [7], [1, 4, 6, 5]):
        for tensor in buffers:
            assert tensor is not None
            tensor.fill_(1)
        batch = opened.read_into(numbers, buffers, verify=verify)
        assert [tensor.data_ptr() for tensor in batch[:-1] if tensor is not None] == memory
        assert batch.lengths == tuple(opened.rows[number].length for number in numbers)
        assert len(batch.features_PF) == sum(batch.lengths)
        for number, row in zip(numbers, rows_in(batch), strict=True):
            assert same(row, expected[opened.rows[number].id])


def test_a_batch_larger_than_its_buffers_is_refused() -> None:
    opened = HiddenStates.open(make_artifact())
    with pytest.raises(ValueError, match="2 rows of 80 tokens do not fit into 79 tokens"):
        opened.read_into([2, 2], opened.buffers(79))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stream_gives_all_batches_in_order_from_a_few_buffers(threads: int) -> None:
    opened, expected = HiddenStates.open(make_artifact()), expected_rows("bfloat16")
    batches = [[i % 10, (3 * i) % 10] for i in range(40)]
    before, places = open_files(), set()
    buffers = [opened.buffers(80) for _ in range(threads + 1)]
    for numbers, (batch, ready) in zip(batches, opened.stream(batches, buffers, device=None), strict=True):
        places.add(batch.features_PF.data_ptr())
        assert 0 <= ready <= threads
        for number, row in zip(numbers, rows_in(batch), strict=True):
            assert same(row, expected[opened.rows[number].id])
    assert len(places) == threads + 1
    assert open_files() == before


def test_who_reads_for_the_cpu_waits_for_no_gpu() -> None:
    assert store._queued_copies(None) is None
    assert store._queued_copies(torch.device("cpu")) is None


def test_a_stream_that_is_left_early_or_fails_ends_its_threads() -> None:
    opened = HiddenStates.open(make_artifact())
    buffers = [opened.buffers(40) for _ in range(3)]
    stream = opened.stream([[0], [1], [2], [3]], buffers, device=None)
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hidden-states")]
    with pytest.raises(ValueError, match="do not fit"):
        list(opened.stream([[0], [2, 2]], buffers, device=None))


def test_threads_and_spawned_processes_read_the_same_and_no_file_stays_open() -> None:
    opened, expected = HiddenStates.open(make_artifact()), expected_rows("bfloat16")
    opened.read(0)
    before = open_files()
    order = [i % 10 for i in range(60)]
    with ThreadPoolExecutor(4) as pool:
        for number, read in zip(order, pool.map(opened.read, order), strict=True):
            assert same(read, expected[opened.rows[number].id])
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        sums = list(processes.map(sum_of_features, [pickle.dumps(opened)] * 10, range(10)))
    assert sums == [expected[row.id].features_TF.double().sum().item() for row in opened.rows]
    assert open_files() == before


def sum_of_features(opened: bytes, number: int) -> float:
    return pickle.loads(opened).read(number).features_TF.double().sum().item()


def open_files() -> set[str]:
    paths = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists())
    return {path for path in paths if "shards" in path}


@pytest.mark.parametrize("name", ["features", "scales", "final", "topk_ids", "topk_logprobs", "input_ids", "loss_mask"])
def test_a_damaged_byte_of_any_array_is_found_by_reading_and_its_shard_set_aside(name: str) -> None:
    path = make_artifact(dtype="fp8")
    opened = HiddenStates.open(path)
    file = next(file for file in (path / f"shards/0001/{name}/c").rglob("*") if file.is_file())
    flip_a_byte(file, 0)
    numbers = [next(i for i, row in enumerate(opened.rows) if row.shard == shard) for shard in (0, 1)]
    opened.read(numbers[0])
    opened.read_into(numbers, opened.buffers(100), verify=False)
    with pytest.raises(Damaged, match=f"shards/0001/{name}/.* differs from its checksum; its manifest is set aside"):
        opened.read_into(numbers, opened.buffers(100))
    assert not (path / "shards/0001" / MANIFEST).exists()


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "older": (
        {"format_version": 1},
        "format dflash-hidden-states 1, expected dflash-hidden-states 2; run the extraction",
    ),
    "other": ({"format": "pictures"}, "format pictures 2, expected"),
    "verifier": ({"verifier": "xyz"}, "verifier is xyz, that of the artifact is abc; delete the shard"),
    "taps": ({"target_layer_ids": [0, 1, 5]}, r"target_layer_ids is \[0, 1, 5\], that of the artifact is \[0, 1, 2\]"),
    "precision": ({"storage_dtype": "float32"}, "storage_dtype is float32, that of the artifact is bfloat16"),
    "top k": ({"top_k": 9}, "top_k is 9, that of the artifact is 4"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_shards_of_another_format_or_artifact_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changes, message = FOREIGN[name]
    real: Callable[..., None] = store.write_group

    def foreign(folder: Path, attributes: dict[str, Any]) -> None:
        real(folder, attributes | (changes if attributes["shard"] == 1 else {}))

    monkeypatch.setattr(store, "write_group", foreign)
    path = make_artifact()
    with pytest.raises(ValueError, match=f"shards/0001: {message}") as caught:
        HiddenStates.open(path)
    assert not isinstance(caught.value, Damaged)
    assert "\n" not in str(caught.value)
    assert (path / "shards/0001" / MANIFEST).exists()


@pytest.mark.parametrize("content", [None, "{"])
def test_a_description_that_cannot_be_read_is_damage(content: str | None) -> None:
    path = make_artifact()
    (path / "states.json").unlink()
    if content is not None:
        (path / "states.json").write_text(content)
    with pytest.raises(Damaged, match=r"states.json: unreadable .* run the extraction stage again"):
        HiddenStates.open(path)
