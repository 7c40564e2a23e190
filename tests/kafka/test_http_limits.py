"""Slow uploads to real processes: a Faust worker and `kvstreams router` have the same limits."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from streams.lab.stack import Stack
from streams.process.waiting import wait_for
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


#: Clients that connect and send nothing, and clients that send one byte of a request per second.
N_SILENT, N_TRICKLING = 2000, 500

#: How long a new connection may be without a request, and how long they send nothing or too little: longer.
FIRST_REQUEST_S, TRICKLE_S = 4.0, 6.0


@pytest.mark.long_running
def test_silent_and_trickling_connections_delay_nobody(stack: Stack) -> None:
    """While 2,500 connections are open that send nothing or a byte per second, others are answered; then all close."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = N_SILENT + N_TRICKLING + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"this system allows {hard} open files, and the test needs {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    process = stack.router("router", router_min_initial_workers=0, first_request_timeout_s=FIRST_REQUEST_S)
    api = Api(process.url)
    address = (urlsplit(process.url).hostname, urlsplit(process.url).port)
    request = b"POST /route HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with ExitStack() as opened:
        every = [
            opened.enter_context(closing(socket.create_connection(address, PATIENCE_S)))
            for _ in range(N_SILENT + N_TRICKLING)
        ]
        began_s = time.monotonic()
        sent, slowest_s = 0, 0.0
        while time.monotonic() - began_s < TRICKLE_S:
            for trickling in every[N_SILENT:]:
                with suppress(OSError):  # the router has closed it
                    trickling.send(request[sent : sent + 1])
            sent += 1
            until_s = time.monotonic() + 1.0
            while (asked_s := time.monotonic()) < until_s:
                assert api.call("GET", "/loads").status == 200
                slowest_s = max(slowest_s, time.monotonic() - asked_s)
        assert slowest_s < PATIENCE_S / 4
        counted = metrics(api)
        assert counted["kvstreams_connections_refused_total/no_request"] == N_SILENT + N_TRICKLING
        assert counted.get("kvstreams_connections_refused_total/too_many", 0) == 0


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
