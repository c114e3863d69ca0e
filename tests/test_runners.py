"""Shards on local Ray and Dask clusters: the same bytes as without, and what failures and Ctrl-C leave behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from prefect import flow, task

import tasks.stage
from dflash.config import ExtractionConfig, VerifierConfig
from dflash.hidden import extraction as library
from dflash.hidden.planning import plan_shards
from dflash.manifests import MANIFEST, Artifact, home, load_manifest

tasks.stage.BACKOFF_SECONDS = 0  # before the tasks are made

from flows import runners
from flows.parts import extract
from flows.runners import gpus_wanted, one_after_another, runner_of
from flows.steps import RunRecord, Steps
from tests.hidden.hidden_small import make_corpus, pinned, save_verifier

pytestmark = pytest.mark.usefixtures("prefect_server")
CLUSTERS = [
    pytest.param(name, marks=pytest.mark.skipif(not find_spec(f"prefect_{name}"), reason=f"prefect-{name} is missing"))
    for name in ("ray", "dask")
]
LENGTHS = [9, 30, 12, 4, 25, 8, 16, 11, 40, 13]
VERIFIER = VerifierConfig(model="tiny", device="cpu")


class Extraction:
    """One small extraction, made with any runner."""

    def __init__(self, folder: Path) -> None:
        self.verifier = pinned(save_verifier(folder))
        self.corpus = make_corpus(LENGTHS)

    def __call__(self, runner: str, **options: Any) -> Artifact:
        config = ExtractionConfig.model_validate(
            {"target_layer_ids": [0, 2], "storage_dtype": "float32", "shard_tokens": 60, "runner": runner, **options}
        )
        self.record = RunRecord(recipe="small")
        self.plans = plan_shards(config, self.corpus, self.verifier)

        @flow
        def small() -> Artifact:
            steps = Steps(self.record, refresh=[])
            return extract(steps, config, self.corpus, self.verifier, make_shards=runners.runner_of(config, VERIFIER))

        return small()

    def forget(self) -> None:
        shutil.rmtree(home() / "artifacts" / "extraction", ignore_errors=True)
        shutil.rmtree(home() / "records", ignore_errors=True)


@pytest.fixture(scope="module")
def extraction(tmp_path_factory: pytest.TempPathFactory) -> Extraction:
    return Extraction(tmp_path_factory.mktemp("verifier"))


def hashes(artifact: Artifact) -> dict[str, str]:
    """Of all files but the shards' manifests, which say when they were made."""
    files = load_manifest(artifact.path).files
    return {name: record.sha256 for name, record in files.items() if not name.endswith(MANIFEST)}


@pytest.mark.parametrize("runner", CLUSTERS)
def test_a_cluster_makes_what_is_missing_with_the_same_bytes(extraction: Extraction, runner: str) -> None:
    extraction.forget()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have: sums of another number of threads differ in their last bits
    inline = extraction("inline")
    torch.set_num_threads(threads)
    bytes_inline = hashes(inline)
    made = {plan.number: load_manifest(home() / plan.location).created for plan in extraction.plans}
    assert len(made) == 3
    shutil.rmtree(home() / "records")
    for plan in extraction.plans[1:]:
        shutil.rmtree(home() / plan.location)
    assert hashes(extraction(runner, max_workers=2)) == bytes_inline
    remade = {plan.number: load_manifest(home() / plan.location).created for plan in extraction.plans}
    assert [number for number in made if made[number] == remade[number]] == [0]
    assert [(step.stage, step.state) for step in extraction.record.stages] == [("extraction", "ran")]
    extraction(runner)
    assert [(step.stage, step.state) for step in extraction.record.stages] == [("extraction", "cached")]


@pytest.mark.parametrize("runner", CLUSTERS)
def test_a_shard_that_fails_is_tried_again_and_later_redone_alone(extraction: Extraction, runner: str) -> None:
    extraction.forget()
    extraction("inline")
    extraction.forget()
    blocked = home() / extraction.plans[1].location
    blocked.parent.mkdir(parents=True)
    blocked.touch()  # a file, where the shard's folder belongs
    with pytest.raises(FileExistsError, match=str(blocked)):
        extraction(runner)
    assert [(step.stage, step.state) for step in extraction.record.stages] == [("extraction", "failed")]
    others = [home() / plan.location for plan in extraction.plans if plan.number != 1]
    made = [load_manifest(folder).created for folder in others]
    blocked.unlink()
    extraction("inline")
    assert [load_manifest(folder).created for folder in others] == made
    assert [(step.stage, step.state) for step in extraction.record.stages] == [("extraction", "ran")]


@task(persist_result=False)
def load_and_count(number: int, verifier: Any) -> tuple[int, int]:
    """Which process this is, and how often it has loaded a verifier."""
    library.loaded_verifier(verifier)
    return os.getpid(), library._load.cache_info().misses


@pytest.mark.parametrize("runner", CLUSTERS)
def test_a_worker_loads_the_verifier_once(extraction: Extraction, runner: str) -> None:
    call_all = runner_of(ExtractionConfig.model_validate({"runner": runner}), VERIFIER)
    states = call_all(load_and_count, [(number, extraction.verifier) for number in range(4)])
    ((process, loads),) = {state.result() for state in states}
    assert loads == 1
    assert process != os.getpid()


ENDLESS = """
import sys, time
from pathlib import Path
from prefect import task
from dflash.config import ExtractionConfig, VerifierConfig
from flows.runners import runner_of

@task(persist_result=False)
def wait(marker):
    Path(marker).touch()
    time.sleep(600)

if __name__ == "__main__":
    runner_of(ExtractionConfig(runner=sys.argv[1]), VerifierConfig(model="tiny", device="cpu"))(wait, [(sys.argv[2],)])
"""


@pytest.mark.parametrize("runner", CLUSTERS)
def test_ctrl_c_ends_the_cluster_too(tmp_path: Path, prefect_server: str, runner: str) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    marker = tmp_path / "running"
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "endless.py"), runner, str(marker)],
        env={**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not marker.exists():
        assert run.poll() is None
        time.sleep(0.1)
    processes = psutil.Process(run.pid).children(recursive=True)
    assert processes
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(timeout=60) != 0
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_what_must_come_first_stops_the_rest(tmp_path: Path) -> None:
    @task(persist_result=False)
    def fail(number: int) -> None:
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 0"):
        one_after_another(fail, [(1,), (2,)], first=(fail, (0,)))
    assert [str(state.type) for state in one_after_another(fail, [(1,), (2,)])] == ["StateType.FAILED"] * 2


def test_without_a_cluster_shards_are_made_one_after_another() -> None:
    assert runner_of(ExtractionConfig(), VERIFIER) is one_after_another


@pytest.mark.parametrize(
    ("verifier", "most_of_a_node", "gpus"),
    [
        ({"device": "cpu"}, 8, 0),
        ({"device": "auto"}, 0, 0),
        ({"device": "auto"}, 8, 1),
        ({"device": "cuda"}, 8, 1),
        ({"device_map": "auto"}, 8, 8),
    ],
)
def test_gpus_of_a_worker(verifier: dict[str, Any], most_of_a_node: int, gpus: int) -> None:
    assert gpus_wanted(VerifierConfig(model="tiny", **verifier), most_of_a_node) == gpus


def test_gpus_that_no_worker_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="the cluster has no GPU; give auto or cpu"):
        gpus_wanted(VerifierConfig(model="tiny", device="cuda"), 0)
    with pytest.raises(ValueError, match="cuda:1 is one GPU, but workers get different ones; set it to auto or cuda"):
        runner_of(ExtractionConfig(runner="ray"), VerifierConfig(model="tiny", device="cuda:1"))


@pytest.mark.parametrize("setting", [{"max_workers": 2}, {"address": "auto"}])
def test_cluster_settings_without_a_cluster_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set runner to ray or dask"):
        ExtractionConfig(**setting)
