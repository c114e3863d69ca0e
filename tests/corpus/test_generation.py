import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from small_server import SmallServer

import dflash.corpus.generation as generation
from dflash.config import GenerationConfig
from dflash.corpus.chat import load_chat
from dflash.corpus.chunks import MOST_CHUNKS, plan_chunks
from dflash.corpus.generation import SCHEMA, generate_chunk, seal
from dflash.corpus.records import CONVERSATIONS, OPEN, TooManyDropped, canonical_json
from dflash.keys import generation_key
from dflash.manifests import Artifact, Key, find, home, publish, text_sha256
from dflash.pinning import PinnedVerifier
from dflash.verifier import load_verifier

CONFIG = GenerationConfig(prompts=["p.jsonl"], max_new_tokens=6, batch_size=3, chunk_prompts=4)

Rows = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(number: int, messages: list[dict[str, Any]] | None, **parts: Any) -> dict[str, Any]:
    """A row of the prompts artifact."""
    text = None if messages is None else canonical_json(messages)
    id = text_sha256(f"{text}{parts}")[:32]
    given = {"messages": text, "tools": None, "text": None, "input_ids": None, "loss_mask": None, **parts}
    return {
        "id": id, "group": id, "category": f"c{number % 2}", "origin": "p.jsonl", "source": f"p.jsonl:{number + 1}",
        **given,
    }  # fmt: skip


def make_prompts(rows: Rows, *, part_rows: int = 5) -> Artifact:
    frame = pl.DataFrame(rows, schema=CONVERSATIONS)
    key = Key(stage="prompts", recipe=1, config={"rows": text_sha256(str(rows))}, inputs={})
    with publish(key, summary={}, content_identity=True) as (folder, artifact):
        (folder / "prompts").mkdir()
        for number, part in enumerate(frame.iter_slices(part_rows)):
            part.write_parquet(folder / "prompts" / f"part-{number:05d}.parquet")
    return artifact()


def single_turns(number: int, *, first: int = 0) -> Rows:
    return [conversation(n, [user("How many " + "apples " * n), OPEN]) for n in range(first, first + number)]


def multi_turns(number: int) -> Rows:
    return [
        conversation(n, [m for turn in range(1 + n % 3) for m in (user(f"{n} and {turn}?"), OPEN)])
        for n in range(number)
    ]


def generate(config: GenerationConfig, prompts: Artifact, verifier: PinnedVerifier, *, fresh: bool = True) -> Artifact:
    """All chunks and the seal, as the pipeline runs them: finished chunks are not made again."""
    plans = plan_chunks(config, prompts, verifier)
    chunks = [
        find(plan.key, location=plan.location) or generate_chunk(plan, config, prompts, verifier, fresh=fresh)
        for plan in plans
    ]
    return seal(chunks, config, prompts, verifier)


def sealed(artifact: Artifact) -> pl.DataFrame:
    return pl.read_parquet(artifact.path / "conversations.parquet")


def change(config: GenerationConfig, **changes: Any) -> GenerationConfig:
    return config.model_copy(update=changes)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all requests to the verifier."""
    names: list[str] = []
    answer = generation.answer
    monkeypatch.setattr(
        generation, "answer", lambda requests, **more: names.extend(n for n, _ in requests) or answer(requests, **more)
    )
    return names


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield
    generation._release()


def test_each_prompt_is_answered_as_the_verifier_answers_it_alone(verifier: PinnedVerifier) -> None:
    rows = single_turns(9)
    artifact = generate(CONFIG, make_prompts(rows), verifier)
    answers = sealed(artifact)
    assert answers.schema == SCHEMA
    assert answers["id"].to_list() == [row["id"] for row in rows]
    assert answers["turn"].to_list() == [0] * 9
    loaded, chat = load_verifier(verifier), load_chat(verifier)
    for row, answer in zip(rows, answers.iter_rows(named=True), strict=True):
        [alone] = loaded.generate([answer["prompt_ids"]], max_new_tokens=6)
        assert (answer["response_ids"], answer["finish_reason"]) == (alone.ids, alone.finish_reason)
        question = json.loads(row["messages"])[0]
        assert answer["prompt_ids"] == chat.prompt_ids([question], None)
        assert json.loads(answer["messages"]) == [question, chat.message_of(alone.ids)]
        assert {name: answer[name] for name in ("group", "category", "origin", "source")} == {
            name: row[name] for name in ("group", "category", "origin", "source")
        }
    assert artifact.summary == {
        "rows_in": 9,
        "rows": 9,
        "dropped": {},
        "sources": {"p.jsonl": {"rows_in": 9, "rows": 9, "dropped": {}}},
        "answers": 9,
        "turns_cut": 0,
        "tokens": sum(map(len, answers["response_ids"])),
        "prompt_tokens": sum(map(len, answers["prompt_ids"])),
        "finish": dict(answers["finish_reason"].value_counts().iter_rows()),
        "ids_from": {"served": 9},
    }
    assert find(generation_key(CONFIG, make_prompts(rows), verifier), deep=True) == artifact
    assert list((home() / "in_progress").iterdir()) == []


def test_every_turn_is_answered_after_the_verifiers_own_earlier_answers(verifier: PinnedVerifier) -> None:
    rows = multi_turns(8)
    answers = sealed(generate(CONFIG, make_prompts(rows), verifier))
    loaded, chat = load_verifier(verifier), load_chat(verifier)
    expected = []
    for row in rows:
        messages = []
        turns = []
        for message in json.loads(row["messages"]):
            if message == OPEN:
                prompt_ids = chat.prompt_ids(messages, None)
                [response] = loaded.generate([prompt_ids], max_new_tokens=6)
                turns.append((prompt_ids, response.ids))
                message = chat.message_of(response.ids)
            messages.append(message)
        expected += [(row["id"], n, *turn, canonical_json(messages)) for n, turn in enumerate(turns)]
    assert answers.select("id", "turn", "prompt_ids", "response_ids", "messages").rows() == expected


def test_what_the_data_answered_itself_is_kept_in_its_place(verifier: PinnedVerifier) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": OPEN}}]}
    kept = [
        conversation(0, [user("Two?"), {"role": "assistant", "content": "Two."}]),
        conversation(1, None, text="Once upon a time"),
        conversation(2, None, input_ids=[3, 4, 5], loss_mask=[False, True, True]),
        conversation(3, [user("Look it up"), call, {"role": "assistant", "content": "Done."}]),
    ]
    asked = single_turns(7)
    rows = [kept[0], kept[1], *asked[:3], kept[2], *asked[3:6], kept[3], asked[6], kept[0] | {"id": "last"}]
    answers = sealed(generate(CONFIG, make_prompts(rows), verifier))
    assert answers["id"].to_list() == [row["id"] for row in rows]
    for row, answer in zip(rows, answers.iter_rows(named=True), strict=True):
        is_asked = row in asked
        assert (answer["turn"] is not None) == is_asked
        if not is_asked:
            assert {name: answer[name] for name in CONVERSATIONS} == row
            assert all(answer[name] is None for name in ("prompt_ids", "response_ids", "finish_reason", "ids_from"))


def test_nothing_to_answer_needs_no_chunk_and_no_model(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "load_verifier", lambda _: pytest.fail("loaded"))
    rows = [conversation(n, [user(f"{n}?"), {"role": "assistant", "content": "Yes."}]) for n in range(7)]
    artifact = generate(CONFIG, make_prompts(rows), verifier)
    assert sealed(artifact)["id"].to_list() == [row["id"] for row in rows]
    assert artifact.summary["answers"] == artifact.summary["tokens"] == 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4}])
def test_bytes_and_identity_do_not_depend_on_batches_chunks_parts_windows_or_devices(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    config = change(CONFIG, **sampling)
    rows = [*multi_turns(9), conversation(9, None, text="and so on"), *single_turns(4)]
    monkeypatch.setattr(generation, "PART_ROWS", 6)
    one = generate(config, make_prompts(rows), verifier)
    content = (one.path / "conversations.parquet").read_bytes()
    monkeypatch.setattr(generation, "WINDOW", 3)
    others = [
        (change(config, batch_size=7, chunk_prompts=5), 5),
        (change(config, batch_size=2, chunk_prompts=100), 2),
    ]
    if sampling:
        others.append((change(config, devices=["cpu", "cpu"], chunk_prompts=7, batch_size=1), 3))
    for changed, part_rows in others:
        other = generate(changed, make_prompts(rows, part_rows=part_rows), verifier)
        assert (other.path / "conversations.parquet").read_bytes() == content
        assert other.identity == one.identity


def test_a_server_gives_the_same_conversations_as_this_process(verifier: PinnedVerifier) -> None:
    prompts = make_prompts(multi_turns(8))
    with SmallServer(load_verifier(verifier)).running() as server:
        served = generate(change(CONFIG, backend="openai", base_url=server.base_url), prompts, verifier)
    assert sealed(served).equals(sealed(generate(CONFIG, prompts, verifier)))


def test_a_seed_of_sampling_gives_its_own_answers_again(verifier: PinnedVerifier) -> None:
    prompts = make_prompts(single_turns(5))
    drawn = {
        seed: sealed(generate(change(CONFIG, temperature=1.0, seed=seed), prompts, verifier))["response_ids"].to_list()
        for seed in (0, 1)
    }
    assert drawn[0] != drawn[1]
    again = generate(change(CONFIG, temperature=1.0, seed=1, chunk_prompts=2), prompts, verifier)
    assert sealed(again)["response_ids"].to_list() == drawn[1]


@pytest.mark.parametrize("batch_size", [3, 2])
def test_an_interrupted_chunk_continues_after_its_finished_groups(
    verifier: PinnedVerifier, asked: list[str], batch_size: int
) -> None:
    config = change(CONFIG, chunk_prompts=100)
    prompts = make_prompts(multi_turns(9))  # 9 first, 6 second and 3 third answers
    [plan] = plan_chunks(config, prompts, verifier)
    whole = generate_chunk(plan, config, prompts, verifier)
    content = (whole.path / "answers-00000.parquet").read_bytes()
    calls = 0

    def interrupt(done: float, total: float, note: str = "") -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # in the middle of the second answers
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_chunk(plan, config, prompts, verifier, fresh=True, progress=interrupt)
    groups = home() / "in_progress" / f"{plan.key}-fresh" / "00000"
    assert len(list(groups.iterdir())) == 4
    (groups / ".group-00004.parquet").write_bytes(b"PAR1")  # what a kill in the middle of writing leaves
    asked.clear()
    resumed = generate_chunk(plan, change(config, batch_size=batch_size), prompts, verifier, fresh=True)
    assert sorted(name[-1] for name in asked) == ["1"] * 3 + ["2"] * 3
    assert (resumed.path / "answers-00000.parquet").read_bytes() == content
    assert resumed.identity == whole.identity
    assert not groups.exists()


def test_answers_that_cannot_be_read_at_present_are_not_deleted(tmp_path: Path) -> None:
    file = tmp_path / "group-00000.parquet"
    file.mkdir()  # reading it is an error of the system, not damage
    with pytest.raises(OSError):
        generation._answers(tmp_path)
    assert file.exists()


@pytest.mark.parametrize("damaged", [0, 2])
def test_a_damaged_group_is_answered_again_and_what_followed_from_it(
    verifier: PinnedVerifier, asked: list[str], caplog: pytest.LogCaptureFixture, damaged: int
) -> None:
    config = change(CONFIG, chunk_prompts=100)
    prompts = make_prompts(multi_turns(9))
    [plan] = plan_chunks(config, prompts, verifier)
    whole = generate_chunk(plan, config, prompts, verifier)
    content = (whole.path / "answers-00000.parquet").read_bytes()
    (whole.path / "manifest.json").unlink()
    groups = home() / "in_progress" / str(plan.key) / "00000"

    def interrupt(done: float, total: float, note: str = "") -> None:
        if len(list(groups.glob("group-*"))) == 5:  # all first and second answers
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_chunk(plan, config, prompts, verifier, progress=interrupt)
    file = groups / f"group-{damaged:05d}.parquet"
    lost = set(pl.read_parquet(file)["id"])
    file.write_bytes(file.read_bytes()[:-9])
    asked.clear()
    resumed = generate_chunk(plan, config, prompts, verifier)
    assert f"{file}: unreadable" in caplog.text
    again = {name.split("/")[0] for name in asked if name[-1] != "2"}
    assert again == lost
    assert {name for name in asked if name[-1] == "0"} == {f"{id}/0" for id in lost}
    assert len(asked) == len(set(asked))
    assert (resumed.path / "answers-00000.parquet").read_bytes() == content


def test_long_prompts_are_dropped_and_later_ones_end_their_conversation(
    verifier: PinnedVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        *single_turns(4),
        conversation(4, [user("apples " * 60), OPEN]),
        conversation(5, [user("Two?"), OPEN, user("apples " * 60), OPEN, user("Four?"), OPEN]),
    ]
    artifact = generate(change(CONFIG, max_prompt_tokens=60), make_prompts(rows), verifier)
    answers = sealed(artifact)
    assert answers["id"].to_list() == [row["id"] for row in rows if row is not rows[4]]
    assert artifact.summary["dropped"] == {"prompt_too_long": 1}
    assert artifact.summary["turns_cut"] == 2
    assert [message["role"] for message in json.loads(answers["messages"][-1])] == ["user", "assistant"]
    assert "1 conversations end early, the first: p.jsonl:6: " in caplog.text
    assert "1 conversations dropped, prompt_too_long, the first: p.jsonl:5: " in caplog.text


def test_only_too_long_prompts_are_refused(verifier: PinnedVerifier) -> None:
    prompts = make_prompts(single_turns(7))
    config = change(CONFIG, max_prompt_tokens=3)
    with pytest.raises(ValueError, match=r"p.jsonl:1: all 7 prompts .* max_prompt_tokens 3 \(the shortest has \d+"):
        generate(config, prompts, verifier)
    assert find(generation_key(config, prompts, verifier)) is None


def test_a_larger_share_of_dropped_conversations_than_allowed_fails_with_the_counts(verifier: PinnedVerifier) -> None:
    refused = conversation(3, [user("Who?"), {"role": "system", "content": "Be brief."}, OPEN])
    prompts = make_prompts([*single_turns(3), refused])
    message = r"generation.max_dropped_share: 1 of 4 rows dropped, more than 0.2: template_error 1 \(p.jsonl:4: .*first"
    with pytest.raises(TooManyDropped, match=message):
        generate(CONFIG, prompts, verifier)
    assert generate(change(CONFIG, max_dropped_share=0.25), prompts, verifier).summary["rows"] == 3
    nothing = make_prompts([refused])
    with pytest.raises(ValueError, match=r"no conversation is left: .*template_error.*p.jsonl:4"):
        generate(change(CONFIG, max_dropped_share=1), nothing, verifier)


@pytest.fixture
def odd_verifier(verifier_folder: Path, tmp_path: Path) -> PinnedVerifier:
    """Its tokenizer knows a word that its embedding does not: a prompt with it fails."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dflash.config import VerifierConfig
    from dflash.pinning import pin

    tokenizer = AutoTokenizer.from_pretrained(verifier_folder)
    tokenizer.add_tokens(["poison"])
    tokenizer.save_pretrained(tmp_path / "odd")
    AutoModelForCausalLM.from_pretrained(verifier_folder).save_pretrained(tmp_path / "odd")
    return pin(VerifierConfig(model=str(tmp_path / "odd"), dtype="float32", device="cpu"))


def test_a_poisoned_prompt_is_recorded_and_skipped(odd_verifier: PinnedVerifier) -> None:
    rows = [
        *single_turns(5),
        conversation(5, [user("poison"), OPEN]),
        conversation(6, [user("Two?"), OPEN, user("poison"), OPEN]),
    ]
    prompts = make_prompts(rows)
    artifact = generate(change(CONFIG, chunk_prompts=100), prompts, odd_verifier)
    assert artifact.summary["dropped"] == {"generation_failed": 1}
    assert artifact.summary["turns_cut"] == 1
    assert artifact.summary["answers"] == 6
    [plan] = plan_chunks(change(CONFIG, chunk_prompts=100), prompts, odd_verifier)
    [record] = json.loads((home() / plan.location / "dropped.json").read_text())
    assert (record["id"], record["source"], record["reason"]) == (rows[5]["id"], "p.jsonl:6", "generation_failed")
    assert record["message"].startswith("ValueError: id ")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_verifier_that_answers_nothing_leaves_no_chunk(odd_verifier: PinnedVerifier, batch_size: int) -> None:
    prompts = make_prompts([conversation(n, [user(f"poison {n}"), OPEN]) for n in range(3)])
    with pytest.raises(RuntimeError, match=r"ValueError: id \d+ of a prompt is outside"):
        generate(change(CONFIG, batch_size=batch_size), prompts, odd_verifier)
    assert not list((home() / "artifacts" / "generation").rglob("manifest.json"))


def test_appended_prompts_leave_earlier_chunks_as_they_are(verifier: PinnedVerifier) -> None:
    rows = single_turns(40)
    config = change(CONFIG, chunk_prompts=4)
    before = plan_chunks(config, make_prompts(rows[:20]), verifier)
    kept = conversation(99, None, text="in between")
    after = plan_chunks(config, make_prompts([kept, *rows[:7], kept, *rows[7:]]), verifier)
    assert [plan.rows for plan in before] == [4] * 5
    assert [plan.key for plan in after[:5]] == [plan.key for plan in before]
    assert [(plan.start, plan.stop) for plan in after[:3]] == [(1, 5), (5, 10), (10, 14)]
    assert [plan.name for plan in after[-2:]] == ["9 of 10", "10 of 10"]


@pytest.mark.parametrize("size", [3, 7, 100])
def test_answers_are_taken_over_whatever_chunks_they_are_in(
    verifier: PinnedVerifier, asked: list[str], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(generation, "WINDOW", 4)
    rows = [*multi_turns(9), *single_turns(3, first=20)]
    generate(change(CONFIG, chunk_prompts=5), make_prompts(rows[:4] + rows[5:]), verifier)
    asked.clear()
    config = change(CONFIG, chunk_prompts=size)
    prompts = make_prompts(rows)
    taken = generate(config, prompts, verifier, fresh=False)
    assert asked == [f"{rows[4]['id']}/{turn}" for turn in range(2)]
    chunks = [find(plan.key, location=plan.location) for plan in plan_chunks(config, prompts, verifier)]
    assert sum(chunk.summary["taken_over"] for chunk in chunks if chunk) == taken.summary["answers"] - 2
    content = (taken.path / "conversations.parquet").read_bytes()
    for other in (change(config, max_new_tokens=5), change(config, temperature=1.0)):
        asked.clear()
        assert generate(other, prompts, verifier, fresh=False).summary["answers"] == len(asked)
    asked.clear()
    anew = [generate_chunk(p, config, prompts, verifier, fresh=True) for p in plan_chunks(config, prompts, verifier)]
    assert len(asked) == taken.summary["answers"]
    assert (seal(anew, config, prompts, verifier).path / "conversations.parquet").read_bytes() == content


def test_conversations_that_were_dropped_or_cut_are_asked_again_in_another_chunk(
    odd_verifier: PinnedVerifier, asked: list[str]
) -> None:
    rows = [
        *single_turns(3),
        conversation(5, [user("poison"), OPEN]),
        conversation(6, [user("Two?"), OPEN, user("poison"), OPEN]),
    ]
    config = change(CONFIG, max_dropped_share=1, chunk_prompts=100)
    generate(config, make_prompts(rows), odd_verifier)
    asked.clear()
    [new] = single_turns(1, first=7)
    again = generate(config, make_prompts([*rows, new]), odd_verifier, fresh=False)
    assert set(asked) == {f"{rows[3]['id']}/0", f"{rows[4]['id']}/0", f"{rows[4]['id']}/1", f"{new['id']}/0"}
    assert again.summary["dropped"] == {"generation_failed": 1}


@pytest.mark.parametrize(("number", "count"), [(MOST_CHUNKS, 40), (MOST_CHUNKS + 1, 21), (2 * MOST_CHUNKS + 1, 21)])
def test_chunks_double_until_there_are_few_enough(verifier: PinnedVerifier, number: int, count: int) -> None:
    plans = plan_chunks(change(CONFIG, chunk_prompts=1), make_prompts(single_turns(number)), verifier)
    assert len(plans) == count
    assert sum(plan.rows for plan in plans) == number


def test_a_damaged_chunk_is_made_again_with_the_same_identity(verifier: PinnedVerifier) -> None:
    prompts = make_prompts(single_turns(6))
    one = generate(CONFIG, prompts, verifier)
    plan = plan_chunks(CONFIG, prompts, verifier)[1]
    (home() / plan.location / "manifest.json").unlink()
    assert generate(CONFIG, prompts, verifier).identity == one.identity
