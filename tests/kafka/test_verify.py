"""`kvstreams replay --verify` on a real Kafka: a router that runs equals the topics, and single faults are found."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from streams.core.events import MoeLabels
from streams.core.ids import WorkerId
from streams.core.runs import Run
from streams.cxl.records import BLOCK_PREFIX, decode_block, encode_block, encode_pool, pool_key
from streams.lab.stack import Stack, get_json
from streams.process.metrics import MetricsRegistry
from streams.process.waiting import wait_for
from streams.replay.rebuilding import Replay
from streams.replay.verifying import Difference, verify
from streams.router_api.deciding.admission import Admission
from streams.router_api.deciding.router import Router
from streams.settings import Settings, as_environ
from streams.tables.records import RUN_KEY, decode_run, encode_run
from streams.topics import topics
from tests.helpers.api import Api, served
from tests.helpers.commands import Run as RunCommand
from tests.helpers.pages import block_of
from tests.helpers.replayed_scope import MODEL, WORKERS, Writer, fill_registry
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.workers import changelog


class Captured:
    """A door that only keeps the router, so that a test can damage what it has folded."""

    router: Router

    async def listen(self) -> None: ...

    async def open(self, router: Router, admission: Admission) -> Sequence[MetricsRegistry[Any]]:  # noqa: ARG002
        self.router = router
        return ()

    async def close(self, timeout_s: float) -> None: ...


@dataclass
class Verified:
    """A router inside this process, and a replay of its scope."""

    settings: Settings
    api: Api
    router: Router
    replay: Replay

    def differences(self) -> list[Difference]:
        result = verify(self.replay, lambda path: get_json(f"{self.api.url}{path}"))
        assert all(result.records[difference] for difference in result.differences)  # each names its records
        return result.differences

    def runs(self, suits: Callable[[Run], bool]) -> tuple[bytes, Run]:
        """A run of the present epoch of its rank that suits, with its key."""
        for partition in range(self.settings.partitions):
            for key, value in changelog(self.settings, partition).items():
                if key.startswith(RUN_KEY.prefix):
                    run = decode_run(key, value)
                    if run.epoch == self.router.view.index.runs.epoch_of(run.key.rank) and suits(run):
                        return key, run
        raise AssertionError("no run suits; take another seed")


@contextmanager
def verified(stack: Stack) -> Iterator[Verified]:
    """A router with something of everything, and a replay."""
    stack.worker(router=False)
    captured = Captured()
    with served(stack.settings, captured) as api:
        writer = Writer(stack.settings, random.randrange(1 << 16), 300)
        fill_registry(stack.settings, api)
        writer.write(300)
        writer.wait_known(api.url)
        wait_for(lambda: api.get("/state/cxl")["blocks"] != [], VISIBLE_TIMEOUT_S, "pooled blocks")
        yield Verified(stack.settings, api, captured.router, Replay(stack.settings))


def without_numbers(line: str) -> str:
    """A line with one digit in place of each number."""
    return re.sub(r"\d+", "0", line)


def one(differences: list[Difference], kind: str) -> Difference:
    """The only difference, which is of this kind."""
    assert [difference.kind for difference in differences] == [kind], list(map(str, differences))
    return differences[0]


def test_each_single_fault_of_a_router_is_found_and_nothing_else(stack: Stack, run: RunCommand) -> None:
    """A presence bit, a run, a label, a pool's member, a row of a pool and a booking: each alone is named exactly."""
    with verified(stack) as fleet:
        view, loads = fleet.router.view, fleet.router.loads
        assert fleet.differences() == []

        # A flipped presence bit.
        key, held = fleet.runs(lambda each: each.present.bit_count() > 1 and not each.moe)
        number = next(held.held())
        view.fold_index(key, encode_run(replace(held, present=held.present ^ 1 << number)))
        found = one(fleet.differences(), "blocks")
        assert (found.rank, found.router) == (held.key.rank, None)
        assert found.about == f"{held.key.tier.name.lower()} {held.sequence[number]}"
        done = run("replay", "--verify", fleet.api.url, env=as_environ(stack.settings))
        assert done.returncode == 1, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == str(found)
        changelog_name = topics(stack.settings).index_changelog.name
        assert all(line.strip().startswith(changelog_name) for line in lines[1:])
        holds = next(line for line in lines[1:] if line.endswith(") holds it"))
        printed = f"{lines[0]}\n{holds}".replace(changelog_name, "kvstreams-prefix-index-changelog")
        printed = printed.replace(f"blocks {held.key.tier.name.lower()} ", "blocks device ")
        assert [*map(without_numbers, printed.splitlines())] == [
            *map(without_numbers, block_of("docs/replay.md", "rank 7/0").splitlines())
        ]
        view.fold_index(key, encode_run(held))
        assert fleet.differences() == []

        # A missing run.
        view.fold_index(key, None)
        differences = fleet.differences()
        assert {(each.rank, each.kind) for each in differences} == {(held.key.rank, "blocks")}
        assert {each.about.split()[-1] for each in differences} <= {str(held.sequence[at]) for at in held.held()}
        view.fold_index(key, encode_run(held))

        # A label.
        key, held = fleet.runs(lambda each: any(each.present >> at & 1 for at in each.moe))
        number = next(at for at in held.moe if held.present >> at & 1)
        view.fold_index(key, encode_run(replace(held, moe={**held.moe, number: MoeLabels(77, None, None)})))
        found = one(fleet.differences(), "labels")
        assert (found.rank, found.about) == (held.key.rank, str(held.sequence[number]))
        assert "77" in str(found.router)
        view.fold_index(key, encode_run(held))

        # A member of a pool, in the registry and in a row.
        pool = view.facts.pools()["rack1"]
        raw = pool_key("rack1")
        view.fold_worker(raw, encode_pool(replace(pool, members=pool.members[:-1])))
        found = one(fleet.differences(), "record")
        assert (found.rank, found.about) == (None, raw.decode())
        view.fold_worker(raw, encode_pool(pool))
        row_key, value = pooled_row(stack.settings)
        block, row = decode_block(row_key, value)
        more = (*row.placement.accessible_workers, WorkerId(WORKERS[0]))
        damaged = replace(row, placement=replace(row.placement, accessible_workers=more))
        view.fold_pooled(row_key, encode_block(damaged))
        found = one(fleet.differences(), "pooled")
        assert (found.rank, found.about) == (block.owner, f"{block.sequence} {block.pool_id}")
        view.fold_pooled(row_key, value)

        # A booking.
        with loads.locked() as active:
            booking_id, booking, _ = active.logged_bookings()[0]
            active.forget(booking_id)
        found = one(fleet.differences(), "bookings")
        assert (found.rank, found.router) == (booking.rank, None)
        assert found.about.startswith(booking_id.request_id)


def test_a_router_that_works_is_compared_without_a_difference(stack: Stack, run: RunCommand) -> None:
    """While requests are booked and freed, batches come and workers renew, nothing differs."""
    with verified(stack) as fleet:
        stopping = threading.Event()

        def work() -> None:
            number = 0
            while not stopping.wait(0.005):
                number += 1
                fleet.api.route(request_id=f"w{number}", model=MODEL, token_ids=list(range(number % 50, 100)))
                if number > 3:
                    fleet.api.call("DELETE", f"/loads/w{number - 3}").given()

        thread = threading.Thread(target=work)
        thread.start()
        writer = Writer(stack.settings, random.randrange(1 << 16), 200)
        try:
            for _ in range(3):
                writer.write(60)
                assert fleet.differences() == []
            done = run("replay", "--verify", fleet.api.url, env=as_environ(stack.settings))
            assert done.returncode == 0, done.stderr
            assert "has what the topics have" in done.stdout
        finally:
            stopping.set()
            thread.join()


def test_a_router_of_some_models_is_not_compared(stack: Stack, run: RunCommand) -> None:
    """It says so itself: the replay's own settings do not matter."""
    stack.worker(router=False)
    with served(replace(stack.settings, models="another"), Captured()) as api:
        done = run("replay", "--verify", api.url, env=as_environ(stack.settings))
        assert done.returncode == 1
        assert "a router of some models cannot be compared" in done.stderr


def pooled_row(settings: Settings) -> tuple[bytes, bytes]:
    """The last value of some block's row in the changelog of pooled blocks."""
    for partition in range(settings.partitions):
        for key, value in changelog(settings, partition, topics(settings).cxl_changelog.name).items():
            if key.startswith(BLOCK_PREFIX):
                return key, value
    raise AssertionError("no block has a row; take another seed")
