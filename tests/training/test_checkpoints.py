import logging

import pytest
import torch

from dflash.training.checkpoints import Checkpoint, load_newest, save_checkpoint


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step, {"w": torch.full((3,), float(step))}, {"w:step": torch.tensor(float(step))}, {"x": 0.1 + step}
    )


def test_the_newest_comes_back_exactly_and_the_last_two_are_kept(tmp_path):
    assert load_newest(tmp_path) is None
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, checkpoint(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000015"]
    loaded = load_newest(tmp_path)
    assert (loaded.step, loaded.counters) == (15, {"x": 15.1})
    assert torch.equal(loaded.weights["w"], torch.full((3,), 15.0))
    assert loaded.optimizer["w:step"].shape == ()


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "checkpoint.json"])
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
    assert not path.parent.exists()


def test_an_interrupted_save_is_no_checkpoint(tmp_path):
    save_checkpoint(tmp_path, checkpoint(5))
    aside = tmp_path / ".step-000010"
    aside.mkdir()
    (aside / "weights.safetensors").write_bytes(b"half")
    assert load_newest(tmp_path).step == 5
    save_checkpoint(tmp_path, checkpoint(10))
    assert load_newest(tmp_path).step == 10
