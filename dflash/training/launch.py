"""Training in processes of its own, so that a crash, a cancellation or a lack of memory never takes the caller down.

One process, or as many ranks as `training.processes` says under torchrun. Relays progress and log lines, passes
interruptions on, and turns what became of it into an artifact or an error.
"""

import contextvars
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

from dflash.config import TrainingConfig
from dflash.keys import training_key
from dflash.manifests import Artifact, Damaged, Progress, in_progress, silent
from dflash.pinning import PinnedVerifier

log = logging.getLogger(__name__)

STOPPED = 75
SECONDS_TO_STOP = 60
SECONDS_FOR_LAST_LINES = 10


def launch(
    config: TrainingConfig,
    hidden_states: Artifact,
    *,
    verifier: PinnedVerifier | None = None,
    group: str = "",
    progress: Progress = silent,
) -> Artifact:
    """Run `train` as `python -m dflash.training`, under torchrun where several processes share it; gives its artifact.

    `verifier` is needed where the drafter starts from its layers; `group` names the pipeline run for W&B. Whatever
    interrupts the wait (KeyboardInterrupt, a termination signal raised as an exception) closes the child's stdin; then
    its ranks finish their step together, save a checkpoint and have a minute for it. Raises ValueError for bad input
    (Damaged for a damaged store), RuntimeError with the cause on one line for everything else.

    With several machines this starts the ranks of this one, and logs the command to start the others with; they need
    the same data root.
    """
    processes = config.processes or _gpus()
    refuse_uneven_ranks(config, processes * config.nodes)
    request: dict[str, Any] = {
        "config": config.model_dump(),
        "hidden_states": hidden_states.model_dump(),
        "verifier": verifier.model_dump() if verifier else None,
        "group": group,
    }
    with tempfile.TemporaryDirectory(prefix="dflash-training-") as scratch:
        key = training_key(config, hidden_states)
        folder = Path(scratch) if config.nodes == 1 else in_progress(key)  # which all machines can read
        (folder / "request.json").write_text(json.dumps(request))
        command = [sys.executable, *_torchrun(config, processes, run_id=str(key)), "-m", "dflash.training"]
        command.append(str(folder / "request.json"))
        if config.nodes > 1:
            log.info("start the ranks of each other machine with: %s", shlex.join(command))
        return _run(command, processes, progress)


def refuse_uneven_ranks(config: TrainingConfig, world: int) -> None:
    """Raises ValueError where the micro-batches of a step cannot be dealt evenly to so many processes."""
    if config.accumulation % world:
        raise ValueError(
            f"training.accumulation: {config.accumulation} micro-batches per step are not a multiple of {world} "
            f"processes; set it to {-(-config.accumulation // world) * world}"
        )


def _gpus() -> int:
    """How many there are, at least 1; asked in a process of its own, since this one does without torch."""
    count = "import torch; print(torch.cuda.device_count())"
    out = subprocess.run([sys.executable, "-c", count], check=True, stdout=subprocess.PIPE, text=True).stdout
    return max(1, int(out))


def _torchrun(config: TrainingConfig, processes: int, *, run_id: str) -> list[str]:
    if processes * config.nodes == 1:
        return []
    where = ["--standalone"]
    if config.nodes > 1:
        where = [f"--nnodes={config.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={config.rendezvous}"]
        where.append(f"--rdzv-id={run_id}")
    limits = ["--max-restarts=0", f"--shutdown-timeout={SECONDS_TO_STOP}"]
    return ["-m", "torch.distributed.run", *where, f"--nproc-per-node={processes}", *limits]


def _run(command: list[str], processes: int, progress: Progress) -> Artifact:
    # W&B would share this process's service, where the run of a trainer that was killed stays in use
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    if processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,  # stays open: its end tells every rank that we are gone
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    last_lines: deque[str] = deque(maxlen=200)
    # in this thread's context, so that an orchestrator's log handler knows whose lines these are
    in_context = contextvars.copy_context().run
    relay = threading.Thread(target=in_context, args=(_relay, child.stderr, last_lines), daemon=True)
    said: dict[str, Any] = {}
    try:
        relay.start()
        for line in child.stdout:
            message = json.loads(line)
            if "progress" in message:
                progress(*message["progress"])
            else:  # the first of several ranks knows best
                said = message | said
        code = child.wait()
    except BaseException:
        _stop(child)
        raise
    finally:
        child.stdin.close()
        child.stdout.close()
        relay.join(SECONDS_FOR_LAST_LINES)  # a process that the child left behind may hold the pipe open
    if "artifact" in said:  # published, whatever a library does when a process ends
        return Artifact.model_validate(said["artifact"])
    if "error" in said:
        raise (Damaged if said["kind"] == "Damaged" else ValueError)(said["error"])
    raise RuntimeError(_cause(STOPPED if "stopped" in said else code, said.get("crash", ""), last_lines))


def _stop(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    log.warning("stopping training: it finishes its step and saves a checkpoint")
    child.stdin.close()
    for end in (child.terminate, child.kill):
        try:
            child.wait(SECONDS_TO_STOP)
            return
        except subprocess.TimeoutExpired:
            log.error("training did not stop within %d s and is ended; its last checkpoint is kept", SECONDS_TO_STOP)
            end()
    child.wait()


def _relay(stderr: IO[str], last_lines: deque[str]) -> None:
    levels = logging.getLevelNamesMapping()
    with stderr:
        for line in stderr:
            text = line.rstrip()
            if text:
                last_lines.append(text)
            level, _, rest = text.partition(" ")
            if level in levels:
                name, _, message = rest.partition(" ")
                logging.getLogger(name).log(levels[level], "%s", message)
            elif text:
                log.info("%s", text)


def _cause(code: int, crash: str, last_lines: deque[str]) -> str:
    if code == STOPPED:
        return "training was stopped from outside; its checkpoint is kept, run again to continue"
    who = "training"
    if code > 0 and (killed := _killed_rank(last_lines)):  # what the others crash of follows from it
        rank, code = killed
        who = f"rank {rank} of training"
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"{who} was killed by {name}{hint}; run again to continue from its last checkpoint"
    return f"training crashed (exit code {code}): {crash or (last_lines[-1] if last_lines else 'no output')}"


def _killed_rank(last_lines: deque[str]) -> tuple[int, int] | None:
    """(rank, exit code) of a rank that a signal ended, from torchrun's report; those it ended itself do not count."""
    report = re.findall(r"^\s*rank +: (\d+)[^\n]*\n\s*exitcode +: (-\d+)", "\n".join(last_lines), re.MULTILINE)
    killed = [(int(rank), int(code)) for rank, code in report if int(code) != -signal.SIGTERM]
    return killed[0] if killed else None
