"""The headers that a front passes on, to engines and to clients (pure).

What lives here: which headers these are. What must not: the headers that say where a request goes
(streams.prompts.route_fields).
"""

from __future__ import annotations

from collections.abc import Mapping

from streams.prompts.route_fields import REQUEST_ID, TRACE_PARENT, TRACE_STATE

#: A client that sends this header, with any value, gets headers that say how its request was routed.
DETAILS = "X-Kvstreams-Details"

#: The headers of a request that reach an engine. A list of what is forwarded, and not of what is withheld, so that no
#: credential of a client does, whatever its header is called.
FORWARDED = ("Content-Type", "Accept", "User-Agent", REQUEST_ID, TRACE_PARENT, TRACE_STATE)

#: Headers of an answer that belong to one connection; all others reach the client.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",  # set again where the length is known
    }
)


def engine_headers(headers: Mapping[str, str], request_id: str, key: str | None) -> dict[str, str]:
    """Return the headers for an engine. key: the engine's own, if it needs one."""
    sent = {name: headers[name] for name in FORWARDED if name in headers}
    sent.setdefault("Content-Type", "application/json")
    sent[REQUEST_ID] = request_id
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    return sent


def client_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers of an engine's answer that reach the client."""
    named = {header.strip().lower() for header in headers.get("Connection", "").split(",")}
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP | named]
