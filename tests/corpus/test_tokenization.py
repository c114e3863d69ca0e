from collections.abc import Sequence

import polars as pl
import pytest

from dflash.config import TokenizationConfig
from dflash.corpus.generation import SCHEMA
from dflash.corpus.tokenization import COLUMNS, split_of, tokenize
from dflash.keys import tokenization_key
from dflash.manifests import Artifact, Key, find, publish, text_sha256
from dflash.pinning import PinnedVerifier

Row = tuple[list[int], list[int]]  # prompt ids, response ids


def served(rows: Sequence[Row]) -> Artifact:
    """A generation artifact that holds these rows."""
    frame = pl.DataFrame(
        [(text_sha256(str(i))[:16], "c", "[]", prompt, response, "stop") for i, (prompt, response) in enumerate(rows)],
        schema=SCHEMA,
        orient="row",
    ).sort("id")
    key = Key(stage="generation", recipe=1, config={}, inputs={"rows": text_sha256(str(rows))})
    with publish(key, summary={}, content_identity=True) as (folder, artifact):
        frame.write_parquet(folder / "conversations.parquet")
    return artifact()


def corpus(artifact: Artifact) -> pl.DataFrame:
    return pl.read_parquet(artifact.path / "corpus.parquet")


ROWS: list[Row] = [(list(range(1, 3 + i % 5)), list(range(100, 104 + i % 7))) for i in range(60)]
PLAIN = TokenizationConfig(validation_share=0, num_buckets=1)


def test_rows_are_the_served_ids_with_the_response_supervised(verifier: PinnedVerifier):
    artifact = tokenize(PLAIN, served(ROWS), verifier)
    rows = corpus(artifact)
    assert rows.columns == COLUMNS
    assert [str(rows.schema[name]) for name in ("bucket", "input_ids", "loss_mask")] == [
        "Int32", "List(Int32)", "List(Boolean)"
    ]  # fmt: skip
    expected = {text_sha256(str(i))[:16]: row for i, row in enumerate(ROWS)}
    for row in rows.iter_rows(named=True):
        prompt, response = expected[row["id"]]
        assert row["input_ids"] == prompt + response
        assert row["loss_mask"] == [False] * len(prompt) + [True] * len(response)
        assert (row["length"], row["num_supervised"]) == (len(prompt + response), len(response))
    assert find(tokenization_key(PLAIN, served(ROWS), verifier), deep=True) == artifact


def test_long_rows_are_cut_and_rows_left_without_supervision_dropped(verifier: PinnedVerifier):
    config = PLAIN.model_copy(update={"max_length": 6, "min_supervised": 2})
    rows: list[Row] = [
        ([1] * 3, [2] * 3),  # fits
        ([1] * 3, [2] * 9),  # cut to 3 supervised tokens
        ([1] * 4, [2] * 9),  # cut to 2
        ([1] * 5, [2] * 9),  # cut to 1: dropped
        ([1] * 9, [2] * 9),  # the prompt alone fills the row: dropped
        ([1] * 3, [2] * 1),  # too short an answer: dropped
        ([1] * 3, []),  # no answer: dropped
    ]
    artifact = tokenize(config, served(rows), verifier)
    assert sorted(corpus(artifact)["loss_mask"].list.sum()) == [2, 3, 3]
    assert sorted(corpus(artifact)["length"]) == [6, 6, 6]
    assert artifact.summary["rows_in"] == 7 == artifact.summary["rows"] + sum(artifact.summary["dropped"].values())
    assert artifact.summary["dropped"] == {"too_few_supervised": 4}
    assert artifact.summary["truncated"] == 2


def test_rows_lie_by_bucket_and_id_and_the_summary_adds_up(verifier: PinnedVerifier):
    config = TokenizationConfig(validation_share=0.2, num_buckets=6)
    artifact = tokenize(config, served(ROWS), verifier)
    rows, summary = corpus(artifact), artifact.summary
    assert rows.select("bucket", "id").rows() == sorted(rows.select("bucket", "id").rows())
    assert summary["tokens"] == sum(map(len, rows["input_ids"])) == sum(b["tokens"] for b in summary["buckets"])
    assert summary["supervised"] == sum(map(sum, rows["loss_mask"]))
    assert summary["splits"] == {split: rows.filter(split=split).height for split in ("train", "validation")}
    assert len(summary["edges"]) + 1 == len(summary["buckets"]) == rows["bucket"].n_unique() > 1
    for bucket, previous in zip(summary["buckets"][1:], summary["buckets"], strict=False):
        assert bucket["shortest"] > previous["longest"]
        padded = bucket["rows"] * bucket["longest"]
        assert bucket["padding_share"] == pytest.approx(1 - bucket["tokens"] / padded, abs=1e-4)


def test_equal_conversations_give_equal_bytes(verifier: PinnedVerifier):
    config = TokenizationConfig(validation_share=0.2)
    one = tokenize(config, served(ROWS), verifier)
    content = (one.path / "corpus.parquet").read_bytes()
    assert tokenize(config, served(ROWS), verifier).identity == one.identity
    assert (one.path / "corpus.parquet").read_bytes() == content


def test_no_conversation_changes_sides_when_data_is_added(verifier: PinnedVerifier):
    config = TokenizationConfig(validation_share=0.2)
    few = corpus(tokenize(config, served(ROWS[:30]), verifier))
    many = corpus(tokenize(config, served(ROWS), verifier))
    before = dict(few.select("id", "split").iter_rows())
    after = dict(many.select("id", "split").iter_rows())
    assert before.items() <= after.items()


def test_a_larger_share_only_adds_to_validation():
    ids = [text_sha256(str(i))[:16] for i in range(4000)]
    small, large = ({id for id in ids if split_of(id, validation_share=s) == "validation"} for s in (0.02, 0.1))
    assert small < large
    assert len(large) == pytest.approx(400, abs=60)


def test_no_supervised_tokens_at_all_is_refused(verifier: PinnedVerifier):
    conversations = served([([1, 2], [3]), ([1, 2], [])])
    with pytest.raises(
        ValueError, match=r"conversations.parquet: no supervised tokens at all: each of 2 rows .*; let the"
    ):
        tokenize(PLAIN, conversations, verifier)
    assert find(tokenization_key(PLAIN, conversations, verifier)) is None


def test_a_split_that_stays_empty_is_said_and_a_corpus_without_training_rows_refused(
    verifier: PinnedVerifier, caplog: pytest.LogCaptureFixture
):
    tokenize(TokenizationConfig(validation_share=1e-9), served(ROWS), verifier)
    assert "none of 60 rows fell into validation_share 1e-09" in caplog.text
    with pytest.raises(ValueError, match="leaves none of 1 rows for training; lower it"):
        tokenize(TokenizationConfig(validation_share=1 - 1e-9), served(ROWS[:1]), verifier)
