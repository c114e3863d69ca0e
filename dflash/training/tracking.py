"""Weights & Biases: one run per training, continued when that is. Knows nothing of training."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from dflash.manifests import home

STEP = "train/step"


def tracking_mode(configured: str) -> str:
    """online, offline or disabled. WANDB_MODE in the environment wins; auto is online with an API key, else offline."""
    mode = os.environ.get("WANDB_MODE") or configured
    if mode == "auto":
        return "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return mode


@contextmanager
def tracked_run(
    mode: str,
    *,
    run_id: str,
    project: str,
    name: str,
    group: str,
    settings: dict[str, Any],
    history: Sequence[dict[str, float]],
    step: str = STEP,
) -> Iterator[Callable[[dict[str, float]], None]]:
    """Yields the function that logs a row; every value is plotted over `step`, which each row holds and W&B too
    counts by: rows of one step are one, and what is logged again when training continues is not doubled.

    `history` are the rows of an interrupted run up to its checkpoint: those that W&B lost with the killed process, or
    that an offline run has in another file, are logged first.
    """
    mode = tracking_mode(mode)
    if mode == "disabled":
        yield lambda _row: None
        return
    import wandb  # takes a second to load, and disabled runs do without

    (home() / "wandb").mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        id=run_id,
        resume="allow",
        project=project,
        name=name,
        group=group or None,
        config=settings,
        mode=cast(Any, mode),
        dir=home(),
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric(step)
    run.define_metric("*", step_metric=step)

    def log_row(row: dict[str, float]) -> None:
        # what was stopped while validating has ended the row of its step, and W&B drops rows that come too late
        run.log(row, step=max(int(row[step]), run.step))

    try:
        for row in history:
            if row[step] >= run.step:
                log_row(row)
        yield log_row
    except BaseException:  # not `with run`: that prints a traceback for every interruption
        run.finish(exit_code=1)
        raise
    run.finish()
