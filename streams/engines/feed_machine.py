"""The feed of one rank as a machine: events in, instructions out (pure; clocks are part of the events).

What lives here: how an event becomes a signal of the table (feed_table), what its actions change, when evidence and the
batches that a connection has missed are asked for, and which state the rank's records state. What must not: performing
an instruction (feed), sockets and HTTP (receiving, evidence), the order of batches and what a replay shows
(gap_filling), and what evidence shows about a process (continuity).

One door changes the machine: `handle`. It performs nothing, so every sequence of events can be repeated. The machine
has no copy of the rank's last batch, which the rank's writer owns: events bring it (`published`).

State: the phase of a feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from streams.core.events import BEFORE_FIRST, FeedState
from streams.core.ids import Incarnation
from streams.engines.continuity import (
    Decision,
    Evidence,
    KnownIncarnation,
    NewIncarnation,
    ReplayCheck,
    SameIncarnation,
    Undecided,
    decide_after_connecting,
    decide_at_start,
    decide_while_feeding,
    mint_incarnation,
    needs_replay_check,
)
from streams.engines.feed_table import MAY_REPLAY, OF_CONNECTION, Action, FeedPhase, Signal, rule_of
from streams.engines.link_delay import LinkDelay
from streams.engines.turns import HALF, next_turn

#: Time between two checks of an engine's incarnation, and between two requests for its last batches. They are requested
#: from a busy engine too: its live batches may be waiting on a slow link, which looks like an engine that does little.
INCARNATION_CHECK_S = 1.5

#: Time between two attempts to reach an engine that does not answer, and between two checks of batches that contradict
#: published ones: two processes may contradict each other for as long as both run.
RETRY_S = 1.0

#: Batches of another connection are held back for at most this long until something shows which process sends them;
#: the second limit is for a rank without an earlier incarnation, which has no blocks to lose.
EVIDENCE_WAIT_S = 10.0
FIRST_EVIDENCE_WAIT_S = 3.0

#: An engine drops batches until the subscription has reached it, which follows the connection at once. What a replay
#: brings that is requested this much later includes the dropped ones: a round trip takes less.
SUBSCRIBED_AFTER_S = 0.25

#: If messages have been waiting in the socket without a pause for this long, the feed is behind.
BACKLOG_S = 0.5


# -- instructions: what the feed performs, in order --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginIncarnation:
    """Begin an incarnation, and publish its start, which empties the rank before the incarnation's first batch."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the engine which process it is.

    known: the rank's incarnation and last batch, None if there is none. phase, started: the phase, and the known start
    time of the process.
    """

    asked_at_s: float
    known: KnownIncarnation | None
    phase: FeedPhase
    started: Incarnation | None

    @property
    def at_once(self) -> bool:
        """Whether the HTTP server and the replay socket are asked at the same time, since the feed waits."""
        return self.phase is not FeedPhase.FEEDING

    def is_answered_by(self, evidence: Evidence) -> bool:
        """Whether evidence of the HTTP server needs nothing in addition."""
        if self.phase is FeedPhase.STARTING:
            return not needs_replay_check(self.known, evidence)
        if evidence.started is None or self.started is None:
            return False
        # While the feed publishes, the catch-ups compare the last batch as well.
        return evidence.started != self.started or self.phase in (FeedPhase.FEEDING, FeedPhase.FOREIGN_BATCHES)


@dataclass(frozen=True, slots=True)
class CheckModel:
    """Find out which model the process serves. waits: whether the feed is not live until that is known."""

    waits: bool


@dataclass(frozen=True, slots=True)
class ReportDecision:
    """Log what was decided, and why."""

    decision: Decision
    evidence: Evidence


#: Performed by the feed, in order. An action is one without values.
Instruction = Action | BeginIncarnation | Ask | CheckModel | ReportDecision


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Occurred:
    """Something has happened that is a signal of the table by itself. now_s: not used for batches that fit."""

    signal: Signal
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MessagesWait:
    """A message has been found in the socket."""

    now_s: float


@dataclass(frozen=True, slots=True)
class SocketEmptied:
    """No message waits in the socket any more."""


@dataclass(frozen=True, slots=True)
class OtherBatch:
    """A batch has arrived that differs from the one published under its number."""

    now_s: float


@dataclass(frozen=True, slots=True)
class LiveBatchPublished:
    """A live batch was published. emitted_s: when the engine published it, by its own clock."""

    emitted_s: float
    arrived_at_s: float


@dataclass(frozen=True, slots=True)
class EvidenceFound:
    """The engine has answered, or has not answered in time.

    question: what was asked. published: the last batch of the rank's writer.
    """

    question: Ask
    evidence: Evidence
    published: KnownIncarnation
    now_s: float
    now_us: int


@dataclass(frozen=True, slots=True)
class PageRead:
    """A metrics page that was read for another reason shows when the process started."""

    started: Incarnation
    now_s: float


@dataclass(frozen=True, slots=True)
class PageUnreachable:
    """A metrics page could not be requested, since the engine's HTTP server took no connection, or closed it."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. replays: whether a replay is running."""

    published: KnownIncarnation
    replays: bool
    now_s: float
    now_us: int


Event = (
    Occurred
    | MessagesWait
    | SocketEmptied
    | OtherBatch
    | LiveBatchPublished
    | EvidenceFound
    | PageRead
    | PageUnreachable
    | Tick
)


class FeedMachine:
    """Decides what the feed of one rank does. Owner of everything below; all times are monotonic."""

    def __init__(self, recovered: KnownIncarnation | None, share: float, *, is_of_another: bool = False) -> None:
        """recovered: the rank's incarnation as read from Kafka, None if it has none.

        share: of each interval, after which the rank's periodic work is due. is_of_another: whether the recovered
        incarnation was published under another model than that of this feed, or from the batches of another rank.
        """
        self._recovered = recovered
        self._share = share
        self._is_of_another = is_of_another
        #: What has to be found out before live batches may be published.
        self.phase = FeedPhase.STARTING
        #: When the process of the incarnation started, by its metrics; None if that is not known.
        self.started: Incarnation | None = None
        #: When the connection became complete, None while it is not.
        self.connected_at_s: float | None = None
        #: Since when messages have been waiting in the socket without a pause, None if none waits.
        self.messages_since_s: float | None = None
        #: Whether a batch of the incarnation has arrived through this connection.
        self.has_known_batch = False
        #: Whether a batch or a replay did not fit, and no batch that fits has arrived since.
        self.is_unexplained = False
        #: The question that has not been answered, None if there is none. At most one is open.
        self.question: Ask | None = None
        # When the engine was last asked, when it is asked next, and when it was asked about the last contradiction.
        self._asked_at_s = float("-inf")
        self._ask_at_s = float("-inf")
        self._contradicted_at_s = float("-inf")
        self._catch_up_at_s = float("inf")
        self._is_unreachable = False  # whether it was reported that only events show that the engine runs
        self._link = LinkDelay()  # the delay of the incarnation's batches

    def handle(self, event: Event) -> Sequence[Instruction]:
        """Take an event; return what is to be done because of it, in this order.

        Raises UnexpectedSignal for an event that cannot occur in the phase.
        """
        match event:
            case Occurred(signal, now_s):
                if signal is Signal.CONNECTED:
                    self.connected_at_s = now_s
                return self._on_signal(signal, now_s)
            case LiveBatchPublished(emitted_s, arrived_at_s):
                self._link.on_batch(emitted_s, arrived_at_s)
            case Tick():
                return self._on_tick(event)
            case MessagesWait(now_s):
                if self.messages_since_s is None:
                    self.messages_since_s = now_s
            case SocketEmptied():
                self.messages_since_s = None
            case OtherBatch(now_s):
                return self._on_signal(self._signal_of_other_batch(), now_s)
            case EvidenceFound():
                return self._on_evidence(event)
            case PageRead(started, now_s):
                return self._on_page(started, now_s)
            case PageUnreachable(now_s):
                # The connection of events may outlive the process behind a proxy.
                if self.phase is FeedPhase.FEEDING:
                    self._ask_at_s = now_s
            case _:
                assert_never(event)
        return ()

    # -- what others may know ------------------------------------------------------------------------------------------

    @property
    def takes_live(self) -> bool:
        """Whether live batches may be taken from the socket."""
        return self.phase is FeedPhase.FEEDING

    @property
    def has_incarnation(self) -> bool:
        """Whether this feed has begun or resumed an incarnation."""
        return self.phase is not FeedPhase.STARTING

    @property
    def may_replay(self) -> bool:
        """Whether what the replay socket returns belongs to the incarnation that is being fed."""
        return self.phase in MAY_REPLAY

    def feed_state(
        self, now_s: float, answered_from_s: float, *, is_behind: bool, is_late: bool, is_unconfirmed: bool
    ) -> FeedState:
        """Return what the rank's records state about its feed at this moment.

        answered_from_s: when the last replay of this incarnation began that was answered completely. is_behind:
        whether batches exist, or may exist, that are not published in their order yet. is_late: whether events of the
        engine may be late before they reach the socket. is_unconfirmed: whether the process may serve another model,
        the rank may be another one, or the cache may have been dropped without an event.
        """
        since_s, is_feeding = self.messages_since_s, self.phase is FeedPhase.FEEDING
        if self.is_unexplained or is_behind or is_late:
            return FeedState.CATCHING_UP
        if since_s is not None and (not is_feeding or now_s - since_s >= BACKLOG_S):
            return FeedState.CATCHING_UP
        if self._link.is_behind(now_s, answered_from_s):
            return FeedState.CATCHING_UP
        if not is_feeding or self.connected_at_s is None or is_unconfirmed:
            return FeedState.UNPROVEN
        is_caught_up = answered_from_s >= self.connected_at_s + SUBSCRIBED_AFTER_S
        return FeedState.LIVE if self.has_known_batch or is_caught_up else FeedState.UNPROVEN

    # -- signals and actions -------------------------------------------------------------------------------------------

    def _on_signal(
        self, signal: Signal, now_s: float, begin: BeginIncarnation | None = None, started: Incarnation | None = None
    ) -> Sequence[Instruction]:
        """Change the phase as the table says, and perform the rule's actions on the machine.

        begin: the incarnation that a decision begins. started: the start time of its process, or of the one that
        continues, None if the evidence does not show it.
        """
        rule = rule_of(self.phase, signal)
        self.phase = rule.target
        instructions: list[Instruction] = []
        for action in rule.actions:
            instruction = self._do(action, now_s, begin, started)
            if instruction is not None:
                instructions.append(instruction)
        return instructions

    def _do(
        self, action: Action, now_s: float, begin: BeginIncarnation | None, started: Incarnation | None
    ) -> Instruction | None:
        """Change what an action changes; return what the feed does because of it, if anything."""
        match action:
            case Action.PUBLISH | Action.SKIP | Action.HOLD | Action.DROP | Action.STOP_REPLAY:
                return action
            case Action.NOTE_KNOWN:
                self.has_known_batch, self.is_unexplained = True, False
            case Action.NOTE_UNEXPLAINED:
                self.is_unexplained = True
            case Action.ASK:
                self._ask_at_s = now_s
                return self._stop_asking()
            case Action.ASK_AFTER_PAUSE:
                self._ask_at_s = self._contradicted_at_s = max(now_s, self._contradicted_at_s + RETRY_S)
                return self._stop_asking()
            case Action.CATCH_UP:
                assert self.connected_at_s is not None  # the table does this only through a complete connection
                self._catch_up_at_s = max(now_s, self.connected_at_s + SUBSCRIBED_AFTER_S)
            case Action.CATCH_UP_AT_ONCE:
                self._catch_up_at_s = now_s
            case Action.REOPEN:
                self.connected_at_s = self.messages_since_s = None
                self.has_known_batch = self.is_unexplained = False
                return action
            case Action.BEGIN:
                assert begin is not None  # the signal is a decision that begins an incarnation
                self.started, self.is_unexplained = started, False
                self._link = LinkDelay()  # the process may run on another host, with another clock
                return begin
            case Action.RESUME:
                self.started = started
                return action
            case Action.NOTE_START:
                self.started = started if self.started is None else self.started
            case _:
                raise AssertionError(f"{action} is in no rule")
        return None

    def _stop_asking(self) -> Action | None:
        if self.question is None:
            return None
        self.question = None
        return Action.STOP_ASKING

    def _signal_of_other_batch(self) -> Signal:
        if not self.has_known_batch:
            return Signal.FIRST_BATCH_DIFFERS
        return Signal.NEXT_BATCH_DIFFERS if self.is_unexplained else Signal.STRAY_BATCH

    # -- time ----------------------------------------------------------------------------------------------------------

    def _on_tick(self, tick: Tick) -> Sequence[Instruction]:
        """Ask for evidence and for missed batches if that is due, or give up evidence that is late."""
        now_s, known = tick.now_s, self._known(tick.published)
        if self._gives_up(now_s, known):
            question = self.question or Ask(self._asked_at_s, known, self.phase, self.started)
            stop, nothing = self._stop_asking(), Evidence(reachable=False, started=None)
            answer = EvidenceFound(question, nothing, tick.published, now_s, tick.now_us)
            return [*(() if stop is None else (stop,)), *self._on_evidence(answer)]
        instructions: list[Instruction] = []
        if now_s >= self._ask_at_s and self.question is None:
            in_turn_s = next_turn(now_s, INCARNATION_CHECK_S, self._share)
            self._ask_at_s = in_turn_s if self.phase is FeedPhase.FEEDING else now_s + RETRY_S
            self._asked_at_s = now_s
            self.question = Ask(now_s, known, self.phase, self.started)
            instructions.append(self.question)
        if now_s >= self._catch_up_at_s and self.may_replay and not tick.replays:
            self._catch_up_at_s = next_turn(now_s, INCARNATION_CHECK_S, (self._share + HALF) % 1.0)
            instructions.append(Action.REPLAY)
        return instructions

    def _gives_up(self, now_s: float, known: KnownIncarnation | None) -> bool:
        """Whether evidence has not arrived in time: messages wait for it, and they show that an engine runs."""
        return (
            self.phase in OF_CONNECTION
            and self.connected_at_s is not None
            and self._asked_at_s >= self.connected_at_s
            and self._have_waited_long(now_s, known)
        )

    def _have_waited_long(self, now_s: float, known: KnownIncarnation | None) -> bool:
        """Whether a message has waited long enough for evidence about its process."""
        nothing_to_lose = known is None or known.sequence == BEFORE_FIRST
        longest_s = FIRST_EVIDENCE_WAIT_S if nothing_to_lose else EVIDENCE_WAIT_S
        return self.messages_since_s is not None and now_s - self.messages_since_s >= longest_s

    def _on_page(self, started: Incarnation, now_s: float) -> Sequence[Instruction]:
        """Save a question if the page shows the process that is being fed; otherwise ask at once."""
        if self.phase is not FeedPhase.FEEDING or self.started is None:
            return ()
        is_same = started == self.started
        self._ask_at_s = now_s + INCARNATION_CHECK_S if is_same else now_s
        return (Action.NOTE_HEARD,) if is_same else ()

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _known(self, published: KnownIncarnation) -> KnownIncarnation | None:
        """Return the last known incarnation of the rank, None if there is none."""
        return self._recovered if self.phase is FeedPhase.STARTING else published

    def _on_evidence(self, answer: EvidenceFound) -> Sequence[Instruction]:
        """Decide what evidence shows, and continue, begin or resume an incarnation."""
        self.question = None
        evidence, phase = answer.evidence, self.phase
        known = self._known(answer.published)
        instructions: list[Instruction] = []
        if evidence.shows_life:
            instructions.append(Action.NOTE_HEARD)
        is_connected = self.connected_at_s is not None and answer.question.asked_at_s >= self.connected_at_s
        waited_long = self._have_waited_long(answer.now_s, known)
        alone = is_connected and waited_long
        if self._is_outdated(answer, known, alone=alone, is_connected=is_connected):
            return [*instructions, *self._on_signal(Signal.OUTDATED, answer.now_s)]
        decision = self._decide(evidence, known, answer.now_us, alone=alone, is_connected=is_connected)
        if alone and not evidence.reachable and not isinstance(decision, Undecided) and not self._is_unreachable:
            self._is_unreachable = True
            instructions.append(Action.REPORT_UNREACHABLE)
        if not isinstance(decision, Undecided):
            if isinstance(decision, NewIncarnation) or phase in OF_CONNECTION:
                instructions.append(ReportDecision(decision, evidence))
            if self._may_be_another_process(decision, evidence, known):
                instructions.append(CheckModel(waits=evidence.reachable or not waited_long))
        match decision:
            case Undecided():
                done = self._on_signal(Signal.UNDECIDED, answer.now_s)
            case SameIncarnation():
                signal = Signal.SAME if is_connected else Signal.SAME_UNCONNECTED
                done = self._on_signal(signal, answer.now_s, started=self._start_of_same(evidence, known))
            case NewIncarnation(incarnation):
                signal = Signal.ANOTHER if is_connected else Signal.ANOTHER_UNCONNECTED
                done = self._on_signal(signal, answer.now_s, BeginIncarnation(incarnation), evidence.started)
            case _:
                assert_never(decision)
        return [*instructions, *done]

    def _is_outdated(
        self, answer: EvidenceFound, known: KnownIncarnation | None, *, alone: bool, is_connected: bool
    ) -> bool:
        """Whether there is a batch now that the replay socket was not asked for, and that has to decide."""
        if self.phase is not FeedPhase.CONNECTING or not is_connected or alone:
            return False
        asked = answer.question.known
        assert known is not None  # an incarnation has begun
        had_no_batch = asked is None or asked.sequence == BEFORE_FIRST != known.sequence
        return had_no_batch and (answer.evidence.started is None or self.started is None)

    def _decide(
        self, evidence: Evidence, known: KnownIncarnation | None, now_us: int, *, alone: bool, is_connected: bool
    ) -> Decision:
        """Decide what evidence shows. alone: whether messages through this connection have waited long for it."""
        if self.phase is FeedPhase.STARTING:
            decision = decide_at_start(known, evidence, now_us, alone=alone)
            if known is not None and isinstance(decision, SameIncarnation) and self._is_of_another:
                # Only the beginning of an incarnation changes the rank's model, and empties it.
                return NewIncarnation(mint_incarnation(known.incarnation, now_us))
            return decision
        assert known is not None  # an incarnation has begun
        if self.phase in OF_CONNECTION:
            if is_connected:
                return decide_after_connecting(known, self.started, evidence, now_us, alone=alone)
            decision = decide_while_feeding(known, self.started, evidence, now_us)
            return Undecided() if isinstance(decision, SameIncarnation) else decision
        return decide_while_feeding(
            known,
            self.started,
            evidence,
            now_us,
            contradicted=self.phase not in (FeedPhase.FOREIGN_BATCHES, FeedPhase.FEEDING),
            stray=self.phase is FeedPhase.STRAY_BATCH,
        )

    def _start_of_same(self, evidence: Evidence, known: KnownIncarnation | None) -> Incarnation | None:
        """Return the start time of a process whose incarnation continues, None if it may be that of another one."""
        if self.phase is FeedPhase.STARTING:
            return evidence.started
        assert known is not None  # an incarnation has begun
        is_same = evidence.replay_check is ReplayCheck.SAME or known.sequence == BEFORE_FIRST
        return evidence.started if is_same else None

    def _may_be_another_process(self, decision: Decision, evidence: Evidence, known: KnownIncarnation | None) -> bool:
        """Whether a decision leaves open which model the process serves.

        An incarnation also continues after a reconnection if it has no batches yet, whatever process that is.
        """
        if isinstance(decision, NewIncarnation) or self.phase is FeedPhase.STARTING:
            return True
        assert known is not None  # an incarnation has begun
        same_start = evidence.started is not None and evidence.started == self.started
        reconnected = self.phase in (FeedPhase.CONNECTING, FeedPhase.RECONNECTING)
        return reconnected and known.sequence == BEFORE_FIRST and not same_start
