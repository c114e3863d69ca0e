"""The key of each stage: what decides its output, and nothing else. Cheap to compute, so that a plan costs nothing.

Paths, times, hosts, devices and batch sizes are no part of a key. The cache cannot see into the library: bump a stage's
number in RECIPES when its output would change (`tests/test_recipes.py` fails when that was forgotten).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.config import (
    EvaluationConfig,
    ExtractionConfig,
    GenerationConfig,
    SourceConfig,
    TokenizationConfig,
    TrainingConfig,
)
from dflash.inputs import identity_of
from dflash.manifests import Artifact, Key, remembered_sha256, text_sha256
from dflash.pinning import PinnedVerifier, num_tokens

RECIPES = {"prompts": 2, "generation": 2, "tokenization": 2, "extraction": 3, "training": 4, "evaluation": 6}

SELECTION = ("max_prompts", "deduplicate", "decontaminate")
ANSWERING = ("backend", "max_prompt_tokens", "max_new_tokens", "temperature")
SAMPLING = ("top_p", "seed")
REPORTING = ("sets", "budgets", "live_prompts", "parity", "draft_ms", "verify_ms", "temperature")


def prompts_key(config: GenerationConfig, contaminants: Sequence[SourceConfig] = ()) -> Key:
    """`contaminants` are the sources of the evaluation sets. Raises ValueError for a source that is not there."""
    inputs = {f"prompts[{i}]": identity_of(source) for i, source in enumerate(config.prompts)}
    if config.decontaminate:
        inputs |= {f"contaminants[{i}]": identity_of(source) for i, source in enumerate(contaminants)}
    return Key(stage="prompts", recipe=RECIPES["prompts"], config=selection(config), inputs=inputs)


def selection(config: GenerationConfig) -> dict[str, Any]:
    """The settings that decide which prompts are collected, of whatever their sources hold."""
    identity = config.identity()
    sources = [
        {name: value for name, value in source.items() if name in ("category", "limit", "weight", "answers")}
        for source in identity["prompts"]
    ]
    return {name: identity[name] for name in SELECTION} | {"sources": sources}


def answering(config: GenerationConfig) -> dict[str, Any]:
    """The settings that decide what a verifier answers."""
    names = ANSWERING if config.temperature == 0 else ANSWERING + SAMPLING
    return {name: getattr(config, name) for name in names}


def _answered_by(verifier: PinnedVerifier) -> dict[str, str]:
    return {
        "verifier": verifier.identity,
        "verifier.dtype": verifier.dtype,
        "verifier.chat": verifier.tokenizer_identity,
    }


def chunk_key(config: GenerationConfig, ids: Sequence[str], verifier: PinnedVerifier) -> Key:
    """Of the answers to the conversations with these ids, whatever artifact they are part of."""
    return Key(
        stage="generation",
        recipe=RECIPES["generation"],
        config=answering(config) | {"chunk": len(ids)},
        inputs={"conversations": text_sha256("\n".join(ids))} | _answered_by(verifier),
    )


def generation_key(config: GenerationConfig, prompts: Artifact, verifier: PinnedVerifier) -> Key:
    return Key(
        stage="generation",
        recipe=RECIPES["generation"],
        config=answering(config),
        inputs={"prompts": prompts.identity} | _answered_by(verifier),
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
    """A drafter to start from counts by its content. Raises ValueError where it is not there."""
    settings, inputs = config.identity(), {"hidden_states": hidden_states.identity}
    if files := starting_files(config):
        settings["initialisation"] = "drafter"
        inputs |= {f"initialisation.{path.name}": remembered_sha256(path) for path in files}
    return Key(stage="training", recipe=RECIPES["training"], config=settings, inputs=inputs)


def starting_files(config: TrainingConfig) -> list[Path]:
    """config.json and weights of the drafter to start from, if there is one. Raises ValueError where one is missing."""
    if config.initialisation in ("random", "verifier"):
        return []
    files = [Path(config.initialisation).expanduser() / name for name in ("config.json", "model.safetensors")]
    for path in files:
        if not path.is_file():
            raise ValueError(
                f"training.initialisation: no {path}; expected random, verifier or the folder of a drafter"
            )
    return files


def imported_key(settings: dict[str, Any], files: dict[str, str], verifier: PinnedVerifier) -> Key:
    """Of a drafter that was not trained here: its published config.json, its weights and record, and its verifier."""
    inputs = {f"imported.{name}": digest for name, digest in files.items()} | {"verifier": verifier.identity}
    return Key(stage="training", recipe=RECIPES["training"], config=settings, inputs=inputs)


def evaluation_key(
    config: EvaluationConfig, drafter: Artifact, hidden_states: Artifact, verifier: PinnedVerifier
) -> Key:
    names = REPORTING if config.temperature == 0 else (*REPORTING, "seed")
    return Key(
        stage="evaluation",
        recipe=RECIPES["evaluation"],
        # the prompts and their limits are in the evaluation set's own hidden states
        config={name: value for name, value in config.identity().items() if name in names},
        inputs={
            "drafter": drafter.identity,
            "hidden_states": hidden_states.identity,
            "verifier": verifier.identity,
            "verifier.dtype": verifier.dtype,
            "verifier.tokens": str(num_tokens(verifier)),  # rows of a padded head beyond them are never proposed
        },
    )
