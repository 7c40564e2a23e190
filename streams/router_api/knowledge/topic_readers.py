"""The threads that read a router's topics, from their beginnings or from their ends, and keep reading.

What lives here: consuming, and noticing when each partition's end is first reached. What must not: the meaning of
records.

Up to their ends, topics are read as fast as possible, by several threads. From then on, one thread reads all of them
and pauses after each time: every wake-up of a thread takes the interpreter from the thread that answers requests.
When four threads read on, they woke up for each transaction of an agent, 1,600 times per second at 1,000 event records
per second. Records of one partition arrive in order from one thread. Only one thread at a time holds the lock that is
needed to write to the index, for 128 records, so more threads than cores do not help.
Topics with an interval have a thread of their own. The messages from one call of the client are folded
together, by topic: folding run records as a batch takes a twentieth of the time of folding them one by one.
A replay does not follow the topics: it reads to offsets that it names, and may then read on to others (`read_until`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from streams.errors import BadRecord, OffsetLost
from streams.kafka.clients import Record, as_record, assign, consume, fetched_in_intervals, reader
from streams.settings import RouterSettings
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: The fixed cost of a call, about 10 us, is then 20 ns per record. 500 records of 600 bytes take 300 KB, which stay in
#: the CPU cache until they are decoded.
_CONSUME_RECORDS = 500
_POLL_S = 0.1
_RESTART_S = 1.0

#: How often a thread checks whether others have read the topics that come first.
_FIRST_POLL_S = 0.01

#: Fetches of the thread that takes partitions over wait this long for a record, which ends them at once. Those of other
#: threads are short (kafka.reader), since a partition's end is known by a fetch that found nothing.
_FETCH_WAIT_MS = 500

#: That thread pauses after each time, while messages collect in the client. Without the pause it would wake up for each
#: transaction of an agent, 400 times per second. Events are known half of it later.
_PAUSE_S = 0.003

#: For topics with an interval, the client gets what has come in one answer of the broker, partition by partition. After
#: its first message the rest is there within this time.
_COLLECT_S = 0.001

#: Each broker answers once per interval, at a time of its own. Their thread then pauses for this share of the interval,
#: while answers of other brokers collect in the client. With one broker, the pause ends before the next answer comes.
_PAUSED_SHARE = 0.5

#: Called with messages without errors, in order for each partition, and with whether all of them were written after
#: their partitions' ends were first reached. Returns the messages that cannot be used, each with its position.
Fold = Callable[[Sequence[Message], bool], list[tuple[int, BadRecord]]]


@dataclass(frozen=True, slots=True)
class _Share:
    """What one thread reads. interval_s: as in Feed; None if it hands partitions over at their ends, or takes them.

    takes_over: it reads what others have read to the ends. folding: held while the thread folds what follows the ends.
    """

    partitions: list[tuple[str, int]]
    interval_s: Callable[[], float] | None = None
    takes_over: bool = False
    folding: threading.Lock = field(default_factory=threading.Lock)


class _HandOver(NamedTuple):
    """A partition that was read to its end, and the offset that follows."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Feed:
    """One topic and its fold, which any of the threads may call.

    from_end: skip messages that are already there. interval_s: read what has come about once in this time, which may
    change, by a thread of its own; None: read the topic with all others that have none. is_first: those others are read
    once this one was read to its end.
    """

    topic: TopicSpec
    fold: Fold
    from_end: bool = False
    interval_s: Callable[[], float] | None = None
    is_first: bool = False


def one_by_one(fold: Callable[[Record], None]) -> Fold:
    """Make a fold from a function that takes one record and raises BadRecord for one that cannot be used."""
    return one_by_one_live(lambda record, _: fold(record))


def one_by_one_live(fold: Callable[[Record, bool], None]) -> Fold:
    """The same for a function that is also given whether the record was written after the end was first reached."""

    def fold_all(messages: Sequence[Message], live: bool) -> list[tuple[int, BadRecord]]:
        bad = []
        for position, message in enumerate(messages):
            try:
                fold(as_record(message), live)
            except BadRecord as exc:
                bad.append((position, exc))
        return bad

    return fold_all


def key_and_value(message: Message) -> tuple[bytes, bytes | None]:
    """Key and value of a message without an error. A missing key is b""."""
    return message.key() or b"", message.value()


class Feeds:
    """Reads whole topics. `pending` shows which partitions have not been read to their ends since the start.

    Partitions are divided among `router_event_threads` threads, each with its own consumer, so that one decodes while
    another one folds. At its end, each partition is handed over to one thread, which reads all of them from then on.
    Each topic with an interval has one more thread, from its beginning on. Each fold has its own
    lock. Records of one partition come in order, from one thread at a time.
    """

    def __init__(self, settings: RouterSettings, feeds: Mapping[str, Feed], on_restart: Callable[[], None]):
        """feeds: keyed by the names that `pending` shows. on_restart: called before all topics are read again."""
        self._settings = settings
        self._folds = {feed.topic.name: (name, feed.fold) for name, feed in feeds.items()}
        self._specs = [feed.topic for feed in feeds.values()]
        self._intervals = {feed.topic.name: feed.interval_s for feed in feeds.values() if feed.interval_s is not None}
        self._handing_over = [feed.topic for feed in feeds.values() if feed.interval_s is None]
        self._first = frozenset(feed.topic.name for feed in feeds.values() if feed.is_first)
        self._from_end = frozenset(feed.topic.name for feed in feeds.values() if feed.from_end)
        self._handed_over: queue.SimpleQueue[_HandOver] = queue.SimpleQueue()  # a new one for each start of the threads
        self._on_restart = on_restart
        self._pending = self._all_partitions()
        self._read_to: dict[tuple[str, int], int] = {}  # by topic and partition; one thread writes each of them
        self._followed: list[_Share] = []  # of the threads that read on after the ends
        self._over = threading.Event()  # set when the running threads end, so that all topics are read again
        self._stopping = threading.Event()
        self._counting = threading.Lock()
        self.bad_records = 0
        self.n_records = 0  # those that `read_until` has folded
        self._thread = threading.Thread(target=self._run, name="feeds", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the threads."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def topics(self) -> tuple[TopicSpec, ...]:
        """The topics that are read."""
        return tuple(self._specs)

    def pending(self) -> dict[str, int]:
        """Number of partitions, by feed, that have not been read to their ends; empty when all have."""
        waiting: dict[str, int] = {}
        if not self._pending:  # every request asks
            return waiting
        for topic, _ in list(self._pending):  # a copy, in one step, since the threads change it meanwhile
            name = self._folds[topic][0]
            waiting[name] = waiting.get(name, 0) + 1
        return waiting

    @contextmanager
    def paused(self) -> Iterator[dict[str, list[int]]]:
        """Fold nothing until the block ends, which must be soon; gives the offsets up to which topics are folded.

        They are by topic and partition. Every topic must have been read to its end (`pending`).
        """
        with ExitStack() as held:
            for share in self._followed:
                held.enter_context(share.folding)
            yield {spec.name: [self.read_to(spec.name, n) for n in range(spec.partitions)] for spec in self._specs}

    def read_to(self, topic: str, partition: int) -> int:
        """Offset up to which a partition has been folded, markers included; 0 before the first record."""
        return self._read_to.get((topic, partition), 0)

    @property
    def begins_again(self) -> bool:
        """Whether all topics are about to be read again, while the view still has what was read before."""
        return self._over.is_set()

    def read_until(self, ends: Mapping[tuple[str, int], int], while_reading: Callable[[], None]) -> None:
        """Read from the beginning, or from where the last call ended, to exactly these offsets, and return.

        For a replay, which does not call `start`. ends: by topic and partition, at most the end of committed records.
        while_reading: called several times per second. Raises OffsetLost if a topic was truncated or recreated
        meanwhile, and KafkaException for fatal errors.
        """
        places = sorted(place for place, end in ends.items() if end > self.read_to(*place))
        self._pending = set(places)
        n_threads = self._settings.router_event_threads
        shares = [[place for place in places if place[1] % n_threads == number] for number in range(n_threads)]
        with ThreadPoolExecutor(n_threads, thread_name_prefix="feeds") as threads:
            reading = [threads.submit(self._read_share_until, share, ends) for share in shares if share]
            try:
                while wait(reading, _POLL_S).not_done:
                    while_reading()
                    for failed in [each for each in reading if each.done() and each.exception()]:
                        failed.result()
            except BaseException:
                self._stopping.set()  # the other threads
                raise
        for each in reading:
            each.result()

    def read_again(self) -> None:
        """Read all topics from their beginnings, since one of them was recreated."""
        self._over.set()

    def _all_partitions(self) -> set[tuple[str, int]]:
        return {(spec.name, partition) for spec in self._specs for partition in range(spec.partitions)}

    def _shares(self) -> list[_Share]:
        """Partitions of each thread. The threads' numbers of partitions of one topic differ by at most one."""
        n_threads = self._settings.router_event_threads
        shares = [_Share([]) for _ in range(n_threads)]
        in_intervals = {topic: _Share([], interval_s) for topic, interval_s in self._intervals.items()}
        for topic, partition in sorted(self._pending):
            share = in_intervals.get(topic) or shares[partition % n_threads]
            share.partitions.append((topic, partition))
        with_partitions = [share for share in (*shares, *in_intervals.values()) if share.partitions]
        return [_Share([], takes_over=True), *with_partitions]

    def _run(self) -> None:
        """Run the threads until `stop`. If one of them ends by itself, all of them start again."""
        while not self._stopping.is_set():
            self._over.clear()
            self._handed_over = queue.SimpleQueue()
            shares = self._shares()
            self._followed = [share for share in shares if share.takes_over or share.interval_s is not None]
            threads = [
                threading.Thread(target=self._read_share, args=(share,), name=f"feeds-{number}", daemon=True)
                for number, share in enumerate(shares)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if not self._stopping.is_set():
                self._stopping.wait(_RESTART_S)
                # In this order, so that no request is answered from a view that was just emptied.
                self._pending = self._all_partitions()
                self._read_to = {}
                self._on_restart()

    def _read_share(self, share: _Share) -> None:
        handed_over = False
        try:
            if share.interval_s is not None:
                self._read_in_intervals(share, share.interval_s)
                return
            consumer = self._reader({"fetch.wait.max.ms": _FETCH_WAIT_MS} if share.takes_over else {})
            try:
                if share.takes_over:
                    self._take_over(consumer, share)
                    return
                first = [each for each in share.partitions if each[0] in self._first]
                others = [each for each in share.partitions if each[0] not in self._first]
                handed_over = (
                    self._read_to_ends(consumer, first)
                    and self._first_are_read()
                    and self._read_to_ends(consumer, others)
                )
            finally:
                consumer.close()
        except Exception:
            log.exception("the router's topics are read again from their beginnings")
        finally:
            if not handed_over:
                self._over.set()

    def _reader(self, changes: dict[str, Any]) -> Consumer:
        """A reader that may read from a replica that is not the leader.

        That replica may lack the newest records for half a second. A router notices, as it compares what it has read
        with the ends that leaders state (TopicWatch). Readers that rely on the end of a partition must not do this.
        """
        rack = {"client.rack": self._settings.router_rack} if self._settings.router_rack else {}
        return reader(self._settings, **rack, **changes)

    def _start_of(self, topic: str) -> int:
        return OFFSET_END if topic in self._from_end else OFFSET_BEGINNING

    def _ended(self) -> bool:
        return self._stopping.is_set() or self._over.is_set()

    def _first_are_read(self) -> bool:
        """Wait until the topics that come first were read; returns False if the thread was stopped before."""
        while any(topic in self._first for topic, _ in self._pending.copy()):
            if self._ended():
                return False
            time.sleep(_FIRST_POLL_S)
        return True

    def _read_to_ends(self, consumer: Consumer, partitions: Sequence[tuple[str, int]]) -> bool:
        """Read until all partitions were handed over; returns False if the thread was stopped before, as in `_take`."""
        left = set(partitions)
        if left:
            assign(consumer, [TopicPartition(topic, number, self._start_of(topic)) for topic, number in partitions])
        while left:
            if self._ended():
                return False
            ends = self._take(consume(consumer, _CONSUME_RECORDS, _POLL_S), left)
            if ends is None:
                return False
            if ends:
                consumer.incremental_unassign([TopicPartition(end.topic, end.partition) for end in ends])
                for end in ends:
                    self._handed_over.put(end)
        return True

    def _read_share_until(self, share: Collection[tuple[str, int]], ends: Mapping[tuple[str, int], int]) -> None:
        """Read these partitions to their offsets of `ends`; see `read_until`."""
        left = set(share)
        consumer = reader(self._settings)
        try:
            begin = [TopicPartition(*place, self._read_to.get(place, OFFSET_BEGINNING)) for place in share]
            assign(consumer, begin)
            while left and not self._ended():
                messages, reached = _within(consume(consumer, _CONSUME_RECORDS, _POLL_S), ends)
                with self._counting:
                    self.n_records += len(messages)
                if self._take(messages) is None:
                    raise OffsetLost("a topic was truncated or recreated while it was read", remedy="Start again")
                reached &= left
                if reached:
                    consumer.incremental_unassign([TopicPartition(*place) for place in reached])
                    for place in reached:
                        self._read_to[place] = ends[place]
                    left -= reached
                    self._pending -= reached
        finally:
            consumer.close()

    def _take_over(self, consumer: Consumer, share: _Share) -> None:
        """Read all partitions from where they are handed over, until stopped; ends as `_read_in_intervals` does.

        It begins when it has all of them: a fetch that waits for one partition would delay those that come later.
        """
        taken: list[TopicPartition] = []
        while len(taken) < sum(topic.partitions for topic in self._handing_over):
            if self._ended():
                return
            with suppress(queue.Empty):
                taken.append(TopicPartition(*self._handed_over.get(timeout=_POLL_S)))
        assign(consumer, taken)
        while not self._ended():
            messages = consume(consumer, _CONSUME_RECORDS, _POLL_S)
            with share.folding:
                taken_all = self._take(messages) is not None
            if not taken_all:
                return
            if 0 < len(messages) < _CONSUME_RECORDS:
                time.sleep(_PAUSE_S)

    def _read_in_intervals(self, share: _Share, interval_s: Callable[[], float]) -> None:
        """Read until stopped, or until a topic was truncated or recreated; raises KafkaException for fatal errors.

        How long a fetch takes is fixed for a client. So there is one client for each interval that was asked for.
        """
        readers: dict[float, Consumer] = {}
        where = [TopicPartition(topic, number, self._start_of(topic)) for topic, number in share.partitions]
        try:
            while not self._ended():
                present_s = interval_s()
                if present_s not in readers:
                    readers[present_s] = self._reader(fetched_in_intervals(present_s))
                consumer = readers[present_s]
                assign(consumer, where)
                if not self._read_while(consumer, share, present_s, interval_s):
                    return
                # All that was consumed has been folded. A partition of which nothing was consumed was read to its end.
                where = [
                    TopicPartition(
                        position.topic, position.partition, max(position.offset, self.read_to(*_named(position)))
                    )
                    for position in consumer.position(where)
                ]
                consumer.unassign()
        finally:
            for consumer in readers.values():
                consumer.close()

    def _read_while(self, consumer: Consumer, share: _Share, present_s: float, interval_s: Callable[[], float]) -> bool:
        """Read as long as the interval stays the same; returns False if that ends for another reason."""
        is_at_end = False
        while not self._ended():
            is_at_end = is_at_end or self._pending.isdisjoint(share.partitions)
            messages = consume(consumer, _CONSUME_RECORDS, _POLL_S, _COLLECT_S if is_at_end else 0.0)
            with share.folding:
                taken_all = self._take(messages) is not None
            if not taken_all:
                return False
            if not is_at_end:
                continue
            if interval_s() != present_s:
                return True
            if 0 < len(messages) < _CONSUME_RECORDS:
                time.sleep(present_s * _PAUSED_SHARE)
        return False

    def _take(
        self, messages: Sequence[Message], hands_over: set[tuple[str, int]] | None = None
    ) -> list[_HandOver] | None:
        """Fold messages; returns the partitions that are handed over, or None if all topics must be read again.

        hands_over: the partitions that are handed over at their ends, and are then removed from it. What follows in
        them is left to the thread that takes them. None: none is handed over. Raises KafkaException for fatal errors.
        """
        batches: dict[tuple[str | None, bool], list[Message]] = {}
        ends: list[_HandOver] = []
        reached: dict[tuple[str, int], int] = {}  # ends of partitions; what comes before them is folded first
        for message in messages:
            error, topic = message.error(), message.topic()
            if error is None:
                if hands_over is not None and (topic, message.partition()) not in hands_over:
                    continue
                live = not self._pending or (topic, message.partition()) not in self._pending
                batches.setdefault((topic, live), []).append(message)
                continue
            if error.code() == KafkaError._PARTITION_EOF:
                partition = message.partition()
                assert topic is not None and partition is not None  # this error always names both
                if (topic, partition) in self._pending:
                    # It stays pending until everything before its end has been folded. Later ends come with nearly
                    # every record, and folding at each of them would divide what was read together.
                    self._fold(batches)
                    self._pending.discard((topic, partition))
                end = message.offset()  # after any marker
                if end is not None and (hands_over is None or (topic, partition) in hands_over):
                    reached[topic, partition] = end
                    if hands_over is not None:
                        hands_over.discard((topic, partition))
                        ends.append(_HandOver(topic, partition, end))
                continue
            self._fold(batches)
            if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                log.warning("%s was truncated or recreated", topic)
                return None
            if error.fatal():
                raise KafkaException(error)
            log.warning("reading: %s", error.str())
        self._fold(batches)
        for of, end in reached.items():
            if end > self._read_to.get(of, 0):  # more records may have followed it
                self._read_to[of] = end
        return ends

    def _fold(self, batches: dict[tuple[str | None, bool], list[Message]]) -> None:
        """Fold the messages of each topic and empty the batches."""
        for (topic, live), messages in batches.items():
            assert topic is not None  # only an error may lack it
            for position, exc in self._folds[topic][1](messages, live):
                # Agents copy bad input to the dead letters. A bad record here comes from a foreign writer, or from a
                # newer version.
                message = messages[position]
                partition, offset = message.partition(), message.offset()
                assert partition is not None and offset is not None
                self._note_bad(topic, partition, offset, exc)
            # Up to the ends only the last message's: examining each of them would cost as much as a tenth of folding
            # it. A partition that is never the last one is noted at its end.
            for message in messages if live else messages[-1:]:
                partition, offset = message.partition(), message.offset()
                assert partition is not None and offset is not None
                self._read_to[topic, partition] = offset + 1
        batches.clear()

    def _note_bad(self, topic: str, partition: int, offset: int, exc: BadRecord) -> None:
        with self._counting:
            self.bad_records += 1
        log.warning("%s [%d] at %d: %s", topic, partition, offset, exc)


def _within(
    messages: Sequence[Message], ends: Mapping[tuple[str, int], int]
) -> tuple[list[Message], set[tuple[str, int]]]:
    """The messages before these offsets, without the ends of partitions; and the partitions that have reached them."""
    within: list[Message] = []
    reached: set[tuple[str, int]] = set()
    for message in messages:
        error, topic, partition, offset = message.error(), message.topic(), message.partition(), message.offset()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            within.append(message)  # it may name no partition
            continue
        assert topic is not None and partition is not None and offset is not None
        place = topic, partition
        if error is None and offset < ends[place]:
            within.append(message)
        if offset + (error is None) >= ends[place]:
            reached.add(place)
    return within, reached


def _named(place: TopicPartition) -> tuple[str, int]:
    return place.topic, place.partition
