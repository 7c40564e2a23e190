"""Malformed HTTP requests over every call of the API, and what a router must not do about them.

What lives here: making requests from a seed, sending them, and judging the answers. tests/unit/test_http_fuzz.py sends
a few thousand requests, and tests/http_fuzz_soak.py as many as it is asked for.

No request is valid for a call that changes anything, so that the router's state must stay as it is: each either breaks
the protocol, or a rule of its call. A mutation may by chance give a valid request; calls that book therefore carry
`update_states` false or name a worker that does not exist, and calls on bookings name ids that no test uses.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from streams.router_api.http.calls import CALLS, Call
from tests.helpers.api import OCTETS, Api, packed

#: Connections that send at the same time.
_CONNECTIONS = 32

#: The longest answer, of a router with little state.
_ANSWER_BYTES_MAX = 1 << 20

#: Some requests are not complete, so that the router waits for the rest.
_ANSWER_S = 0.5

#: Ids that are not valid, and that a few changed bytes do not make valid.
_WRONG_IDS = {"worker_id": "no-such-worker", "pool_id": "p" * 2000, "dp_rank": "0"}

#: A valid id of a worker that does not exist, which a few changed bytes do not make that of one that does.
_NO_WORKER = 2**64 - 1

_NUMBERS = (0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**40, 1.5, -0.0, 1e308)
_TEXTS = ("", "x", "\x00", "\n", "é", "\U0001f600", "\ud800", "a" * 600, "1" * 30, "../..", "%00", "{}", "[]", "null")


class Fuzzer:
    """Makes requests at random. Every request is a function of the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._forms: tuple[Callable[[], bytes], ...] = (
            self._wrong_json,
            self._wrong_json,
            self._broken_json,
            self._wrong_path,
            self._wrong_query,
            self._wrong_packed,
            self._wrong_headers,
            self._mutated,
            self._noise,
        )

    def request(self) -> bytes:
        """The bytes of one request, or of something that looks like one."""
        return self.rng.choice(self._forms)()

    # -- forms of requests ---------------------------------------------------------------------------------------------

    def _wrong_json(self) -> bytes:
        """A body of the right fields with at least one wrong value."""
        call = self._call(lambda each: each.body is not None)
        fields = self._fields(call)
        for _ in range(self.rng.randrange(1, 4)):
            fields[self.rng.choice([*(each for each in fields if each != "update_states"), "unknown", ""])] = (
                self._value(3)
            )
        if fields.get("worker_id") == 1:
            fields["worker_id"] = _NO_WORKER  # worker 1 exists, so this would be a valid booking
        body = self._list_of(fields) if call.takes_lists and self.rng.random() < 0.2 else fields
        return self._http(call.method, self._path(call), _json(body))

    def _broken_json(self) -> bytes:
        call = self._call(lambda each: each.body is not None)
        body = bytearray(_json(self._fields(call)))
        for _ in range(self.rng.randrange(1, 6)):
            at = self.rng.randrange(len(body) + 1)
            body[at : at + self.rng.randrange(4)] = self.rng.choice(
                (b"", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\xff", b"\x00", b"[" * 3000, b"9" * 400)
            )
        return self._http(call.method, self._path(call), bytes(body))

    def _wrong_path(self) -> bytes:
        call = self._call(lambda each: "{" in each.path)
        wrong = self.rng.choice(_TEXTS).encode("utf-8", "surrogatepass")
        escaped = "".join(f"%{byte:02x}" if self.rng.random() < 0.7 or byte <= 32 else chr(byte) for byte in wrong)
        path = re.sub(r"\{\w+\}", lambda _: escaped, call.path)
        return self._http(self.rng.choice((call.method, "PATCH", "PUT", "HEAD", "OPTIONS")), path, b"{}")

    def _wrong_query(self) -> bytes:
        call = self._call()
        names = ("phase", "model", "worker_id", "update_states", "moe_query", "tier_weights", "allowed_worker_ids", "x")
        pairs = [f"{self.rng.choice(names)}={self.rng.choice(('', '1', '%ff', 'none', '[', ',,', '1' * 300))}"] * 2
        kind = self.rng.choice((OCTETS, "application/json"))
        path = f"{self._path(call)}?{'&'.join(pairs)}"
        return self._http(call.method, path, packed([1, 2, 3]), f"Content-Type: {kind}")

    def _wrong_packed(self) -> bytes:
        call = self._call(lambda each: each.packs_tokens)
        body = self.rng.randbytes(self.rng.choice((0, 1, 3, 5, 4 * 2000 + 2)))
        path = f"{self._path(call)}?update_states=false"
        return self._http(call.method, path, body, f"Content-Type: {OCTETS}")

    def _wrong_headers(self) -> bytes:
        call = self._call()
        header = self.rng.choice(
            (
                "Content-Length: -1",
                "Content-Length: 1e3",
                "Content-Length: 99999999999999999999",
                "Content-Encoding: gzip",
                "Content-Encoding: br",
                "Transfer-Encoding: chunked",
                "Transfer-Encoding: gzip, chunked",
                "Expect: 100-continue",
                "Expect: nothing",
                "Upgrade: websocket\r\nConnection: upgrade",
                "Content-Type: " + "x" * 300,
                "Host: " + "y" * 9000,
                "No colon",
                " folded: value",
                "A\x00b: c",
                "Connection: close, keep-alive",
            )
        )
        return self._http(call.method, self._path(call), _json(self._fields(call)), header)

    def _mutated(self) -> bytes:
        """A request whose bytes were changed anywhere."""
        call = self._call()
        request = bytearray(self._http(call.method, self._path(call), _json(self._fields(call))))
        for _ in range(self.rng.randrange(1, 4)):
            at = self.rng.randrange(len(request))
            request[at : at + self.rng.randrange(3)] = self.rng.randbytes(self.rng.randrange(4))
        return bytes(request)

    def _noise(self) -> bytes:
        return self.rng.randbytes(self.rng.randrange(1, 200)) + b"\r\n\r\n"

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _call(self, wanted: Callable[[Call], bool] = lambda _: True) -> Call:
        return self.rng.choice([call for call in CALLS if wanted(call)])

    def _path(self, call: Call) -> str:
        """A path with ids that exist nowhere. Those of workers and pools are not valid, so that none is registered."""
        ids = {"request_id": f"fuzz-{self.rng.randrange(100)}", **_WRONG_IDS}
        return re.sub(r"\{(\w+)\}", lambda found: ids[found[1]], call.path)

    def _fields(self, call: Call) -> dict[str, Any]:
        if call.path in ("/route", "/loads/potential", "/matches"):
            return {"token_ids": [self.rng.randrange(1 << 17) for _ in range(40)], "update_states": False}
        if call.handler == "book":
            return {"worker_id": _NO_WORKER, "token_ids": [1, 2, 3]}
        return {"output_tokens": -1, "url": "x", "model": "", "members": [-1]}

    def _list_of(self, fields: dict[str, Any]) -> list[Any]:
        return [self.rng.choice((fields, self._value(2))) for _ in range(self.rng.choice((0, 1, 3, 300)))]

    def _value(self, depth: int) -> Any:
        rng = self.rng
        if depth and rng.random() < 0.3:
            if rng.random() < 0.5:
                return [self._value(depth - 1) for _ in range(rng.randrange(4))]
            names = (*_TEXTS, "moe_query", "layer_id", "expert_ids")
            return {rng.choice(names): self._value(depth - 1) for _ in range(3)}
        return rng.choice((None, True, False, rng.choice(_NUMBERS), rng.choice(_TEXTS)))

    def _http(self, method: str, path: str, body: bytes, *headers: str) -> bytes:
        framed = any("Content-Length" in each or "chunked" in each for each in headers)
        lengths = () if framed else (f"Content-Length: {len(body)}",)
        head = "\r\n".join((f"{method} {path} HTTP/1.1", "Host: fuzz", *lengths, *headers))
        return head.encode("utf-8", "replace") + b"\r\n\r\n" + body


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def send_all(api: Api, fuzzer: Fuzzer, n_requests: int) -> Counter[int]:
    """Send requests; return how many were answered with each status, and under 0 those without an answer.

    Raises AssertionError for a status of 500, and for an error in another shape than that of all errors.
    """
    return asyncio.run(_send_all(urlsplit(api.url).netloc, fuzzer, n_requests))


async def _send_all(address: str, fuzzer: Fuzzer, n_requests: int) -> Counter[int]:
    host, _, port = address.rpartition(":")
    statuses: Counter[int] = Counter()
    left = n_requests

    async def send() -> None:
        nonlocal left
        while left > 0:
            reader, writer = await asyncio.open_connection(host, int(port), limit=_ANSWER_BYTES_MAX)
            with closing(writer):
                is_last = False
                while left > 0 and not is_last:
                    left -= 1
                    request = fuzzer.request()
                    try:
                        writer.write(request)
                        async with asyncio.timeout(_ANSWER_S):
                            status, body, is_last = await _answer(reader, is_head=request.startswith(b"HEAD"))
                    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                        status, body, is_last = 0, b"", True
                    statuses[status] += 1
                    _judge(request, status, body)

    await asyncio.gather(*(send() for _ in range(_CONNECTIONS)))
    return statuses


async def _answer(reader: asyncio.StreamReader, *, is_head: bool) -> tuple[int, bytes, bool]:
    """Read one answer: its status, its body, and whether no other follows on the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(head.split(" ", 2)[1])
    if status == 100:
        return await _answer(reader, is_head=is_head)
    length = re.search(r"\r\ncontent-length: (\d+)", head)
    is_last = "connection: close" in head or length is None
    body = b"" if is_head or length is None else await reader.readexactly(int(length[1]))
    return status, body, is_last


def _judge(request: bytes, status: int, body: bytes) -> None:
    assert status != 500, request
    if status >= 400 and body:
        assert body.startswith(b'{"error":'), (request, body)
        answer = json.loads(body)
        assert set(answer) == {"error"}, (request, body)
        assert set(answer["error"]) == {"code", "message", "detail"}, (request, body)
