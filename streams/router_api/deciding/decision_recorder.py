"""Recording decisions on `router-decisions` (docs/decisions.md).

What lives here: what is noted while a request is served, what waits to be written, and the thread that encodes it and
hands it to the client. What must not: bytes (decision_log.records), and anything that a request waits for.

Nothing here fails a request or lets it wait for Kafka. If decisions come faster than they can be recorded, or Kafka
does not take them, they are dropped and counted.

Reports of clients about a request (its first token, its output, its end) arrive at any router. Each router keeps what
it receives about a request until its end, or for PENDING_MS, and then records it once. Readers put the parts together.

State: decisions that are noted and not sent yet.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.core.ids import RankId
from streams.core.loads.bookings import BookingPhase
from streams.core.routing.decision import Decision
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import Trust
from streams.core.workers import Role
from streams.decision_log.families import family_keys
from streams.decision_log.noted import (
    BOOKED,
    PREFERRED,
    DecisionKind,
    ListedCandidates,
    NotedDecision,
    listed_candidates,
)
from streams.decision_log.records import FleetSize, LogOrigin, OutcomeReport, encode_batch
from streams.errors import KvStreamsError
from streams.router_api.deciding.prepared_request import PreparedRequest
from streams.router_api.knowledge.view import View
from streams.settings import RouterSettings
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: Decisions that wait to be encoded; further ones are dropped. Each has the terms of all its candidates, 6 KB with 64
#: ranks and 100 KB with 1,000.
WAITING_DECISIONS_MAX = 1_024

#: Reports that wait to be encoded; further ones are dropped.
WAITING_REPORTS_MAX = 65_536

#: How often what waits is encoded, at least.
INTERVAL_S = 0.25

#: Decisions in one record. The thread is woken as soon as so many wait.
BATCH_DECISIONS_MAX = 256

#: Reports in one record.
BATCH_REPORTS_MAX = 512

#: Records that Kafka has not acknowledged. While it does not answer, further ones are dropped.
BATCHES_IN_FLIGHT_MAX = 256

#: Requests of which something was reported that is not recorded yet, and how long it waits for the request's end.
PENDING_MAX = 65_536
PENDING_MS = 120_000

#: How long the sizes of models' fleets are used.
_FLEETS_S = 5.0

_SHARES = 1 << 32


class _Pending(NamedTuple):
    """What was reported of a request that has not ended. since_ms: when the first of it came."""

    since_ms: int
    prefilled_at_ms: int
    output_tokens: int


_NOTHING_REPORTED = _Pending(0, 0, 0)


class DecisionRecorder:
    """The recorder of one router. Thread-safe. Owner of what is noted and not sent yet.

    recorded: decisions that Kafka has acknowledged. dropped: those that were lost.
    """

    def __init__(
        self, settings: RouterSettings, topic: TopicSpec, kafka: Producer, view: View, router_id: Callable[[], str]
    ) -> None:
        self._topic = topic.name
        self._kafka = kafka
        self._fleets = _FleetSizes(view)
        self._router_id = router_id
        self._policy_name = settings.router_policy
        self._share = settings.decision_log_share
        # Of the CRC-32 of a request id, so that all routers record the same requests and what is reported about them.
        self._below = round(settings.decision_log_share * _SHARES)
        self._keys = family_keys(settings.decision_log_salt or settings.app_id)
        self._n_best = settings.decision_log_candidates
        self._lock = threading.Lock()
        self._decisions: deque[NotedDecision] = deque()
        self._reports: deque[OutcomeReport] = deque()
        self._pending: dict[str, _Pending] = {}
        self._in_flight = 0
        self.recorded = 0
        self.dropped = 0
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to send what is noted, every INTERVAL_S."""
        self._thread = threading.Thread(target=self._run, name="decision log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and hand the rest to the client, which its owner flushes."""
        if self._thread is not None:
            self._stopping = True
            self._wake.set()
            self._thread.join()
            self._thread = None
        self._end_pending(None)
        self.send()

    # -- while requests are served -------------------------------------------------------------------------------------

    def note(self, prepared: PreparedRequest, decision: Decision, trust: Trust, chosen_trust: Trust) -> None:
        """Note a decision."""
        request_id = prepared.request_id
        if not self._counts(request_id):
            return
        now_ms = wall_ms()
        request, blocks = prepared.request, prepared.blocks
        noted = NotedDecision(
            request_id,
            now_ms,
            max(0, now_ms - prepared.arrived_at_ms),
            self._kind_of(prepared, trust, chosen_trust),
            blocks.n_tokens,
            blocks.request_blocks,
            request.expected_output_tokens or 0,
            (BOOKED if request.update_states else 0) | (PREFERRED if decision.preferred else 0),
            blocks.chain,
            decision.columns,
            decision.index,
        )
        with self._lock:
            n = len(self._decisions)
            if n >= WAITING_DECISIONS_MAX:
                self.dropped += 1
                return
            self._decisions.append(noted)
        if (n + 1) % BATCH_DECISIONS_MAX == 0:
            self._wake.set()

    def _kind_of(self, prepared: PreparedRequest, trust: Trust, chosen_trust: Trust) -> DecisionKind:
        policy, prompt, phase = prepared.routing.policy, prepared.routing.prompt, prepared.request.phase
        return DecisionKind(
            prompt.model,
            prompt.block_size,
            policy.mode,
            self._policy_name if policy.mode is RouterMode.POLICY else "",
            policy.temperature,
            trust.mode,
            trust.reason,
            chosen_trust.mode,
            chosen_trust.reason,
            None if phase is Role.BOTH else phase,
        )

    def reported(self, request_id: str, what: BookingPhase) -> None:
        """Note that a client reported a request's first token or its end."""
        if not self._counts(request_id):
            return
        now_ms = wall_ms()
        with self._lock:
            if what is BookingPhase.FREE:
                ended = self._pending.pop(request_id, _NOTHING_REPORTED)
                self._add_report(OutcomeReport(request_id, now_ms, ended.prefilled_at_ms, ended.output_tokens))
                return
            before = self._pending.get(request_id)
            if before is None:
                self._begin_pending(request_id, _Pending(now_ms, now_ms, 0))
            elif not before.prefilled_at_ms:
                self._pending[request_id] = before._replace(prefilled_at_ms=now_ms)

    def output(self, request_id: str, output_tokens: int) -> None:
        """Note how many tokens a client has received so far."""
        if not self._counts(request_id):
            return
        with self._lock:
            before = self._pending.get(request_id)
            if before is None:
                self._begin_pending(request_id, _Pending(wall_ms(), 0, output_tokens))
            elif output_tokens > before.output_tokens:
                self._pending[request_id] = before._replace(output_tokens=output_tokens)

    def _counts(self, request_id: str) -> bool:
        """Whether a request is in the share."""
        return self._below == _SHARES or zlib.crc32(request_id.encode("utf-8", "surrogatepass")) < self._below

    # The caller of each of these two holds the lock.

    def _begin_pending(self, request_id: str, pending: _Pending) -> None:
        if len(self._pending) >= PENDING_MAX:
            oldest = next(iter(self._pending))
            self._add_report(_partial(oldest, self._pending.pop(oldest)))
        self._pending[request_id] = pending

    def _add_report(self, report: OutcomeReport) -> None:
        if len(self._reports) < WAITING_REPORTS_MAX:
            self._reports.append(report)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._end_pending(wall_ms() - PENDING_MS)
            self.send()

    def _end_pending(self, before_ms: int | None) -> None:
        """Record what was reported of requests before a time without their end; None for all of them."""
        with self._lock:
            while self._pending:
                oldest = next(iter(self._pending))
                if before_ms is not None and self._pending[oldest].since_ms >= before_ms:
                    return
                self._add_report(_partial(oldest, self._pending.pop(oldest)))

    def send(self) -> None:
        """Encode what waits and hand it to the client. What cannot be sent is dropped and counted."""
        with self._lock:
            decisions, self._decisions = list(self._decisions), deque()
            reports, self._reports = list(self._reports), deque()
        while decisions or reports:
            self._send(decisions[:BATCH_DECISIONS_MAX], reports[:BATCH_REPORTS_MAX])
            decisions, reports = decisions[BATCH_DECISIONS_MAX:], reports[BATCH_REPORTS_MAX:]
        self._kafka.poll(0)

    def _send(self, noted: list[NotedDecision], reports: list[OutcomeReport]) -> None:
        n = len(noted)
        with self._lock:
            if self._in_flight >= BATCHES_IN_FLIGHT_MAX:
                self.dropped += n
                return
        decisions = list(self._with_candidates(noted))
        n = len(decisions)
        if not decisions and not reports:
            return

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            with self._lock:
                self._in_flight -= 1
                if error is None:
                    self.recorded += n
                else:
                    self.dropped += n

        try:
            origin = LogOrigin(self._router_id(), self._keys, self._share)
            value = encode_batch(origin, wall_ms(), decisions, reports, self._fleets.now())
            self._kafka.produce(self._topic, value=value, on_delivery=on_delivery)
        except (BufferError, KafkaException, KvStreamsError) as exc:
            log.debug("%d decisions are not recorded: %s", n, exc)
            self._drop(n)
        except Exception:  # the thread must outlive a mistake with one batch
            log.exception("%d decisions are not recorded", n)
            self._drop(n)
        else:
            with self._lock:
                self._in_flight += 1

    def _with_candidates(self, noted: list[NotedDecision]) -> Iterator[tuple[NotedDecision, ListedCandidates]]:
        """Decisions with the candidates that are recorded. One without usable terms is dropped and counted."""
        for decision in noted:
            try:
                yield decision, listed_candidates(decision.columns, decision.chosen, self._n_best)
            except Exception as exc:  # for example, terms of a policy of another package that are no numbers
                log.debug("a decision is not recorded: %s", exc)
                self._drop(1)

    def _drop(self, n: int) -> None:
        with self._lock:
            self.dropped += n


class _FleetSizes:
    """The registered ranks of each model, counted at most every _FLEETS_S. Used by one thread at a time."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._sizes: tuple[FleetSize, ...] = ()
        self._until_s = 0.0

    def now(self) -> tuple[FleetSize, ...]:
        """The sizes, which may be _FLEETS_S old."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._until_s = now_s + _FLEETS_S
            ranks: dict[tuple[str, int], list[RankId]] = {}
            for worker in self._view.fleet.workers.copy().values():
                ranks.setdefault((worker.model, worker.block_size), []).extend(worker.ranks())
            self._sizes = tuple(
                FleetSize(model, block_size, len(of_model), self._kv_blocks(of_model))
                for (model, block_size), of_model in sorted(ranks.items())
            )
        return self._sizes

    def _kv_blocks(self, ranks: list[RankId]) -> int:
        """Blocks of the caches of these ranks; 0 unless all are known."""
        total = self._view.fleet.engines.blocks_in_use(ranks).total
        return int(total.sum()) if total.all() else 0


def wall_ms() -> int:
    """The time as it is recorded."""
    return time.time_ns() // 1_000_000


def _partial(request_id: str, pending: _Pending) -> OutcomeReport:
    return OutcomeReport(request_id, 0, pending.prefilled_at_ms, pending.output_tokens)
