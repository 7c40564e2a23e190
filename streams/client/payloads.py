"""Requests as a client sends them: to a router, and to an engine (pure).

What lives here: packing tokens, the fields of a route request as query parameters, and the body of a completion. What
must not: sending them (http, engine). Fields of a request are not checked here, but by the router, so that its message
names what it knows.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, TypeGuard

import orjson

from streams.errors import InvalidRequest

#: Characters of a query with which tokens are sent packed. A server accepts lines of about 8 KiB; a longer query, such
#: as one with hundreds of worker ids, becomes a JSON body.
QUERY_CHARS_MAX = 4096

#: The greatest number of tokens that a router takes in a report.
COUNT_MAX = 2**31 - 1

#: What `stop_conditions` may contain; each is a field of a completion under the same name.
STOP_CONDITIONS = ("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids")

#: What `sampling_options` may contain; each is a field of a completion under the same name.
SAMPLING_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logit_bias",
)

#: Of the input tokens of a message, those that were read from the engine's cache, and all that are counted apart.
_CACHE_READ = "cache_read_input_tokens"
_MESSAGE_PARTS = frozenset({_CACHE_READ, "cache_creation_input_tokens"})

#: Types of a message's parts that are text, and the field with it.
TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

#: Fields of parts that vLLM reads as media. They count more than the type if there is none, or if a part has a `uuid`.
MEDIA_FIELDS = frozenset(
    {
        *("input_image", "image_url", "image_embeds", "image_pil", "audio_embeds", "audio_url", "input_audio"),
        *("video_embeds", "video_url", "prompt_embeds"),
    }
)

#: Fields of a completion that the client sets itself.
_OWN_FIELDS = ("prompt", "stream", "return_token_ids", "n", "model")


class RequestOptions(TypedDict, total=False):
    """Fields of a route request that every routing method accepts as keyword arguments; docs/http.md describes them.

    They are passed on as they are, so a router that is newer than this client may accept more. tenant: the header
    X-Tenant, in whose name a request with `queue` waits. traceparent, tracestate: W3C trace context, only for
    KvRouterClient.
    """

    lora_name: str | None
    namespace: str | None
    cache_salt: str | None
    traceparent: str
    tracestate: str
    session_id: str | None
    tenant: str | None
    priority: int
    priority_jump: float
    queue: Literal["on", "off"]
    queue_timeout_ms: int | None
    required_taints: Sequence[str] | None
    phase: str | None
    dp_rank: int | None
    allowed_worker_ids: Sequence[int] | None
    excluded_worker_ids: Sequence[int] | None
    expected_output_tokens: int | None
    prompt_part: Literal["whole", "beginning", "none"]
    more_tokens: int
    sequences: int
    kv_sources: bool


class RouteOptions(RequestOptions, total=False):
    """RequestOptions, and the model, which may be left out while only one is served."""

    model: str | None


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as u32 little-endian; raises InvalidRequest. Arrays of numpy are accepted as well."""
    if isinstance(token_ids, str | bytes | bytearray | memoryview):
        raise InvalidRequest(f"token_ids is of type {type(token_ids).__name__}, not a sequence of whole numbers")
    try:
        packed = array("I", token_ids)
    except (TypeError, OverflowError, ValueError) as exc:
        raise InvalidRequest(f"token_ids is not a sequence of whole numbers from 0 to 2^32 - 1: {exc}") from exc
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return packed tokens as integers."""
    return token_array(packed).tolist()


def token_array(packed: bytes) -> array[int]:
    """Return packed tokens as an array, which is copied and packed again in a hundredth of the time of a list."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def query_of(fields: Mapping[str, Any]) -> dict[str, str] | None:
    """Return a route request's fields as query parameters, or None if they need a JSON body.

    Lists become items separated by commas, and overrides get names of their own. An empty list of worker ids excludes
    or allows none, which an empty parameter means too.
    """
    query: dict[str, str] = {}
    for name, value in fields.items():
        if name == "router_config_override":
            query.update({key: _parameter(part) for key, part in value.items() if part is not None})
        else:
            query[name] = _parameter(value)
    return query if sum(len(name) + len(value) + 2 for name, value in query.items()) <= QUERY_CHARS_MAX else None


def _parameter(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):  # before the abstract types, which take long to check
        return str(value)
    if isinstance(value, Mapping):
        return orjson.dumps(value).decode()
    if isinstance(value, Sequence):
        return ",".join(map(str, value))
    return str(value)


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value; a router uses its defaults for all others."""
    return {name: value for name, value in fields.items() if value is not None}


def completion_fields(
    model: str | None,
    stop_conditions: Mapping[str, Any] | None,
    sampling_options: Mapping[str, Any] | None,
    extra_args: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the fields of a completion without its prompt. Raises InvalidRequest for unknown names.

    extra_args: further fields of the completion, for what only some engines have.
    """
    body: dict[str, Any] = {}
    for name, values, known in (
        ("stop_conditions", stop_conditions, STOP_CONDITIONS),
        ("sampling_options", sampling_options, SAMPLING_OPTIONS),
    ):
        for key, value in (values or {}).items():
            if key not in known:
                raise InvalidRequest(
                    f"{name} has no field {key!r}; the known ones are {', '.join(known)}",
                    remedy="Pass fields that only some engines have as extra_args",
                )
            if value is not None:
                body[key] = value
    for key, value in (extra_args or {}).items():
        if key in _OWN_FIELDS:
            raise InvalidRequest(f"extra_args contains {key!r}, which the client sets itself")
        body[key] = value
    if model is not None:
        body["model"] = model
    return body


class PromptUsage(NamedTuple):
    """What an engine's usage says of a prompt: its tokens, and those that came from its cache; None if not reported."""

    prompt_tokens: int
    cached_tokens: int | None = None


def prompt_usage(usage: Any) -> PromptUsage | None:
    """Read the usage of an answer, as completions, chats, responses and messages have it; None if it is none of these.

    A response for which the engine has called tools itself has the sums of several prompts, which are no prompt's.
    """
    if not isinstance(usage, Mapping):
        return None
    n_prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details")
    if n_prompt is None:
        n_prompt, details = usage.get("input_tokens"), usage.get("input_tokens_details")
    cached = None
    if isinstance(details, Mapping):
        cached = details.get("cached_tokens")
        turns = details.get("input_tokens_per_turn")
        if isinstance(turns, Sequence) and len(turns) > 1:
            return None
    elif not _MESSAGE_PARTS.isdisjoint(usage):
        # In messages, the number of input tokens leaves out those that were read from the cache or written to it.
        cached = usage.get(_CACHE_READ)
        parts = [n_prompt, *(usage[name] for name in _MESSAGE_PARTS if usage.get(name) is not None)]
        n_prompt = sum(parts) if all(map(is_count, parts)) else None
    if not is_count(n_prompt):
        return None
    return PromptUsage(n_prompt, cached if is_count(cached) and cached <= n_prompt else None)


def text_field(part: Mapping[str, Any]) -> str | None:
    """Return the field of a message's part with its text; None if the part is no text, or no type says that it is."""
    type_ = part.get("type")
    field = TEXT_FIELDS.get(type_) if isinstance(type_, str) else None
    return None if part.get("uuid") is not None and not MEDIA_FIELDS.isdisjoint(part) else field


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value of JSON is a number of tokens."""
    return type(value) is int and 0 <= value <= COUNT_MAX


def with_prompt(fields: Mapping[str, Any], prompt: Sequence[int]) -> bytes:
    """Return the body of a completion that streams token ids, with its usage at the end.

    Raises InvalidRequest if a field is not JSON.
    """
    options = {**(fields.get("stream_options") or {}), "include_usage": True}
    own = {"prompt": prompt, "stream": True, "return_token_ids": True, "stream_options": options}
    try:
        return orjson.dumps({**fields, **own})
    except TypeError as exc:
        raise InvalidRequest(f"a field of the completion is not JSON: {exc}") from exc
