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

pytestmark = [pytest.mark.xdist_group("flows"), pytest.mark.timeout(600)]


class Command:
    """`dflash run` of a small recipe in a process of its own, with a data root of its own."""

    def __init__(self, home: Path, server: str, **settings: Any) -> None:
        self.home = home
        defaults: dict[str, Any] = {
            "generation.max_prompts": 30, "generation.max_new_tokens": 24, "extraction.shard_tokens": 300,
            "evaluation.max_prompts": 2, "evaluation.max_new_tokens": 16, "evaluation.live_prompts": 1,
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
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "How many?"}\n{"question": \n')
    command = Command(tmp_path, prefect_server, **{"generation.prompts": [str(prompts)]})
    process = command.start()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err.strip().splitlines()[-1].startswith(f"error: {prompts}:2: malformed JSON")
    assert json.loads(out.splitlines()[-1])["stages"] == [
        {"stage": "generation", "state": "failed", "seconds": pytest.approx(0, abs=60), "fingerprint": None}
    ]
