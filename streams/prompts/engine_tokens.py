"""Asking an engine for the tokens of a request's prompt.

What lives here: the calls that engines have for this, and which of them an engine lacks. What must not: when an engine
is asked (tokenizing, parity_probes), and what becomes of its answer.

vLLM has two. `/v1/chat/completions/render` reads a chat as the call that generates does, and so do the calls of this
kind for `/v1/responses` and `/v1/messages`; 0.32 has them only with `--enable-scale-out`. `/tokenize` is always there,
but from 0.24 on chats read more than it does: `documents`, `reasoning_effort` and the `reasoning_content` of past turns
are then sent to it in other places.

State: the calls that engines lack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from streams.client.plain_http import PlainHttp
from streams.prompts.calls import Kind

TOKENIZE, VERSION = "/tokenize", "/version"

#: Follows the path of a call that generates from a chat.
RENDER = "/render"

#: Statuses of engines that do not have a call; of 403, vLLM says that it is switched off.
LACKING = (403, 404, 405, 501)

OK = 200

#: Names in chats that have to be sent to /tokenize in other places.
ELSEWHERE = (b'"reasoning_content"', b'"reasoning_effort"', b'"documents"')

#: How long it is remembered that an engine lacks a call. Another version may run under its URL afterwards.
LACKS_S = 600.0

#: Engines of which this is remembered.
NOTED_MAX = 1024

#: The version of vLLM from which on chats read more than /tokenize.
READS_MORE = (0, 24)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokensAnswer:
    """An engine's answer. tokens: None without any. call: that was answered. is_whole: whether all fields were read."""

    status: int
    tokens: list[int] | None
    call: str
    is_whole: bool = True


class EngineTokens:
    """Asks engines for tokens. Owner of what is known about their versions and calls. Used on one loop."""

    def __init__(self, timeout_s: float, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        """timeout_s, bytes_max: limits of one answer."""
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        self._clock = clock
        # Until when: engines without a render call, and whether chats of an engine read more than its /tokenize.
        self._lacks_render: dict[str, float] = {}
        self._reads_more: dict[str, tuple[float, bool]] = {}

    async def ask(self, http: PlainHttp, url: str, kind: Kind, body: bytes, key: str | None) -> TokensAnswer:
        """Return the tokens of a prompt. key: the API key of the engine. Raises OSError, TimeoutError."""
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        if kind is Kind.COMPLETION:
            return await self._tokens(http, url, TOKENIZE, headers, body)
        render = kind + RENDER
        answer = TokensAnswer(404, None, render)
        if self._lacks_render.get(url + render, 0.0) < self._clock():
            answer = await self._tokens(http, url, render, headers, without_media(body))
            if answer.status not in LACKING:
                return answer
            _note(self._lacks_render, url + render, self._clock() + LACKS_S)
        if kind is not Kind.CHAT:
            return answer
        if not any(name in body for name in ELSEWHERE):
            return await self._tokens(http, url, TOKENIZE, headers, body)
        reads_more = await self._reads(http, url, headers)
        answer = await self._tokens(http, url, TOKENIZE, headers, for_tokenize(body) if reads_more else body)
        return replace(answer, is_whole=reads_more)

    async def _reads(self, http: PlainHttp, url: str, headers: Mapping[str, str]) -> bool:
        """Whether chats of an engine read more than its /tokenize, by its version."""
        until_s, reads_more = self._reads_more.get(url, (0.0, False))
        if until_s < self._clock():
            _, raw = await self._call(http, "GET", url, VERSION, headers, b"")
            reads_more = reads_more_than_tokenize(raw)
            _note(self._reads_more, url, (self._clock() + LACKS_S, reads_more))
        return reads_more

    async def _tokens(
        self, http: PlainHttp, url: str, call: str, headers: Mapping[str, str], body: bytes
    ) -> TokensAnswer:
        status, raw = await self._call(http, "POST", url, call, headers, body)
        is_page = status == OK and len(raw) <= self._bytes_max
        return TokensAnswer(status, token_ids(raw) if is_page else None, call)

    async def _call(
        self, http: PlainHttp, method: str, url: str, call: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        response = await http.request(method, url, call, headers, body, self._timeout_s, is_short=True)
        try:
            return response.status, await response.read(self._bytes_max)
        finally:
            response.close()


def _note(noted: dict[str, _T], url: str, value: _T) -> None:
    if len(noted) >= NOTED_MAX:
        noted.clear()
    noted[url] = value


def reads_more_than_tokenize(raw: bytes) -> bool:
    """Whether an engine whose answer to `GET /version` this is reads more of a chat than its /tokenize does."""
    try:
        page: Any = orjson.loads(raw)
        numbers = [int(number) for number in page["version"].split(".")[:2]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return tuple(numbers) >= READS_MORE


def without_media(body: bytes) -> bytes:
    """Return the JSON of a chat with which an engine renders images, but does not send them back."""
    return body.rstrip()[:-1] + b',"mm_payload":"none"}'


def for_tokenize(body: bytes) -> bytes:
    """Return a chat as `/tokenize` has to get it to make the tokens that vLLM (0.24 and later) generates from."""
    try:
        chat = orjson.loads(body)
        effort, documents, messages = chat.get("reasoning_effort"), chat.get("documents"), chat.get("messages")
        arguments = dict(chat.get("chat_template_kwargs") or {})
        if effort is not None:
            arguments.setdefault("enable_thinking", effort != "none")
            arguments["reasoning_effort"] = effort
        if documents is not None:
            arguments["documents"] = documents
        for message in messages:
            if message.get("reasoning") is None and "reasoning_content" in message:
                message["reasoning"] = message["reasoning_content"]
        return orjson.dumps({**chat, "chat_template_kwargs": arguments})
    except (ValueError, TypeError, AttributeError):
        return body  # the engine says what is wrong with it


def token_ids(raw: bytes) -> list[int] | None:
    """Read the answer to one of the calls; None if it has no tokens."""
    try:
        page: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    tokens = page.get("token_ids", page.get("tokens")) if isinstance(page, dict) else None
    return tokens if isinstance(tokens, list) else None
