"""A router: the view, the loads, the choice, and what is published of it. Handlers bind to this.

What lives here: one method a call of the API, free of HTTP. What must not: aiohttp, parsing (wire), rules (core).
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from streams.codec import encode_batch, encode_worker
from streams.core.events import EngineBatch, WorkerRemoved
from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, HashArray, RankId, WorkerId
from streams.core.index.interface import Candidates, OverlapScores
from streams.core.loads.bookings import ActiveLoads, Booking, BookingPhase
from streams.core.routing.busy import BusyThresholds, idle_ranks
from streams.core.routing.cost import prefill_tokens
from streams.core.routing.decision import Chooser, Decision, FleetState, RoutePolicy, booking_of
from streams.core.routing.eligibility import FilterReason, WorkerFilter
from streams.core.routing.selection import RouterMode
from streams.core.routing.sessions import SessionAffinity
from streams.core.routing.supplementary import SupplementaryMatches
from streams.core.workers import Worker, WorkerState
from streams.cxl.events import CxlPool
from streams.cxl.pool_registry import next_epoch, registered_pool, write_pool_change
from streams.cxl.records import encode_pool, pool_key
from streams.errors import (
    AllWorkersBusy,
    BlockSizeMismatch,
    InvalidRequest,
    NoEligibleWorker,
    NotReady,
    ProcessError,
    UnknownId,
)
from streams.kafka import producer, worker_key
from streams.router_api.dead_letters import DeadLetterCounts
from streams.router_api.loads_sync import LoadsSync
from streams.router_api.topic_readers import Feed, Feeds, key_and_value, one_by_one
from streams.router_api.view import FALLBACK, NOT_IN_SYNC, AnswerMode, Trust, View
from streams.router_api.wire import (
    POLICY_OVERRIDES,
    Blocks,
    BookRequest,
    MoeQuery,
    PoolBody,
    RouteRequest,
    blocks_of,
    booking_json,
    pool_members,
    rank_of,
    terms_json,
)
from streams.router_api.wire import worker_id as parse_worker_id
from streams.settings import Settings
from streams.topics import topics
from streams.waiting import wait_for

log = logging.getLogger(__name__)

#: How long a call that changes the registry waits for Kafka to take it.
PUBLISH_TIMEOUT_S = 10.0

#: What a request may change of the policy, as its override and as the policy name it.
_OVERRIDES = attrgetter(*POLICY_OVERRIDES)
_POLICY_FIELDS = tuple(name.removeprefix("router_") for name in POLICY_OVERRIDES)

_NO_SCORES = OverlapScores({})
_NO_RANKS: frozenset[RankId] = frozenset()


class Router:
    """One router. `start` begins to read topics; every answer before their ends is refused by `check_ready`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.policy = RoutePolicy(
            mode=settings.router_mode,
            overlap_score_weight=settings.kv_overlap_score_weight,
            temperature=settings.router_temperature,
            tier_weights=settings.tier_weights,
            cxl_score_weight=settings.cxl_score_weight,
            moe_score_weight=settings.moe_score_weight,
            track_active_blocks=settings.track_active_blocks,
            cuda_to_cpu_ratio=settings.encoder_cuda_to_cpu_ratio,
        )
        self._busy = BusyThresholds(settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold)
        self._sessions = SessionAffinity(settings.router_session_affinity_ttl_s)
        self._had_enough_workers = False
        self._topics = topics(settings)
        self._kafka: Producer = producer(settings)
        self.view = View(settings, _monotonic_ms)
        self.loads = LoadsSync(settings, self._topics.router_loads, self._kafka, _monotonic_ms)
        self._chooser = Chooser(random.Random(settings.router_seed or None))
        feeds = {
            "workers": Feed(
                self._topics.workers,
                one_by_one(lambda record: self.view.fold_worker(record.key, record.value)),
            ),
            # From its end: whoever bridges an engine says soon how it is now.
            "metrics": Feed(
                self._topics.worker_metrics,
                one_by_one(lambda record: self.view.fold_report(record.key, record.value)),
                from_end=True,
            ),
        }
        if settings.reads_index:
            feeds["index"] = Feed(
                self._topics.index_changelog,
                lambda messages, live: self.view.fold_index_batch(list(map(key_and_value, messages)), live),
            )
            feeds["pooled"] = Feed(
                self._topics.cxl_changelog,
                one_by_one(lambda record: self.view.fold_pooled(record.key, record.value)),
            )
        # From its end, and counted since this router's start: whoever wrote them, agents without an API among them.
        self.dead_letters = DeadLetterCounts(settings)
        feeds["dead letters"] = Feed(self._topics.dead_letters, self.dead_letters.fold, from_end=True)
        if settings.router_replica_sync:
            feeds["loads"] = Feed(self._topics.router_loads, one_by_one(self.loads.fold))
        self.feeds = Feeds(settings, feeds, self._restart)
        self.answers: Counter[str] = Counter()
        #: Topics of the scope that nobody has created yet; whoever starts the router knows of them.
        self.topics_missing: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin to read topics."""
        self.feeds.start()

    def stop(self) -> None:
        """End the reading and hand out what was published."""
        self.feeds.stop()
        self.loads.flush(PUBLISH_TIMEOUT_S)

    def tick(self) -> None:
        """Serve delivery reports and expiry; called every half second or so."""
        self.loads.poll()

    @property
    def sessions_evicted(self) -> int:
        """Session bindings dropped because more than SESSIONS_MAX were in use, since the router started."""
        return self._sessions.forgotten

    def workers_left(self) -> int:
        """How many workers are still to be registered before a router that starts is ready; 0 once they were."""
        if not self._had_enough_workers:
            left = self.settings.router_min_initial_workers - len(self.view.workers)
            if left > 0:
                return left
            self._had_enough_workers = True
        return 0

    def missing(self) -> NotReady:
        """Why nothing can be answered while topics are missing."""
        return NotReady(
            f"{len(self.topics_missing)} topics of this scope are missing, {self.topics_missing[0]} among them",
            remedy="`kvstreams topics create` with the same settings creates them, and so does a worker that starts; "
            "is topic_prefix as it should be?",
            topics_missing=list(self.topics_missing),
        )

    def check_ready(self) -> None:
        """Raise NotReady while topics are missing or not read to their ends, or too few workers are registered."""
        if self.topics_missing:
            raise self.missing()
        pending = self.feeds.pending()
        if pending:
            raise NotReady("topics are still being read", partitions_left=pending)
        left = self.workers_left()
        if left:
            raise NotReady(
                f"{left} more workers are to be registered first",
                remedy="`kvstreams bridge` or PUT /workers/{id} registers one; router_min_initial_workers is how many",
                workers_left=left,
            )

    def route(self, asked: RouteRequest, packed: bytes | None = None) -> dict[str, Any]:
        """Choose a rank and, unless told otherwise, book it.

        packed: tokens as u32 little-endian, in place of token_ids. Raises every error that docs/http.md names.
        """
        self.check_ready()
        request_id = asked.request_id or uuid.uuid4().hex
        filters = _filters(asked)  # before the model: a field that is wrong is told whatever else there is
        model, blocks = self._blocks(asked, packed)
        policy = self._policy(asked)
        with self.loads.locked() as loads:
            existing = self._existing_booking(request_id, asked, policy, loads)
        if existing is not None:
            return existing
        passing: Sequence[RankId] = self._eligible(filters, model)
        query = None if asked.router_config_override is None else asked.router_config_override.moe_query
        strict = query is not None and not query.fallback_to_unlabeled and self.settings.reads_index
        reads_index = policy.reads_index or strict
        scores, predicted = self.view.overlap(blocks.local) if reads_index else (_NO_SCORES, _NO_RANKS)
        sequence = pack_hashes(blocks.chain)
        wants_supplementary = reads_index and self.view.has_supplementary
        supplementary = self._supplementary(policy, blocks.chain, model, query) if wants_supplementary else None
        if strict:
            passing = self._matching(passing, filters._replace(model=model), scores, supplementary)
        block_size = self.settings.block_size_of(model)
        fleet = self.view.fleet()
        session = None if asked.session_id is None else (model, asked.phase, asked.session_id)
        with self.loads.locked() as loads:
            # Once more: another router's booking of this id may have come meanwhile.
            existing = self._existing_booking(request_id, asked, policy, loads)
            if existing is not None:
                return existing
            ranks = self._idle(passing, loads, fleet)
            bound = None if session is None else self._sessions.rank_of(session, time.monotonic())
            decision = self._chooser.choose(
                policy,
                [bound] if bound is not None and bound in ranks else ranks,
                scores,
                loads,
                sequence=sequence,
                request_blocks=blocks.request_blocks,
                block_size=block_size,
                fleet=fleet,
                supplementary=supplementary,
            )
            chosen = decision.chosen
            if asked.update_states:
                self.loads.book(
                    request_id,
                    booking_of(
                        chosen,
                        model=model,
                        sequence=sequence,
                        n_tokens=blocks.n_tokens,
                        request_blocks=blocks.request_blocks,
                        block_size=block_size,
                        expected_output_tokens=asked.expected_output_tokens,
                    ),
                )
                self.view.predict(chosen.rank, blocks.local)
                if session is not None:
                    self._sessions.bind(session, chosen.rank, time.monotonic())
        trust = FALLBACK
        if decision.preferred:
            trust = self._trust(policy, reads_index, passing, predicted, query=query)
        self.answers[trust.mode.value] += 1
        return _answer(request_id, decision, blocks, trust, asked.explain)

    def _existing_booking(
        self, request_id: str, asked: RouteRequest, policy: RoutePolicy, loads: ActiveLoads
    ) -> dict[str, Any] | None:
        """The answer to an id that is booked: a client that tries again must not book twice, and the choice stands."""
        live = loads.live(request_id) if asked.update_states else None
        if live is None:
            return None
        override = asked.router_config_override
        query = None if override is None else override.moe_query
        trust = self._trust(policy, policy.reads_index, [live[1].rank], query=query)
        return {**booking_json(request_id, live[1]), "cost": None, **_mode(trust)}

    def potential(self, asked: RouteRequest, packed: bytes | None = None) -> dict[str, Any]:
        """What each eligible rank's load would be with this request."""
        self.check_ready()
        filters = _filters(asked)  # before the model: a field that is wrong is told whatever else there is
        model, blocks = self._blocks(asked, packed)
        ranks = self._eligible(filters, model)
        block_size = self.settings.block_size_of(model)
        policy = self._policy(asked)
        weighs = policy.overlap_score_weight > 0.0
        scores, predicted = self.view.overlap(blocks.local) if weighs else (_NO_SCORES, _NO_RANKS)
        with self.loads.locked() as loads:
            load = loads.columns(loads.rows_of(ranks), pack_hashes(blocks.chain))
        candidates = Candidates(ranks)
        overlap, effective = scores.columns(candidates, policy.tier_weights)
        supplementary = self._supplementary(policy, blocks.chain, model, None) if weighs else None
        if supplementary is not None:
            weighed = supplementary.weigh(candidates, overlap, effective, policy.cxl_score_weight, 0.0)
            effective = effective if weighed is None else weighed.with_pooled
        rows = []
        for rank, active_tokens, decode_blocks, cached in zip(
            ranks, load.prefill_tokens.tolist(), load.decode_blocks.tolist(), effective.tolist(), strict=True
        ):
            rows.append(
                {
                    "worker_id": rank.worker_id,
                    "dp_rank": rank.dp_rank,
                    "potential_prefill_tokens": active_tokens + prefill_tokens(blocks.n_tokens, cached, block_size),
                    "potential_decode_blocks": decode_blocks,
                }
            )
        return {"loads": rows, **_mode(self._trust(policy, weighs, ranks, predicted))}

    def rank_loads(self) -> dict[str, Any]:
        """Every registered rank's active load, and what its engine says of itself."""
        self.check_ready()
        rows = []
        engine_metrics = self.view.fleet().metrics
        with self.loads.locked() as loads:
            for rank in sorted({*self.view.all_ranks(), *loads.ranks()}):
                load = loads.load(rank)
                rows.append(
                    {
                        "worker_id": rank.worker_id,
                        "dp_rank": rank.dp_rank,
                        "active_prefill_tokens": load.prefill_tokens,
                        "active_decode_blocks": load.decode_blocks,
                        "active_requests": load.requests,
                        "engine": None if rank not in engine_metrics else asdict(engine_metrics[rank]),
                    }
                )
        return {"loads": rows, "in_sync": self.loads.in_sync}

    def book(self, request_id: str, asked: BookRequest) -> dict[str, Any]:
        """Book a choice made elsewhere; the same again changes nothing, another rank is a conflict."""
        self.check_ready()
        rank = rank_of(asked)
        worker = self._worker(rank.worker_id)
        if rank.dp_rank >= worker.dp_size:
            raise UnknownId(f"worker {rank.worker_id} has {worker.dp_size} ranks, no rank {rank.dp_rank}")
        blocks = blocks_of(
            asked.token_ids,
            asked.block_hashes,
            block_size=worker.block_size,
            lora_name=asked.lora_name,
            namespace=asked.namespace,
            tokens_max=self.settings.request_tokens_max,
        )
        overlap = min(asked.overlap_blocks, blocks.request_blocks)
        booking = Booking(
            rank=rank,
            model=worker.model,
            prefill_tokens=prefill_tokens(blocks.n_tokens, overlap, worker.block_size),
            sequence=pack_hashes(blocks.chain),
            overlap_blocks=overlap,
            request_blocks=blocks.request_blocks,
            expected_output_tokens=asked.expected_output_tokens,
        )
        self.loads.book(request_id, booking)
        self.view.predict(rank, blocks.local)
        return booking_json(request_id, booking)

    def report_phase(self, request_id: str, phase: BookingPhase) -> dict[str, Any]:
        """Prefill-complete or free; `held` says that no booking of this id has come yet and the call waits for it."""
        self.check_ready()
        return {
            "request_id": request_id,
            "phase": phase.value,
            "buffered": not self.loads.report_phase(request_id, phase),
        }

    def report_output(self, request_id: str, output_tokens: int) -> dict[str, Any]:
        """Tokens generated so far; `held` as by `report_phase`."""
        self.check_ready()
        held = not self.loads.report_output(request_id, output_tokens)
        return {"request_id": request_id, "output_tokens": output_tokens, "buffered": held}

    def list_workers(self) -> list[Worker]:
        """The registry, in order of worker id."""
        return [worker for _, worker in sorted(self.view.workers.copy().items())]

    def put_worker(self, worker: Worker) -> None:
        """Register; raises BlockSizeMismatch where the scope's block size for the model is another."""
        expected = self.settings.block_size_of(worker.model)
        if worker.block_size != expected:
            raise BlockSizeMismatch(
                f"worker {worker.worker_id}: blocks of {worker.block_size} tokens; {worker.model} has {expected} here",
                remedy="Set block_size or model_block_sizes; a model has one block size within a scope",
            )
        self._publish(self._topics.workers.name, worker_key(worker.worker_id), encode_worker(worker))
        self.view.fold_worker(worker_key(worker.worker_id), encode_worker(worker))

    def cordon(self, worker_id: WorkerId) -> Worker:
        """Take a worker out gently: nothing new comes, what runs goes on."""
        worker = self._worker(worker_id)
        cordoned = Worker(**{**_fields(worker), "state": WorkerState.CORDONED})
        self.put_worker(cordoned)
        return cordoned

    def delete_worker(self, worker_id: WorkerId) -> None:
        """Remove a worker: out of the registry, and in order with its events out of the index."""
        worker = self._worker(worker_id)
        incarnation = max((progress.epoch.incarnation for progress in self.view.progress_of(worker_id)), default=None)
        if incarnation is not None:
            removed = EngineBatch(
                rank=RankId(worker_id, DpRank(0)),
                model=worker.model,
                block_size=worker.block_size,
                incarnation=incarnation,
                sequence=0,
                digest=0,
                emitted_at_ms=_now_ms(),
                body=WorkerRemoved("DELETE /workers"),
            )
            self._publish(self._topics.kv_events.name, worker_key(worker_id), encode_batch(removed))
        self._publish(self._topics.workers.name, worker_key(worker_id), None)
        self.view.fold_worker(worker_key(worker_id), None)

    def put_pool(self, pool_id: str, asked: PoolBody) -> CxlPool:
        """Register a CXL pool, or change it; raises EpochConflict for an epoch that is over.

        One that is left out stays as it is, or is the next if the pool was lost.
        """
        epoch = next_epoch(pool_id, self.view.pools().get(pool_id), asked.epoch)
        return self._register_pool(
            CxlPool(
                pool_id=pool_id,
                latency_class=asked.latency_class,
                capacity_blocks=asked.capacity_blocks,
                members=pool_members(asked),
                epoch=epoch,
                registered_at_ms=_now_ms(),
            )
        )

    def lose_pool(self, pool_id: str) -> CxlPool:
        """A pool is lost with all that it held. Its record stays: if it comes back, it is in another epoch."""
        known = self.view.pools().get(pool_id)
        if known is None:
            raise UnknownId(f"no pool {pool_id} is registered")
        return self._register_pool(replace(known, epoch=known.epoch + 1, lost=True, registered_at_ms=_now_ms()))

    def _register_pool(self, pool: CxlPool) -> CxlPool:
        self._publish_pool(pool)
        # What this router has folded may be behind what another one has written.
        write_pool_change(pool, registered_pool(self.settings, pool.pool_id), self._publish_pool)
        return pool

    def _publish_pool(self, pool: CxlPool) -> None:
        key, value = pool_key(pool.pool_id), encode_pool(pool)
        self._publish(self._topics.workers.name, key, value)
        self.view.fold_worker(key, value)

    def _blocks(self, asked: RouteRequest, packed: bytes | None) -> tuple[str, Blocks]:
        model = self.view.model_of(asked.model)
        blocks = blocks_of(
            packed if packed is not None else asked.token_ids,
            asked.block_hashes,
            block_size=self.settings.block_size_of(model),
            lora_name=asked.lora_name,
            namespace=asked.namespace,
            tokens_max=self.settings.request_tokens_max,
        )
        return model, blocks

    def _eligible(self, filters: WorkerFilter, model: str) -> tuple[RankId, ...]:
        if self.policy.mode is RouterMode.DIRECT and filters.worker_id is None:
            raise InvalidRequest("worker_id is missing: in mode direct every request names its worker")
        worker_filter = filters._replace(model=model)
        ranks = self.view.eligible(worker_filter)
        if not ranks:
            serving = sum(worker.model == model for worker in self.list_workers())
            if serving:
                refused = self.view.refusals(worker_filter)
                words = ", ".join(
                    f"{refusal} {n}" for refusal, n in refused.items() if refusal is not FilterReason.OTHER_MODEL
                )
                raise NoEligibleWorker(
                    f"{serving} workers serve {model!r}, and no rank of theirs passes ({words})",
                    remedy="See worker_id, dp_rank, allowed_, excluded_worker_ids, required_taints, phase; cordons; "
                    "and silent_dp_ranks of GET /workers",
                    workers=serving,
                    refused_ranks=refused,
                )
            raise NoEligibleWorker(
                "no worker is registered",
                remedy="`kvstreams bridge` or PUT /workers/{id} registers one",
                workers=0,
                refused_ranks={},
            )
        return ranks

    def _idle(self, ranks: Sequence[RankId], loads: ActiveLoads, fleet: FleetState) -> Sequence[RankId]:
        idle = idle_ranks(ranks, self._busy, self.view.workers, loads, fleet.metrics)
        if not idle:
            raise AllWorkersBusy(
                f"all {len(ranks)} ranks that may serve the request are busy",
                remedy="Try again; active_decode_blocks_threshold and active_prefill_tokens_threshold say what is busy",
                ranks=len(ranks),
            )
        return idle

    def _policy(self, asked: RouteRequest) -> RoutePolicy:
        override = asked.router_config_override
        if override is None:
            return self.policy
        given = zip(_POLICY_FIELDS, _OVERRIDES(override), strict=True)
        changes = {name: value for name, value in given if value is not None}
        return replace(self.policy, **changes) if changes else self.policy  # a moe_query alone changes nothing here

    def _supplementary(
        self, policy: RoutePolicy, chain: HashArray, model: str, query: MoeQuery | None
    ) -> SupplementaryMatches | None:
        selector = None if query is None else query.selector()
        return self.view.supplementary(chain, model, selector, pooled=policy.cxl_score_weight > 0.0)

    def _matching(
        self,
        passing: Sequence[RankId],
        worker_filter: WorkerFilter,
        scores: OverlapScores,
        supplementary: SupplementaryMatches | None,
    ) -> Sequence[RankId]:
        """Of the ranks that pass, those that hold a block which matches; all, where nobody does.

        A rank that holds a block and of which labels found no room may match, and stays. Exclusions apply last: a rank
        that the request excludes is looked at too, and where it alone matches none stays.
        """
        everybody = (
            self.view.eligible(worker_filter._replace(excluded=frozenset())) if worker_filter.excluded else passing
        )
        matching = set[RankId]() if supplementary is None else supplementary.matching(everybody, scores)
        if not matching:
            return passing
        matching |= {rank for rank in self.view.ranks_missing_labels(passing) if scores.scores.get(rank, 0)}
        left = [rank for rank in passing if rank in matching]
        if not left:
            raise NoEligibleWorker(
                "every rank whose cached blocks match moe_query is excluded",
                remedy="Set fallback_to_unlabeled, or exclude fewer workers",
                matching=len(matching),
            )
        return left

    def _trust(
        self,
        policy: RoutePolicy,
        reads_index: bool,
        ranks: Sequence[RankId],
        predicted: Set[RankId] = _NO_RANKS,
        *,
        query: MoeQuery | None = None,
    ) -> Trust:
        if not reads_index:
            return FALLBACK
        labelled = query is not None and query.counts(policy.moe_score_weight)
        trust = self.view.trust(ranks, predicted, pooled=policy.cxl_score_weight > 0.0, labelled=labelled)
        # Load is a part of the cost, and of load we know our own share alone.
        worse = trust.mode in (AnswerMode.EXACT, AnswerMode.APPROXIMATE) and not self.loads.in_sync
        return NOT_IN_SYNC if worse else trust

    def _worker(self, worker_id: WorkerId) -> Worker:
        worker = self.view.workers.get(worker_id)
        if worker is None:
            raise UnknownId(f"no worker {worker_id} is registered")
        return worker

    def _publish(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Publish and wait: what a call answers with success must outlive this process.

        Waits for this record only: bookings go on meanwhile, and the queue as a whole may never be empty.
        """
        if self.topics_missing:
            raise self.missing()  # else a broker that creates what it is asked for would, with settings of its own
        outcome: list[KafkaError | None] = []
        try:
            self._kafka.produce(topic, key=key, value=value, on_delivery=lambda error, _: outcome.append(error))
            wait_for(lambda: self._kafka.poll(0.1) >= 0 and bool(outcome), PUBLISH_TIMEOUT_S, "Kafka to take it")
        except (BufferError, KafkaException, ProcessError) as exc:
            raise NotReady(f"Kafka did not take the change: {exc}") from exc
        if outcome[0] is not None:
            raise NotReady(f"Kafka did not take the change: {outcome[0].str()}")

    def _restart(self) -> None:
        self.view.reset()
        self.loads.reset()


def _mode(trust: Trust) -> dict[str, Any]:
    """How far an answer can be trusted, and where that is less than it might be, why."""
    if trust.reason is None:
        return {"mode": trust.mode.value}
    return {"mode": trust.mode.value, "degraded_because": trust.reason.value}


def _answer(request_id: str, decision: Decision, blocks: Blocks, trust: Trust, explain: bool) -> dict[str, Any]:
    chosen = decision.chosen
    answer: dict[str, Any] = {
        "request_id": request_id,
        "worker_id": chosen.rank.worker_id,
        "dp_rank": chosen.rank.dp_rank,
        "overlap_blocks": chosen.scores,
        "request_blocks": blocks.request_blocks,
        "cost": chosen.cost,
        "mode": trust.mode.value,
    }
    if trust.reason is not None:
        answer["degraded_because"] = trust.reason.value
    if explain:
        answer["candidates"] = [terms_json(terms) for terms in decision.candidates]
    return answer


def _filters(asked: RouteRequest) -> WorkerFilter:
    """What a request asks of its worker but for the model; raises InvalidRequest."""
    return WorkerFilter(
        model="",
        worker_id=None if asked.worker_id is None else parse_worker_id(asked.worker_id),
        dp_rank=None if asked.dp_rank is None else DpRank(asked.dp_rank),
        allowed=_ids(asked.allowed_worker_ids, "allowed_worker_ids"),
        excluded=_ids(asked.excluded_worker_ids, "excluded_worker_ids") or frozenset(),
        phase=asked.phase,
        required_taints=frozenset(asked.required_taints or ()),
    )


def _ids(values: list[int | str] | None, name: str) -> frozenset[WorkerId] | None:
    if values is None:
        return None
    return frozenset(parse_worker_id(value, f"{name}[{index}]") for index, value in enumerate(values))


def _fields(worker: Worker) -> dict[str, Any]:
    return {name: getattr(worker, name) for name in Worker.__slots__}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
