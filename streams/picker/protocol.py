"""One ext_proc stream of Envoy: which message may follow which, and what is answered (pure).

What lives here: the states of a stream, and the table of what each message does in each. What must not: bytes
(messages), the pick (picks), gRPC and clocks (serving).

Envoy opens one stream for each request of a client. It sends the headers, then the body in full duplex or as a whole,
and waits for the pick. What comes after the pick is about the answer. A picker may end the stream after its pick: then
a picker that dies takes no running request with it, and does not see how the request ends.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from streams.errors import InvalidRequest, RequestTooLarge
from streams.picker.messages import (
    BodyMode,
    Message,
    Part,
    empty_answer,
    picked_answer,
    refused_answer,
    streamed_bodies,
)

STATUS = ":status"


class State(enum.Enum):
    """What a stream waits for."""

    STARTING = "the headers of the request"
    READING = "the rest of the request"
    PICKING = "the pick"
    PICKED = "the answer's first byte"
    ANSWERING = "the answer's end"
    OVER = "nothing"


class Refused(NamedTuple):
    """What a client gets in place of an engine's answer. details: for Envoy's access log."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    details: str


class Picked(NamedTuple):
    """Where a request goes. headers: that the engine gets in addition. metadata: of messages.metadata.

    body: that the engine gets in place of the client's; None for the same.
    """

    headers: Mapping[str, str]
    metadata: bytes
    body: bytes | None = None


class Send(NamedTuple):
    """Send a message to Envoy."""

    message: bytes


class Pick(NamedTuple):
    """Pick an endpoint, and call `picked` or `refused`.

    body: of the request; None if it is not known, or not all of it. subset: as in Message.
    """

    headers: Mapping[str, str]
    body: bytes | None
    subset: tuple[str, ...] | None


class FirstByte(NamedTuple):
    """The answer has begun. status: of HTTP, 0 if it is not known. served: the endpoint that sent it, if known."""

    status: int
    served: str | None


class Ended(NamedTuple):
    """The request has ended. is_seen: whether Envoy said so; False if the stream ended with the pick."""

    is_seen: bool


class Finish(NamedTuple):
    """End the stream. error: why it is wrong; empty if it is not."""

    error: str = ""


Action = Send | Pick | FirstByte | Ended | Finish

#: What each message does in each state: the method of Exchange. All others are errors.
TRANSITIONS: Mapping[tuple[State, Part], str] = {
    (State.STARTING, Part.REQUEST_HEADERS): "_begin",
    (State.READING, Part.REQUEST_BODY): "_read",
    (State.READING, Part.REQUEST_TRAILERS): "_trailers_for_body",
    (State.READING, Part.RESPONSE_HEADERS): "_answered_by_another",
    (State.PICKING, Part.RESPONSE_HEADERS): "_answered_by_another",
    (State.PICKED, Part.REQUEST_TRAILERS): "_pass",
    (State.PICKED, Part.RESPONSE_HEADERS): "_first_byte",
    (State.ANSWERING, Part.REQUEST_TRAILERS): "_pass",
    (State.ANSWERING, Part.RESPONSE_BODY): "_answer_body",
    (State.ANSWERING, Part.RESPONSE_TRAILERS): "_answer_trailers",
}

#: What is possible as well where Envoy sends a body in parts. Each part gets an empty answer, in its order: those that
#: come while the pick is made get theirs after it.
STREAMED_TRANSITIONS: Mapping[tuple[State, Part], str] = {
    (State.PICKING, Part.REQUEST_BODY): "_answer_later",
    (State.PICKING, Part.REQUEST_TRAILERS): "_answer_later",
    (State.PICKED, Part.REQUEST_BODY): "_pass",
    (State.ANSWERING, Part.REQUEST_BODY): "_pass",
}

#: Modes in which the pick answers the headers, since the body comes later, in parts, or not at all.
_WITHOUT_BODY = frozenset({BodyMode.NONE, BodyMode.STREAMED, BodyMode.GRPC})

#: Modes in which the headers are answered first, so that Envoy sends the body.
_BUFFERED = frozenset({BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL})


class Exchange:
    """One stream. Its methods return what is to be done, in order.

    body: what has been read of the request's.
    """

    def __init__(self, body_bytes_max: int, *, ends_with_pick: bool) -> None:
        """ends_with_pick: whether the stream ends once Envoy has the pick."""
        self._body_bytes_max = body_bytes_max
        self._ends_with_pick = ends_with_pick
        self.state = State.STARTING
        self._headers: Mapping[str, str] = {}
        self._subset: tuple[str, ...] | None = None
        self._request_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._response_mode = BodyMode.NONE
        self._answers = Part.REQUEST_HEADERS  # the message that the pick answers
        self._has_body = self._has_trailers = False
        self._to_answer: Counter[Part] = Counter()  # messages whose answers come after the pick
        self.body = bytearray()

    def received(self, message: Message) -> list[Action]:
        """Envoy sent a message.

        Raises InvalidRequest for one that may not come now, which ends the stream, and RequestTooLarge, with which the
        request is to be refused.
        """
        name = TRANSITIONS.get((self.state, message.part))
        if name is None and self._request_mode is BodyMode.STREAMED:
            name = STREAMED_TRANSITIONS.get((self.state, message.part))
        if name is None:
            raise InvalidRequest(f"{message.part.field} came while this stream waited for {self.state.value}")
        actions: list[Action] = getattr(self, name)(message)
        return actions

    def picked(self, pick: Picked) -> list[Action]:
        """The request goes to an endpoint. Nothing happens if it has ended meanwhile."""
        if self.state is not State.PICKING:
            return []
        self.state = State.PICKED
        body: bytes | bytearray = self.body if pick.body is None else pick.body
        self.body = bytearray()
        replaced = pick.body if self._answers is Part.REQUEST_BODY else None
        headers = pick.headers
        if replaced is not None:
            headers = {**headers, "content-length": str(len(replaced))}
        actions: list[Action] = [Send(picked_answer(self._answers, headers, pick.metadata, replaced))]
        actions += [Send(empty_answer(part)) for part in self._to_answer.elements()]
        if self._request_mode is BodyMode.FULL_DUPLEX_STREAMED and self._has_body:
            chunks = streamed_bodies(Part.REQUEST_BODY, body, ends=not self._has_trailers)
            actions += [Send(chunk) for chunk in chunks]
            if self._has_trailers:
                actions.append(Send(empty_answer(Part.REQUEST_TRAILERS)))
        if self._ends_with_pick:
            actions += [Finish(), *self._end(is_seen=False)]
        return actions

    def refused(self, refusal: Refused) -> list[Action]:
        """The client gets an error, and the stream is over."""
        if self.state not in (State.READING, State.PICKING):
            return []
        self.state, self.body = State.OVER, bytearray()
        return [Send(refused_answer(*refusal)), Finish()]

    def ended(self, *, is_early: bool = False) -> list[Action]:
        """The stream has ended without our doing: Envoy ends it with the client's request, or its connection broke.

        is_early: whether that was right after the answer's first byte. Envoy ends a stream in full duplex then, if it
        sends no body of the answer, and the request goes on.
        """
        return self._end(is_seen=not (is_early and self.state is State.ANSWERING))

    def leave(self) -> list[Action]:
        """The picker stops: end the stream with its pick, or now if that was made. The request goes on unseen.

        An answer in full duplex passes through the stream, which stays until its end.
        """
        self._ends_with_pick = True
        passes = self.state is State.ANSWERING and self._response_mode is BodyMode.FULL_DUPLEX_STREAMED
        if self.state not in (State.PICKED, State.ANSWERING) or passes:
            return []
        return [Finish(), *self._end(is_seen=False)]

    # -- the messages of the table -------------------------------------------------------------------------------------

    def _begin(self, message: Message) -> list[Action]:
        if message.observes:  # it reads no pick
            self.state = State.OVER
            return [Finish()]
        if message.modes is not None:
            self._request_mode, self._response_mode = message.modes
        self._headers, self._subset = message.headers, message.subset
        self._has_body = not message.ends
        if message.ends or self._request_mode in _WITHOUT_BODY:
            return self._pick(b"" if message.ends else None)
        self.state = State.READING
        if self._request_mode in _BUFFERED:
            self._answers = Part.REQUEST_BODY
            return [Send(empty_answer(Part.REQUEST_HEADERS))]
        return []

    def _read(self, message: Message) -> list[Action]:
        self.body += message.body
        if len(self.body) > self._body_bytes_max:
            raise RequestTooLarge(f"the body has more than body_bytes_max, {self._body_bytes_max} bytes")
        if message.ends:
            return self._pick(bytes(self.body))
        if self._request_mode in _BUFFERED:  # only the beginning of it: Envoy's buffer is full, or trailers follow
            return self._pick(bytes(self.body) if self._request_mode is BodyMode.BUFFERED else None)
        return []

    def _trailers_for_body(self, message: Message) -> list[Action]:  # noqa: ARG002 - as all of the table
        """The body ends with trailers; no message of the body said that it ends."""
        if self._request_mode is not BodyMode.FULL_DUPLEX_STREAMED:  # the pick answers a body, and there is none
            raise InvalidRequest("the request has trailers, and no body")
        self._has_trailers = True
        return self._pick(bytes(self.body))

    def _pick(self, body: bytes | None) -> list[Action]:
        self.state = State.PICKING
        return [Pick(self._headers, body, self._subset)]

    def _answer_later(self, message: Message) -> list[Action]:
        self._to_answer[message.part] += 1
        return []

    def _pass(self, message: Message) -> list[Action]:
        return [Send(empty_answer(message.part))]

    def _answered_by_another(self, message: Message) -> list[Action]:
        """Envoy answers the request itself, for example because it timed out."""
        return [Send(empty_answer(message.part)), Finish(), *self._end(is_seen=True)]

    def _first_byte(self, message: Message) -> list[Action]:
        self.state = State.ANSWERING
        status = message.headers.get(STATUS, "")
        actions: list[Action] = [
            Send(empty_answer(message.part)),
            FirstByte(int(status) if len(status) == 3 and status.isdecimal() else 0, message.served),
        ]
        if message.ends:
            actions += [Finish(), *self._end(is_seen=True)]
        return actions

    def _answer_body(self, message: Message) -> list[Action]:
        if self._response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            actions: list[Action] = [
                Send(chunk) for chunk in streamed_bodies(message.part, message.body, ends=message.ends)
            ]
        else:
            actions = [Send(empty_answer(message.part))]
        if message.ends:
            actions += [Finish(), *self._end(is_seen=True)]
        return actions

    def _answer_trailers(self, message: Message) -> list[Action]:
        return [Send(empty_answer(message.part)), Finish(), *self._end(is_seen=True)]

    def _end(self, *, is_seen: bool) -> list[Action]:
        if self.state is State.OVER:
            return []
        self.state, self.body = State.OVER, bytearray()
        return [Ended(is_seen)]
