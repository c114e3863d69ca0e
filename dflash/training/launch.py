"""Training in a process of its own, so that a crash, a cancellation or a lack of memory never takes the caller down.

Relays progress and log lines, passes interruptions on, and turns the exit code into an artifact or an error.
"""

import contextvars
import json
import logging
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

from dflash.config import TrainingConfig
from dflash.manifests import Artifact, Damaged, Progress, silent

log = logging.getLogger(__name__)

STOPPED = 75
SECONDS_TO_STOP = 60
SECONDS_FOR_LAST_LINES = 10


def launch(config: TrainingConfig, hidden_states: Artifact, *, progress: Progress = silent) -> Artifact:
    """Run `train` as `python -m dflash.training` and return its artifact.

    Whatever interrupts the wait (KeyboardInterrupt, a termination signal raised as an exception) is passed to the child
    as SIGTERM; the child finishes its step, saves a checkpoint and has a minute for it. Raises ValueError for bad input
    (Damaged for a damaged store), RuntimeError with the cause on one line for everything else.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-training-") as folder:
        request = Path(folder) / "request.json"
        request.write_text(json.dumps({"config": config.model_dump(), "hidden_states": hidden_states.model_dump()}))
        child = subprocess.Popen(
            [sys.executable, "-m", "dflash.training", str(request)],
            stdin=subprocess.PIPE,  # stays open: its end tells the child that we are gone
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        last_lines: deque[str] = deque(maxlen=20)
        # in this thread's context, so that an orchestrator's log handler knows whose lines these are
        in_context = contextvars.copy_context().run
        relay = threading.Thread(target=in_context, args=(_relay, child.stderr, last_lines), daemon=True)
        result: dict[str, Any] = {}
        try:
            relay.start()
            for line in child.stdout:
                message = json.loads(line)
                if "progress" in message:
                    progress(*message["progress"])
                else:
                    result = message
            code = child.wait()
        except BaseException:
            _stop(child)
            raise
        finally:
            child.stdin.close()
            child.stdout.close()
            relay.join(SECONDS_FOR_LAST_LINES)  # a process that the child left behind may hold the pipe open
    if code == 0:
        return Artifact.model_validate(result["artifact"])
    if "error" in result:
        raise (Damaged if result["kind"] == "Damaged" else ValueError)(result["error"])
    raise RuntimeError(_cause(code, last_lines))


def _stop(child: subprocess.Popen[str]) -> None:
    log.warning("stopping training: it finishes its step and saves a checkpoint")
    child.terminate()
    try:
        child.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        log.error("training did not stop within %d s and was killed; its last checkpoint is kept", SECONDS_TO_STOP)
        child.kill()
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


def _cause(code: int, last_lines: deque[str]) -> str:
    if code == STOPPED:
        return "training was stopped from outside; its checkpoint is kept, run again to continue"
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"training was killed by {name}{hint}; run again to continue from its last checkpoint"
    return f"training crashed (exit code {code}): {last_lines[-1] if last_lines else 'no output'}"
