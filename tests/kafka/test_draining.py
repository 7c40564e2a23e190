"""Routers that are stopped with SIGTERM: what they answer meanwhile, and what they leave."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, get_json, is_ready, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.api import Api, metrics

MODEL = "m"
TOKENS = list(range(64))

#: How long the routers of these tests keep answering, and how long they may take after that.
NOTICE_S = 1.5
TIMEOUT_S = 3.0

#: Until a stopping process has ended, on a busy machine.
END_S = 30.0


@pytest.fixture
def drained(scope: Settings, tmp_path: Path) -> Iterator[RouterProcess]:
    """Give a router in a process of its own, with one engine."""
    with Children() as children:
        # A rank with more than a thousand tokens to compute is closed to requests that may wait.
        settings = replace(scope, drain_notice_s=NOTICE_S, drain_timeout_s=TIMEOUT_S, router_queue_backlog_ms=100.0)
        stack = Stack(settings, tmp_path, children)
        stack.worker(router=False)
        router = stack.router("router")
        stack.bridge(stack.engines(1, EngineConfig(), MODEL, 1.0))
        wait_workers(router.url, 1)
        yield router


def _connection(router: RouterProcess) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(router.settings.host, router.settings.port, timeout=END_S)


def _ends(router: RouterProcess) -> str:
    wait_for(lambda: not router.child.running, END_S, "the router to end")
    assert router.child.exit_code == 0
    return router.child.log_path.read_text()


def test_a_stopping_router_says_so_answers_on_and_leaves_nothing(drained: RouterProcess) -> None:
    """During the notice it is not ready and answers on connections that it then closes; its booking reaches Kafka.

    Requests that wait in its queue are refused when the notice begins.
    """
    kept, waiting = _connection(drained), _connection(drained)
    api = Api(drained.url)
    api.route(request_id="full", token_ids=list(range(1600)))
    asked = json.dumps({"request_id": "waits", "token_ids": TOKENS, "queue": "on"})
    waiting.request("POST", "/route", asked, {"Content-Type": "application/json"})
    queue_size = "kvstreams_flow_control_queue_size/0"
    wait_for(lambda: metrics(api).get(queue_size) == 1, END_S, "the request to wait")
    kept.request("GET", "/healthz")
    kept.getresponse().read()
    signalled_s = time.monotonic()
    drained.child.signal(signal.SIGTERM)
    refused = waiting.getresponse()
    assert (refused.status, json.loads(refused.read())["error"]["code"]) == (503, "not_ready")
    assert (refused.headers["Retry-After"], refused.headers["Connection"]) == ("1", "close")
    waiting.close()
    assert time.monotonic() - signalled_s < NOTICE_S

    def stopping() -> bool:
        with closing(_connection(drained)) as asking:
            asking.request("GET", "/ready")
            answer = asking.getresponse()
            reason = json.loads(answer.read()).get("reason", "")
            return answer.status == 503 and "stopping" in reason

    wait_for(stopping, END_S, "the router to say that it is stopping")
    body = json.dumps({"request_id": "late", "token_ids": TOKENS})
    kept.request("POST", "/route", body, {"Content-Type": "application/json"})
    answer = kept.getresponse()
    assert (answer.status, json.loads(answer.read())["worker_id"]) == (200, 1)
    assert answer.headers["Connection"] == "close"
    kept.close()
    log = _ends(drained)
    assert "cut off: 0. Records that Kafka did not acknowledge: 0" in log
    assert "Traceback" not in log
    with pytest.raises(ConnectionRefusedError):
        _connection(drained).request("GET", "/healthz")
    # A router that starts later learns of the bookings from Kafka.
    drained.child.start()
    drained.child.wait_ready(lambda: is_ready(drained.url), END_S)
    loads = get_json(f"{drained.url}/loads")["loads"]
    assert [each["active_requests"] for each in loads] == [2]


def test_a_request_that_does_not_end_is_cut_off_and_counted(drained: RouterProcess) -> None:
    """A body that never arrives keeps a router from ending for no longer than its limit, and the last line says so."""
    with socket.create_connection((drained.settings.host, drained.settings.port)) as slow:
        slow.sendall(
            b"POST /route HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        time.sleep(0.2)  # until the router has read the headers
        began_s = time.monotonic()
        drained.child.signal(signal.SIGTERM)
        log = _ends(drained)
    assert "cut off: 1." in log
    assert time.monotonic() - began_s < NOTICE_S + TIMEOUT_S + END_S / 2
    assert "Traceback" not in log
