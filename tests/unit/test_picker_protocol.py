"""The messages of ext_proc and their order, without gRPC: what a picker reads, answers and refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.errors import InvalidRequest, RequestTooLarge
from streams.picker.ext_proc_types import ProcessingRequest
from streams.picker.messages import (
    BODY_CHUNK_BYTES,
    DESTINATION,
    HEADERS_MAX,
    LB,
    SERVED,
    SUBSET,
    SUBSET_HINT,
    SUBSET_MAX,
    BodyMode,
    Part,
    empty_answer,
    metadata,
    picked_answer,
    read_message,
    refused_answer,
    streamed_bodies,
)
from streams.picker.protocol import (
    TRANSITIONS,
    Action,
    Ended,
    Exchange,
    Finish,
    FirstByte,
    Pick,
    Picked,
    Refused,
    Send,
    State,
)
from tests.helpers.ext_proc import BUFFERED, FULL_DUPLEX, ProcessingResponse, request

PICKED = Picked({DESTINATION: "10.0.0.1:8000"}, metadata("10.0.0.1:8000"))


class Stream:
    """One stream, message by message."""

    def __init__(self, mode: BodyMode = FULL_DUPLEX, answers: BodyMode = BodyMode.NONE, *, ends: bool = False) -> None:
        self.modes = mode, answers
        self.exchange = Exchange(1000, ends_with_pick=ends)

    def gets(self, part: Part, **fields: Any) -> list[Action]:
        modes = self.modes if part is Part.REQUEST_HEADERS else None
        return self.exchange.received(read_message(request(part, modes, **fields)))

    def until_picking(self, body: bytes = b"{}") -> None:
        self.gets(Part.REQUEST_HEADERS)
        self.gets(Part.REQUEST_BODY, body=body, end_of_stream=True)

    def until_picked(self) -> None:
        self.until_picking()
        self.exchange.picked(PICKED)


def sent(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """The answers among the actions."""
    return [MessageToDict(ProcessingResponse.FromString(each.message)) for each in actions if isinstance(each, Send)]


def kinds(actions: Sequence[Action]) -> list[type]:
    return [type(each) for each in actions]


# -- bytes -------------------------------------------------------------------------------------------------------------

texts = st.text(max_size=20)
names = st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=1, max_size=8)
values = st.one_of(texts, st.booleans(), st.floats(allow_nan=False))


@given(headers=st.dictionaries(names, texts, max_size=4), details=st.dictionaries(names, values, max_size=4), to=texts)
@settings(deadline=None, print_blob=True)
def test_a_pick_has_the_bytes_of_the_protobuf_types(headers: dict[str, str], details: dict[str, Any], to: str) -> None:
    """Envoy reads exactly the headers and the metadata, and computes its route again."""
    found = ProcessingResponse.FromString(picked_answer(Part.REQUEST_HEADERS, headers, metadata(to, details)))
    expected = ProcessingResponse()
    common = expected.request_headers.response
    for name, value in headers.items():
        common.header_mutation.set_headers.add(header={"key": name, "raw_value": value.encode()}, append_action=2)
    common.header_mutation.SetInParent()
    common.clear_route_cache = True
    lb: dict[str, Any] = {LB: {DESTINATION: to}}
    expected.dynamic_metadata.update({**lb, "kvstreams": details} if details else lb)
    assert found == expected


@given(body=st.binary(max_size=300), ends=st.booleans(), chunk=st.integers(1, 64))
@settings(deadline=None)
def test_a_streamed_body_arrives_whole(body: bytes, ends: bool, chunk: int) -> None:
    """Its parts are the body in order, none is too long, and only the last one ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streams.picker.messages.BODY_CHUNK_BYTES", chunk)
        raws = list(streamed_bodies(Part.REQUEST_BODY, body, ends=ends))
    parts = [ProcessingResponse.FromString(raw).request_body.response.body_mutation.streamed_response for raw in raws]
    assert b"".join(part.body for part in parts) == body and all(len(part.body) <= chunk for part in parts)
    assert [part.end_of_stream for part in parts] == [False] * (len(parts) - 1) + [ends]


def test_a_refusal_is_an_immediate_response() -> None:
    """It has status, headers and body for the client, and a word for Envoy's log."""
    found = ProcessingResponse.FromString(refused_answer(429, {"retry-after": "3"}, b"{}", "queue_full"))
    immediate = found.immediate_response
    (option,) = immediate.headers.set_headers
    assert (immediate.status.code, immediate.body, immediate.details) == (429, b"{}", "queue_full")
    assert (option.header.key, option.header.raw_value) == ("retry-after", b"3")


@pytest.mark.parametrize("part", Part)
def test_an_empty_answer_is_of_its_part(part: Part) -> None:
    """It changes nothing, and Envoy goes on."""
    found = ProcessingResponse.FromString(empty_answer(part))
    assert found.WhichOneof("response") == part.field
    assert found.ByteSize() == 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({SUBSET: ["10.0.0.1:80", " 10.0.0.2:80 "]}, ("10.0.0.1:80", "10.0.0.2:80")),
        ({SUBSET: "10.0.0.1:80, 10.0.0.2:80"}, ("10.0.0.1:80", "10.0.0.2:80")),
        ({SUBSET: []}, ()),
        ({SUBSET: ""}, ()),
        ({"another": "x"}, None),
    ],
)
def test_the_subset_hint_is_read_in_both_forms(values: dict[str, Any], expected: tuple[str, ...] | None) -> None:
    """An empty subset is not the same as none."""
    raw = request(Part.REQUEST_HEADERS, metadata={SUBSET_HINT: values})
    assert read_message(raw).subset == expected


def test_headers_are_read_in_both_forms_and_the_first_counts() -> None:
    """Envoy sends `raw_value`, older ones `value`."""
    message = ProcessingRequest()
    headers = message.request_headers.headers.headers
    headers.add(key="X-A", raw_value=b"raw")
    headers.add(key="x-a", value="second")
    headers.add(key="x-b", value="text")
    headers.add(key="x-c", raw_value=b"\xff")
    found = read_message(message.SerializeToString()).headers
    assert found == {"x-a": "raw", "x-b": "text", "x-c": "\udcff"}


def test_limits_of_a_message_have_an_error() -> None:
    """More headers, or a longer subset, than allowed; a message without a request; and no message."""
    many = request(Part.REQUEST_HEADERS, headers={f"x-{n}": "" for n in range(HEADERS_MAX + 1)})
    subset = request(Part.REQUEST_HEADERS, metadata={SUBSET_HINT: {SUBSET: ",".join(["a"] * (SUBSET_MAX + 1))}})
    strange = request(Part.REQUEST_HEADERS, (9, 9))  # type: ignore[arg-type]  # a mode of a later Envoy
    for raw in (many, subset, strange, b"", b"\xff\xff\xff"):
        with pytest.raises(InvalidRequest):
            read_message(raw)


# -- order -------------------------------------------------------------------------------------------------------------


def test_in_full_duplex_the_pick_comes_with_the_whole_body() -> None:
    """Nothing is sent before the body's end; then the headers, and the body in parts."""
    stream = Stream()
    body = b"x" * 10
    assert stream.gets(Part.REQUEST_HEADERS, headers={":path": "/v1/completions"}) == []
    assert stream.gets(Part.REQUEST_BODY, body=body) == []
    (pick,) = stream.gets(Part.REQUEST_BODY, end_of_stream=True)
    assert isinstance(pick, Pick) and (pick.body, pick.headers[":path"]) == (body, "/v1/completions")
    headers, only = sent(stream.exchange.picked(PICKED))
    (option,) = headers["requestHeaders"]["response"]["headerMutation"]["setHeaders"]
    assert option["header"]["key"] == DESTINATION
    assert headers["dynamicMetadata"] == {LB: {DESTINATION: "10.0.0.1:8000"}}
    assert only["requestBody"]["response"]["bodyMutation"]["streamedResponse"]["endOfStream"]
    assert len(body) < BODY_CHUNK_BYTES


def test_in_full_duplex_trailers_end_the_body() -> None:
    """No part of the body ends it then, and the trailers are answered after it."""
    stream = Stream()
    stream.gets(Part.REQUEST_HEADERS)
    stream.gets(Part.REQUEST_BODY, body=b"{}")
    assert kinds(stream.gets(Part.REQUEST_TRAILERS)) == [Pick]
    answers = sent(stream.exchange.picked(PICKED))
    assert [next(iter(answer)) for answer in answers] == ["requestHeaders", "requestBody", "requestTrailers"]
    assert "endOfStream" not in answers[1]["requestBody"]["response"]["bodyMutation"]["streamedResponse"]


def test_a_buffered_body_is_asked_for_and_left_as_it_is() -> None:
    """The headers are answered at once; the pick answers the body, which is not sent back."""
    stream = Stream(BUFFERED)
    assert sent(stream.gets(Part.REQUEST_HEADERS)) == [{"requestHeaders": {}}]
    assert kinds(stream.gets(Part.REQUEST_BODY, body=b"{}", end_of_stream=True)) == [Pick]
    (answer,) = sent(stream.exchange.picked(PICKED))
    assert answer["requestBody"]["response"].keys() == {"headerMutation", "clearRouteCache"}


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
def test_a_body_can_be_replaced(mode: BodyMode) -> None:
    """A rewritten model changes the body; a buffered one has a new length, one in full duplex has none."""
    stream = Stream(mode)
    stream.until_picking()
    answers = sent(stream.exchange.picked(PICKED._replace(body=b"[1, 2, 3]")))
    names = [
        option["header"]["key"]
        for option in next(iter(answers[0].values()))["response"]["headerMutation"]["setHeaders"]
    ]
    mutation = answers[-1]["requestBody"]["response"]["bodyMutation"]
    assert ("content-length" in names) == (mode is BUFFERED)
    assert mutation.get("body", mutation.get("streamedResponse", {})) in (
        "WzEsIDIsIDNd",
        {"body": "WzEsIDIsIDNd", "endOfStream": True},
    )


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.GRPC])
def test_without_a_body_the_load_decides(mode: BodyMode) -> None:
    """In these modes Envoy waits for the answer to the headers before it sends any of the body."""
    stream = Stream(mode)
    (pick,) = stream.gets(Part.REQUEST_HEADERS)
    assert isinstance(pick, Pick) and pick.body is None
    (answer,) = sent(stream.exchange.picked(PICKED))
    assert "requestHeaders" in answer


@pytest.mark.parametrize("waits", [True, False])
def test_a_body_in_parts_passes_after_the_pick(waits: bool) -> None:
    """Each part is answered in its order, also if Envoy sends some without waiting for the pick."""
    stream = Stream(BodyMode.STREAMED)
    stream.gets(Part.REQUEST_HEADERS)
    if waits:
        first = sent(stream.exchange.picked(PICKED)) + sent(stream.gets(Part.REQUEST_BODY, body=b"x"))
    else:
        assert stream.gets(Part.REQUEST_BODY, body=b"x") == []
        first = sent(stream.exchange.picked(PICKED))
    assert "requestHeaders" in first[0] and first[1:] == [{"requestBody": {}}]
    assert sent(stream.gets(Part.REQUEST_BODY, end_of_stream=True)) == [{"requestBody": {}}]
    assert kinds(stream.gets(Part.RESPONSE_HEADERS, headers={":status": "200"})) == [Send, FirstByte]


@pytest.mark.parametrize(("status", "read"), [("204", 204), ("", 0), ("-1", 0), ("9" * 5000, 0)])
def test_a_status_has_three_digits(status: str, read: int) -> None:
    """Another one is not known."""
    stream = Stream()
    stream.until_picked()
    assert stream.gets(Part.RESPONSE_HEADERS, headers={":status": status})[1] == FirstByte(read, None)


def test_a_request_without_a_body_is_answered_at_once() -> None:
    """Its headers end it, in whatever mode."""
    for mode in BodyMode:
        stream = Stream(mode)
        (pick,) = stream.gets(Part.REQUEST_HEADERS, end_of_stream=True)
        assert isinstance(pick, Pick) and pick.body == b""
        assert ["requestHeaders" in answer for answer in sent(stream.exchange.picked(PICKED))] == [True]


def test_a_part_of_a_body_is_not_read() -> None:
    """Envoy sends the beginning of a long body in this mode, which is no JSON."""
    stream = Stream(BodyMode.BUFFERED_PARTIAL)
    stream.gets(Part.REQUEST_HEADERS)
    (pick,) = stream.gets(Part.REQUEST_BODY, body=b'{"prompt": "x')
    assert isinstance(pick, Pick) and pick.body is None


def test_the_stream_ends_with_the_pick_if_it_is_told_to() -> None:
    """The request goes on unseen."""
    stream = Stream(ends=True)
    stream.until_picking()
    actions = stream.exchange.picked(PICKED)
    assert kinds(actions) == [Send, Send, Finish, Ended] and actions[-1] == Ended(is_seen=False)
    assert stream.exchange.ended() == []


def test_a_stream_that_stays_sees_the_answer() -> None:
    """The first byte, which endpoint sent it, and the end."""
    stream = Stream()
    stream.until_picked()
    served = {LB: {SERVED: "10.0.0.2:8000"}}
    actions = stream.gets(Part.RESPONSE_HEADERS, headers={":status": "200"}, metadata=served)
    assert actions[1:] == [FirstByte(200, "10.0.0.2:8000")] and sent(actions) == [{"responseHeaders": {}}]
    assert stream.exchange.ended() == [Ended(is_seen=True)]


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, FULL_DUPLEX])
def test_an_answers_body_is_passed_on(mode: BodyMode) -> None:
    """In full duplex a picker sends back every part of it; its end ends the stream."""
    stream = Stream(answers=mode)
    stream.until_picked()
    stream.gets(Part.RESPONSE_HEADERS, headers={":status": "200"})
    (answer,) = sent(stream.gets(Part.RESPONSE_BODY, body=b"data"))
    assert ("bodyMutation" in answer["responseBody"].get("response", {})) == (mode is FULL_DUPLEX)
    assert kinds(stream.gets(Part.RESPONSE_BODY, end_of_stream=True)) == [Send, Finish, Ended]


def test_an_answer_may_end_with_its_headers_or_its_trailers() -> None:
    """Both end the stream."""
    for last in (Part.RESPONSE_HEADERS, Part.RESPONSE_TRAILERS):
        stream = Stream()
        stream.until_picked()
        if last is Part.RESPONSE_TRAILERS:
            stream.gets(Part.RESPONSE_HEADERS, headers={":status": "200"})
        fields = {"end_of_stream": True} if last is Part.RESPONSE_HEADERS else {}
        assert kinds(stream.gets(last, **fields))[-2:] == [Finish, Ended]


def test_an_answer_of_envoy_itself_ends_a_request_that_was_not_picked() -> None:
    """For example a timeout while it waits in the queue: its pick comes too late, and changes nothing."""
    for picking in (False, True):
        stream = Stream()
        stream.gets(Part.REQUEST_HEADERS)
        if picking:
            stream.gets(Part.REQUEST_BODY, body=b"{}", end_of_stream=True)
        assert kinds(stream.gets(Part.RESPONSE_HEADERS, headers={":status": "504"})) == [Send, Finish, Ended]
        assert stream.exchange.picked(PICKED) == []


def test_a_picker_that_stops_ends_its_streams_with_their_picks() -> None:
    """What is picked goes on unseen at once, and the rest after its pick; only an answer that it passes on stays."""
    picked, answering, picking, passing = Stream(), Stream(), Stream(), Stream(answers=FULL_DUPLEX)
    for stream in (picked, answering, passing):
        stream.until_picked()
    for stream in (answering, passing):
        stream.gets(Part.RESPONSE_HEADERS, headers={":status": "200"})
    picking.until_picking()
    assert picked.exchange.leave() == answering.exchange.leave() == [Finish(), Ended(is_seen=False)]
    assert picking.exchange.leave() == passing.exchange.leave() == []
    assert kinds(picking.exchange.picked(PICKED))[-2:] == [Finish, Ended]
    assert kinds(passing.gets(Part.RESPONSE_BODY, end_of_stream=True)) == [Send, Finish, Ended]


def test_a_refusal_ends_the_stream_and_comes_only_before_the_pick() -> None:
    """After it, the client has the engine's answer."""
    stream = Stream()
    stream.until_picking()
    refusal = Refused(503, {}, b"{}", "not_ready")
    assert kinds(stream.exchange.refused(refusal)) == [Send, Finish]
    assert stream.exchange.ended() == []
    stream = Stream()
    stream.until_picked()
    assert stream.exchange.refused(refusal) == []


def test_a_long_body_is_refused_and_not_kept() -> None:
    """The error says which limit it is."""
    stream = Stream()
    stream.gets(Part.REQUEST_HEADERS)
    with pytest.raises(RequestTooLarge, match="body_bytes_max"):
        stream.gets(Part.REQUEST_BODY, body=b"x" * 1001)
    assert kinds(stream.exchange.refused(Refused(413, {}, b"", ""))) == [Send, Finish]
    assert not stream.exchange.body


def test_a_gateway_that_only_observes_gets_no_pick() -> None:
    """It reads no answer, so that a booking would stand for nothing."""
    message = ProcessingRequest.FromString(request(Part.REQUEST_HEADERS, (FULL_DUPLEX, BodyMode.NONE)))
    message.observability_mode = True
    stream = Stream()
    assert kinds(stream.exchange.received(read_message(message.SerializeToString()))) == [Finish]


@given(parts=st.lists(st.tuples(st.sampled_from(Part), st.booleans(), st.booleans()), max_size=8), ends=st.booleans())
@settings(deadline=None, print_blob=True)
def test_whatever_comes_the_table_decides_and_a_request_ends_once(
    parts: list[tuple[Part, bool, bool]], ends: bool
) -> None:
    """A message that the table does not have is an error; every stream that began has at most one end."""
    stream, n_ended = Stream(ends=ends), 0
    for part, end_of_stream, picks in parts:
        fields = {"end_of_stream": end_of_stream} if "TRAILERS" not in part.name else {}
        state = stream.exchange.state
        try:
            actions = stream.gets(part, **fields)
        except InvalidRequest:
            assert (state, part) not in TRANSITIONS
            break
        assert (state, part) in TRANSITIONS
        if picks and any(isinstance(each, Pick) for each in actions):
            actions += stream.exchange.picked(PICKED)
        n_ended += sum(isinstance(each, Ended) for each in actions)
    n_ended += sum(isinstance(each, Ended) for each in stream.exchange.ended())
    assert n_ended <= 1 and stream.exchange.state is State.OVER and not stream.exchange.body
