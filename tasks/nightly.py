"""Tasks: the history of a verifier's evaluations, on the run's page and in W&B; and whether a drafter has drifted."""

import dataclasses
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact

from dflash.config import TrainingConfig
from dflash.manifests import Artifact
from tasks.stage import svg_image


@task(name="history", task_run_name="history", persist_result=False)
def show_history(report: Artifact, *, recipe: str, training: TrainingConfig) -> None:
    """The plot of all evaluations that stand beside the report; those that are new are logged to W&B as training is."""
    from dflash import nightly  # loads matplotlib and W&B

    create_markdown_artifact(
        svg_image("history", nightly.history_svg(report.path)),
        key="nightly-history",
        description="Acceptance length of the verifier's drafters, by the time of their evaluation",
    )
    nightly.track(report.path, recipe=recipe, mode=training.tracking, project=training.project)


@task(name="drift", task_run_name="drift", persist_result=False)
def drift(
    known: Artifact, new: Artifact, *, tree_budget: int, largest_drop: float, minimum_conversations: int
) -> dict[str, Any]:
    """Whether retraining is due, from a drafter's reports on its evaluation set and on new prompts."""
    from dflash.decoding import drift as library
    from dflash.decoding.judging import method_of
    from dflash.decoding.verdict import load_evaluated

    one, other = (load_evaluated(report.path).report for report in (known, new))
    method = method_of(one["methods"], tree_budget=tree_budget)
    found = library.drift(
        one, other, method=method, largest_drop=largest_drop, minimum_conversations=minimum_conversations
    )
    create_markdown_artifact(
        f"Retraining is **{found.retraining}**.\n\n{found.method}: {found.reason}\n",
        key="drift",
        description="New prompts against the evaluation set",
    )
    return dataclasses.asdict(found)
