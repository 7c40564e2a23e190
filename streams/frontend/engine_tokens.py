"""Asking an engine for the tokens of a request's prompt.

What lives here: the calls that engines have for this, and which of them an engine lacks. What must not: when an engine
is asked (tokenizing, parity_probes), and what becomes of its answer.

vLLM has two. `/v1/chat/completions/render` reads a chat as the call that generates does. `/tokenize` does not read all
of its fields, such as `documents`, `reasoning_effort` and the `reasoning_content` of past turns. So chats are rendered
where the engine can (vLLM 0.20 and later), and tokenized otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from streams.client.plain_http import PlainHttp
from streams.frontend.requests import Kind

RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"

#: The calls for each kind of prompt, the better one first.
CALLS: Mapping[Kind, tuple[str, ...]] = {Kind.CHAT: (RENDER, TOKENIZE), Kind.COMPLETION: (TOKENIZE,)}

#: Statuses of engines that do not have a call.
LACKING = (404, 405, 501)

#: How long it is remembered that an engine lacks a call. Another version may run under its URL afterwards.
LACKS_S = 600.0

#: Engines of which this is remembered.
LACKING_MAX = 1024


@dataclass(frozen=True, slots=True)
class TokensAnswer:
    """An engine's answer. tokens: None without any. call: that was answered."""

    status: int
    tokens: list[int] | None
    call: str


class EngineTokens:
    """Asks engines for tokens. Owner of what is known about the calls that they lack. Used on one loop."""

    def __init__(self, timeout_s: float, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        """timeout_s, bytes_max: limits of one answer."""
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        self._clock = clock
        self._lacks_until_s: dict[tuple[str, str], float] = {}

    async def ask(self, http: PlainHttp, url: str, kind: Kind, body: bytes, key: str | None) -> TokensAnswer:
        """Return the tokens of a prompt. key: the API key of the engine. Raises OSError, TimeoutError."""
        calls = [call for call in CALLS[kind] if self._lacks_until_s.get((url, call), 0.0) < self._clock()]
        for call in calls[:-1]:
            answer = await self._answer(http, url, call, body, key)
            if answer.status not in LACKING:
                return answer
            if len(self._lacks_until_s) >= LACKING_MAX:
                self._lacks_until_s.clear()
            self._lacks_until_s[url, call] = self._clock() + LACKS_S
        return await self._answer(http, url, calls[-1], body, key)

    async def _answer(self, http: PlainHttp, url: str, call: str, body: bytes, key: str | None) -> TokensAnswer:
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        sent = without_media(body) if call == RENDER else body
        response = await http.request("POST", url, call, headers, sent, self._timeout_s, is_short=True)
        try:
            raw = await response.read(self._bytes_max)
        finally:
            response.close()
        is_page = response.status == 200 and len(raw) <= self._bytes_max
        return TokensAnswer(response.status, token_ids(raw) if is_page else None, call)


def without_media(body: bytes) -> bytes:
    """Return the JSON of a chat with which an engine renders images, but does not send them back."""
    return body.rstrip()[:-1] + b',"mm_payload":"none"}'


def token_ids(raw: bytes) -> list[int] | None:
    """Read the answer to one of the calls; None if it has no tokens."""
    try:
        page: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    tokens = page.get("token_ids", page.get("tokens")) if isinstance(page, dict) else None
    return tokens if isinstance(tokens, list) else None
