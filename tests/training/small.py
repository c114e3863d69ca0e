"""A published extraction artifact of a verifier that never was: rows whose next tokens can be learnt from features."""

import json
from pathlib import Path

import polars as pl
import torch
from safetensors.torch import save_file

from dflash.config import TrainingConfig
from dflash.hidden.extraction import records_of
from dflash.hidden.store import PackedStates, Row, RowStates, write_shard
from dflash.manifests import Artifact, Key, publish
from dflash.training.batches import Batch
from tests.drafter.small import VERIFIER

VOCAB, HIDDEN = VERIFIER["vocab_size"], VERIFIER["hidden_size"]
TAPS, MASK = 2, 60


def make_row(length: int, *, prompt: int, generator: torch.Generator) -> RowStates:
    """Sixteen tokens in a fixed cycle, entered anywhere; the features of a token are its own."""
    tokens = [int(torch.randint(16, (1,), generator=generator))]
    while len(tokens) < length + 1:
        tokens.append((tokens[-1] * 5 + 1) % 16)
    ids = torch.tensor(tokens)
    table = torch.randn(VOCAB, TAPS * HIDDEN, generator=torch.Generator().manual_seed(5))
    return RowStates(table[ids[:-1]], ids[:-1], torch.arange(length) >= prompt, ids[1:])


def pack(rows: list[RowStates]) -> Batch:
    """Rows as a batch, as the loader gives them."""
    lengths = tuple(len(row.input_ids_T) for row in rows)
    return Batch.of(
        PackedStates(*(torch.cat(part) if part[0] is not None else None for part in zip(*rows, strict=True)), lengths)
    )


def make_states(
    lengths: list[int], *, prompt: int = 4, validation: int = 1, seed: int = 0, rows: list[RowStates] | None = None
) -> Artifact:
    """One shard; the last `validation` rows are held out, buckets are by length (above 30 or not)."""
    generator = torch.Generator().manual_seed(seed)
    rows = rows or [make_row(length, prompt=prompt, generator=generator) for length in lengths]
    key = Key(stage="extraction", recipe=1, config={}, inputs={"lengths": str(lengths), "seed": str(seed)})
    shard = Key(stage="extraction", recipe=1, config={"shard": 0}, inputs={"extraction": str(key)})
    with publish(shard, summary={}, location=f"{key.location}/shards/0000") as (folder, made):
        write_shard(
            folder,
            rows,
            ids=[f"row{i}" for i in range(len(rows))],
            lengths=lengths,
            num_taps=TAPS,
            hidden_size=HIDDEN,
            storage_dtype="float32",
            store_final=rows[0].final_TH is not None,
            attributes={},
        )
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    index = [
        Row(
            id=f"row{i}",
            category="maths",
            split="train" if i < len(rows) - validation else "validation",
            bucket=int(length > 30),
            length=length,
            num_supervised=int(row.loss_mask_T.sum()),
            shard=0,
            start=starts[i],
        )._asdict()
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]
    frozen_generator = torch.Generator().manual_seed(9)
    frozen = {
        name: torch.randn(VOCAB, HIDDEN, generator=frozen_generator)
        for name in ("embed_tokens.weight", "lm_head.weight")
    }
    with publish(key, summary={}, known=records_of(made())) as (folder, result):
        verifier = {"name": "small", "identity": "0" * 16, "dtype": "float32"}
        states = {"target_layer_ids": [1, 3], "storage_dtype": "float32", "verifier": verifier}
        states |= {"chat": {"template_sha256": None, "options": {}}, "on_policy_share": 1.0}
        states |= {"logits": {"scale": 1.0, "softcap": None}}
        _write(folder, "states.json", states)
        _write(folder, "verifier_config.json", VERIFIER)
        save_file(frozen, folder / "verifier.safetensors")
        pl.DataFrame(index).write_parquet(folder / "index.parquet")
    return result()


def _write(folder: Path, name: str, content: dict) -> None:
    (folder / name).write_text(json.dumps(content))


def make_config(**changes: object) -> TrainingConfig:
    settings: dict = {
        "mask_token_id": MASK,
        "block_size": 5,
        "num_layers": 1,
        "num_anchors": 6,
        "learning_rate": 3e-3,
        "epochs": 3,
        "max_tokens_per_batch": 80,
        "dtype": "float32",
        "tree_budget": 4,
        "validate_every": 8,
        "save_every": 3,
        "log_every": 2,
        "device": "cpu",
        "tracking": "disabled",
    }
    return TrainingConfig(**settings | changes)


LENGTHS = [20, 24, 28, 36, 40, 22, 26, 38, 34, 30, 25, 33]
