"""Answers from a server that serves the verifier: any OpenAI-compatible one, made for vLLM and SGLang.

Knows requests, deadlines and where the token ids of an answer come from; no template, no file and no model.
Prompts are sent as token ids, and the ids that were served are asked for: both are what training sees.
"""

import asyncio
import logging
import os
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import urlsplit

from dflash.corpus.records import Rejected, Request, Response, Sampling

log = logging.getLogger(__name__)

RETRIES = 5  # of one request, by the client library: half a second apart at first, eight at last
BREAKER = 8  # failed requests in a row, none succeeding in between, after which the server counts as down
CONNECT_SECONDS = 10.0
TOKEN = "token_id:"  # how vLLM spells ids among log-probabilities

# Servers fill what a request leaves out from the model's generation_config; the verifier itself has no penalties.
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def connect(
    *,
    base_url: str,
    model: str,
    concurrency: int,
    request_seconds: float,
    sampling: Sampling,
    tokenizer: Any,
    eos_ids: Collection[int],
) -> "Server":
    """A server that has answered one tiny request, so that it is known how it gives token ids. Close it after use.

    An empty `model` takes the one the server lists. Raises ValueError for settings that it refuses, and ConnectionError
    where it cannot be reached.
    """
    try:
        import openai
    except ImportError:
        raise ValueError("back end openai needs a package: pip install 'dflash[openai]'") from None
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f"base_url: {base_url!r} is no address; give one such as http://127.0.0.1:8000/v1")
    if address.username:
        raise ValueError("base_url holds a user or key; it would be logged: give the key as OPENAI_API_KEY")
    client = openai.AsyncOpenAI(
        base_url=base_url,
        api_key=os.environ.get("OPENAI_API_KEY") or "none",
        max_retries=RETRIES,
        timeout=openai.Timeout(request_seconds, connect=CONNECT_SECONDS),
        # a proxy in the environment is never meant for this machine
        http_client=openai.DefaultAsyncHttpxClient(
            trust_env=address.hostname not in ("localhost", "127.0.0.1", "::1"),
        ),
    )
    server = Server(
        client,
        concurrency=concurrency,
        request_seconds=request_seconds,
        sampling=sampling,
        tokenizer=tokenizer,
        eos_ids=frozenset(eos_ids),
    )
    try:
        server.greet(model)
    except BaseException:
        server.close()
        raise
    return server


class Server:
    """A connection to a server."""

    def __init__(
        self,
        client: Any,
        *,
        concurrency: int,
        request_seconds: float,
        sampling: Sampling,
        tokenizer: Any,
        eos_ids: frozenset[int],
    ) -> None:
        self._client = client
        self._concurrency = concurrency
        self._request_seconds = request_seconds
        self._sampling = sampling
        self._fields: dict[str, Any] = {  # the same in all requests
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature > 0 else 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._extra: dict[str, Any] = {}  # fields of the request beyond the OpenAI ones, found by greet
        self._gives_ids = False
        self._failures = 0  # in a row
        self._warned = False
        self._runner = asyncio.Runner()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def greet(self, model: str) -> None:
        """Find the served model and the way in which it gives token ids. Raises as `connect` does."""
        self._runner.run(self._greet(model))

    def answer(self, requests: Sequence[Request]) -> list[Response | Rejected]:
        """Answers in order, `concurrency` at once; the more requests, the busier the server.

        A request that fails alone is Rejected. Raises ConnectionError where the server seems to be down, ValueError
        where it refuses the key or the model.
        """
        return self._runner.run(self._answer_all(requests))

    async def _greet(self, model: str) -> None:
        self._fields["model"] = model or await self._only_model()
        log.info("%s serves %s", self._client.base_url, self._fields["model"])
        ours = NEUTRAL | {"stop_token_ids": sorted(self._eos_ids)}
        as_ids = ours | {"return_token_ids": True}
        as_logprobs = ours | {"logprobs": 1, "return_tokens_as_token_ids": True}
        # no ids: then at least the special tokens in the text, which would be lost otherwise
        as_text = ours | {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        prompt_ids = self._tokenizer("Hello", add_special_tokens=False).input_ids
        for extra in (as_ids, as_logprobs, as_text, {}):
            try:
                completion = await self._ask(prompt_ids, extra | {"max_tokens": 1})
            except Rejected as error:
                refusal = error
                continue
            except OSError as error:
                raise self._down(error) from error
            if extra in (as_text, {}) or _served_ids(completion.choices[0]) is not None:
                break
        else:
            raise ValueError(f"{self._client.base_url}: no way to ask for a completion of token ids: {refusal}")
        self._extra = extra
        seen = completion.usage.prompt_tokens if completion.usage else len(prompt_ids)
        if seen != len(prompt_ids):
            log.warning("the server read %d tokens of %d sent: it answers other prompts", seen, len(prompt_ids))
        self._gives_ids = extra in (as_ids, as_logprobs)
        if not self._gives_ids:
            log.warning("the server gives no token ids: its texts are tokenized again, maybe not into what it served")
        if not extra:
            log.warning("the server knows OpenAI's fields only: its own end tokens and sampling defaults are in force")

    async def _only_model(self) -> str:
        try:
            names = [model.id for model in (await self._within_deadline(self._client.models.list())).data]
        except OSError as error:
            raise self._down(error) from error
        if len(names) != 1:
            raise ValueError(
                f"server_model: {self._client.base_url} serves {', '.join(sorted(names)) or 'no model'}; name one"
            )
        return str(names[0])

    async def _answer_all(self, requests: Sequence[Request]) -> list[Response | Rejected]:
        places = asyncio.Semaphore(self._concurrency)

        async def answer(name: str, prompt_ids: list[int]) -> Response | Rejected:
            async with places:
                return await self._answer(name, prompt_ids)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(*request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        if self._failures:
            # nothing has succeeded since: were it prompts that cannot be answered, or has the server gone?
            await self._only_alive()
        return [task.result() for task in tasks]

    async def _only_alive(self) -> None:
        try:
            await self._within_deadline(self._client.with_options(max_retries=0).models.list())
        except OSError as error:
            raise self._down(error) from error
        except ValueError:
            pass  # no such address, but a server that says so

    async def _answer(self, name: str, prompt_ids: list[int]) -> Response | Rejected:
        # 31 bits, which all servers take
        seed = {"seed": self._sampling.seed_of(name) >> 1} if self._sampling.temperature > 0 else {}
        try:
            completion = await self._ask(prompt_ids, self._extra | seed)
            response = self._response(completion.choices[0])
        except Rejected as error:
            self._failures = 0
            return error
        except OSError as error:
            self._failures += 1
            if self._failures >= BREAKER:
                raise self._down(error) from error
            return Rejected("generation_failed", str(error))
        self._failures = 0
        if response.origin == "mismatch" and self._gives_ids and not self._warned:
            self._warned = True
            log.warning("%s: the ids served do not decode to the text served; is this the verifier's server?", name)
        return response

    async def _ask(self, prompt_ids: list[int], extra: dict[str, Any]) -> Any:
        """A completion. Raises Rejected where the server does not want the request, OSError where it fails."""
        fields = self._fields | extra
        completion = await self._within_deadline(
            self._client.completions.create(model=fields.pop("model"), prompt=prompt_ids, extra_body=fields)
        )
        if not getattr(completion, "choices", None):
            raise OSError(f"its answer is no completion: {str(completion)[:80]!r}")
        return completion

    async def _within_deadline(self, call: Any) -> Any:
        import openai

        try:
            async with asyncio.timeout(self._request_seconds):
                return await call
        except (openai.AuthenticationError, openai.PermissionDeniedError):
            # without its text: servers repeat the key in it
            raise ValueError(f"{self._client.base_url} refuses the key; set OPENAI_API_KEY to the server's") from None
        except openai.NotFoundError as error:
            raise ValueError(
                f"{self._client.base_url} has no model {self._fields.get('model', '')!r} or no such address "
                f"({_cause(error)}); see server_model, and base_url, which mostly ends in /v1"
            ) from error
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise Rejected("generation_failed", f"the server refuses: {_cause(error)}") from error
        except TimeoutError:
            raise OSError(f"no answer within {self._request_seconds:g} seconds (request_seconds)") from None
        except (openai.OpenAIError, ValueError) as error:  # ValueError: the answer is damaged JSON
            raise OSError(f"{type(error).__name__}: {_cause(error)}") from error

    def _down(self, error: OSError) -> ConnectionError:
        return ConnectionError(
            f"{self._client.base_url} does not answer ({error}); start the server or look into its log, and run again: "
            "what is answered is kept"
        )

    def _response(self, choice: Any) -> Response:
        """Raises Rejected for an answer that neither ended nor was cut by the limit."""
        if choice.finish_reason not in ("stop", "length"):
            raise Rejected("generation_failed", f"the server gave up: finish_reason {choice.finish_reason!r}")
        ids, origin = _served_ids(choice), "served"
        if ids is None:
            ids = self._tokenizer(choice.text, add_special_tokens=False).input_ids
            # half a character at the cut is served as U+FFFD, whose ids round-trip but were never chosen
            same = self._decoded(ids) == choice.text and "\ufffd" not in choice.text
            origin = "retokenized" if same else "mismatch"
        else:
            said = ids[:-1] if ids and ids[-1] in self._eos_ids else ids
            # white space and half characters at the ends are up to the server's incremental decoder
            text = self._decoded(said, skip_special_tokens=True)
            if text.rstrip("\ufffd").strip() != choice.text.rstrip("\ufffd").strip():
                origin = "mismatch"
        if choice.finish_reason == "stop" and not (ids and ids[-1] in self._eos_ids):
            ids = [*ids, self._end_token(choice)]
        if not ids:
            raise Rejected("generation_failed", "the server gave an empty answer")
        if max(ids) >= len(self._tokenizer):
            raise Rejected("generation_failed", f"id {max(ids)} is not in the verifier's vocabulary; is it its server?")
        # the last token may be an end token and the limit at once, which servers call length
        return Response(ids, "stop" if ids[-1] in self._eos_ids else "length", origin)

    def _decoded(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _end_token(self, choice: Any) -> int:
        """The end token that was generated but not given: vLLM and SGLang name it, unless it is the usual one."""
        for named in (getattr(choice, "stop_reason", None), getattr(choice, "matched_stop", None)):
            if named in self._eos_ids:
                return int(named)
        usual = self._tokenizer.eos_token_id
        return int(usual) if usual in self._eos_ids else min(self._eos_ids)


def _served_ids(choice: Any) -> list[int] | None:
    """The ids as vLLM and SGLang give them, or among log-probabilities as older ones do; None where there are none."""
    if getattr(choice, "token_ids", None) is not None:
        return list(choice.token_ids)
    tokens = choice.logprobs.tokens if choice.logprobs else None
    if tokens and all(token.startswith(TOKEN) for token in tokens):
        return [int(token.removeprefix(TOKEN)) for token in tokens]
    return None


def _cause(error: Exception) -> str:
    """In one short line, without the key; what lies behind "Connection error." says more than that."""
    body = getattr(error, "body", None)
    # the library says what is under `message`, and keeps other shapes to itself
    details = "" if isinstance(body, dict) and "message" in body else body or ""
    text = " ".join(f"{error.__cause__ or error} {details}".split())[:200]
    key = os.environ.get("OPENAI_API_KEY")
    return text.replace(key, "***") if key else text
