"""Whether an engine is still the same process (docs/bridges.md).

What lives here: evidence as values, and the decision that follows from it (pure). What must not: how evidence is
obtained (process_start, replay).

An incarnation is one process of an engine. If the engine's metrics page reports another start time than the known one,
another process runs. An equal start time may be that of a process that only serves HTTP, and outlived the one that
publishes events. So the bridge also requests the rank's last known batch from the replay socket: identical bytes show
that it is the same incarnation, since a payload contains the time at which it was made, and other bytes show that it is
another one. Without an answer, an equal start time decides, unless a live batch contradicts a published one. Without
either, a starting bridge begins a new incarnation. The index may then lack blocks that the rank still holds, but it
never has blocks that the rank lost. A bridge that is already feeding continues the incarnation until evidence
contradicts it, as long as its connection to the engine lasts: through one connection, all batches come from one
process. After the connection broke, the incarnation continues only if evidence shows that it is the same one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from streams.core.events import BEFORE_FIRST
from streams.core.ids import Incarnation


class ReplayCheck(enum.Enum):
    """What the replay socket showed about the last known batch."""

    SAME = "the engine has the batch, with the same bytes"
    OTHER = "the engine has another batch of that number"
    UNSENT = "the engine has never sent that number"
    FORGOTTEN = "the engine is past that number and no longer keeps the batch"
    SILENT = "the engine did not answer, or there is nothing to compare with"


@dataclass(frozen=True, slots=True)
class KnownIncarnation:
    """The last known incarnation of a rank.

    sequence: its last known batch, BEFORE_FIRST for none. digest: of that batch's payload.
    """

    incarnation: Incarnation
    sequence: int
    digest: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What could be found out about an engine.

    reachable: whether the engine itself answered over HTTP. started: its start time in microseconds, None if not
    reported. refused: whether its HTTP port refused the connection, as the ports of a process that exited do.
    """

    reachable: bool
    started: Incarnation | None
    replay_check: ReplayCheck = ReplayCheck.SILENT
    refused: bool = False

    @property
    def shows_life(self) -> bool:
        """Whether the engine answered anything."""
        return self.reachable or self.replay_check is not ReplayCheck.SILENT

    @property
    def shows_another(self) -> bool:
        """Whether the engine showed that it did not send the last known batch."""
        return self.replay_check in (ReplayCheck.OTHER, ReplayCheck.UNSENT)

    def __str__(self) -> str:
        if self.started is not None and self.shows_another:
            return f"it started at {self.started} us by its metrics, and {self.replay_check.value}"
        if self.started is not None:
            return f"its metrics report that the engine started at {self.started} us"
        metrics_text = (
            "its metrics do not report when the engine started" if self.reachable else "its metrics do not answer"
        )
        return f"{metrics_text}, and {self.replay_check.value}"


@dataclass(frozen=True, slots=True)
class SameIncarnation:
    """The last known incarnation continues."""

    def __str__(self) -> str:
        return "the known incarnation continues"


@dataclass(frozen=True, slots=True)
class NewIncarnation:
    """An incarnation begins, and everything that the rank held in the older one ends."""

    incarnation: Incarnation

    def __str__(self) -> str:
        return f"incarnation {self.incarnation} begins"


@dataclass(frozen=True, slots=True)
class Undecided:
    """Neither the metrics nor the replay socket answered, so the check is repeated."""

    def __str__(self) -> str:
        return "the incarnation is not known yet"


Decision = SameIncarnation | NewIncarnation | Undecided


def needs_replay_check(known: KnownIncarnation | None, evidence: Evidence) -> bool:
    """Return whether the replay socket must be queried.

    A start time that is later than the known one decides alone. Without a known batch there is nothing to query.
    """
    if known is None or known.sequence == BEFORE_FIRST:
        return False
    return evidence.started is None or evidence.started <= known.incarnation


def decide_at_start(
    known: KnownIncarnation | None, evidence: Evidence, now_us: int, *, alone: bool = False
) -> Decision:
    """Decide for a bridge that starts.

    known: the rank's last incarnation as read from Kafka, None if there is none. alone: batches have arrived and waited
    for other evidence long enough; they show that an engine is running, but not which process it is.
    """
    if known is None:
        if evidence.started is not None:
            return NewIncarnation(evidence.started)
        return NewIncarnation(Incarnation(now_us)) if evidence.shows_life or alone else Undecided()
    if evidence.started is not None and evidence.started > known.incarnation:
        return NewIncarnation(evidence.started)
    if evidence.started == known.incarnation and not evidence.shows_another:
        return SameIncarnation()
    # The start time is missing, or earlier than the known incarnation. It is earlier if a bridge minted the incarnation
    # while no start time was reported, or after another one with the same start time, or if the clock was set back.
    if evidence.replay_check is ReplayCheck.SAME:
        return SameIncarnation()
    if not evidence.shows_life and not alone:
        return Undecided()
    return NewIncarnation(mint_incarnation(known.incarnation, now_us))


def decide_while_feeding(
    known: KnownIncarnation,
    seen_start: Incarnation | None,
    evidence: Evidence,
    now_us: int,
    *,
    contradicted: bool = False,
    stray: bool = False,
) -> Decision:
    """Decide for a bridge that is feeding.

    known: what it published itself. seen_start: the start time reported when this incarnation began, None if none was.
    contradicted: a batch arrived that differs from the one published under its number. stray: it is the only one, and
    came through a connection that had brought known batches, so it may be a late one of another process.
    """
    same_start = False
    if evidence.started is not None and seen_start is not None:
        if evidence.started != seen_start:
            return NewIncarnation(_after(known.incarnation, evidence.started))
        same_start = True
    if evidence.replay_check is ReplayCheck.SAME:
        return SameIncarnation()
    if evidence.shows_another or (contradicted and not (stray and same_start)):
        if evidence.started is not None:
            return NewIncarnation(_after(known.incarnation, evidence.started))
        return NewIncarnation(mint_incarnation(known.incarnation, now_us))
    return SameIncarnation()


def decide_after_connecting(
    known: KnownIncarnation, seen_start: Incarnation | None, evidence: Evidence, now_us: int, *, alone: bool = False
) -> Decision:
    """Decide for a bridge that is feeding, before it publishes the first batch of another connection.

    evidence: found out after the connection was complete. Others as in the functions above.
    """
    decision = decide_while_feeding(known, seen_start, evidence, now_us)
    same_start = seen_start is not None and evidence.started == seen_start
    if isinstance(decision, NewIncarnation) or same_start or evidence.replay_check is ReplayCheck.SAME:
        return decision
    if not evidence.shows_life and not alone:
        return Undecided()
    if known.sequence == BEFORE_FIRST:
        return SameIncarnation()  # it holds nothing that another process could have lost
    if evidence.started is not None:
        return NewIncarnation(_after(known.incarnation, evidence.started))
    return NewIncarnation(mint_incarnation(known.incarnation, now_us))


def mint_incarnation(known: Incarnation, now_us: int) -> Incarnation:
    """Return an incarnation that is greater than the last known one, whatever the clock shows."""
    return Incarnation(max(now_us, known + 1))


def _after(known: Incarnation, started: Incarnation) -> Incarnation:
    """Return the start time as the next incarnation, or the number after the last one if a clock was set back."""
    return Incarnation(max(started, known + 1))
