"""Short requests are answered as soon as they arrive, with the same answers as aiohttp's own way gives."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from streams.router_api import fast_lane
from streams.router_api.bodies import UNCOUNTED_BODY_BYTES
from streams.router_api.fast_lane import HOLD_S, FastLane
from streams.settings import Settings
from streams.waiting import wait_for
from tests.helpers.api import OCTETS, PATIENCE_S, Api, metrics, packed
from tests.helpers.local_router import LocalRouter, local_router

TOKENS = list(range(64))
BODY_TIMEOUT_S = 1.0
SETTINGS = Settings(body_timeout_s=BODY_TIMEOUT_S, body_bytes_max=256 * 1024)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalRouter]:
    with local_router(SETTINGS) as router:
        yield router


@pytest.fixture
def api(served: LocalRouter) -> Api:
    return served.api


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the requests that the fast lane answers, and those that it hands back once it has read their body."""
    counts: Counter[str] = Counter()
    answer = FastLane.answer

    def counting(lane: FastLane, call: Any, message: Any, body: bytes) -> bytes | None:
        found = answer(lane, call, message, body)
        counts["handed back" if found is None else "answered"] += 1
        return found

    monkeypatch.setattr(FastLane, "answer", counting)
    return counts


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """One request as bytes."""
    sent = {"Host": "router", "Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Client:
    """A connection that sends bytes and reads whole answers."""

    def __init__(self, api: Api) -> None:
        url = urlsplit(api.url)
        assert url.hostname is not None and url.port is not None
        self.socket = socket.create_connection((url.hostname, url.port), PATIENCE_S)
        self._read = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> None:
        """Send each part in a packet of its own."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, part in enumerate(parts):
            if number:
                time.sleep(HOLD_S / 10)
            self.socket.sendall(part)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self._read.readline().split()[1])
        headers = {}
        while line := self._read.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers, self._read.read(int(headers["content-length"]))

    def ask(self, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
        self.send(*parts)
        return self.answer()

    def close(self) -> None:
        self._read.close()
        self.socket.close()


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with closing(Client(api)) as connection:
        yield connection


def test_this_version_of_aiohttp_has_the_fast_lane() -> None:
    """The private parts of aiohttp that are used exist. If this fails, aiohttp answers everything, only slower."""
    assert fast_lane.is_supported()


ROUTE = b'{"token_ids": [1, 2, 3], "request_id": "r1"}'
FREE = request("DELETE", "/loads/r1")


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (request("POST", "/route", ROUTE), True),
        (request("POST", "/route", b'{"token_ids": [1, 2, 3], "update_states": false, "explain": true}'), True),
        (request("POST", "/route?request_id=r1&model=m", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route", packed(TOKENS)[:-1], Content_Type=OCTETS), True),
        (request("POST", "/route?worker_id=1&dp_rank=9", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route?request_id=a%2Fb+c&update_states=false", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route?request_id=&model=m", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route?request_id", packed(TOKENS), Content_Type=OCTETS), True),
        (
            request("POST", "/route?allowed_worker_ids=1,2&tier_weights=1,1,1,0", packed(TOKENS), Content_Type=OCTETS),
            True,
        ),
        (request("POST", "/route?unknown=1", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route?model=a&model=b", packed(TOKENS), Content_Type=OCTETS), True),
        (request("POST", "/route", b"", Content_Type=OCTETS), False),
        (request("POST", "/route", packed(TOKENS), Content_Type="Application/Octet-Stream; x=y"), False),
        (request("POST", "/route?model=m", ROUTE), False),
        (request("POST", "/route", b""), True),
        (request("POST", "/route", b"{"), True),
        (request("POST", "/route", b'{"token_ids": [], "model": "m"}'), True),
        (request("POST", "/route", b'{"token_ids": [1], "model": "other"}'), True),
        (request("POST", "/route", b'{"token_ids": [1], "worker_id": 99}'), True),
        (request("POST", "/route", b" [{}, 1]"), False),
        (request("POST", "/route", ROUTE, Content_Encoding="gzip"), False),
        (request("POST", "/route", b" " * (UNCOUNTED_BODY_BYTES + 1)), False),
        (request("POST", "/route", b" " * (SETTINGS.body_bytes_max + 1)), False),
        (request("POST", "/routes", ROUTE), False),
        (request("PUT", "/route", ROUTE), False),
        (request("DELETE", "/loads/never"), True),
        (request("DELETE", "/loads/never", b"a body that means nothing"), True),
        (request("DELETE", "/loads/never", Content_Length=""), True),
        (request("DELETE", "/loads/r%31"), False),
        (request("DELETE", "/loads/"), False),
        (request("DELETE", "/loads/never/more"), False),
        (request("DELETE", "/loads/never?phase=decode"), True),
        (request("DELETE", "/loads/never?phase=none"), True),
        (request("DELETE", "/loads/" + 512 * "a"), True),
        (request("DELETE", "/loads/" + 513 * "a"), False),
        (request("POST", "/loads/never/prefill-complete"), True),
        (request("POST", "/loads/never/output", b'{"output_tokens": 5}'), True),
        (request("POST", "/loads/never/output", b'{"output_tokens": -5}'), True),
        (request("POST", "/loads/never/output?phase=prefill&phase=prefill", b'{"output_tokens": 5}'), True),
        (request("GET", "/loads/never"), False),
        (request("GET", "/healthz"), False),
    ],
)
def test_both_ways_give_the_same_answer(client: Client, api: Api, fast: Counter[str], sent: bytes, taken: bool) -> None:
    """Status, headers and body are the same, whichever way a request takes."""
    first = client.ask(sent)
    assert bool(fast["answered"]) == taken
    client.ask(FREE)
    with closing(Client(api)) as other:
        n_answered = fast["answered"]
        # aiohttp itself answers a request after which the connection closes.
        second = other.ask(sent.replace(b"Host: router", b"Host: router\r\nConnection: close", 1))
        assert fast["answered"] == n_answered
    client.ask(FREE)
    assert second[1].pop("connection", "close") == "close"
    for _, headers, _ in (first, second):
        assert headers.pop("date").endswith("GMT")
        headers.pop("connection", None)
    assert first[:2] == (second[0], {**second[1], "content-length": first[1]["content-length"]})
    assert comparable(first[2]) == comparable(second[2])


def comparable(body: bytes) -> Any:
    """An answer without what is drawn at random: generated ids, and ties."""
    answer = json.loads(body)
    if isinstance(answer, list):
        return answer
    for name in ("worker_id", "url", "candidates"):
        answer.pop(name, None)
    if len(answer.get("request_id", "")) == 32:
        del answer["request_id"]
    return answer


def test_requests_in_one_packet_are_answered_in_order(client: Client, fast: Counter[str]) -> None:
    """Pipelined requests that take both ways, and more of them than the parser has ready, are answered in order."""
    asked = [request("DELETE", "/loads/a"), request("GET", "/healthz"), request("POST", "/route", b"{")]
    for n, by_lane in ((1, 1), (100, 0)):
        before = fast["answered"]
        client.send(b"".join(asked * n))
        assert [client.answer()[0] for _ in range(3 * n)] == [202, 200, 400] * n
        assert fast["answered"] >= before + by_lane
    before = fast["answered"]
    for _ in range(100):
        client.send(asked[0] * 5 + asked[2] * 5)
        assert [client.answer()[0] for _ in range(10)] == [202] * 5 + [400] * 5
    assert fast["answered"] > before + 900


def test_a_body_may_arrive_in_pieces(client: Client, fast: Counter[str]) -> None:
    """The rest of a body that arrives soon is waited for, and a later one is read by aiohttp."""
    whole = request("POST", "/route", ROUTE)
    for at in (whole.index(b"\r\n\r\n") + 4, len(whole) - 3, 10):
        assert client.ask(whole[:at], whole[at:])[0] == 200
        assert client.ask(FREE)[0] == 200
    assert fast["answered"] == 6
    client.send(whole[:-3])
    time.sleep(3 * HOLD_S)
    assert client.ask(whole[-3:])[0] == 200
    assert client.ask(FREE)[0] == 200
    assert fast["answered"] == 7
    n = len(whole) - len(ROUTE)
    assert client.ask(whole[:n], *(whole[at : at + 1] for at in range(n, len(whole))))[0] == 200


def test_a_body_that_does_not_arrive_is_408(client: Client) -> None:
    """The limit of time for a body applies to short requests as well."""
    began = time.monotonic()
    status, _, body = client.ask(request("POST", "/route", ROUTE)[:-1])
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert time.monotonic() - began >= BODY_TIMEOUT_S


def test_a_client_that_leaves_in_the_middle_of_a_body_does_no_harm(api: Api) -> None:
    """Connections that end within a request leave nothing behind."""
    for _ in range(20):
        with closing(Client(api)) as leaving:
            leaving.send(request("POST", "/route", ROUTE)[:-1])
    wait_for(lambda: metrics(api)["kvstreams_connections"] <= 1, PATIENCE_S, "the connections to be gone")


def test_answers_that_are_not_read_do_not_pile_up(api: Api) -> None:
    """A client that sends and does not read is not served further once the system's buffers are full."""
    ask = request("POST", "/route", b'{"token_ids": [1], "unknown": 1}')
    with closing(Client(api)) as silent:
        silent.socket.settimeout(1.0)
        with pytest.raises(TimeoutError):
            silent.socket.sendall(ask * 500_000)
    assert api.call("DELETE", "/loads/x").status == 202


def test_errors_of_the_fast_lane_are_counted(client: Client, api: Api) -> None:
    """kvstreams_errors_total and kvstreams_route_seconds count requests of both ways."""
    before = metrics(api)
    assert client.ask(request("POST", "/route", b"{"))[0] == 400
    assert client.ask(request("POST", "/route", ROUTE))[0] == 200
    assert client.ask(FREE)[0] == 200
    after = metrics(api)
    for name in ("kvstreams_errors_total/invalid_request", "kvstreams_route_seconds_count"):
        assert after[name] == before[name] + 1


def test_an_unexpected_fault_is_500(
    client: Client, served: LocalRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that nothing expects is logged and answered with 500, and the connection can be used again."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patched:
        patched.setattr(served.router, "report_phase", fail)
        status, _, body = client.ask(FREE)
    assert (status, json.loads(body)["error"]["code"]) == (500, "internal")
    assert b"secret" not in body
    assert "DELETE /loads/r1 failed" in caplog.text
    assert client.ask(FREE)[0] in (200, 202)


def test_a_middleware_sees_every_request(served: LocalRouter) -> None:
    """With a further middleware, such as one that checks tokens, no request takes the fast lane."""
    from streams.router_api.handlers import Handlers, error_shape

    @web.middleware
    async def other(request: web.Request, handler: Any) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        return response

    for middlewares, has_lane in (([error_shape], True), ([error_shape, other], False)):
        app = web.Application(middlewares=middlewares)
        handlers = Handlers(served.router)
        handlers.add_to(app)
        assert (handlers.runner(app)._lane is not None) == has_lane
