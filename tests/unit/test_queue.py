"""The queue of a router: its order, its limits, its shares, and how fast it drains."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.routing import queue as queue_module
from streams.core.routing.queue import (
    RETRY_AFTER_S_MAX,
    QueueLimits,
    QueuePolicy,
    QueueRefusal,
    RequestQueue,
    Waiting,
    wspt_key,
)
from tests.helpers.invariants import check

NO_LIMITS = QueueLimits(1 << 30, 1 << 60, 1 << 30)


def waiting(number: int, uncached_tokens: int = 100, *, arrival_ms: float = 0.0, **fields: Any) -> Waiting:
    given = {"deadline_ms": math.inf, "n_bytes": 1, **fields}
    return Waiting(number, arrival_ms, uncached_tokens=uncached_tokens, **given)


def queue_of(
    *requests: Waiting, policy: QueuePolicy = QueuePolicy.FCFS, limits: QueueLimits = NO_LIMITS
) -> RequestQueue:
    queue = RequestQueue(policy, limits, prefill_us_per_token=100.0)
    for request in requests:
        queue.add(request)
    check(queue)
    return queue


def emptied(queue: RequestQueue) -> list[int]:
    """Let every request leave in the order of the queue, asking for the order anew each time."""
    order = []
    while queue:
        number = next(queue.in_order())
        queue.leave(number, queue.waiting(number).uncached_tokens, 0.0)
        check(queue)
        order.append(number)
    return order


def place(policy: QueuePolicy, each: Waiting) -> tuple[float, int]:
    """The place of a request within its tenant and priority, as the documentation defines it."""
    arrival_ms = each.arrival_ms - 1000 * each.priority_jump
    match policy:
        case QueuePolicy.FCFS:
            return arrival_ms, each.number
        case QueuePolicy.WSPT:
            return -(1 + each.priority_jump) / max(1, each.uncached_tokens), each.number
        case QueuePolicy.ARRIVAL_PLUS_PREFILL:
            return arrival_ms + 0.1 * each.uncached_tokens, each.number


requests = st.builds(
    waiting,
    st.just(0),
    st.integers(0, 5000),
    arrival_ms=st.floats(0, 1000),
    priority=st.integers(-1, 1),
    priority_jump=st.sampled_from([0.0, 0.5, 3.0]),
    tenant=st.sampled_from(["", "a", "b"]),
)


@settings(max_examples=150)
@given(st.lists(requests, max_size=12), st.sampled_from(QueuePolicy))
def test_the_order_is_priority_then_share_then_policy(made: list[Waiting], policy: QueuePolicy) -> None:
    """The order of the queue equals that of a scan, which takes the tenant with the least tokens again and again."""
    numbered = [
        waiting(
            number,
            each.uncached_tokens,
            arrival_ms=each.arrival_ms,
            priority=each.priority,
            priority_jump=each.priority_jump,
            tenant=each.tenant,
        )
        for number, each in enumerate(made)
    ]
    expected, left = [], list(numbered)
    served: Counter[tuple[int, str]] = Counter()
    while left:
        priority = max(each.priority for each in left)
        level = [each for each in left if each.priority == priority]
        heads = {
            tenant: min((each for each in level if each.tenant == tenant), key=lambda each: place(policy, each))
            for tenant in {each.tenant for each in level}
        }
        first = min(heads.values(), key=lambda head: (served[priority, head.tenant], place(policy, head)))
        expected.append(first.number)
        served[priority, first.tenant] += max(1, first.uncached_tokens)
        left.remove(first)
    queue = queue_of(*numbered, policy=policy)
    assert list(queue.in_order()) == expected
    assert emptied(queue) == expected


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("ardlv"), st.integers(0, 30), requests), max_size=40))
def test_requests_come_and_go_in_any_order(steps: list[tuple[str, int, Waiting]]) -> None:
    """After any arrivals, departures, cancellations and new estimates, the queue has exactly what is left."""
    queue, left, next_number = queue_of(), dict[int, int](), 0
    for step, choice, each in steps:
        known = sorted(left)
        if step == "a" or not known:
            queue.add(waiting(next_number, each.uncached_tokens, priority=each.priority, tenant=each.tenant))
            left[next_number] = each.uncached_tokens
            next_number += 1
            check(queue)
            continue
        number = known[choice % len(known)]
        if step == "v":
            queue.revalue(number, each.uncached_tokens)
            left[number] = each.uncached_tokens
        elif step == "l":
            queue.leave(number, 5, 0.0)
            del left[number]
        else:
            assert queue.remove(number).number == number
            del left[number]
        check(queue)
    assert sorted(queue.in_order()) == sorted(left)
    assert {number: queue.waiting(number).uncached_tokens for number in left} == left
    assert len(queue) == len(left) == sum(queue.lengths().values())


def test_a_new_estimate_changes_the_order() -> None:
    """A request whose prompt was stored somewhere meanwhile moves forward."""
    queue = queue_of(waiting(1, 100), waiting(2, 500), policy=QueuePolicy.WSPT)
    assert list(queue.in_order()) == [1, 2]
    queue.revalue(2, 50)
    check(queue)
    assert list(queue.in_order()) == [2, 1]


def test_a_tenant_with_many_requests_does_not_delay_another() -> None:
    """The only request of a tenant goes second, whatever many requests of another one came before."""
    queue = queue_of(*(waiting(number, tenant="busy") for number in range(50)), waiting(50, tenant="rare"))
    assert emptied(queue)[:3] == [0, 50, 1]


def test_a_tenant_gains_nothing_by_waiting_with_one_request_at_a_time() -> None:
    """A tenant that returns has the share that it had, so that two tenants get equal tokens in any pattern."""
    queue = queue_of(*(waiting(number, 10, tenant="many") for number in range(100)))
    served: Counter[str] = Counter()
    next_number = 100
    for _ in range(60):
        if "one" not in {queue.waiting(number).tenant for number in queue.in_order()}:
            queue.add(waiting(next_number, 10, tenant="one"))
            next_number += 1
        number = next(queue.in_order())
        served[queue.leave(number, 10, 0.0).tenant] += 1
    assert served == {"many": 30, "one": 30}


def test_a_tenant_that_was_away_saves_no_credit() -> None:
    """A tenant that comes late alternates with the others, and does not first get what they had meanwhile."""
    queue = queue_of(*(waiting(number, 10, tenant="early") for number in range(40)))
    for _ in range(20):
        queue.leave(next(queue.in_order()), 10, 0.0)
    for number in range(100, 110):
        queue.add(waiting(number, 10, tenant="late"))
    tenants = ["late" if number >= 100 else "early" for number in emptied(queue)]
    assert tenants[:10].count("late") in (5, 6)


def test_remembered_shares_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of tenants are chosen by clients, so only the latest ones are remembered."""
    monkeypatch.setattr(queue_module, "SHARES_MAX", 3)
    queue = queue_of()
    for number in range(20):
        queue.add(waiting(number, tenant=f"t{number}", priority=number))
        queue.leave(number, 10, 0.0)
    assert len(queue._shares) == 3
    assert len(queue._level) <= 4


@pytest.mark.parametrize(
    ("limits", "tenant", "refused"),
    [
        (QueueLimits(3, 100, 3), "a", None),
        (QueueLimits(2, 100, 3), "a", QueueRefusal.FULL),
        (QueueLimits(3, 29, 3), "a", QueueRefusal.BYTES),
        (QueueLimits(3, 30, 3), "a", None),
        (QueueLimits(3, 100, 2), "a", QueueRefusal.TENANT),
        (QueueLimits(3, 100, 2), "b", None),
    ],
)
def test_limits(limits: QueueLimits, tenant: str, refused: QueueRefusal | None) -> None:
    """A request is refused beyond the number of requests, their bytes, or the number of its tenant."""
    queue = queue_of(*(waiting(number, n_bytes=10, tenant="a") for number in range(2)), limits=limits)
    assert queue.refusal(tenant, 10) is refused


def test_what_leaves_makes_place() -> None:
    """A request that leaves, in whatever way, no longer counts towards any limit."""
    queue = queue_of(waiting(1, n_bytes=10), waiting(2, n_bytes=10), limits=QueueLimits(2, 20, 2))
    for number in (1, 2):
        assert queue.refusal("", 10) is QueueRefusal.FULL
        (queue.remove if number == 1 else lambda each: queue.leave(each, 1, 0.0))(number)
        assert queue.refusal("", 10) is None
        queue.add(waiting(number + 10, n_bytes=10))


def test_late_requests_are_found_by_their_deadlines() -> None:
    """A request is late from the moment of its deadline on."""
    queue = queue_of(waiting(1, deadline_ms=50.0), waiting(2, deadline_ms=51.0), waiting(3))
    assert queue.late(49.9) == []
    assert queue.late(50.0) == [1]
    assert sorted(queue.late(1e9)) == [1, 2]


def test_retry_after_follows_from_the_drain_rate() -> None:
    """The time to try again is the length of the queue divided by the rate at which requests left."""
    queue = queue_of(*(waiting(number) for number in range(120)))
    for at in range(1, 21):  # 10 per second
        queue.leave(next(queue.in_order()), 1, at * 100.0)
    assert queue.retry_after_s(2000.0) == pytest.approx(100 / 10, abs=1)
    assert queue.retry_after_s(10_000.0) == pytest.approx(100 / 2, abs=5)  # nothing has left since


def test_retry_after_has_limits() -> None:
    """Without a rate it is the longest one, and for an empty queue the shortest one."""
    queue = queue_of(*(waiting(number) for number in range(100)))
    assert queue.retry_after_s(10_000.0) == RETRY_AFTER_S_MAX
    assert queue.retry_after_s(0.0) == 1  # it has only just filled
    assert queue_of().retry_after_s(1e9) == 1


@pytest.mark.parametrize(
    ("n_tokens", "cached", "jump", "key"),
    [(100, 0, 0.0, 0.01), (100, 60, 1.0, 0.05), (10, 10, 0.0, 1.0), (1, 9, 4.0, 5.0)],
)
def test_the_key_of_weighted_shortest_processing_time(n_tokens: int, cached: int, jump: float, key: float) -> None:
    """The key is (1 + jump) / max(1, tokens - cached)."""
    assert wspt_key(n_tokens, cached, jump) == pytest.approx(key)
