"""Several processes that train together: torchrun, gloo, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dflash.keys import training_key
from dflash.manifests import in_progress
from dflash.training.launch import launch
from dflash.training.loop import train
from dflash.training.validation import PREFIX
from tests.training.small import LENGTHS, make_config, make_states
from tests.training.test_launch import launch_and_cancel
from tests.training.test_loop import rows_of, weights

TWO = {"accumulation": 4, "max_tokens_per_batch": 45, "num_anchors": 3, "validate_every": 2}


@pytest.fixture(autouse=True)
def _own_root(home, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def close(left, right, *, tolerance=1e-5):
    return all(torch.allclose(left[name], right[name], rtol=tolerance, atol=tolerance) for name in left)


def descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended since its parent was asked
    return children + [further for child in children for further in descendants(child)]


def environment(pid: int) -> bytes:
    """Empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def pid_of_rank(rank: int) -> int:
    """Of the trainers that this process started."""
    for pid in descendants(os.getpid()):
        if f"\0RANK={rank}\0".encode() in environment(pid):
            return pid
    raise AssertionError(f"rank {rank} is not there")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_as_one_does_on_the_same_batches(parallel):
    states = make_states(LENGTHS, validation=3)
    alone = train(make_config(**TWO, ema=0.5), states)
    expected = weights(alone), rows_of(alone)
    assert sum(PREFIX + "tree4" in row for row in expected[1]) >= 2
    together = launch(make_config(**TWO, ema=0.5, processes=2, parallel=parallel), states)
    assert together.key == alone.key
    assert close(weights(together), expected[0])
    for one, two in zip(expected[1], rows_of(together), strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-5)


def test_a_run_of_two_processes_stops_together_and_another_number_of_them_continues(tmp_path):
    states = make_states(LENGTHS)
    changes = TWO | {"epochs": 40, "save_every": 1000, "validate_every": 1000}
    alone = train(make_config(**changes), states)
    expected = weights(alone)
    two = make_config(**changes, processes=2)
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"config": two.model_dump(), "hidden_states": states.model_dump()}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen([*torchrun, "-m", "dflash.training", str(request)], stdout=subprocess.PIPE) as child:
        assert "progress" in json.loads(child.stdout.readline())
        child.terminate()
        assert "stopped" in json.loads(child.stdout.readlines()[-1])
    (first,) = in_progress(training_key(two, states)).glob("step-*")

    launch_and_cancel(two.model_copy(update={"parallel": "fsdp"}), states)
    assert not [pid for pid in descendants(os.getpid()) if b"RANK=" in environment(pid)]
    (second,) = set(in_progress(training_key(two, states)).glob("step-*")) - {first}
    assert int(first.name[5:]) < int(second.name[5:]) < alone.summary["steps"]
    assert close(weights(train(make_config(**changes), states)), expected, tolerance=1e-4)


def test_a_rank_that_is_killed_ends_the_training_with_its_cause_and_not_a_hang():
    states = make_states(LENGTHS)
    config = make_config(**TWO | {"epochs": 4000}, processes=2)
    killed = []

    def kill(done, total, note=""):
        if not killed:
            killed.append(pid_of_rank(1))
            os.kill(killed[0], signal.SIGKILL)

    t0 = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^rank 1 of training was killed by SIGKILL \(out of memory\?\)"):
        launch(config, states, progress=kill)
    assert time.monotonic() - t0 < 60
    assert not [pid for pid in descendants(os.getpid()) if b"RANK=" in environment(pid)]


def test_steps_that_cannot_be_dealt_evenly_are_refused():
    with pytest.raises(ValueError, match="accumulation 3 is not a multiple of 2 processes"):
        make_config(accumulation=3, processes=2)
