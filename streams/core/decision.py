"""One routing decision: candidates, their costs, the choice.

What lives here: the composition that the live router and the offline simulator share, so that both follow one policy.
What must not: booking (the caller's), HTTP, time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streams.core.cost import TIER_WEIGHTS, RankTerms, prefill_tokens, rank_terms
from streams.core.ids import RankId
from streams.core.index import OverlapScores
from streams.core.loads import ActiveLoads, Booking
from streams.core.selection import Rng, RoundRobin, RouterMode, select_by_cost, select_random


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """What decides between ranks that may all serve the request."""

    mode: RouterMode = RouterMode.KV
    overlap_score_weight: float = 1.0
    temperature: float = 0.0
    tier_weights: tuple[float, ...] = TIER_WEIGHTS

    @property
    def reads_index(self) -> bool:
        """Whether overlap can change the choice."""
        return self.mode is RouterMode.KV and self.overlap_score_weight > 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice and every candidate's terms, in the candidates' order."""

    chosen: RankTerms
    candidates: tuple[RankTerms, ...]


class Chooser:
    """Chooses ranks; its only state is whose turn it is and the generator it was given."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._turns = RoundRobin()

    def choose(
        self,
        policy: RoutePolicy,
        ranks: Sequence[RankId],
        scores: OverlapScores,
        loads: ActiveLoads,
        *,
        sequence: list[int],
        request_blocks: int,
        block_size: int,
    ) -> Decision:
        """Choose one of `ranks`, which must not be empty.

        sequence: the request's sequence hashes; request_blocks: its length in blocks, a partial last one included.
        """
        candidates = tuple(
            rank_terms(
                rank,
                request_blocks=request_blocks,
                overlap_blocks=scores.scores.get(rank, 0),
                effective_cached_blocks=scores.effective_blocks(rank, policy.tier_weights),
                active_prefill_tokens=loads.load(rank).prefill_tokens,
                decode_blocks=loads.decode_blocks_with(rank, sequence),
                block_size=block_size,
                overlap_score_weight=policy.overlap_score_weight,
            )
            for rank in ranks
        )
        match policy.mode:
            case RouterMode.KV:
                index = select_by_cost([terms.cost for terms in candidates], policy.temperature, self._rng)
            case RouterMode.ROUND_ROBIN:
                index = self._turns.select(len(candidates))
            case RouterMode.RANDOM:
                index = select_random(len(candidates), self._rng)
        return Decision(candidates[index], candidates)


def booking_of(
    chosen: RankTerms,
    *,
    model: str,
    sequence: Sequence[int],
    n_tokens: int,
    request_blocks: int,
    block_size: int,
    expected_output_tokens: int | None = None,
) -> Booking:
    """What the chosen rank is to be charged: tokens that it must compute, and the request's blocks."""
    return Booking(
        rank=chosen.rank,
        model=model,
        prefill_tokens=prefill_tokens(n_tokens, chosen.effective_cached_blocks, block_size),
        sequence=tuple(sequence),
        overlap_blocks=chosen.overlap_blocks,
        request_blocks=request_blocks,
        expected_output_tokens=expected_output_tokens,
    )
