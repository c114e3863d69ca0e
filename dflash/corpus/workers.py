"""What every worker process does first, whatever its work."""

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it does: one that is killed cannot tell its workers to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent, "only workers have a parent"
    parent.join()
    os._exit(1)
