"""Resetting a scope: by command and by setting, and only by force while processes use it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from streams.engines.publisher import KvEventPublisher
from streams.errors import ScopeInUse
from streams.kafka.clients import describe_topics, group_members
from streams.lab.stack import RouterProcess, Stack, facts, get_json
from streams.process.waiting import wait_for
from streams.reset import reset_scope
from streams.settings import Settings, as_environ, tables_path
from streams.topics import topics
from tests.helpers.bridges import LEASE_S, WORKER_ID, bridge_to
from tests.helpers.cxl_fleet import POOL, await_reach, call
from tests.helpers.engine_double import EngineDouble
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.truth import Engines, assert_equal
from tests.helpers.workers import changelog, mode, put_worker

COMMAND_TIMEOUT_S = 60.0


def run_reset(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streams.cli", "reset", *arguments],
        env={**as_environ(settings), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


def assert_unused(settings: Settings) -> None:
    """Wait until the last worker's membership and last partition record have expired."""
    wait_for(lambda: group_members(settings) == [], VISIBLE_TIMEOUT_S, "the group to be empty")

    def refused() -> bool:
        try:
            reset_scope(settings)
        except ScopeInUse:
            return True
        return False

    wait_for(lambda: not refused(), VISIBLE_TIMEOUT_S, "the last partition record to be old enough")


def holds(process: RouterProcess, n: int) -> None:
    wait_for(lambda: len(facts(process.url)) == n, VISIBLE_TIMEOUT_S, f"{n} blocks")


def pooled(process: RouterProcess) -> int:
    return len(get_json(f"{process.url}/state/cxl")["blocks"])


@pytest.mark.long_running
def test_a_scope_is_reset_only_after_its_workers_have_ended(stack: Stack) -> None:
    """The group's members prevent a reset, and so does a killed worker's last record. Then everything is empty."""
    settings = stack.settings
    worker = stack.worker()
    ids = topic_ids(settings)
    router = stack.router("router")
    put_worker(router.url)
    engines = Engines(settings, seed=1)
    engines.publish(200)
    assert_equal(router.url, engines.reference)

    done = run_reset(settings)
    assert done.returncode == 1
    assert "1 workers of" in done.stderr
    assert "another topic_prefix" in done.stderr
    assert_equal(router.url, engines.reference)

    with KvEventPublisher(settings, worker_id=9, model="m") as publisher:
        publisher.stored([1], list(range(16)))
        publisher.publish_cxl_state_transition(1, [1], "in_transit", "pool")
    wait_for(lambda: pooled(router) == 1, VISIBLE_TIMEOUT_S, "a pooled block")
    worker.child.kill()
    with pytest.raises(ScopeInUse, match="use another topic_prefix"):
        reset_scope(settings)
    assert_unused(settings)
    assert all(changelog(settings, partition) == {} for partition in range(settings.partitions))
    holds(router, 0)  # a running router reads the tombstones
    assert get_json(f"{router.url}/state")["ranks"] == []
    wait_for(lambda: pooled(router) == 0, VISIBLE_TIMEOUT_S, "no pooled block")
    assert [each["worker_id"] for each in get_json(f"{router.url}/workers")["workers"]] == [1]
    assert mode(router.url) == "degraded"
    # No topic was recreated.
    assert topic_ids(settings) == ids

    stack.restart_worker(worker)  # with its old copy, which the tombstones empty
    with KvEventPublisher(settings, worker_id=1, model="m") as publisher:
        publisher.stored([1, 2], list(range(32)))
    holds(router, 2)
    late = stack.router("late")
    holds(late, 2)
    assert pooled(router) == pooled(late) == 0
    wait_for(lambda: mode(router.url) == mode(late.url) == "exact", VISIBLE_TIMEOUT_S, "exact answers")


def topic_ids(settings: Settings) -> dict[str, str]:
    states = describe_topics(settings, topics(settings).all())
    return {name: state.topic_id for name, state in states.items() if state is not None}


@pytest.mark.long_running
def test_a_worker_that_resets_at_start_begins_empty_and_refuses_to_start_next_to_another(stack: Stack) -> None:
    """KVSTREAMS_ROUTER_RESET_STATES is on; another worker with the same setting ends, with the reason and a remedy."""
    settings = stack.settings
    first = stack.worker("first")
    engines = Engines(settings, seed=2)
    engines.publish(100)
    assert_equal(first.url, engines.reference)
    first.child.stop()
    wait_for(lambda: group_members(settings) == [], VISIBLE_TIMEOUT_S, "the group to be empty")
    env = {"KVSTREAMS_ROUTER_RESET_STATES": "on", "KVSTREAMS_STALE_AFTER_MS": "100"}
    second = stack.worker("second", env=env)
    assert facts(second.url) == set()
    third = stack.worker("third", router=False, env=env)
    wait_for(lambda: not third.child.running, VISIBLE_TIMEOUT_S, "the third to end")
    assert "use another topic_prefix" in third.child.log_path.read_text()
    stack.restart_worker(first)  # by default, state is kept
    with KvEventPublisher(settings, worker_id=1, model="m") as publisher:
        publisher.stored([1, 2], list(range(32)))
    holds(first, 2)
    holds(second, 2)


@pytest.mark.first_ring("reset")
def test_a_forced_reset_empties_the_scope_of_a_running_worker_which_continues(stack: Stack) -> None:
    """The agent is fenced, opens an empty table, and indexes everything that follows."""
    worker = stack.worker()
    engines = Engines(stack.settings, seed=3)
    engines.publish(100)
    assert_equal(worker.url, engines.reference)
    done = run_reset(worker.settings, "--force")
    assert done.returncode == 0, done.stderr
    assert "is empty" in done.stdout
    holds(worker, 0)
    assert any(tables_path(worker.settings).iterdir())  # its copies are in use, so they are not deleted
    with KvEventPublisher(stack.settings, worker_id=1, model="m") as publisher:
        publisher.stored([1, 2], list(range(32)))
    holds(worker, 2)


def test_pooled_blocks_of_a_bridged_engine_come_back_after_a_forced_reset(stack: Stack) -> None:
    """Also those that the engine no longer holds itself, which no restatement contains; later transitions apply."""
    stack.settings = replace(stack.settings, bridge_lease_s=LEASE_S)
    worker = stack.worker()
    call(worker, "PUT", f"/pools/{POOL}", {"members": [int(WORKER_ID)]})
    first, second = 1000, 1001  # names of the prompt that begins with token 1
    pooled, transit = ("cxl_pooled", [int(WORKER_ID)]), ("in_transit", list[int]())
    with EngineDouble() as engine:
        bridge = bridge_to(stack, engine)
        engine.store(1, 3)
        engine.publish(["CxlStateTransition", 1, [first, second], "in_transit", POOL, [int(WORKER_ID)]])
        engine.publish({"type": "CxlStateTransition", "block_hashes": [first], "new_state": "cxl_pooled"})
        engine.remove(1)
        await_reach(worker, {first: pooled, second: transit})
        holds(worker, 2)
        done = run_reset(worker.settings, "--force")
        assert done.returncode == 0, done.stderr
        restated = "the places of 2 blocks in CXL pools are restated"
        wait_for(lambda: restated in bridge.log_path.read_text(), VISIBLE_TIMEOUT_S, "the bridge to restate them")
        await_reach(worker, {first: pooled, second: transit})
        holds(worker, 2)
        engine.publish({"type": "CxlStateTransition", "block_hashes": [second], "new_state": "cxl_pooled"})
        await_reach(worker, {first: pooled, second: pooled})
