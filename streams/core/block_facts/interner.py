"""Numbers for facts: equal values have one number for as long as they are used.

What lives here: `FactInterner`. What must not: which blocks have a fact (fact_sets).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Fact = TypeVar("_Fact", bound=Hashable)


class FactInterner(Generic[_Fact]):
    """Numbers of values. facts: the values by number; the value of an unused number has no meaning."""

    def __init__(self) -> None:
        self.facts: list[_Fact] = []
        self._numbers: dict[_Fact, int] = {}
        self._uses: list[int] = []
        self._free: list[int] = []

    def intern(self, fact: _Fact) -> int:
        """Return the number of a value and add one use."""
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
        """Add one use of a number that is in use."""
        self._uses[number] += 1

    def number_of(self, fact: _Fact) -> int | None:
        """Return the number of a value, None if it is not in use."""
        return self._numbers.get(fact)

    def release(self, number: int) -> None:
        """End one use of a number; the last one frees it."""
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._numbers[self.facts[number]]
            self._free.append(number)

    def __len__(self) -> int:
        return len(self._numbers)
