"""A slow fleet of `kvstreams sim` engines behind one router without an index, to compare the laboratory with.

What lives here: the engines' state machines with real token ids, driven event by event; what each engine holds is
looked up in the engine itself for every request. What must not: code of the laboratory, except the form of outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence

from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.index.interface import PrefixScores
from streams.core.loads.bookings import ActiveLoads, BookingId
from streams.core.routing.decision import Chooser
from streams.core.routing.request import Matches, PromptBlocks, RoutePolicy, RoutingRequest
from streams.core.routing.selection import Rng
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import Finished, FirstToken, ModelRequest, PromptHashes, hash_prompt
from streams.lab.engines.model import EngineModel
from streams.lab.simulation.results import RequestOutcome
from streams.lab.trace import TraceRequest, tokens_for


class NaiveFleet:
    """Engines and the bookings of the requests that run on them."""

    def __init__(self, n_engines: int, config: EngineConfig) -> None:
        self.engines = {RankId(WorkerId(number), DpRank(0)): EngineModel(config) for number in range(1, n_engines + 1)}
        self.ranks = tuple(self.engines)
        self.loads = ActiveLoads(1 << 60)
        self.outcomes: dict[int, RequestOutcome] = {}

    def advance(self, to_ms: float) -> None:
        """Let everything happen that is due until then, in the order of time."""
        while True:
            due = {rank: engine.next_event_ms() for rank, engine in self.engines.items()}
            times = {rank: at_ms for rank, at_ms in due.items() if at_ms is not None and at_ms <= to_ms}
            if not times:
                return
            rank = min(times, key=times.__getitem__)
            for output in self.engines[rank].advance(times[rank]):
                if isinstance(output, FirstToken):
                    self.loads.prefill_complete(booking_id(output.request_id), 0)
                elif isinstance(output, Finished):
                    self.loads.free(booking_id(output.request_id), 0)
                    self.outcomes[int(output.request_id)] = RequestOutcome(
                        int(output.request_id),
                        rank.worker_id,
                        output.prompt_tokens,
                        output.cached_tokens,
                        output.n_output_tokens,
                        output.ttft_ms,
                        output.latency_ms,
                    )

    def scores(self, hashes: PromptHashes) -> PrefixScores:
        """How many leading blocks of a prompt each engine holds."""
        scores = {}
        for rank, engine in self.engines.items():
            held = set(engine.cached_blocks().sequence.tolist())
            n = next((n for n, name in enumerate(hashes.sequence.tolist()) if name not in held), len(hashes.sequence))
            if n:
                scores[rank] = n
        return PrefixScores(scores)


def booking_id(request_id: str) -> BookingId:
    """The booking of a request of a trace."""
    return BookingId(request_id, "naive", 0)


def simulate_naively(
    requests: Sequence[TraceRequest], n_engines: int, config: EngineConfig, policy: RoutePolicy, rng: Rng
) -> list[RequestOutcome]:
    """Route and run a trace; return one outcome per request, in its order."""
    fleet, chooser = NaiveFleet(n_engines, config), Chooser(rng)
    for number, request in enumerate(requests):
        fleet.advance(request.timestamp_ms)
        tokens = tokens_for(request)
        hashes = hash_prompt(tokens, config.block_size)
        sequence, request_blocks = pack_hashes(hashes.sequence), -(-request.input_length // config.block_size)
        prompt = PromptBlocks(sequence, request.input_length, request_blocks, config.block_size)
        matches = Matches(fleet.ranks, fleet.scores(hashes))
        decision = chooser.choose(RoutingRequest(policy, prompt, matches), fleet.loads)
        booking = decision.booking()
        fleet.loads.add(booking_id(str(number)), booking, 0)
        fleet.engines[decision.chosen.rank].submit(
            request.timestamp_ms,
            ModelRequest(str(number), tokens, max(1, request.output_length), output_seed=number, hashes=hashes),
        )
    fleet.advance(float("inf"))
    return [fleet.outcomes[number] for number in range(len(requests))]
