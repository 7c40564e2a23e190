"""Workers that requests avoid for a while: the limit, how long it lasts, and what choices become, without Kafka."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.routing.avoidance import avoided_workers
from streams.core.routing.eligibility import WorkerFilter
from streams.core.workers import AVOID_MS_MAX, Avoidance, Role, Worker, WorkerState
from streams.errors import BadRecord, NoEligibleWorker
from streams.kafka.records import AVOIDANCES
from streams.router_api.knowledge.avoidances import AVOIDANCES_MAX, Avoidances
from streams.router_api.knowledge.view import View
from tests.helpers.routers import ask, router_of
from tests.helpers.views import BLOCK_SIZE, Clock, rank, register, view_of

TTL_MS = 5_000
EVERY_RANK = WorkerFilter("m", block_size=BLOCK_SIZE)


def mark(worker_id: int, at_ms: int = 5, ttl_ms: int = TTL_MS) -> Avoidance:
    return Avoidance(WorkerId(worker_id), at_ms, ttl_ms)


def fleet_of(n: int, **changes: Any) -> dict[WorkerId, Worker]:
    return {
        WorkerId(number): Worker(WorkerId(number), "http://w", "m", BLOCK_SIZE, **changes) for number in range(1, n + 1)
    }


def avoid(view: View, worker_id: int, at_ms: int = 5, *, live: bool = True) -> None:
    view.fold_worker(AVOIDANCES.keys.pack(WorkerId(worker_id)), AVOIDANCES.encode(mark(worker_id, at_ms)), live)


# -- the limit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_workers", "n_avoided"), [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (9, 3), (10, 3)])
def test_at_most_a_third_of_a_models_ranks_is_avoided(n_workers: int, n_avoided: int) -> None:
    """However many workers are marked, those that were marked first are avoided, up to a third, or one of two."""
    marks = [mark(worker_id, at_ms=100 - worker_id) for worker_id in range(1, n_workers + 1)]
    avoided = avoided_workers(marks, fleet_of(n_workers), frozenset())
    assert avoided == set(range(n_workers - n_avoided + 1, n_workers + 1))


def test_workers_count_by_their_ranks() -> None:
    """A worker with more ranks than the limit leaves is not avoided, and a smaller one that was marked later is."""
    workers = fleet_of(4) | {WorkerId(9): Worker(WorkerId(9), "http://w", "m", BLOCK_SIZE, dp_size=3)}
    assert avoided_workers([mark(9, 1), mark(1, 2), mark(2, 3), mark(3, 4)], workers, frozenset()) == {1, 2}


@pytest.mark.parametrize("other", [{}, {"state": WorkerState.CORDONED}, {"model": "another"}])
def test_one_worker_is_avoided_while_another_can_serve(other: dict[str, Any]) -> None:
    """It may have most of the model's ranks; the only one that serves is not avoided."""
    workers = {
        WorkerId(1): Worker(WorkerId(1), "http://w", "m", BLOCK_SIZE, dp_size=4),
        WorkerId(2): replace(Worker(WorkerId(2), "http://w", "m", BLOCK_SIZE), **other),
    }
    assert avoided_workers([mark(1)], workers, frozenset()) == (set() if other else {1})
    silent = frozenset({RankId(WorkerId(2), DpRank(0))})
    assert avoided_workers([mark(1)], workers, silent) == set()


def test_ranks_that_get_no_requests_do_not_count() -> None:
    """Of six workers, two are cordoned and one is silent: a third of the other three is one."""
    workers = fleet_of(6)
    for worker_id in (5, 6):
        workers[WorkerId(worker_id)] = Worker(
            WorkerId(worker_id), "http://w", "m", BLOCK_SIZE, state=WorkerState.CORDONED
        )
    silent = frozenset({RankId(WorkerId(4), DpRank(0))})
    assert avoided_workers([mark(1, 1), mark(2, 2)], workers, silent) == {1}


def test_models_have_limits_of_their_own_and_unknown_workers_are_ignored() -> None:
    """Marks of one model do not use up the limit of another one."""
    workers = fleet_of(3) | {
        WorkerId(10 + number): Worker(WorkerId(10 + number), "http://w", "other", BLOCK_SIZE) for number in range(3)
    }
    assert avoided_workers([mark(1), mark(2), mark(10), mark(99)], workers, frozenset()) == {1, 10}


# -- how long ----------------------------------------------------------------------------------------------------------


def test_an_avoidance_lasts_for_its_time_from_when_it_was_read() -> None:
    """The time of the writer's clock does not matter; reading the same record again does not extend it."""
    known = Avoidances()
    assert known.add(mark(1, at_ms=1 << 50), 100)
    assert not known.add(mark(1, at_ms=1 << 50), 2_000)
    assert known.remaining_ms(WorkerId(1), 100) == TTL_MS
    assert known.expire(100 + TTL_MS - 1) == []
    assert known.expire(100 + TTL_MS) == [mark(1, at_ms=1 << 50)]
    assert (len(known), known.remaining_ms(WorkerId(1), 0)) == (0, 0)


def test_a_new_record_renews_an_avoidance() -> None:
    """A worker that fails again is avoided for the whole time again."""
    known = Avoidances()
    known.add(mark(1, at_ms=5), 0)
    assert known.add(mark(1, at_ms=6), 4_000)
    assert known.expire(TTL_MS) == []
    assert known.remaining_ms(WorkerId(1), TTL_MS) == 4_000
    assert known.n_read == 2


def test_records_are_limited() -> None:
    """Records of more workers than the limit are ignored, except for workers that are marked already."""
    known = Avoidances()
    for number in range(AVOIDANCES_MAX + 10):
        known.add(mark(number), 0)
    assert len(known) == AVOIDANCES_MAX
    assert known.add(mark(1, at_ms=6), 0)


@pytest.mark.parametrize("key", [b"avoid/", b"avoid/x", b"avoid/01", b"avoid/-1", b"avoid/" + b"9" * 30, b"avoid/2"])
def test_a_bad_key_of_an_avoidance_is_refused(key: bytes) -> None:
    """An avoidance's key ends with the worker's id in decimal, as the worker's own key has it."""
    view = view_of(Clock())
    with pytest.raises(BadRecord):
        view.fold_worker(key, AVOIDANCES.encode(mark(1)))
    assert not len(view.fleet.avoidances)


@pytest.mark.parametrize("ttl_ms", [0, -1, AVOID_MS_MAX + 1])
def test_a_record_may_not_last_forever(ttl_ms: int) -> None:
    """A record of another application with a time out of range is refused."""
    from streams.kafka.avro_frames import codec

    value = codec("avoidances").encode({"worker_id": 1, "avoided_at_ms": 5, "ttl_ms": ttl_ms})
    with pytest.raises(BadRecord):
        view_of(Clock()).fold_worker(b"avoid/1", value)


# -- the view ----------------------------------------------------------------------------------------------------------


def test_an_avoided_worker_is_no_candidate_until_its_time_is_over() -> None:
    """It leaves the eligible ranks when its record is folded, and returns when the record has expired."""
    clock = Clock()
    view = view_of(clock)
    for worker_id in (1, 2, 3):
        register(view, worker_id)
    assert view.fleet.eligible(EVERY_RANK) == (rank(1), rank(2), rank(3))
    changes = view.changes
    avoid(view, 2)
    assert view.changes > changes
    assert view.fleet.eligible(EVERY_RANK) == (rank(1), rank(3))
    assert view.fleet.avoided(WorkerId(2)) == (True, TTL_MS)
    assert view.rank_counts().avoided == 1
    avoid(view, 3)  # more than a third
    assert view.fleet.eligible(EVERY_RANK) == (rank(1), rank(3))
    assert view.fleet.avoided(WorkerId(3)) == (False, TTL_MS)
    clock.now_ms += TTL_MS - 1
    assert view.fleet.expire_avoidances() == []
    clock.now_ms += 1
    assert {each.worker_id for each in view.fleet.expire_avoidances()} == {2, 3}
    assert view.fleet.eligible(EVERY_RANK) == (rank(1), rank(2), rank(3))
    assert view.rank_counts().avoided == 0


def test_the_next_one_is_avoided_when_the_fleet_grows() -> None:
    """The limit follows the registry."""
    view = view_of(Clock())
    for worker_id in range(1, 6):
        register(view, worker_id)
    avoid(view, 1, 1)
    avoid(view, 2, 2)
    assert view.fleet.eligible(EVERY_RANK) == tuple(map(rank, (2, 3, 4, 5)))
    register(view, 6)
    assert view.fleet.eligible(EVERY_RANK) == tuple(map(rank, (3, 4, 5, 6)))
    view.fold_worker(b"1", None)
    assert view.fleet.eligible(EVERY_RANK) == tuple(map(rank, (3, 4, 5, 6)))


def test_a_router_that_starts_ignores_avoidances_that_it_finds() -> None:
    """Records from before its start are over, or nearly so; a tombstone ends nothing."""
    view = view_of(Clock())
    for worker_id in (1, 2, 3):
        register(view, worker_id)
    avoid(view, 1, live=False)
    assert len(view.fleet.eligible(EVERY_RANK)) == 3
    avoid(view, 1)
    view.fold_worker(AVOIDANCES.keys.pack(WorkerId(1)), None)
    assert view.fleet.eligible(EVERY_RANK) == (rank(2), rank(3))


# -- choices -----------------------------------------------------------------------------------------------------------


def test_avoiding_never_refuses_a_request() -> None:
    """A request that only an avoided worker can serve, by its id, its role or its exclusions, goes there."""
    router = router_of(0)
    for worker_id, role in ((1, Role.PREFILL), (2, Role.DECODE), (3, Role.DECODE), (4, Role.DECODE)):
        register(router.view, worker_id, role=role)
    avoid(router.view, 1)
    assert ask(router, "a", worker_id=1, update_states="false")["worker_id"] == 1
    assert ask(router, "b", phase="prefill", update_states="false")["worker_id"] == 1
    assert ask(router, "c", excluded_worker_ids="2,3,4", update_states="false")["worker_id"] == 1
    assert {ask(router, update_states="false")["worker_id"] for _ in range(40)} == {2, 3, 4}
    with pytest.raises(NoEligibleWorker):
        ask(router, phase="prefill", excluded_worker_ids=1)


def test_adapters_share_a_list_of_ranks_while_a_worker_is_avoided() -> None:
    """What is cached by adapter follows an avoidance as well."""
    view = view_of(Clock())
    for worker_id in (1, 2, 3):
        register(view, worker_id, lora_names=("a", "b"))
    one, other = EVERY_RANK._replace(lora_name="a"), EVERY_RANK._replace(lora_name="b")
    assert view.fleet.eligible(one) is view.fleet.eligible(other)
    avoid(view, 3)
    assert view.fleet.eligible(one) == view.fleet.eligible(other) == (rank(1), rank(2))
