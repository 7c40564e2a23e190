"""A router: one method for each call that chooses a rank or changes load. HTTP handlers and other code call it.

What lives here: the steps from a parsed request to a booking, which combine the view, the loads and the core. What must
not: aiohttp, JSON and parsing (wire), the rules of a choice (core.routing), calls that change the registry (registry),
how the parts are made (compose), and whether all topics are read (readiness).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any, NamedTuple

from streams.core.engine_metrics import WorkerMetrics, with_bookings
from streams.core.hashing import pack_hashes
from streams.core.ids import Int64Array, RankId
from streams.core.index.interface import Candidates, OverlapScores
from streams.core.loads.bookings import ActiveLoads, Booking, BookingPhase
from streams.core.routing.admission import PROPAGATION_MS, Gate
from streams.core.routing.busy import BusyThresholds, idle_ranks
from streams.core.routing.cost import RankTerms, prefill_tokens
from streams.core.routing.decision import (
    LEARNT_TOGETHER_MAX,
    Decision,
    FleetState,
    RoutePolicy,
    booking_of,
)
from streams.core.routing.eligibility import FilterReason, WorkerFilter, names_another_rank
from streams.core.routing.policies.expected_time import ExpectedTime
from streams.core.routing.selection import RouterMode
from streams.core.routing.sessions import SessionAffinity
from streams.core.routing.supplementary import SupplementaryMatches
from streams.core.routing.trust import FALLBACK, NOT_IN_SYNC, AnswerMode, Trust
from streams.core.workers import Role
from streams.errors import AllWorkersBusy, InvalidRequest, KvStreamsError, NoEligibleWorker, UnknownId
from streams.load_records import request_partition
from streams.router_api.answer import RouteAnswer
from streams.router_api.compose import compose
from streams.router_api.decision_counts import DecisionCounts
from streams.router_api.decision_recorder import wall_ms
from streams.router_api.prompt_matches import PromptMatches
from streams.router_api.registry import PUBLISH_TIMEOUT_S
from streams.router_api.request_ids import RequestIds
from streams.router_api.trust_tracker import TrustSnapshot
from streams.router_api.wire import (
    POLICY_OVERRIDES,
    UNFILTERED,
    Blocks,
    BookRequest,
    MoeQuery,
    RouteRequest,
    blocks_of,
    booking_json,
    matches_json,
    rank_of,
    trust_json,
    worker_filter,
)
from streams.settings import Settings
from streams.topics import topics

#: The parts of the policy that a request may override: first by the overrides' names, then by the policy's own names.
_OVERRIDES = attrgetter(*POLICY_OVERRIDES)
_POLICY_FIELDS = tuple(name.removeprefix("router_") for name in POLICY_OVERRIDES)

#: Those that only mode kv reads.
_ONLY_OF_MODE_KV = {"overlap_score_weight", "temperature"}

#: Observations from which policies learn in one tick, which takes 2 ms. The oldest of the others are dropped.
LEARNT_MAX = 512

#: Models whose filter is kept; a new one takes a microsecond.
_UNFILTERED_MAX = 256

#: How long after its last decision a router counts as asked for decisions.
ASKED_S = 1.0

_NO_SCORES = OverlapScores({})
_NO_RANKS: frozenset[RankId] = frozenset()
_NOTHING_REPORTED = FleetState()


class PreparedRequest(NamedTuple):
    """A request that has been hashed, filtered and matched, so that `Router.try_book` can choose among its ranks.

    It is a tuple because one is made for every request. sequence: the request's sequence hashes, packed as in its
    booking. ranks: those that pass every filter; busy thresholds are checked later. refusal: why there are none.
    scores, supplementary: what the ranks held when the request was prepared. predicted: ranks whose score is a
    prediction. moe_filter_applied: see RouteAnswer. basis: what the trust in the scores depends on; None if the index
    was not read. arrived_at_ms: only if decisions are recorded.
    """

    request: RouteRequest
    request_id: str
    model: str
    policy: RoutePolicy
    blocks: Blocks
    sequence: bytes
    block_size: int
    reads_index: bool
    moe_query: MoeQuery | None
    ranks: Sequence[RankId]
    refusal: KvStreamsError | None
    scores: OverlapScores
    predicted: Set[RankId]
    supplementary: SupplementaryMatches | None
    moe_filter_applied: bool | None
    basis: TrustSnapshot | None
    filters: WorkerFilter
    arrived_at_ms: int = 0


@functools.lru_cache(maxsize=_UNFILTERED_MAX)
def _unfiltered(model: str, block_size: int) -> WorkerFilter:
    """What a request without filters of its own requires. It is the same object for each model."""
    return UNFILTERED._replace(model=model, block_size=block_size)


class _CandidateMatches(NamedTuple):
    """The fields of a PreparedRequest that change while it waits; they have the same names there."""

    ranks: Sequence[RankId]
    refusal: KvStreamsError | None
    scores: OverlapScores
    predicted: Set[RankId]
    supplementary: SupplementaryMatches | None
    moe_filter_applied: bool | None
    basis: TrustSnapshot | None


class Router:
    """One router. `start` begins to read topics; until their ends are reached, `readiness` refuses every call."""

    def __init__(self, settings: Settings) -> None:
        parts = compose(settings)
        self.settings = settings
        self.policy = parts.policy
        self.view = parts.view
        self.loads = parts.loads
        self.registry = parts.registry
        self.recorder = parts.recorder
        self.dead_letters = parts.dead_letters
        self.feeds = parts.feeds
        self.readiness = parts.readiness
        self._kafka = parts.kafka
        self._chooser = parts.chooser
        self._busy = BusyThresholds(settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold)
        self._sessions = SessionAffinity(settings.router_session_affinity_ttl_s)
        n_partitions = topics(settings).router_loads.partitions
        self._request_ids = RequestIds(lambda request_id: request_partition(request_id, n_partitions))
        self._asked_at_s = float("-inf")
        self.decisions = DecisionCounts()
        self.prompt_matches = PromptMatches(lambda model: self.view.fleet.blocks_of_model(model))
        #: Whether the process has begun to stop (draining), and how many requests it did not finish.
        self.stopping = False
        self.requests_cut_off = 0

    # -- the process ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read topics."""
        if self.recorder is not None:
            self.recorder.start()
        self.feeds.start()
        self.readiness.start()

    def stop(self, timeout_s: float = PUBLISH_TIMEOUT_S) -> int:
        """Stop reading topics and wait until Kafka has what was published; returns how many records it does not have.

        timeout_s: limits that wait.
        """
        self.readiness.stop()
        self.feeds.stop()
        if self.recorder is not None:
            self.recorder.stop()
        self.loads.stop(timeout_s)
        return self.loads.unacknowledged

    def tick(self) -> None:
        """Serve delivery reports, expire bookings and avoidances, and let policies learn; call it every half second."""
        self.loads.poll()
        over = self.view.fleet.expire_avoidances()
        if over:
            self.registry.forget(over)
        self.registry.poll()
        for _ in range(LEARNT_MAX // LEARNT_TOGETHER_MAX):
            with self.loads.locked() as loads:
                if not self._chooser.learn(loads, self.settings.block_size_of):
                    break

    @property
    def sessions_evicted(self) -> int:
        """Session bindings dropped because too many were in use, since the router started."""
        return self._sessions.evicted

    # -- decisions -----------------------------------------------------------------------------------------------------

    def route(self, request: RouteRequest, packed: bytes | None = None) -> RouteAnswer:
        """Choose a rank and, unless the request asks otherwise, book it.

        packed: tokens as u32 little-endian, in place of token_ids. Raises the errors that docs/http.md lists.
        """
        return self.try_book(self.prepare(request, packed))

    def prepare(self, request: RouteRequest, packed: bytes | None = None) -> PreparedRequest:
        """Hash a request, list the ranks that pass its filters, and match it against the index.

        This does not take the loads' lock. If no rank passes, the error is not raised but stored as `refusal`: the
        request may repeat the id of a booking, and `try_book` then returns that booking's rank. Raises every other
        error of the request.
        """
        try:
            policy = self._policy(request)
            override = request.router_config_override
            query = None if override is None else override.moe_query
            strict = query is not None and not query.fallback_to_unlabeled
            reads_index = policy.reads_index or (strict and self.settings.reads_index)
            return self._prepare(request, packed, policy, query, reads_index, strict=strict)
        except KvStreamsError:
            self._note_refused(request)
            raise

    def try_book(self, prepared: PreparedRequest) -> RouteAnswer:
        """Choose one of a prepared request's ranks and book it, in one step under the loads' lock.

        A request id that is booked already for the same phase gets the existing choice, and nothing is booked. If the
        request excludes that choice or names another rank, its booking moves: it ends, and the new choice is booked.
        Raises NoEligibleWorker, AllWorkersBusy; then an existing booking stays. After AllWorkersBusy it can be called
        again with the same preparation.
        """
        try:
            answer = self.try_admit(prepared, None)
        except KvStreamsError:
            self.note_refused(prepared)
            raise
        assert answer is not None  # only a gate lets a request wait
        return answer

    def note_refused(self, prepared: PreparedRequest) -> None:
        """Note that a request ended without a booking; see LoadsSync.note_refused."""
        self._note_refused(prepared.request)

    def _note_refused(self, request: RouteRequest) -> None:
        if request.request_id and request.update_states:  # nobody knows an id that the router generates
            self.loads.note_refused(request.request_id, _booked_phase(request.phase))

    def is_asked(self) -> bool:
        """Whether a decision was asked for recently (ASKED_S)."""
        return time.monotonic() - self._asked_at_s < ASKED_S

    def try_admit(self, prepared: PreparedRequest, gate: Gate | None) -> RouteAnswer | None:
        """The same as `try_book`, but None if the gate does not let the request go to the rank that is best for it."""
        self._asked_at_s = time.monotonic()
        if prepared.basis is not None and self.view.is_outdated(prepared.basis):
            prepared = self.refresh(prepared)
        request = prepared.request
        # Before the reports themselves: a report that arrives in between then counts its requests twice, for one
        # decision. In the other order they would count for nothing.
        reported = self.view.fleet.engines.received_ms(prepared.ranks) if prepared.policy.reads_metrics else None
        fleet = self.view.fleet.engines.fleet() if prepared.policy.reads_fleet else _NOTHING_REPORTED
        decision: Decision | None = None
        candidates: tuple[RankTerms, ...] | None = None
        with self.loads.locked() as loads:
            # A client that retries must not book twice. Another router's booking of this id counts as well.
            existing, moves = None, False
            if request.update_states:
                existing = loads.live(prepared.request_id, _booked_phase(request.phase))
                if existing is not None and names_another_rank(existing[1].rank, worker_filter(request)):
                    existing, moves = None, True
            if existing is None:
                decision = (
                    self._choose(prepared, loads, fleet, reported)
                    if gate is None
                    else self._choose_through(gate, prepared, loads, fleet, reported)
                )
                if decision is None:
                    return None
                if request.explain:  # before the booking, which changes the loads that some terms are read from
                    candidates = decision.candidates
                if request.update_states:
                    self._book(prepared, decision, moves=moves)
                    if gate is not None:
                        gate.booked(decision.chosen.rank, loads)
        if existing is not None:
            return self._existing_answer(prepared, existing[1])
        assert decision is not None
        chosen = decision.chosen
        trust = chosen_trust = FALLBACK
        if decision.preferred and prepared.reads_index:
            trust, chosen_trust = self._trust_in(prepared, chosen)
        self.decisions.note(
            prepared.policy.mode,
            chosen.rank.worker_id,
            chosen.scores,
            prepared.blocks.request_blocks,
            trust,
            chosen_trust,
            reads_index=prepared.reads_index,
        )
        if prepared.reads_index:
            self.prompt_matches.note(
                prepared.model,
                prepared.blocks.local.size,
                prepared.scores,
                prepared.predicted,
                pooled=chosen.cxl_accessible_scores > 0,
            )
        if self.recorder is not None:
            self.recorder.note(prepared, decision, trust, chosen_trust)
        return RouteAnswer(
            prepared.request_id,
            chosen.rank,
            self._url_of(chosen.rank),
            chosen.scores,
            prepared.blocks.request_blocks,
            chosen.cost,
            trust,
            chosen_trust,
            prepared.moe_filter_applied,
            candidates,
            pooled_blocks=chosen.cxl_accessible_scores,
            block_size=prepared.block_size if request.explain else None,
        )

    def new_gate(self) -> Gate:
        """What decides whether a waiting request may go to a rank, with this router's thresholds."""

        def idle(ranks: Sequence[RankId], loads: ActiveLoads) -> Sequence[RankId]:
            return idle_ranks(
                ranks, self._busy, self.view.fleet.workers, loads, self.view.fleet.engines.fleet().metrics
            )

        if self.policy.mode is RouterMode.EXPECTED_TIME:
            limit_ms = self.settings.expected_time_queue_ms or None
            return Gate(
                lambda: self.loads.router_id,
                None,
                idle if self._busy else None,
                backlog_ms_max=limit_ms,
                ms_per_token=self.ms_per_token,
            )
        backlog_ms, us_per_token = self.settings.router_queue_backlog_ms, self.settings.prefill_us_per_token
        tokens_max = backlog_ms * 1000.0 / us_per_token if backlog_ms else None
        propagation_tokens = int(PROPAGATION_MS * 1000.0 / us_per_token)
        return Gate(lambda: self.loads.router_id, tokens_max, idle if self._busy else None, propagation_tokens)

    def ms_per_token(self) -> float:
        """Time per prompt token: as learnt in mode expected-time, otherwise as in the settings."""
        if self.policy.mode is RouterMode.EXPECTED_TIME:
            policy = self._chooser.policy(self.policy.policy_name)
            assert isinstance(policy, ExpectedTime)
            return policy.timings.slowest_prefill().slope
        return self.settings.prefill_us_per_token / 1000.0

    def refresh(self, prepared: PreparedRequest) -> PreparedRequest:
        """Filter and match a prepared request again, since ranks and the index may have changed."""
        candidates = self._candidates(
            prepared.filters,
            prepared.blocks,
            prepared.policy,
            prepared.moe_query,
            prepared.reads_index,
            strict=prepared.moe_filter_applied is not None,
        )
        return prepared._replace(**candidates._asdict())

    def uncached_tokens(self, prepared: PreparedRequest) -> int:
        """How many tokens the rank that holds the most of a prepared request would have to compute."""
        best = 0.0
        if prepared.reads_index and prepared.ranks:
            effective = prepared.scores.columns(Candidates(prepared.ranks), prepared.policy.tier_weights)[1]
            best = float(effective.max())
        return prefill_tokens(prepared.blocks.n_tokens, best, prepared.block_size)

    def potential(self, request: RouteRequest, packed: bytes | None = None) -> dict[str, Any]:
        """Return the load that each eligible rank would have with this request."""
        policy = self._policy(request)
        reads_index = policy.overlap_score_weight > 0.0
        prepared = self._prepare(request, packed, policy, None, reads_index, strict=False)
        if prepared.refusal is not None:
            raise prepared.refusal
        ranks, block_size = prepared.ranks, prepared.block_size
        with self.loads.locked() as loads:
            load = loads.columns(loads.rows_of(ranks), prepared.sequence)
        candidates = Candidates(ranks)
        scores, effective = prepared.scores.columns(candidates, policy.tier_weights)
        if prepared.supplementary is not None:
            weighed = prepared.supplementary.weigh(candidates, scores, effective, policy.cxl_score_weight, 0.0)
            effective = effective if weighed is None else weighed.with_pooled
        rows = []
        for rank, active_tokens, decode_blocks, cached in zip(
            ranks, load.prefill_tokens.tolist(), load.decode_blocks.tolist(), effective.tolist(), strict=True
        ):
            own_tokens = prefill_tokens(prepared.blocks.n_tokens, cached, block_size)
            rows.append(
                {
                    "worker_id": rank.worker_id,
                    "dp_rank": rank.dp_rank,
                    "potential_prefill_tokens": active_tokens + own_tokens,
                    "potential_decode_blocks": decode_blocks,
                }
            )
        trust = FALLBACK
        if reads_index:
            trust = self._trust(prepared, ranks, pooled=_pooled(prepared), labelled=False)
        return {"loads": rows, **trust_json(trust)}

    def matches(self, request: RouteRequest, packed: bytes | None = None) -> dict[str, Any]:
        """Return how many of a request's blocks each eligible rank holds, reaches in a pool, and has labels for.

        These are counts of blocks without weights, of every rank that has any. Nothing is chosen or booked.
        """
        override = request.router_config_override
        query = None if override is None else override.moe_query
        # Pooled blocks are counted whatever their weight is, and no mode requires a worker here.
        policy = replace(self.policy, mode=RouterMode.KV, cxl_score_weight=1.0)
        prepared = self._prepare(request, packed, policy, query, True, strict=False)
        if prepared.refusal is not None:
            raise prepared.refusal
        ranks = prepared.ranks
        candidates = Candidates(ranks)
        scores, effective = prepared.scores.columns(candidates, policy.tier_weights)
        columns: list[Int64Array | None] = [scores, None, None]
        if prepared.supplementary is not None:
            weighed = prepared.supplementary.weigh(candidates, scores, effective, 1.0, 0.0)
            if weighed is not None:
                columns = [scores, weighed.cxl_accessible_scores, weighed.moe_scores]
        counts = [[0] * len(ranks) if column is None else column.tolist() for column in columns]
        matched = {rank: terms for rank, *terms in zip(ranks, *counts, strict=True) if any(terms)}
        labelled = query is not None and query.counts(1.0)
        trust = self._trust(prepared, ranks, pooled=prepared.model, labelled=labelled)
        return matches_json(prepared.blocks.request_blocks, matched, trust)

    def _prepare(
        self,
        request: RouteRequest,
        packed: bytes | None,
        policy: RoutePolicy,
        query: MoeQuery | None,
        reads_index: bool,
        *,
        strict: bool,
    ) -> PreparedRequest:
        """strict: only ranks with matching labels pass, if there are any and the index is read."""
        self.readiness.check()
        filters = worker_filter(request)  # before the model, so that an invalid field is reported before UnknownModel
        model = self.view.fleet.model_of(request.model)
        block_size = self.view.fleet.block_size_of(model)
        blocks = blocks_of(
            request.token_ids if packed is None else packed,
            request.block_hashes,
            block_size=block_size,
            lora_name=request.lora_name,
            namespace=request.namespace,
            cache_salt=request.cache_salt,
            tokens_max=self.settings.request_tokens_max,
        )
        if filters is UNFILTERED:
            filters = _unfiltered(model, block_size)
        else:
            filters = filters._replace(model=model, block_size=block_size)
        ranks, refusal, scores, predicted, supplementary, moe_filter_applied, basis = self._candidates(
            filters, blocks, policy, query, reads_index, strict=strict
        )
        return PreparedRequest(
            request,
            request.request_id or self._request_ids.next(),
            model,
            policy,
            blocks,
            pack_hashes(blocks.chain),
            block_size,
            reads_index,
            query,
            ranks,
            refusal,
            scores,
            predicted,
            supplementary,
            moe_filter_applied,
            basis,
            filters,
            0 if self.recorder is None else wall_ms(),
        )

    def _candidates(
        self,
        filters: WorkerFilter,
        blocks: Blocks,
        policy: RoutePolicy,
        query: MoeQuery | None,
        reads_index: bool,
        *,
        strict: bool,
    ) -> _CandidateMatches:
        """List the ranks that a request may go to, and match it against the index."""
        ranks: Sequence[RankId] = ()
        refusal: KvStreamsError | None = None
        scores, predicted, supplementary = _NO_SCORES, _NO_RANKS, None
        moe_filter_applied = False if strict else None
        basis = self.view.snapshot() if reads_index else None
        try:
            ranks = self._eligible(filters, policy.mode)
            if reads_index:
                scores, predicted = self.view.overlap(blocks.local)
                if self.view.facts.has_any:
                    selector = None if query is None else query.selector()
                    pooled = policy.cxl_score_weight > 0.0
                    supplementary = self.view.supplementary(blocks.chain, filters.model, selector, pooled=pooled)
            if strict and reads_index:
                ranks, moe_filter_applied = self._matching(ranks, filters, scores, supplementary)
        except (NoEligibleWorker, InvalidRequest) as exc:
            ranks, refusal = (), exc
        return _CandidateMatches(ranks, refusal, scores, predicted, supplementary, moe_filter_applied, basis)

    def _eligible(self, filters: WorkerFilter, mode: RouterMode) -> Sequence[RankId]:
        if mode is RouterMode.DIRECT and filters.worker_id is None:
            raise InvalidRequest("worker_id is missing: in mode direct every request names its worker")
        ranks = self.view.fleet.eligible(filters)
        if not ranks:
            raise self._no_eligible_worker(filters)
        return ranks

    def _no_eligible_worker(self, filters: WorkerFilter) -> NoEligibleWorker:
        serving = sum(worker.model == filters.model for worker in self.registry.workers())
        if not serving:
            return NoEligibleWorker(
                "no worker is registered",
                remedy="`kvstreams bridge` or PUT /workers/{id} registers one",
                workers=0,
                refused_ranks={},
            )
        refused = self.view.fleet.refusals(filters)
        reasons = ", ".join(f"{reason} {n}" for reason, n in refused.items() if reason is not FilterReason.OTHER_MODEL)
        return NoEligibleWorker(
            f"{serving} workers serve {filters.model!r}, but none of their ranks passes the filters ({reasons})",
            remedy="Check the request's worker_id, dp_rank, allowed_worker_ids, excluded_worker_ids, required_taints, "
            "lora_name and phase, and lora_names, state, wrong_block_size_dp_ranks and silent_dp_ranks in GET /workers",
            workers=serving,
            refused_ranks=refused,
        )

    def _matching(
        self,
        passing: Sequence[RankId],
        filters: WorkerFilter,
        scores: OverlapScores,
        supplementary: SupplementaryMatches | None,
    ) -> tuple[Sequence[RankId], bool]:
        """Return the passing ranks that hold a matching block, or all passing ranks if no rank holds one.

        Also returns whether any rank holds one, so that the filter applied. A rank stays as well if it holds leading
        blocks and some of its labels were dropped, since it may match. Exclusions apply last: if only excluded ranks
        match, the request is refused, and no other rank is used instead.
        """
        considered = self.view.fleet.eligible(filters._replace(excluded=frozenset())) if filters.excluded else passing
        matching = set[RankId]() if supplementary is None else supplementary.matching(considered, scores)
        if not matching:
            return passing, False
        matching |= {rank for rank in self.view.index.ranks_missing_labels(passing) if scores.scores.get(rank, 0)}
        left = [rank for rank in passing if rank in matching]
        if not left:
            raise NoEligibleWorker(
                "every rank whose cached blocks match moe_query is excluded",
                remedy="Set fallback_to_unlabeled, or exclude fewer workers",
                matching=len(matching),
            )
        return left, True

    def _choose(
        self, prepared: PreparedRequest, loads: ActiveLoads, fleet: FleetState, reported: Mapping[RankId, int] | None
    ) -> Decision:
        """reported: when the last report of each rank was received; None if the policy reads none."""
        if prepared.refusal is not None:
            raise prepared.refusal
        ranks = prepared.ranks
        if self._busy and ranks:
            ranks = idle_ranks(
                ranks,
                self._busy,
                self.view.fleet.workers,
                loads,
                fleet.metrics,
                rows=self._chooser.rows_of(ranks, loads),
                blocks=self.view.fleet.engines.blocks_in_use(ranks) if self._busy.decode_blocks > 0.0 else None,
            )
        if not ranks:
            raise AllWorkersBusy(
                f"all {len(prepared.ranks)} ranks that pass the request's filters are busy",
                remedy="Try again; active_decode_blocks_threshold and active_prefill_tokens_threshold define busy",
                ranks=len(prepared.ranks),
            )
        if reported:
            fleet = replace(fleet, metrics=self._with_unreported(fleet.metrics, reported))
        session = _session_of(prepared)
        bound = None if session is None else self._sessions.rank_of(session, time.monotonic())
        return self._chooser.choose(
            prepared.policy,
            [bound] if bound is not None and self._chooser.includes(ranks, bound, loads) else ranks,
            prepared.scores,
            loads,
            sequence=prepared.sequence,
            request_blocks=prepared.blocks.request_blocks,
            block_size=prepared.block_size,
            n_tokens=prepared.blocks.n_tokens,
            fleet=fleet,
            supplementary=prepared.supplementary,
            model=prepared.model,
            capacity_blocks=self.view.fleet.engines.blocks_in_use(ranks).total if prepared.policy.policy_name else None,
            expected_output_tokens=prepared.request.expected_output_tokens,
        )

    def _choose_through(
        self,
        gate: Gate,
        prepared: PreparedRequest,
        loads: ActiveLoads,
        fleet: FleetState,
        reported: Mapping[RankId, int] | None,
    ) -> Decision | None:
        """The same as `_choose`, but None if the gate does not let the request go now."""
        if prepared.refusal is None and not gate.may_go(prepared.ranks, loads):
            return None
        return gate.decide(
            prepared.ranks,
            loads,
            lambda: self._choose(prepared, loads, fleet, reported),
            prepared.blocks.n_tokens,
            prepared.block_size,
        )

    def _with_unreported(
        self, metrics: Mapping[RankId, WorkerMetrics], reported: Mapping[RankId, int]
    ) -> dict[RankId, WorkerMetrics]:
        """Return metrics with what was booked on each rank since its last report."""
        booked = self.loads.unreported(reported)
        known = [rank for rank in booked if rank in metrics]  # a report may have expired in between
        return {**metrics, **{rank: with_bookings(metrics[rank], *booked[rank]) for rank in known}}

    def _book(self, prepared: PreparedRequest, decision: Decision, *, moves: bool) -> None:
        """Charge the chosen rank, predict that it will hold the request's blocks, and bind the session to it.

        moves: end the request's former booking.
        """
        chosen, blocks = decision.chosen, prepared.blocks
        booking = booking_of(
            chosen,
            model=prepared.model,
            sequence=prepared.sequence,
            n_tokens=blocks.n_tokens,
            request_blocks=blocks.request_blocks,
            block_size=prepared.block_size,
            expected_output_tokens=prepared.request.expected_output_tokens,
            phase=_booked_phase(prepared.request.phase),
            forecast=decision.forecast(),
        )
        self.loads.book(prepared.request_id, booking, moves=moves)
        self.view.predictions.predict(chosen.rank, blocks.local)
        session = _session_of(prepared)
        if session is not None:
            self._sessions.bind(session, chosen.rank, time.monotonic())

    def _existing_answer(self, prepared: PreparedRequest, booking: Booking) -> RouteAnswer:
        """Return a booking's choice. Its overlap is that of the booking, which is exact only if it is still so."""
        policy, query = prepared.policy, prepared.moe_query
        trust = FALLBACK
        if policy.reads_index:
            # A booking does not say what its score was made of, so it may have used pooled blocks and labels.
            labelled = query is not None and query.counts(policy.moe_score_weight)
            trust = self._trust(prepared, (booking.rank,), pooled=_pooled(prepared), labelled=labelled)
        if trust.mode is AnswerMode.EXACT:
            # If the request was refused, the index was not read.
            now = None if prepared.refusal else prepared.scores.scores.get(booking.rank, 0)
            trust = trust if now == booking.overlap_blocks else FALLBACK
        return RouteAnswer(
            prepared.request_id,
            booking.rank,
            self._url_of(booking.rank),
            booking.overlap_blocks,
            booking.request_blocks,
            None,
            trust,
            trust,
        )

    def _policy(self, request: RouteRequest) -> RoutePolicy:
        override = request.router_config_override
        if override is None:
            return self.policy
        given = zip(_POLICY_FIELDS, _OVERRIDES(override), strict=True)
        changes = {name: value for name, value in given if value is not None}
        # A request that sets a parameter of mode kv asks for the formula that has it.
        if self.policy.mode is RouterMode.EXPECTED_TIME and changes.keys() & _ONLY_OF_MODE_KV:
            changes.setdefault("mode", RouterMode.KV)
        policy = replace(self.policy, **changes) if changes else self.policy  # moe_query is not part of the policy
        if policy.mode is RouterMode.POLICY and not policy.name:
            raise InvalidRequest("router_mode is policy, but this router has no router_policy")
        return policy

    def _trust_in(self, prepared: PreparedRequest, chosen: RankTerms) -> tuple[Trust, Trust]:
        """Return the least trust that any eligible rank deserves, and that of the chosen rank alone.

        For the chosen rank, pooled blocks and labels limit trust only if its own score is made of them.
        """
        policy, query = prepared.policy, prepared.moe_query
        labelled = query is not None and query.counts(policy.moe_score_weight)
        trust = self._trust(prepared, prepared.ranks, pooled=_pooled(prepared), labelled=labelled)
        if trust.mode is AnswerMode.EXACT:  # then it is exact for each of them
            return trust, trust
        if labelled:
            assert query is not None
            labelled = chosen.moe_scores > 0 or not query.fallback_to_unlabeled
        pooled = prepared.model if chosen.cxl_accessible_scores > 0 else None
        return trust, self._trust(prepared, (chosen.rank,), pooled=pooled, labelled=labelled)

    def _trust(
        self,
        prepared: PreparedRequest,
        ranks: Sequence[RankId],
        *,
        pooled: str | None,
        labelled: bool,
    ) -> Trust:
        """Return the least trust that any of these ranks deserves, if the index was read for them."""
        trust = self.view.assess(ranks, prepared.predicted, pooled=pooled, labelled=labelled, before=prepared.basis)
        # Load is part of the cost. While bookings are out of sync, this router has only its own part of the load.
        out_of_sync = trust.mode in (AnswerMode.EXACT, AnswerMode.APPROXIMATE) and not self.loads.in_sync
        return NOT_IN_SYNC if out_of_sync else trust

    def _url_of(self, rank: RankId) -> str | None:
        worker = self.view.fleet.workers.get(rank.worker_id)
        return None if worker is None else worker.url

    # -- loads ---------------------------------------------------------------------------------------------------------

    def rank_loads(self) -> dict[str, Any]:
        """Return the active load of every rank that is registered or has bookings, and the metrics of its engine."""
        self.readiness.check()
        rows = []
        engine_metrics = self.view.fleet.engines.fleet().metrics
        with self.loads.locked() as loads:
            for rank in sorted({*self.view.fleet.all_ranks(), *loads.ranks()}):
                load = loads.load(rank)
                rows.append(
                    {
                        "worker_id": rank.worker_id,
                        "dp_rank": rank.dp_rank,
                        "active_prefill_tokens": load.prefill_tokens,
                        "active_decode_blocks": load.decode_blocks,
                        "active_requests": load.requests,
                        "engine_metrics": None if rank not in engine_metrics else asdict(engine_metrics[rank]),
                    }
                )
        return {"loads": rows, "in_sync": self.loads.in_sync}

    def book(self, request_id: str, body: BookRequest, packed: bytes | None = None) -> dict[str, Any]:
        """Book a choice that was made elsewhere. packed: tokens as u32 little-endian, in place of token_ids.

        Repeating the call changes nothing. Raises UnknownId, or BookingConflict if the id is booked on another rank for
        the same phase.
        """
        self.readiness.check()
        rank = rank_of(body)
        worker = self.registry.worker(rank.worker_id)
        if rank.dp_rank >= worker.dp_size:
            raise UnknownId(f"worker {rank.worker_id} has {worker.dp_size} ranks, and no rank {rank.dp_rank}")
        blocks = blocks_of(
            body.token_ids if packed is None else packed,
            body.block_hashes,
            block_size=worker.block_size,
            lora_name=body.lora_name,
            namespace=body.namespace,
            cache_salt=body.cache_salt,
            tokens_max=self.settings.request_tokens_max,
        )
        overlap_blocks = min(body.overlap_blocks, blocks.request_blocks)
        booking = Booking(
            rank=rank,
            model=worker.model,
            prefill_tokens=prefill_tokens(blocks.n_tokens, overlap_blocks, worker.block_size),
            sequence=pack_hashes(blocks.chain),
            overlap_blocks=overlap_blocks,
            request_blocks=blocks.request_blocks,
            expected_output_tokens=body.expected_output_tokens,
            phase=_booked_phase(body.phase),
        )
        with self.loads.locked():  # another router's booking of this id may have come
            self.loads.book(request_id, booking)
        self.view.predictions.predict(rank, blocks.local)
        return booking_json(request_id, booking)

    def report_phase(self, request_id: str, what: BookingPhase, phase: str | None = None) -> dict[str, Any]:
        """Apply prefill-complete or free. `buffered` is true if no booking of the id was read yet.

        phase: the bookings of this part of the request, `prefill` or `decode`; None stands for all bookings of the id.
        """
        self.readiness.check()
        buffered = not self.loads.report_phase(request_id, what, phase)
        if self.recorder is not None:
            self.recorder.reported(request_id, what)
        return {"request_id": request_id, "phase": what.value, "buffered": buffered}

    def report_output(self, request_id: str, output_tokens: int, phase: str | None = None) -> dict[str, Any]:
        """Apply the number of tokens generated so far. phase and `buffered` are as in `report_phase`."""
        self.readiness.check()
        buffered = not self.loads.report_output(request_id, output_tokens, phase)
        if self.recorder is not None:
            self.recorder.output(request_id, output_tokens)
        return {"request_id": request_id, "output_tokens": output_tokens, "buffered": buffered}


def _pooled(prepared: PreparedRequest) -> str | None:
    """The model of a request that uses pooled blocks; None for one that does not."""
    return prepared.model if prepared.policy.cxl_score_weight > 0.0 else None


def _booked_phase(phase: Role | None) -> str | None:
    """The phase by which a booking is identified: a request for both phases is one for the whole request."""
    return None if phase is None or phase is Role.BOTH else phase.value


def _session_of(prepared: PreparedRequest) -> tuple[object, ...] | None:
    request = prepared.request
    return None if request.session_id is None else (prepared.model, request.phase, request.session_id)
