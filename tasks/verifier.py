"""Pin the verifier and refuse what cannot work, before anything expensive starts."""

import logging

from prefect import task

from dflash.config import Recipe
from dflash.keys import prompt_files
from dflash.pinning import PinnedVerifier, check_mask_token, pin, tap_layers

log = logging.getLogger("dflash.tasks")


@task(name="verifier", task_run_name="verifier · {recipe.verifier.model}", persist_result=False)
def pin_verifier(recipe: Recipe) -> PinnedVerifier:
    """Resolve and identify the verifier; check taps, mask token and prompt files against it."""
    prompt_files([*recipe.generation.prompts, *recipe.evaluation.prompts])
    pinned = pin(recipe.verifier)
    taps = tap_layers(pinned.num_layers, recipe.extraction.num_taps, recipe.extraction.target_layer_ids)
    check_mask_token(recipe.training, pinned)
    log.info("verifier %s: %d layers, taps %s, hidden size %d", pinned, pinned.num_layers, taps, pinned.hidden_size)
    return pinned
