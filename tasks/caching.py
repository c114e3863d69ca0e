"""The caching contract between Prefect and the artifacts.

* The cache key is the stage's own key (`dflash/keys.py`): readable, and the name of the artifact's folder.
* Prefect keeps only the small `Artifact` record. Reading a record back checks the artifact on disk: if that is gone or
  damaged, the record does not count and exactly that stage runs again.
* A key is computed under a file lock that the operating system drops when its holder dies: two runs that want the same
  artifact make it once, and a killed run leaves nothing behind.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.serializers import JSONSerializer
from prefect.transactions import IsolationLevel

from dflash.manifests import Artifact, Key, home, verify

log = logging.getLogger("dflash.tasks")


class FileLockManager:
    """Prefect's lock manager protocol on `filelock`; one machine, local disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, tuple[str, FileLock]] = {}

    def _lock(self, key: str) -> FileLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / f"{key}.lock", thread_local=False)

    def acquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        del hold_timeout  # held until released, or until the process ends
        if self.is_lock_holder(key, holder):
            return True
        lock = self._lock(key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("%s is being made by another run; waiting for it", key)
            try:
                lock.acquire(timeout=-1 if acquire_timeout is None else acquire_timeout)
            except Timeout:
                return False
        self._held[key] = (holder, lock)
        return True

    async def aacquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        return self.acquire_lock(key, holder, acquire_timeout, hold_timeout)

    def release_lock(self, key: str, holder: str) -> None:
        if not self.is_lock_holder(key, holder):
            raise ValueError(f"{holder} does not hold the lock of {key}")
        self._held.pop(key)[1].release()

    def is_locked(self, key: str) -> bool:
        return not self.wait_for_lock(key, timeout=0)

    def is_lock_holder(self, key: str, holder: str) -> bool:
        return key in self._held and self._held[key][0] == holder

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        try:
            with self._lock(key).acquire(timeout=-1 if timeout is None else timeout):
                return True
        except Timeout:
            return False

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        return self.wait_for_lock(key, timeout)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FileLockManager":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (FileLockManager, (self.folder,))


@dataclass
class StageKey(CachePolicy):
    """The stage's own key as Prefect's cache key; arguments that the key does not name are no part of it."""

    key_of: Callable[..., Key] = field(kw_only=True)

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        del task_ctx, flow_parameters, kwargs
        wanted = inspect.signature(self.key_of).parameters
        return str(self.key_of(**{name: value for name, value in inputs.items() if name in wanted}))


def locked(key_of: Callable[..., Key]) -> CachePolicy:
    """The cache policy of a stage with that key function."""
    return StageKey(key_of=key_of).configure(
        isolation_level=IsolationLevel.SERIALIZABLE, lock_manager=FileLockManager(home() / "locks")
    )


def _artifacts(result: Any) -> Iterator[Artifact]:
    if isinstance(result, Artifact):
        yield result
    elif isinstance(result, list | tuple):
        for item in result:
            yield from _artifacts(item)


class CheckedJSON(JSONSerializer):
    """JSON records whose artifacts are verified when they are read; a record of a damaged artifact does not load."""

    type: Literal["dflash-checked-json"] = "dflash-checked-json"

    def loads(self, blob: bytes) -> Any:
        result = super().loads(blob)
        for artifact in _artifacts(result):
            verify(artifact)
        return result
