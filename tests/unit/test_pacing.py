"""How often the partitions of a worker begin transactions."""

from __future__ import annotations

import pytest

from streams.router_api.deciding.router import ASKED_S
from streams.tables.pacing import BATCH_WAIT_FACTOR_MAX, TRANSACTIONS_PER_SECOND_MAX, Pacer, interval_s
from tests.helpers.routers import ask, router_of

N_PARTITIONS = 8


def transactions(records_per_second: float, *, answers: bool, seconds: float = 20.0) -> float:
    """Transactions per second of all partitions, for records that are spread evenly over them."""
    pacer, now, n = Pacer(), 0.0, 0
    of_one = records_per_second / N_PARTITIONS
    pause_s = interval_s(N_PARTITIONS, answers=answers)
    while now < seconds:
        at = max(pacer.next_at(pause_s), now + 1.0 / of_one)  # a transaction needs a record
        pacer.took(round(of_one * (at - now)), at, pause_s)
        now, n = at, n + 1
    return n * N_PARTITIONS / seconds


@pytest.mark.parametrize("answers", [False, True])
def test_a_worker_begins_fewer_transactions_while_its_process_answers_requests(answers: bool) -> None:
    """At 1,000 records per second, at which agents and router would keep their common interpreter busy all the time."""
    found = transactions(1000.0, answers=answers)
    assert (110 < found < 140) if answers else (235 < found <= TRANSACTIONS_PER_SECOND_MAX + N_PARTITIONS)


def test_the_rate_is_limited_and_falls_no_further_than_the_factor() -> None:
    """One transaction per record if few come; with very many, a fifth of the usual rate."""
    assert 38 < transactions(40.0, answers=False) <= 41
    assert transactions(100_000.0, answers=False) > TRANSACTIONS_PER_SECOND_MAX / BATCH_WAIT_FACTOR_MAX * 0.95


def test_a_router_counts_as_asked_until_shortly_after_its_last_decision() -> None:
    """It does not before the first one."""
    router = router_of(1)
    assert not router.is_asked()
    ask(router, "r")
    assert router.is_asked()
    router._asked_at_s -= ASKED_S
    assert not router.is_asked()
