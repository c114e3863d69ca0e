"""What a plan says of steps that are not cached."""

import shutil
from pathlib import Path

import pytest

from dflash.bundled import resolve
from dflash.corpus.collection import collect
from dflash.plan import PlannedStep, plan
from flows.recipes import load_recipe

pytestmark = pytest.mark.usefixtures("home")
RECIPE = load_recipe("demo", ["generation.max_prompts=4", "evaluation.max_prompts=4"])


def planned(*changes: str) -> dict[str, PlannedStep]:
    settings = ["generation.max_prompts=4", "evaluation.max_prompts=4", *changes]
    return {step.stage: step for step in plan(load_recipe("demo", settings))}


def test_the_evaluation_set_is_not_compared_with_the_training_prompts() -> None:
    collect(RECIPE.generation, RECIPE.evaluation.prompts)
    steps = planned()
    assert steps["evaluation-generation"].reason == steps["generation"].reason == "never made"
    assert planned("generation.max_prompts=5")["generation"].reason == "max_prompts 4 -> 5"


def test_a_damaged_artifact_says_what_depends_on_how_it_comes_out_again() -> None:
    prompts = collect(RECIPE.generation, RECIPE.evaluation.prompts)
    [file] = (prompts.path / "prompts").iterdir()
    file.unlink()
    reason = planned()["generation"].reason
    assert reason.startswith(f"{file}: missing")
    assert reason.endswith("what comes after runs only if it comes out otherwise")


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    bare = shutil.copytree(resolve("bundled:demo-verifier"), tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"bare has no chat template; .* verifier.template"):
        planned(f"verifier.model={bare}")
