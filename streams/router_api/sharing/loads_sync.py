"""Bookings shared between routers through `router-loads` (docs/bookings.md).

What lives here: applying this router's bookings at once, folding those of other routers, and notifying listeners when
load falls; and the lock of all this state. What must not: the rules of a booking (core.loads), its records on their way
(own_bookings), the time of the log (log_time), calls that come early (late_calls), and which of several bookings of a
request remains (reassignments).

State: the loads of one router, and their lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from confluent_kafka import Message, Producer

from streams.core.ids import RankId
from streams.core.loads.bookings import (
    ActiveLoads,
    Booking,
    BookingId,
    BookingPhase,
    Renewal,
    with_output,
)
from streams.core.loads.observations import LEASE, Forecast
from streams.core.routing.policies.engine_reports import MODES as POLICY_MODES
from streams.core.routing.selection import NAMED_MODES
from streams.core.routing.unreported import UnreportedBookings, UnreportedLoad
from streams.errors import BadRecord, BookingConflict
from streams.kafka.clients import Record
from streams.kafka.load_records import is_end_without_report, time_written_ms
from streams.kafka.records import decode_load
from streams.router_api.sharing.attempts import Attempts
from streams.router_api.sharing.late_calls import LateCalls
from streams.router_api.sharing.log_time import LogTime
from streams.router_api.sharing.own_bookings import Content, OwnBookings
from streams.router_api.sharing.reassignments import (
    UNKNOWN,
    UNREPORTED,
    PhaseReport,
    Reassigned,
    between_two,
    ended_before,
    followed,
    own_ended_by,
)
from streams.router_api.sharing.skipped_bookings import SkippedBookings
from streams.settings import RouterSettings, listed
from streams.topics import TopicSpec

#: A report of output that fills no more blocks renews a booking whose last record is older than this share of its TTL.
#: A front reports at least once per minute, so a booking of 10 minutes is renewed by one report in five.
_RENEWED_AFTER = 0.5

#: The clock of bookings that ended before they were sent: the log never has them, so they expire by this router's own.
_OWN_CLOCK = -1

#: Records of other routers are read in intervals, since waking up for each of them takes more time than folding it. The
#: sum of this, of the outbox's interval and of Kafka's own time is when other routers know a booking, which should be
#: at most admission.PROPAGATION_MS. An idle router fetches in this interval as well. While requests wait for load to
#: fall, and for some time after that, records are read more often: with four routers that queue, each ms of delay makes
#: the mean time to first token half a percent longer (benchmarks.queueing).
READ_INTERVAL_S = 0.050
READ_INTERVAL_WHILE_WAITED_FOR_S = 0.010
_WAITED_FOR_MS = 30_000

#: Records that are folded under one lock, and their bytes; requests get their turn in between. Folding one takes 10 to
#: 20 us, and those of long prompts a millisecond.
_FOLDED_TOGETHER_MAX = 16
_FOLDED_TOGETHER_BYTES = 128 * 1024

#: Bookings that show which routers book: those of some seconds.
_RECENT_BOOKINGS = 1024

#: One record as it comes from Kafka: key, value (None for a tombstone), append time and partition.
RawLoad = tuple[bytes, bytes | None, int, int]


class _Locked(AbstractContextManager[ActiveLoads]):
    """`LoadsSync.locked`. It has no state, so that one object serves all threads; every decision enters it."""

    __slots__ = ("_enter", "_release")

    def __init__(self, enter: Callable[[], ActiveLoads], release: Callable[[], None]) -> None:
        self._enter = enter
        self._release = release

    def __enter__(self) -> ActiveLoads:
        return self._enter()

    def __exit__(self, *_: object) -> None:
        self._release()


class LoadsSync:
    """Owner of this router's ActiveLoads. Thread-safe; its lock makes a decision and its booking one step."""

    def __init__(
        self,
        settings: RouterSettings,
        topic: TopicSpec,
        kafka: Producer,
        now_ms: Callable[[], int],
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """now_ms: a monotonic clock. wall_ms: the time since the epoch, which routers compare with each other's."""
        self._settings = settings
        self._kafka = kafka
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._shared = settings.router_replica_sync
        self._reads_metrics = settings.router_mode in POLICY_MODES  # or a request's own mode is one of these
        self._lock = threading.RLock()
        self._locked = _Locked(self._enter, self._lock.release)
        self._own = OwnBookings(topic, kafka, now_ms, self._lock)
        self._log_time = LogTime(topic, kafka, now_ms, self._lock)
        self._late_calls = LateCalls(now_ms)
        self._attempts = Attempts(self._ttl_ms)
        self._lowered: dict[BookingId, int] = {}  # own bookings whose output a record has lowered: what it was
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._falls_announced = 0
        self._last_listened_ms: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._skipped = SkippedBookings(listed(self._settings.models), self._ttl_ms)
        self._loads = ActiveLoads(self._ttl_ms, observe=self._settings.router_mode in NAMED_MODES)
        # Bookings since the engines' last reports, for the modes that read reports.
        self._unreported = UnreportedBookings() if self._reads_metrics else None
        self._expired_ms = -1  # when this router's own clock was last checked for what expires

    @property
    def _ttl_ms(self) -> int:
        return int(self._settings.booking_ttl_s * 1000)

    # -- the process ---------------------------------------------------------------------------------------------------

    def send_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send records on this loop, which answers requests. Called on the loop's thread; otherwise `poll` sends."""
        if self._shared:
            self._own.send_on(loop)

    def stop(self, timeout_s: float) -> None:
        """Send no more on the loop, and wait as `flush` does."""
        self._own.outbox.stop()
        self.flush(timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Wait until Kafka has acknowledged everything that was published, or until timeout_s has passed."""
        until_s = time.monotonic() + timeout_s
        while True:
            self._own.outbox.pump()
            left = self._kafka.flush(min(0.1, timeout_s))
            if (not left and not self.unacknowledged) or time.monotonic() >= until_s:
                return

    def poll(self) -> None:
        """Expire bookings, and write ticks to quiet partitions. Unless a loop does this, send waiting records."""
        outbox = self._own.outbox
        if outbox.sends:
            outbox.serve_reports()  # of ticks as well
        else:
            outbox.pump()
        with self._lock:
            self._expire()
            self._announce_falls()
            if self._shared:
                self._log_time.tick([clock for clock in self._loads.expiring() if clock != _OWN_CLOCK])

    def reset(self) -> None:
        """Drop all bookings, so that the topic can be folded again from its beginning.

        This router's own bookings return from the topic too, under its former id. Without router_replica_sync nothing
        is dropped, since its bookings are nowhere else.
        """
        if not self._shared:
            return
        with self._lock:
            self._own.begin()
            self._log_time.begin()
            self._begin()
            self._falls_announced = -1  # all loads are 0 now
            self._announce_falls()

    @property
    def router_id(self) -> str:
        """The id of this router in records."""
        return self._own.router_id

    @property
    def unpublished(self) -> int:
        """Records that Kafka did not take, or that were dropped because the outbox was over capacity."""
        return self._own.outbox.lost

    @property
    def unacknowledged(self) -> int:
        """Records that Kafka has not acknowledged yet."""
        return len(self._own.outbox)

    @property
    def unknown_calls(self) -> int:
        """Buffered calls whose booking did not come in time."""
        return self._late_calls.unknown

    @property
    def skipped_bytes(self) -> int:
        """About how much memory the ids of bookings of other models take."""
        with self._lock:
            return self._skipped.n_bytes

    @property
    def in_sync(self) -> bool:
        """Whether everything that this router published up to `stale_after_ms` ago has been read back from the log.

        If not, Kafka is unreachable, and routers lack each other's bookings. A booking whose record was dropped makes
        this False as long as it is active. If no record was published for a while, reading this makes the next `poll`
        write a tick, which shows whether Kafka is there.
        """
        if not self._shared:
            return True
        stale_after_ms = self._settings.stale_after_ms
        with self._lock:  # every exact answer comes through here
            self._log_time.note_asked()
            if self._log_time.ticks_before(self._now_ms() - stale_after_ms):
                return False
            return self._own.reads_back(stale_after_ms)

    # -- listeners, and the lock ---------------------------------------------------------------------------------------

    def listen(self, on_load_fell: Callable[[], None]) -> Callable[[], None]:
        """Call `on_load_fell` after each change that lowers the load of any rank; return a function that ends this.

        Load falls when a booking is freed, completes its prefill or expires, and when records of other routers are
        folded. It is called on the thread that made the change (the one that serves requests or ticks, or one that
        reads topics) and under the lock of the loads. So it must return at once, must not raise and must not call
        LoadsSync; on an event loop, `loop.call_soon_threadsafe(event.set)` does that.

        Several changes in one step may cause a single call. Load that falls only with time causes none, so that a
        waiting caller needs a deadline as well.
        """
        with self._lock:
            self._falls_announced = self._loads.n_falls
            self._listeners = (*self._listeners, on_load_fell)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(listener for listener in self._listeners if listener is not on_load_fell)
                self._last_listened_ms = self._now_ms()

        return end

    def read_interval_s(self) -> float:
        """In which interval records are to be read now."""
        last_ms = self._last_listened_ms
        is_waited_for = self._listeners or (last_ms is not None and self._now_ms() - last_ms < _WAITED_FOR_MS)
        return READ_INTERVAL_WHILE_WAITED_FOR_S if is_waited_for else READ_INTERVAL_S

    def locked(self) -> AbstractContextManager[ActiveLoads]:
        """The loads without expired bookings. They do not change until the block ends, except by its own calls."""
        return self._locked

    def _enter(self) -> ActiveLoads:
        self._lock.acquire()
        try:
            self._expire()
            self._announce_falls()
        except BaseException:
            self._lock.release()
            raise
        return self._loads

    def _announce_falls(self) -> None:
        """Call the listeners if load fell since they were last called."""
        if self._listeners and self._falls_announced != self._loads.n_falls:
            self._falls_announced = self._loads.n_falls
            for on_load_fell in self._listeners:
                on_load_fell()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def book(self, request_id: str, booking: Booking, *, reassigns: bool = False) -> BookingId:
        """Book here at once, and publish the booking.

        An existing booking of the same id and phase is replaced, except that the output blocks that were reported for
        it stay. Raises BookingConflict if that one is on another rank. reassigns: end it instead, whatever its rank,
        and make a new booking.
        """
        with self._lock:
            former = self._loads.live_ids_of(request_id, booking.phase) if reassigns else ()
            for booking_id in former:
                self._apply(booking_id, BookingPhase.FREE, self._local_time())
            live = self._loads.live(request_id, booking.phase)
            if live is None:
                booking_id = self._new_booking(request_id, booking.phase)
            else:
                booking_id, known = live
                _check_rank(request_id, known, booking)
                booking = booking._replace(output_blocks=max(booking.output_blocks, known.output_blocks))
            self._add(booking_id, booking, self._local_time(), is_new=live is None)
            self._publish(booking_id, BookingPhase.ADD, booking)
            # After the add, so that no router has read that a request ended which was only reassigned.
            if former:
                self._replace(former, booking_id)
            self._release_late_calls(booking_id, booking.phase)
            self._announce_falls()
            return booking_id

    def _new_booking(self, request_id: str, phase: str | None) -> BookingId:
        booking_id = self._own.new_id(request_id)
        if self._shared:
            self._own.note_made(booking_id)
            self._attempts.note_made(booking_id, self._wall_ms())
        self._late_calls.begin_anew(request_id, phase)
        return booking_id

    def _replace(self, former: Iterable[BookingId], latter: BookingId) -> None:
        """Publish that these bookings have ended, and that a new one replaces them."""
        if self._shared:  # its end must be in the log: another router may have reassigned the former one too
            self._own.must_end_in_log(latter)
        for booking_id in former:
            self._note_reassignment(Reassigned(booking_id, latter, self._wall_ms()))
            self._publish_phase(booking_id, BookingPhase.FREE, UNREPORTED)

    def note_refused(self, request_id: str, phase: str | None) -> None:
        """Note that a request ended here without a booking.

        Calls for it, before or up to 60 s after this, do not apply to the booking that this router makes when the
        request is repeated under its id. They still apply to one that another router has made.
        """
        with self._lock:
            self._late_calls.note_refused(request_id, phase)

    def unreported(self, reported: Mapping[RankId, int]) -> dict[RankId, UnreportedLoad]:
        """What any router booked on these ranks since their engines' last reports, for ranks with such bookings.

        reported: when each report was received. For a router whose mode reads no reports, bookings are kept from the
        first call on, which a request causes that overrides the mode.
        """
        with self._lock:
            if self._unreported is None:
                self._reads_metrics, self._unreported = True, UnreportedBookings()
            return self._unreported.since(reported)

    def report_phase(self, request_id: str, what: BookingPhase, phase: str | None = None) -> bool:
        """Apply prefill-complete or free. Returns False if no such booking is known, so that the call is buffered.

        The call applies to every active booking of the id and phase: two routers that were asked at once may each have
        made one. phase: None stands for every phase. A call for a booking that has ended changes nothing, and neither
        does a repeated prefill-complete. It is not buffered, because it would then end the next booking of that id. A
        buffered call applies to the first booking that arrives for it.

        A free also ends the bookings that other routers made before it and of which this one has read nothing yet.
        """
        with self._lock:
            live = self._live_ids(request_id, phase)
            if not live and not self._loads.knows(request_id, phase):
                self._late_calls.buffer(request_id, what, phase)
                return False
            # A record names one booking. Routers that read it find theirs of the same request (`own_ended_by`), unless
            # the request is booked in phases: the record does not say whether the call was about all of them.
            is_told = bool(live) and not self._loads.has_phases(request_id)
            for booking_id in live:
                # Repeated, its record would replace the first one in the log, without which a router that starts later
                # may find that the booking had expired by then.
                if what is not BookingPhase.PREFILL or not self._loads.is_prefilled(booking_id):
                    is_told &= self._publish_phase(booking_id, what)
            if what is BookingPhase.FREE and not is_told:
                self._note_end(request_id, phase, self._wall_ms())
            self._announce_falls()
            return True

    def end_unreported(self, request_id: str, phase: str | None = None) -> None:
        """End this router's bookings of a request whose end nobody will report. Policies learn nothing from it."""
        with self._lock:
            for booking_id in self._live_ids(request_id, phase):
                if booking_id.router_id == self.router_id:
                    self._publish_phase(booking_id, BookingPhase.FREE, UNREPORTED)
            self._announce_falls()

    def report_output(self, request_id: str, output_tokens: int, phase: str | None = None) -> bool:
        """Update bookings with the number of tokens generated so far; returns False if the call is buffered.

        Bookings are found, and calls are buffered, as in `report_phase`. A number that fills no more blocks than before
        is not published, unless half of a booking's TTL has passed since its last record: then it renews the booking.
        """
        with self._lock:
            live = self._live_ids(request_id, phase)
            if not live:
                if self._loads.knows(request_id, phase):
                    return True
                self._late_calls.buffer(request_id, "output", phase, output_tokens)
                return False
            for booking_id in live:
                self._grow(booking_id, output_tokens)
            return True

    def renew(self, request_id: str, phase: str | None, forecast: Forecast = LEASE) -> None:
        """Let the bookings of a request that have a lease count from now on, with another lease or this forecast."""
        with self._lock:
            for booking_id in self._live_ids(request_id, phase):
                renewal = self._loads.renewal(booking_id)
                if renewal is not None and renewal.booking.forecast == LEASE:
                    self._add_again(booking_id, renewal.booking._replace(forecast=forecast))

    def is_alone(self) -> bool:
        """Whether this router made all bookings that are active or were lately."""
        with self._lock:
            return self._loads.recent_routers(_RECENT_BOOKINGS) <= {self.router_id}

    def _live_ids(self, request_id: str, phase: str | None) -> tuple[BookingId, ...]:
        """The active bookings to which a call applies."""
        return self._loads.live_ids(request_id) if phase is None else self._loads.live_ids_of(request_id, phase)

    def _grow(self, booking_id: BookingId, output_tokens: int) -> None:
        booking = self._loads.booking(booking_id)
        if booking is None:
            return  # a buffered call whose booking had ended before it arrived
        grown = with_output(booking, output_tokens, self._settings.block_size_of(booking.model))
        if grown is booking:
            renewal = self._loads.renewal(booking_id)
            # Without output, the add would let a prompt wait again that has aged (rank_times).
            if renewal is None or not booking.output_blocks or not self._is_due(renewal):
                return
            grown = renewal.booking
        self._add_again(booking_id, grown)

    def _is_due(self, renewal: Renewal) -> bool:
        """Whether a booking ends soon enough, by the clock that ends it."""
        if renewal.last_record_ms is None:
            return False
        now_ms = self._log_time.latest_ms(renewal.clock) if self._shared else self._now_ms()
        return now_ms - renewal.last_record_ms >= self._ttl_ms * _RENEWED_AFTER

    def _release_late_calls(self, booking_id: BookingId, phase: str | None) -> None:
        """Apply the calls that waited for this booking: those of its phase, and those that named none."""
        calls, request_id = self._late_calls, booking_id.request_id
        if not calls:
            return
        for output_tokens in calls.take_output(request_id, phase):
            self._grow(booking_id, output_tokens)
        for what in (BookingPhase.PREFILL, BookingPhase.FREE):
            waited = calls.take(request_id, what, phase)
            reported_ms = {named: self._wall_of(since_ms) for named, since_ms in waited.items()}
            if reported_ms:
                self._publish_phase(booking_id, what, max(reported_ms.values()))
            if what is BookingPhase.FREE:  # this booking may have ended before, and others may be on their way
                for named, at_ms in reported_ms.items():
                    self._note_end(request_id, named, at_ms)

    def _wall_of(self, monotonic_ms: int) -> int:
        return self._wall_ms() - (self._now_ms() - monotonic_ms)

    # -- records -------------------------------------------------------------------------------------------------------

    def fold(self, record: Record) -> None:
        """Fold one record of router-loads. A record that raises BadRecord still advances its partition's time."""
        for _, exc in self._fold_all([(record.key, record.value, record.timestamp_ms, record.partition)]):
            raise exc

    def fold_messages(self, messages: Sequence[Message], live: bool) -> list[tuple[int, BadRecord]]:
        """Fold messages without errors; return those that cannot be used, each with its position.

        live: whether they were just written, so that they show the time of the log.
        """
        bad: list[tuple[int, BadRecord]] = []
        first = 0
        for records in _in_parts(messages):
            bad += [(first + number, exc) for number, exc in self._fold_all(records, live=live)]
            first += len(records)
        return bad

    def _fold_all(self, records: Sequence[RawLoad], *, live: bool = True) -> list[tuple[int, BadRecord]]:
        """Decode records, then fold them under one lock; returns as `fold_messages` does."""
        bad: list[tuple[int, BadRecord]] = []
        contents: list[tuple[Content | None, bool]] = []  # None: a tick or a bad record. Whether this router wrote it
        for number, (key, value, _, _) in enumerate(records):
            content = self._own.take_record(key, value)
            is_own = content is not None
            if value is not None and content is None:
                try:
                    content = Content(*decode_load(value))
                except BadRecord as exc:
                    bad.append((number, exc))
            contents.append((content, is_own))
        if records:
            self._note_time(max([at_ms for _, _, at_ms, _ in records]), live=live)
        with self._lock:
            for (_, value, at_ms, clock), (content, is_own) in zip(records, contents, strict=True):
                self._fold_record(content, value, at_ms, clock, is_own=is_own)
            if self._lowered:
                self._correct_lowered()
            self._log_time.note_heard({clock for _, _, _, clock in records})
            self._announce_falls()
        return bad

    def _fold_record(
        self, content: Content | None, value: bytes | None, at_ms: int, clock: int, *, is_own: bool
    ) -> None:
        """Fold one record under the lock. content: None for a tick or a bad record. is_own: this router wrote it."""
        # What has expired by the time of a record is gone before it is folded, whatever the log had in between.
        if self._log_time.advance(clock, at_ms):
            self._loads.expire(at_ms, clock)
        if content is None or self._skipped.skips(content, at_ms, clock):
            return
        assert value is not None  # a tick has no content
        booking_id, phase, booking = content
        attempts, router_id = self._attempts, self.router_id
        reports: list[PhaseReport] = []
        if phase is BookingPhase.FREE and not is_own:
            reports = own_ended_by(booking_id, value, self._loads, attempts, router_id)
        if booking is None:
            if phase is BookingPhase.FREE:
                attempts.forget_made(booking_id)
            is_reported = phase is not BookingPhase.FREE or not is_end_without_report(value)
            self._apply(booking_id, phase, at_ms, clock, is_reported=is_reported)
        else:
            self._fold_add(booking_id, booking, value, at_ms, clock)
        if attempts.has_reassignments:
            reports += followed(content, value, self._loads, attempts)
        if attempts.has_ends and booking is not None and booking_id.router_id != router_id:
            reports += ended_before(content, value, self._loads, attempts)
        for report in reports:
            self._publish_phase(*report)
        latest_ms = self._log_time.latest_ms(clock)
        if at_ms < latest_ms:  # it may have come too late
            self._loads.expire(latest_ms, clock)

    def _fold_add(self, booking_id: BookingId, booking: Booking, value: bytes, at_ms: int, clock: int) -> None:
        loads, is_own = self._loads, booking_id.router_id == self.router_id
        known = loads.booking(booking_id) if is_own else None
        if known is not None and booking.output_blocks < known.output_blocks:
            self._lowered[booking_id] = max(known.output_blocks, self._lowered.get(booking_id, 0))
        if is_own:
            self._own.note_read(booking_id)
        if loads.logged(booking_id, booking, at_ms, clock):
            return
        # Another router's booking, or an older version of one of this router's own. If a booking has two adds,
        # the later one in the log wins, whichever router wrote it, so that all routers end with the same booking.
        before = loads.live_ids_of(booking_id.request_id, booking.phase)
        self._add(booking_id, booking, at_ms, clock)
        self._release_late_calls(booking_id, booking.phase)
        if before and booking_id not in before and loads.booking(booking_id) is not None:
            self._yield_to(booking_id, before, value)

    def _yield_to(self, newer: BookingId, before: Sequence[BookingId], value: bytes) -> None:
        """End this router's booking if another router booked the same request id and phase later.

        before: the active bookings of that id and phase until then. Each router ends only its own. value: the record
        of the newer one.
        """
        own = [booking_id for booking_id in before if booking_id.router_id == self.router_id]
        if newer.router_id == self.router_id or not own:
            return
        newer_ms = time_written_ms(value)
        for booking_id in own:
            made_ms, unlogged = self._attempts.made_ms(booking_id), self._own.is_unlogged(booking_id)
            reassigned = between_two(booking_id, made_ms, newer, newer_ms, unlogged=unlogged)
            if reassigned is not None:
                self._note_reassignment(reassigned)
                if reassigned.former == booking_id:
                    self._publish_phase(booking_id, BookingPhase.FREE, UNREPORTED)

    def _correct_lowered(self) -> None:
        """Publish this router's bookings again whose output is smaller in the log than it was before.

        A router writes such a record if it has not read the last report yet. Each router corrects its own bookings, so
        that all of them end with the greatest report. Nothing is to be done if a later record is on its way.
        """
        for booking_id, n_blocks in self._lowered.items():
            booking = self._loads.booking(booking_id)
            if booking is not None and max(booking.output_blocks, self._own.output_coming(booking_id)) < n_blocks:
                self._add_again(booking_id, booking._replace(output_blocks=n_blocks))
        self._lowered.clear()

    # -- applying and publishing ---------------------------------------------------------------------------------------

    def _add(
        self, booking_id: BookingId, booking: Booking, at_ms: int | None, clock: int = 0, *, is_new: bool = False
    ) -> None:
        if self._unreported is None:
            self._loads.add(booking_id, booking, at_ms, clock, is_new=is_new)
            return
        before = self._loads.load(booking.rank)
        self._loads.add(booking_id, booking, at_ms, clock, is_new=is_new)
        after = self._loads.load(booking.rank)
        if after.requests > before.requests:  # else it has ended, or replaces an earlier record of the same booking
            n_blocks = after.decode_blocks - before.decode_blocks + booking.partial_blocks
            self._unreported.add(booking_id, booking.rank, n_blocks, self._now_ms())

    def _add_again(self, booking_id: BookingId, booking: Booking) -> None:
        """Replace an active booking, and publish that."""
        self._loads.add(booking_id, booking, self._local_time())
        self._publish(booking_id, BookingPhase.ADD, booking)

    def _apply(
        self,
        booking_id: BookingId,
        phase: BookingPhase,
        at_ms: int | None,
        clock: int = 0,
        *,
        is_reported: bool = True,
    ) -> None:
        if phase is BookingPhase.PREFILL:
            self._loads.prefill_complete(booking_id, at_ms, clock)
        else:
            self._loads.free(booking_id, at_ms, clock, is_reported=is_reported)
            if self._unreported is not None:
                self._unreported.end(booking_id)

    def _publish_phase(self, booking_id: BookingId, phase: BookingPhase, reported_ms: int | None = None) -> bool:
        """Apply a phase and publish it. reported_ms: when a client reported it, if that is not now, or UNREPORTED.

        Returns False if the booking ended before it was sent, so that nothing is published.
        """
        self._apply(booking_id, phase, self._local_time(), is_reported=reported_ms != UNREPORTED)
        if phase is BookingPhase.FREE:
            self._attempts.forget_made(booking_id)
            if self._own.withdraw(booking_id):
                self._loads.free(booking_id, self._now_ms(), _OWN_CLOCK)
                return False
            dropped = self._own.drop_ended()
            if dropped is not None:
                self._loads.forget(dropped)
        self._publish(booking_id, phase, None, reported_ms)
        return True

    def _publish(
        self, booking_id: BookingId, phase: BookingPhase, booking: Booking | None, written_at_ms: int | None = None
    ) -> None:
        if not self._shared:
            return
        if written_at_ms is None:
            # An add says when its booking was made, also when it is written again. Only its own router knows that.
            written_at_ms = (
                self._attempts.made_ms(booking_id) or UNKNOWN if phase is BookingPhase.ADD else self._wall_ms()
            )
        self._own.publish(Content(booking_id, phase, booking), written_at_ms)

    def _note_end(self, request_id: str, phase: str | None, at_ms: int) -> None:
        """Remember that a client ended a request, if no record says so to the other routers.

        One of them may have booked it too, and this router has not read that booking yet. phase: the one that the call
        named, or None. at_ms: the wall-clock time of the call.
        """
        if self._shared:
            self._attempts.note_end(request_id, phase, at_ms, self._now_ms())

    def _note_reassignment(self, reassigned: Reassigned) -> None:
        """Remember that a booking was replaced, so that what a client then reports of it applies to the new one.

        Another router knows the former one only, until it has read this.
        """
        if self._shared:
            self._attempts.note_reassignment(*reassigned, self._now_ms())

    # -- time ----------------------------------------------------------------------------------------------------------

    def _local_time(self) -> int | None:
        """The time of this router's own records: None, since the log has yet to set it; without a log, local time."""
        return None if self._shared else self._now_ms()

    def _note_time(self, append_ms: int, *, live: bool) -> None:
        """Take in the append time of a record that was read now."""
        with self._lock:
            jumped_ms = self._log_time.note(append_ms, live=live)
            if not jumped_ms:
                return
            self._expired_ms = -1  # what is not due at this local time by the former estimate may be due by this one
            unlogged = self._own.unlogged
            if unlogged:
                self._loads.shift(unlogged, jumped_ms)
                self._loads.advance(self._log_time.present_ms(self._now_ms()))

    def _expire(self) -> None:
        now_ms = self._now_ms()
        if now_ms == self._expired_ms:  # nothing that was made within this millisecond expires in it
            return
        self._expired_ms = now_ms
        self._loads.advance(self._log_time.present_ms(now_ms))
        self._loads.expire(now_ms, _OWN_CLOCK if self._shared else 0)
        for booking_id in self._own.expire(now_ms, self._ttl_ms):
            self._attempts.forget_made(booking_id)
            self._loads.forget(booking_id)
        self._late_calls.expire(now_ms)
        self._attempts.expire(now_ms)


def _check_rank(request_id: str, known: Booking, booking: Booking) -> None:
    """Raise BookingConflict if a request is booked on another rank."""
    if known.rank != booking.rank:
        of_phase = "" if booking.phase is None else f" for phase {booking.phase}"
        raise BookingConflict(
            f"request {request_id!r} is booked on rank {known.rank}{of_phase}",
            remedy=f"DELETE /loads/{request_id} first, or use another id",
        )


def _in_parts(messages: Sequence[Message]) -> Iterator[list[RawLoad]]:
    """The records of messages, as many together as are folded under one lock."""
    part: list[RawLoad] = []
    n_bytes = 0
    for message in messages:
        value = message.value()
        part.append((message.key() or b"", value, message.timestamp()[1], message.partition() or 0))
        n_bytes += len(value or b"")
        if len(part) == _FOLDED_TOGETHER_MAX or n_bytes >= _FOLDED_TOGETHER_BYTES:
            yield part
            part, n_bytes = [], 0
    if part:
        yield part
