"""Workers that follow the partitions of others: who takes over, with what it has, and how a worker leaves."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, is_ready
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.api import Api, metrics
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.truth import Engines, assert_equal

_ASSIGNED = re.compile(r"partitions assigned: \[([\d, ]*)\], as a standby: \[([\d, ]*)\]")


def assignment(process: RouterProcess) -> tuple[set[int], set[int]]:
    """Return what a worker owns and what it follows, by its last logged assignment."""
    numbers = _ASSIGNED.findall(process.child.log_path.read_text())[-1]
    owned, followed = ({int(n) for n in some.split(",") if n.strip()} for some in numbers)
    return owned, followed


def at_rest(workers: Sequence[RouterProcess], partitions: int, standbys: int) -> bool:
    """Whether each partition has one owner, and this number of other workers that follow it and are up to date."""
    if not all(is_ready(worker.url) for worker in workers):
        return False
    pages = [metrics(Api(worker.url)) for worker in workers]
    totals = [
        sum(page[name] for page in pages)
        for name in (
            "kvstreams_agent_partitions",
            "kvstreams_agent_standby_partitions/current",
            "kvstreams_agent_standby_partitions/loading",
        )
    ]
    return totals == [partitions, partitions * standbys, 0]


def takeovers(process: RouterProcess) -> int:
    return int(metrics(Api(process.url))["kvstreams_agent_takeovers_total"])


def test_the_new_owner_of_each_partition_was_its_standby(scope: Settings, tmp_path: Path, children: Children) -> None:
    """One of three workers is killed while engines publish, then one of the two others, and nothing is lost."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    n = 6
    stack = Stack(replace(scope, partitions=n), tmp_path / "stack", children)
    workers = [stack.worker(name, router=False) for name in ("first", "second", "third")]
    router = stack.router("router")
    wait_for(lambda: at_rest(workers, n, 1), VISIBLE_TIMEOUT_S, "owners and standbys of every partition")
    engines = Engines(stack.settings, seed)
    engines.publish(300)
    assert_equal(router.url, engines.reference)
    while len(workers) > 1:
        killed = workers.pop(0)
        moving = assignment(killed)[0]
        standby_of = {partition: worker for worker in workers for partition in assignment(worker)[1] & moving}
        assert standby_of.keys() == moving
        before = [takeovers(worker) for worker in workers]
        with engines.publishing(200):
            killed.child.kill()
            wait_for(
                lambda: at_rest(workers, n, min(1, len(workers) - 1)), VISIBLE_TIMEOUT_S, "partitions to be taken over"
            )
        from_standby = {partition for partition in moving if partition in assignment(standby_of[partition])[0]}
        assert sum(map(takeovers, workers)) - sum(before) == len(from_standby) > 0
        for partition in moving - from_standby:  # Faust gives no worker more than its share
            assert len(assignment(standby_of[partition])[0]) == n // len(workers)
        assert_equal(router.url, engines.reference)
    assert from_standby == moving
    assert "does not fit the rows" not in workers[0].child.log_path.read_text()
    assert_equal(stack.router("late").url, engines.reference)


def test_a_worker_that_is_stopped_hands_its_partitions_over_before_its_router_ends(
    scope: Settings, tmp_path: Path, children: Children
) -> None:
    """Its router still answers for as long as its notice lasts, while the other worker owns everything."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    stack = Stack(replace(scope, drain_notice_s=3600.0), tmp_path / "stack", children)
    n = stack.settings.partitions
    leaving, staying = stack.worker("leaving"), stack.worker("staying", router=False)
    wait_for(lambda: at_rest([leaving, staying], n, 1), VISIBLE_TIMEOUT_S, "owners and standbys of every partition")
    engines = Engines(stack.settings, seed)
    engines.publish(200)
    assert_equal(leaving.url, engines.reference)
    n_moving, n_before = len(assignment(leaving)[0]), takeovers(staying)
    assert n_moving
    with engines.publishing(200):
        leaving.child.signal(signal.SIGTERM)
        wait_for(lambda: at_rest([staying], n, 0), VISIBLE_TIMEOUT_S, "the partitions to be taken over")
    assert takeovers(staying) - n_before == n_moving
    assert leaving.child.running
    assert_equal(leaving.url, engines.reference)
    leaving.child.kill()
    assert_equal(stack.router("late").url, engines.reference)


def test_without_standbys_a_worker_follows_nothing(scope: Settings, tmp_path: Path, children: Children) -> None:
    """The new owner reads the partitions from Kafka, and nothing is lost either."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    stack = Stack(replace(scope, table_standbys=0), tmp_path / "stack", children)
    n = stack.settings.partitions
    workers = [stack.worker(name, router=False) for name in ("first", "second")]
    wait_for(lambda: at_rest(workers, n, 0), VISIBLE_TIMEOUT_S, "owners of every partition")
    engines = Engines(stack.settings, seed)
    engines.publish(100)
    workers[0].child.kill()
    wait_for(lambda: at_rest(workers[1:], n, 0), VISIBLE_TIMEOUT_S, "the partitions to move")
    assert_equal(stack.router("router").url, engines.reference)
    assert takeovers(workers[1]) == 0
