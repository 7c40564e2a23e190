"""The calls of engines that clients make, and what each means for a routed prompt (pure).

What lives here: the paths, and the table of calls. What must not: the fields of their bodies (request_fields), and how
a front answers them (streams.frontend.apis).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from streams.prompts.error_pages import error_page, message_error_page


class Kind(enum.StrEnum):
    """Calls by their paths."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


@dataclass(frozen=True, slots=True)
class Call:
    """What one call means.

    is_routed_by_prompt: whether the tokens of its prompt are compared with what engines hold; otherwise the load
    decides. computes: whether the engine's model computes something, for which a rank must have room. generates:
    whether it generates tokens, so that the answer's length is booked, and that it is bound to a decode worker, if its
    model has any. becomes_chat: whether the engine makes a chat of the request (api_chats). error_page: an error as the
    answer.
    """

    is_routed_by_prompt: bool = False
    computes: bool = False
    generates: bool = False
    becomes_chat: bool = False
    error_page: Callable[[int, str, str | None], dict[str, Any]] = error_page


_GENERATING = Call(is_routed_by_prompt=True, computes=True, generates=True)
_AGENTS = Call(is_routed_by_prompt=True, computes=True, generates=True, becomes_chat=True)

CALLS: Mapping[Kind, Call] = {
    Kind.COMPLETION: _GENERATING,
    Kind.CHAT: _GENERATING,
    Kind.RESPONSES: _AGENTS,
    Kind.MESSAGES: replace(_AGENTS, error_page=message_error_page),
    Kind.COUNT_TOKENS: Call(error_page=message_error_page),
    Kind.EMBEDDINGS: Call(computes=True),
    Kind.TOKENIZE: Call(),
    Kind.DETOKENIZE: Call(),
}


def call_of(path: str) -> Kind | None:
    """Return the call of a path, whose query and last slash do not matter; None if it is another one."""
    return _PATHS.get(path.partition("?")[0].rstrip("/"))


_PATHS: Mapping[str, Kind] = {kind.value: kind for kind in Kind}
