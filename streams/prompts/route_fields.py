"""The fields of a route request that a client's request becomes, besides its tokens (pure).

What lives here: the headers that say where a request may go, and how its prompt and its load are described. What must
not: the body's fields (requests), HTTP, and the headers that reach an engine (streams.frontend.headers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from streams.client.failed_engines import DIGEST_BYTES
from streams.errors import InvalidRequest
from streams.prompts.calls import CALLS
from streams.prompts.request_fields import Fields, PromptPart, estimated_tokens, value
from streams.prompts.requests import NAME_CHARS_MAX, ClientRequest
from streams.prompts.tokenizing import NONE, Prompt
from streams.security.tokens import PRIORITY_MAX, Grant
from streams.settings import BodyPriority, PromptSettings, listed

#: Taints that one request may require.
TAINTS_MAX = 64

#: Characters of the header with the experts that a request will use.
MOE_QUERY_CHARS_MAX = 4096

MOE_QUERY = "X-Moe-Query"
PRIORITY, SESSION, TENANT, TAINTS = "X-Priority", "X-Session-Id", "X-Tenant", "X-Required-Taints"
REQUEST_ID, TRACE_PARENT, TRACE_STATE = "X-Request-Id", "traceparent", "tracestate"

_DEFAULTS = PromptSettings()


def route_options(
    request: ClientRequest, headers: Mapping[str, str], grant: Grant, settings: PromptSettings = _DEFAULTS
) -> dict[str, Any]:
    """Return the fields of the route request. A token's tenant and highest priority override the headers.

    settings: which fields of the body count if a header is missing. Raises InvalidRequest for a header that cannot be
    used; a field that cannot be used is left to the engine.
    """
    options: dict[str, Any] = {
        "model": request.model,
        "expected_output_tokens": request.expected_output_tokens,
        "cache_salt": request.cache_salt,
        "session_id": utf_8(SESSION, _name(headers, SESSION)) or _session(request.fields, settings),
        "tenant": grant.tenant or _name(headers, TENANT),
    }
    required = utf_8(TAINTS, headers.get(TAINTS)) or ""
    taints = [taint.strip() for taint in required.split(",") if taint.strip()]
    if len(taints) > TAINTS_MAX or any(len(taint) > NAME_CHARS_MAX for taint in taints):
        raise InvalidRequest(f"{TAINTS} has more than {TAINTS_MAX} taints, or one of over {NAME_CHARS_MAX} characters")
    options["required_taints"] = taints or None
    priority = _priority(headers) if PRIORITY in headers else _body_priority(request.fields, settings)
    if grant.priority_max is not None:
        priority = min(priority, grant.priority_max)
    options["priority"] = priority or None
    for name in (TRACE_PARENT, TRACE_STATE):
        options[name] = headers.get(name)
    query = _moe_query(headers)
    options["router_config_override"] = None if query is None else {"moe_query": query}
    return {name: value for name, value in options.items() if value is not None}


def load_options(request: ClientRequest, body: bytes, prompt: Prompt) -> dict[str, Any]:
    """Return the fields of the route request that say what a request is beyond its tokens."""
    part, call = request.part, CALLS[request.kind]
    if prompt.source == NONE:
        part, more_tokens = PromptPart.NONE, estimated_tokens(body) - 1 if call.computes else 0
    else:
        more_tokens = request.prompts.more_tokens(len(prompt.tokens) // 4)
    if part is PromptPart.WHOLE and not prompt.whole:
        part = PromptPart.BEGINNING
    options: dict[str, Any] = {}
    if part is not PromptPart.WHOLE:
        options["prompt_part"] = part.value
    if more_tokens:
        options["more_tokens"] = more_tokens
    if request.sequences > 1 and call.generates:
        options["sequences"] = request.sequences
    return options


def utf_8(header: str, value: str | None) -> str | None:
    """Return a header's value, which is used as text. Bytes of other encodings have become surrogates.

    Raises InvalidRequest if it has some.
    """
    try:
        (value or "").encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"{header} is not UTF-8") from exc
    return value


def _name(headers: Mapping[str, str], header: str) -> str | None:
    value = headers.get(header)
    if value is not None and len(value) > NAME_CHARS_MAX:
        raise InvalidRequest(f"{header} has more than {NAME_CHARS_MAX} characters")
    return value or None


def _moe_query(headers: Mapping[str, str]) -> Any:
    """Read the experts that a request will use; the router checks the fields."""
    text = headers.get(MOE_QUERY)
    if text is None:
        return None
    try:
        query = msgspec.json.decode(text) if len(text) <= MOE_QUERY_CHARS_MAX else None
        orjson.dumps([[query]])  # as deep as in a route request
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, TypeError):
        query = None
    if not isinstance(query, dict):
        raise InvalidRequest(f"{MOE_QUERY} is not a JSON object of at most {MOE_QUERY_CHARS_MAX} characters")
    return query


def _session(fields: Fields, settings: PromptSettings) -> str | None:
    """Return the session that a body names. A long name is shortened to a digest."""
    for name in listed(settings.session_fields):
        session = value(fields, name) if name in fields else None
        if isinstance(session, str) and session:
            if len(session) <= NAME_CHARS_MAX:
                return session
            return hashlib.blake2b(session.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return None


def _body_priority(fields: Fields, settings: PromptSettings) -> int:
    if settings.body_priority is BodyPriority.OFF or "priority" not in fields:
        return 0
    priority = value(fields, "priority")
    if type(priority) is not int or abs(priority) > PRIORITY_MAX:
        return 0
    return -priority if settings.body_priority is BodyPriority.LOWER_FIRST else priority


def _priority(headers: Mapping[str, str]) -> int:
    text = headers.get(PRIORITY, "0")
    try:
        priority = int(text)
    except ValueError:
        priority = PRIORITY_MAX + 1
    if abs(priority) > PRIORITY_MAX:
        raise InvalidRequest(f"{PRIORITY} is not a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}")
    return priority
