"""Which request of a comparison is routed by which mode (pure).

What lives here: rounds, blocks and wash-outs. What must not: clocks, and traffic.

A fleet has one set of caches, so two modes cannot serve it side by side without changing what the other one finds. They
take turns instead (a switchback design). Each round has one block of requests for every mode, in random order: what
changes slowly, such as the load in the course of a day, then affects all modes of a round alike, and no mode always
comes after the same other one. At the beginning of a block the fleet still works on requests of the mode before, and
its caches are as that mode left them, so the first requests of a block do not count (the wash-out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streams.errors import SettingsError

#: Intervals are computed from the differences between rounds; from a single one, none follows.
ROUNDS_MIN = 2

#: With fewer rounds than this, intervals are too narrow: they come from resampling few values.
ROUNDS_SOUND = 8


class Shuffles(Protocol):
    """The part of random.Random that a plan uses."""

    def shuffle(self, x: list[int]) -> None:
        """Shuffle a list in place."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What happens to one request. variant: the number of its mode. counts: whether it is behind the wash-out."""

    round: int
    variant: int
    counts: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """All rounds. orders: for each round, the numbers of the modes in their order."""

    block_requests: int
    washout_requests: int
    orders: Sequence[Sequence[int]]

    @property
    def n_requests(self) -> int:
        """How many requests it takes."""
        return sum(map(len, self.orders)) * self.block_requests

    def turn(self, request: int) -> Turn:
        """What happens to a request, by its number in the order of arrival."""
        block, within = divmod(request, self.block_requests)
        round_, position = divmod(block, len(self.orders[0]))
        return Turn(round_, self.orders[round_][position], within >= self.washout_requests)


def make_plan(n_requests: int, n_variants: int, block_requests: int, washout_requests: int, rng: Shuffles) -> Plan:
    """Plan as many rounds as these requests suffice for. Raises SettingsError if they are too few."""
    if not 0 <= washout_requests < block_requests:
        raise SettingsError(f"a wash-out of {washout_requests} requests leaves nothing of blocks of {block_requests}")
    n_rounds = n_requests // (n_variants * block_requests)
    if n_rounds < ROUNDS_MIN:
        needed = ROUNDS_MIN * n_variants * block_requests
        raise SettingsError(
            f"{n_requests} requests are too few: {ROUNDS_MIN} rounds of {n_variants} modes need {needed}",
            remedy="Send more requests, or make blocks shorter with --block",
        )
    orders = []
    for _ in range(n_rounds):
        order = list(range(n_variants))
        rng.shuffle(order)
        orders.append(tuple(order))
    return Plan(block_requests, washout_requests, tuple(orders))
