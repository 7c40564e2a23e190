"""Cross-origin requests: which pages of browsers may call the front, and what they may read (pure).

What lives here: the headers that browsers ask for (CORS). What must not: HTTP itself (server, proxy), and who may use a
model, which tokens decide: a page sends one like every client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from streams.settings import listed

#: Every origin.
ANY_ORIGIN = "*"

#: How long a browser remembers the answer to a preflight.
MAX_AGE_S = 600

#: Characters of the list of headers that a page wants to send.
HEADERS_CHARS_MAX = 4096

#: Headers of answers that a page may read in addition to those that every page may.
EXPOSED = (
    "X-Request-Id",
    "Retry-After",
    "X-Kvstreams-Worker",
    "X-Kvstreams-Overlap-Blocks",
    "X-Kvstreams-Mode",
    "X-Kvstreams-Prefill-Worker",
    "X-Kvstreams-Kv-Sources",
    "X-Kvstreams-Pulls-From",
)

_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")


class Cors:
    """The origins that may call, and the headers of answers for them."""

    def __init__(self, origins: str) -> None:
        """origins: separated by commas; `*` is every one, and nothing is none."""
        self._origins = frozenset(origin.rstrip("/").lower() for origin in listed(origins))

    def headers(self, request: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that an answer needs. request: the request's headers."""
        if not self._origins:
            return {}
        origin = request.get("Origin")
        if origin is None or not self._allows(origin):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": ", ".join(EXPOSED),
            "Vary": "Origin",
        }

    def preflight(self, method: str, request: Mapping[str, str]) -> dict[str, str] | None:
        """Return the headers of the answer to a preflight; None if the request is none, or if its origin may not call.

        A browser sends it without a token.
        """
        asked = request.get("Access-Control-Request-Method")
        origin = request.get("Origin")
        if method != "OPTIONS" or asked is None or origin is None or not self._allows(origin):
            return None
        allowed = self.headers(request) | {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Max-Age": str(MAX_AGE_S),
            "Vary": "Origin, Access-Control-Request-Headers",
        }
        names = request.get("Access-Control-Request-Headers", "")
        if names and len(names) <= HEADERS_CHARS_MAX and _HEADER_NAMES.fullmatch(names):
            allowed["Access-Control-Allow-Headers"] = names
        return allowed

    def _allows(self, origin: str) -> bool:
        return ANY_ORIGIN in self._origins or origin.lower() in self._origins
