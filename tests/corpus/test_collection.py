import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.config import GenerationConfig, SourceConfig
from dflash.corpus import collection
from dflash.corpus.collection import Seen, collect, contaminants_of, draw, peek
from dflash.corpus.conversations import words
from dflash.corpus.records import CONVERSATIONS
from dflash.manifests import Artifact, verify

WriteFile = Callable[..., Path]
ALPHABET = " ".join("abcdefghijklmnopqrstuvwxyz")


def asking(*questions: str, **columns: str) -> list[str]:
    return [json.dumps({"prompt": question} | columns) for question in questions]


def numbered(count: int, *, of: str = "number") -> list[str]:
    return asking(*(f"What is {of} {i}?" for i in range(count)))


def config(*sources: Any, **settings: Any) -> GenerationConfig:
    return GenerationConfig(prompts=[str(s) if isinstance(s, Path) else s for s in sources], **settings)


def collected(artifact: Artifact) -> pl.DataFrame:
    verify(artifact, deep=True)
    return pl.concat([pl.read_parquet(path) for path in sorted((artifact.path / "prompts").iterdir())])


def questions(artifact: Artifact) -> list[str]:
    return [json.loads(messages)[0]["content"] for messages in collected(artifact)["messages"]]


def test_rows_of_all_sources_come_out_in_order(prompt_file: WriteFile):
    one = prompt_file(*asking("A?", "B?"), name="one.jsonl")
    two = prompt_file(*asking("C?"), *asking("D?", category="qa"), name="two.jsonl")
    artifact = collect(config(one, {"path": str(two), "answers": "generate"}))
    rows = collected(artifact)
    assert rows.schema == CONVERSATIONS
    assert questions(artifact) == ["A?", "B?", "C?", "D?"]
    assert rows["category"].to_list() == ["one", "one", "two", "qa"]
    assert rows["origin"].to_list() == [str(one)] * 2 + [str(two)] * 2
    assert rows["source"].to_list() == [f"{one}:1", f"{one}:2", f"{two}:1", f"{two}:2"]
    assert artifact.stage == "prompts"
    assert artifact.summary["schemas"] == {str(one): {"prompt/response": 2}, str(two): {"prompt/response": 2}}


def test_a_source_names_the_category_of_all_its_rows(prompt_file: WriteFile):
    path = prompt_file(*asking("A?"), *asking("B?", category="qa"))
    assert collected(collect(config({"path": str(path), "category": "math"})))["category"].to_list() == ["math"] * 2


@pytest.mark.parametrize(("rows", "characters"), [(1, 1 << 26), (4, 1 << 26), (16_384, 1)])
@pytest.mark.parametrize("weight", [0, 3])
def test_what_is_collected_does_not_depend_on_how_much_is_in_memory(
    prompt_file: WriteFile, monkeypatch: pytest.MonkeyPatch, rows: int, characters: int, weight: int
):
    shuffled = numbered(12) * 3 + asking(*(f"WHAT is number {i}?" for i in range(12)))
    random.Random(0).shuffle(shuffled)
    one = prompt_file(*shuffled, name="one.jsonl")
    two = prompt_file(*numbered(6), "{", *numbered(9, of="letter"), name="two.jsonl")
    both = config({"path": str(one), "weight": weight and 1}, {"path": str(two), "weight": weight, "limit": 8})
    whole = collect(both)
    expected = collected(whole)
    assert expected.height == (2 + 8 if weight else 12 + 8)
    monkeypatch.setattr(collection, "PART_ROWS", rows)
    monkeypatch.setattr(collection, "PART_CHARACTERS", characters)
    parts = collect(both)
    assert collected(parts).equals(expected)
    assert parts.summary == whole.summary
    assert len(list((parts.path / "prompts").iterdir())) >= expected.height / 4


def test_every_row_is_kept_or_counted(prompt_file: WriteFile, caplog: pytest.LogCaptureFixture):
    one = prompt_file(*numbered(2), "{", *numbered(3), '{"prompt": " "}', name="one.jsonl")
    two = prompt_file(*numbered(4), "[1]", "", '{"x": 1}', name="two.jsonl")
    summary = collect(config(one, two, max_dropped_share=0.5)).summary
    assert summary["sources"] == {
        str(one): {"rows_in": 7, "rows": 3, "dropped": {"bad_json": 1, "duplicate": 2, "empty": 1}},
        str(two): {"rows_in": 6, "rows": 1, "dropped": {"duplicate": 3, "not_an_object": 1, "unknown_schema": 1}},
    }
    assert (summary["rows_in"], summary["rows"], sum(summary["dropped"].values())) == (13, 4, 9)
    [line] = [message for message in caplog.messages if message.startswith("bad_json")]
    assert line.startswith(f"bad_json: 1 rows dropped; the first: {one}:3: ")


def test_near_duplicates_differ_in_case_spaces_and_unicode_form_only(prompt_file: WriteFile):
    path = prompt_file(
        *asking("Why, café?", "why,\n CAFÉ ?".replace(" ?", "?"), "Why,  cafe\u0301? ", "Why, cafe?", "Why, café?")
    )
    kept = collect(config(path))
    assert questions(kept) == ["Why, café?", "Why, cafe?"]
    assert kept.summary["dropped"] == {"near_duplicate": 2, "duplicate": 1}
    assert collect(config(path, deduplicate="exact")).summary["dropped"] == {"duplicate": 1}


def test_conversations_that_join_to_one_text_are_no_duplicates(prompt_file: WriteFile):
    def two(first: str, second: str) -> str:
        return json.dumps({"turns": [first, second]})

    path = prompt_file(two("a b", "c"), two("a", "b c"), json.dumps({"prompt": "a b c"}))
    assert collect(config(path)).summary["rows"] == 3

    def pair(prompt: str, response: str) -> str:
        return json.dumps({"prompt": prompt, "response": response})

    path = prompt_file(pair("a", "bassistantc"), pair("aassistantb", "c"), pair("a b", "c"))
    assert collect(config({"path": str(path), "answers": "keep"})).summary["rows"] == 3


def test_repetitions_that_are_wanted_get_ids_of_their_own(prompt_file: WriteFile):
    one, two = prompt_file(*numbered(2), *numbered(2), name="one.jsonl"), prompt_file(*numbered(2), name="two.jsonl")
    rows = collected(collect(config(one, two, deduplicate="off")))
    assert rows.height == 6
    assert rows["id"].n_unique() == 6
    assert rows["group"].n_unique() == 2


def test_a_limit_counts_usable_distinct_rows_and_the_rest_is_not_read(prompt_file: WriteFile):
    one = prompt_file(*numbered(2), *numbered(2), "{", *numbered(9), name="one.jsonl")
    two = prompt_file(*numbered(5), name="two.jsonl")
    artifact = collect(config({"path": str(one), "limit": 4}, two))
    assert questions(artifact) == [f"What is number {i}?" for i in range(5)]
    # four of the first source are found in its row 9; what was never read cannot be repeated
    assert artifact.summary["sources"][str(one)]["rows_in"] == 9
    assert artifact.summary["sources"][str(two)] == {"rows_in": 5, "rows": 1, "dropped": {"duplicate": 4}}


def test_max_prompts_counts_over_all_sources(prompt_file: WriteFile):
    paths = [prompt_file(*numbered(3), *numbered(3, of=name), name=f"{name}.jsonl") for name in ("one", "two", "three")]
    artifact = collect(config(*paths, max_prompts=8))
    assert len(questions(artifact)) == 8
    assert list(artifact.summary["sources"]) == [str(path) for path in paths[:2]]


def test_weighted_sources_are_mixed_by_their_shares(prompt_file: WriteFile):
    one, two, rest = (prompt_file(*numbered(n, of=f"{n}"), name=f"{n}.jsonl") for n in (40, 30, 5))
    sources = [{"path": str(one), "weight": 0.7}, {"path": str(two), "weight": 0.3}, str(rest)]
    artifact = collect(config(*sources))
    kept = {name: source["rows"] for name, source in artifact.summary["sources"].items()}
    assert kept == {str(one): 40, str(two): 17, str(rest): 5}
    assert artifact.summary["dropped"] == {"not_drawn": 13}
    ids = collected(artifact).filter(pl.col("origin") == str(two))["id"]
    everything = collected(collect(config(two)))["id"]
    assert set(ids) == set(everything.sort().head(17))
    assert {path.name for path in artifact.path.iterdir()} == {"prompts", "manifest.json"}
    assert ids.to_list() == [id for id in everything if id in set(ids)], "in the order of the source"

    few = collect(config(*sources, max_prompts=15))
    assert {name: source["rows"] for name, source in few.summary["sources"].items()} == {
        str(one): 7, str(two): 3, str(rest): 5,
    }  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0, 0.1, 0.3, 0.7, 1, 2.5])), min_size=1, max_size=5),
    st.integers(0, 80),
)
def test_a_mix_is_the_largest_in_which_every_source_has_its_share(sizes: list[tuple[int, float]], most: int):
    generator = np.random.default_rng(0)
    hashes = [generator.integers(0, 2**64, size, np.uint64) for size, _ in sizes]
    weights = [weight for _, weight in sizes]
    drawn = draw(hashes, weights=weights, most=most) if any(weights) else []
    counts = [int(flags.sum()) for flags in drawn]
    weighted = [(count, size, weight) for count, (size, weight) in zip(counts, sizes, strict=False) if weight]
    for count, _, weight in weighted:
        for other, _, other_weight in weighted:
            assert (count + 1) * other_weight > other * weight - 1e-6, "shares differ by less than a row"
    if weighted and not most:
        assert any(count == size for count, size, _ in weighted), "no larger mix is possible"
        assert all(c == s for c, (s, w) in zip(counts, sizes, strict=True) if not w)
    if most:
        assert sum(counts) <= most
    for flags, found in zip(drawn, hashes, strict=False):
        if flags.any() and not flags.all() and not most:
            assert found[flags].max() < found[~flags].min()


def test_a_weighted_source_without_rows_is_refused(prompt_file: WriteFile):
    one, two = prompt_file(*numbered(9), name="one.jsonl"), prompt_file(*numbered(2), name="two.jsonl")
    with pytest.raises(ValueError, match=r"two.jsonl: has a weight but no row of its own to draw; leave this"):
        collect(config({"path": str(one), "weight": 1}, {"path": str(two), "weight": 1}))


LETTERS = st.lists(st.sampled_from("ab"), max_size=40).map(" ".join)


TURNS = st.lists(LETTERS, min_size=1, max_size=3)


@given(st.lists(TURNS, min_size=1, max_size=2), TURNS, st.integers(0, 30), st.integers(0, 30))
def test_contaminated_is_who_shares_13_words_or_the_whole_of_a_shorter_prompt_or_turn(
    evaluation: list[list[str]], prompt: list[str], start: int, end: int
):
    def grams(turns: list[str]) -> set[tuple[str, ...]]:
        found = tuple(words(" ".join(turns)))
        single = {tuple(words(turn)) for turn in turns if 5 <= len(words(turn)) < 13}
        return single | ({found[i : i + 13] for i in range(len(found) - 12)} or {found})

    part = " ".join(words(evaluation[0][0])[start:end])
    for turns in (prompt, [f"z {part} {prompt[0]}"], [part, *prompt]):
        shared = contaminants_of(evaluation).shared(turns)
        assert bool(shared) == any((grams(turns) & grams(other)) - {()} for other in evaluation)
        if shared:
            assert shared in " ".join(words(" ".join(turns)))


def test_a_short_evaluation_turn_is_found_in_a_longer_conversation_and_the_other_way_round():
    def shared(evaluation: list[str], training: list[str]) -> str:
        return contaminants_of([evaluation]).shared(training)

    asked = "How many apples are left?"
    assert shared([asked], ["Hello!", "how many APPLES are left", ALPHABET]) == "how many apples are left"
    assert shared(["Hello!", asked], [asked])
    assert shared(["Continue."], ["Continue."])
    assert not shared(["Continue."], [asked, "Continue."]), "everybody says that"
    assert not shared([asked, "Go on, please."], ["Who was it?", "Go on, please."])


def test_training_prompts_that_meet_an_evaluation_prompt_are_dropped(prompt_file: WriteFile):
    evaluation = prompt_file(
        *asking("How MANY apples?"),
        json.dumps({"messages": [{"role": "user", "content": ALPHABET}, {"role": "assistant", "content": "1 " * 13}]}),
        name="evaluation.jsonl",
    )
    path = prompt_file(
        *asking("how many: apples", "How many apples are left?", f"Sort: {ALPHABET[20:].upper()}!"),
        *asking(ALPHABET[: 2 * 12], "1 " * 20, *(f"What is {i}?" for i in range(9))),
        name="train.jsonl",
    )
    training, against = config(path), [SourceConfig(path=str(evaluation))]
    artifact = collect(training, against)
    assert artifact.summary["dropped"] == {"contaminated": 2}
    assert questions(artifact)[:3] == ["How many apples are left?", ALPHABET[: 2 * 12], "1 " * 20]
    assert collect(config(path, decontaminate=False), against).summary["rows"] == 14
    with pytest.raises(
        ValueError, match=rf"contaminated 5 \({evaluation}|contaminated 2 \({evaluation}:1: shares 'how"
    ):
        collect(config(evaluation), against)


def test_half_a_surrogate_is_counted_in_every_kind_of_file(tmp_path: Path):
    rows = [*numbered(9), '{"prompt": "a\\ud800b"}']
    (tmp_path / "lines.jsonl").write_text("\n".join(rows))
    (tmp_path / "list.json").write_text(f"[{','.join(rows)}]")
    for name in ("lines.jsonl", "list.json"):
        assert collect(config(tmp_path / name)).summary["dropped"] == {"bad_encoding": 1}


@pytest.mark.parametrize("which", ["prompts", "evaluation"])
def test_a_file_that_changes_while_it_is_read_leaves_nothing_in_the_cache(
    prompt_file: WriteFile, home: Path, which: str
):
    path, evaluation = prompt_file(*numbered(9)), prompt_file(*asking("Why?"), name="evaluation.jsonl")
    changed = path if which == "prompts" else evaluation

    def grow(done: float, total: float, note: str = "") -> None:
        with changed.open("a") as file:
            file.write("\n" + asking("One more?")[0])

    with pytest.raises(ValueError, match=rf"^{changed}: changed while it was read; run again$"):
        collect(config(path), [SourceConfig(path=str(evaluation))], progress=grow)
    assert not list((home / "artifacts").rglob("*.*"))
    collect(config(path), [SourceConfig(path=str(evaluation))])


def test_a_weight_too_small_for_a_single_row_is_refused(prompt_file: WriteFile):
    one, two = (prompt_file(*numbered(9, of=name), name=f"{name}.jsonl") for name in ("one", "two"))
    sources = [{"path": str(one), "weight": 0.9}, {"path": str(two), "weight": 0.1}]
    with pytest.raises(ValueError, match=r"two.jsonl: its weight of 0.01 .* one row of the mix; raise it$"):
        collect(config(sources[0], sources[1] | {"weight": 0.01}))
    remedy = "raise it, or max_prompts, or limit the sources without a weight"
    with pytest.raises(ValueError, match=rf"two.jsonl: its weight of 0.1 .*; {remedy}$"):
        collect(config(*sources, max_prompts=3))


def test_too_large_a_share_of_unusable_rows_stops_with_places_and_leaves_nothing(prompt_file: WriteFile, home: Path):
    path = prompt_file(*numbered(5), *numbered(5), "{", '{"prompt": "Why?"', "[]")
    with pytest.raises(ValueError, match=rf"generation.prompts: 3 of 13 rows .*bad_json 2 \({path}:11: ") as caught:
        collect(config(path))
    assert "\n" not in str(caught.value)
    assert not list((home / "artifacts").rglob("*.*"))
    assert collect(config(path, max_dropped_share=0.3)).summary["rows"] == 5


def test_duplicates_are_no_reason_to_stop(prompt_file: WriteFile):
    assert collect(config(prompt_file(*numbered(1) * 20))).summary["rows"] == 1


def test_no_usable_row_at_all_is_refused(prompt_file: WriteFile, home: Path):
    path = prompt_file("{", "[]")
    with pytest.raises(ValueError, match=rf"none of 2 rows can be used .*'bad_json': 1.*; the first: {path}:1: "):
        collect(config(path, max_dropped_share=1))
    assert not list((home / "artifacts").rglob("*.*"))


def test_a_file_that_breaks_off_stops_the_stage_and_leaves_nothing(tmp_path: Path, home: Path):
    path = tmp_path / "prompts.jsonl.gz"
    whole = gzip.compress("\n".join(asking(*(f"{i} " * 20_000 for i in range(100)))).encode())
    path.write_bytes(whole[: len(whole) * 9 // 10])
    with pytest.raises(ValueError, match=rf"{path}: damaged after row \d\d"):
        collect(config(path))
    assert not list((home / "artifacts").rglob("*.*"))


def test_equal_data_has_an_equal_key_and_content_wherever_it_lies(prompt_file: WriteFile, tmp_path: Path):
    path = prompt_file(*numbered(5))
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / path.name
    moved.write_bytes(path.read_bytes())
    one, two = collect(config(path)), collect(config(moved))
    assert one.key == two.key
    again = collect(config(path))
    assert again.identity == one.identity


@given(st.lists(st.lists(st.integers(0, 40))))
def test_hashes_are_remembered(blocks: list[list[int]]):
    seen, known = Seen(), set[int]()
    for block in blocks:
        hashes = np.array(block, np.uint64)
        assert seen.holds(hashes).tolist() == [value in known for value in block]
        seen.add(hashes)
        known |= set(block)


def test_a_peek_finds_bad_data_before_anything_is_made(prompt_file: WriteFile, home: Path):
    path = prompt_file(*numbered(5), "{", "[]")
    with pytest.raises(ValueError, match=rf"generation.prompts, .*: 2 of 7 rows .* bad_json 1 \({path}:6: "):
        peek(config(path))
    assert not (home / "artifacts").exists()
    peek(config(path, max_dropped_share=0.3))
    peek(config({"path": str(path), "limit": 5}))
    peek(config(path, max_prompts=5))
    first, rest = prompt_file(*numbered(5), name="first.jsonl"), prompt_file(*"{{{{", name="rest.jsonl")
    peek(config(first, rest, max_prompts=5))


def test_a_peek_does_not_refuse_what_is_bad_only_at_its_beginning(
    prompt_file: WriteFile, caplog: pytest.LogCaptureFixture
):
    path = prompt_file(*["{"] * 300, *numbered(3_000))
    peek(config(path))
    [line] = caplog.messages
    assert "300 of 1000 rows dropped, more than 0.2: bad_json 300" in line
    assert collect(config(path)).summary["dropped"] == {"bad_json": 300}


def test_a_peek_refuses_a_large_source_of_which_nothing_can_be_used(prompt_file: WriteFile):
    path = prompt_file(*["{"] * 3_000)
    with pytest.raises(ValueError, match="1000 of 1000 rows dropped"):
        peek(config(path))


def test_texts_without_answers_of_the_data_are_refused_by_both(prompt_file: WriteFile):
    path = prompt_file('{"text": "Once upon a time"}')
    for step in (peek, collect):
        with pytest.raises(ValueError, match=r"(?i)keep"):
            step(config(path))
    assert collect(config({"path": str(path), "answers": "keep"})).summary["rows"] == 1
