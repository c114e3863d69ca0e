"""The parts of the pipeline, wired once: each flow calls those that it needs. Nothing is computed here."""

import inspect
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, ParamSpec, TypeVar

from prefect import runtime
from prefect.artifacts import create_markdown_artifact

from dflash.config import (
    ExtractionConfig,
    GenerationConfig,
    Recipe,
    SourceConfig,
    Step,
    TokenizationConfig,
    TrainingConfig,
)
from dflash.hidden.planning import missing
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from flows.recipes import TRAINING
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

P = ParamSpec("P")
R = TypeVar("R")

ARGUMENTS = """
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


def for_recipes(function: Callable[P, R]) -> Callable[P, R]:
    """Describes the parameters that every flow has, below `@flow`; forms show it. A flow's own may follow them."""
    text, _, own = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    function.__doc__ = f"{text}\n{ARGUMENTS}{own}"
    return function


def run_name() -> str:
    """`pipeline · qwen3-8b-ddtree · g10 · 2026-11-30`"""
    given = runtime.flow_run.parameters
    training = TrainingConfig.model_validate(given["training"])
    weights = f"g{training.gamma:g}" if training.slot_weights == "decay" else training.slot_weights
    return f"{runtime.flow_run.flow_name} · {given['recipe']} · {weights} · {date.today()}"


NOTED: dict[str, Any] = {
    "flow_run_name": run_name,
    "on_running": [begin],
    "on_completion": [end],
    "on_failure": [end],
}
"""What every flow is made with, beside its name."""


class Parts:
    """A run of a recipe: its verifier, pinned and checked, and the parts that a flow can ask for, in order."""

    def __init__(
        self, settings: Recipe, *, recipe: str, refresh: Sequence[Step] = (), record: RunRecord | None = None
    ) -> None:
        """`record`: where the steps are remembered, if not in that of whoever waits for the run."""
        self.settings = settings
        self.record = record or CURRENT.get() or RunRecord(recipe=recipe)
        self.record.flow_run_id = runtime.flow_run.id
        self.steps = Steps(self.record, refresh=refresh)
        self.make_shards = runner_of(settings.extraction, settings.verifier)
        self.verifier = pin_verifier(settings, trains=runtime.flow_run.flow_name in TRAINING)

    def training_states(self) -> Artifact:
        """From the training prompts to their hidden states."""
        return self._hidden_states(
            self.settings.generation,
            self.settings.tokenization,
            contaminants=self.settings.evaluation.prompts,
            names=("generation", "tokenization", "extraction"),
        )

    def evaluation_states(self) -> Artifact:
        """From the evaluation prompts to their hidden states."""
        return self._hidden_states(
            self.settings.evaluation_generation(),
            self.settings.evaluation_tokenization(),
            contaminants=[],
            names=("evaluation-generation", "evaluation-tokenization", "evaluation-extraction"),
        )

    def drafter(self, training_states: Artifact) -> Artifact:
        """The drafter, trained."""
        drafter: Artifact = self.steps.run(
            "training", training_task, self.settings.training, training_states, self.verifier
        )
        self.record.drafter = str(drafter.path)
        return drafter

    def report(self, drafter: Artifact, evaluation_states: Artifact) -> Artifact:
        """The drafter's report."""
        report: Artifact = self.steps.run(
            "evaluation", evaluation_task, self.settings.evaluation, drafter, evaluation_states, self.verifier
        )
        self.record.report = str(report.path / "report.md")
        self.record.drafter = str(drafter.path)
        self.record.acceptance_length = report.summary["acceptance_length"]
        return report

    def verdict(self, drafter: Artifact, report: Artifact, evaluation_states: Artifact) -> None:
        """The verdict on the drafter, put into the record and with the report on the run's page."""
        with self.steps.watch("evaluation"):
            judged = verdict_task(
                self.settings.evaluation,
                drafter,
                report,
                evaluation_states,
                self.verifier,
                tree_budget=self.settings.training.tree_budget,
            )
        self.record.verdict, self.record.reason = judged["verdict"], judged["reason"]
        self.record.champion = judged["champion"]
        self.show(
            f"Verdict: **{judged['verdict']}**, {judged['reason']}. Drafter: `{drafter.key}`",
            report=(report.path / "report.md").read_text(),
        )

    def show(self, made: str, *, report: str = "") -> None:
        """A page that says what was made, and which steps ran."""
        rows = "\n".join(
            f"| {s.stage} | {s.state} | {s.seconds:.1f} s | `{s.fingerprint}` |" for s in self.record.stages
        )
        create_markdown_artifact(
            f"{made}\n\n{report}\n\n## Steps\n\n| step | state | time | key |\n|---|---|--:|---|\n{rows}\n",
            key=f"{runtime.flow_run.flow_name}-result",
            description="What came out, and which steps ran",
        )

    def _hidden_states(
        self,
        generation: GenerationConfig,
        tokenization: TokenizationConfig,
        *,
        contaminants: list[SourceConfig],
        names: tuple[Step, Step, Step],
    ) -> Artifact:
        """Prompts to hidden states: the same three stages for the training prompts and for the evaluation set."""
        steps, verifier = self.steps, self.verifier
        generate, tokenize, extraction_step = names
        prompts = steps.run(generate, collect_prompts, generation, contaminants)
        with steps.watch(generate):
            chunk_plans = plan_generation(generation, prompts, verifier, step=generate)
        chunks = steps.run_all(
            generate, generate_chunk, [(plan, generation, prompts, verifier) for plan in chunk_plans]
        )
        conversations = steps.run(generate, seal_generation, generation, prompts, verifier, chunks)
        corpus = steps.run(tokenize, tokenization_task, tokenization, conversations, verifier)
        return extract(
            steps, self.settings.extraction, corpus, verifier, make_shards=self.make_shards, step=extraction_step
        )


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
