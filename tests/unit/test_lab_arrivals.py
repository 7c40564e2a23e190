"""When the requests of a laboratory run arrive, and in which order later events happen."""

from __future__ import annotations

import pytest

from streams.lab.simulation.agenda import Agenda
from streams.lab.simulation.arrivals import Arrivals
from streams.lab.simulation.workload import NO_REQUEST, RawRequest, build

NEVER = float("inf")


def arrivals(*requests: RawRequest, concurrency: int = 0, speedup: float = 1.0) -> Arrivals:
    return Arrivals(build("test", requests, 16, 16), concurrency, speedup)


def request(at_ms: float, previous: int = NO_REQUEST, pause_ms: float | None = None) -> RawRequest:
    return RawRequest(at_ms, 16, 1, [1], previous, pause_ms)


def test_requests_come_at_their_times() -> None:
    """Divided by speedup."""
    open_loop = arrivals(request(0.0), request(10.0), request(10.0), request(30.0), speedup=2.0)
    assert open_loop.take(0.0) == [0]
    assert open_loop.next_ms() == 5.0
    assert open_loop.take(4.9) == []
    assert open_loop.take(5.0) == [1, 2]
    assert open_loop.take(20.0) == [3]
    assert open_loop.next_ms() == NEVER


def test_a_closed_loop_takes_the_next_request_as_one_ends() -> None:
    """Whatever their times are."""
    closed = arrivals(*(request(1000.0 * number) for number in range(4)), concurrency=2)
    assert closed.take(0.0) == [0, 1]
    assert closed.take(0.0) == []
    assert closed.next_ms() == NEVER
    closed.ended(1, 3.0, 3.0)
    assert closed.take(3.0) == [2]
    closed.ended(0, 4.0, 4.0)
    closed.ended(2, 4.0, 4.0)
    assert closed.take(4.0) == [3]
    assert closed.n_ended == 3


@pytest.mark.parametrize(("pause_ms", "due_ms"), [(None, 20.0), (0.0, 20.0), (5.0, 25.0)])
def test_a_request_waits_for_its_sessions_answer_and_for_its_pause(pause_ms: float | None, due_ms: float) -> None:
    """Requests after it do not wait."""
    open_loop = arrivals(request(0.0), request(1.0, 0, pause_ms), request(2.0))
    assert open_loop.take(2.0) == [0, 2]
    open_loop.ended(0, 20.0, 20.0)
    assert open_loop.take(20.0) == ([1] if due_ms == 20.0 else [])
    if due_ms > 20.0:
        assert open_loop.next_ms() == due_ms
        assert open_loop.take(due_ms) == [1]


def test_a_pause_counts_from_the_answer_if_that_is_there_first() -> None:
    """The time of the request itself comes later than the answer here, and within the pause or after it."""
    for at_ms, taken_ms in ((12.0, 15.0), (40.0, 40.0)):
        open_loop = arrivals(request(0.0), request(at_ms, 0, 5.0))
        open_loop.take(0.0)
        open_loop.ended(0, 11.0, 10.0)
        assert open_loop.take(at_ms) == []  # one more event, of the same time if the pause is over
        assert open_loop.next_ms() == 15.0
        assert open_loop.take(taken_ms) == [1]


def test_a_closed_loop_takes_requests_whose_answer_is_there_before_new_ones() -> None:
    """They hold no place while they wait."""
    closed = arrivals(request(0.0), request(0.0, 0), request(0.0), request(0.0), concurrency=2)
    assert closed.take(0.0) == [0, 2]
    closed.ended(0, 7.0, 7.0)
    assert closed.take(7.0) == [1]


def test_events_happen_in_the_order_of_their_times() -> None:
    """Those of engines come first, and those of one time in the order in which they were planned."""
    happened: list[str] = []
    agenda = Agenda(lag_ms=5.0)
    for name, at_ms in (("late", 9.0), ("first", 5.0), ("second", 5.0)):
        agenda.at(at_ms, lambda name=name: happened.append(name))  # type: ignore[misc]
    agenda.after_lag(0.0, lambda: happened.append("engine"))
    assert agenda.next_ms() == 5.0
    agenda.run(4.9)
    assert happened == []
    agenda.run(5.0)
    assert happened == ["engine", "first", "second"]
    assert agenda.next_ms() == 9.0
    agenda.run(9.0)
    assert agenda.next_ms() == NEVER


def test_without_a_lag_an_engines_event_happens_at_once() -> None:
    """Nothing is left to do later."""
    happened: list[str] = []
    agenda = Agenda(lag_ms=0.0)
    agenda.after_lag(0.0, lambda: happened.append("engine"))
    assert (happened, agenda.next_ms()) == (["engine"], NEVER)
