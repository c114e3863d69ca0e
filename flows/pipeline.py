"""The pipeline: prompts in, a drafter and its measured acceptance length out."""

from datetime import date

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact

from dflash.config import (
    EvaluationConfig,
    ExtractionConfig,
    GenerationConfig,
    Recipe,
    SourceConfig,
    Step,
    TokenizationConfig,
    TrainingConfig,
    VerifierConfig,
)
from dflash.hidden.planning import missing
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from flows.runners import CallAll, one_after_another, runner_of
from flows.steps import CURRENT, RunRecord, Steps
from flows.watch import begin, end
from tasks.evaluation import evaluation as evaluation_task
from tasks.evaluation import verdict as verdict_task
from tasks.extraction import extract_shard, plan_extraction, probe_extraction, seal_extraction
from tasks.generation import collect_prompts, generate_chunk, plan_generation, seal_generation
from tasks.tokenization import tokenization as tokenization_task
from tasks.training import training as training_task
from tasks.verifier import pin_verifier


def run_name() -> str:
    """`pipeline · qwen3-8b-ddtree · g10 · 2026-11-30`"""
    given = runtime.flow_run.parameters
    training = TrainingConfig.model_validate(given["training"])
    weights = f"g{training.gamma:g}" if training.slot_weights == "decay" else training.slot_weights
    return f"pipeline · {given['recipe']} · {weights} · {date.today()}"


def hidden_states(
    steps: Steps,
    verifier: PinnedVerifier,
    *,
    generation: GenerationConfig,
    tokenization: TokenizationConfig,
    extraction: ExtractionConfig,
    contaminants: list[SourceConfig],
    make_shards: CallAll,
    names: tuple[Step, Step, Step],
) -> Artifact:
    """Prompts to hidden states: the same three stages for the training prompts and for the evaluation set."""
    generate, tokenize, extraction_step = names
    prompts = steps.run(generate, collect_prompts, generation, contaminants)
    with steps.watch(generate):
        chunk_plans = plan_generation(generation, prompts, verifier, step=generate)
    chunks = steps.run_all(generate, generate_chunk, [(plan, generation, prompts, verifier) for plan in chunk_plans])
    conversations = steps.run(generate, seal_generation, generation, prompts, verifier, chunks)
    corpus = steps.run(tokenize, tokenization_task, tokenization, conversations, verifier)
    return extract(steps, extraction, corpus, verifier, make_shards=make_shards, step=extraction_step)


def extract(
    steps: Steps,
    extraction: ExtractionConfig,
    corpus: Artifact,
    verifier: PinnedVerifier,
    *,
    make_shards: CallAll,
    step: Step = "extraction",
) -> Artifact:
    """A corpus to hidden states: what is missing is estimated, then made, perhaps on a cluster."""
    with steps.watch(step):
        plans = plan_extraction(extraction, corpus, verifier, step=step)
    to_make = plans if step in steps.refresh else missing(plans)
    shards = steps.run_all(
        step,
        extract_shard,
        [(plan, extraction, corpus, verifier) for plan in plans],
        call_all=make_shards if to_make else one_after_another,  # no cluster is started to find all done
        first=(probe_extraction, (to_make, extraction, corpus, verifier)) if to_make else None,
    )
    return steps.run(step, seal_extraction, extraction, corpus, verifier, shards)


@flow(name="pipeline", flow_run_name=run_name, on_running=[begin], on_completion=[end], on_failure=[end])
def pipeline(
    *,
    recipe: str = "custom",
    verifier: VerifierConfig,
    generation: GenerationConfig,
    tokenization: TokenizationConfig = TokenizationConfig(),  # noqa: B008 - frozen
    extraction: ExtractionConfig = ExtractionConfig(),  # noqa: B008 - frozen
    training: TrainingConfig,
    evaluation: EvaluationConfig,
    refresh: list[Step] = [],  # noqa: B006 - Prefect reads the default, nobody changes it
) -> RunRecord:
    """From prompts to a drafter and its acceptance length. Every stage is cached; a rerun does only what is missing.

    Args:
        recipe: A name for people; it appears in the run's name.
        verifier: The large frozen model that the drafter is for.
        generation: How the verifier answers the training prompts.
        tokenization: Rows, split and length buckets.
        extraction: Which hidden states are stored, and how.
        training: The drafter and how it is trained.
        evaluation: The evaluation prompts and the tree budgets.
        refresh: Stages to run again although their results exist.
    """
    settings = Recipe(
        verifier=verifier,
        generation=generation,
        tokenization=tokenization,
        extraction=extraction,
        training=training,
        evaluation=evaluation,
    )
    record = CURRENT.get() or RunRecord(recipe=recipe)
    record.flow_run_id = runtime.flow_run.id
    steps = Steps(record, refresh=refresh)

    make_shards = runner_of(extraction, verifier)
    pinned = pin_verifier(settings)
    training_states = hidden_states(
        steps,
        pinned,
        generation=generation,
        tokenization=tokenization,
        extraction=extraction,
        contaminants=evaluation.prompts,
        make_shards=make_shards,
        names=("generation", "tokenization", "extraction"),
    )
    evaluation_states = hidden_states(
        steps,
        pinned,
        generation=settings.evaluation_generation(),
        tokenization=settings.evaluation_tokenization(),
        extraction=extraction,
        contaminants=[],
        make_shards=make_shards,
        names=("evaluation-generation", "evaluation-tokenization", "evaluation-extraction"),
    )
    drafter = steps.run("training", training_task, training, training_states, pinned)
    report = steps.run("evaluation", evaluation_task, evaluation, drafter, evaluation_states, pinned)
    with steps.watch("evaluation"):
        judged = verdict_task(evaluation, drafter, report, evaluation_states, pinned, tree_budget=training.tree_budget)

    record.report = str(report.path / "report.md")
    record.drafter = str(drafter.path)
    record.acceptance_length = report.summary["acceptance_length"]
    record.verdict, record.champion = judged["verdict"], judged["champion"]
    stages = "\n".join(f"| {s.stage} | {s.state} | {s.seconds:.1f} s | `{s.fingerprint}` |" for s in record.stages)
    create_markdown_artifact(
        f"{(report.path / 'report.md').read_text()}\n\n"
        f"## Steps\n\n| step | state | time | key |\n|---|---|--:|---|\n{stages}\n\n"
        f"Drafter: `{record.drafter}`, {judged['verdict']}: {judged['reason']}\n",
        key="pipeline-result",
        description="Acceptance length, and which steps ran",
    )
    return record
