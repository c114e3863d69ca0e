"""Generation stage: the verifier answers the prompts greedily, and the token ids it served are kept as they are.

Knows prompts, batches and how to continue; not how a token is chosen (`verifier.py`), nor what the answers are for.
"""

import logging
import shutil
from collections import Counter
from io import BytesIO
from pathlib import Path

import polars as pl

from dflash.bundled import resolve
from dflash.config import GenerationConfig
from dflash.corpus.chat import render_prompt
from dflash.corpus.conversations import Prompt, canonical_json, read_prompts
from dflash.keys import generation_key
from dflash.manifests import Artifact, Progress, in_progress, publish, silent, write_atomically
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier

log = logging.getLogger(__name__)

SCHEMA = pl.Schema(
    {
        "id": pl.String(),
        "category": pl.String(),
        "messages": pl.String(),
        "prompt_ids": pl.List(pl.Int32()),
        "response_ids": pl.List(pl.Int32()),
        "finish_reason": pl.String(),
    }
)


def generate(config: GenerationConfig, verifier: PinnedVerifier, *, progress: Progress = silent) -> Artifact:
    """Answer the prompts; `conversations.parquet` has a row for each, ordered by id.

    Finished batches are kept until the artifact is published, and an interrupted run continues after them.
    Raises ValueError for prompt files that cannot be read, and where every prompt is too long.
    """
    key = generation_key(config, verifier)
    prompts = read_prompts([resolve(name) for name in config.prompts], limit=config.max_prompts)
    loaded = load_verifier(verifier)
    rendered = [(p, render_prompt(loaded.tokenizer, p.messages, place=p.source)) for p in prompts]
    kept = [(p, ids) for p, ids in rendered if len(ids) <= config.max_prompt_tokens]
    num_long = len(rendered) - len(kept)
    log.info("%d prompts kept, %d longer than %d tokens dropped", len(kept), num_long, config.max_prompt_tokens)
    if not kept:
        raise ValueError(
            f"{prompts[0].source}: all {len(prompts)} prompts from here on are longer than max_prompt_tokens "
            f"{config.max_prompt_tokens} (the shortest has {min(len(ids) for _, ids in rendered)}); raise it"
        )

    finished = in_progress(key)
    _answer(
        kept,
        verifier=loaded,
        folder=finished,
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        progress=progress,
    )
    rows = pl.concat([pl.read_parquet(path) for path in _batches(finished)]).sort("id")
    summary = {
        "rows": rows.height,
        "tokens": int(rows["response_ids"].list.len().sum()),
        "prompt_tokens": int(rows["prompt_ids"].list.len().sum()),
        "dropped": {"prompt_too_long": num_long},
        "finish": dict(sorted(Counter(rows["finish_reason"]).items())),
    }
    log.info("%(rows)d responses of %(tokens)d tokens, finish %(finish)s", summary)
    with publish(key, summary=summary, content_identity=True) as (folder, artifact):
        rows.write_parquet(folder / "conversations.parquet")
    shutil.rmtree(finished)
    return artifact()


def _batches(folder: Path) -> list[Path]:
    return sorted(folder.glob("batch-*.parquet"))


def _answer(
    prompts: list[tuple[Prompt, list[int]]],
    *,
    verifier: Verifier,
    folder: Path,
    batch_size: int,
    max_new_tokens: int,
    progress: Progress,
) -> None:
    """Answer what the batches in `folder` have not answered yet, adding one file per batch."""
    # By id, not by batch number: the batch size may have been changed in between.
    answered = {id for path in _batches(folder) for id in pl.read_parquet(path, columns=["id"])["id"]}
    if answered:
        log.info("%d of %d prompts were answered before the interruption", len(answered), len(prompts))
    # Similar lengths together pad least; the longest first, so that too little memory shows at once.
    todo = sorted((p for p in prompts if p[0].id not in answered), key=lambda p: (-len(p[1]), p[0].id))
    num_files, tokens = len(_batches(folder)), 0
    for start in range(0, len(todo), batch_size):
        batch = todo[start : start + batch_size]
        responses = verifier.generate([ids for _, ids in batch], max_new_tokens=max_new_tokens)
        rows = []
        for (prompt, ids), response in zip(batch, responses, strict=True):
            answer = verifier.tokenizer.decode(response.ids, skip_special_tokens=True)
            messages = canonical_json([*prompt.messages, {"role": "assistant", "content": answer}])
            rows.append((prompt.id, prompt.category, messages, ids, response.ids, response.finish_reason))
            tokens += len(response.ids)
        parquet = BytesIO()
        pl.DataFrame(rows, schema=SCHEMA, orient="row").write_parquet(parquet)
        # whole or not at all: what a killed run leaves behind is trusted by the next
        write_atomically(folder / f"batch-{num_files:05d}.parquet", parquet.getvalue())
        num_files += 1
        progress(len(answered) + start + len(batch), len(prompts), f"{tokens:,} tokens")
