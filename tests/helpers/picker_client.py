"""A gateway's side of ext_proc: streams to one picker, by the official client of gRPC.

What lives here: sending messages one by one, and what Envoy would read of the answers. What must not: what is expected
of them (tests).
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2

from streams.picker.grpc.health import CHECK
from streams.picker.messages import DESTINATION, DETAILS, LB, BodyMode, Part
from streams.picker.serving import PROCESS
from tests.helpers.ext_proc import FULL_DUPLEX, ProcessingResponse, request

#: Everything that a test waits for comes within milliseconds on a machine that is idle.
PATIENCE_S = 30.0

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass
class Answered:
    """What a stream gave a gateway until its pick, or its end. body: what the engine gets in place of the client's.

    parts: the fields of the answers in their order. status: that of the stream, None while it is open.
    """

    parts: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    ends_body: bool = False
    refused: int = 0
    status: grpc.StatusCode | None = None

    @property
    def destination(self) -> str:
        """The endpoint, which header and metadata must name alike."""
        named = self.headers[DESTINATION]
        assert self.metadata[LB] == {DESTINATION: named}
        return named

    @property
    def details(self) -> dict[str, Any]:
        """What the picker says about its decision."""
        found: dict[str, Any] = self.metadata[DETAILS]
        return found

    @property
    def error(self) -> dict[str, Any]:
        """The error that the client gets."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found

    def add(self, raw: bytes) -> Self:
        """Read one more answer."""
        message = ProcessingResponse.FromString(raw)
        part = message.WhichOneof("response")
        self.parts.append(part)
        if part == "immediate_response":
            immediate = message.immediate_response
            self.refused = immediate.status.code
            self._set(immediate.headers)
            self.body = immediate.body
        elif not part.endswith("trailers"):
            common = getattr(message, part).response
            self._set(common.header_mutation)
            streamed = common.body_mutation.streamed_response
            self.body += common.body_mutation.body + streamed.body
            self.ends_body = streamed.end_of_stream
        if message.HasField("dynamic_metadata"):
            self.metadata |= MessageToDict(message.dynamic_metadata)
        return self

    def _set(self, mutation: Any) -> None:
        for option in mutation.set_headers:
            assert option.append_action == 2, "a header of the client would stay"
            self.headers[option.header.key] = option.header.raw_value.decode()


class GatewayStream:
    """One stream, message by message."""

    def __init__(self, channel: grpc.Channel, timeout_s: float) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(PROCESS)(iter(self._messages.get, None), timeout=timeout_s)

    def send(self, part: Part, modes: tuple[BodyMode, BodyMode] | None = None, **fields: Any) -> None:
        """Send one message (`ext_proc.request`)."""
        self._messages.put(request(part, modes, **fields))

    def send_raw(self, raw: bytes) -> None:
        """Send any bytes."""
        self._messages.put(raw)

    def half_close(self) -> None:
        """Send nothing more."""
        self._messages.put(None)

    def cancel(self) -> None:
        """Leave, as a gateway whose client has gone."""
        self._call.cancel()
        self._messages.put(None)

    def answer(self, found: Answered | None = None) -> Answered:
        """Wait for one more answer."""
        return (found or Answered()).add(next(self._call))

    def until_picked(self, found: Answered | None = None) -> Answered:
        """Wait for the answers until the whole body in full duplex."""
        found = self.answer(found)
        while not (found.ends_body or found.refused):
            self.answer(found)
        return found

    def rest(self, found: Answered | None = None, *, is_enough: Callable[[Answered], bool] | None = None) -> Answered:
        """Read to the end of the stream, and half-close it. is_enough: half-close it already then."""
        found = found or Answered()
        try:
            for raw in self._call:
                found.add(raw)
                if is_enough is not None and is_enough(found):
                    self.half_close()
                    is_enough = None
        except grpc.RpcError:
            pass
        self.half_close()
        found.status = self._call.code()
        return found


class Gateway:
    """Streams and health checks of one picker."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def open(self, timeout_s: float = PATIENCE_S) -> GatewayStream:
        """Open a stream."""
        return GatewayStream(self._channel, timeout_s)

    def ask(
        self,
        body: bytes | Mapping[str, Any] | None,
        path: str = "/v1/completions",
        *,
        modes: tuple[BodyMode, BodyMode] = (FULL_DUPLEX, BodyMode.NONE),
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        n_chunks: int = 1,
        trailers: bool = False,
    ) -> Answered:
        """Send one whole request, read its pick, and end the stream.

        body: None for a request without one.
        """
        stream = self.open()
        named = {":method": method, ":path": path, ":authority": "test", **(headers or {})}
        fields: dict[str, Any] = {"headers": named, "metadata": metadata or {}, "end_of_stream": body is None}
        stream.send(Part.REQUEST_HEADERS, modes, **fields)
        found = Answered()
        if body is not None and modes[0] not in (BodyMode.NONE, BodyMode.STREAMED):
            if modes[0] is not BodyMode.FULL_DUPLEX_STREAMED:
                found = stream.answer()
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            size = max(1, -(-len(raw) // n_chunks))
            for n in range(n_chunks):
                is_last = n == n_chunks - 1
                ends = is_last and not trailers
                stream.send(Part.REQUEST_BODY, body=raw[n * size : (n + 1) * size], end_of_stream=ends)
            if trailers:
                stream.send(Part.REQUEST_TRAILERS)
        is_streamed = body is not None and modes[0] is FULL_DUPLEX
        last = Part.REQUEST_TRAILERS.field if trailers else Part.REQUEST_BODY.field

        def is_picked(found: Answered) -> bool:
            if is_streamed:
                return found.parts[-1] == last and (trailers or found.ends_body)
            return DESTINATION in found.headers

        return stream.rest(found, is_enough=is_picked)

    def health(self, name: str) -> str:
        """The status of a name, or `NOT_FOUND`."""
        check = self._channel.unary_unary(CHECK, response_deserializer=health_pb2.HealthCheckResponse.FromString)
        try:
            answer = check(
                health_pb2.HealthCheckRequest(service=name).SerializeToString(), timeout=PATIENCE_S, wait_for_ready=True
            )
        except grpc.RpcError as exc:
            return str(exc.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@contextmanager
def gateway(target: str, credentials: grpc.ChannelCredentials | None = None) -> Iterator[Gateway]:
    """Connect to a picker while the block runs. target: HOST:PORT."""
    options = [*_UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]
    channel = (
        grpc.insecure_channel(target, options)
        if credentials is None
        else grpc.secure_channel(target, credentials, [*options, ("grpc.ssl_target_name_override", "localhost")])
    )
    with channel:
        yield Gateway(channel)
