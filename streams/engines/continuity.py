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


class ReplayCheck(enum.Enum):
    """What the replay socket says of the last batch known."""

    SAME = "the engine has the batch, with the same bytes"
    OTHER = "the engine has another batch of that number"
    UNSENT = "the engine has never sent that number"
    FORGOTTEN = "the engine is beyond that number and has forgotten it"
    SILENT = "the engine did not answer, or there is nothing to compare with"


@dataclass(frozen=True, slots=True)
class KnownIncarnation:
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
    replay_check: ReplayCheck = ReplayCheck.SILENT

    def __str__(self) -> str:
        if self.started is not None:
            return f"its metrics say that the engine started at {self.started} us"
        metrics_text = (
            "its metrics do not say when the engine started" if self.reachable else "its metrics do not answer"
        )
        return f"{metrics_text}, and {self.replay_check.value}"


@dataclass(frozen=True, slots=True)
class SameIncarnation:
    """The rank goes on as it is known."""

    def __str__(self) -> str:
        return "the life known goes on"


@dataclass(frozen=True, slots=True)
class NewIncarnation:
    """A life begins; what is known of the rank is over."""

    incarnation: Incarnation

    def __str__(self) -> str:
        return f"life {self.incarnation} begins"


@dataclass(frozen=True, slots=True)
class Undecided:
    """Nobody answered at all: to begin anything would be a guess, so one asks again."""

    def __str__(self) -> str:
        return "nobody tells which life it is"


Decision = SameIncarnation | NewIncarnation | Undecided


def needs_replay_check(known: KnownIncarnation | None, evidence: Evidence) -> bool:
    """Whether the replay socket has to be asked; a start time that is known, or newer than all that is, needs none."""
    if known is None or known.sequence == BEFORE_FIRST:
        return False
    return evidence.started is None or evidence.started < known.incarnation


def decide_at_start(known: KnownIncarnation | None, evidence: Evidence, now_us: int) -> Decision:
    """Decide for a bridge that starts. known: what the index has of the rank."""
    if known is None:
        if evidence.started is not None:
            return NewIncarnation(evidence.started)
        answered = evidence.reachable or evidence.replay_check is not ReplayCheck.SILENT
        return NewIncarnation(Incarnation(now_us)) if answered else Undecided()
    if evidence.started == known.incarnation:
        return SameIncarnation()
    if evidence.started is not None and evidence.started > known.incarnation:
        return NewIncarnation(evidence.started)
    # Not told, or an earlier time than what is known: that was minted when nobody told, or the clock was set back.
    if evidence.replay_check is ReplayCheck.SAME:
        return SameIncarnation()
    if not evidence.reachable and evidence.replay_check is ReplayCheck.SILENT:
        return Undecided()
    return NewIncarnation(mint_incarnation(known.incarnation, now_us))


def decide_while_feeding(
    known: KnownIncarnation,
    seen_start: Incarnation | None,
    evidence: Evidence,
    now_us: int,
    *,
    contradicted: bool = False,
) -> Decision:
    """Decide for a bridge that is feeding.

    known: what it published itself. seen_start: the start time that it saw when this life began, where it was told.
    contradicted: a batch came that differs from the one published under its number.
    """
    if evidence.started is not None and seen_start is not None:
        if evidence.started == seen_start:
            return SameIncarnation()
        return NewIncarnation(_after(known.incarnation, evidence.started))
    if evidence.replay_check is ReplayCheck.SAME:
        return SameIncarnation()
    if contradicted or evidence.replay_check in (ReplayCheck.OTHER, ReplayCheck.UNSENT):
        if evidence.started is not None:
            return NewIncarnation(_after(known.incarnation, evidence.started))
        return NewIncarnation(mint_incarnation(known.incarnation, now_us))
    return SameIncarnation()


def mint_incarnation(known: Incarnation, now_us: int) -> Incarnation:
    """A life greater than the last one known, whatever the clock says."""
    return Incarnation(max(now_us, known + 1))


def _after(known: Incarnation, started: Incarnation) -> Incarnation:
    """A start time as the next life; where a clock was set back, the number after the last."""
    return Incarnation(max(started, known + 1))
