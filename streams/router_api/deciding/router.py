"""A router: one method for each call that chooses a rank or changes load. HTTP handlers and other code call it.

What lives here: the steps from a parsed request to a booking, which combine the view, the loads and the core. What must
not: aiohttp, JSON and parsing (messages), the rules of a choice (core.routing), changes of the registry (registry), how
the parts are made (compose), and whether all topics are read (readiness).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash

from streams.core.hashing import pack_hashes, sequence_hashes
from streams.core.ids import Int64Array, RankId
from streams.core.index.interface import Candidates
from streams.core.loads.bookings import ActiveLoads, Booking, BookingPhase
from streams.core.loads.observations import NO_FORECAST
from streams.core.routing.admission import PROPAGATION_MS, Gate
from streams.core.routing.audit import OVER_MIN, WINDOW
from streams.core.routing.cost import RankTerms, prefill_tokens
from streams.core.routing.decision import LEARNT_TOGETHER_MAX, Decision
from streams.core.routing.eligibility import WorkerFilter, names_another_rank
from streams.core.routing.policies.expected_time import ExpectedTime
from streams.core.routing.request import (
    FleetState,
    LabelUse,
    Matches,
    PromptBlocks,
    RoutePolicy,
    RoutingRequest,
)
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import APPROXIMATE, FALLBACK, NOT_IN_SYNC, AnswerMode, Trust
from streams.cxl.pooled_index import PooledScore, PoolShare
from streams.errors import InvalidRequest, KvStreamsError, UnknownId
from streams.kafka.load_records import request_partition
from streams.router_api.deciding.compose import compose, monotonic_ms
from streams.router_api.deciding.decision_counts import DecisionCounts
from streams.router_api.deciding.decision_recorder import wall_ms
from streams.router_api.deciding.kv_sources import KvSources
from streams.router_api.deciding.matching import match
from streams.router_api.deciding.prepared_request import PreparedRequest, booked_phase
from streams.router_api.deciding.prompt_matches import PromptMatches
from streams.router_api.deciding.recent_decisions import RecentDecisions
from streams.router_api.deciding.state_digests import copy_state, digests_of, facts_of
from streams.router_api.knowledge.record_clock import RecordClock
from streams.router_api.messages.answer import RouteAnswer
from streams.router_api.messages.answer_json import booking_json, matches_json, metrics_json, trust_json
from streams.router_api.messages.requests import (
    POLICY_OVERRIDES,
    UNFILTERED,
    BookRequest,
    MoeQuery,
    RouteRequest,
    blocks_of,
    rank_of,
    worker_filter,
)
from streams.router_api.sharing.registry import PUBLISH_TIMEOUT_S
from streams.router_api.sharing.request_ids import RequestIds
from streams.settings import RouterServerSettings
from streams.topics import topics

log = logging.getLogger(__name__)

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


@functools.lru_cache(maxsize=_UNFILTERED_MAX)
def _unfiltered(model: str, block_size: int) -> WorkerFilter:
    """What a request without filters of its own requires. It is the same object for each model."""
    return UNFILTERED._replace(model=model, block_size=block_size)


def limited(trust: Trust, request: RouteRequest) -> Trust:
    """Return the trust in an overlap, given how much of the prompt was compared."""
    if request.prompt_part == "none":
        return FALLBACK
    return APPROXIMATE if request.prompt_part == "beginning" and trust.mode is AnswerMode.EXACT else trust


def unshared_blocks(request_id: str, n_blocks: int, sequences: int) -> bytes:
    """Return the packed hashes of blocks that no other request uses.

    n_blocks: of tokens that the router does not have. sequences: if there are several, each has a block of its own
    for what it generates.
    """
    n = n_blocks + (sequences if sequences > 1 else 0)
    if not n:
        return b""
    first = xxhash.xxh3_64_intdigest(request_id.encode()) >> 1  # so that the last one is a u64 as well
    return pack_hashes(sequence_hashes(np.arange(first, first + n, dtype=np.uint64)))


class Router:
    """One router. `start` begins to read topics; until their ends are reached, `readiness` refuses every call."""

    def __init__(self, settings: RouterServerSettings, replayed: RecordClock | None = None) -> None:
        """replayed: see `compose`; `start` is not called then."""
        parts = compose(settings, replayed)
        self.settings = settings
        self.policy = parts.policy
        self.view = parts.view
        self.loads = parts.loads
        self.registry = parts.registry
        self.recorder = parts.recorder
        self.dead_letters = parts.dead_letters
        self.feeds = parts.feeds
        self._rereading = parts.rereading
        self.readiness = parts.readiness
        self._kafka = parts.kafka
        self._chooser = parts.chooser
        self.audit = parts.audit
        n_partitions = topics(settings).router_loads.partitions
        self._request_ids = RequestIds(lambda request_id: request_partition(request_id, n_partitions))
        self._asked_at_s = float("-inf")
        self.decisions = DecisionCounts()
        self.recent = RecentDecisions()
        self._kv_sources = KvSources(self.view, settings.router_kv_p2p_port)
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
        self._rereading.start()
        self.readiness.start()

    def stop(self, timeout_s: float = PUBLISH_TIMEOUT_S) -> int:
        """Stop reading topics and wait until Kafka has what was published; returns how many records it does not have.

        timeout_s: limits that wait.
        """
        self.readiness.stop()
        self._rereading.stop()
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
        self.recent.settle()
        for _ in range(LEARNT_MAX // LEARNT_TOGETHER_MAX):
            with self.loads.locked() as loads:
                if not self._chooser.learn(loads, self.settings.block_size_of):
                    break
        for rank in self.audit.judge_due(monotonic_ms()):
            self.view.trust.note_disagreeing(rank)
            log.warning(
                "the engine of rank %s found fewer cached blocks than this router's index has, in %d or more of its "
                "last %d reported requests, and no eviction explains it. Answers for the rank are approximate "
                "(audit_disagrees) until its cache is cleared or its engine restarts",
                rank,
                OVER_MIN,
                WINDOW,
            )

    @property
    def sessions_evicted(self) -> int:
        """Session bindings dropped because too many were in use, since the router started."""
        return self._chooser.sessions.evicted

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
            return self._prepare(request, packed, policy, query, reads_index=reads_index, strict=strict)
        except KvStreamsError:
            self._note_refused(request)
            raise

    def try_book(self, prepared: PreparedRequest) -> RouteAnswer:
        """Choose one of a prepared request's ranks and book it, in one step under the loads' lock.

        A request id that is booked already for the same phase gets the existing choice, and nothing is booked. If the
        request excludes that choice or names another rank, its booking is reassigned: it ends, and the new choice is
        booked. Raises NoEligibleWorker, AllWorkersBusy; then an existing booking stays. After AllWorkersBusy it can be
        called again with the same preparation.
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
            self.loads.note_refused(request.request_id, booked_phase(request.phase))

    def is_asked(self) -> bool:
        """Whether a decision was asked for recently (ASKED_S)."""
        return time.monotonic() - self._asked_at_s < ASKED_S

    def try_admit(self, prepared: PreparedRequest, gate: Gate | None) -> RouteAnswer | None:
        """The same as `try_book`, but None if the gate does not let the request go to the rank that is best for it."""
        now_s = self._asked_at_s = time.monotonic()
        snapshot = prepared.routing.matches.snapshot
        if snapshot is not None and self.view.is_outdated(snapshot):
            prepared = self.refresh(prepared)
        request, routing, chooser = prepared.request, prepared.routing, self._chooser
        if chooser.reads_fleet(routing.policy):
            routing = routing._replace(fleet=self._fleet_state(routing))
        candidates: tuple[RankTerms, ...] | None = None
        with self.loads.locked() as loads:
            # A client that retries must not book twice. Another router's booking of this id counts as well.
            existing = loads.live(prepared.request_id, prepared.booked_phase) if request.update_states else None
            reassigns = existing is not None and names_another_rank(existing[1].rank, prepared.filters)
            decision: Decision | None = None
            if existing is None or reassigns:
                decision = (
                    chooser.choose(routing, loads, now_s)
                    if gate is None
                    else gate.decide(routing, loads, chooser, now_s)
                )
                if decision is None:
                    return None
                if request.explain:  # before the booking, which changes the loads that some terms are read from
                    candidates = decision.candidates
                if request.update_states:
                    rank, booking = decision.chosen.rank, decision.booking(prepared.booked_phase)
                    if prepared.expect is not None and booking.forecast == NO_FORECAST:
                        booking = booking._replace(forecast=prepared.expect(booking))
                    self.loads.book(prepared.request_id, booking, reassigns=reassigns)
                    self.view.predictions.predict(rank, prepared.blocks.local)
                    chooser.bind(routing, rank, now_s)
                    if gate is not None:
                        gate.booked(rank, loads)
        if decision is not None:
            return self._answer(prepared, decision, candidates)
        assert existing is not None  # otherwise there is a decision
        return self._existing_answer(prepared, existing[1])

    def _fleet_state(self, routing: RoutingRequest) -> FleetState:
        """What engines report, for a policy that reads it."""
        engines = self.view.fleet.engines
        return engines.fleet(routing.matches.ranks if routing.policy.counts_unreported else None)

    def _answer(
        self, prepared: PreparedRequest, decision: Decision, candidates: tuple[RankTerms, ...] | None
    ) -> RouteAnswer:
        """Count a decision, record it, and return it with the trust in it."""
        chosen, routing = decision.chosen, prepared.routing
        prompt, matches = routing.prompt, routing.matches
        trust, chosen_trust = (limited(each, prepared.request) for each in decision.trust(self._assess))
        snapshot = matches.snapshot
        reads_index = snapshot is not None
        if snapshot is not None and prepared.request.update_states:
            self.audit.promise(
                prepared.request_id,
                None if prepared.request.phase is None else prepared.booked_phase,
                chosen.rank,
                chosen.scores,
                prompt,
                chosen_trust.mode is AnswerMode.EXACT,
                snapshot.run_changes,
            )
        self.decisions.note(
            routing.policy.mode,
            chosen.rank.worker_id,
            chosen.scores,
            prompt.request_blocks,
            trust,
            chosen_trust,
            reads_index=reads_index,
        )
        if self._asked_at_s >= self.recent.due_s:
            self.recent.note(self._asked_at_s, decision, chosen_trust)
        if reads_index:
            self.prompt_matches.note(
                prompt.model,
                prepared.blocks.local.size,
                matches.scores,
                matches.predicted,
                pooled=chosen.cxl_accessible_scores > 0,
            )
        if self.recorder is not None:
            self.recorder.note(prepared, decision, trust, chosen_trust)
        worker = self.view.fleet.workers.get(chosen.rank.worker_id)
        return RouteAnswer(
            prepared.request_id,
            chosen.rank,
            None if worker is None else worker.url,
            chosen.scores,
            prompt.request_blocks,
            chosen.cost,
            routing.policy.mode,
            trust,
            chosen_trust,
            matches.moe_filter_applied,
            candidates,
            pooled_blocks=chosen.cxl_accessible_scores,
            block_size=prompt.block_size if prepared.request.explain else None,
            dp_size=None if worker is None else worker.dp_size,
            alternatives=decision.alternatives(prepared.request.alternatives) if prepared.request.alternatives else (),
            pool_shares=self._pool_shares(prepared, candidates or ()),
            kv_sources=self._kv_sources.of(prepared, decision) if prepared.request.kv_sources else None,
        )

    def _pool_shares(
        self, prepared: PreparedRequest, candidates: Sequence[RankTerms]
    ) -> Mapping[RankId, tuple[PoolShare, ...]]:
        """From which pools the candidates' pooled blocks come, for those that have any."""
        pooled = [terms for terms in candidates if terms.cxl_accessible_scores > 0]
        if not pooled:
            return {}
        scores = [PooledScore(each.rank.worker_id, each.scores, each.cxl_accessible_scores) for each in pooled]
        facts, registered = self.view.facts, self.view.fleet.numbers().workers
        shares = facts.pool_shares(prepared.blocks.chain, prepared.filters.model, scores, registered)
        return {terms.rank: share for terms, share in zip(pooled, shares, strict=True)}

    def new_gate(self) -> Gate:
        """What decides whether a waiting request may go to a rank, with this router's thresholds."""

        def idle(ranks: Sequence[RankId], loads: ActiveLoads) -> Sequence[RankId]:
            return self._chooser.idle(ranks, loads, self.view.fleet.engines.blocks_in_use)

        idle_if_needed = idle if self._chooser.has_thresholds else None
        if self.policy.mode is RouterMode.EXPECTED_TIME:
            limit_ms = self.settings.expected_time_queue_ms or None
            return Gate(
                lambda: self.loads.router_id,
                None,
                idle_if_needed,
                backlog_ms_max=limit_ms,
                ms_per_token=self.ms_per_token,
            )
        backlog_ms, us_per_token = self.settings.router_queue_backlog_ms, self.settings.prefill_us_per_token
        tokens_max = backlog_ms * 1000.0 / us_per_token if backlog_ms else None
        propagation_tokens = int(PROPAGATION_MS * 1000.0 / us_per_token)
        return Gate(lambda: self.loads.router_id, tokens_max, idle_if_needed, propagation_tokens)

    def ms_per_token(self, model: str | None = None) -> float:
        """Time per prompt token: as learnt in mode expected-time, otherwise as in the settings.

        model: None for the slowest one.
        """
        if self.policy.mode is RouterMode.EXPECTED_TIME:
            policy = self._chooser.policy(self.policy.policy_name)
            assert isinstance(policy, ExpectedTime)
            timings = policy.timings
            return timings.slowest_prefill().slope if model is None else timings.of(model).prefill.slope
        return self.settings.prefill_us_per_token / 1000.0

    def refresh(self, prepared: PreparedRequest) -> PreparedRequest:
        """Filter and match a prepared request again, since ranks and the index may have changed."""
        routing = prepared.routing
        before = routing.matches
        matches = match(
            self.view,
            prepared.filters,
            prepared.blocks,
            routing.policy,
            prepared.moe_query,
            reads_index=before.snapshot is not None,
            strict=before.moe_filter_applied is not None,
        )
        return prepared._replace(routing=routing._replace(matches=matches))

    def uncached_tokens(self, prepared: PreparedRequest) -> int:
        """How many tokens the rank that holds the most of a prepared request would have to compute."""
        policy, prompt, matches = prepared.routing[:3]
        best = 0.0
        if matches.snapshot is not None and matches.ranks:
            effective = matches.scores.columns(Candidates(matches.ranks), policy.tier_weights)[1]
            best = float(effective.max())
        return prefill_tokens(prompt.n_tokens, best, prompt.block_size)

    def potential(self, request: RouteRequest, packed: bytes | None = None) -> dict[str, Any]:
        """Return the load that each eligible rank would have with this request."""
        policy = self._policy(request)
        reads_index = policy.overlap_score_weight > 0.0
        routing = self._prepare(request, packed, policy, None, reads_index=reads_index, strict=False).routing
        prompt, matches = routing.prompt, routing.matches
        if matches.refusal is not None:
            raise matches.refusal
        ranks = matches.ranks
        with self.loads.locked() as loads:
            load = loads.columns(loads.rows_of(ranks), prompt.sequence)
        candidates = Candidates(ranks)
        scores, effective = matches.scores.columns(candidates, policy.tier_weights)
        if matches.supplementary is not None:
            weighed = matches.supplementary.weigh(candidates, scores, effective, policy.cxl_score_weight, 0.0)
            effective = effective if weighed is None else weighed.with_pooled
        rows = []
        for rank, active_tokens, decode_blocks, cached in zip(
            ranks, load.prefill_tokens.tolist(), load.decode_blocks.tolist(), effective.tolist(), strict=True
        ):
            own_tokens = prefill_tokens(prompt.n_tokens, cached, prompt.block_size)
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
            pooled = prompt.model if policy.cxl_score_weight > 0.0 else None
            trust = limited(self._assess(ranks, matches, pooled=pooled, labelled=False), request)
        return {"loads": rows, **trust_json(trust)}

    def matches(self, request: RouteRequest, packed: bytes | None = None) -> dict[str, Any]:
        """Return how many of a request's blocks each eligible rank holds, reaches in a pool, and has labels for.

        These are counts of blocks without weights, of every rank that has any. Nothing is chosen or booked.
        """
        override = request.router_config_override
        query = None if override is None else override.moe_query
        # Pooled blocks are counted whatever their weight is, and no mode requires a worker here.
        policy = replace(self.policy, mode=RouterMode.KV, cxl_score_weight=1.0)
        routing = self._prepare(request, packed, policy, query, reads_index=True, strict=False).routing
        prompt, matches = routing.prompt, routing.matches
        if matches.refusal is not None:
            raise matches.refusal
        ranks = matches.ranks
        candidates = Candidates(ranks)
        scores, effective = matches.scores.columns(candidates, policy.tier_weights)
        columns: list[Int64Array | None] = [scores, None, None]
        if matches.supplementary is not None:
            weighed = matches.supplementary.weigh(candidates, scores, effective, 1.0, 0.0)
            if weighed is not None:
                columns = [scores, weighed.cxl_accessible_scores, weighed.moe_scores]
        counts = [[0] * len(ranks) if column is None else column.tolist() for column in columns]
        matched = {rank: terms for rank, *terms in zip(ranks, *counts, strict=True) if any(terms)}
        labelled = query is not None and query.counts(1.0)
        trust = limited(self._assess(ranks, matches, pooled=prompt.model, labelled=labelled), request)
        return matches_json(prompt.request_blocks, matched, trust)

    def _prepare(
        self,
        request: RouteRequest,
        packed: bytes | None,
        policy: RoutePolicy,
        query: MoeQuery | None,
        *,
        reads_index: bool,
        strict: bool,
    ) -> PreparedRequest:
        """strict: as for `match`."""
        self.readiness.check()
        filters = worker_filter(request)  # before the model, so that an invalid field is reported before UnknownModel
        model = self.view.fleet.model_of(request.model)
        block_size = self.view.fleet.block_size_of(model)
        request_id = request.request_id or self._request_ids.next()
        is_compared = request.prompt_part != "none"
        blocks = blocks_of(
            request.token_ids if packed is None else packed,
            request.block_hashes,
            block_size=block_size,
            lora_name=request.lora_name,
            namespace=request.namespace,
            # What is not compared shares no blocks with other requests either.
            cache_salt=request.cache_salt if is_compared else request_id,
            tokens_max=self.settings.request_tokens_max,
        )
        if filters is UNFILTERED:
            filters = _unfiltered(model, block_size)
        else:
            filters = filters._replace(model=model, block_size=block_size)
        matches = match(
            self.view, filters, blocks, policy, query, reads_index=reads_index and is_compared, strict=strict
        )
        more_tokens = min(request.more_tokens, self.settings.request_tokens_max - blocks.n_tokens)
        prompt = PromptBlocks(
            pack_hashes(blocks.chain) + unshared_blocks(request_id, more_tokens // block_size, request.sequences),
            blocks.n_tokens + more_tokens,
            -(-(blocks.n_tokens + more_tokens) // block_size),
            block_size,
            model,
            request.expected_output_tokens,
        )
        labels = LabelUse.NONE
        if query is not None and query.counts(policy.moe_score_weight):
            labels = LabelUse.PREFERRED if query.fallback_to_unlabeled else LabelUse.REQUIRED
        session = None if request.session_id is None else (model, request.phase, request.session_id)
        return PreparedRequest(
            request,
            request_id,
            blocks,
            filters,
            query,
            RoutingRequest(policy, prompt, matches, session=session, labels=labels),
            0 if self.recorder is None else wall_ms(),
        )

    def _existing_answer(self, prepared: PreparedRequest, booking: Booking) -> RouteAnswer:
        """Return a booking's choice. Its overlap is that of the booking, which is exact only if it is still so."""
        routing, rank = prepared.routing, booking.rank
        policy, matches = routing.policy, routing.matches
        trust = FALLBACK
        if policy.reads_index:
            # A booking does not say what its score was made of, so it may have used pooled blocks and labels.
            pooled = routing.prompt.model if policy.cxl_score_weight > 0.0 else None
            trust = self._assess([rank], matches, pooled=pooled, labelled=routing.labels is not LabelUse.NONE)
        if trust.mode is AnswerMode.EXACT:
            # If the request was refused, the index was not read.
            now = None if matches.refusal else matches.scores.scores.get(rank, 0)
            trust = trust if now == booking.overlap_blocks else FALLBACK
        trust = limited(trust, prepared.request)
        worker = self.view.fleet.workers.get(rank.worker_id)
        return RouteAnswer(
            prepared.request_id,
            rank,
            None if worker is None else worker.url,
            booking.overlap_blocks,
            booking.request_blocks,
            None,
            policy.mode,
            trust,
            trust,
            dp_size=None if worker is None else worker.dp_size,
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

    def _assess(self, ranks: Sequence[RankId], matches: Matches, *, pooled: str | None, labelled: bool) -> Trust:
        """Return the least trust that any of these ranks deserves; see View.assess."""
        trust = self.view.assess(ranks, matches.predicted, pooled=pooled, labelled=labelled, before=matches.snapshot)
        # Load is part of the cost. While bookings are out of sync, this router has only its own part of the load.
        out_of_sync = trust.mode in (AnswerMode.EXACT, AnswerMode.APPROXIMATE) and not self.loads.in_sync
        return NOT_IN_SYNC if out_of_sync else trust

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
                        "engine_metrics": None if rank not in engine_metrics else metrics_json(engine_metrics[rank]),
                    }
                )
        return {"loads": rows, "in_sync": self.loads.in_sync}

    def state_digest(self) -> dict[str, Any]:
        """Return digests of everything, with the offsets that they include."""
        digests = digests_of(copy_state(self.feeds, self.view, self.loads))
        return {"models": sorted(self.view.served.models), **digests}

    def state_facts(self, rank: RankId) -> dict[str, Any]:
        """Return all facts of a rank, with the offsets that they include."""
        return facts_of(copy_state(self.feeds, self.view, self.loads, (rank,)), rank)

    def book(self, request_id: str, body: BookRequest, packed: bytes | None = None) -> dict[str, Any]:
        """Book a choice that was made elsewhere. packed: tokens as u32 little-endian, in place of token_ids.

        Repeating the call changes nothing. Raises UnknownId, or BookingConflict if the id is booked on another rank for
        the same phase.
        """
        self.readiness.check()
        rank = rank_of(body)
        worker = self.registry.worker(rank.worker_id)
        if not 0 <= rank.dp_rank - worker.dp_start < worker.dp_size:
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
            phase=booked_phase(body.phase),
        )
        with self.loads.locked():  # another router's booking of this id may have come
            self.loads.book(request_id, booking)
        self.view.predictions.predict(rank, blocks.local)
        return booking_json(request_id, booking)

    def report_phase(
        self,
        request_id: str,
        what: BookingPhase,
        phase: str | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Apply prefill-complete or free. `buffered` is true if no booking of the id was read yet.

        phase: the bookings of this part of the request, `prefill` or `decode`; None stands for all bookings of the id.
        prompt_tokens, cached_tokens: what the engine reports of the prompt.
        """
        self.readiness.check()
        is_audited = (
            prompt_tokens is not None
            and cached_tokens is not None
            and self.audit.report(request_id, phase, prompt_tokens, cached_tokens, monotonic_ms())
        )
        if what is BookingPhase.FREE and not is_audited:
            self.audit.ended(request_id, phase)
        buffered = not self.loads.report_phase(request_id, what, phase)
        if self.recorder is not None:
            self.recorder.reported(request_id, what)
        return {"request_id": request_id, "phase": what.value, "buffered": buffered}

    def served_by(self, request_id: str, rank: RankId, phase: str | None = None) -> None:
        """Another rank than the chosen one serves a request, since its gateway turned to an alternative."""
        with self.loads.locked() as loads:
            live = loads.live(request_id, phase)
            if live is not None and live[1].rank != rank:
                self.audit.ended(request_id, phase)
                self.loads.book(request_id, live[1]._replace(rank=rank, overlap_blocks=0), reassigns=True)

    def end_unreported(self, request_id: str, phase: str | None = None) -> None:
        """End a booking whose end nobody will report."""
        self.audit.ended(request_id, phase)
        self.loads.end_unreported(request_id, phase)

    def report_output(self, request_id: str, output_tokens: int, phase: str | None = None) -> dict[str, Any]:
        """Apply the number of tokens generated so far. phase and `buffered` are as in `report_phase`."""
        self.readiness.check()
        buffered = not self.loads.report_output(request_id, output_tokens, phase)
        if self.recorder is not None:
            self.recorder.output(request_id, output_tokens)
        return {"request_id": request_id, "output_tokens": output_tokens, "buffered": buffered}
