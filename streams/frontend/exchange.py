"""One request that the front is serving, as the modules that serve it share it.

What lives here: the values. What must not: the steps from the request to its end (proxy, prefilling, migrating), and
the client's connection (client_stream).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from streams.client.booking import Booking
from streams.frontend import metrics
from streams.frontend.resuming import StreamRelay
from streams.prompts.calls import Kind
from streams.prompts.tokenizing import Prompt


class MigratingStream:
    """What is needed to resume the answer to one request at another engine.

    relay: the stream. body: the client's request. headers: for engines. prompt: the tokens of the whole prompt as the
    front knows them, u32 LE; None if it does not. heard_s: when the last byte of an engine came. fields: of the body
    without its prompt, from the first migration on. failed: the incarnations of workers that failed the request, None
    if they are not known.
    """

    def __init__(
        self, kind: Kind, body: bytes, headers: Mapping[str, str], model: str | None, prompt: bytes | None
    ) -> None:
        self.kind = kind
        self.body = body
        self.headers = headers
        self.model = model
        self.prompt = prompt
        self.heard_s = 0.0
        self.relay: StreamRelay | None = None
        self.fields: dict[str, Any] = {}
        self.failed: dict[int, int | None] = {}


@dataclass(slots=True, eq=False)
class Exchange:
    """One request that the front is serving, which the proxy's periodic check examines.

    n_tokens: of the answer, so far; reported_tokens, reported_s: what the router knows, and since when.
    writing_since_s: when the client began to be too slow for the bytes that it is being sent. migrating: what is
    needed to resume its stream at another engine, None if it does not migrate. resumed_tokens: of the answer, those
    that the booking counts as its prompt.
    prefilled_on: the prefill worker, if its prompt is computed on one. pulls_from: the rank from which its engine may
    pull blocks of the prompt, if it was told of one. answering: whether the client gets an answer.
    model, prompt: what the request was routed by. usage: what the engine that answered last reports; None if nothing.
    hides_usage: the client of a stream did not ask for it.
    """

    http: web.Request
    began_s: float
    booking: Booking | None = None
    n_tokens: int = 0
    reported_tokens: int = 0
    reported_s: float = 0.0
    writing_since_s: float | None = None
    outcome: str = metrics.CLIENT_GONE
    migrating: MigratingStream | None = None
    resumed_tokens: int = 0
    prefilled_on: str | None = None
    pulls_from: str | None = None
    answering: bool = False
    model: str | None = None
    prompt: Prompt | None = None
    usage: dict[str, Any] | None = None
    hides_usage: bool = False
