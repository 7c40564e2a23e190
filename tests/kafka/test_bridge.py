"""The bridge between real simulated engines and a real Kafka: a router has the blocks that the engines hold."""

from __future__ import annotations

import struct
import urllib.request
from collections.abc import Callable

import msgpack
import pytest
import zmq

from streams.lab.kafka.ports import free_port
from streams.lab.stack import Engine, Stack, get_json, wait_workers
from streams.process.waiting import wait_for
from tests.helpers.bridges import SMALL, complete, health, incarnation
from tests.helpers.support import VISIBLE_TIMEOUT_S, assert_known, dead_letters


@pytest.fixture
def fresh_tokens() -> Callable[[int], list[int]]:
    """Return prompts that share no block with any earlier prompt."""
    used = 0

    def take(n: int) -> list[int]:
        nonlocal used
        used += n
        return list(range(used - n, used))

    return take


def test_the_router_has_what_the_engines_hold_through_every_restart(
    stack: Stack, fresh_tokens: Callable[[int], list[int]]
) -> None:
    """Stores, evictions, resets, and restarts of bridge and engine leave router and engines with the same blocks."""
    worker = stack.worker()
    engines = stack.engines(2, SMALL, "m", time_scale=100.0)
    # No bridge is listening yet, so these batches can only come from the replay socket.
    complete(engines[0], fresh_tokens(160))
    bridge = stack.bridge(engines)
    wait_workers(worker.url, 2)
    assert len(assert_known(worker, engines)) >= 10

    for _ in range(8):  # the cache has 64 blocks, so these prompts evict each other
        complete(engines[0], fresh_tokens(320))
        complete(engines[1], fresh_tokens(160), n_output_tokens=40)
    truth = assert_known(worker, engines)
    assert 64 >= sum(1 for worker_id, _ in truth if worker_id == 1) > 40
    assert health(worker) == {1: "exact", 2: "exact"}

    bridge.kill()
    complete(engines[1], fresh_tokens(64))
    before = incarnation(worker, 1)
    bridge.start()  # it reads the engines' replay buffers from the first batch; published batches become duplicates
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
    assert assert_known(worker, [restarted, engines[1]]) == set()  # although it has reported no event yet
    complete(restarted, fresh_tokens(96))
    assert len(assert_known(worker, [restarted, engines[1]])) == 6
    assert incarnation(worker, 1) > before
    assert health(worker)[1] == "exact"

    # A worker that was deleted, and is bridged again while its engine still runs, returns with its blocks.
    request = urllib.request.Request(f"{worker.url}/workers/1", method="DELETE")
    with urllib.request.urlopen(request, timeout=30.0) as response:
        assert response.status == 200
    assert_known(worker, [engines[1]])
    bridge.kill()
    bridge.start()
    assert len(assert_known(worker, [restarted, engines[1]])) == 6
    assert health(worker)[1] == "exact"


def test_an_undecodable_payload_becomes_a_dead_letter_and_degrades_its_rank(stack: Stack) -> None:
    """A payload that is not msgpack is kept with its reason, and its rank has a gap."""
    context = zmq.Context()
    engines = stack.engines(1, SMALL, "m", time_scale=100.0)
    with context.socket(zmq.PUB) as publisher:
        port = free_port()
        publisher.bind(f"tcp://127.0.0.1:{port}")
        # The engine's own HTTP server, with the test's event socket instead of the engine's.
        stand_in = Engine(7, engines[0].child, engines[0].url, f"tcp://127.0.0.1:{port}", "")
        worker = stack.worker()
        stack.bridge([stand_in])
        wait_workers(worker.url, 1)
        good = msgpack.packb([0.0, [["BlockStored", [5], None, list(range(16)), 16, None, "GPU"]], 0])

        def third_batch_visible() -> bool:
            for sequence, payload in enumerate((good, b"\xc1 no msgpack", good)):
                publisher.send_multipart([b"", struct.pack(">Q", sequence), payload])
            ranks = get_json(f"{worker.url}/state")["ranks"]
            return bool(ranks) and ranks[0]["sequence"] == 2

        wait_for(third_batch_visible, VISIBLE_TIMEOUT_S, "the third batch to be visible")
    context.destroy(linger=0)
    rank = get_json(f"{worker.url}/state")["ranks"][0]
    assert (rank["worker_id"], rank["health"], rank["gaps"], rank["blocks"]) == (7, "degraded", 1, 1)
    letters = dead_letters(stack.settings)
    ((value, headers),) = letters
    assert (headers["kvstreams.reason"], headers["kvstreams.bytes"]) == (b"not_msgpack", b"12")
    assert b"no msgpack" not in (value or b"")
