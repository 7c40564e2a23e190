"""The records of one rank on their way to Kafka: in order, and CXL transitions before the batch that they follow.

What lives here: the producer of events, and one rank's records until Kafka has them. What must not: what a record
contains (rank_writer).

Agents park a transition that arrives early. In the other order, a bridge that crashed between the two and resumed after
its last batch would never publish the transition. Topics have different leaders, so a bridge's batch waits until Kafka
has acknowledged the transition. A publisher inside an engine does not wait, since nobody resumes its incarnation if it
crashes.

State: the records of one rank that wait.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from functools import partial

from confluent_kafka import KafkaError, Message, Producer

from streams.core.ids import WorkerId
from streams.engines.acknowledgements import Acknowledgements, tolerated_s
from streams.errors import KvStreamsError
from streams.kafka.clients import producer_of_kind, worker_key
from streams.kafka.holding_producer import HoldingProducer
from streams.settings import ScopeSettings
from streams.topics import topics

#: Records, and their kilobytes, that wait in the client of one process until Kafka takes them. While this buffer is
#: full, a bridge takes no further batches from its engines' sockets.
BUFFERED_RECORDS_MAX = 100_000
BUFFERED_KBYTES_MAX = 256 * 1024


#: How long the client waits for further records of a partition before it sends one. Each request costs it and the
#: broker about 0.1 ms of processor time, whatever it contains. With 4,000 batches per second over 8 partitions and the
#: usual 2 ms, nearly each batch would be a request of its own.
LINGER_MS = 5


def event_producer(settings: ScopeSettings) -> Producer:
    """Return a producer of events. It never drops a record, since only the engine could fill the gap.

    While Kafka is slower than the engines, its queue fills, up to the limits above. `RankRecords.send` then
    returns False, and keeps the records of the batch that did not fit.
    """
    limits = {
        "queue.buffering.max.messages": BUFFERED_RECORDS_MAX,
        "queue.buffering.max.kbytes": BUFFERED_KBYTES_MAX,
        "linger.ms": LINGER_MS,
    }
    kind = partial(
        HoldingProducer,
        partitions={spec.name: spec.partitions for spec in topics(settings).all()},
        n_max=BUFFERED_RECORDS_MAX,
        bytes_max=BUFFERED_KBYTES_MAX * 1024,
    )
    return producer_of_kind(kind, settings, {"message.timeout.ms": 0, **limits})


class RankRecords:
    """Sends one rank's records in the order given. Owner of the records that wait, and of their acknowledgements."""

    def __init__(
        self,
        settings: ScopeSettings,
        kafka: Producer,
        worker_id: WorkerId,
        in_flight: Counter[WorkerId] | None = None,
        *,
        may_resume: bool = False,
    ) -> None:
        """in_flight: counts each worker's records that Kafka has neither acknowledged nor refused, of several ranks.

        may_resume: the incarnation may go on after this process, so that its batches wait for their transitions.
        """
        self._kafka = kafka
        self._worker_id = worker_id
        self._key = worker_key(worker_id)
        self._in_flight = Counter[WorkerId]() if in_flight is None else in_flight
        self._may_resume = may_resume
        self._topic = topics(settings).kv_events.name
        self._cxl_topic = topics(settings).cxl_events.name
        self._transitions_sent = 0  # those that Kafka has neither acknowledged nor refused
        # Records of the last batch that the client had no space for, or that wait for its transitions.
        self._unsent: deque[tuple[str, bytes]] = deque()
        tolerated = tolerated_s(settings)
        self._acknowledgements = {topic: Acknowledgements(tolerated) for topic in (self._topic, self._cxl_topic)}
        self._on_delivery_of = {topic: partial(self._on_delivery, topic) for topic in self._acknowledgements}
        self.delivered = 0
        #: Why Kafka refused records, one text for each.
        self.failed: list[str] = []
        #: If a caller sets a list here, the offsets in `cxl-events` of all later transitions are appended to it.
        self.transitions_at: list[int] | None = None

    def put_batch(self, value: bytes) -> None:
        """Send a record of `kv-events` after all others."""
        self._put(self._topic, value)

    def put_transition(self, value: bytes) -> None:
        """Send a record of `cxl-events` after all others."""
        self._put(self._cxl_topic, value)

    def _put(self, topic: str, value: bytes) -> None:
        self._unsent.append((topic, value))
        self._acknowledgements[topic].written(time.monotonic())
        self.send()

    def send(self) -> bool:
        """Hand the records that wait to Kafka's client; return whether none waits any more.

        Call it before a batch, and write no batch while it returns False: the number of records that wait is limited
        only in that way.
        """
        waiting = self._unsent
        try:
            while waiting:
                topic, value = waiting[0]
                if topic == self._topic and self.waits_for_transitions:
                    return False
                self._kafka.produce(topic, key=self._key, value=value, on_delivery=self._on_delivery_of[topic])
                waiting.popleft()
                self._transitions_sent += topic == self._cxl_topic
                self._in_flight[self._worker_id] += 1
        except BufferError:
            return False
        return True

    @property
    def waits_for_transitions(self) -> bool:
        """Whether no batch may be sent now, because Kafka has not acknowledged a transition, or has refused one."""
        return self._may_resume and (self._transitions_sent > 0 or bool(self.failed))

    @property
    def has_unsent(self) -> bool:
        """Whether records wait for space in Kafka's client, or for transitions."""
        return bool(self._unsent)

    def send_within(self, timeout_s: float) -> None:
        """Block until no record waits. Raises KvStreamsError after the timeout; the records are kept."""
        deadline = time.monotonic() + timeout_s
        while not self.send():
            if time.monotonic() > deadline:
                raise KvStreamsError(f"Kafka took no event for {timeout_s:g} s")
            self._kafka.poll(0.05)
        self._kafka.poll(0)

    def withdraw(self) -> None:
        """Drop the records that wait, and forget those that Kafka refused: another incarnation begins."""
        self.failed.clear()
        while self._unsent:
            topic, _ = self._unsent.pop()
            self._acknowledgements[topic].withdrawn()

    def is_late(self, now_s: float) -> bool:
        """Whether Kafka has not taken a record for longer than an exact answer may lag behind the log.

        Also for as long after it has taken the record: only then has each router read it whose answers may be exact.
        """
        return any(waiting.are_late(now_s) for waiting in self._acknowledgements.values())

    def is_read(self, now_s: float) -> bool:
        """Whether the first record has been read by each router whose answers may be exact."""
        return self._acknowledgements[self._topic].is_first_read(now_s)

    def _on_delivery(self, topic: str, error: KafkaError | None, message: Message) -> None:
        self._acknowledgements[topic].ended(time.monotonic(), acknowledged=error is None)
        self._transitions_sent -= topic == self._cxl_topic
        worker_id = self._worker_id
        self._in_flight[worker_id] -= 1
        if not self._in_flight[worker_id]:
            del self._in_flight[worker_id]
        if error is None:
            self.delivered += 1
            if self.transitions_at is not None and topic == self._cxl_topic:
                self.transitions_at.append(message.offset() or 0)
        else:
            self.failed.append(error.str())
