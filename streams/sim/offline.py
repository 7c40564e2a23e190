"""The same engines and the same policy without processes: every engine's event is known to the index at once.

What lives here: the bound that the live pipeline is measured against. What must not: clocks and I/O; it is a pure
function of trace, engines, policy and generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streams.core.decision import Chooser, RoutePolicy, booking_of
from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, Tier, WorkerId
from streams.core.index import OverlapScores
from streams.core.loads import ActiveLoads, BookingId
from streams.core.plain_index import PlainPrefixIndex
from streams.core.selection import Rng
from streams.sim.model import (
    EngineConfig,
    EngineModel,
    Finished,
    FirstToken,
    KvCleared,
    KvRemoved,
    KvStored,
    ModelRequest,
    Output,
    Rejected,
    hash_prompt,
)
from streams.sim.trace import TraceRequest, tokens_for

#: No booking of a simulation ends by time.
_NEVER_MS = 1 << 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times are model time; ttft_ms is None for a request that no engine could take."""

    request: int
    worker_id: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    latency_ms: float | None


def simulate(
    requests: Sequence[TraceRequest], n_engines: int, config: EngineConfig, policy: RoutePolicy, rng: Rng
) -> list[Outcome]:
    """Route and run a trace; gives one outcome a request, in the trace's order."""
    fleet = _Fleet(n_engines, config)
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
            fleet.loads,
            sequence=sequence,
            request_blocks=request_blocks,
            block_size=config.block_size,
        )
        booking = booking_of(
            decision.chosen,
            model="",
            sequence=sequence,
            n_tokens=request.input_length,
            request_blocks=request_blocks,
            block_size=config.block_size,
        )
        fleet.loads.add(_booking_id(str(number)), booking, 0)
        fleet.submit(
            decision.chosen.rank,
            request.timestamp_ms,
            ModelRequest(str(number), tokens, max(1, request.output_length), output_seed=number, hashes=hashes),
        )
    fleet.advance(float("inf"))
    return [fleet.outcomes[str(number)] for number in range(len(requests))]


class _Fleet:
    """Engines, and an index and loads that learn of everything the moment it happens."""

    def __init__(self, n_engines: int, config: EngineConfig) -> None:
        self.ranks = tuple(RankId(WorkerId(number), DpRank(0)) for number in range(1, n_engines + 1))
        self._engines = {rank: EngineModel(config) for rank in self.ranks}
        self.index = PlainPrefixIndex()
        self.loads = ActiveLoads(_NEVER_MS)
        self.outcomes: dict[str, Outcome] = {}
        # One engine hash may have several physical copies; the block is held until the last of them is evicted.
        self._copies: dict[RankId, Counter[int]] = {rank: Counter() for rank in self.ranks}

    def submit(self, rank: RankId, at_ms: float, request: ModelRequest) -> None:
        """Hand a request to an engine."""
        self._engines[rank].submit(at_ms, request)
        self._drain(rank, at_ms)

    def advance(self, to_ms: float) -> None:
        """Let every engine go on to this moment."""
        for rank in self.ranks:
            self._drain(rank, to_ms)

    def _drain(self, rank: RankId, to_ms: float) -> None:
        engine = self._engines[rank]
        while (due := engine.next_event_ms()) is not None and due <= to_ms:
            for output in engine.advance(due):
                self._learn(rank, output)

    def _learn(self, rank: RankId, output: Output) -> None:
        match output:
            case KvStored():
                self._copies[rank].update(output.engine.tolist())
                self.index.store(rank, Tier.DEVICE, output.parent, output.engine, output.local)
            case KvRemoved():
                copies = self._copies[rank]
                gone = []
                for name in output.engine.tolist():
                    copies[name] -= 1
                    if not copies[name]:
                        del copies[name]
                        gone.append(name)
                self.index.remove(rank, Tier.DEVICE, np.array(gone, dtype=np.uint64))
            case KvCleared():
                self._copies[rank].clear()
                self.index.clear(rank)
            case FirstToken():
                self.loads.prefill_complete(_booking_id(output.request_id), 0)
            case Finished():
                self.loads.free(_booking_id(output.request_id), 0)
                self.outcomes[output.request_id] = Outcome(
                    int(output.request_id),
                    rank.worker_id,
                    output.prompt_tokens,
                    output.cached_tokens,
                    output.n_output_tokens,
                    output.ttft_ms,
                    output.latency_ms,
                )
            case Rejected():
                self.loads.free(_booking_id(output.request_id), 0)
                number = int(output.request_id)
                self.outcomes[output.request_id] = Outcome(number, rank.worker_id, 0, 0, 0, None, None)


def _booking_id(request_id: str) -> BookingId:
    return BookingId(request_id, "offline", 0)
