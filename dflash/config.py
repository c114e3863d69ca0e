"""Every knob, its default and its meaning, once. One model per stage; the UI forms and `--set` are generated from them.

Knows nothing of files, models or Prefect. A field marked `PRACTICAL` changes how work is done and watched, never the
ids or weights that come out: it is no part of an artifact's key.
"""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

PRACTICAL: dict[str, JsonValue] = {"identity": False}

MOST_NODES = 4096  # of a draft tree: the longest pass that a verifier is ever given in a round

DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"

# before the host no user@ and no user:password@, even if there is a / in it; after :// no options, which hold keys
NO_SECRETS = r"^(?!.*://[^/]*@)(?!.*://[^/@]*:(?!\d+/).*@)(?![^/]*:[^/]*@)(?!.*://.*[?#])"

Step = Literal[
    "generation", "tokenization", "extraction",
    "evaluation-generation", "evaluation-tokenization", "evaluation-extraction",
    "training", "evaluation",
]  # fmt: skip
"""The steps of the pipeline. The evaluation set passes through the first three stages too, as artifacts of its own."""


def bucket_url(url: str) -> str:
    """The URL of an object store without a slash at its end. Raises ValueError for another, or with secrets in it."""
    without_secrets(url)
    if not re.match(r"(s3|gs)://[^/]+|memory://", url):
        raise ValueError(f"storage {url!r} is unknown; expected s3://bucket/path, gs://bucket/path or memory://")
    return url.rstrip("/") if not url.endswith("://") else url


def without_secrets(address: str) -> str:
    """An address or path as it is. Raises ValueError where there is a user, a password or an option in it."""
    if not re.match(NO_SECRETS, address):  # not repeated here: the message may go into a log
        raise ValueError(
            "the address holds a user or password, or options, which would be recorded; leave them out, they come from "
            "the environment (such as OPENAI_API_KEY, PREFECT_API_AUTH_STRING, AWS_SECRET_ACCESS_KEY)"
        )
    return address


Address = Annotated[str, AfterValidator(without_secrets), Field(json_schema_extra={"pattern": NO_SECRETS})]
"""Of what is elsewhere. A form, whose parameters are kept and shown, does not even take one with secrets in it."""


class Config(BaseModel):
    """Frozen, and strict about unknown keys: a misspelt knob must never be silently ignored."""

    # what was given is not repeated in errors as Pydantic writes them, which a run that another process starts may log
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _on_and_off(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads these two words as booleans."""
        if isinstance(value, bool) and "off" in get_args(cls.model_fields[str(info.field_name)].annotation):
            return "on" if value else "off"
        return value

    def identity(self) -> dict[str, Any]:
        """The part that decides what comes out, JSON-ready: the input of the stage's key."""
        practical = {
            name
            for name, field in type(self).model_fields.items()
            if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("identity") is False
        }
        return self.model_dump(mode="json", exclude=practical)


class VerifierConfig(Config):
    """The large frozen model that a drafter is trained for."""

    model: str = Field(
        title="Verifier",
        min_length=1,
        description="A hub id, a local folder, a .gguf file, package:NAME (its .gguf file), or bundled:demo-verifier.",
    )
    revision: str = Field("main", title="Revision", description="Branch, tag or commit of a hub id; pinned at load.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", title="Precision", description="Weights and arithmetic of the verifier, as it will be served."
    )
    device: str = Field(
        "auto",
        title="Device",
        pattern=DEVICE,
        description="auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.",
        json_schema_extra=PRACTICAL,
    )
    device_map: Literal["", "auto"] = Field(
        "",
        title="Several devices",
        description="auto: layers spread over all GPUs, for a verifier that one cannot hold; device stays auto.",
        json_schema_extra=PRACTICAL,
    )
    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = Field("auto", title="Attention", description="auto: what Transformers prefers for this model.")
    trust_remote_code: bool = Field(
        False, title="Trust remote code", description="Run the Python files that come with the model."
    )
    thinking: Literal["default", "on", "off"] = Field(
        "default", title="Thinking", description="The template's enable_thinking, as the verifier will be served."
    )
    system_prompt: str = Field(
        "", title="System prompt", description="Put before conversations that have none of their own."
    )
    template: str = Field(
        "", title="Chat template", description="A Jinja file to use instead of the verifier's own template."
    )
    template_options: dict[str, JsonValue] = Field(
        default_factory=dict, title="Template options", description="Further variables that the template knows."
    )

    @model_validator(mode="after")
    def _one_placement(self) -> "VerifierConfig":
        if self.device_map and self.device != "auto":
            raise ValueError(f"device_map {self.device_map!r} places every layer itself; leave device at auto")
        return self


class SourceConfig(Config):
    """One source of conversations. With `--set`, a plain text stands for its path."""

    path: Address = Field(
        title="Source",
        min_length=1,
        description="A file, folder or glob of .jsonl, .json or .parquet (also .gz, .zst), bundled:NAME, or "
        "hub:OWNER/NAME for a Hugging Face dataset.",
    )
    category: str = Field("", title="Category", description="Of all its rows; empty: each row's own, else the file's.")
    limit: int = Field(0, title="Most rows", ge=0, description="Use only the first N usable rows; 0 uses all.")
    weight: float = Field(
        0,
        title="Weight",
        ge=0,
        description="Share of the mix, relative to the other weighted sources; 0 uses all rows.",
    )
    answers: Literal["generate", "keep"] = Field(
        "generate", title="Answers", description="generate: by the verifier. keep: the data's, if already on-policy."
    )
    subset: str = Field("", title="Subset", description="Configuration of a hub dataset.")
    split: str = Field("train", title="Split", description="Split of a hub dataset.")
    revision: str = Field("main", title="Revision", description="Of a hub dataset; pinned when it is read.")

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class GenerationConfig(Config):
    """On-policy answers: the verifier responds to every user turn; its token ids are kept as they were served."""

    prompts: list[SourceConfig] = Field(title="Prompts", min_length=1, description="Where conversations come from.")
    max_prompts: int = Field(
        0, title="Most prompts", ge=0, description="Use only the first N, or a mix of N by weight; 0 uses all."
    )
    deduplicate: Literal["near", "exact", "off"] = Field(
        "near", title="Duplicates", description="near: equal but for case, spaces and Unicode form. exact: equal."
    )
    decontaminate: bool = Field(
        True,
        title="Decontaminate",
        description="Drop prompts that share 13 words in a row, or a whole shorter prompt, with an evaluation set.",
    )
    max_dropped_share: float = Field(
        0.2,
        title="Most dropped",
        ge=0,
        le=1,
        description="Fail where a larger share of rows is unusable (duplicates and rows not drawn do not count).",
        json_schema_extra=PRACTICAL,
    )
    max_prompt_tokens: int = Field(
        1024, title="Longest prompt", gt=0, description="In tokens; longer prompts are dropped and counted."
    )
    max_new_tokens: int = Field(
        2048, title="Longest response", ge=2, description="In tokens; a longer one is cut. A block needs two."
    )
    temperature: float = Field(0.0, title="Temperature", ge=0, description="0: greedy.")
    top_p: float = Field(
        1.0, title="Top p", gt=0, le=1, description="Of sampling: the most likely tokens of this mass."
    )
    seed: int = Field(0, title="Seed", ge=0, description="Of sampling: same seed, same answers.")
    backend: Literal["transformers", "openai"] = Field(
        "transformers",
        title="Back end",
        description="openai: a server such as vLLM or SGLang that serves the verifier.",
    )
    base_url: Address = Field(
        "",
        title="Server",
        description="Of back end openai, for example http://127.0.0.1:8000/v1. Its key, if any: OPENAI_API_KEY.",
        json_schema_extra=PRACTICAL,
    )
    server_model: str = Field(
        "", title="Served name", description="Empty: the one model the server lists.", json_schema_extra=PRACTICAL
    )
    concurrency: int = Field(
        64, title="Concurrency", gt=0, description="Requests to the server at once.", json_schema_extra=PRACTICAL
    )
    request_seconds: float = Field(
        600,
        title="Deadline",
        gt=0,
        description="Seconds for one answer, retries included.",
        json_schema_extra=PRACTICAL,
    )
    devices: list[str] = Field(
        default_factory=list,
        title="Devices",
        description="One process each, for example cuda:0, cuda:1; empty: this process, on verifier.device.",
        json_schema_extra=PRACTICAL,
    )
    batch_size: int = Field(
        32, title="Batch size", gt=0, description="Prompts answered at once.", json_schema_extra=PRACTICAL
    )
    chunk_prompts: int = Field(
        512,
        title="Prompts per chunk",
        gt=0,
        description="A chunk is the unit of retry and reuse; larger where there would be too many.",
        json_schema_extra=PRACTICAL,
    )

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if url and not re.match(r"https?://[^/]", url):
            raise ValueError(f"{url!r} is no address of a server; write it as http://127.0.0.1:8000/v1")
        return url

    @field_validator("devices")
    @classmethod
    def _known_devices(cls, devices: list[str]) -> list[str]:
        for device in devices:
            if not re.match(DEVICE, device):
                raise ValueError(f"device {device!r} is unknown; expected auto, cpu, cuda or cuda:N")
        return devices

    @model_validator(mode="after")
    def _server_is_named(self) -> "GenerationConfig":
        if self.backend == "openai" and not self.base_url:
            raise ValueError("back end openai needs base_url, for example http://127.0.0.1:8000/v1")
        return self


class TokenizationConfig(Config):
    """Conversations to token ids, supervised mask, split and length bucket."""

    max_length: int = Field(3072, title="Longest row", gt=1, description="In tokens; longer rows are truncated.")
    min_supervised: int = Field(
        2, title="Fewest supervised tokens", ge=1, description="Rows with fewer are dropped and counted."
    )
    turns: Literal["merge", "each", "last"] = Field(
        "merge",
        title="Turns",
        description="merge: one row per conversation, or per answer where the template rewrites earlier turns. "
        "each: one row per answer. last: only the last answer.",
    )
    mask_empty_thinking: bool = Field(
        True, title="Mask empty thinking", description="Do not train on empty think blocks that a template inserts."
    )
    max_dropped_share: float = Field(
        0.2,
        title="Most dropped",
        ge=0,
        le=1,
        description="Fail where a larger share of rows is dropped.",
        json_schema_extra=PRACTICAL,
    )
    validation_share: float = Field(
        0.02, title="Validation share", ge=0, lt=1, description="Share of conversations held out, chosen by their hash."
    )
    num_buckets: int = Field(6, title="Length buckets", ge=1, le=64, description="Classes of similar length.")
    bucketing: Literal["optimal", "quantile"] = Field(
        "optimal", title="Bucketing", description="optimal: least padding. quantile: equally many rows each."
    )
    edges: list[int] = Field(
        default_factory=list,
        title="Bucket edges",
        description="Longest row of each bucket but the last; given, they replace num_buckets and bucketing.",
    )
    workers: int = Field(
        0,
        title="Workers",
        ge=0,
        description="Processes that tokenize; 0: one per core where that pays.",
        json_schema_extra=PRACTICAL,
    )

    @field_validator("edges")
    @classmethod
    def _ascending(cls, edges: list[int]) -> list[int]:
        if edges != sorted(set(edges)) or any(edge < 1 for edge in edges):
            raise ValueError(f"edges must be positive, distinct and ascending, got {edges}")
        return edges


class ExtractionConfig(Config):
    """Hidden states of the verifier's tap layers, as Zarr shards."""

    num_taps: int = Field(5, title="Taps", ge=1, description="Tap layers, spread by the published formula.")
    target_layer_ids: list[int] = Field(
        default_factory=list,
        title="Tap layers",
        description="0-based decoder layers whose output is taken; empty uses the formula.",
    )
    storage_dtype: Literal["bfloat16", "float32", "fp8"] = Field(
        "bfloat16",
        title="Stored precision",
        description="Of the taps. fp8 halves the bytes at 2 to 3 % error; float32 doubles them, exact for a float32 "
        "verifier.",
    )
    store_final: bool = Field(
        False, title="Store final state", description="What the verifier's head reads, never as fp8."
    )
    top_k: int = Field(
        0, title="Top k", ge=0, le=1024, description="Store the K likeliest next tokens and their log-probabilities."
    )
    greedy: bool = Field(
        True,
        title="Verifier's choices",
        description="Labels are what the verifier itself would say. Off: the data's own tokens, and layers behind the "
        "last tap do not run.",
    )
    max_left_out_share: float = Field(
        0.01,
        title="Most left out",
        ge=0,
        le=1,
        description="Fail a shard where a larger share of its rows has unusable hidden states; fewer are left out.",
        json_schema_extra=PRACTICAL,
    )
    shard_tokens: int = Field(
        1_000_000, title="Tokens per shard", gt=0, description="A shard is the unit of retry and resume."
    )
    batch_tokens: int = Field(
        16_384,
        title="Tokens per batch",
        gt=0,
        description="Padded tokens in one pass of the verifier; at most 1,024 on a CPU, where more are slower.",
        json_schema_extra=PRACTICAL,
    )
    storage: Address = Field(
        "",
        title="Storage",
        description="Where the bulk of the hidden states lies: s3://bucket/path or gs://bucket/path, with credentials "
        "from the environment; empty: on the disk, as all else. memory:// ends with its process: not for a pipeline.",
        json_schema_extra=PRACTICAL,
    )
    disk_quota_gb: float = Field(
        0,
        title="Disk quota (GB)",
        ge=0,
        description="Refuse before starting if the estimate is larger; 0 asks only for free space.",
        json_schema_extra=PRACTICAL,
    )
    runner: Literal["inline", "ray", "dask"] = Field(
        "inline",
        title="Runner",
        description="inline: one shard after another, in the run's process. ray, dask: on a cluster.",
        json_schema_extra=PRACTICAL,
    )
    max_workers: int = Field(
        1,
        title="Workers",
        ge=1,
        description="Processes of a local Ray or Dask cluster, a shard at a time each. A running cluster has its own.",
        json_schema_extra=PRACTICAL,
    )
    address: Address = Field(
        "",
        title="Cluster",
        description="Of a running Ray or Dask cluster, e.g. ray://head:10001 or tcp://scheduler:8786; empty starts a "
        "local one for the run.",
        json_schema_extra=PRACTICAL,
    )

    @model_validator(mode="after")
    def _cluster_or_not(self) -> "ExtractionConfig":
        if self.runner == "inline" and (self.address or self.max_workers > 1):
            raise ValueError("address and max_workers are of a cluster; set runner to ray or dask")
        if self.runner != "inline" and self.storage.startswith("memory:"):
            raise ValueError(f"storage memory:// ends with its process, and {self.runner} has several; set a bucket")
        return self

    @field_validator("target_layer_ids")
    @classmethod
    def _distinct(cls, ids: list[int]) -> list[int]:
        if len(set(ids)) != len(ids) or ids != sorted(ids) or any(i < 0 for i in ids):
            raise ValueError(f"choose from 0 to the verifier's last layer but one, each once, ascending, got {ids}")
        return ids

    @field_validator("storage")
    @classmethod
    def _known_store(cls, url: str) -> str:
        return bucket_url(url) if url else url


class LossConfig(Config):
    """Weights of a mixture of losses per slot. All but ce need the verifier's final states: extraction.store_final."""

    ce: float = Field(1.0, title="Cross-entropy", ge=0, description="Of the label.")
    kl: float = Field(0.0, title="KL divergence", ge=0, description="Of the drafter from the verifier's distribution.")
    tv: float = Field(0.0, title="Total variation", ge=0, description="1 - P(a sampled draft is accepted).")
    lk: float = Field(
        0.0, title="LK", ge=0, description="Hybrid of KL and total variation, by acceptance (arXiv 2602.23881)."
    )

    @model_validator(mode="after")
    def _something(self) -> "LossConfig":
        if not any((self.ce, self.kl, self.tv, self.lk)):
            raise ValueError("every loss has weight 0; give at least one a positive weight")
        return self

    @property
    def of_distributions(self) -> bool:
        """Whether the verifier's distribution is needed, beyond the labels."""
        return bool(self.kl or self.tv or self.lk)


class DrafterShapeConfig(Config):
    """The drafter's layers. 0 or empty: as the verifier's."""

    hidden_size: int = Field(
        0,
        title="Hidden size",
        ge=0,
        description="Another one than the verifier's adds two matrices, which no other engine serves.",
    )
    intermediate_size: int = Field(0, title="MLP width", ge=0, description="Of each layer.")
    num_attention_heads: int = Field(0, title="Attention heads", ge=0, description="Query heads.")
    num_key_value_heads: int = Field(0, title="Key/value heads", ge=0, description="Divides the attention heads.")
    head_dim: int = Field(0, title="Head width", ge=0, description="Even.")
    sliding_window: int = Field(
        0,
        title="Sliding window",
        ge=0,
        description="Layers with a window see only so many tokens before the anchor; 0: all layers see all.",
    )
    sliding_layers: list[int] = Field(
        default_factory=list,
        title="Layers with a window",
        description="0-based; empty: all but the last, where there is a window.",
    )


class TrainingConfig(Config):
    """The DFlash drafter and how it is trained (defaults: arXiv 2602.06036, gamma for tree deployment)."""

    mask_token_id: int = Field(
        title="Mask token id",
        ge=0,
        description="A reserved id of the verifier's vocabulary: 151669 for Qwen3, 248070 for Qwen3.5/3.6.",
    )
    block_size: int = Field(16, title="Block size", ge=2, le=128, description="Slots per block, the anchor included.")
    num_layers: int = Field(5, title="Drafter layers", ge=1, description="Decoder layers of the drafter.")
    shape: DrafterShapeConfig = Field(DrafterShapeConfig(), title="Shape", description="Widths, heads, windows.")
    draft_vocab_size: int = Field(
        0,
        title="Draft vocabulary",
        ge=0,
        description="Tokens that can be drafted: the most frequent labels of the training rows, and mask and end "
        "tokens; 0: all that the verifier has. Fewer make a draft cheaper, and labels outside are never right.",
    )
    initialisation: str = Field(
        "random",
        title="Initialisation",
        min_length=1,
        description="random: N(0, 0.02). verifier: its last layers. Else the folder of a drafter to start from.",
    )
    num_anchors: int = Field(512, title="Anchors", gt=0, description="Blocks sampled per conversation and step.")
    labels: Literal["greedy", "data"] = Field(
        "greedy",
        title="Labels",
        description="greedy: what the verifier would say. data: the conversations' own tokens.",
    )
    loss: LossConfig = Field(LossConfig(), title="Loss", description="Cross-entropy, or a mixture.")
    slot_weights: Literal["decay", "dpace", "tree", "uniform"] = Field(
        "decay",
        title="Slot weights",
        description="decay: exp(-(k-1)/gamma). dpace: by the drafter's confidence (arXiv 2605.18810). tree: dpace for "
        "trees of tree_budget. uniform: every slot counts the same.",
    )
    gamma: float = Field(
        10.0, title="Gamma", gt=0, description="Of slot weights decay, in slots: 10 for trees, 7 in the paper."
    )
    dpace_alpha: float = Field(
        0.5, title="D-PACE alpha", ge=0, le=1, description="Smoothing of the confidences of dpace and tree."
    )
    tree_budget: int = Field(
        64,
        title="Tree budget",
        ge=0,
        le=MOST_NODES,
        description="Of the deployment that validation, best checkpoint and slot weights tree are for; 0: chain.",
    )
    noise_start: float = Field(
        0.05,
        title="Feature noise",
        ge=0,
        description="In units of each tap's RMS; ramps linearly from 0 to this during warmup.",
    )
    noise_end: float = Field(
        0.05, title="Feature noise at the end", ge=0, description="Linearly from the peak after warmup to this."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", title="Optimizer", description="muon: Muon for matrices, AdamW for the rest."
    )
    learning_rate: float = Field(6e-4, title="Learning rate", gt=0, description="Peak, of AdamW.")
    muon_learning_rate: float = Field(0.01, title="Muon learning rate", gt=0, description="Peak, of Muon.")
    beta1: float = Field(0.9, title="Beta 1", ge=0, lt=1, description="AdamW.")
    beta2: float = Field(0.95, title="Beta 2", ge=0, lt=1, description="AdamW.")
    weight_decay: float = Field(0.0, title="Weight decay", ge=0, description="Decoupled.")
    schedule: Literal["cosine", "wsd", "linear"] = Field(
        "cosine",
        title="Schedule",
        description="After warmup: cosine or linear to 0, or flat with a linear end (wsd).",
    )
    warmup_share: float = Field(0.04, title="Warmup", ge=0, le=1, description="Share of all steps.")
    decay_share: float = Field(
        0.2, title="Decay of wsd", ge=0, le=1, description="Share of all steps in which wsd goes to 0."
    )
    ema: float = Field(
        0.0, title="EMA", ge=0, lt=1, description="Decay per step of the averaged weights that are published; 0: none."
    )
    clip_norm: float = Field(1.0, title="Gradient clip", gt=0, description="Largest gradient norm.")
    spike_factor: float = Field(
        20.0,
        title="Spike",
        ge=0,
        description="Skip a step whose gradient norm is above so many times the median of recent ones, and is clipped; "
        "0: never.",
    )
    max_skipped: int = Field(
        20,
        title="Most skipped steps",
        ge=0,
        description="Stop when more steps were skipped, non-finite ones included; with a higher limit it goes on.",
        json_schema_extra=PRACTICAL,
    )
    epochs: int = Field(6, title="Epochs", gt=0, description="Passes over the training rows.")
    max_steps: int = Field(0, title="Most steps", ge=0, description="Stop after N optimizer steps; 0: epochs decide.")
    order: Literal["interleaved", "shuffled", "sequential"] = Field(
        "interleaved",
        title="Order of batches",
        description="Of length buckets: interleaved in proportion, shuffled, or one after another, shortest first.",
    )
    patience: int = Field(
        0, title="Patience", ge=0, description="Stop after N validations without a better acceptance length; 0: never."
    )
    max_tokens_per_batch: int = Field(
        16_384, title="Tokens per batch", gt=0, description="Padded tokens of the conversations in one micro-batch."
    )
    accumulation: int = Field(
        1, title="Accumulation", ge=1, description="Micro-batches per optimizer step, of all processes together."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", title="Precision", description="Arithmetic; master weights and moments are always float32."
    )
    seed: int = Field(0, title="Seed", ge=0, description="Same seed, same drafter.")
    validate_every: int = Field(500, title="Validate every", gt=0, description="Steps between replays.")
    save_every: int = Field(
        200, title="Save every", gt=0, description="Steps between checkpoints.", json_schema_extra=PRACTICAL
    )
    keep_last: int = Field(
        2, title="Checkpoints kept", ge=1, description="The newest ones.", json_schema_extra=PRACTICAL
    )
    keep_every: int = Field(
        0,
        title="Keep for good",
        ge=0,
        description="Every N steps a checkpoint stays until training ends; 0: none.",
        json_schema_extra=PRACTICAL,
    )
    accept_changes: bool = Field(
        False,
        title="Accept changed settings",
        description="Continue from a checkpoint that was made with other settings.",
        json_schema_extra=PRACTICAL,
    )
    log_every: int = Field(10, title="Log every", gt=0, description="Steps between rows.", json_schema_extra=PRACTICAL)
    processes: int = Field(
        1,
        title="Processes",
        ge=0,
        description="Ranks per machine that share each step; 0: one per GPU.",
        json_schema_extra=PRACTICAL,
    )
    nodes: int = Field(1, title="Machines", ge=1, description="That train together.", json_schema_extra=PRACTICAL)
    rendezvous: Address = Field(
        "",
        title="Rendezvous",
        description="host:port that all machines reach; needed for several.",
        json_schema_extra=PRACTICAL,
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        title="Parallelism",
        description="ddp: every rank holds all weights and moments. fsdp: each holds its share (FSDP2).",
        json_schema_extra=PRACTICAL,
    )
    loss_memory_mb: int = Field(
        0,
        title="Memory of the loss",
        ge=0,
        description="For logits in memory at once; 0: what suits the device.",
        json_schema_extra=PRACTICAL,
    )
    device: str = Field(
        "auto", title="Device", pattern=DEVICE, description="auto, cpu, cuda or cuda:N.", json_schema_extra=PRACTICAL
    )
    tracking: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto",
        title="W&B",
        description="auto: online if WANDB_API_KEY is set, else offline.",
        json_schema_extra=PRACTICAL,
    )
    project: str = Field(
        "dflash", title="W&B project", min_length=1, description="Where runs are filed.", json_schema_extra=PRACTICAL
    )
    run_name: str = Field(
        "", title="W&B run name", description="Empty: made from the settings.", json_schema_extra=PRACTICAL
    )

    @model_validator(mode="after")
    def _weights_have_a_tree(self) -> "TrainingConfig":
        if self.slot_weights == "tree" and not self.tree_budget:
            raise ValueError("slot_weights tree with tree_budget 0, a chain; set a budget, or slot_weights to dpace")
        return self

    @model_validator(mode="after")
    def _processes_share_steps(self) -> "TrainingConfig":
        if self.accumulation % max(1, self.processes * self.nodes):
            raise ValueError(
                f"accumulation {self.accumulation} is not a multiple of {self.processes * self.nodes} processes; each "
                "takes as many micro-batches of a step as the others"
            )
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError(f"{self.nodes} machines need a rendezvous, the host:port of one of them")
        return self


class EvaluationConfig(Config):
    """Acceptance length of chain and trees, by replay, cross-checked by live decoding."""

    prompts: list[SourceConfig] = Field(title="Prompts", min_length=1, description="The report has a row per category.")
    max_prompts: int = Field(0, title="Most prompts", ge=0, description="Use only the first N of them; 0 uses all.")
    max_prompt_tokens: int = Field(1024, title="Longest prompt", gt=0, description="In tokens; longer are dropped.")
    max_new_tokens: int = Field(2048, title="Longest response", gt=0, description="In tokens; a longer one is cut.")
    temperature: float = Field(
        0.0,
        title="Temperature",
        ge=0,
        description="Of the responses; 0: greedy. Above it, with extraction.store_final, the report also has what "
        "rejection sampling expects.",
    )
    seed: int = Field(0, title="Seed", ge=0, description="Of responses above temperature 0.")
    sets: dict[str, list[str]] = Field(
        default_factory=dict,
        title="Sets",
        description="Named groups of categories, each with numbers of its own; categories in none are the set "
        "evaluation.",
    )
    budgets: list[int] = Field(
        default=[8, 16, 32, 64, 128, 256, 512],
        title="Tree budgets",
        min_length=1,
        description="Nodes of the draft tree, root excluded. Those beyond all prefixes of a block are left out.",
    )
    live_prompts: int = Field(
        4, title="Live prompts", ge=0, description="Prompts decoded live as a cross-check of replay, and timed."
    )
    parity: Literal["on", "off"] = Field(
        "on",
        title="Parity gate",
        description="on: no report of a drafter that another process, given its folder, does not run as in training. "
        "off: numbers only; such a drafter never becomes champion.",
    )
    draft_ms: float = Field(
        0, title="Draft (ms)", ge=0, description="Of one draft where it will be served; with verify_ms."
    )
    verify_ms: dict[int, float] = Field(
        default_factory=dict,
        title="Verification (ms)",
        description="Of a tree of so many drafted tokens (0: plain decoding) and the verifier's pass over it, for the "
        "best budget; empty: as timed live.",
    )
    minimum_difference: float = Field(
        0.02,
        title="Minimum difference",
        ge=0,
        description="Of acceptance lengths, below which a drafter is no better than the champion.",
        json_schema_extra=PRACTICAL,
    )
    minimum_conversations: int = Field(
        8,
        title="Least conversations",
        ge=2,
        description="With fewer, drafters are not comparable: an interval of so few is wrong more often than it says.",
        json_schema_extra=PRACTICAL,
    )

    @field_validator("budgets")
    @classmethod
    def _ascending(cls, budgets: list[int]) -> list[int]:
        if budgets != sorted(set(budgets)) or budgets[0] < 1 or budgets[-1] > MOST_NODES:
            raise ValueError(f"budgets must be distinct and ascending, from 1 to {MOST_NODES}, got {budgets}")
        return budgets

    @field_validator("sets")
    @classmethod
    def _in_one_set(cls, sets: dict[str, list[str]]) -> dict[str, list[str]]:
        named = [category for categories in sets.values() for category in categories]
        if twice := sorted({category for category in named if named.count(category) > 1}):
            raise ValueError(f"category {twice[0]!r} is named twice; put it into one of {', '.join(sets)}")
        return sets

    @field_validator("verify_ms")
    @classmethod
    def _has_plain(cls, verify_ms: dict[int, float]) -> dict[int, float]:
        if verify_ms and (0 not in verify_ms or min(verify_ms) < 0 or min(verify_ms.values()) <= 0):
            raise ValueError(
                f"verify_ms needs positive times by tokens from 0, which is plain decoding, got {verify_ms}"
            )
        return verify_ms

    @model_validator(mode="after")
    def _times_of_both(self) -> "EvaluationConfig":
        if bool(self.draft_ms) != bool(self.verify_ms):
            given, missing = ("draft_ms", "verify_ms") if self.draft_ms else ("verify_ms", "draft_ms")
            raise ValueError(f"{given} says nothing without {missing}; set both, or neither: as timed live")
        return self

    @field_validator("prompts")
    @classmethod
    def _on_policy(cls, prompts: list[SourceConfig]) -> list[SourceConfig]:
        for source in prompts:
            if source.answers != "generate":
                raise ValueError(f"{source.path}: replay needs the verifier's own answers; set answers to generate")
        return prompts


class NightlyConfig(Config):
    """What the nightly evaluation looks at beside the recipe, and what it may start."""

    drafters: list[str] = Field(
        default_factory=list,
        title="Drafters",
        description="Keys or folders; empty: the newest one of the recipe.",
        json_schema_extra=PRACTICAL,
    )
    new_prompts: list[SourceConfig] = Field(
        default_factory=list,
        title="New prompts",
        description="Such as this week's: is the drafter worse on them than on its evaluation set? Empty: not asked.",
        json_schema_extra=PRACTICAL,
    )
    max_new_prompts: int = Field(
        200, title="Most new prompts", gt=0, description="Use only the first N of them.", json_schema_extra=PRACTICAL
    )
    largest_drop: float = Field(
        0.1,
        title="Largest drop",
        ge=0,
        le=1,
        description="Share of what the drafter adds (acceptance length - 1) that may be lost on new prompts before "
        "retraining is due.",
        json_schema_extra=PRACTICAL,
    )
    retrain: bool = Field(
        False,
        title="Retrain",
        description="Start the recipe's pipeline where retraining is due or a drafter is worse.",
        json_schema_extra=PRACTICAL,
    )


class Recipe(Config):
    """One full configuration of the pipeline: the parameters of a deployment in prefect.yaml."""

    verifier: VerifierConfig
    generation: GenerationConfig
    tokenization: TokenizationConfig = TokenizationConfig()
    extraction: ExtractionConfig = ExtractionConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig

    @model_validator(mode="after")
    def _states_outlive_their_process(self) -> "Recipe":
        if self.extraction.storage.startswith("memory:"):
            raise ValueError(
                "extraction.storage memory:// ends with its process, and training has another; set a bucket, or leave "
                "it empty"
            )
        return self

    @model_validator(mode="after")
    def _labels_are_stored(self) -> "Recipe":
        if self.training.labels == "greedy" and not self.extraction.greedy:
            raise ValueError("training.labels greedy needs extraction.greedy; set it, or set training.labels to data")
        if self.training.loss.of_distributions and not self.extraction.store_final:
            raise ValueError(
                "training.loss: kl, tv and lk need the verifier's final states; set extraction.store_final, or leave "
                "them at 0"
            )
        return self

    @model_validator(mode="after")
    def _rows_fit(self) -> "Recipe":
        if self.tokenization.max_length <= self.training.block_size:
            raise ValueError(
                f"tokenization.max_length {self.tokenization.max_length} leaves no room for a block of "
                f"{self.training.block_size}; raise it or lower training.block_size"
            )
        if self.training.max_tokens_per_batch < self.tokenization.max_length:
            raise ValueError(
                f"training.max_tokens_per_batch {self.training.max_tokens_per_batch} does not hold a row of "
                f"tokenization.max_length {self.tokenization.max_length}; raise it or lower that"
            )
        return self

    def evaluation_generation(self) -> GenerationConfig:
        """How the evaluation set is answered: as the training prompts, but with its own temperature and limits."""
        names = ("prompts", "max_prompts", "max_prompt_tokens", "max_new_tokens", "temperature", "seed")
        own = {name: getattr(self.evaluation, name) for name in names}
        return self.generation.model_copy(update=own | {"top_p": 1.0, "decontaminate": False})

    def on_prompts(self, prompts: list[SourceConfig], *, max_prompts: int) -> "Recipe":
        """The recipe with other evaluation prompts, by replay alone: numbers to be compared with those of its own."""
        other = {"prompts": prompts, "max_prompts": max_prompts, "sets": {}, "live_prompts": 0, "parity": "off"}
        return self.model_copy(update={"evaluation": self.evaluation.model_copy(update=other)})

    def evaluation_tokenization(self) -> TokenizationConfig:
        """Rows of the evaluation set are neither truncated nor split, and each holds one answer."""
        longest = self.evaluation.max_prompt_tokens + self.evaluation.max_new_tokens
        return TokenizationConfig(
            max_length=longest,
            min_supervised=1,
            turns="each",
            validation_share=0,
            num_buckets=1,
            max_dropped_share=self.tokenization.max_dropped_share,
            workers=self.tokenization.workers,
        )
