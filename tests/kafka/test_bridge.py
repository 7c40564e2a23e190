"""The bridge between real simulated engines and a real Kafka: what the engines hold is what a router knows."""

from __future__ import annotations

import json
import re
import struct
import urllib.request
from collections.abc import Callable

import msgpack
import pytest
import zmq

from streams.engines.bridge import engine_address
from streams.engines.feed import port_above
from streams.errors import KvStreamsError, SettingsError
from streams.local.ports import free_port
from streams.local.stack import Engine, RouterProcess, Stack, get_json, wait_workers
from streams.sim.model import EngineConfig
from streams.waiting import wait_for
from tests.helpers.support import VISIBLE_TIMEOUT_S, assert_known, dead_letters

SMALL = EngineConfig(block_size=16, n_blocks=64)


def complete(engine: Engine, tokens: list[int], n_output_tokens: int = 2) -> None:
    body = json.dumps({"model": "m", "prompt": tokens, "max_tokens": n_output_tokens}).encode()
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30.0) as response:
        assert response.status == 200


def health(router: RouterProcess) -> dict[int, str]:
    return {rank["worker_id"]: rank["health"] for rank in get_json(f"{router.url}/state")["ranks"]}


def incarnation(router: RouterProcess, worker_id: int) -> int:
    ranks = get_json(f"{router.url}/state")["ranks"]
    return next(int(rank["incarnation"]) for rank in ranks if rank["worker_id"] == worker_id)


@pytest.fixture
def fresh_tokens() -> Callable[[int], list[int]]:
    """Give prompts that no earlier one shares a block with."""
    used = 0

    def take(n: int) -> list[int]:
        nonlocal used
        used += n
        return list(range(used - n, used))

    return take


def test_what_engines_hold_is_what_the_router_knows_through_every_restart(
    stack: Stack, fresh_tokens: Callable[[int], list[int]]
) -> None:
    """Stores, evictions, resets, and restarts of bridge and engine leave router and engines with the same blocks."""
    worker = stack.worker()
    engines = stack.engines(2, SMALL, "m", time_scale=100.0)
    # Before any bridge listens: only the replay socket can tell of these.
    complete(engines[0], fresh_tokens(160))
    bridge = stack.bridge(engines)
    wait_workers(worker.url, 2)
    assert len(assert_known(worker, engines)) >= 10

    for _ in range(8):  # the cache has room for 64 blocks: these evict each other
        complete(engines[0], fresh_tokens(320))
        complete(engines[1], fresh_tokens(160), n_output_tokens=40)
    truth = assert_known(worker, engines)
    assert 64 >= sum(1 for worker_id, _ in truth if worker_id == 1) > 40
    assert health(worker) == {1: "exact", 2: "exact"}

    bridge.kill()
    complete(engines[1], fresh_tokens(64))
    before = incarnation(worker, 1)
    bridge.start()  # reads the engines' replay buffers from the first batch: what is known comes as duplicates
    complete(engines[0], fresh_tokens(48))
    assert_known(worker, engines)
    assert health(worker) == {1: "exact", 2: "exact"}
    assert incarnation(worker, 1) == before

    request = urllib.request.Request(f"{engines[1].url}/reset_prefix_cache", data=b"", method="POST")
    with urllib.request.urlopen(request, timeout=30.0) as response:
        assert response.status == 200
    assert not {worker_id for worker_id, _ in assert_known(worker, engines)} - {1}

    # An engine that restarts on its port never keeps credit for the cache that it lost.
    restarted = stack.restart_engine(engines[0], SMALL, "m", time_scale=100.0)
    assert assert_known(worker, [restarted, engines[1]]) == set()  # though it has told nothing yet
    complete(restarted, fresh_tokens(96))
    assert len(assert_known(worker, [restarted, engines[1]])) == 6
    assert incarnation(worker, 1) > before
    assert health(worker)[1] == "exact"

    # Deleted, and bridged again while its engine lives on: it is back with what it holds.
    request = urllib.request.Request(f"{worker.url}/workers/1", method="DELETE")
    with urllib.request.urlopen(request, timeout=30.0) as response:
        assert response.status == 200
    assert_known(worker, [engines[1]])
    bridge.kill()
    bridge.start()
    assert len(assert_known(worker, [restarted, engines[1]])) == 6
    assert health(worker)[1] == "exact"


def test_a_payload_that_is_no_event_ends_in_the_dead_letters_and_degrades_its_rank(stack: Stack) -> None:
    """Bytes that are no msgpack are kept with their reason, and the rank says that it lost a batch."""
    context = zmq.Context()
    engines = stack.engines(1, SMALL, "m", time_scale=100.0)
    with context.socket(zmq.PUB) as publisher:
        port = free_port()
        publisher.bind(f"tcp://127.0.0.1:{port}")
        # The engine's own HTTP side, with an event socket of ours in place of its own.
        stand_in = Engine(7, engines[0].child, engines[0].url, f"tcp://127.0.0.1:{port}", "")
        worker = stack.worker()
        stack.bridge([stand_in])
        wait_workers(worker.url, 1)
        good = msgpack.packb([0.0, [["BlockStored", [5], None, list(range(16)), 16, None, "GPU"]], 0])

        def told() -> bool:
            for sequence, payload in enumerate((good, b"\xc1 no msgpack", good)):
                publisher.send_multipart([b"", struct.pack(">Q", sequence), payload])
            ranks = get_json(f"{worker.url}/state")["ranks"]
            return bool(ranks) and ranks[0]["sequence"] == 2

        wait_for(told, VISIBLE_TIMEOUT_S, "the third batch to be visible")
    context.destroy(linger=0)
    rank = get_json(f"{worker.url}/state")["ranks"][0]
    assert (rank["worker_id"], rank["health"], rank["gaps"], rank["blocks"]) == (7, "degraded", 1, 1)
    letters = dead_letters(stack.settings)
    assert [(value, headers["kvstreams.reason"]) for value, headers in letters] == [
        (b"\xc1 no msgpack", b"not_msgpack")
    ]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("id=1,url=http://x", "events missing"),
        ("url=http://x,events=tcp://x:1", "id missing"),
        ("id=one,url=http://x,events=tcp://x:1", "whole numbers"),
        ("id=-1,url=http://x,events=tcp://x:1", "0 to 2^64-1"),
        ("id=1,url=http://x,events=tcp://x:1,dp=0", "dp 1 to"),
        ("id=1,url=http://x,events=tcp://x:1,colour=red", "colour unknown"),
        ("id=1,url=x:8000,events=tcp://x:1", "url is 'x:8000'. It looks like http://HOST:PORT"),
        ("id=1,url=x,events=tcp://x:1", "It looks like http://"),
        ("id=1,url=tcp://x:8000,events=tcp://x:1", "It looks like http://"),
        ("id=1,url=http://,events=tcp://x:1", "It looks like http://"),
        ("id=1,url=http://x:port,events=tcp://x:1", "It looks like http://"),
        ("id=1,url=http://x:99999,events=tcp://x:1", "It looks like http://"),
        ("id=1,url=http://x,events=x:5557", "events is 'x:5557'. It looks like tcp://HOST:PORT"),
        ("id=1,url=http://x,events=tcp://x", "It looks like tcp://"),
        ("id=1,url=http://x,events=tcp://x:1,replay=http://x:1", "replay is 'http://x:1'"),
        ("id=1,url=http://x,events=tcp://x:1,metrics=x/metrics", "metrics is 'x/metrics'"),
    ],
)
def test_an_engine_address_that_cannot_be_used_says_why(text: str, wrong: str) -> None:
    """Each wrong part is named."""
    with pytest.raises(SettingsError, match=re.escape(wrong)):
        engine_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "id=1,url=https://x,events=tcp://10.0.0.1:5557,replay=tcp://[::1]:5558",
        "id=1,url=http://[::1]:8000/,events=ipc:///tmp/events,metrics=https://x/metrics",
    ],
)
def test_an_engine_address_may_have_any_form_that_can_be_asked(text: str) -> None:
    """With or without a port where the scheme has one, by name or number."""
    assert engine_address(text).worker_id == 1


def test_the_page_of_an_engine_is_beside_its_api_unless_told_otherwise() -> None:
    """As trtllm-serve has it elsewhere."""
    address = "id=1,url=http://x:8000/,events=tcp://x:1"
    assert engine_address(address).metrics_url == "http://x:8000/metrics"
    elsewhere = engine_address(f"{address},metrics=http://x:8000/prometheus/metrics?a=b")
    assert elsewhere.metrics_url == "http://x:8000/prometheus/metrics?a=b"


def test_rank_n_listens_n_ports_above_rank_0() -> None:
    """As in vLLM."""
    assert port_above("tcp://host:5557", 0) == "tcp://host:5557"
    assert port_above("tcp://host:5557", 3) == "tcp://host:5560"
    with pytest.raises(KvStreamsError, match="no port"):
        port_above("tcp://host", 1)
