"""Taking the tokens out of a JSON body with a kernel, so that no Python object is made for each token.

What lives here: finding the array `token_ids` in a body, and what is left of the body without it. What must not: the
fields of requests and their errors (wire).

A body that is unusual in any way is not split, and msgspec parses all of it: it accepts the same values, and explains
what is wrong with others. So splitting changes nothing but the time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from streams.core.hashing import KERNELS_AVAILABLE
from streams.errors import InvalidRequest
from streams.router_api.bodies import LARGE_BODY_BYTES
from streams.router_api.large_bodies import LargeBody
from streams.router_api.wire import BookRequest, RouteRequest

if KERNELS_AVAILABLE:
    from streams.core.kernels.json_tokens import read_tokens

_KEY = b'"token_ids"'
_NAME = b"token_ids"

#: Bytes between the key and its array: a colon, and spaces.
_GAP_MAX = 16


_T = TypeVar("_T")
_Request = TypeVar("_Request", RouteRequest, BookRequest)


def parse_with_tokens(parse: Callable[[bytes], _T], body: bytes, tokens_max: int) -> tuple[_T, bytes | None]:
    """Parse a body; return the request, and its tokens packed as u32 little-endian if they are not part of the request.

    Raises what `parse` raises for the whole body.
    """
    found = split_tokens(body, tokens_max)
    if found is not None:
        rest, packed = found
        try:
            return parse(rest), packed
        except InvalidRequest:
            pass  # its message has positions in a body that the client did not send
    return parse(body), None


def parse_large(
    large: LargeBody[_Request], parse: Callable[[bytes], _Request], body: bytes, tokens_max: int
) -> tuple[_Request, bytes | None]:
    """Parse a large body on a thread, without holding the interpreter for long. As `parse_with_tokens`.

    Raises InvalidRequest, RequestTooLarge.
    """
    found = split_tokens(body, tokens_max)  # the kernel lets other threads run meanwhile
    if found is not None and len(found[0]) <= LARGE_BODY_BYTES:
        try:
            return parse(found[0]), found[1]
        except InvalidRequest:
            pass
    return large.parse(body, tokens_max)


def split_tokens(body: bytes, tokens_max: int) -> tuple[bytes, bytes] | None:
    """Return a body with null in place of its tokens, and the tokens packed as u32 little-endian.

    None if the body must be parsed as a whole: it has no tokens, or wrong ones, or more than tokens_max; or it contains
    a backslash or the key a second time, so that the array that was found may not be the one that counts. Without
    backslashes, a quoted `token_ids` before a colon is a key and not a part of a text. Only the request itself has that
    key: in any other object it is an unknown field, which msgspec refuses.
    """
    if not KERNELS_AVAILABLE:
        return None
    key = body.find(_KEY)
    if key < 0:
        return None
    after = key + len(_KEY)
    start = body.find(b"[", after, after + _GAP_MAX)
    if start < 0 or body[after:start].strip(b" \t\r\n") != b":":
        return None
    tokens = np.empty(min((len(body) - start) // 2, tokens_max), dtype=np.uint32)  # each takes at least two bytes
    n_tokens, stop = read_tokens(np.frombuffer(body, dtype=np.uint8), start, tokens)
    if n_tokens < 0:
        return None
    rest = b"%bnull%b" % (body[:start], body[stop:])
    if b"\\" in rest or rest.count(_NAME) != 1:
        return None
    return rest, tokens[:n_tokens].tobytes()
