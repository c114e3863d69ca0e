"""Answers over HTTP from a real server around the tiny verifier: its ids, its whims, its failures."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from small_server import SmallServer

from dflash.corpus import serving
from dflash.corpus.records import Rejected, Response, Sampling
from dflash.corpus.serving import Server, connect
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier

MAX_NEW_TOKENS = 24


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "RETRIES", 1)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def loaded(verifier: PinnedVerifier) -> Verifier:
    """With an end token that it really says, so that some answers end and others are cut."""
    whole = load_verifier(verifier)
    (answer,) = whole.generate([prompts(whole, 1)[0][1]], max_new_tokens=MAX_NEW_TOKENS)
    return Verifier(whole.model, whole.tokenizer, eos_ids=frozenset({answer.ids[5], *whole.eos_ids}))


@pytest.fixture
def served(loaded: Verifier) -> Iterator[SmallServer]:
    with SmallServer(loaded).running() as server:
        yield server


def prompts(verifier: Verifier, number: int) -> list[tuple[str, list[int]]]:
    texts = [f"<|start|>user\nTwo and {i} are?<|end|><|start|>assistant\n" for i in range(number)]
    return [(f"c{i}/0", verifier.tokenizer(text).input_ids) for i, text in enumerate(texts)]


def connected(server: SmallServer, **settings: Any) -> Server:
    defaults: dict[str, Any] = {
        "base_url": server.base_url, "model": "", "concurrency": 4, "request_seconds": 30.0,
        "sampling": Sampling(MAX_NEW_TOKENS),
        "tokenizer": server.verifier.tokenizer, "eos_ids": server.verifier.eos_ids,
    }  # fmt: skip
    return connect(**(defaults | settings))


def in_process(verifier: Verifier, requests: list[tuple[str, list[int]]]) -> list[Response]:
    return [verifier.generate([ids], max_new_tokens=MAX_NEW_TOKENS)[0] for _, ids in requests]


def rejections(answers: list[Response | Rejected]) -> list[Rejected]:
    return [answer for answer in answers if isinstance(answer, Rejected)]


@pytest.mark.parametrize("trims_end", [False, True])
@pytest.mark.parametrize("gives", ["ids", "logprobs"])
def test_served_answers_equal_those_of_the_process_token_for_token(
    served: SmallServer, gives: Any, trims_end: bool
) -> None:
    served.gives, served.trims_end = gives, trims_end
    requests = prompts(served.verifier, 12)
    with connected(served) as server:
        answers = server.answer(requests)
        again = server.answer(requests[:1])
    expected = in_process(served.verifier, requests)
    assert answers == expected
    assert again == expected[:1]
    assert {answer.finish_reason for answer in expected} == {"stop", "length"}
    assert served.most_at_once <= 4


def test_requests_ask_for_the_verifier_as_it_is_and_end_where_it_ends(served: SmallServer) -> None:
    with connected(served, sampling=Sampling(MAX_NEW_TOKENS, top_p=0.5)) as server:
        server.answer(prompts(served.verifier, 1))
    expected = {
        "model": "tiny", "prompt": prompts(served.verifier, 1)[0][1], "max_tokens": MAX_NEW_TOKENS, "temperature": 0,
        "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
        "stop_token_ids": sorted(served.verifier.eos_ids), "return_token_ids": True,
    }  # fmt: skip
    assert served.bodies[-1] == expected
    assert served.bodies[0]["max_tokens"] == 1  # how it gives ids was found out with one token
    assert len(served.bodies) == 2


def test_sampling_has_a_seed_per_request_that_depends_on_nothing_else(served: SmallServer) -> None:
    requests = prompts(served.verifier, 6)
    by_prompt: list[dict[str, int]] = []
    for order, seed in ((requests, 3), (requests[::-1], 3), (requests, 4)):
        served.bodies.clear()
        with connected(served, sampling=Sampling(MAX_NEW_TOKENS, temperature=0.7, top_p=0.9, seed=seed)) as server:
            server.answer(order)
        assert {(body["temperature"], body["top_p"]) for body in served.bodies} == {(0.7, 0.9)}
        by_prompt.append({json.dumps(body["prompt"]): body["seed"] for body in served.bodies if "seed" in body})
    assert by_prompt[0] == by_prompt[1]
    assert len(set(by_prompt[0].values())) == 6
    assert not set(by_prompt[0].values()) & set(by_prompt[2].values())


def test_a_server_without_ids_has_its_text_tokenized_again_and_no_end_token_invented(
    served: SmallServer, caplog: pytest.LogCaptureFixture
) -> None:
    served.gives, served.text = "text", "Two and two are four."
    ids = served.verifier.tokenizer(served.text).input_ids
    requests = prompts(served.verifier, 12)
    with connected(served) as server:
        answers = server.answer(requests)
    assert served.bodies[-1]["skip_special_tokens"] is False  # or thinking and tool calls would lose their tokens
    for answer, expected in zip(answers, in_process(served.verifier, requests), strict=True):
        end = expected.ids[-1:] if expected.finish_reason == "stop" else []
        assert answer == Response(ids + end, expected.finish_reason, "retokenized")
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        "the server gives no token ids: its texts are tokenized again, maybe not into what it served"
    ]


def test_text_that_was_cut_within_a_character_is_counted_as_a_mismatch(served: SmallServer) -> None:
    served.gives, served.text, served.finish_reason = "text", "four \ufffd", "length"
    with connected(served) as server:
        (answer,) = server.answer(prompts(served.verifier, 1))
    assert isinstance(answer, Response)
    assert (answer.origin, answer.finish_reason) == ("mismatch", "length")


def test_served_ids_that_do_not_decode_to_the_served_text_are_kept_counted_and_warned_about_once(
    served: SmallServer, caplog: pytest.LogCaptureFixture
) -> None:
    served.text = "another verifier's words"
    requests = prompts(served.verifier, 3)
    with connected(served) as server:
        answers = server.answer(requests)
    expected = in_process(served.verifier, requests)
    assert answers == [Response(answer.ids, answer.finish_reason, "mismatch") for answer in expected]
    assert caplog.text.count("is this the verifier's server?") == 1


def test_a_server_that_refuses_unknown_fields_is_asked_without_them(
    served: SmallServer, caplog: pytest.LogCaptureFixture
) -> None:
    served.strict = True
    with connected(served) as server:
        answers = server.answer(prompts(served.verifier, 6))
    assert rejections(answers) == []
    assert set(served.bodies[-1]) == {
        "model", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty",
    }  # fmt: skip
    assert caplog.text.count("the server knows OpenAI's fields only") == 1
    assert len(served.bodies) == 4 + 6


def test_prompts_that_the_server_refuses_or_dies_of_fail_alone(served: SmallServer) -> None:
    requests = prompts(served.verifier, 12)
    served.refused, served.crashing = requests[3][1], requests[11][1]
    with connected(served) as server:
        answers = server.answer(requests)
    refused, crashed = answers[3], answers[11]
    assert isinstance(refused, Rejected)
    assert isinstance(crashed, Rejected)
    assert (refused.reason, crashed.reason) == ("generation_failed", "generation_failed")
    assert str(refused) == "the server refuses: Error code: 400 - this prompt is not wanted"
    assert str(crashed) == "InternalServerError: Error code: 500 {'detail': 'out of memory'}"
    expected = in_process(served.verifier, requests)
    kept = [i for i in range(12) if i not in (3, 11)]
    assert [answers[i] for i in kept] == [expected[i] for i in kept]


def test_an_answer_that_neither_ended_nor_was_cut_is_rejected(served: SmallServer) -> None:
    served.finish_reason = "content_filter"
    with connected(served) as server:
        (answer,) = server.answer(prompts(served.verifier, 1))
    assert isinstance(answer, Rejected)
    assert str(answer) == "the server gave up: finish_reason 'content_filter'"


def test_ids_outside_the_vocabulary_are_rejected(served: SmallServer, loaded: Verifier) -> None:
    class Short:
        """The verifier's tokenizer, had it fewer tokens than the server's."""

        eos_token_id = loaded.tokenizer.eos_token_id

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return loaded.tokenizer(*arguments, **options)

        def decode(self, *arguments: Any, **options: Any) -> str:
            return str(loaded.tokenizer.decode(*arguments, **options))

        def __len__(self) -> int:
            return 3

    with connected(served, tokenizer=Short()) as server:
        (answer,) = server.answer(prompts(loaded, 1))
    assert isinstance(answer, Rejected)
    assert "is not in the verifier's vocabulary" in str(answer)


def test_a_passing_failure_is_retried(served: SmallServer) -> None:
    served.failing = 1
    requests = prompts(served.verifier, 4)
    with connected(served) as server:
        served.failing = 2
        answers = server.answer(requests)
    assert answers == in_process(served.verifier, requests)


def test_a_slow_answer_ends_at_its_deadline_and_many_in_a_row_count_as_a_server_that_is_down(
    served: SmallServer,
) -> None:
    requests = prompts(served.verifier, 20)
    with connected(served, request_seconds=1.5, concurrency=7) as server:
        served.seconds = 60
        (answer,) = server.answer(requests[:1])
        assert isinstance(answer, Rejected)
        assert str(answer) == "no answer within 1.5 seconds (request_seconds)"
        with pytest.raises(ConnectionError, match=r"does not answer \(no answer within 1.5 seconds"):
            server.answer(requests)
    assert len(served.bodies) < 20  # it stopped asking


@pytest.mark.parametrize("number", [1, 20])
def test_a_server_that_goes_away_stops_the_work_instead_of_losing_its_prompts(loaded: Verifier, number: int) -> None:
    requests = prompts(loaded, number)
    small = SmallServer(loaded)
    with small.running():
        server = connected(small)
        assert rejections(server.answer(requests)) == []
    with server, pytest.raises(ConnectionError, match=re.escape(small.base_url)) as caught:
        server.answer(requests)
    assert "All connection attempts failed" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_named(loaded: Verifier) -> None:
    small = SmallServer(loaded)
    with small.running():
        pass
    for model in ("", "tiny"):
        with pytest.raises(ConnectionError, match=re.escape(small.base_url)):
            connected(small, model=model)


def test_the_served_model_is_the_only_one_or_named(served: SmallServer) -> None:
    served.models = ["b", "a"]
    with pytest.raises(ValueError, match=r"server_model: .* serves a, b; name one"):
        connected(served)
    with pytest.raises(ValueError, match="has no model 'c'"):
        connected(served, model="c")
    with connected(served, model="a") as server:
        server.answer(prompts(served.verifier, 1))
    assert served.bodies[-1]["model"] == "a"


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "", "ftp://127.0.0.1/v1"])
def test_a_base_url_that_is_no_address_is_refused(loaded: Verifier, url: str) -> None:
    with pytest.raises(ValueError, match=r"^base_url: .* is no address; give one such as"):
        connected(SmallServer(loaded), base_url=url)


def test_a_base_url_without_its_version_is_pointed_out(served: SmallServer) -> None:
    with pytest.raises(ValueError, match="mostly ends in /v1"):
        connected(served, base_url=served.base_url.removesuffix("/v1"))


def test_the_key_is_sent_and_never_said(
    served: SmallServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served.key = "sk-right"
    with pytest.raises(ValueError, match="set OPENAI_API_KEY"):
        connected(served)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with pytest.raises(ValueError, match="refuses the key") as caught:
        connected(served)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    with connected(served) as server:
        assert rejections(server.answer(prompts(served.verifier, 2))) == []
    with pytest.raises(ValueError, match="it would be logged") as also:
        connected(served, base_url="http://user:sk-right@127.0.0.1:1/v1")
    assert "sk-" not in caplog.text + str(caught.value) + str(also.value)


def test_a_proxy_in_the_environment_is_not_asked_for_this_machine(
    served: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with connected(served) as server:
        assert rejections(server.answer(prompts(served.verifier, 1))) == []


def test_without_the_package_the_command_that_installs_it_is_named(
    loaded: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'dflash[openai]'")):
        connected(SmallServer(loaded), base_url="http://127.0.0.1:1/v1")
