"""Slow uploads to real processes: a Faust worker and `kvstreams router` have the same limits."""

from __future__ import annotations

import json
import socket
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from streams.local.stack import Stack
from streams.waiting import wait_for
from tests.helpers.api import PATIENCE_S, TOKENS, Api, metrics

N_UPLOADS = 100
#: What each client sends of the body that it has announced.
SENT_BYTES = 1024 * 1024
BODY_BYTES_MAX = 4 * SENT_BYTES

#: How much the process may grow meanwhile: by the bodies within the limit, 64 KiB for each of the others, and buffers.
GROWTH_BYTES_MAX = N_UPLOADS * SENT_BYTES // 2


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.mark.parametrize("server", ["worker", "router"])
def test_slow_uploads_take_little_memory_and_delay_nobody(server: str, stack: Stack) -> None:
    """A hundred clients send a part of a large body each and then wait: the router refuses them, and answers others."""
    stack.settings = replace(
        stack.settings,
        body_bytes_max=BODY_BYTES_MAX,
        bodies_bytes_max=BODY_BYTES_MAX,
        body_timeout_s=2.0,
        connections_max=N_UPLOADS + 10,
    )
    process = stack.worker() if server == "worker" else stack.router("router")
    api = Api(process.url)
    api.call("PUT", "/workers/1", {"url": "http://e:1", "model": "m", "block_size": 16}).given()
    asked = {"token_ids": TOKENS, "update_states": False}
    wait_for(lambda: api.call("POST", "/route", asked).status == 200, PATIENCE_S, "the worker to be known")
    before = resident_bytes(process.child.pid)
    address = (urlsplit(process.url).hostname, urlsplit(process.url).port)
    head = f"POST /route HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_BYTES_MAX}\r\n\r\n".encode()
    answers: Counter[str] = Counter()
    with ExitStack() as opened:
        uploads = [
            opened.enter_context(closing(socket.create_connection(address, PATIENCE_S))) for _ in range(N_UPLOADS)
        ]
        for upload in uploads:
            upload.setblocking(False)
        left = dict.fromkeys(uploads, head + b" " * SENT_BYTES)
        while left:  # as fast as the router takes it, from all clients at the same time
            for upload, rest in list(left.items()):
                try:
                    left[upload] = rest[upload.send(rest) :]
                except BlockingIOError:
                    api.route(**asked)
                except OSError:  # the router has refused it and closed the connection
                    left[upload] = b""
                if not left[upload]:
                    del left[upload]
        assert resident_bytes(process.child.pid) - before < GROWTH_BYTES_MAX
        for upload in uploads:
            upload.settimeout(PATIENCE_S)
            try:
                answer = upload.makefile("rb").readline().decode()
            except OSError:
                answer = ""
            answers[answer[9:12]] += 1
    assert answers["408"] >= 1 and answers["503"] >= 1
    assert answers.keys() <= {"408", "503", ""}, answers
    errors = metrics(api)
    assert errors["kvstreams_errors_total/request_timeout"] == answers["408"]
    assert errors["kvstreams_errors_total/overloaded"] >= answers["503"]
    api.route(**asked)


@pytest.mark.parametrize("server", ["worker", "router"])
def test_both_servers_read_and_refuse_bodies_alike(server: str, stack: Stack) -> None:
    """Query parameters next to JSON, unknown compression and large id lists are refused by a worker as by a router."""
    process = stack.worker() if server == "worker" else stack.router("router")
    api = Api(process.url)
    assert "model" in api.call("POST", "/route?model=x", {"token_ids": TOKENS}).refused(400, "invalid_request")
    body = json.dumps({"token_ids": TOKENS}).encode()
    api.call("POST", "/route", body, headers={"Content-Encoding": "br"}).refused(415, "unsupported_encoding")
    many = {"token_ids": TOKENS, "allowed_worker_ids": list(range(700_000))}
    api.call("POST", "/route", many).refused(400, "invalid_request")
    api.call("POST", "/route", {"token_ids": TOKENS, "lora_name": "x" * 15_000_000}).refused(400, "invalid_request")
