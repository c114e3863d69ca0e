"""Task: conversations to token ids, supervised mask, split and bucket."""

from dflash.config import Step, TokenizationConfig
from dflash.keys import tokenization_key
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from tasks.stage import find_or_make, show, stage


@stage(tokenization_key, name="tokenization", hours=12)
def tokenization(
    config: TokenizationConfig, conversations: Artifact, verifier: PinnedVerifier, step: Step = "tokenization"
) -> Artifact:
    """The corpus: one Parquet file of token ids and supervised masks."""
    from dflash.corpus.tokenization import tokenize

    key = tokenization_key(config, conversations, verifier)
    artifact = find_or_make(step, key, lambda progress: tokenize(config, conversations, verifier, progress=progress))
    show(step, artifact)
    return artifact
