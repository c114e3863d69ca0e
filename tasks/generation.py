"""Task: the verifier answers the prompts."""

from dflash.config import GenerationConfig, Step
from dflash.keys import generation_key
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from tasks.stage import find_or_make, show, stage


@stage(generation_key, name="generation", hours=72)
def generation(config: GenerationConfig, verifier: PinnedVerifier, step: Step = "generation") -> Artifact:
    """On-policy conversations: prompts answered greedily, served token ids kept."""
    from dflash.corpus.generation import generate  # loads torch: only when something is made

    key = generation_key(config, verifier)
    artifact = find_or_make(step, key, lambda progress: generate(config, verifier, progress=progress))
    show(step, artifact)
    return artifact
