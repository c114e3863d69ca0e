"""The pipeline, prompts in, a drafter and its measured acceptance length out; and flows that are a part of it.

All take a whole recipe, so that what the parts make is the same as what the pipeline makes, and is found by it.
"""

from prefect import flow

from dflash.config import (
    EvaluationConfig,
    ExtractionConfig,
    GenerationConfig,
    Recipe,
    Step,
    TokenizationConfig,
    TrainingConfig,
    VerifierConfig,
)
from dflash.drafters import drafter_of
from flows.parts import NOTED, Parts, for_recipes
from flows.steps import RunRecord


@flow(name="pipeline", **NOTED)
@for_recipes
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
    """From prompts to a drafter and its acceptance length. Every stage is cached; a rerun does only what is missing."""
    settings = Recipe(
        verifier=verifier,
        generation=generation,
        tokenization=tokenization,
        extraction=extraction,
        training=training,
        evaluation=evaluation,
    )
    parts = Parts(settings, recipe=recipe, refresh=refresh)
    training_states = parts.training_states()
    evaluation_states = parts.evaluation_states()
    drafter = parts.drafter(training_states)
    parts.verdict(drafter, parts.report(drafter, evaluation_states), evaluation_states)
    return parts.record


@flow(name="prepare-data", **NOTED)
@for_recipes
def prepare_data(
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
    """From prompts to the hidden states of the training and the evaluation set: all that needs the verifier."""
    settings = Recipe(
        verifier=verifier,
        generation=generation,
        tokenization=tokenization,
        extraction=extraction,
        training=training,
        evaluation=evaluation,
    )
    parts = Parts(settings, recipe=recipe, refresh=refresh)
    training_states = parts.training_states()
    evaluation_states = parts.evaluation_states()
    parts.show(f"Training: `{training_states.location}`. Evaluation: `{evaluation_states.location}`")
    return parts.record


@flow(name="train-drafter", **NOTED)
@for_recipes
def train_drafter(
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
    """From prompts to a drafter, without a report: states that are there already are used."""
    settings = Recipe(
        verifier=verifier,
        generation=generation,
        tokenization=tokenization,
        extraction=extraction,
        training=training,
        evaluation=evaluation,
    )
    parts = Parts(settings, recipe=recipe, refresh=refresh)
    drafter = parts.drafter(parts.training_states())
    parts.show(f"Drafter: `{drafter.location}`")
    return parts.record


@flow(name="evaluate", **NOTED)
@for_recipes
def evaluate(
    *,
    recipe: str = "custom",
    verifier: VerifierConfig,
    generation: GenerationConfig,
    tokenization: TokenizationConfig = TokenizationConfig(),  # noqa: B008 - frozen
    extraction: ExtractionConfig = ExtractionConfig(),  # noqa: B008 - frozen
    training: TrainingConfig,
    evaluation: EvaluationConfig,
    refresh: list[Step] = [],  # noqa: B006 - Prefect reads the default, nobody changes it
    drafter: str = "",
) -> RunRecord:
    """The report of a drafter that is there, and the verdict on it. Trains nothing.

    Args:
        drafter: Its folder, or its key as dflash ls shows it (the beginning is enough); empty: the recipe's newest one.
    """
    settings = Recipe(
        verifier=verifier,
        generation=generation,
        tokenization=tokenization,
        extraction=extraction,
        training=training,
        evaluation=evaluation,
    )
    parts = Parts(settings, recipe=recipe, refresh=refresh)
    found = drafter_of(settings, parts.verifier, name=drafter)
    evaluation_states = parts.evaluation_states()
    parts.verdict(found, parts.report(found, evaluation_states), evaluation_states)
    return parts.record
