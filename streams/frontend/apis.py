"""What a front does with each call besides routing it (pure).

What lives here: the table. What must not: what a call means for its prompt (streams.prompts.calls), and what all of
them share, which is everything from routing to the end of a request (proxy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streams.frontend.answers import error_event, message_error_event, response_error_event
from streams.prompts.calls import Kind


@dataclass(frozen=True, slots=True)
class Api:
    """What a front does with one call.

    splits: whether the prompt may be computed on a prefill worker. migrates: whether a stream can go on at another
    engine. error_event: an error as the end of a stream that broke.
    """

    splits: bool = False
    migrates: bool = False
    error_event: Callable[[int, str, str, int], bytes] = error_event


_GENERATING = Api(splits=True, migrates=True)

APIS: Mapping[Kind, Api] = {
    Kind.COMPLETION: _GENERATING,
    Kind.CHAT: _GENERATING,
    Kind.RESPONSES: Api(error_event=response_error_event),
    Kind.MESSAGES: Api(error_event=message_error_event),
    Kind.COUNT_TOKENS: Api(),
    Kind.EMBEDDINGS: Api(),
    Kind.TOKENIZE: Api(),
    Kind.DETOKENIZE: Api(),
}
