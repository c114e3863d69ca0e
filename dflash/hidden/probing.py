"""How long an extraction will take: one batch of its longest rows, timed. Lack of memory shows there, too.

B batch, T tokens
"""

import time
from collections.abc import Sequence

import polars as pl
import torch

from dflash.config import ExtractionConfig
from dflash.hidden import extraction
from dflash.hidden.planning import ShardPlan
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier, tap_layers

SHARE = 20  # a probe takes at most this part of the work, so that small works do not wait for their estimate


def seconds_per_token(
    plans: Sequence[ShardPlan], config: ExtractionConfig, corpus: Artifact, verifier: PinnedVerifier
) -> float:
    """Of the verifier's pass over the longest rows of these shards, which is the slowest: writing goes on beside it."""
    file = corpus.path / "corpus.parquet"
    lengths = pl.read_parquet(file, columns=["length"])["length"].to_list()
    rows = sorted((row for plan in plans for row in plan.rows), key=lambda row: (-lengths[row], row))
    loaded = extraction.loaded_verifier(verifier)  # the one that the shards made in this process will use
    budget = min(extraction.batch_tokens(config, loaded), sum(plan.tokens for plan in plans) // SHARE)
    rows = rows[: max(1, budget // lengths[rows[0]])]
    chosen = pl.scan_parquet(file).select("input_ids").with_row_index().filter(pl.col("index").is_in(rows)).collect()
    ids = [torch.tensor(values) for values in chosen["input_ids"].to_list()]
    padded_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    layers = tap_layers(verifier.num_layers, config.num_taps, config.target_layer_ids)

    def seconds(input_ids_BT: torch.Tensor) -> float:
        t0 = time.perf_counter()
        outputs = loaded.forward(
            input_ids_BT, layers=layers, greedy=config.greedy, final=config.store_final, top_k=config.top_k
        )
        for output in outputs:
            output.cpu()
        return time.perf_counter() - t0

    seconds(padded_BT[:1, :8])  # a process's first pass is slower than the others
    return seconds(padded_BT) / sum(map(len, ids))
