"""A GET of a router's API from a command, with errors that say what to do.

What lives here: the call. What must not: what the answers mean.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from typing import Any

import orjson

from streams.errors import ProcessError
from streams.security.tls import UNTRUSTED_REMEDY, why_no_connection


def router_json(url: str, path: str, token: str | None, timeout_s: float) -> Any:
    """Read a path of a router's API as JSON. Raises ProcessError if no router answers as one should."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return orjson.loads(response.read())
    except urllib.error.HTTPError as exc:
        with exc:
            raise ProcessError(
                f"the router at {url} answers GET {path} with {exc.code}: {_message(exc.read())}",
                remedy="--token-file names a file with a token that has the right `read`" * (exc.code in (401, 403)),
            ) from exc
    except (OSError, ValueError, http.client.HTTPException) as exc:
        reason = getattr(exc, "reason", None) or exc
        remedy = "Give its URL"
        if isinstance(reason, ssl.SSLError):
            remedy = UNTRUSTED_REMEDY if isinstance(reason, ssl.SSLCertVerificationError) else remedy
            reason = why_no_connection(reason)
        raise ProcessError(f"no router answers at {url}: {reason}", remedy=remedy) from exc


def _message(body: bytes) -> str:
    """The message of an error in the shape of all errors."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason is given"
