"""Tasks: collect the prompts, have the verifier answer them chunk by chunk, and put the answers together."""

from prefect import task

from dflash.config import GenerationConfig, SourceConfig, Step
from dflash.corpus.chunks import ChunkPlan, plan_chunks
from dflash.corpus.collection import collect
from dflash.keys import generation_key, prompts_key
from dflash.manifests import Artifact, Key
from dflash.pinning import PinnedVerifier
from tasks.stage import GPU, find_or_make, refreshing, show, stage


@stage(prompts_key, name="prompts", hours=24, run_name="{step} · prompts")
def collect_prompts(config: GenerationConfig, contaminants: list[SourceConfig], step: Step = "generation") -> Artifact:
    """The conversations of all sources: recognised, deduplicated, decontaminated; every row kept or counted."""
    key = prompts_key(config, contaminants)
    artifact = find_or_make(f"{step}-prompts", key, lambda progress: collect(config, contaminants, progress=progress))
    show(step, artifact, part="prompts")
    return artifact


@task(name="generation-plan", task_run_name="{step} · plan", persist_result=False)
def plan_generation(
    config: GenerationConfig,
    prompts: Artifact,
    verifier: PinnedVerifier,
    step: Step = "generation",  # noqa: ARG001 - for the run's name
) -> list[ChunkPlan]:
    """Which conversations go into which chunk."""
    return plan_chunks(config, prompts, verifier)


def chunk_key(plan: ChunkPlan) -> Key:
    return plan.key


@stage(chunk_key, name="generation-chunk", hours=72, run_name="{step} · chunk {plan.name}", tags=[GPU])
def generate_chunk(
    plan: ChunkPlan, config: GenerationConfig, prompts: Artifact, verifier: PinnedVerifier, step: Step = "generation"
) -> Artifact:
    """The verifier's answers to one chunk of conversations; served token ids are kept."""
    from dflash.corpus import generation as library  # loads torch: only when something is made

    return find_or_make(
        f"{step}-chunk-{plan.number:03d}",
        plan.key,
        lambda progress: library.generate_chunk(plan, config, prompts, verifier, fresh=refreshing(), progress=progress),
        location=plan.location,
    )


@stage(generation_key, name="generation", hours=12, run_name="{step} · seal")
def seal_generation(
    config: GenerationConfig,
    prompts: Artifact,
    verifier: PinnedVerifier,
    chunks: list[Artifact],
    step: Step = "generation",
) -> Artifact:
    """Prompts and answers as one artifact."""
    from dflash.corpus import generation as library

    key = generation_key(config, prompts, verifier)
    artifact = find_or_make(
        step, key, lambda progress: library.seal(chunks, config, prompts, verifier, progress=progress)
    )
    show(step, artifact)
    return artifact
