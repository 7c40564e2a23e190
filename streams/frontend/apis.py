"""The calls of engines that the front serves, and in what they differ (pure).

What lives here: the table of calls. What must not: what all of them share, which is everything from routing to the end
of a request (proxy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streams.frontend.requests import Kind


@dataclass(frozen=True, slots=True)
class Api:
    """What the front does with one call.

    is_routed_by_prompt: whether it computes the tokens of the prompt; otherwise the load decides. computes: whether the
    engine's model computes something, for which a rank must have room. generates: whether it generates tokens, so that
    the answer's length is booked, and the prompt may be computed on a prefill worker. migrates: whether a stream can go
    on at another engine.
    """

    is_routed_by_prompt: bool = False
    computes: bool = False
    generates: bool = False
    migrates: bool = False


_GENERATING = Api(is_routed_by_prompt=True, computes=True, generates=True, migrates=True)

APIS: Mapping[Kind, Api] = {
    Kind.COMPLETION: _GENERATING,
    Kind.CHAT: _GENERATING,
    Kind.EMBEDDINGS: Api(computes=True),
    Kind.TOKENIZE: Api(),
    Kind.DETOKENIZE: Api(),
}
