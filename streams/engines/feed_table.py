"""What becomes of a rank's feed at each signal, by phase: a table, as data (pure).

What lives here: the phases, the signals, the actions, `RULES`, and what docs/architecture.md shows of them, which is
drawn from the rules. What must not: how an event becomes a signal, and what an action changes (feed_machine); I/O.

A batch carries a number and no incarnation, so a feed publishes live batches only in the phase `FEEDING`. Each other
phase is a question that has to be answered first; its value says which. Evidence about the engine's process answers it,
and evidence shows something about the process behind the connection only if it was asked for once the connection was
complete. Live batches wait in their socket meanwhile.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
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
    """What the machine changes, and lets the feed do, in the order of a rule."""

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


@dataclass(frozen=True, slots=True)
class PhaseRule:
    """The phase that follows, and what is done."""

    target: FeedPhase
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Never:
    """Why a signal cannot occur in a phase. One that does is an error of the feed, which then starts again."""

    reason: str


class UnexpectedSignal(RuntimeError):
    """A signal in a phase in which it cannot occur."""


_NO_BATCH = Never("live batches are taken from the socket only while feeding")
_NO_REPLAY = Never("no replay runs")
_CONNECTED = Never("the connection is complete")
_DECIDES = Never("evidence through a complete connection decides")
_PROVES = Never("only evidence through the complete connection shows that it is the same incarnation")
_CURRENT = Never("no batch is published while the feed waits for the evidence")

_BATCHES_WAIT: Mapping[Signal, Never] = {
    Signal.NEW_BATCH: _NO_BATCH,
    Signal.REPEATED_BATCH: _NO_BATCH,
    Signal.STRAY_BATCH: _NO_BATCH,
    Signal.FIRST_BATCH_DIFFERS: _NO_BATCH,
    Signal.NEXT_BATCH_DIFFERS: _NO_BATCH,
    Signal.UNKNOWN_BATCH: _NO_BATCH,
}
_REPLAY_STOPPED: Mapping[Signal, Never] = {
    Signal.REPLAY_DIFFERS: _NO_REPLAY,
    Signal.REPLAY_TOO_SHORT: _NO_REPLAY,
}
_STAYS_CONNECTED: Mapping[Signal, Never] = {
    Signal.CONNECTED: _CONNECTED,
    Signal.FAILED: _CONNECTED,
    Signal.SAME_UNCONNECTED: _CONNECTED,
    Signal.ANOTHER_UNCONNECTED: _CONNECTED,
}
_DECIDED: Mapping[Signal, Never] = {Signal.UNDECIDED: _DECIDES, Signal.OUTDATED: _DECIDES}

_ASK = (Action.ASK, Action.STOP_REPLAY)
_ASK_ABOUT_BATCH = (Action.ASK_AFTER_PAUSE, Action.STOP_REPLAY, Action.NOTE_UNEXPLAINED)
_BROKE = PhaseRule(FeedPhase.RECONNECTING, (*_ASK, Action.REOPEN))
_BEGIN_UNCONNECTED = PhaseRule(FeedPhase.CONNECTING, (Action.BEGIN, *_ASK, Action.CATCH_UP_AT_ONCE))
#: The connection was to the older process, and so are the batches that wait in its socket.
_BEGIN_ANEW = PhaseRule(FeedPhase.CONNECTING, (Action.BEGIN, Action.REOPEN, *_ASK, Action.CATCH_UP_AT_ONCE))
_BEGIN = PhaseRule(FeedPhase.FEEDING, (Action.BEGIN, Action.CATCH_UP))
_CONTINUE = PhaseRule(FeedPhase.FEEDING, (Action.NOTE_START, Action.CATCH_UP))
_DROP = PhaseRule(FeedPhase.FEEDING, (Action.NOTE_START, Action.DROP, Action.CATCH_UP))

#: What happens in each phase at each signal. Every pair has an entry.
RULES: Mapping[FeedPhase, Mapping[Signal, PhaseRule | Never]] = {
    FeedPhase.STARTING: {
        **_BATCHES_WAIT,
        **_REPLAY_STOPPED,
        Signal.CONNECTED: PhaseRule(FeedPhase.STARTING, (Action.ASK,)),
        Signal.BROKE: PhaseRule(FeedPhase.STARTING, (Action.ASK, Action.REOPEN)),
        Signal.FAILED: PhaseRule(FeedPhase.STARTING, (Action.REOPEN,)),
        Signal.SAME: PhaseRule(FeedPhase.FEEDING, (Action.RESUME, Action.CATCH_UP)),
        Signal.SAME_UNCONNECTED: PhaseRule(FeedPhase.CONNECTING, (Action.RESUME, *_ASK, Action.CATCH_UP_AT_ONCE)),
        Signal.ANOTHER: _BEGIN,
        Signal.ANOTHER_UNCONNECTED: _BEGIN_UNCONNECTED,
        Signal.UNDECIDED: PhaseRule(FeedPhase.STARTING),
        Signal.OUTDATED: _CURRENT,
    },
    FeedPhase.CONNECTING: {
        **_BATCHES_WAIT,
        Signal.CONNECTED: PhaseRule(FeedPhase.CONNECTING, (Action.ASK,)),
        Signal.BROKE: _BROKE,
        Signal.FAILED: PhaseRule(FeedPhase.CONNECTING, (Action.REOPEN,)),
        Signal.REPLAY_DIFFERS: PhaseRule(FeedPhase.REPLAY_DIFFERS, _ASK_ABOUT_BATCH),
        # The connection is not identified yet, and what identifies it says the same about the buffered batches.
        Signal.REPLAY_TOO_SHORT: PhaseRule(FeedPhase.CONNECTING, _ASK_ABOUT_BATCH),
        Signal.SAME: _CONTINUE,
        Signal.SAME_UNCONNECTED: _PROVES,
        Signal.ANOTHER: _BEGIN,
        Signal.ANOTHER_UNCONNECTED: _BEGIN_UNCONNECTED,
        Signal.UNDECIDED: PhaseRule(FeedPhase.CONNECTING),
        Signal.OUTDATED: PhaseRule(FeedPhase.CONNECTING, (Action.ASK,)),
    },
    FeedPhase.RECONNECTING: {
        **_BATCHES_WAIT,
        **_REPLAY_STOPPED,
        Signal.CONNECTED: PhaseRule(FeedPhase.RECONNECTING, (Action.ASK,)),
        Signal.BROKE: _BROKE,
        Signal.FAILED: PhaseRule(FeedPhase.RECONNECTING, (Action.REOPEN,)),
        Signal.SAME: _CONTINUE,
        Signal.SAME_UNCONNECTED: _PROVES,
        Signal.ANOTHER: _BEGIN,
        Signal.ANOTHER_UNCONNECTED: _BEGIN_UNCONNECTED,
        Signal.UNDECIDED: PhaseRule(FeedPhase.RECONNECTING),
        Signal.OUTDATED: _CURRENT,
    },
    FeedPhase.FEEDING: {
        **_STAYS_CONNECTED,
        **_DECIDED,
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
    FeedPhase.STRAY_BATCH: {
        **_BATCHES_WAIT,
        **_REPLAY_STOPPED,
        **_STAYS_CONNECTED,
        **_DECIDED,
        Signal.BROKE: _BROKE,
        Signal.SAME: _DROP,
        Signal.ANOTHER: _BEGIN_ANEW,
    },
    FeedPhase.FIRST_BATCH_DIFFERS: {
        **_BATCHES_WAIT,
        **_REPLAY_STOPPED,
        **_STAYS_CONNECTED,
        **_DECIDED,
        Signal.BROKE: _BROKE,
        Signal.SAME: _DROP,
        Signal.ANOTHER: _BEGIN,  # a connection that has brought nothing but batches that differ is to the new process
    },
    FeedPhase.BATCHES_DIFFER: {
        **_BATCHES_WAIT,
        **_REPLAY_STOPPED,
        **_STAYS_CONNECTED,
        **_DECIDED,
        Signal.BROKE: _BROKE,
        Signal.SAME: _DROP,
        Signal.ANOTHER: _BEGIN_ANEW,
    },
    FeedPhase.REPLAY_DIFFERS: {
        **_BATCHES_WAIT,
        **_REPLAY_STOPPED,
        **_DECIDED,
        Signal.CONNECTED: PhaseRule(FeedPhase.REPLAY_DIFFERS, (Action.ASK,)),
        Signal.BROKE: _BROKE,
        Signal.FAILED: PhaseRule(FeedPhase.REPLAY_DIFFERS, (Action.REOPEN,)),
        Signal.SAME: _CONTINUE,
        Signal.SAME_UNCONNECTED: PhaseRule(FeedPhase.CONNECTING, (Action.NOTE_START, *_ASK, Action.CATCH_UP_AT_ONCE)),
        Signal.ANOTHER: _BEGIN_ANEW,
        Signal.ANOTHER_UNCONNECTED: _BEGIN_ANEW,
    },
    FeedPhase.FOREIGN_BATCHES: {
        **_BATCHES_WAIT,
        **_REPLAY_STOPPED,
        **_STAYS_CONNECTED,
        **_DECIDED,
        Signal.BROKE: _BROKE,
        Signal.SAME: _CONTINUE,
        Signal.ANOTHER: _BEGIN_ANEW,
    },
}


def rule_of(phase: FeedPhase, signal: Signal) -> PhaseRule:
    """Return what happens in a phase at a signal. Raises UnexpectedSignal if it cannot occur there."""
    rule = RULES[phase][signal]
    if isinstance(rule, Never):
        raise UnexpectedSignal(f"{signal.name} in the phase {phase.name}, although {rule.reason}")
    return rule


def diagram() -> str:
    """Return the changes of phase as a Mermaid state diagram, which docs/architecture.md contains."""
    return "\n".join(["stateDiagram-v2", f"    [*] --> {FeedPhase.STARTING.name}", *_edges()])


def table() -> str:
    """Return the rules as Markdown tables, which docs/architecture.md contains: the phases, then what happens."""
    lines = ["| phase | what has to be found out |", "|---|---|"]
    lines += [f"| `{phase.name}` | {phase.value} |" for phase in FeedPhase]
    lines += ["", "| when | in the phase | next phase | what the feed does |", "|---|---|---|---|"]
    for signal in Signal:
        for actions, target, phases in _outcomes(signal):
            names = ", ".join(f"`{phase.name}`" for phase in phases)
            done = "; ".join(action.value for action in actions)
            next_phase = "the same" if target is None else f"`{target.name}`"
            lines.append(f"| `{signal.name.lower()}`: {signal.value} | {names} | {next_phase} | {done or 'nothing'} |")
    return "\n".join(lines)


def _outcomes(signal: Signal) -> Iterator[tuple[tuple[Action, ...], FeedPhase | None, list[FeedPhase]]]:
    """Yield what is done at a signal, the phase that follows (None: the same one), and the phases that have both."""
    rules = {phase: rule for phase in RULES if isinstance(rule := RULES[phase][signal], PhaseRule)}
    entered = {(rule.actions, rule.target) for phase, rule in rules.items() if rule.target is not phase}
    outcomes: dict[tuple[tuple[Action, ...], FeedPhase | None], list[FeedPhase]] = {}
    for phase, rule in rules.items():
        stays = rule.target is phase and (rule.actions, phase) not in entered
        outcomes.setdefault((rule.actions, None if stays else rule.target), []).append(phase)
    for (actions, target), phases in outcomes.items():
        yield actions, target, phases


def _edges() -> Iterator[str]:
    for phase, rules in RULES.items():
        signals: dict[FeedPhase, list[Signal]] = {}
        for signal in Signal:
            rule = rules[signal]
            if isinstance(rule, PhaseRule) and rule.target is not phase:
                signals.setdefault(rule.target, []).append(signal)
        for target, reasons in signals.items():
            yield f"    {phase.name} --> {target.name}: {', '.join(signal.name.lower() for signal in reasons)}"
