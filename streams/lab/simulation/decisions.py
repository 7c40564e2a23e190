"""A recorded time as a trace of Mooncake's format, which `kvstreams simulate` takes (pure).

What lives here: from decisions and reports to requests with times, lengths and families. What must not: reading the
log, and simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from streams.core.ids import RankId
from streams.core.workers import Role
from streams.decision_log.families import FAMILY_BITS, FAMILY_TOKENS
from streams.decision_log.records import FleetSize, LoggedBatch, LoggedDecision, OutcomeReport
from streams.errors import InvalidRequest
from streams.lab.trace import HASH_IDS_MAX, TraceRequest

#: Output of a request if neither its client nor any other reported any: the mean of the published conversation trace.
OUTPUT_TOKENS_DEFAULT = 343

#: Ids of parts of prompts that no other request shares begin here; families are below.
_OWN_IDS = 1 << FAMILY_BITS


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request with what clients reported about it. prefilled_at_ms, output_tokens: 0 if they are not known."""

    decision: LoggedDecision
    arrived_at_ms: int
    prefilled_at_ms: int = 0
    ended_at_ms: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """The requests of one model in order of arrival, and its fleet.

    ranks: those that were chosen. fleet: the largest that was recorded. share: of requests that was recorded;
    the least of all routers. n_without_output: requests whose output is not known.
    """

    model: str
    requests: tuple[RecordedRequest, ...]
    ranks: tuple[RankId, ...]
    fleet: FleetSize | None
    share: float
    n_without_output: int

    @property
    def n_ranks(self) -> int:
        """How many ranks the fleet has."""
        return max(len(self.ranks), 0 if self.fleet is None else self.fleet.n_ranks)

    @property
    def n_prefill_only(self) -> int:
        """How many requests were decoded by other workers than those that computed their prompts."""
        return sum(request.decision.kind.phase == Role.PREFILL for request in self.requests)

    def mean_output_tokens(self) -> int:
        """The mean output of the requests for which it is known."""
        known = [request.output_tokens for request in self.requests if request.output_tokens]
        return round(sum(known) / len(known)) if known else OUTPUT_TOKENS_DEFAULT

    def measured_reuse(self) -> float:
        """The share of the prompts' blocks that the chosen ranks held, as the routers knew it."""
        blocks = sum(request.decision.request_blocks for request in self.requests)
        return sum(request.decision.overlap_blocks for request in self.requests) / blocks if blocks else 0.0

    def measured_ttft_ms(self) -> float | None:
        """The mean time until clients reported the first token; None if none did."""
        times = [
            request.prefilled_at_ms - request.arrived_at_ms for request in self.requests if request.prefilled_at_ms
        ]
        return sum(times) / len(times) if times else None

    def trace(self) -> list[TraceRequest]:
        """The requests as a trace that begins at time 0. A request without known output has the mean output."""
        mean, next_own = self.mean_output_tokens(), _OWN_IDS
        started_ms = self.requests[0].arrived_at_ms if self.requests else 0
        trace = []
        for request in self.requests:
            decision = request.decision
            n_ids = -(-decision.n_tokens // FAMILY_TOKENS)
            ids = decision.families[:n_ids].tolist()
            n_own = n_ids - len(ids)
            ids += range(next_own, next_own + n_own)
            next_own += n_own
            trace.append(
                TraceRequest(
                    request.arrived_at_ms - started_ms, decision.n_tokens, request.output_tokens or mean, tuple(ids)
                )
            )
        return trace


def recording_of(batches: Sequence[LoggedBatch], since_ms: int, until_ms: int, model: str | None = None) -> Recording:
    """Put together what was recorded of one model's requests that arrived in a time.

    A request that was routed again before its end, because its engine failed, is one request with its last choice.
    Decisions that booked nothing, and those for the phase decode alone, are left out. model: may be None if only one
    has any. Raises InvalidRequest if there are several or none, BadRecord.
    """
    reports: dict[str, list[OutcomeReport]] = {}
    for batch in batches:
        for report in batch.reports:
            reports.setdefault(report.request_id, []).append(report)
    decisions = [
        decision
        for batch in batches
        for decision in batch.decisions(terms=False)
        if decision.booked
        and decision.kind.phase != Role.DECODE
        and since_ms <= decision.arrived_at_ms < until_ms
        and (model is None or decision.kind.model == model)
        and 0 < decision.n_tokens <= HASH_IDS_MAX * FAMILY_TOKENS
    ]
    models = sorted({decision.kind.model for decision in decisions})
    if not decisions:
        of_model = f" for model {model!r}" if model is not None else ""
        raise InvalidRequest(f"no booked decision{of_model} is recorded in this time")
    if len(models) > 1:
        raise InvalidRequest(f"decisions of several models are recorded: {', '.join(models)}", remedy="Choose --model")
    decisions.sort(key=lambda decision: decision.decided_at_ms)
    requests = sorted(_requests(decisions, reports), key=lambda request: request.arrived_at_ms)
    fleets = [fleet for batch in batches for fleet in batch.fleets if fleet.model == models[0]]
    return Recording(
        model=models[0],
        requests=tuple(requests),
        ranks=tuple(sorted({decision.chosen for decision in decisions})),
        fleet=max(fleets, key=lambda fleet: (fleet.n_ranks, fleet.kv_blocks), default=None),
        share=min((batch.share for batch in batches), default=1.0),
        n_without_output=sum(not request.output_tokens for request in requests),
    )


def _requests(decisions: Sequence[LoggedDecision], reports: dict[str, list[OutcomeReport]]) -> list[RecordedRequest]:
    """Join decisions, in order of time, with reports. An id may be used again after its request has ended."""
    by_id: dict[str, list[LoggedDecision]] = {}
    for decision in decisions:
        by_id.setdefault(decision.request_id, []).append(decision)
    requests = []
    for request_id, same in by_id.items():
        own = reports.get(request_id, [])
        ends = sorted(report.ended_at_ms for report in own if report.ended_at_ms)
        first = same[0]
        for position, decision in enumerate(same):
            following = same[position + 1] if position + 1 < len(same) else None
            if following is not None and not any(first.decided_at_ms <= end <= following.decided_at_ms for end in ends):
                continue  # it moved
            requests.append(_with_reports(decision, first, following, own))
            if following is not None:
                first = following
    return requests


def _with_reports(
    decision: LoggedDecision, first: LoggedDecision, following: LoggedDecision | None, reports: Sequence[OutcomeReport]
) -> RecordedRequest:
    """first: the first decision of the same request. following: of the next request with the same id."""
    request = RecordedRequest(decision, first.arrived_at_ms)
    until_ms = following.decided_at_ms if following is not None else None
    for report in reports:
        at_ms = report.ended_at_ms or report.prefilled_at_ms
        if at_ms and (at_ms < first.arrived_at_ms or (until_ms is not None and at_ms > until_ms)):
            continue
        request = replace(
            request,
            prefilled_at_ms=min(filter(None, (request.prefilled_at_ms, report.prefilled_at_ms)), default=0),
            ended_at_ms=max(request.ended_at_ms, report.ended_at_ms),
            output_tokens=max(request.output_tokens, report.output_tokens),
        )
    return request
