"""Failures of a simulated engine on command (pure).

What lives here: which failure comes at which token of a stream, and for whom (`Faults`). What must not: ending a
process and writing to a connection, which the server does.

A fault is armed for a number of tokens. The first stream of which so many tokens have been sent meets it: exactly that
many, or the number that had been sent already when it was armed. A fault that begins at once needs no stream.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streams.errors import InvalidRequest


class FaultKind(enum.StrEnum):
    """How an engine fails."""

    DIE = "die"  # its process ends as by SIGKILL
    STALL = "stall"  # it sends nothing more on any stream, and its connections stay open
    REFUSE = "refuse"  # one stream ends with an error event


@dataclass(frozen=True, slots=True)
class Fault:
    """An armed fault. after_tokens: those sent of one answer before it; None if it begins at once."""

    kind: FaultKind
    after_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.after_tokens is not None and self.after_tokens < 0:
            raise InvalidRequest(f"after_tokens is {self.after_tokens}; it must not be negative")


def parse_fault(body: Mapping[str, Any]) -> Fault | None:
    """Read the body of `POST /sim/fault`; None ends what was armed or is going on. Raises InvalidRequest."""
    kind, after_tokens = body.get("kind"), body.get("after_tokens")
    if kind == "none":
        return None
    if not isinstance(kind, str) or kind not in set(FaultKind):
        raise InvalidRequest(f"kind is {kind!r}, not one of {', '.join(FaultKind)} and none")
    if after_tokens is not None and type(after_tokens) is not int:
        raise InvalidRequest(f"after_tokens is {after_tokens!r}, not a whole number")
    return Fault(FaultKind(kind), after_tokens)


class Faults:
    """What is armed in one engine, and whether it is stalled. armed: None if no stream will meet a fault."""

    def __init__(self, armed: Fault | None = None) -> None:
        self.armed = armed
        self.stalled = False

    def arm(self, fault: Fault | None) -> FaultKind | None:
        """Replace what was armed, and end a stall. Returns a kind that begins at once; its caller calls `begin`."""
        self.armed, self.stalled = fault, False
        if fault is None or fault.after_tokens is not None:
            return None
        # A refusal needs a stream that is refused: the next one that sends anything.
        return None if fault.kind is FaultKind.REFUSE else fault.kind

    def tokens_before(self, n_sent: int, n_tokens: int) -> int | None:
        """Return how many tokens a stream has sent when it meets the fault, None if it sends more than n_tokens first.

        n_sent: tokens that it has sent. n_tokens: those that it can have sent after its next chunk.
        """
        if self.armed is None:
            return None
        fault_tokens = max(n_sent, self.armed.after_tokens or 0)
        return fault_tokens if fault_tokens <= n_tokens else None

    def begin(self) -> FaultKind:
        """Begin the armed fault, which no further stream will meet."""
        assert self.armed is not None
        kind, self.armed = self.armed.kind, None
        self.stalled = kind is FaultKind.STALL
        return kind
