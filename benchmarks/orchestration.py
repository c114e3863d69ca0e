"""What orchestration costs: an all-cached pipeline, a task per shard, the server's CPU, memory over many runs.

    python benchmarks/orchestration.py [--shards 100] [--runs 20]

A server and a worker of its own (`dflash up` on a data root that is deleted afterwards). Prints a table and, as its
last line, one JSON object:

* `cached_seconds`: the demo (small), all of it cached, from its creation to Completed, on the worker: median. With
  `cached_run_seconds` of it in the run itself, the rest being the start of a process; `cached_tasks` task runs.
* `shard_task_ms`: time of a shard task that has nothing to compute, mean of N in one run: key, lock, record, progress,
  an artifact of 1 kB; `shard_cached_ms`: when a second run finds it again.
* `server_ms_per_task`: CPU time of the server for each of these task runs, until it has nothing left to do.
* `server_mb`, `worker_mb`: memory after the first and the last of the cached runs.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil

TARGETS = {"cached_seconds": 10, "shard_task_ms": 50}
SMALL: dict[str, dict[str, Any]] = {
    "generation": {"max_prompts": 8, "max_new_tokens": 16},
    "tokenization": {"validation_share": 0},
    "training": {"num_layers": 1, "max_steps": 2, "tracking": "disabled"},
    "evaluation": {"max_prompts": 3, "max_new_tokens": 16, "live_prompts": 0},
}
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
IDLE_SECONDS, PATIENCE = 3, 60

SHARDS = """
import json, sys, time
from prefect import flow
from dflash.manifests import Key, publish
from tasks.stage import find_or_make, stage

def key_of(number): return Key(stage="extraction", recipe=0, config={"number": number}, inputs={})

@stage(key_of, name="extraction-shard", hours=1, run_name="shard {number}")
def shard(number, step="extraction"):
    def make(progress):
        with publish(key_of(number), summary={"rows": 1}) as (folder, published):
            (folder / "states").write_bytes(bytes(1000))
        return published()
    return find_or_make(f"{step}-shard-{number:04d}", key_of(number), make)

@flow(name="shards", persist_result=False)
def shards(count):
    t0 = time.perf_counter()
    for number in range(count):
        shard(number)
    return time.perf_counter() - t0

shards(0)
print(json.dumps([shards(int(sys.argv[1])), shards(int(sys.argv[1]))]))
"""


class Stack:
    """`dflash up` on a data root of its own."""

    def __init__(self, home: Path, port: int) -> None:
        self.api_url = f"http://127.0.0.1:{port}/api"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        self.environment |= {"DFLASH_HOME": str(home), "WANDB_MODE": "disabled"}
        command = [sys.executable, "-m", "flows.cli", "up", "--port", str(port)]
        self.log = home / "up.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        while "Prefect UI" not in self.log.read_text():
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text())
            time.sleep(0.5)

    def api(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api_url}/{path}", data, {"Content-Type": "application/json"})
        for _ in range(PATIENCE):
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    return json.loads(response.read())
            except HTTPError as error:  # its database is busy: every client of the server asks again
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
            time.sleep(0.5)
        raise SystemExit(f"{path}: the server is busy for {PATIENCE} attempts; try again when less else is running")

    def run(self) -> tuple[float, float, str]:
        """Seconds from the creation of a demo run to its end, seconds in the run itself, and its id."""
        demo = self.api("deployments/name/pipeline/demo")
        changed = {name: {**demo["parameters"][name], **SMALL[name]} for name in SMALL}
        t0 = time.perf_counter()
        run = self.api(f"deployments/{demo['id']}/create_flow_run", {"parameters": {**demo["parameters"], **changed}})
        while (found := self.api(f"flow_runs/{run['id']}"))["state_type"] not in ENDED:
            time.sleep(0.1)
        seconds = time.perf_counter() - t0
        if found["state_type"] != "COMPLETED":
            raise SystemExit(f"the run ended {found['state_type']}: {found['state']['message']}")
        return seconds, found["total_run_time"], run["id"]

    def num_tasks(self, run_id: str) -> int:
        """Of a run. The server writes them down some seconds after they were."""
        return int(self.api("task_runs/count", {"flow_runs": {"id": {"any_": [run_id]}}}))

    def processes(self, word: str) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if word in child.cmdline() and "flows.guard" not in child.cmdline()]

    def memory(self, word: str) -> float:
        return sum(process.memory_info().rss for process in self.processes(word)) / 1e6

    def server_cpu(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes("server"))

    def settle(self) -> float:
        """CPU seconds of the server once it does next to nothing any more."""
        before = self.server_cpu()
        while True:
            time.sleep(IDLE_SECONDS)
            if (now := self.server_cpu()) - before < 0.1 * IDLE_SECONDS:
                return now
            before = now

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=200)


def measure(stack: Stack, *, shards: int, runs: int) -> dict[str, Any]:
    stack.run()  # makes everything
    cached, memory = [], []
    for _ in range(runs):
        cached.append(stack.run())
        memory.append((stack.memory("server"), stack.memory("worker")))
    cpu = stack.settle()
    environment = {**stack.environment, "PREFECT_API_URL": stack.api_url}
    # from a file: Prefect reads the source of flows
    script = Path(stack.environment["DFLASH_HOME"]) / "shards.py"
    script.write_text(SHARDS)
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(script), str(shards)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    made, found = json.loads(done.stdout.splitlines()[-1])
    cpu = stack.settle() - cpu
    return {
        "cached_seconds": round(statistics.median(run[0] for run in cached), 2),
        "cached_run_seconds": round(statistics.median(run[1] for run in cached), 2),
        "cached_tasks": stack.num_tasks(cached[-1][2]),
        "shard_task_ms": round(1000 * made / shards, 1),
        "shard_cached_ms": round(1000 * found / shards, 1),
        "server_ms_per_task": round(1000 * cpu / (2 * shards), 1),
        "server_mb": [round(memory[0][0]), round(memory[-1][0])],
        "worker_mb": [round(memory[0][1]), round(memory[-1][1])],
        "runs": runs,
        "shards": shards,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--port", type=int, default=4290)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dflash-orchestration-") as folder:
        stack = Stack(Path(folder), arguments.port)
        try:
            numbers = measure(stack, shards=arguments.shards, runs=arguments.runs)
        finally:
            stack.stop()
    for name, value in numbers.items():
        print(f"{name:<20} {value!s:>14}" + (f"   target: below {TARGETS[name]}" if name in TARGETS else ""))
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
