"""Decoding a body, and what an error says of one that cannot be decoded.

What lives here: messages that name the fields and values that are possible, and never repeat a large body. What must
not: the fields of requests (requests).
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from streams.errors import InvalidRequest

#: Characters of a message about an invalid body. It may quote the body, which may be megabytes long.
_MESSAGE_CHARS_MAX = 1000

#: Characters at the end of a message that are kept when its middle is left out: the path of a field, which is shorter.
_MESSAGE_END_CHARS = 256


_T = TypeVar("_T")


def decode_body(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode a body; raises InvalidRequest, which explains what is wrong with it."""
    if not body.strip():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:  # msgspec raises the latter for invalid UTF-8 in strings
        raise invalid_body(exc, decoder.type) from exc
    except RecursionError as exc:
        raise InvalidRequest("the body is not valid: it is nested too deeply") from exc


#: msgspec's message about an unknown field: its name, and the path of the object that has it.
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$((?:\.\w+)*)`)?", re.DOTALL)


def invalid_body(exc: Exception, kind: Any) -> InvalidRequest:
    """Explain why a body is not valid. kind: the type as which it was decoded; of an unknown field, list the others."""
    message = without_middle(str(exc))
    unknown = _UNKNOWN_FIELD.fullmatch(message)
    if unknown is None:
        return InvalidRequest(f"the body is not valid: {with_values(message, kind)}")
    name, path = shortened(unknown[1]), (unknown[2] or "").lstrip(".")
    where = f" of {path}" if path else ""
    return InvalidRequest(
        f"the body is not valid: unknown field {name!r}{where}; the known ones are {', '.join(_fields_at(kind, path))}"
    )


#: msgspec's message about a value that is none of those that a field may have, and the path of that field.
_INVALID_VALUE = re.compile(r"Invalid enum value .* - at `\$((?:\.\w+)+)`", re.DOTALL)


def with_values(message: str, kind: Any) -> str:
    """A message of msgspec, with the values that the field may have if it is about one with few of them."""
    message = without_middle(message)
    invalid = _INVALID_VALUE.fullmatch(message)
    if invalid is None:
        return shortened(message)
    path, _, name = invalid[1].lstrip(".").rpartition(".")
    values: list[object] = []
    for field_kind in _kinds_of(_struct_at(kind, path), name):
        if isinstance(field_kind, inspect.LiteralType):
            values += field_kind.values
        elif isinstance(field_kind, inspect.EnumType):
            values += [member.value for member in field_kind.cls]
    return shortened(message) + (f"; use one of {', '.join(map(str, values))}" if values else "")


def _fields_at(kind: Any, path: str) -> list[str]:
    """Names of the fields of the struct at a path of fields, such as `router_config_override.moe_query`."""
    return [field.encode_name for field in _struct_at(kind, path).fields]


def _struct_at(kind: Any, path: str) -> inspect.StructType:
    struct = inspect.type_info(kind)
    for name in filter(None, path.split(".")):
        assert isinstance(struct, inspect.StructType)  # the path leads through objects
        below = next(
            (field_kind for field_kind in _kinds_of(struct, name) if isinstance(field_kind, inspect.StructType)), None
        )
        if below is None:  # the unknown name itself looks like the end of the message
            break
        struct = below
    assert isinstance(struct, inspect.StructType)
    return struct


def _kinds_of(struct: inspect.StructType, name: str) -> tuple[inspect.Type, ...]:
    """The types of which a field's value may be; none if there is no such field."""
    field_kind = next((field.type for field in struct.fields if field.encode_name == name), None)
    if field_kind is None:
        return ()
    return field_kind.types if isinstance(field_kind, inspect.UnionType) else (field_kind,)


def without_middle(message: str) -> str:
    """Return the beginning and the end of a message that quotes megabytes of a body.

    The search for the end of a name of 15 MB would take 0.3 s, and no other thread would run meanwhile.
    """
    longest = _MESSAGE_CHARS_MAX + 2 * _MESSAGE_END_CHARS  # of a message that is searched
    if len(message) <= longest:
        return message
    return message[: longest - _MESSAGE_END_CHARS] + message[-_MESSAGE_END_CHARS:]


def shortened(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARS_MAX else f"{text[:_MESSAGE_CHARS_MAX]}…"
