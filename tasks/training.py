"""Task: train the drafter, in processes of its own."""

from prefect import runtime

from dflash.config import Step, TrainingConfig
from dflash.keys import training_key
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from dflash.training.launch import launch
from tasks.stage import GPU, find_or_make, plots_of, show, stage


@stage(training_key, name="training", hours=24 * 21, tags=[GPU])
def training(
    config: TrainingConfig, hidden_states: Artifact, verifier: PinnedVerifier, step: Step = "training"
) -> Artifact:
    """The drafter. A subprocess, so that running out of memory or being killed never takes the worker along.

    Call it directly, not with submit(): only the main thread hears of a cancellation and can have a checkpoint saved.
    """
    key = training_key(config, hidden_states)
    group = f"{runtime.flow_run.name} ({runtime.flow_run.id[:8]})" if runtime.flow_run.id else ""
    artifact = find_or_make(
        step,
        key,
        lambda progress: launch(config, hidden_states, verifier=verifier, group=group, progress=progress),
    )
    show(step, artifact)
    if curves := plots_of(artifact):
        show(step, artifact, curves, part="curves")
    return artifact
