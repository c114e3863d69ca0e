"""Task: the acceptance length of a drafter."""

from dflash.config import EvaluationConfig, Step
from dflash.keys import evaluation_key
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from tasks.stage import find_or_make, show, stage


@stage(evaluation_key, name="evaluation", hours=24)
def evaluation(
    config: EvaluationConfig,
    drafter: Artifact,
    hidden_states: Artifact,
    verifier: PinnedVerifier,
    step: Step = "evaluation",
) -> Artifact:
    """The report: replay for chain and trees, cross-checked by live decoding."""
    from dflash.decoding.evaluation import evaluate

    key = evaluation_key(config, drafter, hidden_states, verifier)
    artifact = find_or_make(
        step, key, lambda progress: evaluate(config, drafter, hidden_states, verifier, progress=progress)
    )
    show(step, artifact, markdown=(artifact.path / "report.md").read_text())
    return artifact
