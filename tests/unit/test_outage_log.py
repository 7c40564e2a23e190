"""What is logged while Kafka does not answer: three kinds of lines, and the filter for all others."""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest
from aiokafka.errors import NodeNotReadyError
from confluent_kafka import KafkaError, KafkaException

from streams.errors import KafkaUnreachable, TableError
from streams.kafka import outage_log
from streams.kafka.outage import REMIND_S
from streams.kafka.outage_log import AFTERMATH_S, HELD_LINES_MAX, KafkaAwayFilter, KafkaOutage, KafkaWatch

REFUSED = "Connection refused"


def test_an_outage_is_one_line_at_once_one_per_minute_and_one_at_its_end() -> None:
    """Asked once a second for 150 s, an outage logs its beginning, its length after each minute, and its end."""
    outage = KafkaOutage("k:1")
    lines = [(second, line) for second in range(150) if (line := outage.missed(10.0 + second, 9.0, REFUSED))]
    assert [second for second, _ in lines] == [0, REMIND_S, 2 * REMIND_S]
    assert lines[0][1] == "Kafka at k:1 does not answer: Connection refused. Clients keep trying to connect"
    assert lines[1][1] == "Kafka at k:1 has not answered for 61 s: Connection refused"
    assert outage.answered(160.0) == "Kafka at k:1 answers again, after 151 s"
    assert outage.answered(161.0) is None


def test_complaints_belong_to_an_outage_until_its_aftermath_has_ended() -> None:
    """Clients reconnect within seconds after the end; a complaint after that is a new one."""
    outage = KafkaOutage("k:1")
    assert not outage.covers(0.0)
    outage.missed(1.0, 1.0, REFUSED)
    assert outage.covers(1000.0)
    outage.answered(1000.0)
    assert outage.covers(1000.0 + AFTERMATH_S - 0.1)
    assert not outage.covers(1000.0 + AFTERMATH_S)


class Lines(logging.Handler):
    """A handler with our filter, as `log.configure` makes it.

    address: lines of the watches of other addresses, which other tests of this process have left behind, are ignored.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self._address = address
        self.addFilter(KafkaAwayFilter(lambda: self.handle))

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith("Kafka at ") or self._address in record.getMessage():
            self.lines.append((record.levelname, record.getMessage()))


class Kafka:
    """Stands in for a broker that is asked: answers, one for each time that it is asked."""

    def __init__(self) -> None:
        self.answers: queue.Queue[str | None] = queue.Queue()

    def ask(self) -> str | None:
        return self.answers.get(timeout=10.0)


Fixture = tuple[Kafka, KafkaWatch, Lines]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    """Give a Kafka, its watch, and all lines of the process, at level INFO."""
    monkeypatch.setattr(outage_log, "_watches", {})
    monkeypatch.setattr(outage_log, "ASK_EVERY_S", 0.0)
    address = uuid.uuid4().hex
    kafka, lines = Kafka(), Lines(address)
    watch = outage_log.watch_of(address, lambda: kafka.ask)
    root = logging.getLogger()
    root.addHandler(lines)
    level = root.level
    root.setLevel(logging.INFO)
    yield kafka, watch, lines
    root.setLevel(level)
    root.removeHandler(lines)
    kafka.answers.put(None)
    settle(watch)


def settle(watch: KafkaWatch) -> None:
    """Wait until the watch does not ask any more."""
    for thread in threading.enumerate():
        if thread.name == watch.thread_name:
            thread.join(10.0)


def kafka_error(code: int = KafkaError._TRANSPORT) -> KafkaException:
    return KafkaException(KafkaError(code))


def caused(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


#: What processes log when they cannot reach Kafka: by a client's logger, or with an exception because of it.
COMPLAINTS: list[Callable[[], None]] = [
    lambda: logging.getLogger("librdkafka").error("FAIL %s", "Connect failed"),
    lambda: logging.getLogger("aiokafka.consumer.fetcher").error("Failed fetch messages from %s", 1),
    lambda: logging.getLogger("ours").warning("not done: %s", kafka_error()),
    lambda: logging.getLogger("ours").warning("not done: %s", KafkaUnreachable("no Kafka answers")),
    lambda: logging.getLogger("ours").warning("not done: %s", caused(TableError("no commit"), kafka_error())),
    lambda: logging.getLogger("ours").info("not done: %s", NodeNotReadyError()),
    lambda: logging.getLogger("ours").error("failed", exc_info=ExceptionGroup("tasks", [kafka_error()])),
]


@pytest.mark.parametrize("complain", COMPLAINTS)
def test_a_complaint_is_logged_if_kafka_answers(complain: Callable[[], None], watched: Fixture) -> None:
    """A line about Kafka is held until Kafka has been asked. If Kafka answers, it is logged as it is."""
    kafka, watch, lines = watched
    complain()
    assert lines.lines == []
    kafka.answers.put(None)
    settle(watch)
    assert len(lines.lines) == 1
    assert lines.lines[0][0] != "DEBUG"


def test_a_line_waits_for_the_last_of_two_kafkas(watched: Fixture) -> None:
    """It does not say which one it is about. A bridge of LMCache's events may have a second Kafka, which is away."""
    kafka, watch, lines = watched
    second, other = Kafka(), "second:1"
    second_watch = outage_log.watch_of(other, lambda: second.ask)
    for _ in range(HELD_LINES_MAX + 1):
        logging.getLogger("librdkafka").error("FAIL %s", "Connect failed")
    kafka.answers.put(None)
    settle(watch)
    assert lines.lines == []
    second.answers.put(REFUSED)
    second.answers.put(None)
    settle(second_watch)
    assert lines.lines == []


@pytest.mark.parametrize("complain", COMPLAINTS)
def test_an_outage_replaces_complaints_by_its_own_lines(complain: Callable[[], None], watched: Fixture) -> None:
    """Complaints before, during and right after the outage are debug lines, which are not logged at level INFO."""
    kafka, watch, lines = watched
    for _ in range(3):
        complain()
    kafka.answers.put(REFUSED)
    kafka.answers.put(REFUSED)
    while not watch.is_away:
        pass
    for _ in range(3):
        complain()
    kafka.answers.put(None)
    settle(watch)
    complain()
    kafka.answers.put(None)
    settle(watch)
    assert [level for level, _ in lines.lines] == ["WARNING", "WARNING"]
    assert "does not answer: Connection refused" in lines.lines[0][1]
    assert "answers again" in lines.lines[1][1]


def test_at_level_debug_the_complaints_of_an_outage_are_logged_as_debug_lines(watched: Fixture) -> None:
    """Nothing is lost: the details of an outage are in the log if its level is DEBUG."""
    kafka, watch, lines = watched
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("librdkafka").error("FAIL")
    kafka.answers.put(REFUSED)
    kafka.answers.put(None)
    settle(watch)
    assert ("DEBUG", "FAIL") in lines.lines


def test_lines_about_other_things_are_logged_during_an_outage(watched: Fixture) -> None:
    """The end of a process, a crash of Faust, and every line that has nothing to do with Kafka."""
    kafka, watch, lines = watched
    watch.suspect()
    kafka.answers.put(REFUSED)
    while not watch.is_away:
        pass
    crash = (ValueError, ValueError("bug"), None)
    logging.getLogger("mode.worker").error("crashed", exc_info=crash)
    logging.getLogger("librdkafka").critical("fatal")
    logging.getLogger("streams.engines.feed").warning("rank 1/0: the engine restarted")
    logging.getLogger("mode.timers").warning("Timer commit is overlapping")  # a consequence of the outage
    assert [text for _, text in lines.lines[1:]] == ["crashed", "fatal", "rank 1/0: the engine restarted"]


def test_the_number_of_lines_that_are_held_has_a_limit(watched: Fixture) -> None:
    """Beyond the limit, lines are counted, and the count is logged with the lines."""
    kafka, watch, lines = watched
    for number in range(HELD_LINES_MAX + 5):
        logging.getLogger("librdkafka").error("line %d", number)
    kafka.answers.put(None)
    settle(watch)
    assert len(lines.lines) == HELD_LINES_MAX + 1
    assert lines.lines[-1][1] == "5 more lines about Kafka are left out"


def test_an_error_that_a_broker_reported_does_not_start_the_watch(watched: Fixture) -> None:
    """Only errors which mean that no broker was reached make a client's error callback ask Kafka."""
    _, watch, _ = watched
    watch.on_error(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    assert not any(thread.name == watch.thread_name for thread in threading.enumerate())
