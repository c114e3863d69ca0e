"""The drafter that a configuration asks for, before there is any weight: does without torch, so that a plan can ask."""

from pathlib import Path
from typing import Any

from dflash.config import TrainingConfig
from dflash.drafter.shape import DrafterConfig, differences, read_config, refuse_problems
from dflash.keys import starting_files
from dflash.pinning import PinnedVerifier, complete_settings


def drafter_config(
    config: TrainingConfig, verifier_config: dict[str, Any], *, target_layer_ids: list[int]
) -> DrafterConfig:
    """From the verifier's config.json and its tap layers. Raises ValueError for a shape that does not work out."""
    return DrafterConfig.from_verifier(
        verifier_config,
        block_size=config.block_size,
        num_layers=config.num_layers,
        mask_token_id=config.mask_token_id,
        target_layer_ids=target_layer_ids,
        draft_vocab_size=config.draft_vocab_size,
        **config.shape.model_dump(),
    )


def check_drafter(config: TrainingConfig, verifier: PinnedVerifier, target_layer_ids: list[int]) -> None:
    """Raises ValueError for a drafter that cannot be made for this verifier, or not from where it is to start."""
    settings = complete_settings(Path(verifier.path), trust_remote_code=verifier.trust_remote_code)
    try:
        drafter = drafter_config(config, settings, target_layer_ids=target_layer_ids)
    except KeyError as error:
        raise ValueError(f"training: the verifier's config.json has no {error}, which drafters are made by") from None
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("training.") else f"training: {error}") from None
    if files := starting_files(config):
        folder = files[0].parent
        try:
            start = read_config(folder)
        except ValueError as error:
            raise ValueError(f"training.initialisation: {error}") from None
        refuse_problems(folder, differences(drafter, start))
