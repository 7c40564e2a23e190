"""What becomes of a rank's feed at each signal, by phase: a table, as data (pure).

What lives here: the phases, the signals, the actions and `RULES`. The tables and the diagram of docs/architecture.md
are drawn from them. What must not: how an event becomes a signal, and what an action changes (feed_machine); I/O.

A batch carries a number and no incarnation, so a feed publishes live batches only in the phase `FEEDING`. Each other
phase is a question that has to be answered first; its value says which. Evidence about the engine's process answers it,
and evidence shows something about the process behind the connection only if it was asked for once the connection was
complete. Live batches wait in their socket meanwhile.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class FeedPhase(enum.Enum):
    """What has to be found out before live batches may be published."""

    FEEDING = "nothing: the connection is to the process of the rank's incarnation"
    STARTING = "which incarnation the engine is in, since the feed has begun none yet"
    CONNECTING = "whether the connection is to the incarnation that was decided before the connection was complete"
    RECONNECTING = "whether the engine is still the same process after its connection broke"
    STRAY_BATCH = "whether a first batch that differs from the published one is from another process"
    FIRST_BATCH_DIFFERS = "whether the connection, whose first batch differs, is to another process"
    BATCHES_DIFFER = "whether a second batch in a row that differs is from another process"
    REPLAY_DIFFERS = "whether the replay socket, which contradicts what was published, is another process's"
    FOREIGN_BATCHES = "whether batches whose numbers do not fit are from another process"


#: Phases in which the connection is what has to be identified. In all others but FEEDING, it is a batch or a replay.
OF_CONNECTION = frozenset({FeedPhase.STARTING, FeedPhase.CONNECTING, FeedPhase.RECONNECTING})

#: Phases in which what the replay socket returns belongs to the incarnation that is being fed.
MAY_REPLAY = frozenset({FeedPhase.FEEDING, FeedPhase.CONNECTING})


class Signal(enum.Enum):
    """What has happened, as far as the rules distinguish it."""

    CONNECTED = "the connection is complete"
    BROKE = "the connection breaks"
    FAILED = "an attempt to connect fails"
    NEW_BATCH = "a batch arrives with a new number"
    REPEATED_BATCH = "a batch arrives a second time"
    STRAY_BATCH = "a first batch differs from the published one, after known batches"
    FIRST_BATCH_DIFFERS = "a batch differs from the published one, and the connection has brought no known batch"
    NEXT_BATCH_DIFFERS = "another batch differs, with no known batch in between"
    UNKNOWN_BATCH = "a batch arrives with an old number whose digest is no longer kept"
    REPLAY_DIFFERS = "the replay socket contradicts what was published"
    REPLAY_TOO_SHORT = "the replay socket shows that the engine has not reached the numbers of buffered batches"
    SAME = "evidence through this connection shows that the incarnation continues"
    SAME_UNCONNECTED = "evidence shows that the incarnation continues, but the connection was not complete"
    ANOTHER = "evidence through this connection shows that another incarnation begins"
    ANOTHER_UNCONNECTED = "evidence shows that another incarnation begins, but the connection was not complete"
    UNDECIDED = "evidence does not show which process it is"
    OUTDATED = "evidence was asked for before a replay brought the first batch"


class Action(enum.Enum):
    """What the machine changes, and lets the feed do, in the order of a rule. The last four are in no rule."""

    PUBLISH = "publish the batch in its order"
    SKIP = "skip the batch"
    HOLD = "hold the batch back"
    DROP = "drop the batch that is held back"
    BEGIN = "begin an incarnation"
    RESUME = "resume the incarnation that Kafka has"
    NOTE_START = "keep the start time if it was not known"
    REOPEN = "open another connection"
    ASK = "ask which process it is"
    ASK_AFTER_PAUSE = "ask which process it is, at most once a second"
    STOP_REPLAY = "stop the replay"
    CATCH_UP = "ask the replay socket for what the connection has missed"
    CATCH_UP_AT_ONCE = "ask the replay socket at once"
    NOTE_KNOWN = "the connection has brought a known batch"
    NOTE_UNEXPLAINED = "the feed is behind until a known batch arrives"
    STOP_ASKING = "forget what was asked: its answer would show nothing any more"
    REPLAY = "request the batches after the last one from the replay socket"
    NOTE_HEARD = "note that the engine has answered something"
    REPORT_UNREACHABLE = "log that events arrive although the engine's HTTP server does not answer"


@dataclass(frozen=True, slots=True)
class PhaseRule:
    """The phase that follows, and what is done."""

    target: FeedPhase
    actions: tuple[Action, ...] = ()


class UnexpectedSignal(RuntimeError):
    """A signal in a phase in which it cannot occur. It is an error of the feed, which then starts again."""


_ASK = (Action.ASK, Action.STOP_REPLAY)
_ASK_ABOUT_BATCH = (Action.ASK_AFTER_PAUSE, Action.STOP_REPLAY, Action.NOTE_UNEXPLAINED)
_BROKE = PhaseRule(FeedPhase.RECONNECTING, (*_ASK, Action.REOPEN))
_BEGIN_UNCONNECTED = PhaseRule(FeedPhase.CONNECTING, (Action.BEGIN, *_ASK, Action.CATCH_UP_AT_ONCE))
#: The connection was to the older process, and so are the batches that wait in its socket.
_BEGIN_ANEW = PhaseRule(FeedPhase.CONNECTING, (Action.BEGIN, Action.REOPEN, *_ASK, Action.CATCH_UP_AT_ONCE))
_BEGIN = PhaseRule(FeedPhase.FEEDING, (Action.BEGIN, Action.CATCH_UP))
_CONTINUE = PhaseRule(FeedPhase.FEEDING, (Action.NOTE_START, Action.CATCH_UP))
_DROP = PhaseRule(FeedPhase.FEEDING, (Action.NOTE_START, Action.DROP, Action.CATCH_UP))

#: While a batch is held back: the process is the same one, or another one.
_HELD: Mapping[Signal, PhaseRule] = {Signal.BROKE: _BROKE, Signal.SAME: _DROP, Signal.ANOTHER: _BEGIN_ANEW}


def _identifying(phase: FeedPhase) -> Mapping[Signal, PhaseRule]:
    """Return the rules that all phases have in which the connection is what has to be identified."""
    return {
        Signal.CONNECTED: PhaseRule(phase, (Action.ASK,)),
        Signal.FAILED: PhaseRule(phase, (Action.REOPEN,)),
        Signal.ANOTHER: _BEGIN,
        Signal.ANOTHER_UNCONNECTED: _BEGIN_UNCONNECTED,
        Signal.UNDECIDED: PhaseRule(phase),
    }


#: What happens in each phase at each signal. A signal without an entry cannot occur in the phase: live batches are
#: taken only in FEEDING, and a replay runs only in the phases of MAY_REPLAY. Evidence through a complete connection
#: always decides about a batch. Only such evidence shows that the connection is to the same incarnation.
RULES: Mapping[FeedPhase, Mapping[Signal, PhaseRule]] = {
    FeedPhase.STARTING: {
        **_identifying(FeedPhase.STARTING),
        Signal.BROKE: PhaseRule(FeedPhase.STARTING, (Action.ASK, Action.REOPEN)),
        Signal.SAME: PhaseRule(FeedPhase.FEEDING, (Action.RESUME, Action.CATCH_UP)),
        Signal.SAME_UNCONNECTED: PhaseRule(FeedPhase.CONNECTING, (Action.RESUME, *_ASK, Action.CATCH_UP_AT_ONCE)),
    },
    FeedPhase.CONNECTING: {
        **_identifying(FeedPhase.CONNECTING),
        Signal.BROKE: _BROKE,
        Signal.REPLAY_DIFFERS: PhaseRule(FeedPhase.REPLAY_DIFFERS, _ASK_ABOUT_BATCH),
        # The connection is not identified yet, and what identifies it says the same about the buffered batches.
        Signal.REPLAY_TOO_SHORT: PhaseRule(FeedPhase.CONNECTING, _ASK_ABOUT_BATCH),
        Signal.SAME: _CONTINUE,
        Signal.OUTDATED: PhaseRule(FeedPhase.CONNECTING, (Action.ASK,)),
    },
    FeedPhase.RECONNECTING: {
        **_identifying(FeedPhase.RECONNECTING),
        Signal.BROKE: _BROKE,
        Signal.SAME: _CONTINUE,
    },
    FeedPhase.FEEDING: {
        Signal.BROKE: _BROKE,
        Signal.NEW_BATCH: PhaseRule(FeedPhase.FEEDING, (Action.NOTE_KNOWN, Action.PUBLISH)),
        Signal.REPEATED_BATCH: PhaseRule(FeedPhase.FEEDING, (Action.NOTE_KNOWN, Action.SKIP)),
        Signal.STRAY_BATCH: PhaseRule(FeedPhase.STRAY_BATCH, (Action.HOLD, *_ASK_ABOUT_BATCH)),
        Signal.FIRST_BATCH_DIFFERS: PhaseRule(FeedPhase.FIRST_BATCH_DIFFERS, (Action.HOLD, *_ASK_ABOUT_BATCH)),
        Signal.NEXT_BATCH_DIFFERS: PhaseRule(FeedPhase.BATCHES_DIFFER, (Action.HOLD, *_ASK_ABOUT_BATCH)),
        Signal.UNKNOWN_BATCH: PhaseRule(FeedPhase.FOREIGN_BATCHES, (*_ASK, Action.NOTE_UNEXPLAINED)),
        Signal.REPLAY_DIFFERS: PhaseRule(FeedPhase.REPLAY_DIFFERS, _ASK_ABOUT_BATCH),
        Signal.REPLAY_TOO_SHORT: PhaseRule(FeedPhase.FOREIGN_BATCHES, _ASK_ABOUT_BATCH),
        Signal.SAME: PhaseRule(FeedPhase.FEEDING, (Action.NOTE_START,)),
        Signal.ANOTHER: _BEGIN_ANEW,
    },
    FeedPhase.STRAY_BATCH: _HELD,
    # A connection that has brought nothing but batches that differ is to the new process.
    FeedPhase.FIRST_BATCH_DIFFERS: {**_HELD, Signal.ANOTHER: _BEGIN},
    FeedPhase.BATCHES_DIFFER: _HELD,
    FeedPhase.REPLAY_DIFFERS: {
        Signal.CONNECTED: PhaseRule(FeedPhase.REPLAY_DIFFERS, (Action.ASK,)),
        Signal.BROKE: _BROKE,
        Signal.FAILED: PhaseRule(FeedPhase.REPLAY_DIFFERS, (Action.REOPEN,)),
        Signal.SAME: _CONTINUE,
        Signal.SAME_UNCONNECTED: PhaseRule(FeedPhase.CONNECTING, (Action.NOTE_START, *_ASK, Action.CATCH_UP_AT_ONCE)),
        Signal.ANOTHER: _BEGIN_ANEW,
        Signal.ANOTHER_UNCONNECTED: _BEGIN_ANEW,
    },
    FeedPhase.FOREIGN_BATCHES: {Signal.BROKE: _BROKE, Signal.SAME: _CONTINUE, Signal.ANOTHER: _BEGIN_ANEW},
}


def rule_of(phase: FeedPhase, signal: Signal) -> PhaseRule:
    """Return what happens in a phase at a signal. Raises UnexpectedSignal if it cannot occur there."""
    rule = RULES[phase].get(signal)
    if rule is None:
        raise UnexpectedSignal(f"{signal.name} cannot occur in the phase {phase.name}")
    return rule
