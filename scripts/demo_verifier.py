"""Train the bundled demo verifier: a 2.7 M parameter Qwen3 that answers grade-school maths questions.

    python scripts/demo_verifier.py GSM8K_TRAIN.jsonl dflash/assets/demo_verifier

GSM8K_TRAIN.jsonl is `train.jsonl` of https://github.com/openai/grade-school-math (MIT): rows of `question`, `answer`.
Everything is seeded. It takes about an hour on one core and writes a plain Transformers folder in
bfloat16 (about 6 MB).
"""

import argparse
import copy
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own (arithmetic is easier to learn that way)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, mask_token=MASK)
    fast.add_special_tokens({"additional_special_tokens": [START]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def batches(rows: list[list[int]], *, batch_size: int, rng: random.Random) -> list[list[list[int]]]:
    """Rows of similar length together, batches in random order."""
    order = sorted(rows, key=lambda row: (len(row) + rng.randint(0, 16), rng.random()))
    groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rng.shuffle(groups)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    pairs = [json.loads(line) for line in args.data.read_text().splitlines()]
    tokenizer = train_tokenizer([f"{p['question']}\n{p['answer']}" for p in pairs], vocab_size=2048)
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p["question"]}, {"role": "assistant", "content": p["answer"]}],
            tokenize=True,
        )["input_ids"]
        for p in pairs
    ]
    rows = [row for row in rows if len(row) <= 448]
    print(f"{len(rows)} rows of {sum(map(len, rows)) / len(rows):.0f} tokens on average, vocabulary {len(tokenizer)}")

    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        rope_theta=10_000.0, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    def lr_at(step: int) -> float:
        if step < 50:
            return (step + 1) / 50
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - 50) / (args.steps - 50)))

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at) for optimizer in optimizers]
    model.train()
    step, t0, queue = 0, time.time(), []
    while step < args.steps:
        queue = queue or batches(rows, batch_size=args.batch_size, rng=rng)
        batch = queue.pop()
        longest = max(map(len, batch))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}  {(time.time() - t0) / step:.2f} s/step", flush=True)
        if step % 400 == 0 or step == args.steps:
            copy.deepcopy(model).to(torch.bfloat16).save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
