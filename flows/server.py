"""The Prefect server a run talks to: the one `dflash up` started, else a temporary one for this process.

Both keep their database under the data root, so that a run made without a server is in the UI later, and both use
PostgreSQL instead where PREFECT_SERVER_DATABASE_CONNECTION_URL says so. Importing this module does not import Prefect:
`available` must set the environment first.
"""

import base64
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn
from urllib.error import HTTPError

from filelock import FileLock, Timeout

from dflash.config import without_secrets
from dflash.manifests import HOST, home, write_atomically
from flows import logs

log = logging.getLogger("dflash.flows")
POOL = "local"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_SECONDS = 180
DRAIN_SECONDS = 90
STOP_SECONDS = DRAIN_SECONDS + 90  # runs, then worker and server
PORT_SECONDS = 60  # for what a killed stack left to let go of its port
MOST_RESTARTS, RESTART_SECONDS = 3, 600  # more often than that, starting it again does not help


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
        # who holds a place under a limit. In memory, the default, a server that is started again has forgotten: its
        # runs are cancelled when they next say that they still hold theirs, and what a killed task held is never free
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # what flows/reaper.py tells a dead run by
        "PREFECT_LOGGING_EXTRA_LOGGERS": "dflash",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # of threads that belong to no run
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # torch's threads spin while they wait for each other. With one of two cores taken by another process a small
        # model decoded 170 times slower so (31 s instead of 0.18 s); on two free cores spinning trains 15 % faster
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if password := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        defaults["PREFECT_API_AUTH_STRING"] = password  # here a server's clients are of the same person
    defaults |= logs.settings()
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


def _refuses(url: str) -> bool:
    """Whether the server wants a password other than that of the environment; its health it tells everybody."""
    request = urllib.request.Request(f"{url}/admin/version")
    password = os.environ.get("PREFECT_API_AUTH_STRING", "")
    request.add_header("Authorization", f"Basic {base64.b64encode(password.encode()).decode()}")
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except HTTPError as error:
        with error:
            return error.code == 401
    return False


@contextmanager
def available() -> Iterator[str | None]:
    """Point this process at a running server (yields its API address) or at a temporary one (yields None).

    Enter it before importing Prefect, which reads its settings then.
    """
    os.environ.update(settings())
    asked = os.environ.get("PREFECT_API_URL", "")
    try:
        without_secrets(asked)
    except ValueError as error:
        raise ValueError(f"PREFECT_API_URL: {error}") from None
    url = running()
    if asked and not url:
        raise ValueError(f"PREFECT_API_URL={asked}: no server answers there; start it, or unset the variable")
    if url:
        if _refuses(url):
            raise ValueError(f"{url}: the server refuses us; set PREFECT_API_AUTH_STRING to its user:password")
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
    """Server, work pool, deployments and worker in the foreground, until Ctrl-C, SIGTERM or `down`: the exit code.

    Where it is up already it says so. Server or worker are started again when they end by themselves. Raises ValueError
    where it cannot start, and for an address that others reach while there is no password.
    """
    _refuse_without_password(host)
    lock = _lock()
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(_banner(_wait_for_other(), note="it is up already; dflash down stops it"), flush=True)
        return 0
    with lock:
        crashed = _pid_file().exists()
        _address_file().unlink(missing_ok=True)
        write_atomically(_pid_file(), f"{HOST} {os.getpid()}")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # also where a background job ignores Ctrl-C
            signal.signal(number, _stop)
        try:
            _claim(host, port, seconds=PORT_SECONDS if crashed else 0)
            return _run_stack(project, host=host, port=port)
        finally:
            _pid_file().unlink(missing_ok=True)


def up_in_background(project: Path, *, host: str, port: int) -> None:
    """The same in a process of its own, until `down`. Raises ValueError where it does not come up."""
    _refuse_without_password(host)
    with suppress(Timeout), _lock().acquire(timeout=0):
        _address_file().unlink(missing_ok=True)  # of one that was killed
    with _log_file().open("a+") as output:
        begin = output.tell()
        command = [sys.executable, "-m", "flows.cli", "up", "--host", host, "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=project, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        while process.poll() is None and not ((url := _noted()) and _answers(url)):
            time.sleep(0.3)
        if process.poll():
            output.seek(begin)
            said = [line for line in output.read().splitlines() if line.startswith("error: ")]
            raise ValueError(said[-1].removeprefix("error: ") if said else f"it did not come up; see {_log_file()}")
    print(_banner(_wait_for_other(), note="dflash down stops it"), flush=True)


def down() -> None:
    """Stop what `up` started, wherever that runs on this machine; running stages save their work first.

    Raises ValueError where it runs on another machine, or does not end in time.
    """
    lock = _lock()
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _stop_other(lock)
        print("stopped", flush=True)
    else:
        print("nothing is up", flush=True)
    with lock:
        for left in (_address_file(), _pid_file()):  # of one that was killed
            left.unlink(missing_ok=True)


def _stop_other(lock: FileLock) -> None:
    host, _, pid = _pid_file().read_text().partition(" ") if _pid_file().exists() else ("", "", "")
    if not pid:
        raise ValueError("it is just starting or stopping; try again in a minute")
    if host != HOST:
        raise ValueError(f"it runs on {host} with the same data; dflash down has to run there")
    print("stopping; running stages save their work first …", flush=True)
    os.kill(int(pid), signal.SIGTERM)
    try:
        lock.acquire(timeout=STOP_SECONDS)
    except Timeout:
        raise ValueError(
            f"process {pid} has not ended after {STOP_SECONDS} s, see {_log_file()}; kill -9 {pid} ends it, and the "
            "next dflash up puts its runs in order"
        ) from None


def _lock() -> FileLock:
    """Held by `up` for as long as it lives; the operating system drops it with a killed one."""
    (home() / "prefect").mkdir(parents=True, exist_ok=True)
    return FileLock(home() / "prefect" / "up.lock")


def _pid_file() -> Path:
    return home() / "prefect" / "up.pid"


def _log_file() -> Path:
    return home() / "prefect" / "up.log"


def _refuse_without_password(host: str) -> None:
    if host not in LOOPBACK and not os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        raise ValueError(
            f"--host {host}: whoever reaches this server can run code here, and it has no password; set "
            "PREFECT_SERVER_API_AUTH_STRING=user:password here, and PREFECT_API_AUTH_STRING to it on other machines"
        )


def _wait_for_other() -> str:
    """The address of the one that holds the lock; it may be starting."""
    deadline = time.monotonic() + START_SECONDS
    while not ((url := _noted()) and _answers(url)):
        if time.monotonic() > deadline:
            raise ValueError(f"another dflash up holds {_lock().lock_file}, but does not answer; dflash down ends it")
        time.sleep(0.3)
    return url


def _claim(host: str, port: int, *, seconds: float) -> None:
    """Raises ValueError where the port is taken, and still is after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"--port {port}: cannot listen on {host} ({error.strerror}); choose another"
                    ) from None
        time.sleep(0.5)


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _banner(url: str, *, note: str) -> str:
    return (
        f"\n  Prefect UI  {url.removesuffix('/api')}\n  data        {home()}\n  log         {_log_file()}\n  {note}\n"
    )


def _run_stack(project: Path, *, host: str, port: int) -> int:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host) or (f"[{host}]" if ":" in host else host)
    api_url = f"http://{shown}:{port}/api"
    environment = {**os.environ, **settings(), "PREFECT_API_URL": api_url, "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
    # the API can start processes: without this, any page open in a browser on this machine could call it
    origins = ",".join(f"http://{name}:{port}" for name in ("127.0.0.1", "localhost", shown))
    environment.setdefault("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", origins)
    environment.setdefault("PREFECT_SERVER_UI_API_URL", "/api")  # whatever name a browser knows this machine by
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    running: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, *arguments: str) -> None:
        with _log_file().open("a") as output:  # what server and worker say of themselves
            running[name] = _start(*arguments, environment=environment, output=output, folder=project)

    def finish(module: str, *arguments: str) -> None:
        """Raises ValueError where it fails."""
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, env=environment, cwd=project, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{module} {' '.join(arguments)}: {done.stdout[-1000:]} {done.stderr[-1000:]}")
        if module == "flows.reaper":
            print(done.stdout, end="", flush=True)

    def start_server() -> None:
        start("server", "server", "start", "--host", host, "--port", str(port))
        _wait(api_url, running["server"], hint=f"see {_log_file()}")

    def start_worker() -> None:
        start("worker", "worker", "start", "--pool", POOL, "--type", "process", "--name", HOST)

    def restart_worker() -> None:
        finish("flows.reaper", POOL)
        start_worker()

    again: dict[str, Callable[[], None]] = {"server": start_server, "worker": restart_worker}
    restarts: deque[float] = deque(maxlen=MOST_RESTARTS)
    try:
        start_server()
        finish("flows.reaper", POOL)  # what a killed worker left behind; makes the pool, which deployments need
        finish("flows.deployments")
        start_worker()
        write_atomically(_address_file(), api_url)
        print(_banner(api_url, note="Ctrl-C or dflash down stops it"), flush=True)
        while True:
            time.sleep(1)
            for name, restart in again.items():
                if (code := running[name].poll()) is None:
                    continue
                said = f"the {name} ended by itself with exit code {code}"
                if len(restarts) == MOST_RESTARTS and time.monotonic() - restarts[0] < RESTART_SECONDS:
                    print(f"error: {said}, again; see {_log_file()}", file=sys.stderr, flush=True)
                    return 1
                print(f"{said}; starting it again", file=sys.stderr, flush=True)
                restarts.append(time.monotonic())
                restart()
    except KeyboardInterrupt:
        print("stopping; running stages save their work first …", flush=True)
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _address_file().unlink(missing_ok=True)
        server, worker = running.get("server"), running.get("worker")
        if worker and server and server.poll() is None:
            # also where the worker has ended: its runs may outlive it
            subprocess.run([sys.executable, "-m", "flows.drain", POOL, str(DRAIN_SECONDS)], env=environment)
        for process in (worker, server):
            if process:
                _end(process)
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
