"""Tasks: the acceptance length of a drafter, and the verdict on it."""

import dataclasses
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from dflash.config import EvaluationConfig, Step
from dflash.keys import evaluation_key
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from tasks.stage import GPU, find_or_make, plots_of, show, stage


@stage(evaluation_key, name="evaluation", hours=24, tags=[GPU])
def evaluation(
    config: EvaluationConfig,
    drafter: Artifact,
    hidden_states: Artifact,
    verifier: PinnedVerifier,
    step: Step = "evaluation",
) -> Artifact:
    """The report: replay for chain and trees, the parity gate, and a few prompts decoded live."""
    from dflash.decoding.evaluation import evaluate
    from dflash.decoding.tables import records
    from dflash.decoding.verdict import load_evaluated

    key = evaluation_key(config, drafter, hidden_states, verifier)
    artifact = find_or_make(
        step, key, lambda progress: evaluate(config, drafter, hidden_states, verifier, progress=progress)
    )
    show(step, artifact, markdown=(artifact.path / "report.md").read_text())
    create_table_artifact(
        records(load_evaluated(artifact.path).report), key=f"{step}-table", description=f"{step}: acceptance length"
    )
    show(step, artifact, plots_of(artifact), part="plots")
    return artifact


@task(name="verdict", task_run_name="verdict", persist_result=False, tags=[GPU])  # may evaluate the champion
def verdict(
    config: EvaluationConfig,
    drafter: Artifact,
    report: Artifact,
    hidden_states: Artifact,
    verifier: PinnedVerifier,
    *,
    tree_budget: int,
) -> dict[str, Any]:
    """History, verdict against the champion, promotion; an event `dflash.verdict` says what came out."""
    from dflash.decoding.judging import judge, markdown

    judgement = judge(config, drafter, report, hidden_states, verifier, tree_budget=tree_budget)
    facts: dict[str, Any] = dataclasses.asdict(dataclasses.replace(judgement, comparison=None))
    del facts["comparison"]
    emit_event(
        "dflash.verdict",
        resource={"prefect.resource.id": f"dflash.drafter.{drafter.key}", "prefect.resource.name": drafter.key},
        payload=facts | {"drafter": drafter.key, "report": report.key, "verifier": verifier.identity},
    )
    create_markdown_artifact(markdown(judgement), key="verdict", description="Against the verifier's champion")
    return facts
