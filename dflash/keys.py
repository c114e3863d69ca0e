"""The key of each stage: what decides its output, and nothing else. Cheap to compute, so that a plan costs nothing.

Paths, times, hosts, devices and batch sizes are no part of a key. The cache cannot see into the library: bump a stage's
number in RECIPES when its output would change (`tests/test_recipes.py` fails when that was forgotten).
"""

from collections.abc import Sequence
from pathlib import Path

from dflash.bundled import resolve
from dflash.config import EvaluationConfig, ExtractionConfig, GenerationConfig, TokenizationConfig, TrainingConfig
from dflash.manifests import Artifact, Key, file_sha256
from dflash.pinning import PinnedVerifier

RECIPES = {"generation": 1, "tokenization": 1, "extraction": 1, "training": 1, "evaluation": 1}


def prompt_files(names: Sequence[str]) -> list[tuple[str, str]]:
    """(path, content hash) of each prompt file. Raises ValueError naming a file that is not there."""
    found = []
    for name in names:
        path = resolve(name)
        if not path.is_file():
            raise ValueError(f"{path}: no such prompt file; give a JSONL file or bundled:NAME")
        found.append((str(path), file_sha256(path)))
    return found


def generation_key(config: GenerationConfig, verifier: PinnedVerifier) -> Key:
    files = prompt_files(config.prompts)
    return Key(
        stage="generation",
        recipe=RECIPES["generation"],
        config={name: value for name, value in config.identity().items() if name != "prompts"},
        # the stem, because it is the category of rows that name none
        inputs={f"prompts[{i}]": f"{Path(path).stem}:{digest}" for i, (path, digest) in enumerate(files)}
        | {"verifier": verifier.identity, "verifier.dtype": verifier.dtype},
    )


def tokenization_key(config: TokenizationConfig, conversations: Artifact, verifier: PinnedVerifier) -> Key:
    return Key(
        stage="tokenization",
        recipe=RECIPES["tokenization"],
        config=config.identity(),
        inputs={"conversations": conversations.identity, "tokenizer": verifier.tokenizer_identity},
    )


def extraction_key(config: ExtractionConfig, corpus: Artifact, verifier: PinnedVerifier) -> Key:
    return Key(
        stage="extraction",
        recipe=RECIPES["extraction"],
        config=config.identity(),
        inputs={"corpus": corpus.identity, "verifier": verifier.identity, "verifier.dtype": verifier.dtype},
    )


def training_key(config: TrainingConfig, hidden_states: Artifact) -> Key:
    return Key(
        stage="training",
        recipe=RECIPES["training"],
        config=config.identity(),
        inputs={"hidden_states": hidden_states.identity},
    )


def evaluation_key(
    config: EvaluationConfig, drafter: Artifact, hidden_states: Artifact, verifier: PinnedVerifier
) -> Key:
    return Key(
        stage="evaluation",
        recipe=RECIPES["evaluation"],
        # the prompts and their limits are in the evaluation set's own hidden states
        config={name: config.identity()[name] for name in ("budgets", "live_prompts")},
        inputs={
            "drafter": drafter.identity,
            "hidden_states": hidden_states.identity,
            "verifier": verifier.identity,
            "verifier.dtype": verifier.dtype,
        },
    )
