"""In-process back ends: one process or several give the same answers, and none outlives what started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dflash.corpus.answering import Workers, answer
from dflash.corpus.records import Rejected, Request, Sampling
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier

GREEDY = Sampling(max_new_tokens=5)
DRAWN = Sampling(max_new_tokens=5, temperature=0.8, top_p=0.95, seed=3)
REQUESTS: list[Request] = [(f"conversation{n}/0", list(range(3, 4 + n % 7))) for n in range(11)]
POISON: Request = ("poison/0", [5, 10**6])  # an id without a row in the embedding


@pytest.fixture
def loaded(verifier: PinnedVerifier) -> Verifier:
    return load_verifier(verifier)


@pytest.fixture
def workers(verifier: PinnedVerifier) -> Iterator[Workers]:
    workers = Workers(verifier, ["cpu", "cpu"])
    yield workers
    workers.close()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_answers_do_not_depend_on_the_batch_size_or_the_order(loaded: Verifier, sampling: Sampling) -> None:
    together = answer(REQUESTS, verifier=loaded, batch_size=11, sampling=sampling)
    assert together == answer(REQUESTS, verifier=loaded, batch_size=1, sampling=sampling)
    assert together == answer(REQUESTS[::-1], verifier=loaded, batch_size=4, sampling=sampling)[::-1]


def test_several_processes_answer_as_one_does_and_in_order(workers: Workers, loaded: Verifier) -> None:
    for sampling in (GREEDY, DRAWN):
        one = answer(REQUESTS, verifier=loaded, batch_size=2, sampling=sampling)
        assert workers.answer(REQUESTS, batch_size=2, sampling=sampling) == one
    # a prompt that fails costs its own answer only
    requests = [*REQUESTS[:3], POISON, *REQUESTS[3:]]
    mixed = workers.answer(requests, batch_size=4, sampling=GREEDY)
    assert isinstance(mixed[3], Rejected)
    assert (mixed[3].reason, str(mixed[3])[:10]) == ("generation_failed", "ValueError")
    assert mixed[:3] + mixed[4:] == answer(REQUESTS, verifier=loaded, batch_size=4, sampling=GREEDY)


def test_a_poisoned_prompt_is_rejected_and_its_batch_is_answered(loaded: Verifier) -> None:
    alone = answer(REQUESTS[:2], verifier=loaded, batch_size=1, sampling=GREEDY)
    first, poisoned, second = answer([REQUESTS[0], POISON, REQUESTS[1]], verifier=loaded, batch_size=3, sampling=GREEDY)
    assert [first, second] == alone
    assert isinstance(poisoned, Rejected)
    assert poisoned.reason == "generation_failed"


def test_a_batch_in_which_every_prompt_fails_is_a_failure_of_the_verifier(loaded: Verifier) -> None:
    with pytest.raises(RuntimeError, match="cpu: each of 2 prompts failed, the last with ValueError"):
        answer([POISON, POISON], verifier=loaded, batch_size=2, sampling=GREEDY)


def test_a_worker_that_cannot_start_says_why(verifier: PinnedVerifier) -> None:
    with pytest.raises(ValueError, match="device: 'cuda:99' asked for"):
        Workers(verifier, ["cpu", "cuda:99"])


def test_a_worker_that_dies_is_noticed_and_the_others_end(workers: Workers) -> None:
    first, second = workers.processes.values()
    assert first.pid
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"the process of the verifier on cpu ended \(exit code -9\)"):
        workers.answer(REQUESTS, batch_size=2, sampling=GREEDY)
    assert not workers.processes
    assert not second.is_alive()


def test_seeds_differ_between_answers_and_runs() -> None:
    seeds = {Sampling(5, seed=seed).seed_of(name) for seed in range(20) for name, _ in REQUESTS}
    assert len(seeds) == 20 * len(REQUESTS)


PARENT = """
import sys
from pathlib import Path
from dflash.corpus.answering import Workers
from dflash.corpus.records import Sampling
from dflash.pinning import PinnedVerifier

if __name__ == "__main__":
    workers = Workers(PinnedVerifier.model_validate_json(Path(sys.argv[1]).read_text()), ["cpu", "cpu"])
    print(*(process.pid for process in workers.processes.values()), flush=True)
    if sys.argv[2] == "busy":
        requests = [(str(n), [3, 4, 5]) for n in range(64)]
        workers.answer(requests, batch_size=1, sampling=Sampling(max_new_tokens=1_000_000))
    else:
        sys.stdin.read()
"""


def running(pids: Sequence[str]) -> list[str]:
    """Those that exist and are no zombies (whom only their new parent can reap)."""
    states = subprocess.run(["ps", "-o", "pid=,stat=", "-p", ",".join(pids)], capture_output=True, text=True).stdout
    return [line.split()[0] for line in states.splitlines() if not line.split()[1].startswith("Z")]


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_workers_end_when_their_parent_is_killed(verifier: PinnedVerifier, tmp_path: Path, state: str) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "verifier.json").write_text(verifier.model_dump_json())
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "verifier.json"), state]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    assert parent.stdin
    pids = parent.stdout.readline().split()
    assert len(running(pids)) == 2
    if state == "busy":
        time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while left := running(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    parent.stdin.close()
    parent.stdout.close()
