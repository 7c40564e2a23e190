"""Records that kernels fold leave the state that Python leaves step by step, whatever comes between them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streams.core.loads.bookings as loads_module
import streams.core.loads.ended_bookings as ended_module
from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId, BookingPhase
from streams.core.loads.observations import NO_FORECAST, Forecast
from streams.load_records import encoded_load, load_key
from streams.router_api.loads_sync import LoadsSync
from streams.settings import Settings
from streams.topics import topics

TTL_MS = 10_000
KNOBS = Settings(partitions=3, booking_ttl_s=TTL_MS / 1000, kafka="127.0.0.1:1")
RANKS = [RankId(WorkerId(number), DpRank(number % 2)) for number in (1, 2, 3, (1 << 64) - 5, 1 << 63)]

_Record = tuple[bytes, bytes | None, int, int]


class NoClient:
    """A producer to which nothing is given, since nothing is sent."""

    def poll(self, _: float) -> int:
        return 0


class PythonSync(LoadsSync):
    """Folds every record by Python."""

    _folds_records = False


def synced(clock: list[int], of: type[LoadsSync]) -> LoadsSync:
    return of(KNOBS, topics(KNOBS).router_loads, NoClient(), lambda: clock[0])  # type: ignore[arg-type]


def records(rng: random.Random, n: int, n_names: int) -> Iterator[_Record]:
    """Records of two routers as they and older or newer ones write them, many in an order that no log has.

    With many names, most of them have one booking, whose records come in order.
    """
    unusual = 1.0 if n_names < 100 else 0.1
    known: list[tuple[BookingId, Booking, int]] = []
    now_ms = [1_000_000 + 7 * clock for clock in range(KNOBS.partitions)]
    for _ in range(n):
        what = rng.random()
        if not known or what < 0.35:
            name = f"request-{rng.randrange(n_names)}"
            if rng.random() < 0.4 * unusual:
                name = rng.choice((f"r{rng.randrange(3)}", f"längere-{rng.randrange(3)}"))
            booking_id = BookingId(name, rng.choice(("router-one", "router-two")), rng.randrange(3))
            branch = rng.randrange(3)
            chain = [1, 2, 3, 4 + branch, 7 + branch, *range(10 + branch, 20)][: rng.randrange(15)]
            booking = Booking(
                rng.choice(RANKS), rng.choice(("model", "other")), rng.randrange(90), pack_hashes(chain), 0, len(chain)
            )
            if rng.random() < 0.1 * unusual:
                forecast = rng.choice((NO_FORECAST, Forecast(2_000, 50, 400), Forecast(0, 0, 300)))
                booking = booking._replace(phase=rng.choice((None, "prefill", "decode")), forecast=forecast)
            clock = rng.randrange(KNOBS.partitions)
            known.append((booking_id, booking, clock))
            phase = BookingPhase.ADD
        else:
            booking_id, booking, clock = known[-1 - min(len(known) - 1, int(rng.expovariate(0.3)))]
            phase = rng.choice((BookingPhase.ADD, BookingPhase.PREFILL, BookingPhase.FREE, BookingPhase.FREE))
            if rng.random() < 0.5:
                booking = booking._replace(
                    output_blocks=rng.randrange(4),
                    prefill_tokens=rng.choice((0, booking.prefill_tokens, 50)),
                    expected_output_tokens=rng.choice((None, 100)),
                )
            if rng.random() < 0.1 * unusual:
                booking = booking._replace(rank=rng.choice(RANKS), sequence=booking.sequence[:8])
            if rng.random() < 0.1 * unusual:
                clock = rng.randrange(KNOBS.partitions)
        now_ms[clock] += rng.choice((0, 0, 0, 1, 5, TTL_MS // 3 if rng.random() < 0.1 else 0))
        at_ms = now_ms[clock]
        if rng.random() < 0.2 * unusual:
            at_ms -= rng.choice((3, 500, TTL_MS + 5))
        value: bytes | None = encoded_load(booking_id, phase, booking if phase is BookingPhase.ADD else None, at_ms)
        if rng.random() < 0.03:
            yield b"tick", None, at_ms, clock
        elif rng.random() < 0.03:
            assert value is not None
            cut = rng.randrange(len(value))
            yield (
                b"bad",
                rng.choice((value[:cut], value + b"x", b"", value[:cut] + b"\xff" + value[cut + 1 :])),
                at_ms,
                clock,
            )
        yield load_key(booking_id, phase), value, at_ms, clock


def seen(loads: ActiveLoads) -> dict[str, Any]:
    """What callers can see without asking for a booking.

    How many have expired is not compared: of a booking whose end comes a whole TTL late, this depends on whether an
    earlier one of its partition had ended.
    """
    loads.check()
    return {
        "ranks": loads.ranks(),
        "counts": (len(loads), loads.n_bytes, loads.dropped, loads.n_falls),
        "times": {rank: loads.times.table[:, row].tolist() for rank, row in loads._rows.items()},
        "routers": loads.recent_routers(1_000),
    }


def bookings(loads: ActiveLoads, n_names: int) -> dict[str, Any]:
    """All that is known of every request; each becomes an object by this."""
    names = [f"{kind}{number}" for kind in ("request-", "r", "längere-") for number in range(n_names)]
    live = {name: [(each, loads.renewal(each)) for each in loads.live_ids(name)] for name in names}
    kept = (
        "booking",
        "prefilled",
        "freed",
        "counted_prefill",
        "clock",
        "expires_ms",
        "phase",
        "since_ms",
        "prefilled_ms",
    )
    return {
        "live": live,
        "known": [(name, phase, loads.knows(name, phase)) for name in names for phase in (None, "prefill", "decode")],
        "states": sorted(
            (key, *(str(getattr(state, name)) for name in kept), state.node is None)
            for key, state in loads._states.items()
        ),
        "active": sorted(loads._live_by_request),
    }


@settings(max_examples=150, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_names=st.sampled_from([12, 500]),
    limits=st.sampled_from([{}, {}, {"BOOKINGS_MAX": 4}, {"BOOKINGS_BYTES_MAX": 7_000}, {"ENDED_MAX": 3}]),
)
def test_kernels_leave_the_state_of_python(seed: int, n_names: int, limits: dict[str, int]) -> None:
    """Any records, in batches of any size, with calls between them, leave the same state."""
    rng = random.Random(seed)
    clock = [0]
    with pytest.MonkeyPatch.context() as patched:
        for name, limit in limits.items():
            for module in (loads_module, ended_module):
                if hasattr(module, name):
                    patched.setattr(module, name, limit)
        by_kernels, by_python = synced(clock, LoadsSync), synced(clock, PythonSync)
        by_python.router_id = by_kernels.router_id
        made = list(records(rng, rng.choice((20, 60, 300)), n_names))
        at = 0
        while at < len(made):
            n = rng.choice((1, 2, 5, 20, 64, 100))
            clock[0] += rng.choice((0, 1, 30))
            assert [each for each, _ in by_kernels._fold_all(made[at : at + n])] == [
                each for each, _ in by_python._fold_all(made[at : at + n])
            ]
            at += n
            name = f"request-{rng.randrange(n_names)}"
            call = rng.randrange(8)
            found: list[Any] = []
            for sync in (by_kernels, by_python):
                loads = sync._loads
                match call:
                    case 0:
                        found.append(sync.report_phase(name, BookingPhase.FREE))
                    case 1:
                        found.append(sync.report_phase(name, BookingPhase.PREFILL))
                    case 2:
                        found.append(sync.report_output(name, 40))
                    case 3:
                        found.append(loads.live(name))
                    case 4 if loads.live_ids(name):
                        loads.forget(loads.live_ids(name)[0])
                    case 5 if not loads.live_ids(name):
                        sync.book(name, Booking(RANKS[0], "model", 16, pack_hashes([1, 2]), 0, 2))
            if not limits:
                assert found[:1] == found[1:]
                assert seen(by_kernels._loads) == seen(by_python._loads)
                # A heap of Python keeps entries of bookings that have ended until they are due.
                assert set(by_kernels._loads.expiring()) <= set(by_python._loads.expiring())
            else:  # which booking is dropped depends on how many are folded together
                by_kernels._loads.check()
        if not limits:
            assert bookings(by_kernels._loads, n_names) == bookings(by_python._loads, n_names)
            assert seen(by_kernels._loads) == seen(by_python._loads)


def added(worker_id: int, name: str, at_ms: int) -> _Record:
    """The add of a booking on one worker, which has 100 prompt tokens."""
    booking_id = BookingId(name, "router-one", worker_id)
    made = Booking(RankId(WorkerId(worker_id), DpRank(0)), "model", 100, pack_hashes([worker_id]), 0, 1)
    value = encoded_load(booking_id, BookingPhase.ADD, made, at_ms)
    return load_key(booking_id, BookingPhase.ADD), value, at_ms, 0


@pytest.mark.parametrize("of", [LoadsSync, PythonSync])
def test_bookings_that_expire_while_the_table_of_loads_grows_leave_no_load(of: type[LoadsSync]) -> None:
    """A rank makes the table grow, and the next record of the same batch lets all bookings expire."""
    sync, n_ranks = synced([0], of), 62
    for kind in ("first", "second"):  # kernels leave the first booking of a rank to Python
        for number in range(1, n_ranks + 1):
            sync._fold_all([added(number, f"{kind}-{number}", 1_000_000)])
    loads = sync._loads
    before = loads.table.shape[1]
    sync._fold_all([added(100, "third-100", 1_000_000)])
    sync._fold_all([added(101, "third-101", 1_000_000), added(102, "fourth-102", 1_000_000 + 2 * TTL_MS)])
    assert loads.table.shape[1] > before
    loads.check()
    assert loads.ranks().keys() == {RankId(WorkerId(102), DpRank(0))}


def of_booking(name: str, phase: BookingPhase, at_ms: int) -> _Record:
    booking_id = BookingId(name, "router-one", 1)
    return load_key(booking_id, phase), encoded_load(booking_id, phase, None, at_ms), at_ms, 0


@pytest.mark.parametrize("of", [LoadsSync, PythonSync])
@pytest.mark.parametrize("together", [False, True])
def test_a_router_that_starts_late_finds_what_had_expired_expired(of: type[LoadsSync], together: bool) -> None:
    """A booking expired by a tick, and its client reports afterwards. Compaction has removed the tick since."""
    first = added(1, "request-1", 1_000_000)
    tick: _Record = (b"tick", None, 1_000_000 + TTL_MS + 1, 0)
    later = of_booking("request-1", BookingPhase.PREFILL, 1_000_000 + TTL_MS + 5)
    renewed = added(1, "request-1", 1_000_000 + TTL_MS + 6)
    for more, n_live in (([], 0), ([renewed], 1)):
        for log in ([first, tick, later, *more], [first, later, *more]):
            sync = synced([0], of)
            for batch in [log] if together else [[each] for each in log]:
                sync._fold_all(batch)
            assert len(sync._loads.live_ids("request-1")) == n_live
            assert sum(load.requests for load in sync._loads.ranks().values()) == n_live
            sync._loads.check()


def test_ranks_that_are_added_one_by_one_are_found_by_kernels() -> None:
    """Also when their table grows, and when the rows of idle ranks are given to others."""
    sync, n_ranks = synced([0], LoadsSync), 300
    for at_ms in (1_000_000, 1_000_000 + 2 * TTL_MS):
        for kind in ("first", "second"):
            for number in range(n_ranks):
                sync._fold_all([added(number + at_ms, f"{kind}-{number}-{at_ms}", at_ms)])
        assert len(sync._loads._states) == n_ranks  # the first ones; the second ones are in the kernels' memory
        assert {load.requests for load in sync._loads.ranks().values()} == {2}
        assert len(sync._loads.ranks()) == n_ranks
        sync._loads.check()


def test_bookings_that_a_call_ends_leave_few_entries_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another router's booking whose end is reported here, while later ones of this router are due."""
    monkeypatch.setattr(loads_module, "_EXPIRIES_KEPT", 50)
    sync = synced([0], LoadsSync)
    loads = sync._loads
    for number in range(500):
        sync._fold_all([added(1, f"request-{number}", 1_000_000 + number)])
        own = BookingId(f"own-{number}", sync.router_id, number)
        loads.add(own, Booking(RANKS[0], "model", 1, b"", 0, 0), 1_000_000 + number)
        (booking_id,) = loads.live_ids(f"request-{number}")
        loads.free(booking_id, 1_000_000 + number)
        loads.free(own, 1_000_000 + number)
        assert sum(map(len, loads._expiries.values())) == loads._n_expiries <= 51
    loads.check()
    loads.expire(1_000_000 + 2 * TTL_MS)
    assert not len(loads)


def test_records_that_python_folds_are_folded_fewer_at_a_time() -> None:
    """Kernels leave the reports of a booking of one part of a request to Python, whatever form their records have."""
    sync = synced([0], LoadsSync)
    made = []
    for number in range(200):
        booking_id = BookingId(f"request-{number}", "router-one", number)
        booking = Booking(RANKS[0], "model", 100, pack_hashes([number]), 0, 1, phase="decode")
        made.append((booking_id, booking))
    add, prefill = ([*made], BookingPhase.ADD), ([*made], BookingPhase.PREFILL)
    for of, phase in (add, prefill):
        sync._fold_all(
            [
                (load_key(each, phase), encoded_load(each, phase, what if phase is BookingPhase.ADD else None, 1), 1, 0)
                for each, what in of
            ]
        )
        assert sync._by_python
    sync._fold_all([added(1, f"plain-{number}", 2) for number in range(200)])
    sync._fold_all([added(1, f"more-{number}", 2) for number in range(200)])
    assert not sync._by_python


def test_a_reader_of_routers_sees_those_of_the_newest_bookings() -> None:
    """Bookings as objects and in the kernels' memory are compared by the time of their last records."""
    sync = synced([0], LoadsSync)
    sync._fold_all([added(1, f"old-{number}", 1_000_000) for number in range(3)])
    for number in range(5):
        sync.book(f"own-{number}", Booking(RANKS[0], "model", 16, pack_hashes([1, 2]), 0, 2))
    assert sync._loads.recent_routers(5) == {sync.router_id}
    assert sync._loads.recent_routers(6) == {sync.router_id, "router-one"}
