"""Whether an engine is still the process that it was (docs/architecture.md, Bridges).

What lives here: evidence as values, and what follows from it (pure). What must not: how evidence is got (feed, replay).

An engine's life is one process. Its `/metrics` tell when it started, and that decides. Where they do not, its replay
socket is asked for the last batch that is known of the rank: the same bytes prove the same life, since a payload
carries the time at which it was made. Where neither tells, a bridge that starts begins a new life, which costs the rank
what it is credited with and never credits it with what it lost; one that is feeding goes on until it is contradicted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from streams.core.events import BEFORE_FIRST
from streams.core.ids import Incarnation


class Proof(enum.Enum):
    """What the replay socket says of the last batch known."""

    SAME = "the engine has the batch, with the same bytes"
    OTHER = "the engine has another batch of that number"
    UNSENT = "the engine has never sent that number"
    FORGOTTEN = "the engine is beyond that number and has forgotten it"
    SILENT = "the engine did not answer, or there is nothing to compare with"


@dataclass(frozen=True, slots=True)
class KnownLife:
    """The last life known of a rank. sequence: its last batch known, BEFORE_FIRST for none; digest: of its payload."""

    incarnation: Incarnation
    sequence: int
    digest: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an engine could be brought to tell.

    reachable: its metrics answered, whatever they said. started: its start time in microseconds, where they told it.
    """

    reachable: bool
    started: Incarnation | None
    proof: Proof = Proof.SILENT

    def __str__(self) -> str:
        if self.started is not None:
            return f"its metrics say that the engine started at {self.started} us"
        told = "its metrics do not say when the engine started" if self.reachable else "its metrics do not answer"
        return f"{told}, and {self.proof.value}"


@dataclass(frozen=True, slots=True)
class SameLife:
    """The rank goes on as it is known."""

    def __str__(self) -> str:
        return "the life known goes on"


@dataclass(frozen=True, slots=True)
class NewLife:
    """A life begins; what is known of the rank is over."""

    incarnation: Incarnation

    def __str__(self) -> str:
        return f"life {self.incarnation} begins"


@dataclass(frozen=True, slots=True)
class NotTold:
    """Nobody answered at all: to begin anything would be a guess, so one asks again."""

    def __str__(self) -> str:
        return "nobody tells which life it is"


Decision = SameLife | NewLife | NotTold


def needs_proof(known: KnownLife | None, evidence: Evidence) -> bool:
    """Whether the replay socket has to be asked; a start time that is known, or newer than all that is, needs none."""
    if known is None or known.sequence == BEFORE_FIRST:
        return False
    return evidence.started is None or evidence.started < known.incarnation


def begins(known: KnownLife | None, evidence: Evidence, now_us: int) -> Decision:
    """Decide for a bridge that starts. known: what the index has of the rank."""
    if known is None:
        if evidence.started is not None:
            return NewLife(evidence.started)
        answered = evidence.reachable or evidence.proof is not Proof.SILENT
        return NewLife(Incarnation(now_us)) if answered else NotTold()
    if evidence.started == known.incarnation:
        return SameLife()
    if evidence.started is not None and evidence.started > known.incarnation:
        return NewLife(evidence.started)
    # Not told, or an earlier time than what is known: that was minted when nobody told, or the clock was set back.
    if evidence.proof is Proof.SAME:
        return SameLife()
    if not evidence.reachable and evidence.proof is Proof.SILENT:
        return NotTold()
    return NewLife(minted(known.incarnation, now_us))


def goes_on(
    known: KnownLife, seen_start: Incarnation | None, evidence: Evidence, now_us: int, *, contradicted: bool = False
) -> Decision:
    """Decide for a bridge that is feeding.

    known: what it published itself. seen_start: the start time that it saw when this life began, where it was told.
    contradicted: a batch came that differs from the one published under its number.
    """
    if evidence.started is not None and seen_start is not None:
        if evidence.started == seen_start:
            return SameLife()
        return NewLife(_after(known.incarnation, evidence.started))
    if evidence.proof is Proof.SAME:
        return SameLife()
    if contradicted or evidence.proof in (Proof.OTHER, Proof.UNSENT):
        if evidence.started is not None:
            return NewLife(_after(known.incarnation, evidence.started))
        return NewLife(minted(known.incarnation, now_us))
    return SameLife()


def minted(known: Incarnation, now_us: int) -> Incarnation:
    """A life greater than the last one known, whatever the clock says."""
    return Incarnation(max(now_us, known + 1))


def _after(known: Incarnation, started: Incarnation) -> Incarnation:
    """A start time as the next life; where a clock was set back, the number after the last."""
    return Incarnation(max(started, known + 1))
