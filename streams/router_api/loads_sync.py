"""Bookings shared between routers through `router-loads` (docs/architecture.md, Loads).

What lives here: applying this router's bookings at once, publishing them, folding those of other routers, and notifying
listeners when load falls. What must not: the rules of a booking (core.loads), and the queue of records for Kafka
(outbox). A router gets a new id at every start, which distinguishes its records from those of earlier starts.

The time of a booking is that of the log: append times of its partition, which the broker sets and which are the same
for every router. This time advances with each record. If a partition has no new records, routers that have bookings
there write a tick.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.core.ids import RankId
from streams.core.loads.bookings import (
    BOOKINGS_MAX,
    ActiveLoads,
    Booking,
    BookingId,
    BookingPhase,
    Renewal,
    with_output,
)
from streams.core.loads.kernels.layout import ADD, FIELD_KIND, FREE, OTHER, PREFILL
from streams.core.loads.log_clock import LogClock
from streams.core.routing.policies import MODES as POLICY_MODES
from streams.core.routing.selection import NAMED_MODES
from streams.core.routing.unreported import UnreportedBookings, UnreportedLoad
from streams.errors import BadRecord, BookingConflict
from streams.kafka import Record
from streams.load_batches import AT_MS, PARTITION, LoadBatch, RawLoad, batch_of
from streams.load_records import (
    LoadDecoder,
    LoadFields,
    encoded_load,
    load_key,
    read_fields,
    request_partition,
    time_written_ms,
)
from streams.router_api.answering_loop import AnsweringLoop
from streams.router_api.attempts import Attempts
from streams.router_api.outbox import Outbox
from streams.settings import Settings
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: A report of output that fills no more blocks renews a booking whose last record is older than this share of its TTL.
#: A front reports at least once per minute, so a booking of 10 minutes is renewed by one report in five.
_RENEWED_AFTER = 0.5

#: Calls that are buffered because their booking, made by another router, may still be on its way.
BUFFERED_CALLS_MAX = 10_000
BUFFERED_CALL_TTL_MS = 60_000

#: Refused requests that are remembered, for as long as a call is buffered.
REFUSED_MAX = 10_000

#: In the record of an add: the router that wrote it does not know when the booking was made.
_UNKNOWN = 0

#: In the record of a free: no client reported the end of this booking, since another booking replaces it.
_REPLACED = 0

#: The phases that a booking may have.
_PHASES = (None, "prefill", "decode")
_NONE: frozenset[str | None] = frozenset()

#: A partition that has had no record for this long gets a tick, which advances its time.
QUIET_MS = 1_000

#: The partition that gets a tick if no bookings are kept and `in_sync` was read.
_PROBED = 0

#: The clock of bookings that ended before they were sent: the log never has them, so they expire by this router's own.
_OWN_CLOCK = -1

#: Key of a tick. Its value is a tombstone, so that compaction removes it, and no booking has this key.
TICK_KEY = b"tick"

#: Records of other routers are read in intervals, since waking up for each of them takes more time than folding it. The
#: sum of this, of the outbox's interval and of Kafka's own time is when other routers know a booking, which should be
#: at most admission.PROPAGATION_MS. An idle router fetches in this interval as well.
READ_INTERVAL_S = 0.050

#: Records that are decoded and folded under one lock; requests get their turn in between. Folding one takes 5 to 10 us,
#: and 1 us if kernels do it.
_FOLDED_TOGETHER_MAX = 64
_BY_KERNELS_TOGETHER_MAX = 256

#: Of those that Python folds, so many between two requests, if the loop that answers requests folds them.
_BETWEEN_REQUESTS_MAX = 32

#: Bytes of them after which requests get their turn as well: those of long prompts take a millisecond.
_BETWEEN_REQUESTS_BYTES = 128 * 1024

#: At most 64 records are folded together if kernels have left one in so many of the last ones to Python, which takes
#: ten times as long for it.
_PYTHON_SHARE = 4

#: Own records that are kept until they are read back, so that they need not be decoded. Beyond this limit the oldest
#: one is dropped; it is then decoded like any other.
_OWN_RECORDS_MAX = 20_000

#: About how long a record is, without its hashes.
_RECORD_BYTES = 150

#: The size of each of a booking's packed sequence hashes.
_BYTES_PER_HASH = 8

#: What a buffered call reports: a phase, or generated tokens.
_Call = BookingPhase | Literal["output"]


class _Content(NamedTuple):
    """What a record of router-loads says."""

    booking_id: BookingId
    phase: BookingPhase
    booking: Booking | None


class _Unsent(NamedTuple):
    """A record that is not encoded yet."""

    content: _Content
    written_at_ms: int


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


class _BufferedCall(NamedTuple):
    """A call that waits for its booking. output_tokens: 0 for a phase.

    of_refused: phases that this router refused. The call is about these requests, so it must not end the next ones.
    """

    since_ms: int
    output_tokens: int
    of_refused: frozenset[str | None]


class LoadsSync:
    """Owner of this router's ActiveLoads. Thread-safe; its lock makes a decision and its booking one step."""

    def __init__(
        self,
        settings: Settings,
        topic: TopicSpec,
        kafka: Producer,
        now_ms: Callable[[], int],
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """now_ms: a monotonic clock. wall_ms: the time since the epoch, which routers compare with each other's."""
        self._ttl_ms = int(settings.booking_ttl_s * 1000)
        self._stale_after_ms = settings.stale_after_ms
        self._block_size_of = settings.block_size_of
        self._topic = topic
        self._kafka = kafka
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._shared = settings.router_replica_sync
        self._reads_metrics = settings.router_mode in POLICY_MODES  # or a request's own mode is one of these
        self._learns = settings.router_mode in NAMED_MODES
        self._log_clock = LogClock()  # without a log, bookings have this router's own time
        self._lock = threading.RLock()
        self._locked = _Locked(self._enter, self._lock.release)
        self._outbox: Outbox[_Unsent] = Outbox(kafka, topic.name, now_ms, lambda: self._lock, self._encode)
        self._decoder = LoadDecoder()
        self._decoding = threading.Lock()
        # Records of this router that were sent and not read back yet, by key: values, and what they say.
        self._own: OrderedDict[bytes, tuple[bytes, _Content]] = OrderedDict()
        self._lowered: dict[BookingId, int] = {}  # own bookings whose output a record has lowered: what it was
        self._buffered: OrderedDict[tuple[str, _Call, str | None], _BufferedCall] = OrderedDict()
        self._attempts = Attempts(self._ttl_ms)
        # Requests that this router refused, by id and phase, and since when.
        self._refused: OrderedDict[tuple[str, str | None], int] = OrderedDict()
        # When each partition's last record was read, or the last tick of this router was acknowledged.
        self._heard_ms = [now_ms()] * topic.partitions
        self._ticking: dict[int, int] = {}  # partitions whose tick Kafka has not acknowledged, and since when
        self._sync_was_read = False  # whether `in_sync` was read since the last check for quiet partitions
        self._counter = 0
        self.unknown_calls = 0
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._falls_announced = 0
        self._answering: AnsweringLoop | None = None  # the loop that answers requests, where there is one
        self._begin()

    def _begin(self) -> None:
        self._loads = ActiveLoads(self._ttl_ms, observe=self._learns)
        # Bookings since the engines' last reports, for the modes that read reports.
        self._unreported = UnreportedBookings() if self._reads_metrics else None
        self._stream_ms = [0] * self._topic.partitions  # newest append time of each partition
        # This router's bookings that have not been read back from the log, with the times when they were made: active
        # ones, and ended ones.
        self._unlogged: OrderedDict[BookingId, int] = OrderedDict()
        self._ended_unlogged: OrderedDict[BookingId, int] = OrderedDict()
        self._sent: set[BookingId] = set()  # those of the active ones that may be in the log, or whose end must be
        self._expired_ms = -1  # when this router's own clock was last checked for what expires
        self.router_id = uuid.uuid4().hex
        self._own_id = self.router_id.encode()
        self._by_python = False  # whether Python folds most records, as the last ones showed

    def start(self) -> None:
        """Begin to send records by a thread of its own; without this, `poll` sends them."""
        if self._shared:
            self._outbox.start()

    def answer_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send and fold records between the requests that this loop answers. Called on the loop's thread."""
        self._answering = AnsweringLoop(loop)
        self._outbox.send_on(loop)

    def stop(self, timeout_s: float) -> None:
        """Stop that thread, and wait as `flush` does."""
        self._outbox.stop()
        self.flush(timeout_s)

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
                self._listeners = tuple(each for each in self._listeners if each is not on_load_fell)

        return end

    def _announce_falls(self) -> None:
        """Call the listeners if load fell since they were last called."""
        if self._falls_announced != self._loads.n_falls:
            self._falls_announced = self._loads.n_falls
            for on_load_fell in self._listeners:
                on_load_fell()

    def locked(self) -> AbstractContextManager[ActiveLoads]:
        """The loads without expired bookings. They do not change until the block ends, except by its own calls."""
        return self._locked

    def _enter(self) -> ActiveLoads:
        self._lock.acquire()
        try:
            self._expire()
            if self._listeners:
                self._announce_falls()
        except BaseException:
            self._lock.release()
            raise
        return self._loads

    @property
    def unpublished(self) -> int:
        """Records that Kafka did not take, or that were dropped because the outbox was over capacity."""
        return self._outbox.lost

    @property
    def unacknowledged(self) -> int:
        """Records that Kafka has not acknowledged yet."""
        return len(self._outbox)

    @property
    def in_sync(self) -> bool:
        """Whether everything that this router published up to `stale_after_ms` ago has been read back from the log.

        If not, Kafka is unreachable, and routers lack each other's bookings. A booking whose record was dropped makes
        this False as long as it is active. If no record was published for a while, reading this makes the next `poll`
        write a tick, which shows whether Kafka is there.
        """
        with self._lock:  # every exact answer comes through here
            self._sync_was_read = True
            return not self._shared or self._reads_back()

    def _reads_back(self) -> bool:
        since_ms = self._now_ms() - self._stale_after_ms
        for bookings in (self._unlogged, self._ticking):
            if bookings and next(iter(bookings.values())) < since_ms:
                return False
        return self._outbox.oldest_ms() <= self._stale_after_ms

    def book(self, request_id: str, booking: Booking, *, moves: bool = False) -> BookingId:
        """Book here at once, and publish the booking.

        An existing booking of the same id and phase is replaced, except that the output blocks that were reported for
        it stay. Raises BookingConflict if that one is on another rank. moves: end it instead, whatever its rank, and
        make a new booking.
        """
        with self._lock:
            former = self._loads.live_ids_of(request_id, booking.phase) if moves else ()
            for each in former:
                self._apply(each, BookingPhase.FREE, self._local_time())
            live = self._loads.live(request_id, booking.phase)
            if live is not None and live[1].rank != booking.rank:
                of_phase = "" if booking.phase is None else f" for phase {booking.phase}"
                raise BookingConflict(
                    f"request {request_id!r} is booked on rank {live[1].rank}{of_phase}",
                    remedy=f"DELETE /loads/{request_id} first, or use another id",
                )
            if live is not None:
                booking_id = live[0]
                booking = booking._replace(output_blocks=max(booking.output_blocks, live[1].output_blocks))
            else:
                self._counter += 1
                booking_id = BookingId(request_id, self.router_id, self._counter)
                if self._shared:
                    self._unlogged[booking_id] = self._now_ms()
                    self._attempts.note_made(booking_id, self._wall_ms())
                if self._refused or self._buffered:
                    self._begin_anew(request_id, booking.phase)
            self._add(booking_id, booking, self._local_time(), is_new=live is None)
            self._publish(booking_id, BookingPhase.ADD, booking)
            # After the add, so that no router has read that a request ended which only moved.
            if former and self._shared:
                # Even if it ends before it is sent, its end must be in the log: another router may have moved the
                # former one too.
                self._sent.add(booking_id)
            for each in former:
                self._note_move(each, booking_id, self._wall_ms())
                self._publish_phase(each, BookingPhase.FREE, _REPLACED)
            self._release_buffered(booking_id, booking.phase)
            if self._listeners:
                self._announce_falls()
            return booking_id

    def note_refused(self, request_id: str, phase: str | None) -> None:
        """Note that a request ended here without a booking.

        Calls for it, before or up to 60 s after this, do not apply to the booking that this router makes when the
        request is repeated under its id. They still apply to one that another router has made.
        """
        with self._lock:
            self._refused.pop((request_id, phase), None)
            self._refused[request_id, phase] = self._now_ms()
            if len(self._refused) > REFUSED_MAX:
                self._refused.popitem(last=False)
            for key in self._keys_of(request_id, phase):
                call = self._buffered.get(key)
                if call is not None:
                    self._buffered[key] = call._replace(of_refused=call.of_refused | {phase})

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
                self._buffer_call(request_id, what, phase)
                return False
            # A record names one booking. Routers that read it find theirs of the same request (`_own_ended_by`), unless
            # the request is booked in phases: the record does not say whether the call was about all of them.
            is_told = bool(live) and not self._loads.has_phases(request_id)
            for booking_id in live:
                # Repeated, its record would replace the first one in the log, without which a router that starts later
                # may find that the booking had expired by then.
                if what is not BookingPhase.PREFILL or not self._loads.is_prefilled(booking_id):
                    is_told &= self._publish_phase(booking_id, what)
            if what is BookingPhase.FREE and not is_told:
                self._note_end(request_id, phase, self._wall_ms())
            if self._listeners:
                self._announce_falls()
        self._outbox.serve_reports()  # every booking comes through here once, and not within the lock of a decision
        return True

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
                self._buffer_call(request_id, "output", phase, output_tokens)
                return False
            for booking_id in live:
                self._grow(booking_id, output_tokens)
            return True

    def fold(self, record: Record) -> None:
        """Fold one record of router-loads. A record that raises BadRecord still advances its partition's time."""
        message = (record.key, record.value, record.timestamp_ms, record.partition)
        for _, exc in self._fold_all([message]):
            raise exc

    def fold_messages(self, messages: Sequence[Message], live: bool) -> list[tuple[int, BadRecord]]:
        """Fold messages without errors; return those that cannot be used, each with its position.

        live: whether they were just written, so that they show the time of the log.
        """
        records = [(each.key() or b"", each.value(), each.timestamp()[1], each.partition() or 0) for each in messages]
        if not live or self._answering is None or not records:
            return self._fold_all(records, live=live)
        bad: list[tuple[int, BadRecord]] = []
        at = 0

        def step() -> bool:
            nonlocal at
            first, n_bytes = at, 0
            by_python = self._by_python or not self._folds_records or records[at][0] in self._own
            stop = min(len(records), at + (_BETWEEN_REQUESTS_MAX if by_python else _BY_KERNELS_TOGETHER_MAX))
            while at < stop and n_bytes < _BETWEEN_REQUESTS_BYTES:
                n_bytes += len(records[at][1] or b"")
                at += 1
            bad.extend((first + number, exc) for number, exc in self._fold_all(records[first:at]))
            return at < len(records)

        self._answering.run(step)
        return bad

    def _fold_all(self, records: Sequence[RawLoad], *, live: bool = True) -> list[tuple[int, BadRecord]]:
        contents = self._own_contents(records) if self._own and 0 < len(records) <= _FOLDED_TOGETHER_MAX else None
        if contents is None:
            return self._fold_batch(batch_of(records), live=live)
        # Records of a router that is alone, nearly always: it has all that they say.
        self._note_time(max([at_ms for _, _, at_ms, _ in records]), live=live)
        with self._lock:
            loads, stream_ms, by_kernels = self._loads, self._stream_ms, self._folds_records
            for (_, value, at_ms, clock), content in zip(records, contents, strict=True):
                latest_ms = max(stream_ms[clock], loads.latest_ms(clock)) if by_kernels else stream_ms[clock]
                stream_ms[clock] = self._fold_record(content, value, at_ms, clock, latest_ms, is_own=True)
            self._end_fold({clock for _, _, _, clock in records})
        self._by_python = True
        return []

    def _own_contents(self, records: Sequence[RawLoad]) -> list[_Content] | None:
        """What records say, if this router wrote all of them and remembers that; it then forgets it."""
        own, contents = self._own, []
        with self._decoding:
            for key, value, _, _ in records:
                known = own.get(key)
                if known is None or known[0] != value:
                    return None
                contents.append(known[1])
            for key, _, _, _ in records:
                own.pop(key, None)  # not `del`: sending may have dropped it in between
        return contents

    def _fold_batch(self, batch: LoadBatch, *, live: bool) -> list[tuple[int, BadRecord]]:
        if len(batch):
            self._note_time(int(batch.places[:, AT_MS].max()), live=live)
        bad: list[tuple[int, BadRecord]] = []
        at = 0
        while at < len(batch):
            n_together = _FOLDED_TOGETHER_MAX if self._by_python else _BY_KERNELS_TOGETHER_MAX
            together, read = batch.part(at, at + n_together), None
            if self._folds_records:
                read = read_fields(together, self._own_id)
            if len(together) > _FOLDED_TOGETHER_MAX and (
                read is None or read.kinds.count(OTHER) * _PYTHON_SHARE > len(together)
            ):
                together = together.part(0, _FOLDED_TOGETHER_MAX)
                read = None if read is None else read.part(_FOLDED_TOGETHER_MAX)
            found, n_by_python = self._fold_together(together, read)
            self._by_python = n_by_python * _PYTHON_SHARE > len(together)
            bad += [(at + number, exc) for number, exc in found]
            at += len(together)
        return bad

    def _fold_together(self, batch: LoadBatch, read: LoadFields | None) -> tuple[list[tuple[int, BadRecord]], int]:
        """Fold records under one lock. Those that kernels do not fold are decoded before, if that is known before.

        Returns those that cannot be used, and how many were not folded by kernels.
        """
        bad: list[tuple[int, BadRecord]] = []
        contents: dict[int, _Content | None] = {}
        own_numbers: set[int] = set()
        with self._decoding:
            for number in range(len(batch)):
                if read is not None and read.kinds[number] != OTHER:
                    continue
                key, value, _, _ = batch.record(number)
                own = self._own.get(key) if self._own else None
                if own is not None and own[0] == value:  # this router wrote it itself, so it is not decoded
                    self._own.pop(key, None)  # not `del`: sending may have dropped it in between
                    contents[number] = own[1]
                    own_numbers.add(number)
                else:
                    contents[number] = self._decode(number, value, bad)
        with self._lock:
            if read is not None and not self._folds_records:  # the first request came that overrides the mode
                read = None
            if read is not None and (self._buffered or self._attempts.has_moves or self._attempts.has_ends):
                self._leave_to_python(read)
            loads, stream_ms, at, n_by_python = self._loads, self._stream_ms, 0, 0
            unlimited = set() if read is None else set(read.clocks)  # clocks of which kernels do not know what is due
            while at < len(batch):
                if read is not None and read.kinds[at] != OTHER:
                    loads.limit(unlimited)
                    unlimited.clear()
                    at = loads.fold(read.fields, at)
                if at == len(batch):
                    break
                _, value, at_ms, clock = batch.record(at)
                if at not in contents:
                    with self._decoding:
                        contents[at] = self._decode(at, value, bad)
                content = contents[at]
                latest_ms = stream_ms[clock] if read is None else max(stream_ms[clock], loads.latest_ms(clock))
                stream_ms[clock] = self._fold_record(content, value, at_ms, clock, latest_ms, is_own=at in own_numbers)
                if content is not None:
                    unlimited.add(clock)
                n_by_python += 1
                at += 1
            if read is not None:
                loads.end_fold(read.clocks)
                for clock in read.clocks:
                    stream_ms[clock] = max(stream_ms[clock], loads.latest_ms(clock))
            self._end_fold(set(batch.places[:, PARTITION].tolist()) if read is None else read.clocks)
        return bad, n_by_python

    def _fold_record(
        self,
        content: _Content | None,
        value: bytes | None,
        at_ms: int,
        clock: int,
        latest_ms: int,
        *,
        is_own: bool,
    ) -> int:
        """Fold one record under the lock; returns the clock's latest time, which was latest_ms before.

        content: None for a tick or a bad record. is_own: this router wrote it itself.
        """
        # The broker gives all records of a batch the same time, in which nothing more expires. What has expired by the
        # time of a record is gone before it is folded, whatever the log had in between.
        if at_ms > latest_ms:
            latest_ms = at_ms
            self._loads.expire(latest_ms, clock)
        if content is None:
            return latest_ms
        assert value is not None  # a tick has no content
        attempts = self._attempts
        ended: Sequence[BookingId] = ()
        if content.phase is BookingPhase.FREE and not is_own:
            ended = self._own_ended_by(content.booking_id, value)
        self._fold_content(content, value, at_ms, clock)
        if attempts.has_moves:
            self._follow_moves(content, value)
        for each in ended:
            self._publish_phase(each, BookingPhase.FREE, time_written_ms(value))
        if attempts.has_ends and content.booking is not None:
            self._follow_end(content.booking_id, content.booking.phase, value)
        if at_ms < latest_ms:  # it may have come too late
            self._loads.expire(latest_ms, clock)
        return latest_ms

    def _end_fold(self, clocks: Iterable[int]) -> None:
        """Do what follows the records that were folded under one lock. clocks: theirs."""
        if self._lowered:
            self._correct_lowered()
        now_ms = self._now_ms()
        for clock in clocks:
            self._heard_ms[clock] = now_ms
        if self._listeners:
            self._announce_falls()

    @property
    def _folds_records(self) -> bool:
        """Whether kernels fold records of other routers.

        The modes that read engines' reports need to know more of each booking than kernels return.
        """
        return self._unreported is None and self._loads.folds_records

    def _decode(self, position: int, value: bytes | None, bad: list[tuple[int, BadRecord]]) -> _Content | None:
        try:
            return None if value is None else _Content(*self._decoder.decode(value))
        except BadRecord as exc:
            bad.append((position, exc))
            return None

    def _leave_to_python(self, read: LoadFields) -> None:
        """Leave to Python what names a booking that was moved here, or a request of which calls or an end are known."""
        attempts, buffered, has_moves = self._attempts, self._buffered, self._attempts.has_moves
        request_ids = read.request_ids() if buffered or attempts.has_ends else ()
        for number, kind in enumerate(read.kinds):
            is_left = False
            if kind == ADD and request_ids:
                request_id = request_ids[number]
                is_left = attempts.has_ended(request_id) or (
                    bool(buffered) and any(key in buffered for key in self._keys_of(request_id, None))
                )
            elif has_moves and kind in (PREFILL, FREE):
                is_left = attempts.was_moved(read.booking_id(number))
            if is_left:
                read.kinds[number] = read.fields[number, FIELD_KIND] = OTHER

    def _fold_content(self, content: _Content, value: bytes, at_ms: int, clock: int) -> None:
        booking_id, phase, booking = content
        loads = self._loads
        is_plain = self._unreported is None
        if phase is BookingPhase.FREE:
            self._attempts.forget_made(booking_id)
        if is_plain and phase is BookingPhase.FREE:
            loads.free(booking_id, at_ms, clock)
        elif booking is None:
            self._apply(booking_id, phase, at_ms, clock)
        elif is_plain and booking_id.router_id != self.router_id and loads.add_new(booking_id, booking, at_ms, clock):
            if self._buffered:
                self._release_buffered(booking_id, booking.phase)
        else:
            n_before = self._output_blocks_of(booking_id) if booking_id.router_id == self.router_id else 0
            self._fold_add(booking_id, booking, value, at_ms, clock)
            if booking.output_blocks < n_before:
                self._lowered[booking_id] = max(n_before, self._lowered.get(booking_id, 0))

    def _output_blocks_of(self, booking_id: BookingId) -> int:
        booking = self._loads.booking(booking_id)
        return 0 if booking is None else booking.output_blocks

    def _correct_lowered(self) -> None:
        """Publish this router's bookings again whose output is smaller in the log than it was before.

        A router writes such a record if it has not read the last report yet. Each router corrects its own bookings, so
        that all of them end with the greatest report. Nothing is to be done if a later record is on its way.
        """
        for booking_id, n_blocks in self._lowered.items():
            booking, own = self._loads.booking(booking_id), self._own.get(load_key(booking_id, BookingPhase.ADD))
            coming = 0 if own is None or own[1].booking is None else own[1].booking.output_blocks
            if booking is not None and max(booking.output_blocks, coming) < n_blocks:
                grown = booking._replace(output_blocks=n_blocks)
                self._loads.add(booking_id, grown, self._local_time())
                self._publish(booking_id, BookingPhase.ADD, grown)
        self._lowered.clear()

    def reset(self) -> None:
        """Drop all bookings, so that the topic can be folded again from its beginning.

        This router's own bookings return from the topic too, under its former id. Without router_replica_sync nothing
        is dropped, since its bookings are nowhere else.
        """
        if not self._shared:
            return
        with self._decoding:
            self._own.clear()  # they are read again under the former id
        with self._lock:
            self._begin()
            self._falls_announced = -1  # all loads are 0 now
            if self._listeners:
                self._announce_falls()

    def flush(self, timeout_s: float) -> None:
        """Wait until Kafka has acknowledged everything that was published, or until timeout_s has passed."""
        until_s = time.monotonic() + timeout_s
        while True:
            self._outbox.pump()
            left = self._kafka.flush(min(0.1, timeout_s))
            if (not left and not len(self._outbox)) or time.monotonic() >= until_s:
                return

    def poll(self) -> None:
        """Expire bookings, and write ticks to quiet partitions. Unless a thread does this, send waiting records."""
        if not self._outbox.started:
            self._outbox.pump()
        self._kafka.poll(0)  # ticks are acknowledged here; the thread that sends records may be asleep
        with self._lock:
            self._expire()
            if self._listeners:
                self._announce_falls()
            if self._shared:
                self._tick()

    # -- records -------------------------------------------------------------------------------------------------------

    def _fold_add(self, booking_id: BookingId, booking: Booking, value: bytes, at_ms: int, clock: int) -> None:
        if self._unlogged.pop(booking_id, None) is not None:
            self._sent.discard(booking_id)
        self._ended_unlogged.pop(booking_id, None)
        if self._loads.logged(booking_id, booking, at_ms, clock):
            return
        # Another router's booking, or an older version of one of this router's own. If a booking has two adds,
        # the later one in the log wins, whichever router wrote it, so that all routers end with the same booking.
        before = self._loads.live_ids_of(booking_id.request_id, booking.phase)
        self._add(booking_id, booking, at_ms, clock)
        self._release_buffered(booking_id, booking.phase)
        if booking_id not in before and booking_id in self._loads.live_ids(booking_id.request_id):
            self._yield_to(booking_id, before, value)

    def _add(
        self, booking_id: BookingId, booking: Booking, at_ms: int | None, clock: int = 0, *, is_new: bool = False
    ) -> None:
        if self._unreported is None:
            self._loads.add(booking_id, booking, at_ms, clock, is_new=is_new)
            return
        before = self._loads.load(booking.rank)
        self._loads.add(booking_id, booking, at_ms, clock, is_new=is_new)
        after = self._loads.load(booking.rank)
        if (
            after.requests > before.requests
        ):  # otherwise it has ended, or replaces an earlier record of the same booking
            n_partial = booking.request_blocks - len(booking.sequence) // _BYTES_PER_HASH
            n_blocks = after.decode_blocks - before.decode_blocks + n_partial
            self._unreported.add(booking_id, booking.rank, n_blocks, self._now_ms())

    def _yield_to(self, newer: BookingId, before: tuple[BookingId, ...], value: bytes) -> None:
        """End this router's booking if another router booked the same request id and phase later.

        before: the active bookings of that id and phase until then. Each router ends only its own. value: the record
        of the newer one. The order of the log decides only between bookings of the same millisecond: while Kafka is
        away, the records of two routers wait, and come into the log in any order. If one of the times is not known
        here, the other router decides: if both could take theirs for the earlier one, both would end.
        """
        if newer.router_id == self.router_id:
            return
        own = [booking_id for booking_id in before if booking_id.router_id == self.router_id]
        newer_ms = time_written_ms(value) if own else 0
        for booking_id in own:
            made_ms = self._attempts.made_ms(booking_id)
            if made_ms is None or not newer_ms:
                continue
            # One of this router that has not been read back from the log is the later one there.
            if made_ms > newer_ms or (made_ms == newer_ms and booking_id in self._unlogged):
                self._note_move(newer, booking_id, made_ms)
            else:
                self._note_move(booking_id, newer, newer_ms)
                self._publish_phase(booking_id, BookingPhase.FREE, _REPLACED)

    def _note_end(self, request_id: str, phase: str | None, at_ms: int) -> None:
        """Remember that a client ended a request, if no record says so to the other routers.

        One of them may have booked it too, and this router has not read that booking yet. phase: the one that the call
        named, or None. at_ms: the wall-clock time of the call.
        """
        if self._shared:
            self._attempts.note_end(request_id, phase, at_ms, self._now_ms())

    def _own_ended_by(self, freed: BookingId, value: bytes) -> list[BookingId]:
        """This router's bookings of a request that a client ended elsewhere after they were made.

        That router knew another booking of the request, which the record names, and has not read these. value: the
        record, which is not folded yet. If the booking that it names is of one phase, the client may have ended that
        phase alone; then the router that was asked remembers it (`report_phase`).
        """
        loads = self._loads
        if not loads.has_objects(freed.request_id):
            return []
        own = [each for each in loads.live_ids(freed.request_id) if each.router_id == self.router_id and each != freed]
        reported_ms = time_written_ms(value) if own else _REPLACED
        if reported_ms == _REPLACED:
            return []
        booking = loads.booking(freed)
        if booking is None:  # it has ended, or is not known
            is_of_phase = any(loads.knows(freed.request_id, each) for each in ("prefill", "decode"))
        else:
            is_of_phase = booking.phase is not None
        if is_of_phase:
            return []
        return [each for each in own if (self._attempts.made_ms(each) or reported_ms) < reported_ms]

    def _follow_end(self, booking_id: BookingId, phase: str | None, value: bytes) -> None:
        """End a booking that was read, if another router made it before a client ended the request here."""
        ended_ms = self._attempts.ended_ms(booking_id.request_id, phase)
        if not ended_ms or booking_id.router_id == self.router_id or self._loads.booking(booking_id) is None:
            return
        # One of the same millisecond is probably the next one of this id, after which no other call may come.
        if 0 < time_written_ms(value) < ended_ms:
            self._publish_phase(booking_id, BookingPhase.FREE, ended_ms)

    def _note_move(self, former: BookingId, latter: BookingId, at_ms: int) -> None:
        """Remember a move, so that what a client then reports of the former booking applies to the new one.

        Another router knows the former one only, until it has read the move. at_ms: the wall-clock time of the move.
        """
        if self._shared:
            self._attempts.note_move(former, latter, at_ms, self._now_ms())

    def _wall_of(self, monotonic_ms: int) -> int:
        return self._wall_ms() - (self._now_ms() - monotonic_ms)

    def _follow_moves(self, content: _Content, value: bytes) -> None:
        """Apply a report that was read to the booking that has replaced the one which it names.

        This router must have moved that one, and not after the report. A report that came before the move is about an
        attempt that is over, as that of a client which ends a request and then repeats it under its id.
        """
        booking_id = content.booking_id
        if content.phase is BookingPhase.ADD or not self._attempts.was_moved(booking_id):
            return
        reported_ms = time_written_ms(value)
        if reported_ms == _REPLACED:
            return
        followed = {booking_id}  # records of a faulty writer may form a circle
        once = content.phase is BookingPhase.FREE  # otherwise two routers could answer each other without end
        while (latter := self._attempts.moved_to(booking_id, reported_ms, once=once)) is not None:
            booking_id = latter
            if booking_id in followed:
                return
            followed.add(booking_id)
            # Another router may have ended it, because it moved it on. It waits for this report as well.
            if content.phase is BookingPhase.FREE or (
                self._loads.booking(booking_id) is not None and not self._loads.is_prefilled(booking_id)
            ):
                self._publish_phase(booking_id, content.phase, reported_ms)

    def _publish_phase(self, booking_id: BookingId, phase: BookingPhase, reported_ms: int | None = None) -> bool:
        """Apply a phase and publish it. reported_ms: when a client reported it, if that is not now, or _REPLACED.

        Returns False if the booking ended before it was sent, so that nothing is published.
        """
        self._apply(booking_id, phase, self._local_time())
        since_ms = self._unlogged.get(booking_id)
        if phase is BookingPhase.FREE:
            self._attempts.forget_made(booking_id)
        if phase is BookingPhase.FREE and since_ms is not None:
            was_sent = booking_id in self._sent
            self._sent.discard(booking_id)
            del self._unlogged[booking_id]
            # An update of a booking may wait while the booking itself was sent and not read back yet.
            if not was_sent and self._outbox.withdraw(load_key(booking_id, BookingPhase.ADD)):
                # The booking ended before it was sent, as short ones do while Kafka is away. No other router needs it,
                # and the log will never give its end a time.
                self._outbox.discard(load_key(booking_id, BookingPhase.PREFILL))
                self._loads.free(booking_id, self._now_ms(), _OWN_CLOCK)
                return False
            self._ended_unlogged[booking_id] = since_ms
            if len(self._ended_unlogged) > BOOKINGS_MAX:
                self._loads.forget(self._ended_unlogged.popitem(last=False)[0])
        self._publish(booking_id, phase, None, reported_ms)
        return True

    def _grow(self, booking_id: BookingId, output_tokens: int) -> None:
        booking = self._loads.booking(booking_id)
        if booking is None:
            return  # a buffered call whose booking had ended before it arrived
        grown = with_output(booking, output_tokens, self._block_size_of(booking.model))
        if grown is booking:
            renewal = self._loads.renewal(booking_id)
            # Without output, the add would let a prompt wait again that has aged (rank_times).
            if renewal is None or not booking.output_blocks or not self._is_due(renewal):
                return
            grown = renewal.booking
        self._loads.add(booking_id, grown, self._local_time())
        self._publish(booking_id, BookingPhase.ADD, grown)

    def _is_due(self, renewal: Renewal) -> bool:
        """Whether a booking ends soon enough, by the clock that ends it."""
        now_ms = self._stream_ms[renewal.clock] if self._shared else self._now_ms()
        return now_ms - renewal.last_record_ms >= self._ttl_ms * _RENEWED_AFTER

    def _apply(self, booking_id: BookingId, phase: BookingPhase, at_ms: int | None, clock: int = 0) -> None:
        if phase is BookingPhase.PREFILL:
            self._loads.prefill_complete(booking_id, at_ms, clock)
        else:
            self._loads.free(booking_id, at_ms, clock)
            if self._unreported is not None:
                self._unreported.end(booking_id)

    def _local_time(self) -> int | None:
        """The time of this router's own records: None, since the log has yet to set it; without a log, local time."""
        return None if self._shared else self._now_ms()

    def _live_ids(self, request_id: str, phase: str | None) -> tuple[BookingId, ...]:
        """The active bookings to which a call applies."""
        return self._loads.live_ids(request_id) if phase is None else self._loads.live_ids_of(request_id, phase)

    def _buffer_call(self, request_id: str, call: _Call, phase: str | None, output_tokens: int = 0) -> None:
        before = self._buffered.pop((request_id, call, phase), None)
        if before is not None:
            output_tokens = max(output_tokens, before.output_tokens)
        phases = _PHASES if phase is None else (phase,)
        of_refused = (
            frozenset(each for each in phases if (request_id, each) in self._refused) if self._refused else _NONE
        )
        self._buffered[request_id, call, phase] = _BufferedCall(self._now_ms(), output_tokens, of_refused)
        if len(self._buffered) > BUFFERED_CALLS_MAX:
            self._buffered.popitem(last=False)
            self.unknown_calls += 1

    def _begin_anew(self, request_id: str, phase: str | None) -> None:
        """Drop the calls for an earlier request of this id and phase, which this router refused."""
        self._refused.pop((request_id, phase), None)
        for key in self._keys_of(request_id, phase):
            call = self._buffered.get(key)
            if call is not None and phase in call.of_refused:
                del self._buffered[key]
                self.unknown_calls += 1

    def _keys_of(self, request_id: str, phase: str | None) -> list[tuple[str, _Call, str | None]]:
        """Where the calls are buffered that a booking of this id and phase would get."""
        calls: tuple[_Call, ...] = ("output", BookingPhase.PREFILL, BookingPhase.FREE)
        return [(request_id, call, each) for each in {None, phase} for call in calls]

    def _release_buffered(self, booking_id: BookingId, phase: str | None) -> None:
        """Apply the calls that waited for this booking: those of its phase, and those that named none."""
        if not self._buffered:
            return
        request_id = booking_id.request_id
        phases = (None,) if phase is None else (None, phase)
        for each in phases:
            output = self._buffered.pop((request_id, "output", each), None)
            if output is not None:
                self._grow(booking_id, output.output_tokens)
        for what in (BookingPhase.PREFILL, BookingPhase.FREE):
            waited = [(each, self._buffered.pop((request_id, what, each), None)) for each in phases]
            reported_ms = {each: self._wall_of(call.since_ms) for each, call in waited if call is not None}
            if reported_ms:
                self._publish_phase(booking_id, what, max(reported_ms.values()))
            if what is BookingPhase.FREE:  # this booking may have ended before, and others may be on their way
                for each, at_ms in reported_ms.items():
                    self._note_end(request_id, each, at_ms)

    def _publish(
        self, booking_id: BookingId, phase: BookingPhase, booking: Booking | None, written_at_ms: int | None = None
    ) -> None:
        if self._shared:
            if written_at_ms is None:
                # An add says when its booking was made, also when it is written again. Only its own router knows that.
                written_at_ms = (
                    self._attempts.made_ms(booking_id) or _UNKNOWN if phase is BookingPhase.ADD else self._wall_ms()
                )
            self._outbox.put(
                load_key(booking_id, phase),
                _Unsent(_Content(booking_id, phase, booking), written_at_ms),
                request_partition(booking_id.request_id, self._topic.partitions),
                _RECORD_BYTES if booking is None else _RECORD_BYTES + len(booking.sequence),
            )

    def _encode(self, records: Sequence[tuple[bytes, _Unsent]]) -> list[bytes]:
        """Encode records that are about to be sent, and remember them until they are read back."""
        values = [encoded_load(*content, written_at_ms) for _, (content, written_at_ms) in records]
        with self._lock:
            for (key, (content, _)), value in zip(records, values, strict=True):
                self._own[key] = (value, content)
                if content.booking_id in self._unlogged:
                    self._sent.add(content.booking_id)
            while len(self._own) > _OWN_RECORDS_MAX:
                self._own.popitem(last=False)
        return values

    # -- time ----------------------------------------------------------------------------------------------------------

    def _note_time(self, append_ms: int, *, live: bool) -> None:
        """Take in the append time of a record that was read now."""
        now_ms = self._now_ms()
        with self._lock:
            jumped_ms = self._log_clock.note(append_ms, now_ms, live=live)
            if not jumped_ms:
                return
            self._expired_ms = -1  # what is not due at this local time by the former estimate may be due by this one
            if self._unlogged:
                self._loads.shift(self._unlogged, jumped_ms)
                self._loads.advance(self._log_clock.now_ms(now_ms))

    def _expire(self) -> None:
        now_ms = self._now_ms()
        if now_ms == self._expired_ms:  # nothing that was made within this millisecond expires in it
            return
        self._expired_ms = now_ms
        self._loads.advance(self._log_clock.now_ms(now_ms))
        self._loads.expire(now_ms, _OWN_CLOCK if self._shared else 0)
        # Bookings that never reached the log expire by this router's clock.
        for unlogged in (self._unlogged, self._ended_unlogged):
            while unlogged:
                booking_id = next(iter(unlogged))
                if unlogged[booking_id] + self._ttl_ms > now_ms:
                    break
                del unlogged[booking_id]
                self._sent.discard(booking_id)
                self._attempts.forget_made(booking_id)
                self._loads.forget(booking_id)
                for phase in BookingPhase:
                    self._outbox.discard(load_key(booking_id, phase))
        while self._buffered:
            oldest = next(iter(self._buffered))
            if self._buffered[oldest].since_ms + BUFFERED_CALL_TTL_MS > now_ms:
                break
            del self._buffered[oldest]
            self.unknown_calls += 1
        while self._refused:
            first = next(iter(self._refused))
            if self._refused[first] + BUFFERED_CALL_TTL_MS > now_ms:
                break
            del self._refused[first]
        self._attempts.expire(now_ms)

    def _tick(self) -> None:
        """Write a tick to partitions that have bookings but no new records, so that their time advances.

        If there are no bookings, one partition gets a tick as long as `in_sync` is read. Otherwise a scope that was
        idle when Kafka went away would call its first answers exact.
        """
        now_ms = self._now_ms()
        quiet = [clock for clock in self._loads.expiring() if clock != _OWN_CLOCK]
        if self._sync_was_read and not quiet:
            quiet = [_PROBED]
        self._sync_was_read = False
        for partition in quiet:
            if partition in self._ticking or now_ms - self._heard_ms[partition] < QUIET_MS:
                continue

            def on_delivery(error: KafkaError | None, _: Message, partition: int = partition) -> None:
                with self._lock:
                    del self._ticking[partition]
                    if error is None:  # the tick will be read, so that no other is needed before that
                        self._heard_ms[partition] = self._now_ms()

            try:
                self._kafka.produce(
                    self._topic.name, key=TICK_KEY, value=None, partition=partition, on_delivery=on_delivery
                )
            except (BufferError, KafkaException):
                continue  # Kafka is unreachable, as the waiting records show
            self._ticking[partition] = now_ms
