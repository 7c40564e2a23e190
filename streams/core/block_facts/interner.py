"""Facts by number: equal values have one, for as long as somebody uses it.

What lives here: `FactInterner`. What must not: what facts are told of (block_sets).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Fact = TypeVar("_Fact", bound=Hashable)


class FactInterner(Generic[_Fact]):
    """Numbers of values. facts: by number; where nobody uses one, its value is void."""

    def __init__(self) -> None:
        self.facts: list[_Fact] = []
        self._numbers: dict[_Fact, int] = {}
        self._uses: list[int] = []
        self._free: list[int] = []

    def intern(self, fact: _Fact) -> int:
        """Number of a value, which one more uses."""
        number = self._numbers.get(fact)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.facts[number] = fact
            else:
                number = len(self.facts)
                self.facts.append(fact)
                self._uses.append(0)
            self._numbers[fact] = number
        self._uses[number] += 1
        return number

    def retain(self, number: int) -> None:
        """One more uses a number that somebody uses."""
        self._uses[number] += 1

    def number_of(self, fact: _Fact) -> int | None:
        """Number of a value, None where nobody uses it."""
        return self._numbers.get(fact)

    def release(self, number: int) -> None:
        """One uses a number no more."""
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._numbers[self.facts[number]]
            self._free.append(number)

    def __len__(self) -> int:
        return len(self._numbers)
