"""A real S3 server on loopback; the fixture `s3` of conftest.py runs it for a module."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import free_port

SECRET = "not-to-be-seen-anywhere"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server whose log is in `folder`; whatever is in this process's environment leads there."""
    from dflash.hidden import remote

    address = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", address.rpartition(":")[2]]
    log = (folder / "log").open("wb")
    with pytest.MonkeyPatch.context() as patch, log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "reader")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        remote._bucket.cache_clear()  # of another server
        try:
            deadline = time.monotonic() + 60
            while not _answers(address):
                assert time.monotonic() < deadline, Path(log.name).read_text()
                time.sleep(0.05)
            yield address
        finally:
            server.kill()
            remote._bucket.cache_clear()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/moto-api/", timeout=5):
            return True
    except urllib.error.URLError:
        return False


def ask(address: str, path: str, *, method: str, data: bytes | None = None) -> None:
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{address}/{path}", method=method, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=10):
        pass


def new_bucket(address: str) -> str:
    """The URL of a place in an empty bucket."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    ask(address, name, method="PUT")
    return f"s3://{name}/some/where"
