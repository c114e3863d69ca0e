"""Which verifier exactly: a model name resolved to a plain folder, and that folder's identity.

Reads and hashes files; loads no weights (a GGUF file is converted once, by `gguf.py`).
"""

import hashlib
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from dflash.bundled import resolve
from dflash.config import TrainingConfig, VerifierConfig
from dflash.manifests import home, remembered_sha256

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
TREE_ATTENTION = ("auto", "eager", "sdpa")
ROLLED_BACK = ("full_attention", "sliding_attention", "linear_attention", "hybrid")
VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


class ChatOptions(BaseModel):
    """How conversations become text for a verifier: its template, or another one, and the template's variables."""

    model_config = ConfigDict(frozen=True)
    template: str | None = Field(None, description="The Jinja text that replaces the verifier's own template.")
    system_prompt: str = ""
    variables: dict[str, JsonValue] = Field(default_factory=dict, description="enable_thinking among them.")


class PinnedVerifier(BaseModel):
    """A verifier on disk. Two of equal `identity` have the same weights, configuration, tokenizer and chat template.

    `tokenizer_identity` covers tokenizer, template and chat options: what decides the ids of a conversation.
    """

    model_config = ConfigDict(frozen=True)
    name: str
    path: str
    identity: str
    tokenizer_identity: str
    revision: str = Field("", description="The commit, where the folder is a download from the hub.")
    dtype: str
    device: str
    device_map: str = ""
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    num_layers: int
    layer_types: list[str]
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    special_ids: dict[str, list[int]]
    chat: ChatOptions = ChatOptions()

    def __hash__(self) -> int:  # of its own, because lists and dicts have none: what is loaded is cached by it
        return hash((self.identity, self.tokenizer_identity))

    def __str__(self) -> str:
        return f"{self.name} ({self.identity[:8]}, {self.dtype})"


def _folder(config: VerifierConfig) -> Path:
    path = resolve(config.model)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"verifier.model: {path} does not exist; give the path of a .gguf file")
        converted = home() / "verifiers" / f"{path.stem}-{remembered_sha256(path)[:12]}"
        if not (converted / "config.json").exists():
            from dflash.gguf import convert_gguf  # heavy, and needed once per file

            convert_gguf(path, converted)
        return converted
    if path.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") != 1:
        raise ValueError(
            f"verifier.model: {config.model!r} is no folder, .gguf file, hub id, bundled:NAME or package:NAME"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    log.info("fetching %s at %s, unless it is here already", config.model, config.revision)
    try:
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"] + ["*.py"] * config.trust_remote_code
        return Path(snapshot_download(config.model, revision=config.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"verifier.model: {config.model!r} at {config.revision!r} is no local folder, nor reachable on the hub "
            f"({type(error).__name__}); check the name and the network, or give the path of a downloaded folder"
        ) from error


def as_ids(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def layer_kinds(text: dict[str, Any]) -> list[str]:
    """The kinds of a text model's layers, from its config.json: each once, sorted."""
    if text.get("layer_types"):
        return sorted(set(text["layer_types"]))
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    limited = window is not None and window < text.get("max_position_embeddings", window + 1)
    return ["sliding_attention"] if limited else ["full_attention"]


def _text(path: Path, setting: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{setting}: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"verifier.model: {path} is damaged ({error}); get the model again") from None


def complete_settings(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """config.json of a verifier. Where it says too little of its text model, as a large Gemma 3's does, its class's
    defaults are added. Raises ValueError where Transformers knows no such class.
    """
    settings = _settings(folder / "config.json")
    said = all(name in settings.get("text_config", settings) for name in (*NEEDED, "num_attention_heads"))
    if said or "model_type" not in settings:
        return settings
    from dflash.text_config import completed  # loads Transformers: only for those who need it

    return completed(settings, folder, trust_remote_code=trust_remote_code)


def tokenizer_files(folder: Path) -> list[str]:
    """The names, relative to a model's folder, of all files there that decide the ids of a conversation."""
    more = sorted(path.relative_to(folder).as_posix() for path in folder.glob(MORE_TEMPLATES))
    return [name for name in TOKENIZER_FILES if (folder / name).exists()] + more


def pin(config: VerifierConfig) -> PinnedVerifier:
    """Resolve and identify a verifier. Raises ValueError where the model cannot be found or is no causal LM folder."""
    folder = _folder(config)
    if not (folder / "config.json").exists():
        raise ValueError(f"verifier.model: {folder} holds no config.json; give a Transformers model folder")
    settings = _settings(folder / "config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"verifier.model: {folder} holds no .safetensors weights; convert the model first")
    tokenizer = {name: remembered_sha256(folder / name) for name in tokenizer_files(folder)}
    if not tokenizer:
        raise ValueError(f"verifier.model: {folder} holds no tokenizer; copy the model's tokenizer files there")
    kept = {name: value for name, value in settings.items() if name not in VOLATILE}
    generation = folder / "generation_config.json"
    eos = as_ids(_settings(generation).get("eos_token_id")) if generation.exists() else []
    parts = {
        "config": kept,
        "weights": {path.name: remembered_sha256(path) for path in weights},
        "tokenizer": tokenizer,
        "eos": eos,  # where its answers end
    }
    if config.trust_remote_code:
        parts["code"] = {path.name: remembered_sha256(path) for path in sorted(folder.glob("*.py"))}
    settings = complete_settings(folder, trust_remote_code=config.trust_remote_code)
    text = settings.get("text_config", settings)
    for name in NEEDED:
        if name not in text:
            raise ValueError(f"verifier.model: {folder / 'config.json'} has no {name}; is it a causal language model?")
    chat = _chat_options(config)
    return PinnedVerifier(
        name=config.model,
        path=str(folder.absolute()),
        identity=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16],
        tokenizer_identity=hashlib.sha256(
            json.dumps({"tokenizer": tokenizer, "chat": chat.model_dump()}, sort_keys=True).encode()
        ).hexdigest()[:16],
        revision=folder.name if folder.parent.name == "snapshots" else "",  # where hub downloads live
        dtype=config.dtype,
        device=config.device,
        device_map=config.device_map,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        num_layers=text["num_hidden_layers"],
        layer_types=layer_kinds(text),
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        max_positions=text.get("max_position_embeddings"),
        special_ids={
            "eos": sorted({*as_ids(text.get("eos_token_id")), *eos}),
            "pad": as_ids(text.get("pad_token_id")),
            "bos": as_ids(text.get("bos_token_id")),
        },
        chat=chat,
    )


def _chat_options(config: VerifierConfig) -> ChatOptions:
    template = None
    if config.template:
        path = Path(config.template).expanduser()
        if not path.is_file():
            raise ValueError(f"verifier.template: {path} does not exist; give the path of a Jinja file")
        template = _text(path, "verifier.template")
    thinking = {} if config.thinking == "default" else {"enable_thinking": config.thinking == "on"}
    return ChatOptions(
        template=template, system_prompt=config.system_prompt, variables=dict(config.template_options) | thinking
    )


def chat_templates(verifier: PinnedVerifier) -> list[str]:
    """The texts of the verifier's chat templates, as Transformers finds them but without loading it: the one for
    conversations, and the one for those with tools where that is another. Raises ValueError where there is none.
    """
    if verifier.chat.template is not None:
        return [verifier.chat.template]
    folder = Path(verifier.path)
    files = [folder / "chat_template.jinja", *sorted(folder.glob(MORE_TEMPLATES))]
    named = {file.stem: _text(file, "verifier.model") for file in files if file.exists()}
    config = folder / "tokenizer_config.json"
    if not named and config.exists():
        found = _settings(config).get("chat_template") or {}
        named = {"default": found} if isinstance(found, str) else {one["name"]: one["template"] for one in found}
    texts = [named[name] for name in ("chat_template", "default", "tool_use") if name in named]
    if not texts:
        raise ValueError(
            f"verifier.model: the tokenizer in {folder} has no chat template; use an instruction-tuned verifier, put "
            "a chat_template.jinja beside its tokenizer files, or set verifier.template"
        )
    return texts


def tap_layers(num_layers: int, num_taps: int, chosen: list[int]) -> list[int]:
    """0-based tap layers: those chosen, else the published spread `round(1 + i*(N-4)/(K-1))` (arXiv 2602.06036).

    Raises ValueError for a layer the verifier does not have, for its last one (whose output is final-normed, so it is
    not a tap), and where a shallow verifier cannot give that many different taps.
    """
    for layer in chosen:
        if not 0 <= layer < num_layers - 1:
            raise ValueError(
                f"extraction.target_layer_ids: layer {layer} is out of range; "
                f"the verifier has {num_layers} layers, taps are 0..{num_layers - 2}"
            )
    return chosen or _spread(num_layers, num_taps)


def _spread(num_layers: int, num_taps: int) -> list[int]:
    if num_layers < 2:
        raise ValueError(
            f"extraction.num_taps: a verifier of {num_layers} layers has no taps, as the output of its last is "
            "final-normed; use a deeper verifier"
        )
    layers = [num_layers // 2]
    if num_taps > 1:
        layers = [round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
    if layers != sorted(set(layers)) or layers[-1] > num_layers - 2:
        fewer = f"ask for at most {max(1, num_layers - 3)}, or " if num_layers > 2 else ""
        raise ValueError(
            f"extraction.num_taps: {num_taps} taps over {num_layers} layers would be {layers}, which do not ascend or "
            f"are none; {fewer}name extraction.target_layer_ids, up to {num_layers - 1} of 0..{num_layers - 2}"
        )
    return layers


def check_mask_token(token: int, verifier: PinnedVerifier, *, place: str) -> None:
    """The mask token must be a row of the embedding and mean nothing else; raises ValueError saying which it breaks.

    `place` is the setting that it comes from.
    """
    if token >= verifier.vocab_size:
        raise ValueError(f"{place}: {token} is out of range; the verifier's embedding has {verifier.vocab_size} rows")
    for name, ids in verifier.special_ids.items():
        if token in ids:
            raise ValueError(f"{place}: {token} is the verifier's {name} token; choose a reserved id")


def check_draft_vocabulary(config: TrainingConfig, verifier: PinnedVerifier) -> None:
    """Raises ValueError for more tokens than the verifier has, where these are not all its head's rows, and for so few
    that none is left beside mask and end tokens.
    """
    tokens, always = num_tokens(verifier), {config.mask_token_id, *verifier.special_ids["eos"]}
    if 0 < config.draft_vocab_size <= len(always):
        raise ValueError(
            f"training.draft_vocab_size: {config.draft_vocab_size} leaves nothing to draft but mask and end tokens "
            f"({len(always)}); choose more, or 0 for all"
        )
    if config.draft_vocab_size > tokens or config.draft_vocab_size == verifier.vocab_size:
        raise ValueError(
            f"training.draft_vocab_size: {config.draft_vocab_size} tokens are no part of the verifier's {tokens} "
            f"({verifier.vocab_size} rows of its head); choose fewer, or 0 for all"
        )


def num_tokens(verifier: PinnedVerifier) -> int:
    """How many rows of the verifier's head are tokens of its tokenizer; rows beyond, of a padded head, mean nothing.

    All rows where the tokenizer has no tokenizer.json.
    """
    return min(_tokens_of(Path(verifier.path) / "tokenizer.json") or verifier.vocab_size, verifier.vocab_size)


@cache
def _tokens_of(path: Path) -> int:
    """One more than the largest id that the file gives to a token; 0 where there is no such file."""
    if not path.exists():
        return 0
    settings = _settings(path)
    words = settings.get("model", {}).get("vocab", {})
    largest = max(words.values(), default=-1) if isinstance(words, dict) else len(words) - 1
    return 1 + max([largest, *(token["id"] for token in settings.get("added_tokens", []))])


def check_lengths(section: str, max_prompt_tokens: int, max_new_tokens: int, verifier: PinnedVerifier) -> None:
    """Raises ValueError where the longest prompt and its answer are more than the verifier was built for."""
    longest = max_prompt_tokens + max_new_tokens
    if verifier.max_positions is not None and longest > verifier.max_positions:
        raise ValueError(
            f"{section}.max_new_tokens: prompts of {max_prompt_tokens} and answers of {max_new_tokens} tokens are "
            f"longer than the {verifier.max_positions} positions of {verifier.name}; lower it or max_prompt_tokens"
        )


def check_abilities(live_prompts: int, verifier: PinnedVerifier) -> None:
    """Raises ValueError for what live decoding cannot do with this verifier's layers yet."""
    if live_prompts and verifier.attn_implementation not in TREE_ATTENTION:
        raise ValueError(
            f"verifier.attn_implementation: {verifier.attn_implementation} takes no tree's mask, which live decoding "
            f"needs; choose from {', '.join(TREE_ATTENTION)}, or set evaluation.live_prompts to 0"
        )
    limited = [kind for kind in verifier.layer_types if kind not in ROLLED_BACK]
    if live_prompts and limited:
        raise ValueError(
            f"evaluation.live_prompts: live decoding rolls the cache back, which the {', '.join(limited)} layers of "
            f"{verifier.name} do not allow; set it to 0 (replay works for every verifier)"
        )
