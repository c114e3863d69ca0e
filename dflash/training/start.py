"""A drafter before its first step, with its optimizers. Knows the configuration and, for its layers, the verifier.

U draft vocabulary
"""

import torch
from torch import Tensor

from dflash.config import TrainingConfig
from dflash.drafter.initialisation import initialise
from dflash.drafter.model import Drafter
from dflash.drafter.vocabulary import choose_tokens
from dflash.hidden.store import HiddenStates
from dflash.pinning import PinnedVerifier, as_ids, num_tokens
from dflash.training.data import label_counts
from dflash.training.optimizers import make_optimizers
from dflash.training.planning import drafter_config
from dflash.training.ranks import Ranks, shard
from dflash.training.schedules import derived_seed
from dflash.training.state import State


def new_state(
    config: TrainingConfig, store: HiddenStates, ranks: Ranks, *, verifier: PinnedVerifier | None, continued: bool
) -> State:
    """A drafter as it starts, with its optimizers, held as the configuration says. One to be `continued` is new."""
    shape = drafter_config(config, store.verifier_config, target_layer_ids=store.info["target_layer_ids"])
    drafter = Drafter(shape, generator=torch.Generator().manual_seed(derived_seed(config.seed)))
    if ranks.first and not continued:
        layers = layers_of(verifier, config.num_layers) if config.initialisation == "verifier" else None
        initialise(drafter, config.initialisation, verifier_layers=layers)
        if config.draft_vocab_size:
            drafter.keep(draft_vocabulary(config, store, verifier))
    drafter = drafter.to(ranks.device)
    ranks.spread(drafter.state_dict().values())
    if config.parallel == "fsdp" and ranks.world > 1:
        shard(drafter, ranks, dtype=getattr(torch, config.dtype))
    optimizers = make_optimizers(
        drafter,
        kind=config.optimizer,
        learning_rate=config.learning_rate,
        muon_learning_rate=config.muon_learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
    parameters = drafter.named_parameters() if config.ema else ()
    return State(drafter, optimizers, average={name: weight.detach().clone() for name, weight in parameters})


def draft_vocabulary(config: TrainingConfig, store: HiddenStates, verifier: PinnedVerifier | None) -> Tensor:
    """(U,) the ids that can be drafted: of the most frequent labels of the training rows, and mask and end tokens."""
    text = store.verifier_config.get("text_config", store.verifier_config)
    end_ids = verifier.special_ids["eos"] if verifier else as_ids(text.get("eos_token_id"))
    train_rows = [number for number, row in enumerate(store.rows) if row.split == "train"]
    return choose_tokens(
        label_counts(store, train_rows, labels=config.labels, vocab_size=text["vocab_size"]),
        size=config.draft_vocab_size,
        always={config.mask_token_id, *end_ids},
        num_tokens=num_tokens(verifier) if verifier else text["vocab_size"],
    )


def layers_of(verifier: PinnedVerifier | None, count: int) -> dict[str, Tensor]:
    """The verifier's last layers, for a drafter to start from. It is loaded for that, on the CPU, and let go."""
    if verifier is None:
        raise ValueError("training.initialisation: verifier needs the verifier itself; train in its pipeline")
    from dflash.last_layers import last_layers  # these load Transformers, which other starts do without
    from dflash.verifier import load_verifier

    return last_layers(load_verifier(verifier.model_copy(update={"device": "cpu", "device_map": ""})), count)
