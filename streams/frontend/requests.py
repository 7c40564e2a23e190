"""What the front reads of a client's request, and what it passes on (pure).

What lives here: the few fields of a body that decide where a request goes, the headers that become fields of the route
request, and the headers that reach an engine. What must not: HTTP, and tokens (tokenizing). The body itself is
forwarded as it came, so that a field that the front does not know reaches the engine.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from streams.client.failed_engines import DIGEST_BYTES
from streams.errors import InvalidRequest, UnknownId
from streams.frontend.request_fields import (
    FIELDS,
    MESSAGE_FIELDS,
    ONE_PROMPT,
    RESPONSE_FIELDS,
    Fields,
    PromptPart,
    Prompts,
    is_true,
    prompt_part,
    prompts_of,
    read_fields,
    sequences_of,
    value,
    whole_number,
)
from streams.security.tokens import PRIORITY_MAX, Grant
from streams.settings import BodyPriority, FrontSettings, listed

#: Characters of a model's name and of each header that becomes a field of the route request; the limit of routers.
NAME_CHARS_MAX = 512

#: Taints that one request may require.
TAINTS_MAX = 64

#: Characters of the header with the experts that a request will use.
MOE_QUERY_CHARS_MAX = 4096

MOE_QUERY = "X-Moe-Query"
PRIORITY, SESSION, TENANT, TAINTS = "X-Priority", "X-Session-Id", "X-Tenant", "X-Required-Taints"
REQUEST_ID, TRACE_PARENT, TRACE_STATE = "X-Request-Id", "traceparent", "tracestate"

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


_DEFAULTS = FrontSettings()


class Kind(enum.StrEnum):
    """The calls of engines that the front serves, by their paths; `apis` has what they differ in."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


@dataclass(frozen=True, slots=True)
class FrontRequest:
    """A request as far as the front has to know it.

    prompt: the JSON of `prompt`; empty for chats. expected_output_tokens: the client's limit, None without one. part:
    how much of the prompt may be compared with what engines hold. sequences: answers that the engine generates. fields:
    all of the body.
    """

    kind: Kind
    model: str | None
    stream: bool
    expected_output_tokens: int | None
    cache_salt: str | None
    prompt: bytes
    part: PromptPart = PromptPart.WHOLE
    prompts: Prompts = ONE_PROMPT
    sequences: int = 1
    fields: Fields = field(default_factory=dict)

    @property
    def has_token_ids(self) -> bool:
        """Whether the prompt is a list of token ids, or several, which needs no tokenizer."""
        return _TOKEN_IDS.match(self.prompt) is not None


_FIELDS = {Kind.RESPONSES: RESPONSE_FIELDS, Kind.MESSAGES: MESSAGE_FIELDS}

#: The beginning of the JSON of a list of numbers, or of lists of numbers.
_TOKEN_IDS = re.compile(rb"\[\s*(\[\s*)?\d")


def read_request(kind: Kind, body: bytes) -> FrontRequest:
    """Read what the front needs. Raises InvalidRequest if the body is not a JSON object.

    A field of a wrong type is ignored: the engine refuses it, with an error of its own. Raises UnknownId and
    InvalidRequest for a request that depends on responses that engines keep.
    """
    try:
        fields = read_fields(body)
    except msgspec.ValidationError as exc:
        raise InvalidRequest("the body is not a JSON object") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        # Without the decoder's message, which may quote the body.
        raise InvalidRequest("the body is not JSON") from exc
    except RecursionError as exc:
        raise InvalidRequest("the body is nested too deeply") from exc
    if kind is Kind.RESPONSES:
        _refuse_kept(fields)
    model = value(fields, "model")
    if not isinstance(model, str) or not model:
        model = None
    if model is not None and len(model) > NAME_CHARS_MAX:
        raise InvalidRequest(f"model has more than {NAME_CHARS_MAX} characters")
    limit = value(fields, "max_output_tokens" if kind is Kind.RESPONSES else "max_tokens")
    if kind is Kind.CHAT and "max_completion_tokens" in fields:
        limit = value(fields, "max_completion_tokens") or limit
    limit = whole_number(limit)
    salt = value(fields, "cache_salt")
    part = prompt_part(fields, _FIELDS.get(kind, FIELDS), is_chat=kind is Kind.CHAT)
    if salt and not (isinstance(salt, str) and len(salt) <= NAME_CHARS_MAX):
        salt, part = None, PromptPart.NONE  # the engine may use it
    prompt = bytes(fields.get("prompt", b"")) if kind is Kind.COMPLETION else b""
    prompts = prompts_of(prompt) if prompt else ONE_PROMPT
    if prompts.n > 1 and part is PromptPart.WHOLE:
        part = PromptPart.BEGINNING
    return FrontRequest(
        kind,
        model,
        stream=is_true(value(fields, "stream")),
        expected_output_tokens=limit if limit is not None and 0 < limit <= PRIORITY_MAX else None,
        cache_salt=salt or None,
        prompt=prompt,
        part=part,
        prompts=prompts,
        sequences=sequences_of(fields, prompts.n),
        fields=fields,
    )


def _refuse_kept(fields: Fields) -> None:
    """Refuse a request of /v1/responses that needs a response which one engine keeps, or will have to keep.

    Engines keep responses in their own memory, vLLM only if it is configured to. Raises UnknownId, InvalidRequest.
    """
    if value(fields, "previous_response_id") is not None:
        raise UnknownId(
            "previous_response_id is not possible here: the front keeps no responses, and an engine at most its own",
            remedy="Send the turns so far in `input`",
        )
    if value(fields, "background"):
        raise InvalidRequest(
            "background is not possible here: one engine keeps the response, and the front has no call that fetches it",
            remedy="Leave `background` out, and use `stream` for long answers",
        )


def route_options(
    request: FrontRequest, headers: Mapping[str, str], grant: Grant, settings: FrontSettings = _DEFAULTS
) -> dict[str, Any]:
    """Return the fields of the route request. A token's tenant and highest priority override the headers.

    settings: which fields of the body count if a header is missing. Raises InvalidRequest for a header that cannot be
    used; a field that cannot be used is left to the engine.
    """
    options: dict[str, Any] = {
        "model": request.model,
        "expected_output_tokens": request.expected_output_tokens,
        "cache_salt": request.cache_salt,
        "session_id": _utf_8(SESSION, _name(headers, SESSION)) or _session(request.fields, settings),
        "tenant": grant.tenant or _name(headers, TENANT),
    }
    required = _utf_8(TAINTS, headers.get(TAINTS)) or ""
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


def _name(headers: Mapping[str, str], header: str) -> str | None:
    value = headers.get(header)
    if value is not None and len(value) > NAME_CHARS_MAX:
        raise InvalidRequest(f"{header} has more than {NAME_CHARS_MAX} characters")
    return value or None


def _utf_8(header: str, value: str | None) -> str | None:
    """Return a header's value, which routers get as text. Bytes of other encodings have become surrogates."""
    try:
        (value or "").encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"{header} is not UTF-8") from exc
    return value


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


def _session(fields: Fields, settings: FrontSettings) -> str | None:
    """Return the session that a body names. A long name is shortened to a digest."""
    for name in listed(settings.front_session_fields):
        session = value(fields, name) if name in fields else None
        if isinstance(session, str) and session:
            if len(session) <= NAME_CHARS_MAX:
                return session
            return hashlib.blake2b(session.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return None


def _body_priority(fields: Fields, settings: FrontSettings) -> int:
    if settings.front_body_priority is BodyPriority.OFF or "priority" not in fields:
        return 0
    priority = value(fields, "priority")
    if type(priority) is not int or abs(priority) > PRIORITY_MAX:
        return 0
    return -priority if settings.front_body_priority is BodyPriority.LOWER_FIRST else priority


def _priority(headers: Mapping[str, str]) -> int:
    text = headers.get(PRIORITY, "0")
    try:
        priority = int(text)
    except ValueError:
        priority = PRIORITY_MAX + 1
    if abs(priority) > PRIORITY_MAX:
        raise InvalidRequest(f"{PRIORITY} is not a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}")
    return priority
