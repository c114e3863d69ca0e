import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from dflash.config import GenerationConfig
from dflash.corpus.conversations import read_prompts
from dflash.corpus.generation import SCHEMA, generate
from dflash.keys import generation_key
from dflash.manifests import Artifact, find, home
from dflash.pinning import PinnedVerifier
from dflash.verifier import load_verifier

WriteFile = Callable[..., Path]


@pytest.fixture
def config(prompt_file: WriteFile) -> GenerationConfig:
    lines = [json.dumps({"prompt": "How many " + "apples " * n, "category": f"c{n % 2}"}) for n in range(1, 8)]
    return GenerationConfig(prompts=[str(prompt_file(*lines))], max_new_tokens=6, batch_size=3)


def conversations(artifact: Artifact) -> pl.DataFrame:
    return pl.read_parquet(artifact.path / "conversations.parquet")


def test_each_prompt_is_answered_as_the_verifier_answers_it_alone(config: GenerationConfig, verifier: PinnedVerifier):
    artifact = generate(config, verifier)
    rows = conversations(artifact)
    assert rows.schema == SCHEMA
    assert rows["id"].to_list() == sorted(p.id for p in read_prompts([Path(config.prompts[0])], limit=0))
    loaded = load_verifier(verifier)
    for row in rows.iter_rows(named=True):
        [alone] = loaded.generate([row["prompt_ids"]], max_new_tokens=6)
        assert (row["response_ids"], row["finish_reason"]) == (alone.ids, alone.finish_reason)
        *prompt, answer = json.loads(row["messages"])
        text = loaded.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert loaded.tokenizer.decode(row["prompt_ids"]) == text
        answer_text = loaded.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert answer == {"role": "assistant", "content": answer_text}
    assert artifact.summary == {
        "rows": 7,
        "tokens": sum(map(len, rows["response_ids"])),
        "prompt_tokens": sum(map(len, rows["prompt_ids"])),
        "dropped": {"prompt_too_long": 0},
        "finish": dict(sorted(rows["finish_reason"].value_counts().iter_rows())),
    }


def test_the_artifact_is_found_by_its_key_and_nothing_is_left_in_progress(
    config: GenerationConfig, verifier: PinnedVerifier
):
    artifact = generate(config, verifier)
    assert find(generation_key(config, verifier), deep=True) == artifact
    assert list((home() / "in_progress").iterdir()) == []


def test_bytes_and_identity_do_not_depend_on_the_batch_size(config: GenerationConfig, verifier: PinnedVerifier):
    one = generate(config, verifier)
    content = (one.path / "conversations.parquet").read_bytes()
    other = generate(config.model_copy(update={"batch_size": 7}), verifier)
    assert other.key == one.key
    assert other.identity == one.identity
    assert (other.path / "conversations.parquet").read_bytes() == content


@pytest.mark.parametrize("batch_size", [3, 2])
def test_an_interrupted_run_continues_after_its_finished_batches(
    config: GenerationConfig, verifier: PinnedVerifier, batch_size: int
):
    whole = generate(config, verifier)

    def interrupt(done: float, total: float, note: str = "") -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(config, verifier, progress=interrupt)
    [batch] = (home() / "in_progress" / whole.key).iterdir()
    torn = batch.with_name(".batch-00001.parquet")  # what a kill in the middle of writing leaves
    torn.write_bytes(b"PAR1")
    seen: list[tuple[float, float]] = []
    resumed = generate(
        config.model_copy(update={"batch_size": batch_size}),
        verifier,
        progress=lambda done, total, note="": seen.append((done, total)),  # noqa: ARG005
    )
    assert resumed.identity == whole.identity
    assert seen[0] == (3 + batch_size, 7)
    assert seen[-1] == (7, 7)


def test_long_prompts_are_dropped_and_counted(config: GenerationConfig, verifier: PinnedVerifier):
    longest = conversations(generate(config, verifier))["prompt_ids"].list.len().max()
    assert isinstance(longest, int)
    artifact = generate(config.model_copy(update={"max_prompt_tokens": longest - 1}), verifier)
    assert artifact.summary["rows"] == 6
    assert artifact.summary["dropped"] == {"prompt_too_long": 1}


def test_only_too_long_prompts_are_refused(config: GenerationConfig, verifier: PinnedVerifier):
    config = config.model_copy(update={"max_prompt_tokens": 3})
    with pytest.raises(
        ValueError, match=r"prompts.jsonl:1: all 7 prompts .* max_prompt_tokens 3 \(the shortest has \d+"
    ):
        generate(config, verifier)
    assert find(generation_key(config, verifier)) is None
    assert not (home() / "in_progress").exists()


def test_bad_prompts_leave_nothing_behind(prompt_file: WriteFile, verifier: PinnedVerifier):
    path = prompt_file('{"prompt": "Why?"}', '{"prompt": ')
    with pytest.raises(ValueError, match=r"prompts.jsonl:2: malformed JSON"):
        generate(GenerationConfig(prompts=[str(path)]), verifier)
    assert not (home() / "artifacts").exists()
    assert not (home() / "in_progress").exists()


def test_a_missing_prompt_file_is_named(verifier: PinnedVerifier, tmp_path: Path):
    with pytest.raises(ValueError, match=r"nowhere.jsonl: no such prompt file; give"):
        generate(GenerationConfig(prompts=[str(tmp_path / "nowhere.jsonl")]), verifier)
