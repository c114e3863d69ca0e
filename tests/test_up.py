"""`dflash up`: a real server, worker and browser. Registers every recipe, offers forms, stops what it started."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import recipes, server
from tests.conftest import free_port

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.xdist_group("up"), pytest.mark.timeout(600)]


class Stack:
    """A running `dflash up`."""

    def __init__(self, root: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.root = root
        self.log = root / "up.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "up", "--port", str(self.port)],
                env={**environment, "DFLASH_HOME": str(root / "home")},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 240
        while "Prefect UI" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.5)

    def api(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/api/{path}", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    def deployment(self, name: str) -> dict[str, Any]:
        found = self.api(f"deployments/name/pipeline/{name}")
        assert isinstance(found, dict)
        return found

    def wait(self, run_id: str, *states: str, seconds: float = 240) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            run = self.api(f"flow_runs/{run_id}")
            if run["state_name"] in states:
                assert isinstance(run, dict)
                return run
            assert time.monotonic() < deadline, (run["state_name"], run["state"]["message"])
            time.sleep(1)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("up"))
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        running.process.wait(timeout=200)


def test_every_recipe_is_registered_with_its_parameters_and_a_form(stack: Stack) -> None:
    for name, parameters in recipes.deployments(recipes.prefect_yaml()).items():
        deployment = stack.deployment(name)
        assert deployment["description"]
        assert deployment["parameters"] == parameters
        schema = deployment["parameter_openapi_schema"]
        gamma = schema["definitions"]["TrainingConfig"]["properties"]["gamma"]
        assert (gamma["title"], gamma["default"], gamma["exclusiveMinimum"]) == ("Gamma", 10.0, 0)
        for section in schema["definitions"].values():
            for key, field in section.get("properties", {}).items():
                assert field.get("title"), key
                assert field.get("description"), key


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_the_form_shows_names_defaults_and_descriptions(stack: Stack) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1600})
        page.goto(f"{stack.url}/v2/deployments/deployment/{stack.deployment('demo')['id']}/run")
        for text in ("Gamma", "Of slot weights decay", "Tree budgets", "Mask token id", "Drafter layers"):
            expect(page.get_by_text(re.compile(text)).first).to_be_visible(timeout=60_000)
        page.screenshot(path=stack.root / "form.png", full_page=True)
        browser.close()


def test_a_run_from_the_ui_ends_completed_and_a_run_without_a_server_of_its_own_finds_it(stack: Stack) -> None:
    small = {
        "generation": {"prompts": [{"path": "bundled:gsm8k-train"}], "max_prompts": 8, "max_new_tokens": 16},
        "tokenization": {"validation_share": 0},
        "training": {"mask_token_id": 3, "num_layers": 1, "max_steps": 2, "dtype": "float32", "tracking": "disabled"},
        "evaluation": {"max_prompts": 3, "max_new_tokens": 16, "live_prompts": 1},
    }
    demo = stack.deployment("demo")
    sections = {name: {**demo["parameters"][name], **values} for name, values in small.items()}
    run = stack.api(f"deployments/{demo['id']}/create_flow_run", {"parameters": {**demo["parameters"], **sections}})
    finished = stack.wait(run["id"], "Completed", "Failed", "Crashed")
    assert finished["state_name"] == "Completed", finished["state"]["message"]
    assert finished["name"].startswith("pipeline · demo · dpace · ")
    artifacts = stack.api("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert {"pipeline-result", "evaluation", "progress-training"} <= {artifact["key"] for artifact in artifacts}

    changes = [f"--set={s}.{key}={json.dumps(value)}" for s, values in small.items() for key, value in values.items()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "demo", *changes, "--json"],
        env={**environment, "DFLASH_HOME": str(stack.root / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert stack.url in done.stderr
    assert {stage["state"] for stage in json.loads(done.stdout.splitlines()[-1])["stages"]} == {"cached"}


def test_interrupting_it_cancels_what_runs_and_stops_what_it_started(stack: Stack) -> None:
    demo = stack.deployment("demo")
    long = {"training": {**demo["parameters"]["training"], "epochs": 1000, "tracking": "disabled"}}
    run = stack.api(f"deployments/{demo['id']}/create_flow_run", {"parameters": {**demo["parameters"], **long}})
    stack.wait(run["id"], "Running")
    children = subprocess.run(["pgrep", "-P", str(stack.process.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(timeout=200) == 0, stack.log.read_text()
    for child in children:
        assert not Path(f"/proc/{child}").exists()
    assert not (stack.root / "home" / "server.url").exists()

    # what the database says afterwards: nothing is left "Running" for ever
    code = (
        "from prefect.client.orchestration import get_client\n"
        "with get_client(sync_client=True) as client:\n"
        f"    print(client.read_flow_run('{run['id']}').state.name)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= {"DFLASH_HOME": str(stack.root / "home")}
    environment["PREFECT_HOME"] = str(stack.root / "home" / "prefect")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "Cancelled"


@pytest.mark.usefixtures("home")
def test_a_taken_port_is_one_clear_line() -> None:
    with server.socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "up", "--port", str(port)], capture_output=True, text=True
        )
    assert done.returncode == 2
    assert f"--port {port}" in done.stderr
