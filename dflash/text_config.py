"""What a verifier's config.json leaves out because its Transformers class has a default for it. Loads no weights."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig


def completed(settings: dict[str, Any], folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """The settings of the folder's config.json, those of its text model filled up with the class's defaults.

    Raises ValueError for a kind of model that Transformers does not know.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, ImportError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(f"verifier.model: {folder / 'config.json'} is not known to Transformers ({cause})") from error
    defaults = config.get_text_config().to_dict()
    if "text_config" in settings:
        return settings | {"text_config": defaults | settings["text_config"]}
    return defaults | settings


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a kind of model, filled up with its class's defaults.

    Raises ValueError for a kind of model that Transformers does not know.
    """
    kind = settings.get("model_type", "qwen3")
    try:
        defaults = AutoConfig.for_model(**{**settings, "model_type": kind}).to_dict()
    except Exception as error:  # each class has checks of its own, and what it makes of other values is not foreseen
        cause = " ".join(str(error).split())[:200]
        raise ValueError(f"model_type {kind!r} with these settings is not known to Transformers ({cause})") from None
    return defaults | settings
