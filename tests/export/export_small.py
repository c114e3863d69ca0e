"""A drafter of the bundled verifier as the pipeline publishes it, with everything that it was made from."""

import json
from pathlib import Path

import torch

from dflash.bundled import resolve
from dflash.config import (
    EvaluationConfig,
    ExtractionConfig,
    GenerationConfig,
    SourceConfig,
    TokenizationConfig,
    TrainingConfig,
    VerifierConfig,
)
from dflash.corpus.tokenization import tokenize
from dflash.decoding.evaluation import evaluate
from dflash.decoding.parity import REFERENCE, remember
from dflash.drafter.export import save_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.hidden.extraction import extract_shard, plan_shards, seal
from dflash.hidden.store import HiddenStates
from dflash.keys import training_key
from dflash.manifests import Artifact, publish
from dflash.pinning import pin
from tests.answered import answered

LAYERS = [1, 3]


class Made:
    """Eight prompts of two categories, their hidden states, and drafters with random weights."""

    def __init__(self, folder: Path) -> None:
        lines = resolve("bundled:evaluation").read_text().splitlines()
        rows = [line for line in lines if json.loads(line)["category"] in ("gsm8k", "writing")]
        prompts = folder / "maths.jsonl"
        prompts.write_text("\n".join(rows[:6]) + "\n")
        self.sources = [SourceConfig(path=str(prompts))]
        self.verifier = pin(VerifierConfig(model="bundled:demo-verifier", dtype="float32", device="cpu"))
        generation = GenerationConfig(prompts=self.sources, max_new_tokens=16)
        conversations = answered(generation, self.verifier)[1]
        tokenization = TokenizationConfig(validation_share=0, min_supervised=1, num_buckets=1)
        corpus = tokenize(tokenization, conversations, self.verifier)
        extraction = ExtractionConfig(target_layer_ids=LAYERS, storage_dtype="float32")
        shards = [
            extract_shard(plan, extraction, corpus, self.verifier)
            for plan in plan_shards(extraction, corpus, self.verifier)
        ]
        self.hidden_states = seal(shards, extraction, corpus, self.verifier)
        self.store = HiddenStates.open(self.hidden_states.path)

    def drafter(
        self,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        remembered: bool = False,
        scale: float = 1,
        **shape: object,
    ) -> Artifact:
        """As training publishes it; `remembered`: with what it drafted; `scale` makes weights larger."""
        settings = {"block_size": 5, "num_layers": 2, "mask_token_id": 3, "target_layer_ids": LAYERS} | shape
        config = DrafterConfig.from_verifier(self.store.verifier_config, **settings)  # type: ignore[arg-type]
        drafter = Drafter(config, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for parameter in drafter.parameters():  # norms too, so that each path shows
            parameter.data += torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.2 * scale
        head_UH = None
        if config.draft_vocab_size:
            drafter.keep(3 * torch.arange(config.draft_vocab_size))
            head_UH = self.store.frozen()["embed_tokens.weight"][drafter.kept_U]
        key = training_key(TrainingConfig(mask_token_id=3, block_size=5, seed=seed), self.hidden_states)
        summary = {
            "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
            "rows": 6,
            "verifier": self.store.info["verifier"],
            "chat": self.store.info["chat"],
            "on_policy_share": 1.0,
        }
        with publish(key, summary=summary) as (folder, artifact):
            save_drafter(folder, drafter, head_UH=head_UH)
            if remembered:
                rows, ends = [self.store.read(row) for row in range(2)], Ends(self.store.frozen(), dtype=dtype)
                remember(folder / REFERENCE, drafter=drafter, ends=ends, rows=rows, storage_dtype="float32")
        return artifact()

    def report(self, drafter: Artifact, *, parity: str = "on", budget: int = 4) -> Artifact:
        config = EvaluationConfig(prompts=self.sources, budgets=[budget], live_prompts=0, parity=parity)  # type: ignore[arg-type]
        return evaluate(config, drafter, self.hidden_states, self.verifier)
