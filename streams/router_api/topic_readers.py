"""The threads that read a router's topics, from their beginnings or from their ends, and keep reading.

What lives here: consuming, and noticing when each partition's end is first reached. What must not: the meaning of
records.

Up to their ends, topics are read as fast as possible, those with many records by several threads. From then on one
thread reads all topics of one interval, and only that often: each wake-up of a thread takes the interpreter from the
thread that answers requests. The messages from one call of the client are folded together, by topic: folding run
records as a batch takes a twentieth of the time of folding them one by one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from streams.errors import BadRecord
from streams.kafka import Record, as_record, assign, consume, fetched_in_intervals, reader
from streams.settings import Settings
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: The fixed cost of a call, about 10 us, is then 20 ns per record. 500 records of 600 bytes take 300 KB, which stay in
#: the CPU cache until they are decoded.
_CONSUME_RECORDS = 500
_POLL_S = 0.1
_RESTART_S = 1.0

#: How long the thread that partitions are handed over to waits for messages, until it has all of them.
_HANDED_OVER_POLL_S = 0.01

#: For topics with an interval, the client gets what has come in one answer of the broker, partition by partition. After
#: its first message the rest is there within this time.
_COLLECT_S = 0.001

#: Called with messages without errors, in order for each partition, and with whether all of them were written after
#: their partitions' ends were first reached. Returns the messages that cannot be used, each with its position.
Fold = Callable[[Sequence[Message], bool], list[tuple[int, BadRecord]]]


@dataclass(frozen=True, slots=True)
class _Share:
    """What one thread reads. interval_s: if it goes on after the ends; None if it hands partitions over there."""

    partitions: list[tuple[str, int]]
    interval_s: float | None = None


class _HandOver(NamedTuple):
    """A partition that was read to its end, and the offset that follows."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Feed:
    """One topic and its fold, which any of the threads may call.

    interval_s: once the topic's end was reached, read what has come at most once in this time, by one thread for all
    topics with this interval. from_end: skip messages that are already there. in_parallel: several threads read the
    topic up to its end.
    """

    topic: TopicSpec
    fold: Fold
    interval_s: float
    from_end: bool = False
    in_parallel: bool = False


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

    One thread for each interval reads its topics. Those that are read in parallel are first divided by partitions among
    `router_event_threads` further threads, each with its own consumer, so that one decodes while another one folds. At
    a partition's end such a thread hands it over to the thread of its interval. Each fold has its own lock. Records of
    one partition come in order, from one thread at a time.
    """

    def __init__(self, settings: Settings, feeds: Mapping[str, Feed], on_restart: Callable[[], None]):
        """feeds: keyed by the names that `pending` shows. on_restart: called before all topics are read again."""
        self._settings = settings
        self._folds = {feed.topic.name: (name, feed.fold) for name, feed in feeds.items()}
        self._specs = [feed.topic for feed in feeds.values()]
        self._intervals = {feed.topic.name: feed.interval_s for feed in feeds.values()}
        self._in_parallel = frozenset(feed.topic.name for feed in feeds.values() if feed.in_parallel)
        self._from_end = frozenset(feed.topic.name for feed in feeds.values() if feed.from_end)
        self._handed_over: dict[float, queue.SimpleQueue[_HandOver]] = {}  # by interval; new for each start of threads
        self._on_restart = on_restart
        self._pending = self._all_partitions()
        self._read_to: dict[tuple[str, int], int] = {}  # by topic and partition; one thread writes each of them
        self._over = threading.Event()  # set when the running threads end, so that all topics are read again
        self._stopping = threading.Event()
        self._counting = threading.Lock()
        self.bad_records = 0
        self._thread = threading.Thread(target=self._run, name="feeds", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the threads."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def pending(self) -> dict[str, int]:
        """Number of partitions, by feed, that have not been read to their ends; empty when all have."""
        waiting: dict[str, int] = {}
        if not self._pending:  # every request asks
            return waiting
        for topic, _ in list(self._pending):  # a copy, in one step, since the threads change it meanwhile
            name = self._folds[topic][0]
            waiting[name] = waiting.get(name, 0) + 1
        return waiting

    def read_to(self, topic: str, partition: int) -> int:
        """Offset up to which a partition has been folded, markers included; 0 before the first record."""
        return self._read_to.get((topic, partition), 0)

    def read_again(self) -> None:
        """Read all topics from their beginnings, since one of them was recreated."""
        self._over.set()

    def _all_partitions(self) -> set[tuple[str, int]]:
        return {(spec.name, partition) for spec in self._specs for partition in range(spec.partitions)}

    def _shares(self) -> list[_Share]:
        """Partitions of each thread. The numbers of partitions of one topic that two threads get differ by at most one.

        The thread of an interval runs even if all of its partitions are still read by others.
        """
        n_threads = self._settings.router_event_threads
        shares = [_Share([]) for _ in range(n_threads)]
        in_intervals = {interval_s: _Share([], interval_s) for interval_s in self._intervals.values()}
        for topic, partition in sorted(self._pending):
            in_parallel = topic in self._in_parallel
            share = shares[partition % n_threads] if in_parallel else in_intervals[self._intervals[topic]]
            share.partitions.append((topic, partition))
        return [*(share for share in shares if share.partitions), *in_intervals.values()]

    def _run(self) -> None:
        """Run the threads until `stop`. If one of them ends by itself, all of them start again."""
        while not self._stopping.is_set():
            self._over.clear()
            self._handed_over = {interval_s: queue.SimpleQueue() for interval_s in self._intervals.values()}
            threads = [
                threading.Thread(target=self._read_share, args=(share,), name=f"feeds-{number}", daemon=True)
                for number, share in enumerate(self._shares())
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
            in_intervals = {} if share.interval_s is None else fetched_in_intervals(share.interval_s)
            consumer = reader(self._settings, **in_intervals)
            try:
                # The leaders of partitions that others hand over later are looked up as well, which takes 0.5 s.
                interval_s = share.interval_s
                later = [name for name in self._in_parallel if self._intervals[name] == interval_s]
                where = [TopicPartition(topic, n, self._start_of(topic)) for topic, n in share.partitions]
                assign(consumer, where, later)
                if interval_s is None:
                    handed_over = self._read_to_ends(consumer, share)
                else:
                    self._read_on(consumer, share.partitions, interval_s)
            finally:
                consumer.close()
        except Exception:
            log.exception("the router's topics are read again from their beginnings")
        finally:
            if not handed_over:
                self._over.set()

    def _start_of(self, topic: str) -> int:
        return OFFSET_END if topic in self._from_end else OFFSET_BEGINNING

    def _ended(self) -> bool:
        return self._stopping.is_set() or self._over.is_set()

    def _read_to_ends(self, consumer: Consumer, share: _Share) -> bool:
        """Read until all partitions were handed over; returns False if the thread was stopped before, as in `_take`."""
        left = set(share.partitions)
        while left:
            if self._ended():
                return False
            ends = self._take(consume(consumer, _CONSUME_RECORDS, _POLL_S), left)
            if ends is None:
                return False
            if ends:
                consumer.incremental_unassign([TopicPartition(end.topic, end.partition) for end in ends])
                for end in ends:
                    self._handed_over[self._intervals[end.topic]].put(end)
        return True

    def _read_on(self, consumer: Consumer, partitions: Sequence[tuple[str, int]], interval_s: float) -> None:
        """Read until stopped, or until a topic was truncated or recreated; raises KafkaException for fatal errors."""
        handed_over = self._handed_over[interval_s]
        collect_s = 0.0  # while the topics are read up to their ends
        n_others = sum(spec.partitions for spec in self._specs if self._is_handed_over(spec.name, interval_s))
        while not self._ended():
            taken = [TopicPartition(*handed_over.get()) for _ in range(handed_over.qsize())]
            if taken:
                consumer.incremental_assign(taken)
                n_others -= len(taken)
            if not collect_s and not n_others and self._pending.isdisjoint(partitions):
                collect_s = _COLLECT_S
            messages = consume(consumer, _CONSUME_RECORDS, _HANDED_OVER_POLL_S if n_others else _POLL_S, collect_s)
            if self._take(messages) is None:
                return

    def _is_handed_over(self, topic: str, interval_s: float) -> bool:
        """Whether other threads read a topic up to its end, and then the one of this interval."""
        return topic in self._in_parallel and self._intervals[topic] == interval_s

    def _take(
        self, messages: Sequence[Message], hands_over: set[tuple[str, int]] | None = None
    ) -> list[_HandOver] | None:
        """Fold messages; returns the partitions that are handed over, or None if all topics must be read again.

        hands_over: the partitions that are handed over at their ends, and are then removed from it. What follows in
        them is left to the thread that takes them. None: none is handed over. Raises KafkaException for fatal errors.
        """
        batches: dict[tuple[str | None, bool], list[Message]] = {}
        ends: list[_HandOver] = []
        for message in messages:
            error, topic = message.error(), message.topic()
            if error is None:
                if hands_over is not None and (topic, message.partition()) not in hands_over:
                    continue
                live = not self._pending or (topic, message.partition()) not in self._pending
                batches.setdefault((topic, live), []).append(message)
                continue
            # A partition stays pending until everything before its end has been folded.
            self._fold(batches)
            if error.code() == KafkaError._PARTITION_EOF:
                partition = message.partition()
                assert topic is not None and partition is not None  # this error always names both
                self._pending.discard((topic, partition))
                end = message.offset()  # after any marker
                if end is not None and (hands_over is None or (topic, partition) in hands_over):
                    self._read_to[topic, partition] = end
                    if hands_over is not None:
                        hands_over.discard((topic, partition))
                        ends.append(_HandOver(topic, partition, end))
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                log.warning("%s was truncated or recreated", topic)
                return None
            elif error.fatal():
                raise KafkaException(error)
            else:
                log.warning("reading: %s", error.str())
        self._fold(batches)
        return ends

    def _fold(self, batches: dict[tuple[str | None, bool], list[Message]]) -> None:
        """Fold the messages of each topic and empty the batches."""
        for (topic, live), messages in batches.items():
            assert topic is not None  # only an error may lack it
            for position, exc in self._folds[topic][1](messages, live):
                # Agents copy bad input to the dead letters. A bad record here comes from a foreign writer, or from a
                # newer version.
                with self._counting:
                    self.bad_records += 1
                message = messages[position]
                log.warning("%s [%d] at %d: %s", topic, message.partition(), message.offset(), exc)
            # Only the last message's: examining each of them would cost as much as a tenth of folding it. A partition
            # that is never the last one is noted at its end.
            partition, offset = messages[-1].partition(), messages[-1].offset()
            assert partition is not None and offset is not None
            self._read_to[topic, partition] = offset + 1
        batches.clear()
