"""The same engines and the same policy without processes: the index contains each engine's events at once (pure).

What lives here: the bound that the live pipeline is compared with, with or without a shared pool. What must not: clocks
and I/O. The result is a pure function of trace, engines, pool, policy and random generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from streams.core.block_facts.fact_sets import PythonFactSets, RankNumbering
from streams.core.cxl_memory import CxlMemoryState
from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, HashArray, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.interface import OverlapScores
from streams.core.index.plain_index import PlainPrefixIndex
from streams.core.loads.bookings import ActiveLoads, BookingId, BookingPhase
from streams.core.routing.decision import Chooser, RoutePolicy, booking_of
from streams.core.routing.selection import Rng
from streams.core.routing.supplementary import SupplementaryMatches
from streams.cxl.events import CxlPool
from streams.cxl.pooled_index import PooledIndex
from streams.cxl.records import Placement
from streams.errors import SettingsError
from streams.sim.engine_config import EngineConfig
from streams.sim.engine_messages import (
    Finished,
    FirstToken,
    KvCleared,
    KvRemoved,
    KvReused,
    KvStored,
    ModelRequest,
    Output,
    PoolAsked,
    Rejected,
    hash_prompt,
)
from streams.sim.model import EngineModel
from streams.sim.pool import EnginePoolBlocks, PoolConfig, PoolEvent, SharedPool
from streams.sim.trace import TraceRequest, tokens_for

#: Bookings of a simulation do not expire.
NEVER_MS = 1 << 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one request.

    Times are model time; ttft_ms and latency_ms are None if the chosen engine could not serve the request.
    pooled_tokens: those of the cached tokens that were loaded from the pool.
    """

    request: int
    worker_id: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    latency_ms: float | None
    pooled_tokens: int = 0


def simulate(
    requests: Sequence[TraceRequest],
    n_engines: int,
    config: EngineConfig,
    policy: RoutePolicy,
    rng: Rng,
    pool: PoolConfig | None = None,
) -> list[Outcome]:
    """Route and run a trace; returns one outcome per request, in the order of the trace.

    pool: a pool that all engines share and whose blocks the policy takes into account, None for no pool. Equal
    arguments, including the state of the generator, give equal outcomes. Raises SettingsError if the block size of the
    pool is not that of the engines.
    """
    if pool is not None and pool.block_size != config.block_size:
        raise SettingsError(f"the pool has blocks of {pool.block_size} tokens, the engines of {config.block_size}")
    loads = ActiveLoads(NEVER_MS)

    def note(request_id: str, phase: BookingPhase, at_ms: float) -> None:  # noqa: ARG001 - the only loads know at once
        apply_phase(loads, booking_id_of(request_id), phase)

    fleet = Fleet(n_engines, config, pool, note)
    chooser = Chooser(rng)
    for number, request in enumerate(requests):
        fleet.advance(request.timestamp_ms)
        tokens = tokens_for(request)
        hashes = hash_prompt(tokens, config.block_size)
        sequence = pack_hashes(hashes.sequence)
        request_blocks = -(-request.input_length // config.block_size)
        scores = fleet.index.find_matches(hashes.local) if policy.reads_index else OverlapScores({})
        decision = chooser.choose(
            policy,
            fleet.ranks,
            scores,
            loads,
            sequence=sequence,
            request_blocks=request_blocks,
            block_size=config.block_size,
            n_tokens=request.input_length,
            supplementary=fleet.supplementary(hashes.sequence) if policy.reads_index else None,
        )
        booking = booking_of(
            decision.chosen,
            model="",
            sequence=sequence,
            n_tokens=request.input_length,
            request_blocks=request_blocks,
            block_size=config.block_size,
        )
        loads.add(booking_id_of(str(number)), booking, 0)
        fleet.submit(
            decision.chosen.rank,
            request.timestamp_ms,
            ModelRequest(str(number), tokens, max(1, request.output_length), output_seed=number, hashes=hashes),
        )
    fleet.advance(float("inf"))
    return [fleet.outcomes[str(number)] for number in range(len(requests))]


class Fleet:
    """Engines, with an index and pooled blocks that follow every event at once."""

    def __init__(
        self,
        n_engines: int,
        config: EngineConfig,
        pool: PoolConfig | None,
        on_phase: Callable[[str, BookingPhase, float], None],
    ) -> None:
        """on_phase: called with a request's id, its new phase and the time."""
        self.ranks = tuple(RankId(WorkerId(number), DpRank(0)) for number in range(1, n_engines + 1))
        self._engines = {rank: EngineModel(config) for rank in self.ranks}
        self._due: dict[RankId, float] = {}  # time of the next event, of engines that have one
        self.index = PlainPrefixIndex()
        self._on_phase = on_phase
        self.outcomes: dict[str, Outcome] = {}
        # One engine hash may have several physical copies; the rank holds the block until the last one is evicted.
        self._copies: dict[RankId, Counter[int]] = {rank: Counter() for rank in self.ranks}
        self._pool = None if pool is None else _Pool(pool, self.ranks)
        for engine in self._engines.values():
            engine.use_pool(pool is not None)

    def submit(self, rank: RankId, at_ms: float, request: ModelRequest) -> None:
        """Hand a request to an engine."""
        self._engines[rank].submit(at_ms, request)
        self._reschedule(rank)
        self.advance(at_ms)

    def next_event_ms(self) -> float:
        """When the next event of an engine is due; infinity if none is."""
        return min(self._due.values(), default=float("inf"))

    def advance(self, to_ms: float) -> None:
        """Advance all engines to this time, in the order of their events, because they share the pool's time."""
        while self._due:
            rank = min(self._due, key=self._due.__getitem__)
            due_ms = self._due[rank]
            if due_ms > to_ms:
                break
            for output in self._engines[rank].advance(due_ms):
                self._apply(rank, output)
            self._reschedule(rank)
        if self._pool is not None:
            self._pool.advance(to_ms)

    def supplementary(self, sequence: HashArray) -> SupplementaryMatches | None:
        """Return the pooled blocks of a request, None without a pool. sequence: uint64[n]."""
        return None if self._pool is None else self._pool.supplementary(sequence)

    def _reschedule(self, rank: RankId) -> None:
        """Note when the engine's next event is due."""
        due_ms = self._engines[rank].next_event_ms()
        if due_ms is None:
            self._due.pop(rank, None)
        else:
            self._due[rank] = due_ms

    def _apply(self, rank: RankId, output: Output) -> None:
        """Apply an engine's output to the index, the pool, the loads and the outcomes."""
        match output:
            case KvStored():
                self._copies[rank].update(output.engine.tolist())
                self.index.store(rank, Tier.DEVICE, output.parent, output.engine, output.local)
                if self._pool is not None:
                    self._pool.offload(rank, output)
            case PoolAsked():
                assert self._pool is not None  # engines ask only where there is a pool
                load = self._pool.shared.load(output.at_ms, output.keys)
                self._engines[rank].pool_answered(output.request_id, load.n_blocks, load.end_ms - output.at_ms)
            case KvRemoved():
                copies = self._copies[rank]
                removed = []
                for name in output.engine.tolist():
                    copies[name] -= 1
                    if not copies[name]:
                        del copies[name]
                        removed.append(name)
                self.index.remove(rank, Tier.DEVICE, np.array(removed, dtype=np.uint64))
            case KvReused():
                pass  # nothing has changed
            case KvCleared():
                self._copies[rank].clear()
                self.index.clear(rank)
            case FirstToken():
                self._on_phase(output.request_id, BookingPhase.PREFILL, output.at_ms)
            case Finished():
                self._on_phase(output.request_id, BookingPhase.FREE, output.at_ms)
                self.outcomes[output.request_id] = Outcome(
                    int(output.request_id),
                    rank.worker_id,
                    output.prompt_tokens,
                    output.cached_tokens,
                    output.n_output_tokens,
                    output.ttft_ms,
                    output.latency_ms,
                    output.pooled_tokens,
                )
            case Rejected():
                self._on_phase(output.request_id, BookingPhase.FREE, output.at_ms)
                number = int(output.request_id)
                self.outcomes[output.request_id] = Outcome(number, rank.worker_id, 0, 0, 0, None, None)
            case _:
                assert_never(output)


class _Pool:
    """The shared pool, the blocks that each engine owns there, and an index of them like a router's."""

    def __init__(self, config: PoolConfig, ranks: tuple[RankId, ...]) -> None:
        self.shared = SharedPool(config)
        owners = [_owner(rank) for rank in ranks]
        self._own = {owner: EnginePoolBlocks(config.pool_id) for owner in owners}
        self._numbers = RankNumbering(ranks)
        members = tuple(rank.worker_id for rank in ranks)
        pool = CxlPool(config.pool_id, config.latency_class, config.capacity_blocks, members)
        self._index = PooledIndex(PythonFactSets(), {config.pool_id: pool})
        self._placed = Placement(CxlMemoryState.CXL_POOLED, config.pool_id, 0, (), "", Incarnation(0), 0)
        self._indexed: dict[str, set[int]] = {owner: set() for owner in owners}  # keys in the index, by owner

    def offload(self, rank: RankId, stored: KvStored) -> None:
        """Offload an engine's full blocks."""
        owner = _owner(rank)
        keys, _ = self._own[owner].stored(stored)
        if keys:
            self.shared.offload(stored.at_ms, owner, keys)
            self._apply(self.shared.advance(stored.at_ms))

    def advance(self, to_ms: float) -> None:
        """Complete the writes that are due, one after the other."""
        while (due_ms := self.shared.next_event_ms()) is not None and due_ms <= to_ms:
            self._apply(self.shared.advance(due_ms))

    def supplementary(self, sequence: HashArray) -> SupplementaryMatches:
        """Return the pooled blocks of a request, which all engines can read.

        An engine looks up a prefix on its GPU and continues in the pool, but does not return to its GPU after that. So
        own blocks that follow pooled ones are ignored here as well.
        """
        query = self._index.query("", self._numbers)
        return SupplementaryMatches(np.ascontiguousarray(sequence), query, None, lambda *_: None, nullcontext())

    def _apply(self, events: list[PoolEvent]) -> None:
        for event in events:
            self._own[event.owner].pool_changed(event.state, event.keys)
            indexed = self._indexed[event.owner]
            for key in event.keys:
                before = self._placed if key in indexed else None
                after = self._placed if event.state is CxlMemoryState.CXL_POOLED else None
                self._index.replace(SequenceHash(key), before, after)
                (indexed.add if after else indexed.discard)(key)


def _owner(rank: RankId) -> str:
    return str(rank.worker_id)


def booking_id_of(request_id: str, router_id: str = "offline") -> BookingId:
    """The booking of a request of a trace."""
    return BookingId(request_id, router_id, 0)


def apply_phase(loads: ActiveLoads, booking_id: BookingId, phase: BookingPhase) -> None:
    """Apply prefill-complete or free."""
    if phase is BookingPhase.PREFILL:
        loads.prefill_complete(booking_id, 0)
    else:
        loads.free(booking_id, 0)
