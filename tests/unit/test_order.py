"""The order of tests on several processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.order import dealt

_SIZES = st.integers(0, 40)


@given(_SIZES, _SIZES, _SIZES, st.integers(1, 6))
def test_every_test_is_in_the_order_once(n_long: int, n_heavy: int, n_rest: int, n_processes: int) -> None:
    """Whatever the numbers are, nothing is lost and nothing is twice; heavy ones and the rest keep their order."""
    long, heavy, rest = [range(each, each + n) for each, n in ((0, n_long), (100, n_heavy), (200, n_rest))]
    order = dealt(long, heavy, rest, n_processes)
    assert sorted(order) == [*long, *heavy, *rest]
    assert [each for each in order if 100 <= each < 200] == list(heavy)
    assert [each for each in order if each >= 200] == list(rest)


def test_each_process_begins_with_what_takes_long() -> None:
    """Every contiguous quarter has a share of the long tests first, then of the heavy ones, then of the rest."""
    order = dealt(["a", "b", "c", "d", "e"], [1, 2, 3, 4], [None] * 31, 4)
    assert [order[start : start + 3] for start in (0, 10, 20, 30)] == [
        ["a", "e", 1],
        ["b", 2, None],
        ["c", 3, None],
        ["d", 4, None],
    ]
