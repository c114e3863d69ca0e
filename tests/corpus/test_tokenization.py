import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dflash.config import TokenizationConfig
from dflash.corpus import tokenization
from dflash.corpus.generation import SCHEMA
from dflash.corpus.records import TooManyDropped, canonical_json
from dflash.corpus.tokenization import CORPUS, split_of, tokenize
from dflash.keys import tokenization_key
from dflash.manifests import Artifact, Key, find, publish, text_sha256
from dflash.pinning import PinnedVerifier

Row = dict[str, Any]


def identified(id: str, **columns: Any) -> Row:
    given = {"id": id, "group": id, "category": "c", "origin": "data.jsonl", "source": f"data.jsonl:{id}"}
    return dict.fromkeys(SCHEMA) | given | columns


def answered(id: str, *turns: tuple[list[int], list[int]], **columns: Any) -> list[Row]:
    """A conversation that the verifier answered: (prompt ids, response ids) of each turn."""
    served = {"messages": "[]", "finish_reason": "stop", "ids_from": "served"} | columns
    return [
        identified(id, turn=turn, prompt_ids=prompt, response_ids=response, **served)
        for turn, (prompt, response) in enumerate(turns)
    ]


def kept(id: str, *texts: str, **columns: Any) -> Row:
    """A conversation with answers of its own: texts of user and assistant by turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return identified(id, messages=canonical_json(messages), **columns)


def sealed(rows: Sequence[Row]) -> Artifact:
    """A generation artifact that holds these rows."""
    key = Key(stage="generation", recipe=1, config={}, inputs={"rows": text_sha256(json.dumps(rows))})
    with publish(key, summary={}, content_identity=True) as (folder, artifact):
        pl.DataFrame(rows, schema=SCHEMA, orient="row").write_parquet(folder / "conversations.parquet")
    return artifact()


def corpus(artifact: Artifact) -> pl.DataFrame:
    return pl.read_parquet(artifact.path / "corpus.parquet")


def by_id(artifact: Artifact) -> dict[str, Row]:
    return {row["id"]: row for row in corpus(artifact).iter_rows(named=True)}


def supervised(row: Row) -> list[int]:
    return [id for id, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]


PAIRS = [(list(range(1, 3 + i % 5)), list(range(100, 104 + i % 7))) for i in range(60)]
ANSWERED = [row for i, pair in enumerate(PAIRS) for row in answered(text_sha256(str(i))[:16], pair)]
PLAIN = TokenizationConfig(validation_share=0, num_buckets=1, max_dropped_share=1)


def test_rows_are_the_served_ids_with_the_response_supervised(verifier: PinnedVerifier):
    artifact = tokenize(PLAIN, sealed(ANSWERED), verifier)
    assert corpus(artifact).schema == CORPUS
    assert list(by_id(artifact)) == [row["id"] for row in ANSWERED]  # one bucket: the order of the conversations
    for row, (prompt, response) in zip(by_id(artifact).values(), PAIRS, strict=True):
        assert row["input_ids"] == prompt + response
        assert row["loss_mask"] == [False] * len(prompt) + [True] * len(response)
        assert (row["length"], row["num_supervised"]) == (len(prompt + response), len(response))
    assert find(tokenization_key(PLAIN, sealed(ANSWERED), verifier), deep=True) == artifact


def test_served_turns_are_one_row_where_each_prompt_repeats_the_one_before(verifier: PinnedVerifier):
    grows = answered("grows", ([1, 2], [10, 11]), ([1, 2, 10, 11, 3], [12, 13]))
    rewrites = answered("rewrites", ([1, 2], [10, 11]), ([1, 2, 3], [12, 13]))
    conversations = sealed([*grows, *rewrites])
    merged = by_id(tokenize(PLAIN, conversations, verifier))
    assert list(merged) == ["grows", "rewrites#0", "rewrites#1"]
    assert supervised(merged["grows"]) == [10, 11, 12, 13]
    assert merged["rewrites#1"]["input_ids"] == [1, 2, 3, 12, 13]
    each = by_id(tokenize(PLAIN.model_copy(update={"turns": "each"}), conversations, verifier))
    assert list(each) == ["grows#0", "grows#1", "rewrites#0", "rewrites#1"]
    assert supervised(each["grows#1"]) == [12, 13]
    last = by_id(tokenize(PLAIN.model_copy(update={"turns": "last"}), conversations, verifier))
    assert {id: supervised(row) for id, row in last.items()} == {"grows#1": [12, 13], "rewrites#1": [12, 13]}


def test_kept_answers_are_rendered_and_only_they_are_supervised(verifier: PinnedVerifier, tokenizer: Any):
    artifact = tokenize(PLAIN, sealed([kept("k", "How many?", "Two apples", "And now?", "Four are left")]), verifier)
    row = by_id(artifact)["k"]
    whole = "<|start|>user\nHow many?<|end|><|start|>assistant\nTwo apples<|end|>"
    whole += "<|start|>user\nAnd now?<|end|><|start|>assistant\nFour are left<|end|>"
    assert tokenizer.decode(row["input_ids"]) == whole
    assert tokenizer.decode(supervised(row)) == "Two apples<|end|>Four are left<|end|>"
    assert artifact.summary["chat"]["options"] == {"system_prompt": "", "variables": {}}
    assert len(artifact.summary["chat"]["template_sha256"]) == 64


def test_raw_text_is_supervised_after_its_first_token(verifier: PinnedVerifier, tokenizer: Any):
    row = by_id(tokenize(PLAIN, sealed([identified("t", text="apples are left")]), verifier))["t"]
    assert row["input_ids"] == tokenizer("apples are left")["input_ids"]
    assert row["loss_mask"] == [False] + [True] * (row["length"] - 1)


def test_tokenised_rows_stay_as_they_are_and_ids_that_the_verifier_does_not_have_are_refused(verifier: PinnedVerifier):
    vocab = verifier.vocab_size
    rows = [
        identified("good", input_ids=[5, vocab - 1, 7, 0], loss_mask=[False, True, True, False]),
        identified("high", input_ids=[5, vocab, 7], loss_mask=[False, True, True]),
        identified("negative", input_ids=[5, -1, 7], loss_mask=[False, True, True]),
        identified("unsupervised", input_ids=[5, 6, 7], loss_mask=[False, False, False]),
    ]
    artifact = tokenize(PLAIN, sealed(rows), verifier)
    (row,) = by_id(artifact).values()
    assert (row["input_ids"], row["loss_mask"]) == (rows[0]["input_ids"], rows[0]["loss_mask"])
    assert artifact.summary["dropped"] == {"id_out_of_vocabulary": 2, "no_supervised": 1}
    with pytest.raises(TooManyDropped, match=rf"data.jsonl:high: id {vocab} is not in the verifier's vocabulary"):
        tokenize(PLAIN.model_copy(update={"max_dropped_share": 0.5}), sealed(rows), verifier)


def test_long_rows_are_cut_and_rows_without_a_legal_anchor_dropped(verifier: PinnedVerifier):
    pairs = [
        ([1] * 3, [2] * 3),  # fits
        ([1] * 3, [2] * 9),  # cut to 3 supervised tokens
        ([1] * 4, [2] * 9),  # cut to 2
        ([1] * 5, [2] * 9),  # cut to 1: dropped
        ([1] * 9, [2] * 9),  # the prompt alone fills the row: dropped
        ([1] * 3, [2] * 1),  # too short an answer: dropped
        ([1] * 3, []),  # no answer: dropped
    ]
    apart = identified("apart", input_ids=[1, 2, 3, 4, 5], loss_mask=[True, True, False, True, False])
    rows = [row for i, pair in enumerate(pairs) for row in answered(str(i), pair)]
    config = PLAIN.model_copy(update={"max_length": 6})
    artifact = tokenize(config, sealed([*rows, apart]), verifier)
    assert list(corpus(artifact)["loss_mask"].list.sum()) == [3, 3, 2]
    assert list(corpus(artifact)["length"]) == [6, 6, 6]
    assert artifact.summary["dropped"] == {"too_few_supervised": 4, "no_supervised": 1}
    assert artifact.summary["truncated"] == 2


def test_every_row_is_kept_or_dropped_with_a_reason_and_place(
    verifier: PinnedVerifier, caplog: pytest.LogCaptureFixture
):
    refused = identified("r", messages='[{"role":"user","content":"a"},{"role":"system","content":"b"},'
                         '{"role":"assistant","content":"c"}]', origin="other")  # fmt: skip
    rows = [*ANSWERED[:3], refused, *answered("short", ([1], [2])), kept("k", "How many?", "Two apples")]
    summary = tokenize(PLAIN, sealed(rows), verifier).summary
    assert (summary["rows_in"], summary["rows"]) == (6, 4)
    assert summary["dropped"] == {"template_error": 1, "too_few_supervised": 1}
    assert summary["sources"]["other"] == {"rows_in": 1, "rows": 0, "dropped": {"template_error": 1}}
    assert "1 rows dropped: template_error, first data.jsonl:r: " in caplog.text
    assert "system must come first" in caplog.text
    strict = PLAIN.model_copy(update={"max_dropped_share": 0.2})
    with pytest.raises(TooManyDropped, match=r"tokenization.max_dropped_share: 2 of 6 rows dropped, more than 0.2"):
        tokenize(strict, sealed(rows), verifier)
    with pytest.raises(TooManyDropped, match=r"1 of 1 rows dropped.*system must come first"):
        tokenize(PLAIN, sealed([refused]), verifier)
    assert find(tokenization_key(PLAIN, sealed([refused]), verifier)) is None
    assert not list((Path(os.environ["DFLASH_HOME"]) / "artifacts" / "tokenization").glob(".*"))


@pytest.mark.parametrize("bucketing", ["optimal", "quantile"])
def test_rows_lie_by_bucket_in_the_order_of_the_conversations_and_the_summary_adds_up(
    verifier: PinnedVerifier, bucketing: str
):
    config = TokenizationConfig(validation_share=0.2, num_buckets=4, bucketing=bucketing)
    artifact = tokenize(config, sealed(ANSWERED), verifier)
    rows, summary = corpus(artifact), artifact.summary
    place = {row["id"]: i for i, row in enumerate(ANSWERED)}
    order = [(row["bucket"], place[row["id"]]) for row in rows.iter_rows(named=True)]
    assert order == sorted(order)
    assert summary["tokens"] == sum(map(len, rows["input_ids"])) == sum(b["tokens"] for b in summary["buckets"])
    assert summary["supervised"] == sum(map(sum, rows["loss_mask"]))
    assert summary["splits"] == {split: rows.filter(split=split).height for split in ("train", "validation")}
    assert len(summary["edges"]) + 1 == len(summary["buckets"]) == rows["bucket"].n_unique() > 1
    for bucket, previous in zip(summary["buckets"][1:], summary["buckets"], strict=False):
        assert bucket["shortest"] > previous["longest"]
        padded = bucket["rows"] * bucket["longest"]
        assert bucket["padding_share"] == pytest.approx(1 - bucket["tokens"] / padded, abs=1e-4)
    padded = sum(bucket["rows"] * bucket["longest"] for bucket in summary["buckets"])
    assert summary["padding_share"] == pytest.approx(1 - summary["tokens"] / padded, abs=1e-4)


def test_edges_that_are_given_are_the_longest_rows_of_their_buckets(verifier: PinnedVerifier):
    config = PLAIN.model_copy(update={"edges": [3, 8, 10]})
    artifact = tokenize(config, sealed(ANSWERED), verifier)
    assert [(b["bucket"], b["shortest"], b["longest"]) for b in artifact.summary["buckets"]] == [
        (1, 6, 8), (2, 9, 10), (3, 11, 16)
    ]  # fmt: skip
    assert artifact.summary["edges"] == [3, 8, 10]


def test_equal_conversations_give_equal_bytes_however_many_processes_and_slices(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
):
    rows = [kept(f"k{i}", "How many?", "apples " * (1 + i % 9)) for i in range(90)]
    conversations = sealed([*ANSWERED, *rows, *answered("two", PAIRS[0], PAIRS[1])])
    config = TokenizationConfig(validation_share=0.2, workers=1)
    monkeypatch.setattr(tokenization, "PART_ROWS", 40)
    one = tokenize(config, conversations, verifier)
    content = (one.path / "corpus.parquet").read_bytes()
    two = tokenize(config.model_copy(update={"workers": 2}), conversations, verifier)
    assert (two.path / "corpus.parquet").read_bytes() == content
    assert two == one
    monkeypatch.setattr(tokenization, "AT_ONCE", 7)
    assert tokenize(config, conversations, verifier) == one


def test_the_turns_of_a_conversation_stay_together_wherever_slices_are_cut(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
):
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7]), ([1, 2, 3, 4, 5, 6, 7, 8], [9, 9])]
    conversations = sealed([row for i in range(11) for row in answered(f"a{i}", *turns[: 1 + i % 3])])
    expected = tokenize(PLAIN, conversations, verifier)
    for size in range(1, 6):
        monkeypatch.setattr(tokenization, "PART_ROWS", size)
        monkeypatch.setattr(tokenization, "AT_ONCE", max(1, size - 1))
        assert corpus(tokenize(PLAIN, conversations, verifier)).equals(corpus(expected))


def test_no_conversation_changes_sides_when_data_is_added(verifier: PinnedVerifier):
    config = TokenizationConfig(validation_share=0.2)
    few = corpus(tokenize(config, sealed(ANSWERED[:30]), verifier))
    many = corpus(tokenize(config, sealed(ANSWERED), verifier))
    before = dict(few.select("id", "split").iter_rows())
    after = dict(many.select("id", "split").iter_rows())
    assert before.items() <= after.items()


def test_conversations_of_one_group_and_all_their_turns_are_on_one_side(verifier: PinnedVerifier):
    rows = [
        row
        for i in range(40)
        for version in "ab"
        for row in answered(f"{i}{version}", PAIRS[i], PAIRS[i + 1], group=f"g{i}")
    ]
    config = TokenizationConfig(validation_share=0.5, turns="each")
    sides: dict[str, set[str]] = {}
    for row in corpus(tokenize(config, sealed(rows), verifier)).iter_rows(named=True):
        sides.setdefault(row["id"].split("#")[0][:-1], set()).add(row["split"])
    assert len(sides) == 40
    assert {len(splits) for splits in sides.values()} == {1}
    assert set.union(*sides.values()) == {"train", "validation"}


def test_a_larger_share_only_adds_to_validation():
    groups = [text_sha256(str(i))[:16] for i in range(4000)]
    small, large = ({g for g in groups if split_of(g, validation_share=s) == "validation"} for s in (0.02, 0.1))
    assert small < large
    assert len(large) == pytest.approx(400, abs=60)


def test_no_supervised_tokens_at_all_is_refused(verifier: PinnedVerifier):
    conversations = sealed([*answered("a", ([1, 2], [3])), *answered("b", ([1, 2], []))])
    with pytest.raises(
        ValueError, match=r"conversations.parquet: no supervised tokens at all: each of 2 rows .*; let the"
    ):
        tokenize(PLAIN, conversations, verifier)
    assert find(tokenization_key(PLAIN, conversations, verifier)) is None


def test_a_split_that_stays_empty_is_said_and_a_corpus_without_training_rows_refused(
    verifier: PinnedVerifier, caplog: pytest.LogCaptureFixture
):
    tokenize(TokenizationConfig(validation_share=1e-9), sealed(ANSWERED), verifier)
    assert "none of 60 rows fell into validation_share 1e-09" in caplog.text
    with pytest.raises(ValueError, match="leaves none of 1 rows for training; lower it"):
        tokenize(TokenizationConfig(validation_share=1 - 1e-9), sealed(ANSWERED[:1]), verifier)


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_end_when_their_parent_is_killed(verifier: PinnedVerifier, tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
            import time
            from pathlib import Path
            from dflash.corpus.tokenization import _make_parts

            def wait(frame, path):
                print("busy", flush=True)
                time.sleep(600)

            if __name__ == "__main__":
                list(_make_parts(iter([1, 2]), wait, folder=Path(), workers=2))
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    assert "".join(parent.stdout.readline() for _ in range(2)).split() in (["busy"] * 2, ["busybusy"])
    workers = children_of(parent.pid)
    assert len(workers) >= 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
