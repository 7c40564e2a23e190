"""A cache of what follows from a tuple alone, found by the tuple's identity.

What lives here: `IdentityCache`. What must not: what is cached.

The ranks that a request may go to are the same tuple for most requests, and comparing two tuples of 1,000 ranks takes
longer than a decision.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

#: Tuples whose values are kept; then the oldest one is dropped. A router has one tuple for each combination of model,
#: role and taints in use, and a new one after each change of its fleet.
TUPLES_MAX = 64

_T = TypeVar("_T")


class IdentityCache(Generic[_T]):
    """Values by tuple. Not thread-safe, except that `get` and `put` of several threads lose nothing but a value."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        # The key is the id() of a tuple. The value keeps the tuple alive, so that no other object can get the same id.
        self._kept: dict[int, tuple[tuple[Any, ...], _T]] = {}

    def get(self, key: tuple[Any, ...]) -> _T | None:
        """Return the value that was put for this very tuple, or None."""
        kept = self._kept.get(id(key))
        return None if kept is None else kept[1]

    def put(self, key: tuple[Any, ...], value: _T) -> None:
        """Keep a value for a tuple."""
        while len(self._kept) >= TUPLES_MAX:
            self._kept.pop(next(iter(self._kept), 0), None)
        self._kept[id(key)] = (key, value)

    def __len__(self) -> int:
        return len(self._kept)
