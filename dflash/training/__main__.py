"""Training as a process: `python -m dflash.training REQUEST.json`, or several of it under torchrun.

Speaks JSON lines on stdout, logs on stderr. Stops after the step in hand, leaving a checkpoint, on SIGTERM, on SIGINT,
and when the pipe on its stdin closes: then whoever started it is gone. Exit codes: 0 done, 1 crashed, 2 bad input, 75
stopped with a checkpoint.
"""

import json
import logging
import os
import signal
import stat
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from dflash.config import TrainingConfig
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from dflash.training.launch import STOPPED
from dflash.training.loop import Stopped, train

CRASHED = 1
BAD_INPUT = 2
SECONDS_BETWEEN_REPORTS = 0.2


def _until_eof(descriptor: int, stop: threading.Event) -> None:
    while os.read(descriptor, 4096):
        pass
    stop.set()


def main() -> int:
    # whatever a library prints goes to stderr: stdout carries messages only
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    first = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if first else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_until_eof, args=(0, stop), daemon=True).start()

    def say(message: dict[str, Any]) -> None:
        try:
            messages.write(json.dumps(message) + "\n")
        except BrokenPipeError:
            stop.set()

    last = 0.0

    def progress(done: float, total: float, note: str = "") -> None:
        nonlocal last
        if done == total or time.monotonic() - last > SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            say({"progress": [done, total, note]})

    try:
        request = json.loads(Path(sys.argv[1]).read_text())
        verifier = request.get("verifier")
        artifact = train(
            TrainingConfig(**request["config"]),
            Artifact(**request["hidden_states"]),
            verifier=PinnedVerifier(**verifier) if verifier else None,
            group=request.get("group", ""),
            progress=progress,
            should_stop=stop.is_set,
        )
    except Stopped as reason:
        if first:
            say({"stopped": str(reason)})
            print(f"INFO dflash.training {reason}", file=sys.stderr)
        return STOPPED
    except (ValueError, FloatingPointError) as error:  # neither gets better by trying again
        say({"error": str(error), "kind": type(error).__name__})
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:
        traceback.print_exc()
        say({"crash": f"{type(error).__name__}: {error}"})
        return CRASHED
    if first:
        say({"artifact": artifact.model_dump()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
