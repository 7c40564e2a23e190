"""An engine whose answer is a given text, one token for each byte, and that fails where its plan says.

What lives here: vLLM's chunks with and without token ids, characters of several tokens, stop strings with the text that
an engine holds back for them, and a check that a resumed prompt is the right one. What must not: time and caches;
`kvstreams sim` has those.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web
from multidict import CIMultiDict

from streams.frontend.answers import error_event
from tests.helpers.scripted_engine import ScriptedEngine

#: The token ids of every prompt.
CHAT_PROMPT = list(b"<chat>")


@dataclass(slots=True)
class Plan:
    """What an engine does with its requests.

    answer: to the prompt; a resumed request has a part of it already. dies_at, stalls_at, errors_at: tokens of the
    answer after which it fails; after all of them, it fails before usage and end. refuses: a status for requests that
    resume. chunk: tokens in one chunk. has_ids: whether it reports token ids; is_strict: whether it refuses to be asked
    for them. waits_at: tokens after which it waits for the test (`go_on`). reasons: whether a chat's text is reasoning.
    cached: tokens of prompts that it reports as cached.
    """

    answer: str = "An answer that is long enough."
    dies_at: int | None = None
    stalls_at: int | None = None
    waits_at: int | None = None
    errors_at: int | None = None
    refuses: int = 0
    chunk: int = 1
    has_ids: bool = True
    is_strict: bool = False
    reasons: bool = False
    cached: int | None = None


class ByteEngine(ScriptedEngine):
    """A running engine. plan: of requests for which none is left in `plans`, a list that engines may share.

    asked: bodies of its requests, parsed. waiting: whether a request waits for `go_on`, which the test sets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan()
        self.plans: list[Plan] = []
        self.asked: list[dict[str, Any]] = []
        self.waiting = False
        self.go_on = False

    def routes(self) -> list[web.RouteDef]:
        """The calls that it serves."""
        return [*super().routes(), web.post("/tokenize", self._tokenize)]

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = orjson.loads(await http.read())
        tokens = CHAT_PROMPT if "messages" in body else list(body["prompt"].encode())
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        plan = self.plans.pop(0) if self.plans else self.plan
        self.received.append(CIMultiDict(http.headers))
        raw = await http.read()
        self.bodies.append(raw)
        body = orjson.loads(raw)
        self.asked.append(body)
        self.counts["begun"] += 1
        is_chat = http.path.endswith("/chat/completions")
        prompt = CHAT_PROMPT if is_chat else _ids(body["prompt"])
        answer = plan.answer.encode()
        begun = bytes(prompt[len(CHAT_PROMPT) :])
        if plan.is_strict and "return_token_ids" in body:
            return self._refuse(422)
        if begun and plan.refuses:
            return self._refuse(plan.refuses)
        if prompt[: len(CHAT_PROMPT)] != CHAT_PROMPT or not answer.startswith(begun):
            return self._refuse(400)  # tokens that were never generated
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        try:
            await response.prepare(http)
            for n_tokens, event in self._events(plan, body, prompt, answer, len(begun), is_chat=is_chat):
                if plan.dies_at is not None and n_tokens > plan.dies_at:
                    self.counts["broken"] += 1
                    assert http.transport is not None
                    http.transport.close()
                    return response
                if plan.errors_at is not None and n_tokens > plan.errors_at:
                    event = error_event(503, "the engine is stopping", "x").replace(b'"code":"x"', b'"code":503')
                    await response.write(event)
                    break
                while plan.waits_at is not None and n_tokens > plan.waits_at and not self.go_on:
                    self.waiting = True
                    await asyncio.sleep(0.005)
                if plan.stalls_at is not None and n_tokens > plan.stalls_at:
                    await asyncio.sleep(3600)
                await response.write(event)
                await asyncio.sleep(0)
            await response.write_eof()
            self.counts["ended"] += 1
            return response
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        except ConnectionError:
            self.counts["cancelled"] += 1
            return response

    def _refuse(self, status: int) -> web.Response:
        self.counts["ended"] += 1
        return web.json_response({"error": {"message": "refused", "code": status}}, status=status)

    def _events(
        self, plan: Plan, body: dict[str, Any], prompt: list[int], answer: bytes, begun: int, *, is_chat: bool
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the events of an answer from its token `begun` on, and how many tokens are out after each."""
        asked_ids = plan.has_ids and body.get("return_token_ids")
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        frame = {"id": f"id-{self.url}", "object": kind, "created": 7, "model": body.get("model")}
        if is_chat:
            page: dict[str, Any] = {"choices": [_choice({"delta": {"role": "assistant", "content": ""}})]}
            yield begun, _event({**frame, **page, **({"prompt_token_ids": prompt} if asked_ids else {})})
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(answer)
        at = begun
        options = body.get("stream_options") or {}

        def usage() -> dict[str, Any]:
            details = {} if plan.cached is None else {"prompt_tokens_details": {"cached_tokens": plan.cached}}
            total = len(prompt) + at - begun
            return {"prompt_tokens": len(prompt), "completion_tokens": at - begun, "total_tokens": total, **details}

        for ids, text, finish in _chunks(answer, begun, body, limit, plan.chunk):
            at += len(ids)
            delta = {"reasoning_content": text} if plan.reasons else {"content": text}
            choice = _choice({"delta": delta} if is_chat else {"text": text}, finish)
            if asked_ids:
                choice["token_ids"] = ids
                if not is_chat and at == begun + len(ids):
                    choice["prompt_token_ids"] = prompt
            more = {"usage": usage()} if options.get("continuous_usage_stats") else {}
            yield at, _event({**frame, "choices": [choice], **more})
        if options.get("include_usage"):
            yield at + 1, _event({**frame, "choices": [], "usage": usage()})
        yield at + 1, b"data: [DONE]\n\n"


def _chunks(
    answer: bytes, begun: int, body: dict[str, Any], limit: int, size: int
) -> Iterator[tuple[list[int], str, str | None]]:
    """Yield ids, text and finish reason as vLLM does: whole characters, and nothing that may begin a stop string."""
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    includes = bool(body.get("include_stop_str_in_output"))
    held = 0 if includes else max((len(each) - 1 for each in stops), default=0)
    decoder, text, shown, at = codecs.getincrementaldecoder("utf-8")(), "", 0, begun
    end = min(len(answer), begun + limit)
    while at < end:
        ids: list[int] = []
        while at < end and len(ids) < size:
            ids.append(answer[at])
            text += decoder.decode(answer[at : at + 1])
            at += 1
            found = [(text.find(each), each) for each in stops if each in text]
            if found:
                first, each = min(found)
                yield ids, text[shown : first + (len(each) if includes else 0)], "stop"
                return
        until = len(text) if at == end else max(shown, len(text) - held)
        yield ids, text[shown:until], ("length" if end < len(answer) else "stop") if at == end else None
        shown = until


def _choice(content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish}


def _ids(prompt: Any) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


def _event(page: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(page) + b"\n\n"
