"""Recording decisions on `router-decisions` (docs/decisions.md).

What lives here: what is noted while a request is served, the buffer, and how it is encoded and handed to the client: a
full batch after the answers that are under way, anything less by a thread. What must not: bytes (decision_log.records),
and anything that a request waits for.

Nothing here fails a request or lets it wait for Kafka. If decisions come faster than they can be recorded, or Kafka
does not take them, they are dropped and counted.

Reports of clients about a request (its first token, its output, its end) arrive at any router. Each router keeps what
it receives about a request until its end, or for PENDING_MS, and then records it once. Readers put the parts together.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.core.ids import RankId
from streams.core.loads.bookings import BookingPhase
from streams.core.routing.decision import Decision, RoutePolicy
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import FALLBACK, Trust
from streams.core.workers import Role
from streams.decision_log.batches import BOOKED, PREFERRED, DecisionBatch, DecisionKind
from streams.decision_log.families import family_keys
from streams.decision_log.records import DecisionEncoder, EndReport, FleetSize, Report
from streams.errors import KvStreamsError
from streams.router_api.view import View
from streams.settings import Settings
from streams.topics import TopicSpec

if TYPE_CHECKING:
    from streams.router_api.router import PreparedRequest

log = logging.getLogger(__name__)

#: Memory that noted decisions and reports may use until they are encoded, by an estimate. 256 decisions have 0.7 MB of
#: buffers, though they use all of it only if their prompts are very long.
BUFFER_BYTES_MAX = 32 * 1024 * 1024

#: How often noted decisions are encoded, at least.
INTERVAL_S = 0.25

#: Decisions in one record. They are encoded as soon as there are so many, which takes 0.2 to 0.4 ms. Half of that is
#: spent even for a few of them, because code that runs so rarely is not in the processor's caches.
BATCH_DECISIONS_MAX = 256

#: Reports in one record that has no decisions.
BATCH_REPORTS_MAX = 512

#: Records that Kafka has not acknowledged. While it does not answer, further ones are dropped.
BATCHES_IN_FLIGHT_MAX = 256

#: Requests of which something was reported that is not recorded yet, and how long it waits for the request's end.
PENDING_MAX = 65_536
PENDING_MS = 120_000

#: Batches whose buffers are kept for later decisions: one is filled while the other is encoded.
UNUSED_MAX = 2

#: Kinds of decisions that are kept as values. Beyond the limit all are forgotten.
KINDS_MAX = 1024

#: How long the sizes of models' fleets are used.
_FLEETS_S = 5.0

#: The estimate of the memory of a report.
_REPORT_BYTES = 256

_SHARES = 1 << 32


class _Pending(NamedTuple):
    """What was reported of a request that has not ended. since_ms: when the first of it came."""

    since_ms: int
    prefilled_at_ms: int
    output_tokens: int


_NOTHING_REPORTED = _Pending(0, 0, 0)


#: The kind of the last decision, after the objects from which it follows, which are shared by many decisions. It is a
#: plain tuple because these are unpacked in a third of the time.
_LastKind = tuple[RoutePolicy | None, Trust, Trust, Role | None, str, int, DecisionKind]

_NO_KIND: _LastKind = (None, FALLBACK, FALLBACK, None, "", 0, DecisionKind("", 0, "", "", 0.0, "", None, "", None))


class DecisionRecorder:
    """The recorder of one router. Thread-safe. Owner of what is noted and not sent yet.

    recorded: decisions that Kafka has acknowledged. dropped: those that were lost.
    """

    def __init__(
        self, settings: Settings, topic: TopicSpec, kafka: Producer, view: View, router_id: Callable[[], str]
    ) -> None:
        self._topic = topic.name
        self._kafka = kafka
        self._view = view
        self._router_id = router_id
        self._policy_name = settings.router_policy
        # Of the CRC-32 of a request id, so that all routers record the same requests and what is reported about them.
        self._below = round(settings.decision_log_share * _SHARES)
        keys = family_keys(settings.decision_log_salt or settings.app_id)
        self._n_best = settings.decision_log_candidates
        self._encoder = DecisionEncoder(keys, settings.decision_log_share)
        self._kinds: dict[DecisionKind, DecisionKind] = {}
        self._last: _LastKind = _NO_KIND
        self._lock = threading.Lock()
        # The decisions that are not encoded: those of the batch that is filled now, and those of full ones.
        self._batch = DecisionBatch(BATCH_DECISIONS_MAX, self._n_best)
        self._full: list[DecisionBatch] = []
        self._unused: list[DecisionBatch] = []
        self._full_bytes = 0
        self._reports: deque[Report | EndReport] = deque()
        self._pending: dict[str, _Pending] = {}
        self._in_flight = 0
        self.recorded = 0
        self.dropped = 0
        self._fleets: tuple[FleetSize, ...] = ()
        self._fleets_until_s = 0.0
        self._sending = threading.Lock()
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
        if self._below != _SHARES and not self._counts(request_id):
            return
        now_ms = wall_ms()
        request, policy, blocks = prepared.request, prepared.policy, prepared.blocks
        model, phase = prepared.model, request.phase
        block_size, arrived_at_ms = prepared.block_size, prepared.arrived_at_ms
        last_policy, last_trust, last_chosen_trust, last_phase, last_model, last_size, kind = self._last
        # Most decisions are of the kind of the one before, which is cheaper to see than to look it up.
        if not (
            last_policy is policy
            and last_trust is trust
            and last_chosen_trust is chosen_trust
            and last_phase is phase
            and last_model == model
            and last_size == block_size
        ):
            kind = self._kind(policy, trust, chosen_trust, phase, model, block_size)
        with self._lock:
            batch = self._batch
            if batch.n == batch.n_max:
                if self._full_bytes + len(self._reports) * _REPORT_BYTES + batch.n_bytes > BUFFER_BYTES_MAX:
                    self.dropped += 1
                    return
                batch = self._next_batch()
            try:
                n = batch.add(
                    request_id,
                    now_ms,
                    now_ms - arrived_at_ms if now_ms > arrived_at_ms else 0,
                    kind,
                    blocks.n_tokens,
                    blocks.request_blocks,
                    request.expected_output_tokens,
                    blocks.chain,
                    decision.columns,
                    decision.index,
                    (BOOKED if request.update_states else 0) | (PREFERRED if decision.preferred else 0),
                )
            except Exception as exc:  # for example, terms of a policy of another package that are no numbers
                log.debug("a decision is not recorded: %s", exc)
                self.dropped += 1
                return
        if n == batch.n_max:
            self._send_soon()

    def _next_batch(self) -> DecisionBatch:
        """Put a full batch aside and begin another one. Call it under the lock."""
        self._full.append(self._batch)
        self._full_bytes += self._batch.n_bytes
        self._batch = self._unused.pop() if self._unused else DecisionBatch(BATCH_DECISIONS_MAX, self._n_best)
        return self._batch

    def _send_soon(self) -> None:
        """Encode what was noted after the requests that are being answered, on their thread if it has an event loop.

        Another thread would have to fetch all of it from the processor core of this one, which takes longer than
        encoding it: with a thread, a recorded request used twice as much processor time.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._wake.set()
        else:
            loop.call_soon(self._send_if_idle)

    def _send_if_idle(self) -> None:
        """The same as `send`, unless the thread is sending already."""
        if self._sending.acquire(blocking=False):
            try:
                self._send_noted()
            finally:
                self._sending.release()

    def _kind(
        self, policy: RoutePolicy, trust: Trust, chosen_trust: Trust, phase: Role | None, model: str, block_size: int
    ) -> DecisionKind:
        """The value that all decisions of a kind share."""
        new = DecisionKind(
            model,
            block_size,
            policy.mode.value,
            self._policy_name if policy.mode is RouterMode.POLICY else "",
            policy.temperature,
            trust.mode.value,
            None if trust.reason is None else trust.reason.value,
            chosen_trust.mode.value,
            None if chosen_trust.reason is None else chosen_trust.reason.value,
            None if phase is None or phase is Role.BOTH else phase.value,
        )
        if len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        kind = self._kinds.setdefault(new, new)
        self._last = (policy, trust, chosen_trust, phase, model, block_size, kind)
        return kind

    def reported(self, request_id: str, what: BookingPhase) -> None:
        """Note that a client reported a request's first token or its end."""
        if self._below != _SHARES and not self._counts(request_id):
            return
        now_ms = wall_ms()
        if what is BookingPhase.FREE and request_id not in self._pending:
            self._add_report((request_id, now_ms, 0, 0))
            return
        with self._lock:
            if what is BookingPhase.FREE:
                ended = self._pending.pop(request_id, _NOTHING_REPORTED)
                self._add_report(Report(request_id, now_ms, ended.prefilled_at_ms, ended.output_tokens))
                return
            before = self._pending.get(request_id)
            if before is None:
                self._begin_pending(request_id, _Pending(now_ms, now_ms, 0))
            elif not before.prefilled_at_ms:
                self._pending[request_id] = before._replace(prefilled_at_ms=now_ms)

    def output(self, request_id: str, output_tokens: int) -> None:
        """Note how many tokens a client has received so far."""
        if self._below != _SHARES and not self._counts(request_id):
            return
        with self._lock:
            before = self._pending.get(request_id)
            if before is None:
                self._begin_pending(request_id, _Pending(wall_ms(), 0, output_tokens))
            elif output_tokens > before.output_tokens:
                self._pending[request_id] = before._replace(output_tokens=output_tokens)

    def _counts(self, request_id: str) -> bool:
        """Whether a request is in the share; called only if that is not all of them."""
        return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) < self._below

    def _begin_pending(self, request_id: str, pending: _Pending) -> None:
        if len(self._pending) >= PENDING_MAX:
            oldest = next(iter(self._pending))
            self._add_report(_partial(oldest, self._pending.pop(oldest)))
        self._pending[request_id] = pending

    def _add_report(self, report: Report | EndReport) -> None:
        """Add a report, with the lock or without it: a deque can be appended to while its left end is taken away."""
        reports = self._reports
        if self._full_bytes + (len(reports) + 1) * _REPORT_BYTES <= BUFFER_BYTES_MAX:
            reports.append(report)

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
        """Encode what was noted and hand it to the client. What cannot be sent is dropped and counted."""
        with self._sending:
            self._send_noted()
        self._kafka.poll(0)

    def _send_noted(self) -> None:
        with self._lock:
            if self._batch.n:
                self._next_batch()
            batches, self._full = self._full, []
            reports = [self._reports.popleft() for _ in range(len(self._reports))]
            self._full_bytes = 0
        for batch in batches:
            self._send(batch, reports[:BATCH_REPORTS_MAX])
            reports = reports[BATCH_REPORTS_MAX:]
            batch.clear()
        while reports:
            self._send(None, reports[:BATCH_REPORTS_MAX])
            reports = reports[BATCH_REPORTS_MAX:]
        with self._lock:
            self._unused = [*batches, *self._unused][:UNUSED_MAX]

    def _send(self, batch: DecisionBatch | None, reports: list[Report | EndReport]) -> None:
        n = 0 if batch is None else batch.n
        with self._lock:
            if self._in_flight >= BATCHES_IN_FLIGHT_MAX:
                self.dropped += n
                return

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            with self._lock:
                self._in_flight -= 1
                if error is None:
                    self.recorded += n
                else:
                    self.dropped += n

        try:
            value = self._encoder.encode(batch, reports, self._fleet_sizes(), self._router_id(), wall_ms())
            self._kafka.produce(self._topic, value=value, on_delivery=on_delivery)
        except (BufferError, KafkaException, KvStreamsError) as exc:
            log.debug("%d decisions are not recorded: %s", n, exc)
        except Exception:  # the thread must outlive a mistake with one batch
            log.exception("%d decisions are not recorded", n)
        else:
            with self._lock:
                self._in_flight += 1
            return
        with self._lock:
            self.dropped += n

    def _fleet_sizes(self) -> tuple[FleetSize, ...]:
        now_s = time.monotonic()
        if now_s >= self._fleets_until_s:
            self._fleets_until_s = now_s + _FLEETS_S
            ranks: dict[tuple[str, int], list[RankId]] = {}
            for worker in self._view.fleet.workers.copy().values():
                ranks.setdefault((worker.model, worker.block_size), []).extend(worker.ranks())
            self._fleets = tuple(
                FleetSize(model, block_size, len(of_model), self._kv_blocks(of_model))
                for (model, block_size), of_model in sorted(ranks.items())
            )
        return self._fleets

    def _kv_blocks(self, ranks: list[RankId]) -> int:
        """Blocks of the caches of these ranks; 0 unless all are known."""
        total = self._view.fleet.engines.blocks_in_use(ranks).total
        return int(total.sum()) if total.all() else 0


def wall_ms() -> int:
    """The time as it is recorded."""
    return time.time_ns() // 1_000_000


def _partial(request_id: str, pending: _Pending) -> Report:
    return Report(request_id, 0, pending.prefilled_at_ms, pending.output_tokens)
