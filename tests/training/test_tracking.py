import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash.keys import RECIPES
from dflash.manifests import home as data_root
from dflash.training.loop import Stopped, run_name, train
from dflash.training.tracking import STEP, tracked_run, tracking_mode
from tests.training.small import LENGTHS, make_config, make_states
from tests.training.test_loop import stop_after


def records(path: Path) -> Iterator[object]:
    """Of an offline run's file: LevelDB's log format, each record a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):
            return  # still being written
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def offline_runs() -> list[list[object]]:
    """Each run's records, its last one the exit: W&B's own process may still be writing when `finish` returns."""
    deadline = time.monotonic() + 30
    while True:
        runs = [list(records(path)) for path in sorted((data_root() / "wandb").glob("offline-run-*/*.wandb"))]
        if all(any(record.WhichOneof("record_type") == "exit" for record in run) for run in runs):
            return runs
        assert time.monotonic() < deadline, "a run was never written to its end"
        time.sleep(0.1)


def steps(run: list[object]) -> list[int]:
    return [record.history.step.num for record in run if record.WhichOneof("record_type") == "history"]


def run_ids(run: list[object]) -> set[str]:
    return {record.run.run_id for record in run if record.WhichOneof("record_type") == "run"}


def test_run_names_say_what_differs():
    assert run_name(make_config()) == f"v{RECIPES['training']}-ddtree-g10-b95"
    assert run_name(make_config(beta2=0.999)).endswith("-b999")
    muon = make_config(slot_weights="dpace", optimizer="muon")
    assert run_name(muon) == f"v{RECIPES['training']}-ddtree-dpace-b95-muon"


def test_wandb_is_online_where_there_is_a_key_and_the_environment_wins(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert tracking_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert tracking_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking_mode("online") == "disabled"


def test_a_continued_run_has_every_row_once_its_last_one_too_and_nothing_of_the_environment(home, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 3)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    states, config = make_states(LENGTHS), make_config(max_steps=9, epochs=9, validate_every=4)
    with pytest.raises(Stopped):
        train(config, states, group="a run", should_stop=stop_after(5))
    artifact = train(config, states, group="a run")
    first, second = offline_runs()
    assert steps(first) == [2, 4]
    assert steps(second) == [2, 4, 6, 8, 9]  # whole by itself
    (run,) = [record.run for record in second if record.WhichOneof("record_type") == "run"][:1]
    assert (run.run_group, run.project) == ("a run", "dflash")
    assert run.run_id.startswith(artifact.key)
    assert run_ids(first) == run_ids(second) == {run.run_id}
    assert run.display_name == run_name(config)
    settings = {item.key: item.value_json for item in run.config.update}
    assert {"gamma", "key", "hidden_states", "data", "verifier"} <= settings.keys()
    assert artifact.key in settings["key"]
    last = [record.history for record in second if record.WhichOneof("record_type") == "history"][-1]
    logged = {item.key or item.nested_key[0] for item in last.item}
    assert {"train/loss", "train/step", "validation/acceptance_length/tree4"} <= logged
    written = b"".join(path.read_bytes() for path in (home / "wandb").rglob("*") if path.is_file())
    assert b"planted-secret" not in written
    assert b"0123456789abcdef" * 3 not in written


def test_training_that_begins_anew_is_another_run_whose_rows_no_earlier_one_takes(home, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("WANDB_MODE", "offline")
    states, config = make_states(LENGTHS), make_config(max_steps=4)
    artifact = train(config, states)
    train(config, states)  # as --refresh does
    first, second = offline_runs()
    assert len(run_ids(first) | run_ids(second)) == 2
    assert all(name.startswith(artifact.key) for name in run_ids(first) | run_ids(second))
    assert steps(second) == [2, 4]


def test_a_validation_that_comes_after_the_row_of_its_step_was_ended_is_not_lost(home, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    about = {"run_id": "a", "project": "dflash", "name": "a", "group": "", "settings": {}, "history": []}
    with tracked_run("offline", **about) as log_row:
        log_row({STEP: 4, "train/loss": 2.0})
        log_row({STEP: 5})  # where a run that is continued after step 4 begins to count
        log_row({STEP: 4, "validation/acceptance_length/tree4": 1.5})
    (run,) = offline_runs()
    history = [record.history for record in run if record.WhichOneof("record_type") == "history"]
    last = {item.key or item.nested_key[0]: item.value_json for item in history[-1].item}
    assert (last[STEP], last["validation/acceptance_length/tree4"]) == ("4", "1.5")
