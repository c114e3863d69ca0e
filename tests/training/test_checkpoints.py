import errno
import json
import logging
import os
import resource
from dataclasses import replace

import pytest
import torch

from dflash.manifests import Damaged, text_sha256
from dflash.training.checkpoints import (
    Checkpoint,
    forget_checkpoints,
    load_newest,
    read_checkpoint,
    refuse_changes,
    save_checkpoint,
    saved_steps,
)


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step,
        weights={"w": torch.full((3,), float(step))},
        average={},
        optimizer={"w:step": torch.tensor(float(step))},
        counters={"x": 0.1 + step},
        settings={"config": {"seed": 0}},
    )


def kept(folder, *, steps, **policy):
    for step in steps:
        save_checkpoint(folder, checkpoint(step))
        policy_then = policy | {"scores": {at: score for at, score in policy["scores"].items() if at < step}}
        forget_checkpoints(folder, **policy_then)
    return saved_steps(folder)


def test_what_was_saved_comes_back_exactly(tmp_path):
    assert load_newest(tmp_path) is None
    for step in (5, 10):
        save_checkpoint(tmp_path, checkpoint(step))
    loaded = load_newest(tmp_path)
    assert (loaded.step, loaded.counters, loaded.settings) == (10, {"x": 10.1}, {"config": {"seed": 0}})
    assert torch.equal(loaded.weights["w"], torch.full((3,), 10.0))
    assert loaded.optimizer["w:step"].shape == ()
    assert loaded.average == {}
    assert read_checkpoint(tmp_path, 5).step == 5
    with pytest.raises(Damaged, match="step-000007"):
        read_checkpoint(tmp_path, 7)


def test_the_newest_those_of_every_so_many_steps_and_the_best_are_kept(tmp_path):
    steps = range(5, 45, 5)
    assert kept(tmp_path / "a", steps=steps, keep_last=2, keep_every=0, scores={}) == [40, 35]
    assert kept(tmp_path / "b", steps=steps, keep_last=1, keep_every=15, scores={}) == [40, 30, 15]
    assert kept(tmp_path / "c", steps=steps, keep_last=1, keep_every=0, scores={10: 2.0, 20: 2.5, 30: 2.5}) == [40, 20]


def test_the_best_as_of_an_older_checkpoint_is_kept_as_long_as_training_may_continue_from_that(tmp_path):
    scores = {10: 2.0, 35: 3.0}
    assert kept(tmp_path, steps=range(5, 45, 5), keep_last=3, keep_every=0, scores=scores) == [40, 35, 30, 10]


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "average.safetensors", "optimizer.safetensors", "checkpoint.json"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_one_is_named_and_the_one_before_it_is_used(tmp_path, caplog, name, damage):
    save_checkpoint(tmp_path, checkpoint(5))
    path = save_checkpoint(tmp_path, checkpoint(10)) / name
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-3])
    if damage == "delete":
        path.unlink()
    with caplog.at_level(logging.ERROR):
        assert load_newest(tmp_path).step == 5
    assert "step-000010" in caplog.text
    assert saved_steps(tmp_path) == [5]
    assert len(list((tmp_path / "damaged-step-000010").iterdir())) == (3 if damage == "delete" else 4)


def test_a_step_that_is_damaged_again_takes_the_place_of_the_first_one_set_aside(tmp_path):
    for _ in range(2):
        path = save_checkpoint(tmp_path, checkpoint(10))
        (path / "weights.safetensors").unlink()
        assert load_newest(tmp_path) is None
    assert [found.name for found in tmp_path.iterdir()] == ["damaged-step-000010"]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_disk_that_does_not_answer_costs_no_checkpoint(tmp_path, monkeypatch, code):
    for step in (5, 10):
        save_checkpoint(tmp_path, checkpoint(step))

    def fails(path):
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("dflash.training.checkpoints.file_sha256", fails)
        with pytest.raises(OSError, match=os.strerror(code)):
            load_newest(tmp_path)
    assert load_newest(tmp_path).step == 10


@pytest.mark.parametrize("change", [{"loss_scale": 2.0}, {"settings": None}])
def test_a_checkpoint_of_another_version_is_named_as_such_and_kept(tmp_path, change):
    path = save_checkpoint(tmp_path, checkpoint(10)) / "checkpoint.json"
    content = json.loads(json.loads(path.read_text())["text"]) | change
    text = json.dumps({name: value for name, value in content.items() if value is not None})
    path.write_text(json.dumps({"sha256": text_sha256(text), "text": text}))
    with pytest.raises(ValueError, match=f"step-000010: made by another version .* differs in {next(iter(change))}"):
        load_newest(tmp_path)
    assert saved_steps(tmp_path) == [10]


@pytest.mark.parametrize("large", ["weights", "counters"])
def test_a_disk_that_is_full_is_named_with_a_remedy_and_costs_no_earlier_checkpoint(tmp_path, large):
    save_checkpoint(tmp_path, checkpoint(5))
    content = {"weights": {"w": torch.zeros(300_000)}, "counters": {"x": "x" * 300_000}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # of one file, which to a writer is the same
    try:
        with pytest.raises(OSError, match=r"bytes are free.*make room, or set DFLASH_HOME") as raised:
            save_checkpoint(tmp_path, replace(checkpoint(10), **{large: content[large]}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    assert load_newest(tmp_path).step == 5


def test_an_interrupted_save_is_no_checkpoint(tmp_path):
    save_checkpoint(tmp_path, checkpoint(5))
    aside = tmp_path / ".step-000010"
    aside.mkdir()
    (aside / "weights.safetensors").write_bytes(b"half")
    assert load_newest(tmp_path).step == 5
    save_checkpoint(tmp_path, checkpoint(10))
    assert load_newest(tmp_path).step == 10


def test_other_settings_are_refused_by_name_unless_accepted(tmp_path, caplog):
    saved = {"recipe": 2, "config": {"seed": 0, "loss": {"ce": 1.0, "kl": 0.0}}}
    current = {"recipe": 2, "config": {"seed": 1, "loss": {"ce": 1.0, "kl": 0.5}, "ema": 0.9}}
    refuse_changes(saved, saved, folder=tmp_path, step=5, accepted=False)
    said = r"step-000005 .*\(config.ema: None -> 0.9, config.loss.kl: 0.0 -> 0.5, config.seed: 0 -> 1\)"
    with pytest.raises(ValueError, match=said):
        refuse_changes(saved, current, folder=tmp_path, step=5, accepted=False)
    with caplog.at_level(logging.WARNING):
        refuse_changes(saved, current, folder=tmp_path, step=5, accepted=True)
    assert "config.seed: 0 -> 1" in caplog.text
