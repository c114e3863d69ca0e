"""`dflash up`: a real server, worker and browser. Registers every recipe, offers forms, stops what it started.

And what is left when it is killed: nothing that runs for ever, nothing that has to be done again, no secret.
"""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from flows import recipes, server
from tests.conftest import free_port
from tests.test_interruption import processes_of

SECRETS = {
    name: f"planted-{name.lower()}-5f1d"
    for name in ("OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY")
}
SMALL: dict[str, dict[str, Any]] = {
    "generation": {"prompts": [{"path": "bundled:gsm8k-train"}], "max_prompts": 8, "max_new_tokens": 16},
    "tokenization": {"validation_share": 0},
    "training": {"mask_token_id": 3, "num_layers": 1, "max_steps": 2, "dtype": "float32", "tracking": "offline"},
    "evaluation": {"max_prompts": 3, "max_new_tokens": 16, "live_prompts": 1},
}
METRICS = "in_progress/training-*/metrics.jsonl"
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.timeout(600)


class Stack:
    """A running `dflash up`."""

    def __init__(self, root: Path, *options: str, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.root = root
        self.home = root / "home"
        self.log = root / "up.log"
        self.options = options
        self.headers = {"Content-Type": "application/json"}
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        self.environment |= {"DFLASH_HOME": str(self.home), "WANDB_MODE": "offline", **environment}
        self.start()

    def start(self) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "up", "--port", str(self.port), *self.options],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 240
        while "Prefect UI" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.5)

    def stop(self) -> None:
        """As `dflash down` does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=200) == 0, self.log.read_text()

    def dflash(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.cli", *arguments]
        return subprocess.run(command, env={**self.environment, **environment}, capture_output=True, text=True)

    def run(self, **changes: Mapping[str, Any]) -> str:
        """Start a small run as the form does; gives its id."""
        demo = self.deployment("demo")
        names = {*SMALL, *changes}
        sections = {name: {**demo["parameters"].get(name, {}), **SMALL.get(name, {})} for name in names}
        sections = {name: {**section, **changes.get(name, {})} for name, section in sections.items()}
        body = {"parameters": {**demo["parameters"], **sections}}
        return str(self.api(f"deployments/{demo['id']}/create_flow_run", body)["id"])

    def wait_for(self, pattern: str, *, but: Collection[Path] = ()) -> Path:
        """The first file or folder of that pattern that is none of those."""
        deadline = time.monotonic() + 240
        while not (found := set(self.home.glob(pattern)) - set(but)):
            assert time.monotonic() < deadline, list(self.home.glob("*/*"))
            time.sleep(0.1)
        return found.pop()

    def train_for_long(self, **changes: Any) -> tuple[str, Path]:
        """Start a run that trains until it is stopped and saves nothing by itself. Its id, and the training's folder
        once it takes steps.
        """
        begun = set(self.home.glob(METRICS))
        steps = {"max_steps": 40_000, "epochs": 40_000, "save_every": 40_000, "learning_rate": 1e-6, "spike_factor": 0}
        run = self.run(training={**steps, **changes})
        return run, self.wait_for(METRICS, but=begun).parent

    def tasks(self, run_id: str, *names: str, attempt: int = 1) -> dict[str, str]:
        """The states of a run's tasks, once those of these names are there and all have ended: the server writes task
        states down a little later than that of their run.
        """
        deadline = time.monotonic() + 60
        while True:
            found = self.api("task_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}})
            states = {task["name"]: task["state_name"] for task in found if task["flow_run_run_count"] == attempt}
            if states.keys() >= set(names) and {"Running", "Pending"}.isdisjoint(states.values()):
                return states
            assert time.monotonic() < deadline, found
            time.sleep(0.5)

    def api(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/{path}", data=data, headers=self.headers)
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    return json.loads(response.read() or "null")
            except HTTPError as error:  # the database is busy: every client of the server asks again
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

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
    running = Stack(tmp_path_factory.mktemp("up"), DFLASH_QUOTA_GB="0.000001", **SECRETS)
    yield running
    running.stop()


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


@contextmanager
def browsing(stack: Stack) -> Iterator[Any]:
    """A page of the stack's UI, large enough for whole forms. Close it soon: it is never at rest."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1600}, base_url=stack.url)
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def shown(page: Any, address: str, *texts: str) -> None:
    page.goto(address)
    for text in texts:
        page.get_by_text(re.compile(text)).first.wait_for()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_the_form_shows_names_defaults_and_descriptions_and_says_what_is_wrong(stack: Stack) -> None:
    form = f"/v2/deployments/deployment/{stack.deployment('demo')['id']}/run"
    with browsing(stack) as page:
        shown(page, form, "Gamma", "Of slot weights decay", "Tree budgets", "Mask token id", "Drafter layers")
        page.screenshot(path=stack.root / "form.png", full_page=True)
        page.get_by_label("Gamma (Optional)", exact=True).fill("-1")
        page.get_by_role("button", name="Submit").click()
        page.get_by_text("'training.gamma'. Failure reason: -1 is less than or equal to the minimum of 0").wait_for()


def test_a_run_from_the_ui_ends_completed_and_a_run_without_a_server_of_its_own_finds_it(stack: Stack) -> None:
    run = stack.run()
    finished = stack.wait(run, "Completed", "Failed", "Crashed")
    assert finished["state_name"] == "Completed", finished["state"]["message"]
    assert finished["name"].startswith("pipeline · demo · dpace · ")
    artifacts = stack.api("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
    assert {"pipeline-result", "evaluation", "evaluation-plots"} <= {artifact["key"] for artifact in artifacts}
    assert {a["key"] for a in artifacts if a["type"] == "progress"} == {None}  # they would fill the page of artifacts
    changes = [f"--set={s}.{key}={json.dumps(value)}" for s, values in SMALL.items() for key, value in values.items()]
    done = stack.dflash("run", "demo", *changes, "--json")
    assert done.returncode == 0, done.stderr
    assert stack.url in done.stderr
    assert {stage["state"] for stage in json.loads(done.stdout.splitlines()[-1])["stages"]} == {"cached"}
    assert "DFLASH_QUOTA_GB" in done.stderr
    said = [line["message"] for line in stack.api("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})]
    assert any("training rows" in line for line in said)  # what the library says is on the run's page
    assert any("DFLASH_QUOTA_GB" in line for line in said)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_pages_show_what_came_out_of_a_run_with_tables_and_plots(stack: Stack) -> None:
    artifacts = stack.api("artifacts/filter", {"artifacts": {"key": {"any_": ["evaluation", "evaluation-plots"]}}})
    ids = {artifact["key"]: artifact["id"] for artifact in artifacts}
    run = artifacts[0]["flow_run_id"]
    with browsing(stack) as page:
        shown(page, "/v2/artifacts", "pipeline-result", "evaluation-plots", "training-curves", "verdict")
        shown(page, f"/v2/runs/flow-run/{run}?tab=Artifacts", "Completed", "evaluation: what", "training: finished")
        shown(page, f"/v2/artifacts/artifact/{ids['evaluation']}", "acceptance length")
        page.get_by_role("table").first.wait_for()
        page.goto(f"/v2/artifacts/artifact/{ids['evaluation-plots']}")
        page.get_by_role("img").first.wait_for()


def test_a_retry_from_the_ui_repeats_what_failed_and_what_comes_after_it(stack: Stack) -> None:
    (history,) = stack.home.glob("history/*.parquet")
    aside = history.rename(history.with_suffix(".aside"))
    history.write_bytes(b"damaged")
    try:
        run = stack.run(training={"seed": 5})
        failed = stack.wait(run, "Completed", "Failed", "Crashed")
    finally:
        aside.replace(history)
    assert "the history is unreadable" in failed["state"]["message"]
    retry = {"type": "SCHEDULED", "name": "AwaitingRetry"}
    assert stack.api(f"flow_runs/{run}/set_state", {"state": retry, "force": True})["status"] == "ACCEPT"
    stack.wait(run, "Completed", "Crashed")
    again = stack.tasks(run, "training", "evaluation", "verdict", attempt=2)
    assert (again["training"], again["evaluation"], again["verdict"]) == ("Cached", "Completed", "Completed")
    once_more = {name for name, state in again.items() if state == "Completed"}
    parts = {name.rpartition(" · ")[2] for name in once_more}
    assert parts <= {"bundled:demo-verifier", "plan", "evaluation", "verdict"}


def test_a_run_cancelled_in_the_ui_stops_within_seconds_and_keeps_its_steps(stack: Stack) -> None:
    run, training = stack.train_for_long(seed=6)
    if CHROMIUM:
        with browsing(stack) as page:
            shown(page, f"/v2/runs/flow-run/{run}?tab=Artifacts", "Running", "training: .*step")
    stack.api(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    stack.wait(run, "Cancelled", seconds=120)  # ten on a quiet machine
    assert list(training.glob("step-*"))
    assert stack.tasks(run, "training")["training"] != "Completed"


def test_two_runs_at_once_do_the_work_once(stack: Stack) -> None:
    sections = {**SMALL, "training": {**SMALL["training"], "seed": 8, "max_steps": 20, "epochs": 20}}
    changes = [
        f"--set={s}.{key}={json.dumps(value)}" for s, values in sections.items() for key, value in values.items()
    ]
    command = [sys.executable, "-m", "flows.cli", "run", "demo", *changes, "--json"]
    runs = [subprocess.Popen(command, env=stack.environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    stages = [json.loads(run.communicate()[0].splitlines()[-1])["stages"] for run in runs]
    trained = sorted(stage["state"] for found in stages for stage in found if stage["stage"] == "training")
    assert trained == ["cached", "ran"]


def test_a_second_up_says_that_it_is_up(stack: Stack) -> None:
    for options in ([], ["--detach"], ["--port", str(free_port())]):
        done = stack.dflash("up", *options)
        assert done.returncode == 0, done.stderr
        assert "it is up already" in done.stdout or options == ["--detach"]
        assert stack.url in done.stdout
    assert stack.process.poll() is None


def test_only_this_machine_can_reach_it(stack: Stack) -> None:
    """Every socket that its processes listen on is of the loopback device."""
    sockets = {
        os.readlink(descriptor)
        for number in processes_of(stack.home)
        for descriptor in Path(f"/proc/{number}/fd").iterdir()
        if descriptor.is_symlink()
    }
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append(fields[1].partition(":")[0])
    assert listening == ["0100007F"] * len(listening)
    assert listening


def test_a_worker_that_is_killed_is_replaced_and_its_run_ends_crashed(stack: Stack) -> None:
    run, _ = stack.train_for_long(seed=10)
    (worker,) = (
        n for n, line in processes_of(stack.home).items() if "-m prefect worker start" in line and "guard" not in line
    )
    os.kill(worker, signal.SIGKILL)
    crashed = stack.wait(run, "Crashed", seconds=180)
    assert crashed["state_type"] == "CRASHED"
    assert "starting it again" in stack.log.read_text()
    again = stack.run()  # and the new worker works: everything is cached
    assert stack.wait(again, "Completed", "Failed", "Crashed")["state_name"] == "Completed"


def test_a_server_that_is_killed_is_replaced_and_knows_who_holds_a_place_under_a_limit(stack: Stack) -> None:
    """Each run of a deployment holds one, and is cancelled where the server has forgotten it."""
    stack.api("v2/concurrency_limits/", {"name": "place", "limit": 1})
    lease = stack.api("v2/concurrency_limits/increment-with-lease", {"names": ["place"], "slots": 1})["lease_id"]
    (pid,) = (
        n for n, line in processes_of(stack.home).items() if "-m prefect server start" in line and "guard" not in line
    )
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while "the server ended by itself" not in stack.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    while not server._answers(f"{stack.url}/api"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    stack.api(f"v2/concurrency_limits/leases/{lease}/renew", {})  # raises where nobody knows it


def test_interrupting_it_cancels_what_runs_and_stops_what_it_started(stack: Stack) -> None:
    run, training = stack.train_for_long(seed=9)
    waiting = stack.run(training={"max_steps": 3})  # one at a time: it waits for the first
    begun = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED", "RUNNING"]}}}}
    before = {row["id"] for row in stack.api("flow_runs/filter", begun)}
    assert run in before
    children = subprocess.run(["pgrep", "-P", str(stack.process.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(timeout=200) == 0, stack.log.read_text()
    for child in children:
        assert not Path(f"/proc/{child}").exists()
    assert not (stack.home / "server.url").exists()
    assert not processes_of(stack.home)

    stack.start()  # on the same data: nothing is left "Running" for ever, what waited runs, what was is remembered
    cancelled = stack.api(f"flow_runs/{run}")
    assert cancelled["state_name"] == "Cancelled"
    assert cancelled["state"]["message"] != "did not stop in time"
    assert list(training.glob("step-*"))
    assert stack.wait(waiting, "Completed", "Failed", "Crashed", "Cancelled")["state_name"] == "Completed"
    assert before <= {row["id"] for row in stack.api("flow_runs/filter", {})}


def test_after_a_power_cut_runs_are_marked_crashed_and_the_next_one_resumes(stack: Stack) -> None:
    steps = {"max_steps": 40, "epochs": 40, "save_every": 2, "seed": 7}
    before = set(stack.home.glob("in_progress/training-*"))
    run = stack.run(training=steps)
    while not (new := set(stack.home.glob("in_progress/training-*/step-*")) - {p for b in before for p in b.iterdir()}):
        time.sleep(0.05)
    for number in processes_of(stack.home):
        os.kill(number, signal.SIGKILL)
    stack.process.wait(timeout=10)
    assert new
    stack.start()
    crashed = stack.api(f"flow_runs/{run}")
    assert crashed["state_name"] == "Crashed"
    assert "continues" in crashed["state"]["message"]
    assert stack.tasks(run, "training")["training"] != "Completed"

    again = stack.run(training=steps)
    assert stack.wait(again, "Completed", "Failed", "Crashed")["state_name"] == "Completed"
    logs = stack.api("logs/filter", {"logs": {"flow_run_id": {"any_": [again]}}})
    (begun,) = (line["message"] for line in logs if "steps from step" in line["message"])
    assert int(begun.partition("steps from step ")[2].partition(",")[0]) >= 2


def test_a_password_in_an_address_is_refused_before_it_is_recorded(stack: Stack) -> None:
    for settings in (
        {"generation": {"base_url": "http://me:planted-password-5f1d@host/v1"}},
        {"generation": {"prompts": [{"path": "https://me:planted-password-5f1d@host/prompts.jsonl"}]}},
        {"extraction": {"runner": "dask", "address": "tcp://me:planted-password-5f1d@host:8786"}},
        {"extraction": {"storage": "s3://me:planted-password-5f1d@bucket"}},
        {"training": {"rendezvous": "me:planted-password-5f1d@host:29400"}},
    ):
        with pytest.raises(HTTPError) as refusal:
            stack.run(**settings)
        with refusal.value as answer:
            assert answer.code in (409, 422), settings


def test_down_stops_it_and_finds_nothing_then(stack: Stack) -> None:
    done = stack.dflash("down")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "stopped"), done.stderr
    assert stack.process.wait(timeout=10) == 0
    assert not processes_of(stack.home)
    done = stack.dflash("down")
    assert (done.returncode, done.stdout) == (0, "nothing is up\n")


def test_the_commands_of_the_manual_run(stack: Stack) -> None:
    """Every `bash` block of docs/operating.md, in order, with a port and a size for tests."""
    blocks = (recipes.prefect_yaml().parent / "docs" / "operating.md").read_text().split("```bash\n")[1:]
    lines = [line.partition("#")[0].split() for block in blocks for line in block.partition("```")[0].splitlines()]
    assert len(lines) >= 10
    changes = [f"--set={s}.{key}={json.dumps(value)}" for s, values in SMALL.items() for key, value in values.items()]
    added = {"up": ["--port", str(stack.port)], "run": changes}
    (drafter, *_) = sorted(stack.home.glob("artifacts/training/training-*"))
    for program, command, *options in lines:
        assert program == "dflash"
        given = [drafter.name[:14] if option == "FINGERPRINT" else option for option in options]
        done = stack.dflash(command, *given, *added.get(command, []))
        assert done.returncode == 0, (command, done.stderr)


def test_no_secret_is_written_anywhere(stack: Stack) -> None:
    """Database, logs, records, manifests, W&B's files: everything that the runs of this stack left behind."""
    done = stack.dflash("run", "demo", "--set=generation.base_url=http://me:planted-password-5f1d@host/v1")
    assert done.returncode == 2
    assert "planted" not in done.stderr
    assert "OPENAI_API_KEY" in done.stderr
    texts = {path: path.read_bytes() for path in stack.root.rglob("*") if path.is_file()}
    assert any(path.name == "prefect.db" for path in texts)
    assert any("wandb" in path.parts for path in texts)
    for name, secret in {**SECRETS, "password": "planted-password-5f1d"}.items():
        assert not [path for path, text in texts.items() if secret.encode() in text], name


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A PostgreSQL server of its own on a free port of this machine; gives the URL of its database."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not versions:
        pytest.skip("needs Debian's package postgresql")
    # its programs refuse to be run by root, and another user cannot enter pytest's folders
    owner = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="dflash-postgres-") as folder:
        if owner:
            shutil.chown(folder, **owner)
        port = free_port()

        def command(name: str, *arguments: str) -> None:
            done = subprocess.run(
                [str(versions[-1] / name), "-D", f"{folder}/data", *arguments],
                cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **owner,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr

        command("initdb", "--auth=trust", "--username=prefect", "--no-sync")
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
        command("pg_ctl", "-w", "-l", f"{folder}/log", "-o", options, "start")
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
        command("pg_ctl", "-w", "-m", "immediate", "stop")


@pytest.fixture
def new_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def start(*options: str, **environment: str) -> Stack:
        stacks.append(Stack(tmp_path, *options, **environment))
        return stacks[-1]

    yield start
    for stack in stacks:
        stack.stop()


def test_postgresql_by_one_variable(postgres: str, new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(PREFECT_SERVER_DATABASE_CONNECTION_URL=postgres)
    run = stack.run(generation={"max_prompts": 4})
    assert stack.wait(run, "Completed", "Failed", "Crashed")["state_name"] == "Completed"
    stack.stop()
    assert not list(stack.home.rglob("prefect.db*"))
    stack.start()  # what was is remembered
    assert stack.api(f"flow_runs/{run}")["state_name"] == "Completed"


def test_with_a_password_others_may_reach_it_and_only_who_knows_it_is_let_in(
    tmp_path: Path, new_stack: Callable[..., Stack]
) -> None:
    password = "operator:planted-5f1d"
    stack = new_stack("--host", "0.0.0.0", PREFECT_SERVER_API_AUTH_STRING=password)
    with pytest.raises(HTTPError) as refusal:
        stack.api("deployments/filter", {})
    with refusal.value as answer:
        assert answer.code == 401
    stack.headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
    assert len(stack.api("deployments/filter", {})) == len(recipes.registered(recipes.prefect_yaml()))
    # our own commands here know it; others have to say it, and are told so in one line
    del stack.environment["PREFECT_SERVER_API_AUTH_STRING"]
    refused = stack.dflash("run", "demo")
    assert refused.returncode == 2
    assert "PREFECT_API_AUTH_STRING" in refused.stderr.splitlines()[-1]
    nothing = "--set=generation.max_prompt_tokens=1"  # which fails, but only once it was let in
    assert stack.dflash("run", "demo", nothing, PREFECT_API_AUTH_STRING=password).returncode == 1
    stack.stop()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"planted-5f1d" in path.read_bytes()]


@pytest.mark.usefixtures("home")
def test_without_a_password_it_listens_on_this_machine_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "up", "--host", "0.0.0.0"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "PREFECT_SERVER_API_AUTH_STRING=user:password" in done.stderr


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
