"""Tasks: plan the shards, extract each of them, seal the whole."""

from prefect import task

from dflash.config import ExtractionConfig, Step
from dflash.hidden.planning import ShardPlan, check_space, plan_shards
from dflash.keys import extraction_key
from dflash.manifests import Artifact, Key
from dflash.pinning import PinnedVerifier
from tasks.stage import find_or_make, show, stage


def shard_key(plan: ShardPlan) -> Key:
    return plan.key


@task(name="extraction-plan", task_run_name="{step} · plan", persist_result=False)
def plan_extraction(
    config: ExtractionConfig,
    corpus: Artifact,
    verifier: PinnedVerifier,
    step: Step = "extraction",  # noqa: ARG001 - for the run's name
) -> list[ShardPlan]:
    """Which rows go into which shard; refuses when the missing shards do not fit on the disk."""
    plans = plan_shards(config, corpus, verifier)
    check_space(config, plans, verifier)
    return plans


@stage(shard_key, name="extraction-shard", hours=12, run_name="{step} · shard {plan.name}")
def extract_shard(
    plan: ShardPlan, config: ExtractionConfig, corpus: Artifact, verifier: PinnedVerifier, step: Step = "extraction"
) -> Artifact:
    """Hidden states of one shard's rows."""
    from dflash.hidden import extraction as library

    return find_or_make(
        f"{step}-shard-{plan.number:04d}",
        plan.key,
        lambda progress: library.extract_shard(plan, config, corpus, verifier, progress=progress),
        location=plan.location,
    )


@stage(extraction_key, name="extraction", hours=12, run_name="{step} · seal")
def seal_extraction(
    config: ExtractionConfig,
    corpus: Artifact,
    verifier: PinnedVerifier,
    shards: list[Artifact],
    step: Step = "extraction",
) -> Artifact:
    """The hidden states as one artifact: index, frozen verifier weights, and the shards."""
    from dflash.hidden import extraction as library

    key = extraction_key(config, corpus, verifier)
    artifact = find_or_make(
        step, key, lambda progress: library.seal(shards, config, corpus, verifier, progress=progress)
    )
    show(step, artifact)
    return artifact
