"""LMCache's topic as one bridge reads it: every partition, from positions that it chooses.

What lives here: the client, how far each partition has been read, and noticing that the topic cannot be read, has other
partitions, or was created anew. What must not: what a record says (wire), and who needs it (bridge).

State: the position in each partition.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from streams.errors import KvStreamsError
from streams.kafka.clients import consume, reader
from streams.kafka.outage import Outage, lasting
from streams.settings import ScopeSettings

log = logging.getLogger(__name__)

#: Records taken at a time; leases are renewed in between. As many as QUEUED_KBYTES hold take about a second.
READ_RECORDS = 500
POLL_S = 0.05

#: Wait for further records after the first one. A server sends several at a time, and each turn of the loop looks at
#: every feed.
_COLLECT_S = 0.02

#: Kilobytes of the topic that wait in the client.
QUEUED_KBYTES = 32 * 1024

_METADATA_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LmcacheSource:
    """Where the events are. kafka: its bootstrap servers; None for the scope's own."""

    topic: str
    kafka: str | None = None


class EventLog:
    """The topic. can_read: whether it could be read last. read_at: by partition, the offset of the next record.

    ends: where the partitions ended when reading began. What blocks is called on a thread, one call at a time.
    """

    def __init__(self, settings: ScopeSettings, source: LmcacheSource) -> None:
        self.topic = source.topic
        self.can_read = False
        self.read_at: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self._settings = replace(settings, kafka=source.kafka or settings.kafka)
        self._consumer: Consumer | None = None
        self._created_anew: set[int] = set()  # partitions whose offsets have begun again
        self._outage = Outage()

    def connect(self) -> dict[int, int]:
        """Begin with a new client; return where each partition ends. Blocks; raises KvStreamsError, KafkaException."""
        self.close()
        limits = {"queued.max.messages.kbytes": QUEUED_KBYTES, "auto.offset.reset": "earliest"}
        consumer = self._consumer = reader(self._settings, **limits)
        partitions = [TopicPartition(self.topic, number) for number in self.partitions()]
        return {each.partition: consumer.get_watermark_offsets(each, _METADATA_TIMEOUT_S)[1] for each in partitions}

    def partitions(self) -> set[int]:
        """Ask for the numbers of the topic's partitions. Blocks; raises KvStreamsError, KafkaException."""
        found = self._client().list_topics(self.topic, _METADATA_TIMEOUT_S).topics.get(self.topic)
        if found is None or found.error is not None or not found.partitions:
            raise KvStreamsError(
                f"LMCache's topic {self.topic} does not exist at {self._settings.kafka}",
                remedy="A server that publishes its events creates it; --lmcache and --lmcache-kafka have to name it",
            )
        return set(found.partitions)

    def begin(self, ends: Mapping[int, int], positions: Mapping[int, int]) -> None:
        """Read the partitions that `connect` has returned, each from its position, or else from its beginning."""
        self.ends = dict(ends)
        self.read_at = {number: positions.get(number, OFFSET_BEGINNING) for number in ends}
        self._client().assign([TopicPartition(self.topic, number, at) for number, at in self.read_at.items()])
        self.can_read = True

    def rewind(self, positions: Mapping[int, int]) -> None:
        """Read again from these positions, where reading is beyond them."""
        for number, at in positions.items():
            if at < self.read_at.get(number, 0):
                self._client().seek(TopicPartition(self.topic, number, at))
                self.read_at[number] = at

    def read(self) -> list[Message]:
        """Wait for records and reports of the client, POLL_S at most."""
        return consume(self._client(), READ_RECORDS, POLL_S, _COLLECT_S)

    def records(self, messages: list[Message]) -> Iterator[tuple[Message, int, int, bool]]:
        """Iterate over records, in order: each with its partition and offset, and whether the partition begins again.

        A partition ends before what was read of it if the topic was deleted and created again. Each record counts as
        read once the next one is asked for. Raises KafkaException if the topic cannot be read.
        """
        for message in messages:
            error, number, offset = message.error(), message.partition() or 0, message.offset() or 0
            if error is None:
                self._outage.answered(time.monotonic())
                begins_again = offset < self.read_at[number]
                if begins_again:
                    log.warning("LMCache's topic %s was created anew; it is read from its beginning", self.topic)
                    self._created_anew.add(number)
                    self.ends[number] = 0
                yield message, number, offset, begins_again
                self.read_at[number] = offset + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                self._outage.answered(time.monotonic())
                self.read_at[number] = max(offset, self.read_at[number])
            elif error.code() != KafkaError._TRANSPORT and not error.retriable():
                raise KafkaException(error)

    def position(self, number: int, known: int) -> int:
        """Return where to read a partition on. known: where a bridge was in it, which may have been an earlier one."""
        return 0 if number in self._created_anew and known > self.read_at[number] else known

    def n_left(self) -> int:
        """Return how many records are not read, as of Kafka's last answers."""
        left = 0
        for number, at in self.read_at.items():
            begin, end = self._client().get_watermark_offsets(TopicPartition(self.topic, number), cached=True)
            left += max(end - max(at, begin), 0)
        return left

    def failed(self, exc: Exception) -> None:
        """Note that the topic cannot be read; logged at once, and then once a minute."""
        self.can_read = False
        lasted_s = self._outage.failed(time.monotonic())
        if lasted_s is not None:
            log.warning("LMCache's events cannot be read: %s%s", exc, lasting(lasted_s))

    def close(self) -> None:
        """Close the client."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _client(self) -> Consumer:
        assert self._consumer is not None, "`connect` comes first"
        return self._consumer
