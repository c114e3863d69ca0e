"""Every test run has a data root of its own, no W&B, and (where a test asks) one real Prefect server."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# before anything imports Prefect or asks for the data root
_ROOT = tempfile.mkdtemp(prefix="dflash-tests-")
os.environ["DFLASH_HOME"] = _ROOT
os.environ["WANDB_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE"):
    os.environ.pop(name, None)

from flows import server

os.environ.update(server.settings())
os.environ["PREFECT_LOGGING_LEVEL"] = "ERROR"
os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
os.environ["PREFECT_SERVER_LOGGING_LEVEL"] = "ERROR"

# the same examples in every run, and a busy machine is no failure; `--hypothesis-profile default` looks for new ones
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("gate")

LONGEST = [
    "test_up", "test_interruption", "test_pipeline", "test_nightly", "test_housekeeping", "test_ranks",
    "test_deployments", "test_documents", "test_reaper", "test_judging", "test_evaluation", "test_runners",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process takes a file as a whole, so that what it sets up is set up once; the longest first, so that all end
    together.
    """
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data root for tests of the library; tests of flows share the session's."""
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that speaks S3, to which this process's environment leads until the module ends."""
    pytest.importorskip("obstore", reason="object stores need the extra cloud")
    from tests.s3 import serving

    with serving(tmp_path_factory.mktemp("s3")) as address:
        yield address


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """A real server for the session; this process and its children talk to it."""
    with server.temporary() as url:
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: url}):
            yield url
