"""A data root of its own for each test, and a tiny but real verifier: random weights, byte-level BPE, chat template."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash.config import VerifierConfig
from dflash.pinning import PinnedVerifier, pin

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def data_root(home: Path) -> Path:
    return home


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[PAD, START, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(["How many apples are left? Two and two are four."], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=END, name_or_path="tiny")
    fast.add_special_tokens({"additional_special_tokens": [START]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def verifier_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("verifier")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def verifier(verifier_folder: Path) -> PinnedVerifier:
    return pin(VerifierConfig(model=str(verifier_folder), dtype="float32", device="cpu"))


@pytest.fixture
def prompt_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines to a JSONL file and returns its path."""

    def write(*lines: str, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write
