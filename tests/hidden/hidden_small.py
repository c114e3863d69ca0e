"""A tiny real verifier and a corpus of random rows, for the tests of hidden states."""

import random
from pathlib import Path

import polars as pl
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash.config import VerifierConfig
from dflash.manifests import Artifact, Key, publish
from dflash.pinning import PinnedVerifier, pin

VOCABULARY = 53


def save_verifier(folder: Path, *, tied: bool = True, eos: int = 2, num_layers: int = 4) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=eos, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w2").save_pretrained(folder)
    return folder


def pinned(folder: Path, *, dtype: str = "float32") -> PinnedVerifier:
    return pin(VerifierConfig.model_validate({"model": str(folder), "dtype": dtype, "device": "cpu"}))


def make_corpus(lengths: list[int], *, seed: int = 0) -> Artifact:
    """A tokenization artifact of two buckets with random ids; the second half of each row is supervised."""
    rng = random.Random(seed)
    rows = [
        {
            "id": f"row{i:02d}",
            "category": "maths" if i % 2 else "talk",
            "split": "validation" if i == 1 else "train",
            "bucket": int(length > 12),
            "length": length,
            "num_supervised": length - length // 2,
            "input_ids": [rng.randrange(1, VOCABULARY) for _ in range(length)],
            "loss_mask": [t >= length // 2 for t in range(length)],
        }
        for i, length in enumerate(lengths)
    ]
    types = {"bucket": pl.Int32, "length": pl.Int32, "num_supervised": pl.Int32, "input_ids": pl.List(pl.Int32)}
    frame = pl.DataFrame(rows, schema_overrides=types).sort("bucket", "id")
    key = Key(stage="tokenization", recipe=1, config={"seed": seed, "lengths": lengths}, inputs={})
    with publish(key, summary={"tokens": sum(lengths), "chat": {}}, content_identity=True) as (folder, artifact):
        frame.write_parquet(folder / "corpus.parquet")
    return artifact()


def flip_a_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
