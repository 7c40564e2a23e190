"""The usage that an engine reports at the end of an answer: asking for it, and reading it (pure).

What lives here: the field that asks engines for the usage of a stream, and the removal of its event from what a client
sees that did not ask. What must not: HTTP, and what is done with the numbers (auditing).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from streams.prompts.request_fields import is_true

#: Bytes of an event that is not complete and is held back. A longer one is passed on as it comes.
EVENT_BYTES_MAX = 64 << 20

#: The event with the usage has no choices. Within a string, quotes are escaped, so that no text looks like this.
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')

#: The beginning of a finish reason, and its greatest length. That of a choice that has not ended is null.
_FINISH_REASON = re.compile(rb'"finish_reason"\s*:\s*"')
_FINISH_REASON_BYTES_MAX = 32

#: The name of an event of /v1/responses and /v1/messages that has the usage. No text looks like this, since line breaks
#: in strings are escaped.
_WITH_USAGE = re.compile(rb"event: ?(?:response\.(?:completed|incomplete|failed)|message_delta)\r?\n")
_NAME_BYTES_MAX = 32

#: The end of an event, as servers write it.
_END = re.compile(rb"\r?\n\r?\n")
_END_BYTES_MAX = 4

_OPTIONS = "stream_options"

#: What an engine's error names that does not know the field.
USAGE_FIELD = _OPTIONS.encode()


class _Body(msgspec.Struct):
    stream_options: Any = None


_DECODER = msgspec.json.Decoder(_Body)


def usage_options(body: bytes) -> dict[str, Any] | None:
    """Return the options with which a stream reports its usage; None if it does so by itself. body: a JSON object."""
    options = _DECODER.decode(body).stream_options
    own = options if isinstance(options, dict) else {}
    # Options that the engine will refuse stay as they are.
    return None if is_true(own.get("include_usage")) or options not in (None, own) else {**own, "include_usage": True}


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a request with further fields. Its bytes stay; of a repeated field, the last one counts."""
    if not fields:
        return body
    end = body.rindex(b"}")
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return body[:end] + comma + orjson.dumps(fields)[1:-1] + body[end:]


def usage_fields(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the field that asks for the usage with these options."""
    return {} if options is None else {_OPTIONS: options}


def usage_of_page(body: bytes) -> dict[str, Any]:
    """Return the usage of an answer that was not streamed; empty without one."""
    try:
        usage = orjson.loads(body)["usage"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return usage if isinstance(usage, dict) else {}


class UsageWatch:
    """Finds the usage in a stream of server-sent events. Everything else passes as it came.

    The event with the usage follows the one with the finish reason. Until then, bytes pass as they come; from then on,
    an event passes once it is complete.
    usage: of the stream; None if it did not come yet.
    """

    __slots__ = ("_finished", "_hides", "_rest", "usage")

    def __init__(self, *, hides: bool) -> None:
        """hides: take the event with the usage out, since the client did not ask for it."""
        self._hides = hides
        self._finished = False
        self._rest = b""  # before the finish reason: the last bytes, which may have its beginning
        self.usage: dict[str, Any] | None = None

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream; return those that the client gets now."""
        if not self._finished:
            joined = self._rest + data
            if not _FINISH_REASON.search(joined):
                self._rest = joined[-_FINISH_REASON_BYTES_MAX:]
                return data
            self._finished, self._rest = True, b""
        received = self._rest + data
        ends = [match.end() for match in _END.finditer(received)]
        end = ends[-1] if ends else 0
        if len(received) - end > EVENT_BYTES_MAX:
            end = len(received)
        whole, self._rest = received[:end], received[end:]
        if _NO_CHOICES.search(whole):
            whole = self._without_usage(whole)
        return whole if self._hides else data

    def rest(self) -> bytes:
        """Return what was held back of an event that did not become complete."""
        rest, self._rest = self._rest, b""
        return rest if self._hides and self._finished else b""

    def _without_usage(self, events: bytes) -> bytes:
        kept, start = [], 0
        for match in _END.finditer(events):
            event = events[start : match.end()]
            start = match.end()
            if not (_NO_CHOICES.search(event) and self._take(event)):
                kept.append(event)
        return b"".join([*kept, events[start:]])

    def _take(self, event: bytes) -> bool:
        """Read an event that has no choices; returns whether it has the usage."""
        data = event.strip()
        try:
            page = orjson.loads(data[5:]) if data.startswith(b"data:") else {}
        except orjson.JSONDecodeError:
            return False
        if page.get("choices") != [] or not isinstance(page.get("usage"), dict):
            return False
        self.usage = page["usage"]
        return True


class EventUsageWatch:
    """Finds the usage in a stream whose events have names. Everything passes as it came.

    usage: of the stream; None if it did not come yet.
    """

    __slots__ = ("_event", "_rest", "usage")

    def __init__(self) -> None:
        self._event: bytearray | None = None  # what has come of an event with the usage
        self._rest = b""  # the last bytes, which may have the beginning of such an event
        self.usage: dict[str, Any] | None = None

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream, and return them."""
        unread = data
        while unread:
            unread = self._search(unread) if self._event is None else self._collect(self._event, unread)
        return data

    def rest(self) -> bytes:
        """Return what was held back, which is nothing."""
        return b""

    def _search(self, data: bytes) -> bytes:
        """Look for an event with the usage; return the bytes after its name."""
        joined = self._rest + data
        name = _WITH_USAGE.search(joined)
        if name is None:
            self._rest = joined[-_NAME_BYTES_MAX:]
            return b""
        self._event, self._rest = bytearray(), b""
        return joined[name.end() :]

    def _collect(self, event: bytearray, data: bytes) -> bytes:
        """Add bytes to an event until it is complete; return those after it."""
        before = max(0, len(event) - _END_BYTES_MAX)
        event += data
        end = _END.search(event, before)
        if end is not None:
            self.usage = _usage_of_event(bytes(event[: end.start()])) or self.usage
        if end is not None or len(event) > EVENT_BYTES_MAX:
            self._event = None
        return b"" if end is None else bytes(event[end.end() :])


def _usage_of_event(event: bytes) -> dict[str, Any] | None:
    try:
        page = orjson.loads(event.removeprefix(b"data:"))
        usage = page.get("response", page).get("usage")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return usage if isinstance(usage, dict) else None
