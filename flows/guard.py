"""Run a command for as long as whoever started it lives: `python -m flows.guard COMMAND …`, with a pipe as stdin.

When the pipe closes, because its other end was closed or killed, the command is told to stop, and in the end made to.
"""

import os
import signal
import subprocess
import sys
import threading

SECONDS = 15


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        for end in (child.terminate, child.terminate, child.kill):
            end()
            try:
                child.wait(SECONDS)
                return
            except subprocess.TimeoutExpired:
                continue

    threading.Thread(target=watch, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
