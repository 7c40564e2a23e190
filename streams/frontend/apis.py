"""The calls of engines that the front serves, and in what they differ (pure).

What lives here: the table of calls. What must not: what all of them share, which is everything from routing to the end
of a request (proxy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from streams.frontend.answers import (
    error_event,
    error_page,
    message_error_event,
    message_error_page,
    response_error_event,
)
from streams.frontend.requests import Kind


@dataclass(frozen=True, slots=True)
class Api:
    """What the front does with one call.

    is_routed_by_prompt: whether it computes the tokens of the prompt; otherwise the load decides. computes: whether the
    engine's model computes something, for which a rank must have room. generates: whether it generates tokens, so that
    the answer's length is booked, and that it is bound to a decode worker, if its model has any. splits: whether the
    prompt may then be computed on a prefill worker. migrates: whether a
    stream can go on at another engine. becomes_chat: whether the engine makes a chat of the request (api_chats).
    error_page, error_event: an error as the answer, and as the end of a stream that broke.
    """

    is_routed_by_prompt: bool = False
    computes: bool = False
    generates: bool = False
    splits: bool = False
    migrates: bool = False
    becomes_chat: bool = False
    error_page: Callable[[int, str, str | None], dict[str, Any]] = error_page
    error_event: Callable[[int, str, str, int], bytes] = error_event


_GENERATING = Api(is_routed_by_prompt=True, computes=True, generates=True, splits=True, migrates=True)
_AGENTS = Api(is_routed_by_prompt=True, computes=True, generates=True, becomes_chat=True)

APIS: Mapping[Kind, Api] = {
    Kind.COMPLETION: _GENERATING,
    Kind.CHAT: _GENERATING,
    Kind.RESPONSES: replace(_AGENTS, error_event=response_error_event),
    Kind.MESSAGES: replace(_AGENTS, error_page=message_error_page, error_event=message_error_event),
    Kind.COUNT_TOKENS: Api(error_page=message_error_page),
    Kind.EMBEDDINGS: Api(computes=True),
    Kind.TOKENIZE: Api(),
    Kind.DETOKENIZE: Api(),
}
