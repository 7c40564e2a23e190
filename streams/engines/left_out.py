"""What a ledger did not index, and why (pure).

What lives here: the names of blocks that were left out, with their reasons, and their numbers. What must not: the
blocks that are held, and what becomes of an event (ledger). Owner: a rank's ledger.

A block behind one that was left out has no known place on a chain, so it is left out for the same reason. It was not
lost: the engine's batch numbers show losses. After a clear, or in a bridge that restarted, nothing is remembered; such
a block is then left out as one whose parent the engine has not reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

#: Names that one rank's ledger remembers, about 100 bytes each; the oldest are forgotten first. A block follows the one
#: before it within a prompt, and a prompt of 1M tokens has as many blocks of 16.
LEFT_OUT_NAMES_MAX = 65_536

#: The reason of a block whose parent the engine has not reported, for example because it came by transfer.
UNKNOWN_PARENT = "unknown_parent"

#: The reason of blocks whose content no request can name, so that no answer lacks anything.
CONTENT_UNKNOWN = "content_unknown"

#: The reason of blocks that a lower tier may have kept when the engine cleared its device.
LOWER_TIER = "lower_tier"


class LeftOut:
    """The blocks that one rank's ledger has left out.

    counts: blocks by reason, since the ledger began. n_blocks: those of them that make the rank's answers approximate.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.n_blocks = 0
        self._reasons: dict[int, str] = {}  # by name

    def __len__(self) -> int:
        """Number of names that are remembered."""
        return len(self._reasons)

    def add(self, reason: str, n_blocks: int) -> None:
        """Count blocks that the ledger leaves out."""
        if n_blocks:
            self.counts[reason] += n_blocks
            self.n_blocks += n_blocks * (reason != CONTENT_UNKNOWN)

    def remember(self, names: Iterable[int], reason: str) -> None:
        """Remember the names of blocks that were left out, by the ledger or by a decoder."""
        for name in names:
            self._reasons.pop(name, None)
            self._reasons[name] = reason
        while len(self._reasons) > LEFT_OUT_NAMES_MAX:
            del self._reasons[next(iter(self._reasons))]

    def reason_of(self, name: int) -> str | None:
        """Return why a block was left out; None if that is not remembered."""
        return self._reasons.get(name)

    def forget(self, names: Sequence[int]) -> None:
        """Forget blocks that are held now."""
        for name in names:
            self._reasons.pop(name, None)

    def take(self, name: int) -> bool:
        """Forget a block that the engine has removed; return whether it was remembered."""
        return self._reasons.pop(name, None) is not None

    def clear(self) -> None:
        """Forget all names. What was counted stays."""
        self._reasons.clear()
