"""Periodic work of many ranks is spread over the interval."""

from __future__ import annotations

import pytest

from streams.core.ids import DpRank, RankId, WorkerId
from streams.engines.turns import next_turn, share_of


@pytest.mark.parametrize("every_s", [0.05, 1.0, 2.0, 180.0])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.999])
def test_turns_are_an_interval_apart(every_s: float, share: float) -> None:
    """The next one is later than now, by at most an interval; work that took long does not move later turns."""
    now_s = 12345.678
    first = next_turn(now_s, every_s, share)
    assert now_s < first <= now_s + every_s
    for late_s in (0.0, 0.4, 0.9):
        assert next_turn(first + late_s * every_s, every_s, share) == pytest.approx(first + every_s)
    assert next_turn(first + 3.5 * every_s, every_s, share) == pytest.approx(first + 4 * every_s)


def test_hundreds_of_ranks_are_spread_over_the_interval() -> None:
    """No twentieth of an interval has more than four times its part of 200 engines or of 200 ranks."""
    for names in (
        [WorkerId(2_000_000 + n) for n in range(200)],
        [RankId(WorkerId(250_000 + n), DpRank(rank)) for n in range(25) for rank in range(8)],
    ):
        shares = [share_of(name) for name in names]
        assert all(0.0 <= share < 1.0 for share in shares)
        parts = [sum(int(share * 20) == part for share in shares) for part in range(20)]
        assert max(parts) <= 40 and min(parts) >= 1
