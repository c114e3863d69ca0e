"""Task: train the drafter, in a process of its own."""

from dflash.config import Step, TrainingConfig
from dflash.keys import training_key
from dflash.manifests import Artifact
from dflash.training.launch import launch
from tasks.stage import find_or_make, show, stage


@stage(training_key, name="training", hours=24 * 21)
def training(config: TrainingConfig, hidden_states: Artifact, step: Step = "training") -> Artifact:
    """The drafter. A subprocess, so that running out of memory or being killed never takes the worker along.

    Call it directly, not with submit(): only the main thread hears of a cancellation and can have a checkpoint saved.
    """
    key = training_key(config, hidden_states)
    artifact = find_or_make(step, key, lambda progress: launch(config, hidden_states, progress=progress))
    show(step, artifact)
    return artifact
