"""What the front reads of an engine's answer: when its first token came, and how many there are (pure).

What lives here: splitting the beginning of a stream into events, and counting the rest. What must not: HTTP. Once the
first token has been found, nothing is parsed: the ends of events are counted in the bytes.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from streams.prompts.error_pages import error_page, message_error_page

#: Bytes that are examined for a first token. vLLM's first event repeats the prompt's ids, about 8 bytes for each.
HEAD_BYTES_MAX = 64 << 20

#: Statuses below 500 with which an engine refuses for now, so that another engine may accept: timeout, too many.
_BUSY_STATUSES = (408, 429)

#: Fields of a chat's delta that tokens become.
_DELTAS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call", "audio")

#: Last bytes of a stream, in which its usage, and an error at its end, are found.
LAST_BYTES = 4096

#: The number in an engine's usage. In a text that a model generates, quotes are escaped.
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')

#: Events of /v1/responses and /v1/messages that come before the first token.
_BEFORE_A_TOKEN = frozenset(
    {
        *("response.created", "response.queued", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.reasoning_part.added"),
        *("message_start", "content_block_start", "ping"),
    }
)

#: The mark of the end of a stream.
DONE = b"[DONE]"


def may_be_served_elsewhere(status: int) -> bool:
    """Whether another engine may serve a request that one answered with this status."""
    return status >= 500 or status in _BUSY_STATUSES


class StreamWatch:
    """Finds the first token in a stream of server-sent events, and counts events.

    has_token: the first token, or the end of an answer without one, was seen. error_status: of an error event before
    the first token; 0 if there was none. n_events: complete events from the first token on, which is about the number
    of tokens; an engine may put several into one event. n_before: events before. at_boundary: whether the bytes so far
    end with a complete event.
    """

    __slots__ = ("_end", "_head", "_last", "_tail", "at_boundary", "error_status", "has_token", "n_before", "n_events")

    def __init__(self) -> None:
        self._head = bytearray()
        self._end = b"\n\n"
        self._tail = b""  # the last bytes, one fewer than the end of an event has
        self._last = b""
        self.has_token = False
        self.error_status = 0
        self.n_before = 0
        self.n_events = 0
        self.at_boundary = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self.has_token:
            self._count(data)
        else:
            self._examine(data)

    @property
    def n_tokens(self) -> int:
        """Tokens so far: by the usage that came last, if that was just now; otherwise events."""
        counts = _COMPLETION_TOKENS.findall(self._last)
        return (int(counts[-1]) if counts else 0) or self.n_events

    def last_error(self) -> int:
        """Return the status of an error event with which the stream has ended; 0 without one."""
        for line in self._last.splitlines():
            if line.startswith(b"data:") and b'"error"' in line:
                try:
                    page = orjson.loads(line[5:])
                except orjson.JSONDecodeError:
                    continue
                if error := _error_of(page):
                    return error_status(error)
        return 0

    def _count(self, data: bytes) -> None:
        self._last = (self._last + data)[-LAST_BYTES:]
        end = self._end
        joined = self._tail + data  # an end may be cut in two
        self.n_events += joined.count(end)
        self.at_boundary = joined.endswith(end)
        self._tail = joined[1 - len(end) :]

    def _examine(self, data: bytes) -> None:
        """Parse events until one has a token."""
        head = self._head
        head += data
        while not self.has_token and (end := head.find(b"\n")) >= 0:
            line = bytes(head[:end])
            del head[: end + 1]
            if line.endswith(b"\r"):
                self._end = b"\r\n\r\n"
                line = line[:-1]
            if line.startswith(b"data:"):
                self._take(line[5:].strip())
        if len(head) > HEAD_BYTES_MAX:
            self.has_token = True
        if self.has_token:
            # The first half of what ends the event was read with its line.
            self._tail = self._end[: len(self._end) // 2]
            self._count(bytes(head))
            head.clear()

    def _take(self, event: bytes) -> None:
        if event == DONE:
            self.has_token = True
            return
        try:
            chunk = orjson.loads(event)
        except orjson.JSONDecodeError:
            self.has_token = True  # nothing that the front knows, so it is the client's
            return
        if error := _error_of(chunk):
            self.error_status = error_status(error)
            self.has_token = True
        else:
            self.has_token = _has_token(chunk)
            self.n_before += not self.has_token


def usage_tokens(usage: Any) -> int:
    """Return the number of tokens that an answer has by its usage; 0 if that does not say it."""
    tokens = usage.get("completion_tokens", usage.get("output_tokens")) if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0


def error_event(status: int, message: str, code: str, n_events: int = 0) -> bytes:  # noqa: ARG001 - see below
    """Return the end of a stream that broke, as vLLM sends it: an error event, and the mark of the end.

    n_events: of the stream so far. The functions for all calls have the same parameters.
    """
    return b"data: " + orjson.dumps(error_page(status, message, code)) + b"\n\ndata: " + DONE + b"\n\n"


def response_error_event(status: int, message: str, code: str, n_events: int) -> bytes:  # noqa: ARG001
    """Return the end of a stream of /v1/responses that broke. Its events are numbered from 0 on."""
    event = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": n_events}
    return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"


def message_error_event(status: int, message: str, code: str, n_events: int) -> bytes:  # noqa: ARG001
    """Return the end of a stream of /v1/messages that broke."""
    return b"event: error\ndata: " + orjson.dumps(message_error_page(status, message, code)) + b"\n\n"


def _error_of(event: Any) -> Any:
    """Return the error in an event; None without one. An event of /v1/responses is one, or has that of the response."""
    if not isinstance(event, dict):
        return None
    if event.get("type") == "response.failed":
        return event.get("response") or True
    return event.get("error") or (event if event.get("type") == "error" else None)


def error_status(error: Any) -> int:
    """Return the status of an error event. One without a status, or with a name for it, is a fault of the engine."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _has_token(chunk: Any) -> bool:
    """Whether a chunk has more than the role of its message, or an event more than the beginning of an answer."""
    try:
        if "choices" not in chunk and "type" in chunk:
            return chunk["type"] not in _BEFORE_A_TOKEN
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if choice.get("text") or choice.get("token_ids") or choice.get("finish_reason") is not None:
                return True
            if any(delta.get(name) for name in _DELTAS):
                return True
        # Usage without choices follows the last token.
        return not chunk["choices"] and bool(chunk.get("usage"))
    except (AttributeError, KeyError, TypeError):
        return True  # not a chunk as the front knows it
