"""The Prefect server a run talks to: the one `dflash up` started, else a temporary one for this process.

Both keep their database under the data root, so that a run made without a server is in the UI later. Importing this
module does not import Prefect: `available` must set the environment first.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from dflash.manifests import home, write_atomically

log = logging.getLogger("dflash.flows")
POOL = "local"
START_SECONDS = 180
DRAIN_SECONDS = 90


def settings() -> dict[str, str]:
    """Environment of every process of this project; what the user has set wins."""
    defaults = {
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # one row per transaction is the default, and it keeps SQLite busy for half a minute after a run
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "dflash",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # torch's threads spin while they wait for each other. With one of two cores taken by another process a small
        # model decoded 170 times slower so (31 s instead of 0.18 s); on two free cores spinning trains 15 % faster
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def _address_file() -> Path:
    return home() / "server.url"


def running() -> str | None:
    """API address of a server that answers: PREFECT_API_URL, else the one that `dflash up` noted."""
    url = os.environ.get("PREFECT_API_URL") or _noted()
    return url if url and _answers(url) else None


def _noted() -> str | None:
    return _address_file().read_text() if _address_file().exists() else None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=3) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):  # nobody there, or no address
        return False


@contextmanager
def available() -> Iterator[str | None]:
    """Point this process at a running server (yields its API address) or at a temporary one (yields None).

    Enter it before importing Prefect, which reads its settings then.
    """
    os.environ.update(settings())
    asked, url = os.environ.get("PREFECT_API_URL"), running()
    if asked and not url:
        raise ValueError(f"PREFECT_API_URL={asked}: no server answers there; start it, or unset the variable")
    if url:
        os.environ["PREFECT_API_URL"] = url
        yield url
        return
    with temporary():
        yield None


@contextmanager
def temporary() -> Iterator[str]:
    """A server on a free local port, for as long as the block runs; PREFECT_API_URL points at it."""
    port = _free_port()
    os.environ["PREFECT_API_URL"] = url = f"http://127.0.0.1:{port}/api"
    (home() / "prefect").mkdir(parents=True, exist_ok=True)
    log_file = home() / "prefect" / "temporary-server.log"
    with log_file.open("a") as output, FileLock(home() / "prefect" / "start.lock"):  # one at a time migrates
        server = _start("server", "start", "--port", str(port), "--no-ui", environment=dict(os.environ), output=output)
        try:
            _wait(url, server, hint=f"see {log_file}")
        except BaseException:
            _end(server)
            raise
    try:
        yield url
    finally:
        _drain_clients()
        _end(server)
        del os.environ["PREFECT_API_URL"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _drain_clients() -> None:
    """Send what Prefect's own threads still hold, or they complain that the server is gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all()
    EventsWorker.drain_all()


def _start(
    *arguments: str, environment: dict[str, str], output: IO[str] | None = None, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """A Prefect command that Ctrl-C does not reach (we stop it, in order) and that does not outlive this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.guard", sys.executable, "-m", "prefect", *arguments],
        env=environment,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def up(project: Path, *, host: str, port: int) -> int:
    """Server, work pool, deployments and worker in the foreground, until Ctrl-C or SIGTERM. Returns the exit code."""
    if (there := _noted()) and _answers(there):
        raise ValueError(f"{there} is up already; stop that one first, or set DFLASH_HOME for another data root")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"--port {port}: cannot listen on {host} ({error.strerror}); choose another") from None
    api_url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/api"
    environment = {**os.environ, **settings(), "PREFECT_API_URL": api_url, "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
    # the API can start processes: without this, any page open in a browser on this machine could call it
    origins = ",".join(f"http://{name}:{port}" for name in ("127.0.0.1", "localhost", host))
    environment.setdefault("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", origins)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    (home() / "prefect").mkdir(parents=True, exist_ok=True)

    def prefect(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "prefect", *arguments]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):  # also where a script's background job ignores Ctrl-C
        signal.signal(number, stop)
    log_file = home() / "prefect" / "up.log"

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with log_file.open("a") as output:  # what server and worker say of themselves
            return _start(*arguments, environment=environment, output=output, folder=project)

    server = start("server", "start", "--host", host, "--port", str(port))
    worker = None
    try:
        _wait(api_url, server, hint=f"see {log_file}")
        for arguments in (
            ("work-pool", "create", POOL, "--type", "process", "--overwrite"),
            ("--no-prompt", "deploy", "--all"),
        ):
            done = subprocess.run(prefect(*arguments), env=environment, cwd=project, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"prefect {' '.join(arguments)}: {done.stdout[-1000:]} {done.stderr[-1000:]}")
        worker = start("worker", "start", "--pool", POOL, "--type", "process")
        write_atomically(_address_file(), api_url)
        print(
            f"\n  Prefect UI  {api_url.removesuffix('/api')}\n  data        {home()}\n  log         {log_file}\n"
            "  Ctrl-C stops it\n",
            flush=True,
        )
        while server.poll() is None and worker.poll() is None:
            time.sleep(1)
        name, code = ("server", server.returncode) if server.poll() is not None else ("worker", worker.returncode)
        print(f"error: the {name} ended by itself with exit code {code}; see {log_file}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopping; running stages save their work first …", flush=True)
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _address_file().unlink(missing_ok=True)
        if worker and worker.poll() is None:
            if server.poll() is None:
                subprocess.run([sys.executable, "-m", "flows.drain", POOL, str(DRAIN_SECONDS)], env=environment)
            _end(worker)
        _end(server)
        print("stopped", flush=True)


def _wait(api_url: str, server: subprocess.Popen[bytes], *, hint: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _answers(api_url):
        if server.poll() is not None:
            raise ValueError(f"the server ended with exit code {server.returncode}; {hint}")
        if time.monotonic() > deadline:
            raise ValueError(f"the server did not answer within {START_SECONDS} s; try again when less else is running")
        time.sleep(0.3)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    for attempt in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, attempt)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            log.warning("process %d does not end; asking again", process.pid)
    process.stdin.close()
