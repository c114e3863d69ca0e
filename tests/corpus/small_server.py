"""A real OpenAI-compatible server around a tiny real verifier, with switches for how servers differ and fail."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from dflash.verifier import Verifier

OPENAI_FIELDS = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed",
    "logprobs",
}  # fmt: skip


@dataclass
class SmallServer:
    """Switches may be turned at any time. Answers are greedy. `bodies` are the requests for completions."""

    verifier: Verifier
    gives: Literal["ids", "logprobs", "text"] = "ids"
    strict: bool = False
    """Fields that are not OpenAI's get a 400."""
    failing: int = 0
    """So many of the next requests get a 500."""
    seconds: float = 0
    refused: list[int] = field(default_factory=list)
    """A prompt of these ids gets a 400."""
    crashing: list[int] = field(default_factory=list)
    """A prompt of these ids gets a 500."""
    text: str | None = None
    """The text of every answer, whatever its ids."""
    finish_reason: str | None = None
    trims_end: bool = False
    """The end token is not among the ids."""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    key: str | None = None
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                raise HTTPException(401, f"wrong key {request.headers.get('authorization')}")
            await asyncio.sleep(self.seconds)
            if self.failing > 0 or body["prompt"] == self.crashing:
                self.failing -= 1
                raise HTTPException(500, "out of memory")
            unknown = set(body) - OPENAI_FIELDS
            if self.strict and unknown:
                raise HTTPException(400, f"unknown fields {sorted(unknown)}")
            if body["prompt"] == self.refused:
                message = {"message": "this prompt is not wanted", "type": "BadRequestError", "code": 400}
                return JSONResponse({"error": message}, 400)
            if body["model"] not in self.models:
                raise HTTPException(404, f"no model {body['model']}")
            return await run_in_threadpool(self._completion, body)
        finally:
            self._at_once -= 1

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        (response,) = self.verifier.generate([body["prompt"]], max_new_tokens=body["max_tokens"])
        ids = response.ids
        said = ids[:-1] if response.finish_reason == "stop" else ids
        tokenizer = self.verifier.tokenizer
        text = tokenizer.decode(said, skip_special_tokens=body.get("skip_special_tokens", True))
        choice: dict[str, Any] = {
            "index": 0,
            "text": text if self.text is None else self.text,
            "finish_reason": self.finish_reason or response.finish_reason,
            "logprobs": None,
            # as vLLM: the end token that it was, None for the usual one
            "stop_reason": None if said == ids or ids[-1] == tokenizer.eos_token_id else ids[-1],
        }
        given = said if self.trims_end else ids
        if self.gives == "ids" and body.get("return_token_ids"):
            choice["token_ids"] = given
        if self.gives == "logprobs" and body.get("logprobs") is not None:
            as_ids = body.get("return_tokens_as_token_ids")
            tokens = [f"token_id:{i}" if as_ids else tokenizer.decode([i]) for i in given]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": [0.0] * len(tokens)}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
        head = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": body["model"]}
        return head | {"choices": [choice], "usage": usage}

    @contextmanager
    def running(self) -> Iterator["SmallServer"]:
        """Serve in a thread on a free port, whose address is then `base_url`."""
        app = FastAPI()
        app.get("/v1/models")(self.list_models)
        app.post("/v1/completions")(self.complete)
        config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            while not server.started:
                time.sleep(0.01)
            try:
                yield self
            finally:
                server.should_exit = True
                thread.join()
