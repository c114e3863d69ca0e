"""Weights & Biases: one run per training key, continued when training is. Knows nothing of training."""

import os
from collections.abc import Callable, Iterator
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
    mode: str, *, run_id: str, project: str, name: str, settings: dict[str, Any]
) -> Iterator[Callable[[dict[str, float]], None]]:
    """Yields the function that logs a row; every value is plotted over `train/step`, which each row holds.

    Rows logged after the last checkpoint are logged again when training continues, with equal steps and values.
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
        config=settings,
        mode=cast(Any, mode),
        dir=home(),
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    try:
        yield run.log
    except BaseException:  # not `with run`: that prints a traceback for every interruption
        run.finish(exit_code=1)
        raise
    run.finish()
