"""In-process back ends: the verifier answers requests in this process, or in one process per device.

Knows requests; nothing of conversations or files.
"""

import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from dflash.corpus.records import Rejected, Request, Response, Sampling
from dflash.corpus.workers import follow_parent
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier

log = logging.getLogger(__name__)


def answer(
    requests: Sequence[Request], *, verifier: Verifier, batch_size: int, sampling: Sampling
) -> list[Response | Rejected]:
    """Answers in the order of the requests. They do not depend on which requests come together.

    A prompt that fails even alone is Rejected. Raises RuntimeError where every prompt of a batch fails, and ValueError
    where the memory is too small for a batch.
    """
    return [
        result
        for batch in _batches(requests, batch_size)
        for result in _answer_batch(batch, verifier=verifier, sampling=sampling)
    ]


def _batches(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def _answer_batch(
    requests: Sequence[Request], *, verifier: Verifier, sampling: Sampling
) -> Sequence[Response | Rejected]:
    try:
        return verifier.generate(
            [ids for _, ids in requests],
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seeds=[sampling.seed_of(name) for name, _ in requests],
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"{verifier.device}: too little memory to answer {len(requests)} prompts of up to "
            f"{max(len(ids) for _, ids in requests)} tokens; lower generation.batch_size"
        ) from error
    except Exception as error:  # whatever one prompt does to the model must not cost the answers of all others
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if len(requests) == 1:
            return [Rejected("generation_failed", failure)]
        log.warning("%d prompts together failed (%s); trying each alone", len(requests), failure)
    alone = [_answer_batch([request], verifier=verifier, sampling=sampling)[0] for request in requests]
    if all(isinstance(result, Rejected) for result in alone):
        raise RuntimeError(f"{verifier.device}: each of {len(requests)} prompts failed, the last with {alone[-1]}")
    return alone


class Workers:
    """One process per device, each with the verifier loaded; they end with this process, however it ends."""

    def __init__(self, verifier: PinnedVerifier, devices: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork could not use CUDA
        threads = max(1, (os.cpu_count() or 1) // len(devices))
        self.processes: dict[Connection, BaseProcess] = {}
        self._lock = threading.Lock()
        try:
            for device in devices:
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work,
                    args=(theirs, verifier.model_copy(update={"device": device}), threads),
                    name=f"verifier on {device}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self.processes[ours] = process
            for pipe in self.processes:
                self._receive(pipe)  # loaded
        except BaseException:
            self.close()
            raise

    def answer(self, requests: Sequence[Request], *, batch_size: int, sampling: Sampling) -> list[Response | Rejected]:
        """As `answer`; batches go to whoever is free. Raises RuntimeError where a worker dies. Closed after errors."""
        todo = deque(enumerate(_batches(requests, batch_size)))
        answered: dict[int, list[Response | Rejected]] = {}
        running: dict[Connection, int] = {}
        idle = list(self.processes)
        with self._lock:
            try:
                while todo or running:
                    while todo and idle:
                        pipe = idle.pop()
                        running[pipe], batch = todo.popleft()
                        with suppress(BrokenPipeError):  # then receiving says what became of the worker
                            pipe.send((batch, sampling))
                    for ready in wait(list(running)):
                        assert isinstance(ready, Connection)
                        answered[running.pop(ready)] = self._receive(ready)
                        idle.append(ready)
            except BaseException:
                self.close()  # the others' answers would be taken for those to the next batch
                raise
        return [result for number in sorted(answered) for result in answered[number]]

    def _receive(self, pipe: Connection) -> list[Response | Rejected]:
        try:
            result = pipe.recv()
        except (EOFError, ConnectionError):
            process = self.processes[pipe]
            process.join()
            raise RuntimeError(f"the process of the {process.name} ended (exit code {process.exitcode})") from None
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, list)
        return result

    def close(self) -> None:
        """End the processes; what they are at is lost."""
        for pipe, process in self.processes.items():
            pipe.close()
            process.kill()
            process.join()
        self.processes.clear()


def _work(pipe: Connection, pinned: PinnedVerifier, num_threads: int) -> None:
    """What a worker does until its pipe is closed."""
    follow_parent()
    torch.set_num_threads(num_threads)
    try:
        verifier = load_verifier(pinned)
        pipe.send([])
        while True:
            requests, sampling = pipe.recv()
            pipe.send(list(_answer_batch(requests, verifier=verifier, sampling=sampling)))
    except (EOFError, BrokenPipeError):
        return
    except ValueError as error:
        pipe.send(ValueError(str(error)))
    except Exception as error:  # not all exceptions can be pickled
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
