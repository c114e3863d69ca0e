"""Drafters that are there already: those that a recipe has made, and any other by its name. Trains none."""

from pathlib import Path
from typing import Any

from dflash import keys
from dflash.config import Recipe
from dflash.lineage import Lineage, lineage
from dflash.manifests import MANIFEST, Artifact, Key, Manifest, home, load_manifest, verify
from dflash.pinning import PinnedVerifier


def drafter_of(recipe: Recipe, verifier: PinnedVerifier, *, name: str = "") -> Artifact:
    """The drafter of that name, else the newest one that the recipe has made.

    A name is a drafter's folder under the data root, its key, or the beginning of that; a folder that others made is
    imported. Raises ValueError where there is none, or it is for another verifier, and Damaged where it is not whole.
    """
    found = _named(name, verifier) if name else _newest(recipe, verifier)
    verify(found)
    return found.artifact()


def made_by(recipe: Recipe) -> list[Manifest]:
    """The drafters that the recipe has made, for whatever verifier stood behind its name then; newest first."""
    made = lineage()
    mine = [manifest for manifest in made.manifests if manifest.stage == "training" and _is_of(recipe, manifest, made)]
    return sorted(mine, key=lambda one: one.created, reverse=True)


def _named(name: str, verifier: PinnedVerifier) -> Manifest:
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file() and not (folder / MANIFEST).exists():
        from dflash.export.importing import import_drafter  # loads torch, which those made here do without

        return load_manifest(import_drafter(folder, verifier, block_size=0).path)
    return lineage().drafter(name)


def _newest(recipe: Recipe, verifier: PinnedVerifier) -> Manifest:
    mine = made_by(recipe)
    for drafter in mine:
        if drafter.summary["verifier"]["identity"] == verifier.identity:
            return drafter
    if mine:
        former = mine[0].summary["verifier"]
        raise ValueError(
            f"the recipe's drafters are of another verifier ({former['name']}, {former['identity'][:8]}), not of "
            f"{verifier}; run its pipeline"
        )
    raise ValueError(f"no drafter with these settings under {home()}; run the recipe's pipeline, or name a drafter")


def _is_of(recipe: Recipe, drafter: Manifest, made: Lineage) -> bool:
    """Whether it and all that it was made from, as far as that is still here, has the recipe's settings.

    What the prompt files hold may have changed: a recipe with this week's prompts is the same recipe.
    """
    wanted = _settings(recipe)
    for equal in made.ancestry([drafter]):
        same = [one for one in equal if one.config == wanted[one.stage]]
        if equal[0].stage == "prompts":
            names = _source_names(keys.prompts_key(recipe.generation))
            same = [one for one in same if names & _source_names(one)]
        if not same:
            return False
    return True


def _source_names(prompts: Key | Manifest) -> set[str]:
    """Of the files and data sets that prompts are collected from, whatever these hold."""
    listed = [text.split(",") for name, text in prompts.inputs.items() if name.startswith("prompts[")]
    return {one.rpartition(":")[0] for names in listed for one in names}


def _settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The part of each stage's key that is settings, by stage."""
    unknown = Artifact(stage="", key="", identity="", location="")
    return {
        "training": keys.training_key(recipe.training, unknown).config,
        "extraction": recipe.extraction.identity(),
        "tokenization": recipe.tokenization.identity(),
        "generation": keys.answering(recipe.generation),
        "prompts": keys.selection(recipe.generation),
    }
