"""What a process logs while Kafka does not answer: one line at once, one per minute, and one when Kafka answers again.

What lives here: the watch that asks Kafka once a client has reported an error, the lines that it logs, and the filter
that lowers every other line about the same outage to debug. What must not: the configuration of clients
(streams.kafka.clients), and the format of lines (streams.process.log).

During an outage every client of a process reports every failed connection, several times a second: 150 lines per second
in a worker with eight partitions. Those lines cannot be counted on to mean an outage either, since one broker of three
may be gone, or a group may be rebalancing. So a line about Kafka is held until Kafka has been asked. If Kafka answers,
the line is logged. If it does not, the line becomes a debug line, as do all that follow it.

State: whether Kafka answers.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator

from confluent_kafka import KafkaError, KafkaException

from streams.errors import KafkaUnreachable
from streams.kafka.outage import Outage

log = logging.getLogger(__name__)

#: Where librdkafka's own lines go. Without a logger, the library writes them to stderr itself.
CLIENT_LOGGER = logging.getLogger("librdkafka")

#: During an outage, Kafka is asked at this interval.
ASK_EVERY_S = 1.0

#: After an outage, clients need this long until all of them have reconnected, and the worker's group until it has
#: assigned its partitions again. Their complaints in that time belong to the outage. Measured: 5 s, and 13 s if a
#: request was sent right before the broker returned.
AFTERMATH_S = 15.0

#: Lines that are held until Kafka has been asked. Any more are only counted: they repeat the others.
HELD_LINES_MAX = 100

#: Codes which mean that no broker was reached. Any other code is a broker's answer and explains itself.
UNREACHED = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._TIMED_OUT, KafkaError._TRANSPORT})

#: Loggers whose warnings are complaints about Kafka, or consequences of an outage: the clients', and our own ones that
#: retry. A line with a traceback is something else, unless its exception is Kafka's.
_COMPLAINING = ("librdkafka", "aiokafka")
_FOLLOWING = ("faust", "mode", "streams.tables.partition")

#: Causes of an exception that are examined.
_CAUSES_MAX = 20


class KafkaOutage:
    """When Kafka was last found to answer, and which line is due. Pure: times are arguments, in seconds, monotonic."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._outage = Outage()
        self._ended_s: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether Kafka does not answer, as far as known."""
        return self._outage.is_running

    def covers(self, now_s: float) -> bool:
        """Whether a complaint of a client belongs to the outage: it is running, or it ended a moment ago."""
        return self.is_running or (self._ended_s is not None and now_s - self._ended_s < AFTERMATH_S)

    def missed(self, now_s: float, since_s: float, reason: str) -> str | None:
        """Note that Kafka did not answer; returns the line that is due, if any. since_s: of the first error."""
        lasted_s = self._outage.failed(now_s, since_s)
        if lasted_s is None:
            return None
        if not lasted_s:
            return f"Kafka at {self._address} does not answer: {reason}. Clients keep trying to connect"
        return f"Kafka at {self._address} has not answered for {lasted_s:.0f} s: {reason}"

    def answered(self, now_s: float) -> str | None:
        """Note that Kafka answered; returns the line that is due if it had not answered before."""
        lasted_s = self._outage.answered(now_s)
        if lasted_s is None:
            return None
        self._ended_s = now_s
        return f"Kafka at {self._address} answers again, after {lasted_s:.0f} s"


#: Asks Kafka once, for ASK_TIMEOUT_S at most; returns why it did not answer, or None if it did.
Ask = Callable[[], str | None]


#: Logs a line later: a logger's or a handler's bound method.
Held = Callable[[logging.LogRecord], object]


class KafkaWatch:
    """Knows whether one Kafka answers. It asks in a thread of its own, which runs only from an error to an answer."""

    def __init__(self, address: str, make_ask: Callable[[], Ask], now_s: Callable[[], float] = time.monotonic) -> None:
        """make_ask: called at the start of each such thread; it may create a client."""
        self._make_ask = make_ask
        self._now_s = now_s
        self._outage = KafkaOutage(address)
        self.thread_name = f"kafka-watch-{address}"
        self._lock = threading.Lock()
        self._asking = False
        self._held: list[tuple[Held, logging.LogRecord]] = []
        self._n_dropped = 0

    def suspect(self) -> None:
        """Note that a client could not reach Kafka. Kafka is asked, unless it is being asked already."""
        with self._lock:
            if self._asking:
                return
            self._asking = True
        threading.Thread(target=self._run, args=(self._now_s(),), name=self.thread_name, daemon=True).start()

    def on_error(self, error: KafkaError) -> None:
        """See `suspect`; the callback `error_cb` of a client."""
        if error.code() in UNREACHED:
            self.suspect()

    @property
    def is_away(self) -> bool:
        """Whether Kafka does not answer, as far as known."""
        return self._outage.is_running

    def covers_now(self) -> bool:
        """Whether complaints of clients belong to an outage that is already in the log."""
        return self._outage.covers(self._now_s())

    def hold(self, held: Held, record: logging.LogRecord) -> bool:
        """Keep a line until Kafka has been asked; False if it is not being asked."""
        return self._take([(held, record)], 0)

    def _take(self, lines: list[tuple[Held, logging.LogRecord]], n_dropped: int) -> bool:
        with self._lock:
            if not self._asking:
                return False
            n_fit = HELD_LINES_MAX - len(self._held)
            self._held += lines[:n_fit]
            self._n_dropped += n_dropped + max(0, len(lines) - n_fit)
            return True

    def release(self, *, as_debug: bool) -> None:
        """Log the lines that are held. as_debug: they belong to an outage."""
        with self._lock:
            lines, self._held = self._held, []
            n_dropped, self._n_dropped = self._n_dropped, 0
        # A line does not say which of two Kafkas it is about, so the last one that is asked decides.
        others = [watch for watch in list(_watches.values()) if watch is not self]
        if not as_debug and any(watch._take(lines, n_dropped) for watch in others):
            return
        for held, record in lines:
            if as_debug and not _lower(record):
                continue
            record.kafka_checked = True
            held(record)
        if n_dropped:
            log.log(logging.DEBUG if as_debug else logging.WARNING, "%d more lines about Kafka are left out", n_dropped)

    def _run(self, since_s: float) -> None:
        try:
            ask = self._make_ask()
            while (reason := ask()) is not None:
                self._note(self._outage.missed(self._now_s(), since_s, reason), as_debug=True)
                time.sleep(ASK_EVERY_S)
            self._note(self._outage.answered(self._now_s()), as_debug=self.covers_now())
        except Exception:  # a fault of ours; the next error of a client starts another thread
            log.exception("it is not known whether Kafka answers")
        finally:
            with self._lock:
                self._asking = False
            self.release(as_debug=False)

    def _note(self, line: str | None, *, as_debug: bool) -> None:
        if line is not None:
            # All three lines have one level, so that a log that has the beginning of an outage has its end as well.
            log.warning("%s", line)
        self.release(as_debug=as_debug)


#: The watches of this process by bootstrap address. A bridge of LMCache's events and a move may have two Kafkas.
_watches: dict[str, KafkaWatch] = {}
_watches_lock = threading.Lock()


def watch_of(address: str, make_ask: Callable[[], Ask]) -> KafkaWatch:
    """The watch of a Kafka, which all clients of this process share."""
    with _watches_lock:
        if address not in _watches:
            _watches[address] = KafkaWatch(address, make_ask)
        return _watches[address]


def unreachable(address: str) -> str | None:
    """Why a Kafka that this process uses does not answer, as text; None as long as it is not known not to answer."""
    watch = _watches.get(address)
    return f"Kafka at {address} does not answer" if watch is not None and watch.is_away else None


@atexit.register
def _release_all() -> None:
    """Log what is still held: the lines of a process that ends may say why it ends."""
    for watch in list(_watches.values()):
        watch.release(as_debug=watch.covers_now())


class KafkaAwayFilter(logging.Filter):
    """Holds lines about Kafka until Kafka has been asked, and lowers those of an outage to debug.

    `held_by` is where a held line continues: the logger or the handler that has this filter.
    """

    def __init__(self, held_by: Callable[[], Held]) -> None:
        super().__init__()
        self._held_by = held_by

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged now."""
        if record.levelno <= logging.DEBUG or getattr(record, "kafka_checked", False):
            return True
        complains = _complains(record)
        if not (complains or _follows(record)):
            return True
        watches = list(_watches.values())
        if complains:
            for watch in watches:
                watch.suspect()
        if any(watch.covers_now() for watch in watches):
            return _lower(record)
        return not any(watch.hold(self._held_by(), record) for watch in watches)


def _lower(record: logging.LogRecord) -> bool:
    """Turn a line into a debug line; returns whether debug lines are logged."""
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def _complains(record: logging.LogRecord) -> bool:
    """Whether a line says that a client could not do something on Kafka."""
    if record.levelno >= logging.CRITICAL:
        return False
    if record.levelno >= logging.WARNING and _is_from(record, _COMPLAINING):
        return True
    arguments = record.args if isinstance(record.args, tuple) else ()
    exceptions = [*arguments, record.exc_info[1] if record.exc_info else None]
    return any(_is_kafkas(exception) for exception in exceptions)


def _follows(record: logging.LogRecord) -> bool:
    """Whether a line, during an outage, is a consequence of it."""
    return logging.WARNING <= record.levelno < logging.CRITICAL and not record.exc_info and _is_from(record, _FOLLOWING)


def _is_from(record: logging.LogRecord, loggers: tuple[str, ...]) -> bool:
    return any(record.name == name or record.name.startswith(f"{name}.") for name in loggers)


def _is_kafkas(value: object) -> bool:
    """Whether a value is an error of a client, or an exception that was raised because of one."""
    return any(
        isinstance(cause, KafkaException | KafkaError | KafkaUnreachable)
        or type(cause).__module__.startswith("aiokafka.errors")
        for cause in _causes(value)
    )


def _causes(value: object) -> Iterator[object]:
    left, n_examined = [value], 0
    while left and n_examined < _CAUSES_MAX:
        cause = left.pop()
        n_examined += 1
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            left.extend(cause.exceptions)
        if isinstance(cause, BaseException) and cause.__cause__ is not None:
            left.append(cause.__cause__)


# A program that embeds the publisher sets up its own logs. This logger is ours in every process.
CLIENT_LOGGER.addFilter(KafkaAwayFilter(lambda: CLIENT_LOGGER.callHandlers))
