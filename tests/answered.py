"""The three parts of the generation stage in a row, as the pipeline runs them."""

from dflash.config import GenerationConfig
from dflash.corpus.chunks import plan_chunks
from dflash.corpus.collection import collect
from dflash.corpus.generation import generate_chunk, seal
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier


def answered(config: GenerationConfig, verifier: PinnedVerifier) -> tuple[Artifact, Artifact]:
    """The collected prompts, and the conversations with the verifier's answers."""
    prompts = collect(config)
    chunks = [generate_chunk(plan, config, prompts, verifier) for plan in plan_chunks(config, prompts, verifier)]
    return prompts, seal(chunks, config, prompts, verifier)
