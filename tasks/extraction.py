"""Tasks: plan the shards, time a batch, extract each shard, seal the whole."""

import logging

from prefect import task
from prefect.artifacts import create_markdown_artifact

from dflash.config import ExtractionConfig, Step
from dflash.hidden.planning import GB, ShardPlan, check_space, estimate, longest_first, plan_shards
from dflash.keys import extraction_key
from dflash.manifests import Artifact, Key
from dflash.pinning import PinnedVerifier
from tasks.stage import GPU, find_or_make, show, stage

log = logging.getLogger("dflash.tasks")


def shard_key(plan: ShardPlan) -> Key:
    return plan.key


@task(name="extraction-plan", task_run_name="{step} · plan", persist_result=False)
def plan_extraction(
    config: ExtractionConfig,
    corpus: Artifact,
    verifier: PinnedVerifier,
    step: Step = "extraction",  # noqa: ARG001 - for the run's name
) -> list[ShardPlan]:
    """Which rows go into which shard, in the order of making; refuses when the missing ones do not fit on the disk."""
    plans = plan_shards(config, corpus, verifier)
    check_space(config, plans, verifier)
    return plans if config.runner == "inline" else longest_first(plans)


@task(name="extraction-probe", task_run_name="{step} · estimate", tags=[GPU], persist_result=False)
def probe_extraction(
    plans: list[ShardPlan],
    config: ExtractionConfig,
    corpus: Artifact,
    verifier: PinnedVerifier,
    step: Step = "extraction",
) -> float:
    """About how many seconds these shards take one worker, from a timed batch where they will be made."""
    from dflash.hidden.probing import seconds_per_token

    tokens = sum(plan.tokens for plan in plans)
    seconds = tokens * seconds_per_token(plans, config, corpus, verifier)
    nbytes = estimate(config, tokens, verifier)
    log.info("to extract: %d shards, %d tokens, %.3f GB, about %.0f s", len(plans), tokens, nbytes / GB, seconds)
    create_markdown_artifact(
        f"| {step} | to make |\n|---|--:|\n| shards | {len(plans)} |\n| tokens | {tokens:,} |\n"
        f"| bytes | {nbytes:,} |\n| seconds of one worker, about | {seconds:,.0f} |\n",
        key=f"{step}-plan",
        description=f"{step}: what will be made, and about how long it takes",
    )
    return seconds


@stage(shard_key, name="extraction-shard", hours=12, run_name="{step} · shard {plan.name}", tags=[GPU])
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
    in_order = sorted(shards, key=lambda shard: shard.location)
    artifact = find_or_make(
        step, key, lambda progress: library.seal(in_order, config, corpus, verifier, progress=progress)
    )
    show(step, artifact)
    return artifact
