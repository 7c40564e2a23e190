"""What fronts and pickers read of a client's request (pure).

What lives here: the few fields of a body that decide where a request goes. What must not: HTTP, headers (route_fields),
and tokens (tokenizing). Nothing else of a body is parsed, so that a field that is not known reaches the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from streams.errors import InvalidRequest, UnknownId
from streams.prompts.calls import Kind
from streams.prompts.request_fields import (
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
from streams.security.tokens import PRIORITY_MAX

#: Characters of a model's name and of each header that becomes a field of the route request; the limit of routers.
NAME_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class ClientRequest:
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


def read_request(kind: Kind, body: bytes) -> ClientRequest:
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
    return ClientRequest(
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
