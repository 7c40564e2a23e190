"""Malformed and hostile ext_proc streams, and what a picker must not do about them.

What lives here: making streams from a seed, sending them over real sockets to a picker in the same loop, and judging
what came back and what is left. tests/unit/test_picker_fuzz.py sends a few thousand streams, and
tests/picker_fuzz_soak.py as many as it is asked for. What must not: what breaks HTTP/2 itself, for which
tests/unit/test_picker_grpc_hostile.py is.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import h2.events
from google.protobuf.message import DecodeError

from streams.client.plain_http import PlainHttp
from streams.picker.fleet import PickerFleet
from streams.picker.grpc.limits import Limits
from streams.picker.lifetimes import Lifetimes
from streams.picker.messages import LB, SERVED, SUBSET, SUBSET_HINT, BodyMode, Part
from streams.picker.picks import FAIRNESS, MODEL_REWRITE, OBJECTIVE, Picks
from streams.picker.serving import PROCESS, ExtProc
from streams.prompts.tokenizing import Tokenizing
from streams.router_api.deciding.admission import Admission
from tests.helpers.api import TOKENS
from tests.helpers.ext_proc import ProcessingResponse, request
from tests.helpers.grpc_server import RawClient, Running, raw_client, running, until
from tests.helpers.routers import router_of
from tests.helpers.views import register

#: Connections at the same time, and streams that each has open.
_CONNECTIONS, _STREAMS = 8, 24

#: Streams of one connection, after which it is closed, with whatever is open on it.
_STREAMS_PER_CONNECTION = 400

#: A stream whose answer may not come is left after this time.
_WAIT_S = 0.05

#: The deadline of a body. A stream that a gateway forgets must end by it.
_BODY_S = 0.3
_END_S = 20.0

_BODY_BYTES_MAX, _BODIES_BYTES_MAX, _MESSAGE_BYTES_MAX = 64 << 10, 512 << 10, 1 << 20

#: Nothing listens there: engines are asked for tokens, and do not answer.
_CLOSED_PORT = 9

_PATHS = (
    "/v1/completions",
    "/v1/chat/completions?x=1",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings/",
    "/tokenize",
    "/v1/models",
    "",
    "x",
    "/" * 3000,
    "/v1/completions\x00é",
)
_HEADERS = (
    FAIRNESS,
    OBJECTIVE,
    MODEL_REWRITE,
    "x-session-id",
    "x-tenant",
    "x-priority",
    "x-required-taints",
    "x-moe-query",
    "x-request-id",
    "traceparent",
    "tracestate",
    "content-length",
    "x-gateway-destination-endpoint",
    ":status",
    "x",
)
_VALUES = ("", "m", "1", "-5", "batch", "99999999999", "9" * 5000, "٣", "\x00", "é" * 600, "[" * 5000, "{}", "a,b,,c")
_NAMES = (
    *("model", "prompt", "messages", "input", "max_tokens", "n", "stream", "cache_salt", "priority", "user"),
    *("previous_response_id", "max_completion_tokens", "tools", "system", "x", ""),
)


class Do(enum.Enum):
    """A step of a stream that sends nothing, or its end."""

    AWAIT = "wait for an answer, if one comes"
    HALF_CLOSE = "send nothing more, and wait for the end"
    RESET = "leave"
    FORGET = "wait until the picker ends it"


Step = bytes | Do


class StreamFuzzer:
    """Makes streams at random. Every stream is a function of the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._forms: tuple[Callable[[], list[Step]], ...] = (
            self._plain,
            self._reordered,
            self._reordered,
            self._mutated,
            self._mutated,
            self._cut,
            self._cut,
            self._noise,
            self._broken_framing,
            self._oversized,
            self._endless,
        )

    def steps(self) -> list[Step]:
        """What is sent on one stream. The last step is its end."""
        steps = self.rng.choice(self._forms)()
        if steps[-1:] not in ([Do.HALF_CLOSE], [Do.RESET], [Do.FORGET]):
            steps.append(self.rng.choice((Do.HALF_CLOSE, Do.RESET)))
        return steps

    # -- forms of streams ----------------------------------------------------------------------------------------------

    def _plain(self) -> list[Step]:
        """A request as gateways send it, with any headers and any body, and its answer."""
        rng = self.rng
        modes = rng.choice(list(BodyMode)), rng.choice(list(BodyMode))
        has_body, has_trailers = rng.random() < 0.9, rng.random() < 0.2
        steps: list[Step] = [_framed(self._headers(modes, end_of_stream=not has_body))]
        if has_body and modes[0] not in (BodyMode.NONE, BodyMode.GRPC):
            if modes[0] is not BodyMode.FULL_DUPLEX_STREAMED:
                steps.append(Do.AWAIT)
            body = self._body()
            size = max(1, len(body) // rng.choice((1, 1, 2, 7)) + 1)
            parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
            for n, part in enumerate(parts):
                ends = n == len(parts) - 1 and not has_trailers
                steps.append(_framed(request(Part.REQUEST_BODY, body=part, end_of_stream=ends)))
            if has_trailers:
                steps.append(_framed(request(Part.REQUEST_TRAILERS)))
        steps.append(Do.AWAIT)
        status = rng.choice(("200", "200", "503", "", "9" * 5000, "-1"))
        served = {LB: {SERVED: rng.choice(("127.0.0.1:9", "127.0.0.2:9", "nowhere", 7, None, [1]))}}
        steps.append(_framed(request(Part.RESPONSE_HEADERS, headers={":status": status}, metadata=served)))
        return [
            *steps,
            *(_framed(request(Part.RESPONSE_BODY, body=b"x" * 30, end_of_stream=ends)) for ends in (False, True)),
        ]

    def _reordered(self) -> list[Step]:
        """Messages that are left out, repeated, or in another order."""
        steps = self._plain()
        for _ in range(self.rng.randrange(1, 5)):
            at, to = self.rng.randrange(len(steps)), self.rng.randrange(len(steps))
            match self.rng.randrange(4):
                case 0:
                    del steps[at]
                    steps = steps or [_framed(b"")]
                case 1:
                    steps.insert(to, steps[at])
                case 2:
                    steps[at], steps[to] = steps[to], steps[at]
                case _:
                    steps.insert(to, _framed(request(self.rng.choice(list(Part)))))
        return steps

    def _mutated(self) -> list[Step]:
        """Messages whose bytes were changed anywhere."""
        steps = self._plain()
        for n, step in enumerate(steps):
            if isinstance(step, bytes) and self.rng.random() < 0.5:
                message = bytearray(step[5:])
                for _ in range(self.rng.randrange(1, 4)):
                    at = self.rng.randrange(len(message) + 1)
                    message[at : at + self.rng.randrange(4)] = self.rng.randbytes(self.rng.randrange(4))
                steps[n] = _framed(bytes(message))
        return steps

    def _cut(self) -> list[Step]:
        """The gateway leaves, or sends no more, after any step."""
        steps = self._plain()
        return [*steps[: self.rng.randrange(len(steps) + 1)], self.rng.choice((Do.HALF_CLOSE, Do.RESET))]

    def _noise(self) -> list[Step]:
        return [_framed(self.rng.randbytes(self.rng.randrange(200))) for _ in range(self.rng.randrange(1, 4))]

    def _broken_framing(self) -> list[Step]:
        """A message that is incomplete, compressed, or longer than allowed, after any number of good ones."""
        steps = self._plain()
        broken = self.rng.choice(
            (b"\0\0\0\1\0abc", b"\1\0\0\0\1a", b"\x07\0\0\0\0", b"\0\xff\xff\xff\xff" + b"x" * 1000, b"\0\0")
        )
        return [*steps[: self.rng.randrange(len(steps) + 1)], broken]

    def _oversized(self) -> list[Step]:
        """Headers of megabytes, thousands of headers or endpoints, deep metadata, and bodies over the limits."""
        modes = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE
        deep: Any = "x"
        for _ in range(self.rng.choice((20, 60))):
            deep = [deep]
        many = {f"x-{n}": "y" for n in range(self.rng.choice((900, 1100, 5000)))}
        subset = ["127.0.0.1:9"] * self.rng.choice((1000, 17_000))
        first = self.rng.choice(
            (
                lambda: request(Part.REQUEST_HEADERS, modes, headers={"x": "y" * (6 << 20)}),
                lambda: request(Part.REQUEST_HEADERS, modes, headers={"x-session-id": "y" * (900 << 10)}),
                lambda: request(Part.REQUEST_HEADERS, modes, headers=many),
                lambda: request(Part.REQUEST_HEADERS, modes, metadata={SUBSET_HINT: {SUBSET: subset}}),
                lambda: request(
                    Part.REQUEST_HEADERS, modes, metadata={SUBSET_HINT: {SUBSET: deep}, LB: {SERVED: deep}}
                ),
                lambda: self._headers(modes, end_of_stream=False),
            )
        )()
        body = b'{"prompt": [1], "x": "' + b"y" * self.rng.choice((10, 60_000, 70_000, 900_000)) + b'"}'
        return [_framed(first), _framed(request(Part.REQUEST_BODY, body=body, end_of_stream=True)), Do.AWAIT]

    def _endless(self) -> list[Step]:
        """A body, or nothing at all, that never ends."""
        headers = self._headers((BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE), end_of_stream=False)
        steps: list[Step] = [_framed(headers)] * self.rng.randrange(2)
        sizes = [self.rng.randrange(20_000) for _ in range(self.rng.randrange(3) if steps else 0)]
        return [*steps, *(_framed(request(Part.REQUEST_BODY, body=b"x" * size)) for size in sizes), Do.FORGET]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _headers(self, modes: tuple[BodyMode, BodyMode], *, end_of_stream: bool) -> bytes:
        rng = self.rng
        headers = {":method": rng.choice(("POST", "POST", "POST", "GET", "", "X"))}
        headers[":path"] = _PATHS[0] if rng.random() < 0.5 else rng.choice(_PATHS)
        for _ in range(rng.choice((0, 0, 1, 3))):
            headers[rng.choice(_HEADERS)] = rng.choice(_VALUES)
        metadata: dict[str, Any] = {}
        if rng.random() < 0.15:
            some: tuple[Any, ...] = (
                "127.0.0.1:9",
                "127.0.0.2:9,127.0.0.3:9",
                "",
                ",,",
                [],
                ["127.0.0.1:9"],
                ["x", 1, None],
                5,
                {"a": 1},
            )
            metadata[SUBSET_HINT] = {SUBSET: rng.choice(some)}
        return request(Part.REQUEST_HEADERS, modes, headers=headers, metadata=metadata, end_of_stream=end_of_stream)

    def _body(self) -> bytes:
        rng = self.rng
        match rng.randrange(6):
            case 0 | 1:
                return json.dumps({"model": "m", "prompt": TOKENS, "max_tokens": rng.randrange(1, 9)}).encode()
            case 2:
                return b"[" * 3000 + b'{"prompt": ' * rng.randrange(3)
            case 3:
                return rng.randbytes(rng.randrange(300))
            case _:
                values: tuple[Any, ...] = (
                    None,
                    True,
                    -1,
                    2**70,
                    1.5,
                    "x",
                    "\ud800",
                    [],
                    [[1, 2], [3]],
                    {"role": "user"},
                    [2**33],
                    "y" * 900,
                )
                fields = {rng.choice(_NAMES): rng.choice(values) for _ in range(4)}
                return json.dumps({"model": rng.choice(("m", "none")), "prompt": [1, 2], **fields}).encode()


def _framed(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message


class FuzzedPicker:
    """A picker without Kafka and HTTP. faults: what was logged as an error."""

    def __init__(self, *, ends_stream: bool) -> None:
        self.router = router_of(
            n_workers=0,
            picker_ends_stream=ends_stream,
            picker_details=True,
            picker_fallbacks=2,
            picker_objectives="batch=-5",
            body_timeout_s=_BODY_S,
            body_bytes_max=_BODY_BYTES_MAX,
            bodies_bytes_max=_BODIES_BYTES_MAX,
            router_queue_timeout_s=1.0,
            router_queue_requests_max=16,
        )
        for n in range(1, 4):
            register(self.router.view, n, url=f"http://127.0.0.{n}:{_CLOSED_PORT}")
        fleet = self.router.view.fleet
        settings: Any = self.router.settings  # they are the whole settings
        endpoints = PickerFleet(lambda: fleet.workers.copy(), lambda: fleet.changes)
        self.lifetimes = Lifetimes(self.router, endpoints, lambda _: None)
        self._http = PlainHttp(keepalive_s=1.0, connect_timeout_s=1.0)
        picks = Picks(
            settings,
            self.router,
            Admission(self.router),
            Tokenizing({}, 1, 1 << 20),
            endpoints,
            lambda _: None,
            self._http,
        )
        self.service = ExtProc(settings, picks, self.lifetimes, lambda: True)
        self.faults: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Collect what is logged as an error."""
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self.faults.append(handler.format(record))  # type: ignore[method-assign]
        logger = logging.getLogger("streams")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            self._http.close()

    def n_bookings(self) -> int:
        """Bookings that were not ended, including those that count as over by their forecasts."""
        with self.router.loads.locked() as loads:
            return sum(state.booking is not None for state in loads._states.values())

    async def tick_forever(self) -> None:
        """End bookings that are over, as the process of a picker does."""
        while True:
            await asyncio.sleep(1.0)
            self.lifetimes.tick()
            self.lifetimes.renew()

    def assert_nothing_is_left(self) -> None:
        """Check that no stream, body or pick is left, and no booking whose end is not assumed; later there is none."""
        service, lifetimes = self.service, self.lifetimes
        held = len(service.streams), service.counts.body_bytes, len(service.picking), len(lifetimes._running)
        assert held == (0,) * 4
        assert self.n_bookings() == lifetimes.n_open
        with patch("streams.picker.lifetimes.monotonic_ms", lambda: 1e15):
            lifetimes.tick()
        assert (self.n_bookings(), lifetimes.n_open) == (0, 0)
        assert not self.faults, self.faults[:3]


async def fuzz(fuzzer: StreamFuzzer, n_streams: int, *, ends_stream: bool) -> Counter[str]:
    """Send streams; return how many ended in which way.

    Raises AssertionError for an answer that Envoy cannot read, a status of 500, and for whatever is left afterwards.
    """
    picker, outcomes = FuzzedPicker(ends_stream=ends_stream), Counter[str]()
    limits = Limits(message_bytes_max=_MESSAGE_BYTES_MAX)
    with picker.watched():
        async with running(limits, picker.service.open) as server:
            ticking = asyncio.create_task(picker.tick_forever())
            left = [n_streams]
            try:
                await asyncio.gather(*(_send(server, fuzzer, left, outcomes) for _ in range(_CONNECTIONS)))
                await until(lambda: not (picker.service.streams or picker.service.picking))
            finally:
                ticking.cancel()
                await asyncio.wait([ticking])
        picker.assert_nothing_is_left()
    picker_outcomes = {f"pick: {name}": n for name, n in picker.service.picks.outcomes.items()}
    return outcomes + Counter(picker_outcomes)


async def _send(server: Running, fuzzer: StreamFuzzer, left: list[int], outcomes: Counter[str]) -> None:
    """Send streams on one connection after the other, until none is left."""
    while left[0] > 0:
        async with raw_client(server) as client:
            connection = _Connection(client, outcomes)
            client.begin()
            reading = asyncio.create_task(connection.read())
            n = min(left[0], _STREAMS_PER_CONNECTION)
            left[0] -= n
            scripts = [fuzzer.steps() for _ in range(n)]

            async def some(scripts: list[list[Step]] = scripts, connection: _Connection = connection) -> None:
                while scripts and not connection.is_closed:
                    await connection.stream(scripts.pop())

            await asyncio.gather(*(some() for _ in range(_STREAMS)))
            reading.cancel()
            await asyncio.wait([reading])
            left[0] += len(scripts)  # the picker closed the connection, as it may


class _Connection:
    """One connection. open: by stream, an event that is set when something came. ended: how a stream ended."""

    def __init__(self, client: RawClient, outcomes: Counter[str]) -> None:
        self._client = client
        self._outcomes = outcomes
        self._open: dict[int, asyncio.Event] = {}
        self._ended: dict[int, str] = {}
        self._data: dict[int, bytearray] = {}
        self.is_closed = False

    async def read(self) -> None:
        """Read until the connection is closed."""
        try:
            while await self._client.read():
                for event in self._client.events:
                    self._take(event)
                self._client.events.clear()
        finally:
            self.is_closed = True
            for came in self._open.values():
                came.set()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.WindowUpdated) and event.stream_id == 0:
            for came in self._open.values():
                came.set()
            return
        stream_id = getattr(event, "stream_id", None)
        if stream_id not in self._open:
            return
        if isinstance(event, h2.events.DataReceived):
            self._data[stream_id] += event.data or b""
        elif isinstance(event, h2.events.StreamReset):
            self._ended.setdefault(stream_id, f"reset {int(event.error_code or 0)}")
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            headers: list[Any] = list(event.headers or ())
            status = dict(headers).get("grpc-status")
            if status is not None:
                self._ended[stream_id] = f"status {status}"
        self._open[stream_id].set()

    async def stream(self, steps: list[Step]) -> None:
        """Send one stream to its end, and judge."""
        stream_id = self._client.open(PROCESS)
        self._open[stream_id] = asyncio.Event()
        self._data[stream_id] = bytearray()
        for step in steps:
            if self._is_over(stream_id):
                break
            if isinstance(step, bytes):
                await self._write(stream_id, step)
            elif step is Do.AWAIT:
                await self._came(stream_id, _WAIT_S)
            elif step is Do.RESET:
                self._client.h2.reset_stream(stream_id, 8)
                self._client.flush()
                self._ended[stream_id] = "left"
            else:
                if step is Do.HALF_CLOSE:
                    self._client.h2.end_stream(stream_id)
                    self._client.flush()
                async with asyncio.timeout(_END_S):
                    while not self._is_over(stream_id):
                        await self._came(stream_id, _END_S)
        self._judge(self._ended.pop(stream_id, "connection closed"), bytes(self._data.pop(stream_id)), steps)
        del self._open[stream_id]

    def _is_over(self, stream_id: int) -> bool:
        return self.is_closed or stream_id in self._ended

    async def _came(self, stream_id: int, timeout_s: float) -> None:
        event = self._open[stream_id]
        event.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass

    async def _write(self, stream_id: int, data: bytes) -> None:
        """Send bytes as far as the picker's windows allow it."""
        h2, rest = self._client.h2, memoryview(data)
        while rest and not self._is_over(stream_id):
            n = min(len(rest), h2.local_flow_control_window(stream_id), h2.max_outbound_frame_size)
            if n:
                h2.send_data(stream_id, rest[:n].tobytes())
                rest = rest[n:]
                self._client.flush()
            else:
                await self._came(stream_id, _END_S)
        await self._client.drain()

    def _judge(self, end: str, data: bytes, steps: list[Step]) -> None:
        at, statuses = 0, []
        while len(data) - at >= 5:
            length = int.from_bytes(data[at + 1 : at + 5], "big")
            if len(data) - at - 5 < length:  # it left before the rest
                break
            try:
                message = ProcessingResponse.FromString(data[at + 5 : at + 5 + length])
            except DecodeError:
                raise AssertionError(f"an answer cannot be read: {steps}") from None
            if message.HasField("immediate_response"):
                statuses.append(message.immediate_response.status.code)
            at += 5 + length
        assert 500 not in statuses and len(statuses) <= 1, (statuses, steps)
        assert end not in ("status 2", "status 13") or any(_is_broken(step) for step in steps), (end, steps)
        self._outcomes[" ".join((*(f"refused {status}" for status in statuses), end))] += 1


def _is_broken(step: Step) -> bool:
    """Whether a step is no whole message, which gRPC answers with INTERNAL."""
    return isinstance(step, bytes) and (step[:1] != b"\0" or int.from_bytes(step[1:5], "big") != len(step) - 5)
