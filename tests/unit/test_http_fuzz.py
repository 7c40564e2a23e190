"""Malformed requests over every call: each is refused, none is a fault of the router, and none changes anything.

`python -m tests.http_fuzz_soak` sends 100,000 of them.
"""

from __future__ import annotations

import json
import logging
import socket
from http.client import parse_headers
from urllib.parse import urlsplit

import pytest

from streams.kafka import outage_log
from tests.helpers.api import PATIENCE_S, metrics
from tests.helpers.http_fuzz import Fuzzer, send_all
from tests.helpers.http_state import SETTINGS, state_of
from tests.helpers.local_router import local_router

REQUESTS = 3000


def faults_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Warnings and errors in the log, except for those about the Kafka that these routers do not have."""
    about_kafka = (outage_log.__name__, "librdkafka")
    return [each for each in caplog.records if each.levelno >= logging.WARNING and each.name not in about_kafka]


@pytest.mark.parametrize("seed", [1])
def test_malformed_requests_are_refused_and_change_nothing(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """A few thousand malformed requests over every call give no 500, leave the state as it was, and log no error."""
    print(f"seed {seed}")
    with local_router(SETTINGS) as served:
        before = state_of(served.api)
        assert before["faults"] == 0
        statuses = send_all(served.api, Fuzzer(seed), REQUESTS)
        print(dict(statuses))
        assert state_of(served.api) == before
        # The requests reach the calls, and are not all stopped by the parser.
        assert {400, 404, 405, 413} <= statuses.keys()
        assert statuses[400] > REQUESTS / 3
        assert statuses[0] < REQUESTS / 2
        assert not faults_in(caplog)
        assert served.api.route(token_ids=[1, 2, 3], update_states=False)["request_blocks"] == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"secret prompt\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nsecret prompt\r\n\r\n", 400),
        (b"POST /route HTTP/1.1\r\nContent-Length: secret\r\n\r\n", 400),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"POST /route HTTP/1.1\r\nHost: x\r\nExpect: secret\r\nContent-Length: 2\r\n\r\n{}", 417),
    ],
)
def test_what_is_not_valid_http_is_refused_like_everything_else(
    sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the HTTP server itself has the shape of all errors, is counted, and quotes nothing of the request."""
    with local_router(SETTINGS) as served:
        url = urlsplit(served.api.url)
        with socket.create_connection((url.hostname or "", url.port or 0), PATIENCE_S) as client:
            client.sendall(sent)
            with client.makefile("rb") as answer:
                assert int(answer.readline().split()[1]) == status
                headers = parse_headers(answer)
                error = json.loads(answer.read(int(headers["Content-Length"])))["error"]
        assert error["code"] == "http_error"
        assert headers["Content-Type"] == "application/json"
        assert "secret" not in error["message"] + caplog.text
        assert metrics(served.api)["kvstreams_errors_total/http_error"] == 1
        assert not faults_in(caplog)
