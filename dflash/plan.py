"""What a run would do: which steps are cached, which would run and why, and about how much they would handle.

Reads manifests and hashes prompt files. A verifier that is not here yet is fetched (or converted) to be identified;
no weights are loaded.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from pydantic import BaseModel

from dflash import keys
from dflash.config import GenerationConfig, Recipe, SourceConfig, Step, TokenizationConfig, TrainingConfig
from dflash.corpus.collection import peek
from dflash.corpus.sources import estimate_rows
from dflash.corpus.templates import check_templates
from dflash.hidden.planning import check_packages, check_quota, check_states, estimate
from dflash.manifests import DAMAGED_MANIFEST, Artifact, Damaged, Key, Manifest, find, home, load_manifest, manifests
from dflash.pinning import (
    PinnedVerifier,
    chat_templates,
    check_abilities,
    check_draft_vocabulary,
    check_lengths,
    check_mask_token,
    pin,
)
from dflash.training.planning import check_drafter

CHARACTERS_PER_TOKEN = 3.5  # of English text; only for estimates made before anything was tokenized


class PlannedStep(BaseModel):
    """One step of a run that has not started. `tokens` and `bytes` are estimates of what it handles and writes."""

    stage: Step
    state: Literal["cached", "would run"]
    reason: str
    fingerprint: str | None = None
    tokens: int | None = None
    bytes: int | None = None


def preflight(recipe: Recipe, *, trains: bool) -> tuple[PinnedVerifier, list[int]]:
    """The pinned verifier and its tap layers; raises ValueError for what would otherwise fail after expensive work.

    `trains`: whether a drafter is to be made, which then has to work out.
    """
    check_packages(recipe.extraction)
    for generation in (recipe.generation, recipe.evaluation_generation()):
        peek(generation)
    for device in (recipe.verifier.device, recipe.training.device):
        if device.startswith("cuda"):
            from dflash.devices import resolve_device  # loads torch: only where there is something to ask it

            resolve_device(device)
    verifier = pin(recipe.verifier)
    check_templates(chat_templates(verifier), verifier.chat.variables)
    check_mask_token(recipe.training.mask_token_id, verifier, place="training.mask_token_id")
    check_draft_vocabulary(recipe.training, verifier)
    for section, limits in (("generation", recipe.generation), ("evaluation", recipe.evaluation_generation())):
        check_lengths(section, limits.max_prompt_tokens, limits.max_new_tokens, verifier)
    check_abilities(recipe.evaluation.live_prompts, verifier)
    taps = check_states(recipe.extraction, verifier)
    if trains:
        check_drafter(recipe.training, verifier, taps)
    return verifier, taps


def plan(recipe: Recipe) -> list[PlannedStep]:
    """The steps of a run of this recipe, in order. Raises ValueError where the recipe cannot work."""
    verifier, taps = preflight(recipe, trains=True)
    known = manifests()
    steps: list[PlannedStep] = []

    def states_of(
        generation: GenerationConfig, names: tuple[Step, Step, Step], tokenization: TokenizationConfig
    ) -> tuple[Artifact | None, int]:
        tokens, text_bytes = _estimate(generation)
        contaminants = recipe.evaluation.prompts if generation.decontaminate else []
        conversations = _generation(
            steps, known, names[0], generation, contaminants, verifier, tokens=tokens, nbytes=text_bytes
        )
        tokens = _tokens(conversations, tokens)
        corpus = _step(
            steps,
            known,
            names[1],
            lambda: keys.tokenization_key(tokenization, _made(conversations), verifier),
            tokens=tokens,
            nbytes=5 * tokens,
            waits_for=None if conversations else names[0],
        )
        tokens = _tokens(corpus, tokens)
        nbytes = estimate(recipe.extraction, tokens, verifier)
        states = _step(
            steps,
            known,
            names[2],
            lambda: keys.extraction_key(recipe.extraction, _made(corpus), verifier),
            tokens=tokens,
            nbytes=nbytes,
            waits_for=None if corpus else names[1],
            stable=True,
        )
        if corpus and steps[-1].state == "would run":  # without a corpus there is only an upper bound of the bytes
            check_quota(recipe.extraction, nbytes)
        return states, tokens

    training_states, tokens = states_of(
        recipe.generation, ("generation", "tokenization", "extraction"), recipe.tokenization
    )
    evaluation_states, evaluation_tokens = states_of(
        recipe.evaluation_generation(),
        ("evaluation-generation", "evaluation-tokenization", "evaluation-extraction"),
        recipe.evaluation_tokenization(),
    )
    drafter = _step(
        steps,
        known,
        "training",
        lambda: keys.training_key(recipe.training, _made(training_states)),
        tokens=_training_tokens(recipe.training, tokens),
        nbytes=_drafter_bytes(recipe, verifier, len(taps)),
        waits_for=None if training_states else "extraction",
        stable=True,
    )
    missing: Step | None = None if drafter else "training"
    if not evaluation_states:
        missing = "evaluation-extraction"
    _step(
        steps,
        known,
        "evaluation",
        lambda: keys.evaluation_key(recipe.evaluation, _made(drafter), _made(evaluation_states), verifier),
        tokens=evaluation_tokens,
        nbytes=None,
        waits_for=missing,
    )
    return steps


def _step(
    steps: list[PlannedStep],
    known: list[Manifest],
    stage: Step,
    key_of: Callable[[], Key],
    *,
    tokens: int,
    nbytes: int | None,
    waits_for: Step | None = None,
    stable: bool = False,
) -> Artifact | None:
    """Append the step; return its artifact, or what it would be called where that is known already (`stable`)."""
    if waits_for:
        steps.append(
            PlannedStep(stage=stage, state="would run", reason=f"{waits_for} comes first", tokens=tokens, bytes=nbytes)
        )
        return None
    key = key_of()
    try:
        found, reason = find(key), ""
    except Damaged as damage:
        found, reason = None, f"{damage}; what comes after runs only if it comes out otherwise"
    if not found and (home() / key.location / DAMAGED_MANIFEST).exists():
        reason = reason or "damaged, and set aside"
    if found:  # it is this step's, so no example of what other steps want
        known[:] = [manifest for manifest in known if manifest.key != found.key]
    planned = PlannedStep(
        stage=stage,
        state="cached" if found else "would run",
        reason="" if found else reason or _why(key, known),
        fingerprint=str(key),
        tokens=tokens,
        bytes=load_manifest(found.path).nbytes if found else nbytes,
    )
    steps.append(planned)
    if found or not stable:
        return found
    return Artifact(stage=key.stage, key=str(key), identity=str(key), location=key.location)


def _generation(
    steps: list[PlannedStep],
    known: list[Manifest],
    stage: Step,
    generation: GenerationConfig,
    contaminants: Sequence[SourceConfig],
    verifier: PinnedVerifier,
    *,
    tokens: int,
    nbytes: int,
) -> Artifact | None:
    """The step of collecting prompts and answering them: keyed by what was collected, so that is looked at first."""
    collecting: list[PlannedStep] = []
    prompts = _step(
        collecting,
        known,
        stage,
        lambda: keys.prompts_key(generation, contaminants),
        tokens=tokens,
        nbytes=nbytes,
    )
    if prompts is None:
        steps += collecting
        return None
    return _step(
        steps,
        known,
        stage,
        lambda: keys.generation_key(generation, prompts, verifier),
        tokens=tokens,
        nbytes=nbytes,
    )


def _made(artifact: Artifact | None) -> Artifact:
    assert artifact, "a step is keyed only when its inputs are known"
    return artifact


def _why(key: Key, known: Iterable[Manifest]) -> str:
    """How the wanted artifact differs from the most similar one there is."""
    reasons: list[list[str]] = []
    for manifest in known:
        if manifest.stage != key.stage:
            continue
        changed = []
        if manifest.recipe != key.recipe:
            changed.append(f"RECIPE {manifest.recipe} -> {key.recipe}")
        for kind, old, new in (("", manifest.config, key.config), ("input ", manifest.inputs, key.inputs)):
            for name in sorted({*old, *new}):
                if old.get(name) != new.get(name):
                    what = f"{name} {old.get(name)} -> {new.get(name)}" if not kind else f"input {name} changed"
                    changed.append(what)
        reasons.append(changed)
    if not reasons:
        return "never made"
    closest = min(reasons, key=len)
    if len(closest) > 3:
        return "nothing like it was made yet"
    return ", ".join(closest) if closest else "deleted"


def _estimate(generation: GenerationConfig) -> tuple[int, int]:
    """(tokens, bytes) of the answered prompts at most, from the size of the sources and a few of their rows."""
    rows, characters = map(sum, zip(*(estimate_rows(source) for source in generation.prompts), strict=True))
    share = min(1.0, generation.max_prompts / rows) if generation.max_prompts and rows else 1.0
    tokens = share * (characters / CHARACTERS_PER_TOKEN + rows * generation.max_new_tokens)
    return round(tokens), round(tokens * (4 + CHARACTERS_PER_TOKEN))


def _tokens(artifact: Artifact | None, estimate: int) -> int:
    if artifact is None:
        return estimate
    summary = artifact.summary
    return int(summary["tokens"]) + int(summary.get("prompt_tokens", 0))


def _training_tokens(config: TrainingConfig, tokens: int) -> int:
    """Epochs, or at most so many full batches."""
    most = config.max_steps * config.accumulation * config.max_tokens_per_batch
    return min(tokens * config.epochs, most or tokens * config.epochs)


def _drafter_bytes(recipe: Recipe, verifier: PinnedVerifier, num_taps: int) -> int:
    """Float32 weights, taking the layers to be as wide as the verifier's usually are (12 H^2 each)."""
    hidden = verifier.hidden_size
    return 4 * hidden * hidden * (num_taps + 12 * recipe.training.num_layers)
