"""Training as a process: real processes, real signals."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dflash.keys import training_key
from dflash.manifests import in_progress
from dflash.training.launch import _cause, _gpus, _torchrun, launch
from dflash.training.loop import train
from tests.training.small import LENGTHS, MASK, make_config, make_row, make_states
from tests.training.test_loop import same, weights
from tests.training.test_tracking import offline_runs

LONG = {"epochs": 60, "max_steps": 80, "validate_every": 1000, "save_every": 5, "log_every": 7}


class Cancelled(BaseException):
    """As an orchestrator raises it in the main thread."""


@pytest.fixture(autouse=True)
def _own_root(home, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # bit-identity holds for equal thread counts


def launch_and_cancel(config, states) -> None:
    """A launch that is cancelled when it first reports progress."""

    def cancel(number, frame):
        raise Cancelled

    previous = signal.signal(signal.SIGUSR1, cancel)
    try:
        with pytest.raises(Cancelled):
            launch(config, states, progress=lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, previous)


@contextmanager
def process(config, states, tmp_path: Path):
    """The trainer, as `launch` starts it."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"config": config.model_dump(), "hidden_states": states.model_dump()}))
    command = [sys.executable, "-m", "dflash.training", str(request)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def test_when_its_starter_is_gone_it_leaves_a_checkpoint_and_says_so(tmp_path):
    states, config = make_states(LENGTHS), make_config(**LONG | {"save_every": 1000})
    with process(config, states, tmp_path) as child:
        assert "progress" in json.loads(child.stdout.readline())
        child.stdin.close()
        assert child.wait(30) == 75
    assert len(list(in_progress(training_key(config, states)).glob("step-*"))) == 1


def test_an_interruption_reaches_the_trainer_and_the_next_launch_continues():
    states, config = make_states(LENGTHS), make_config(**LONG | {"save_every": 1000})
    expected = weights(train(config, states))
    launch_and_cancel(config, states)
    assert len(list(in_progress(training_key(config, states)).glob("step-*"))) == 1
    reports = []
    artifact = launch(config, states, progress=lambda *report: reports.append(report[:2]))
    assert same(weights(artifact), expected)
    assert reports[-1] == (80, 80)
    assert reports[0][0] > 1


def test_bad_input_is_a_value_error_and_a_crash_has_its_cause_on_one_line(monkeypatch):
    rows = [make_row(20, prompt=7, generator=torch.Generator())]
    rows[0].greedy_ids_T[12] = MASK
    with pytest.raises(ValueError, match=f"mask_token_id: {MASK} occurs"):
        launch(make_config(), make_states([20], rows=rows, validation=0))
    with pytest.raises(ValueError, match=r"^step 2: loss nan, .*; lower the learning rate"):
        launch(make_config(learning_rate=1e38, warmup_share=0), make_states(LENGTHS))
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        with pytest.raises(RuntimeError, match=r"^training crashed \(exit code 1\): no output"):
            launch(make_config(), make_states(LENGTHS))
    assert _cause(-9, "", []).startswith("training was killed by SIGKILL (out of memory?)")
    report = ["Failures:", "  rank      : 1 (local_rank: 1)", "  exitcode  : -15 (pid: 7)", "Root Cause:"]
    report += ["  rank      : 3 (local_rank: 3)", "  exitcode  : -9 (pid: 9)"]
    assert _cause(1, "RuntimeError: peer gone", report).startswith("rank 3 of training was killed by SIGKILL")
    assert _cause(1, "RuntimeError: peer gone", report[:3]) == "training crashed (exit code 1): RuntimeError: peer gone"


def test_one_process_needs_no_torchrun_several_and_several_machines_do():
    assert _torchrun(make_config(), 1, run_id="r") == []
    several = _torchrun(make_config(accumulation=4, processes=4), 4, run_id="r")
    assert {"--standalone", "--nproc-per-node=4", "--max-restarts=0"} <= set(several)
    machines = make_config(accumulation=4, processes=2, nodes=2, rendezvous="host:29500")
    command = _torchrun(machines, 2, run_id="r")
    assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=host:29500", "--rdzv-id=r"} <= set(command)
    assert "--standalone" not in command
    assert _gpus() == max(1, torch.cuda.device_count())


def test_a_trainer_has_a_wandb_service_of_its_own(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SERVICE", "3-1-tcp-localhost-1")  # of a process that is gone, as nobody listens there
    states = make_states(LENGTHS)
    artifact = launch(make_config(max_steps=2, tracking="offline"), states)
    assert artifact.summary["steps"] == 2
    assert len(offline_runs()) == 1
