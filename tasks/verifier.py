"""Pin the verifier and refuse what cannot work, before anything expensive starts."""

import logging

from prefect import task

from dflash.config import Recipe
from dflash.pinning import PinnedVerifier
from dflash.plan import preflight

log = logging.getLogger("dflash.tasks")


@task(name="verifier", task_run_name="verifier · {recipe.verifier.model}", persist_result=False)
def pin_verifier(recipe: Recipe, *, trains: bool) -> PinnedVerifier:
    """Resolve and identify the verifier; check taps, mask token, prompt files and what is trained against it."""
    pinned, taps = preflight(recipe, trains=trains)
    log.info("verifier %s: %d layers, taps %s, hidden size %d", pinned, pinned.num_layers, taps, pinned.hidden_size)
    return pinned
