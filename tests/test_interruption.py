"""What a kill -9 costs: the shard in hand during extraction, the steps since the last checkpoint during training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dflash.manifests import load_manifest

pytestmark = pytest.mark.timeout(600)


class Command:
    """`dflash run` of a small recipe in a process of its own, with a data root of its own."""

    def __init__(self, home: Path, server: str, **settings: Any) -> None:
        self.home = home
        defaults: dict[str, Any] = {
            "generation.max_prompts": 30, "generation.max_new_tokens": 24, "extraction.shard_tokens": 300,
            "evaluation.max_prompts": 2, "evaluation.max_new_tokens": 16, "evaluation.live_prompts": 1,
            "evaluation.parity": "off",
            "training.num_layers": 1, "training.max_steps": 4,
        }  # fmt: skip
        changes = [f"--set={name}={value}" for name, value in {**defaults, **settings}.items()]
        self.arguments = [sys.executable, "-m", "flows.cli", "run", "demo", *changes, "--json"]
        self.environment = {**os.environ, "DFLASH_HOME": str(home), "PREFECT_API_URL": server}

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.arguments, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def finish(self) -> dict[str, Any]:
        process = self.start()
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
        result = json.loads(out.splitlines()[-1])
        assert isinstance(result, dict)
        return result

    def kill_when(self, pattern: str) -> None:
        """Kill everything as soon as a path of that pattern exists under the data root."""
        process = self.start()
        deadline = time.monotonic() + 300
        while not list(self.home.glob(pattern)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_killed_during_extraction_finished_shards_are_kept(tmp_path: Path, prefect_server: str) -> None:
    command = Command(tmp_path, prefect_server)
    command.kill_when("artifacts/extraction/*/shards/0003/manifest.json")
    kept = {path: load_manifest(path.parent).created for path in tmp_path.glob("artifacts/*/*/shards/*/manifest.json")}
    assert len(kept) >= 4
    result = command.finish()
    states = {stage["stage"]: stage["state"] for stage in result["stages"]}
    assert states["generation"] == "cached"
    assert states["extraction"] == "ran"
    for path, created in kept.items():
        assert load_manifest(path.parent).created == created
    shards = list(next(iter(kept)).parent.parent.iterdir())
    assert len(shards) > len(kept)


def test_killed_during_training_the_same_command_ends_with_bit_identical_weights(
    tmp_path: Path, prefect_server: str
) -> None:
    settings = {"training.max_steps": 30, "training.save_every": 3, "training.epochs": 30}
    command = Command(tmp_path / "killed", prefect_server, **settings)
    command.kill_when("in_progress/training-*/step-000006")
    resumed = command.finish()
    assert [stage["stage"] for stage in resumed["stages"] if stage["state"] == "ran"] == ["training", "evaluation"]

    straight = Command(tmp_path / "straight", prefect_server, **settings).finish()
    assert straight["acceptance_length"] == resumed["acceptance_length"]
    ours, theirs = (load_file(Path(run["drafter"]) / "model.safetensors") for run in (resumed, straight))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_a_failed_run_says_why_in_its_last_line_and_exits_with_1(tmp_path: Path, prefect_server: str) -> None:
    command = Command(tmp_path, prefect_server, **{"extraction.disk_quota_gb": 0.001})
    process = command.start()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "disk_quota_gb" in err.strip().splitlines()[-1]
    assert err.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err
    states = [(stage["stage"], stage["state"]) for stage in json.loads(out.splitlines()[-1])["stages"]]
    assert states == [("generation", "ran"), ("tokenization", "ran"), ("extraction", "failed")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_without_a_server_saves_a_checkpoint_and_leaves_nothing_running(
    tmp_path: Path, prefect_server: str, number: int, code: int
) -> None:
    settings = {"training.max_steps": 3000, "training.save_every": 3, "training.epochs": 3000}
    command = Command(tmp_path, prefect_server, **settings)
    del command.environment["PREFECT_API_URL"]  # a temporary server of its own
    process = command.start()
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("in_progress/training-*/step-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # what a terminal's Ctrl-C reaches: the whole process group
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert err.strip().splitlines()[-1].startswith("error: interrupted; ")
    assert json.loads(out.splitlines()[-1])["stages"][-1]["state"] == "failed"
    assert list(tmp_path.glob("in_progress/training-*/step-*/checkpoint.json"))
    assert not processes_of(tmp_path)


def test_killed_without_warning_nothing_is_left_running(tmp_path: Path, prefect_server: str) -> None:
    command = Command(tmp_path, prefect_server)
    del command.environment["PREFECT_API_URL"]
    process = command.start()
    while not list(tmp_path.glob("artifacts/generation/*/manifest.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while processes_of(tmp_path):
        assert time.monotonic() < deadline, processes_of(tmp_path)
        time.sleep(0.5)


def processes_of(home: Path) -> dict[int, str]:
    """Numbers and command lines of living processes that use this data root."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"DFLASH_HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it ended meanwhile, or is not ours
    return {number: line for number, line in found.items() if line}
