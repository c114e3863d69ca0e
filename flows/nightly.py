"""Every night: how the newest drafter does against the champion, and on new prompts. Trains nothing by itself."""

from typing import Any

from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed, State

from dflash.config import (
    EvaluationConfig,
    ExtractionConfig,
    GenerationConfig,
    NightlyConfig,
    Recipe,
    Step,
    TokenizationConfig,
    TrainingConfig,
    VerifierConfig,
)
from dflash.drafters import drafter_of, made_by
from dflash.manifests import Artifact
from flows.parts import NOTED, Parts, for_recipes
from flows.steps import CURRENT, RunRecord
from tasks.nightly import drift as drift_task
from tasks.nightly import show_history

WORSE_EVENT = "dflash.evaluation.worse"
RETRAINING_EVENT = "dflash.retraining.due"
OUTCOMES = {"worse", "retraining due"}
"""Tags of the runs that end so."""


@flow(name="nightly-evaluation", **NOTED)
@for_recipes
def nightly_evaluation(
    *,
    recipe: str = "custom",
    verifier: VerifierConfig,
    generation: GenerationConfig,
    tokenization: TokenizationConfig = TokenizationConfig(),  # noqa: B008 - frozen
    extraction: ExtractionConfig = ExtractionConfig(),  # noqa: B008 - frozen
    training: TrainingConfig,
    evaluation: EvaluationConfig,
    refresh: list[Step] = [],  # noqa: B006 - Prefect reads the default, nobody changes it
    nightly: NightlyConfig = NightlyConfig(),  # noqa: B008 - frozen
) -> State[RunRecord]:
    """The newest drafter's report, the verdict against the champion, and whether new prompts ask for a new drafter.

    Ends as "Worse" or "Retraining due" where one of them is; without a drafter, or with nothing new, at once.

    Args:
        nightly: Which drafters, on which new prompts, and whether training may be started.
    """
    settings = Recipe(
        verifier=verifier,
        generation=generation,
        tokenization=tokenization,
        extraction=extraction,
        training=training,
        evaluation=evaluation,
    )
    if not nightly.drafters and not made_by(settings):
        record = CURRENT.get() or RunRecord(recipe=recipe)
        record.flow_run_id = runtime.flow_run.id
        return Completed(message="nothing to do: the recipe has no drafter yet", data=record)
    parts = Parts(settings, recipe=recipe, refresh=refresh)
    record = parts.record
    drafters = [drafter_of(settings, parts.verifier, name=name) for name in nightly.drafters or [""]]
    evaluation_states = parts.evaluation_states()
    worse, due = [], []
    for drafter in drafters:
        report = parts.report(drafter, evaluation_states)
        parts.verdict(drafter, report, evaluation_states)
        new = any(step.state == "ran" for step in record.stages)
        show_history(report, recipe=recipe, training=training)
        if record.verdict == "worse":
            worse.append(f"{drafter.key} is worse than the champion {record.champion}: {record.reason}")
            _emit(WORSE_EVENT, drafter, report, recipe=recipe, reason=record.reason, champion=record.champion)
        if nightly.new_prompts:
            asked = settings.on_prompts(nightly.new_prompts, max_prompts=nightly.max_new_prompts)
            found = drift_check(recipe=recipe, settings=asked, drafter=drafter, known=report, nightly=nightly)
            record.retraining = found["retraining"]
            if found["retraining"] == "due":
                due.append(f"retraining is due, {drafter.key}: {found['reason']}")
                _emit(RETRAINING_EVENT, drafter, report, recipe=recipe, reason=found["reason"])
    if worse or due:
        started = [_start_pipeline(settings, recipe)] if nightly.retrain else []
        name = "Worse" if worse else "Retraining due"
        _tag(name.lower())
        return Completed(name=name, message="; ".join([*worse, *due, *started]), data=record)
    return Completed(message=f"{'' if new else 'nothing new; '}{record.verdict}: {record.reason}", data=record)


@flow(name="drift-check", flow_run_name="drift-check · {recipe}", persist_result=False)
def drift_check(
    *, recipe: str, settings: Recipe, drafter: Artifact, known: Artifact, nightly: NightlyConfig
) -> dict[str, Any]:
    """Whether a drafter does worse on the evaluation prompts of these settings than in the report that is known."""
    parts = Parts(settings, recipe=recipe, record=RunRecord(recipe=recipe))
    new = parts.report(drafter, parts.evaluation_states())
    return drift_task(
        known,
        new,
        tree_budget=settings.training.tree_budget,
        largest_drop=nightly.largest_drop,
        minimum_conversations=settings.evaluation.minimum_conversations,
    )


def _tag(tag: str) -> None:
    """The run, so that filters find it: by the type of its state it is as completed as any other."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(runtime.flow_run.id)
        client.update_flow_run(run.id, tags=[*({*run.tags} - OUTCOMES), tag])  # one that is retried may end otherwise


def _emit(event: str, drafter: Artifact, report: Artifact, **facts: Any) -> None:
    resource = {"prefect.resource.id": f"dflash.drafter.{drafter.key}", "prefect.resource.name": drafter.key}
    emit_event(event, resource=resource, payload={"drafter": drafter.key, "report": report.key, **facts})


def _start_pipeline(settings: Recipe, recipe: str) -> str:
    """Starts it where a worker takes it, and says so. Raises ValueError where it is not registered."""
    try:
        run = run_deployment(
            f"pipeline/{recipe}",
            parameters=settings.model_dump(mode="json") | {"recipe": recipe},
            timeout=0,
            as_subflow=False,
        )
        assert isinstance(run, FlowRun)  # not a coroutine: flows are synchronous
    except ObjectNotFound:
        raise ValueError(
            f"nightly.retrain: pipeline/{recipe} is not registered with this server; dflash up registers it"
        ) from None
    return f"started {run.name}"
