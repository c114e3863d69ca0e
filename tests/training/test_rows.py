"""The file of metrics after an interruption."""

import json
import logging

import pytest
import torch

from dflash.keys import training_key
from dflash.manifests import in_progress
from dflash.training.loop import Stopped, train
from dflash.training.rows import resume_rows
from dflash.training.tracking import STEP
from tests.training.small import LENGTHS, make_config, make_states
from tests.training.test_loop import rows_of, same, stop_after, weights


def write(path, steps):
    path.write_text("".join(json.dumps({STEP: step, "train/loss": 1 / step}) + "\n" for step in steps))
    return path


def test_a_file_is_cut_back_to_its_checkpoint_and_left_alone_where_nothing_is_cut(tmp_path):
    path = write(tmp_path / "metrics.jsonl", [1, 2, 3])
    before = path.read_bytes(), path.stat()
    assert [row[STEP] for row in resume_rows(path, step=3, expected=3)] == [1, 2, 3]
    assert (path.read_bytes(), path.stat()) == before
    path.write_text(path.read_text() + '{"train/step": 4, "train/lo')
    assert [row[STEP] for row in resume_rows(path, step=2, expected=2)] == [1, 2]
    assert path.read_bytes() == write(tmp_path / "two", [1, 2]).read_bytes()
    assert resume_rows(tmp_path / "missing", step=0, expected=0) == []


def test_a_resumed_run_that_is_killed_while_it_cuts_the_file_loses_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "metrics.jsonl", [1, 2, 3])
    before = path.read_bytes()

    def killed(aside, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        resume_rows(path, step=2, expected=2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [b"\x00" * 40, b"\xff\xfe", b"5", b"{}", b'{"train/step": null}', b"[]"])
def test_rows_from_a_damaged_line_on_are_dropped_naming_it(tmp_path, caplog, damage):
    path = write(tmp_path / "metrics.jsonl", [1, 2, 3, 4])
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], damage, lines[3], b""]))
    with caplog.at_level(logging.WARNING):
        assert [row[STEP] for row in resume_rows(path, step=4, expected=4)] == [1, 2]
    assert path.read_bytes().splitlines() == lines[:2]
    damaged, gap = caplog.messages
    assert damaged.startswith(f"{path}:3: no row of metrics (")
    assert "2 of the 4 rows up to step 4 are left" in gap


@pytest.mark.parametrize("lost", ["all", "damaged"])
def test_rows_that_are_lost_change_neither_the_weights_nor_which_are_best(home, caplog, lost):
    torch.set_num_threads(1)
    states = make_states(LENGTHS, validation=4)
    swinging = {"learning_rate": 0.3, "warmup_share": 0, "schedule": "wsd", "decay_share": 0, "keep_last": 1}
    config = make_config(**swinging, epochs=9, validate_every=2, save_every=1)
    whole = train(config, states)
    best = whole.summary["best"]
    expected, all_rows = weights(whole), rows_of(whole)
    with pytest.raises(Stopped):
        train(config, states, should_stop=stop_after(best["step"] + 5))
    path = in_progress(training_key(config, states)) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("" if lost == "all" else "".join([lines[0], "\x00\n" if lost == "damaged" else "", *lines[4:]]))
    with caplog.at_level(logging.WARNING):
        resumed = train(config, states)
    assert "rows up to step" in caplog.text
    assert resumed.summary["best"] == best
    assert same(weights(resumed), expected)
    assert len(rows_of(resumed)) < len(all_rows)
