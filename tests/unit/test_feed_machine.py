"""The machine of a rank's feed: its table, random sequences of events, and single decisions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streams.core.events import BEFORE_FIRST, FeedState
from streams.core.ids import Incarnation
from streams.engines import feed_machine
from streams.engines.continuity import Evidence, KnownIncarnation, ReplayCheck
from streams.engines.feed_machine import (
    BACKLOG_S,
    EVIDENCE_WAIT_S,
    RETRY_S,
    SUBSCRIBED_AFTER_S,
    Ask,
    BeginIncarnation,
    Event,
    EvidenceFound,
    FeedMachine,
    Instruction,
    LiveBatchPublished,
    MessagesWait,
    Occurred,
    OtherBatch,
    PageRead,
    PageUnreachable,
    SocketEmptied,
    Tick,
)
from streams.engines.feed_table import RULES, Action, FeedPhase, PhaseRule, Signal, UnexpectedSignal, rule_of

#: A rank that holds blocks; the first start time is that of its process.
STARTED = Incarnation(1_000)
KNOWN = KnownIncarnation(STARTED, 7, 99)
SAME_START = Evidence(reachable=True, started=STARTED)
SAME_BYTES = Evidence(reachable=False, started=None, replay_check=ReplayCheck.SAME)
OTHER_START = Evidence(reachable=True, started=Incarnation(2_000))
SILENT = Evidence(reachable=False, started=None)


@pytest.mark.parametrize(("phase", "signal"), list(product(FeedPhase, Signal)))
def test_a_phase_has_a_rule_for_a_signal_or_the_signal_is_an_error(phase: FeedPhase, signal: Signal) -> None:
    """A signal without a rule cannot occur in the phase; it is an error that names both."""
    rule = RULES[phase].get(signal)
    if rule is None:
        with pytest.raises(UnexpectedSignal, match=f"{signal.name} .*{phase.name}"):
            rule_of(phase, signal)
    else:
        assert rule_of(phase, signal) is rule
        assert len(set(rule.actions)) == len(rule.actions)


def test_live_batches_are_taken_in_one_phase_only() -> None:
    """In all others, what an engine sends waits in the socket."""
    batches = [signal for signal in Signal if signal.name.endswith(("BATCH", "DIFFERS"))]
    batches.remove(Signal.REPLAY_DIFFERS)
    assert len(batches) == 6
    for phase in FeedPhase:
        taken = {signal in RULES[phase] for signal in batches}
        assert taken == {phase is FeedPhase.FEEDING}


class Shell:
    """What surrounds a machine, as far as its events depend on it; checks every instruction."""

    def __init__(self, recovered: KnownIncarnation | None) -> None:
        self.machine = FeedMachine(recovered, share=0.25)
        self.now_s = 1_000.0
        self.recovered = recovered
        self.published = KnownIncarnation(Incarnation(0), BEFORE_FIRST, 0)
        self.connected_at_s: float | None = None
        self.question: Ask | None = None
        self.replays = False
        self.answered_from_s = float("-inf")
        self.waits = False
        self.held = False
        self.known_batches = 0  # of this connection
        self.identified = False  # whether evidence that was asked for through this connection has decided

    @property
    def now_us(self) -> int:
        return round(self.now_s * 1e6)

    def is_in(self, phase: FeedPhase) -> bool:
        """Whether the machine is in this phase."""
        return self.machine.phase is phase

    def handle(self, event: Event) -> None:
        """Let the machine handle an event, and perform what it returns."""
        before = self.machine.phase
        instructions = self.machine.handle(event)
        self._perform(instructions)
        if before is not FeedPhase.FEEDING and self.machine.phase is FeedPhase.FEEDING:
            assert self.identified, (before, event)

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case BeginIncarnation(incarnation):
                    assert self.recovered is None or incarnation > self.recovered.incarnation
                    assert incarnation > self.published.incarnation
                    self.published = KnownIncarnation(incarnation, BEFORE_FIRST, 0)
                    self.replays, self.answered_from_s = False, float("-inf")
                case Action.RESUME:
                    assert self.recovered is not None and self.published.incarnation == 0
                    self.published = self.recovered
                case Action.REOPEN:
                    self.connected_at_s, self.waits, self.held = None, False, False
                    self.known_batches, self.identified = 0, False
                case Ask(asked_at_s, known):
                    assert self.question is None
                    assert known == (self.published if self.machine.has_incarnation else self.recovered)
                    self.question = instruction
                    assert asked_at_s == self.now_s
                case Action.STOP_ASKING:
                    assert self.question is not None
                    self.question = None
                case Action.REPLAY:
                    assert self.machine.may_replay and not self.replays
                    self.replays = True
                case Action.STOP_REPLAY:
                    self.replays = False
                case Action.HOLD:
                    assert not self.held
                    self.held = self.waits = True
                case Action.DROP:
                    assert self.held
                    self.held = False
                case _:
                    pass

    # -- what may happen -----------------------------------------------------------------------------------------------

    @property
    def may_take(self) -> bool:
        return self.machine.takes_live and self.waits

    @property
    def may_differ(self) -> bool:
        return self.may_take and self.published.sequence > BEFORE_FIRST

    def connect(self) -> None:
        self.connected_at_s = self.now_s
        self.handle(Occurred(Signal.CONNECTED, self.now_s))

    def fail(self) -> None:
        self.handle(Occurred(Signal.FAILED, self.now_s))

    def disconnect(self) -> None:
        self.handle(Occurred(Signal.BROKE, self.now_s))

    def queue(self) -> None:
        self.waits = True
        self.handle(MessagesWait(self.now_s))

    def empty(self) -> None:
        self.waits = False
        self.handle(SocketEmptied())

    def take_new(self) -> None:
        """Take the next batch; a batch that was held back is the first of the incarnation that begins with it."""
        instructions = self.machine.handle(Occurred(Signal.NEW_BATCH))
        assert instructions == [Action.PUBLISH] and self.identified
        self.held = False
        self.known_batches += 1
        self.publish()
        self.handle(LiveBatchPublished(self.now_s, self.now_s))

    def publish(self) -> None:
        incarnation, sequence = self.published.incarnation, self.published.sequence + 1
        self.published = KnownIncarnation(incarnation, sequence, sequence)

    def take_repeated(self) -> None:
        self.known_batches += 1
        self.handle(Occurred(Signal.REPEATED_BATCH))

    def take_other(self) -> None:
        self.handle(OtherBatch(self.now_s))

    def take_unknown(self) -> None:
        self.handle(Occurred(Signal.UNKNOWN_BATCH, self.now_s))

    def end_replay(self, *, brings_batch: bool) -> None:
        self.replays = False
        self.answered_from_s = self.now_s
        if brings_batch:
            self.publish()

    def contradict_by_replay(self) -> None:
        self.replays = False
        self.handle(Occurred(Signal.REPLAY_DIFFERS, self.now_s))

    def end_replay_too_early(self) -> None:
        self.replays = False
        self.handle(Occurred(Signal.REPLAY_TOO_SHORT, self.now_s))

    def answer(self, evidence: Evidence) -> None:
        assert self.question is not None
        question, self.question = self.question, None
        self.identified = self.connected_at_s is not None and question.asked_at_s >= self.connected_at_s
        self.handle(EvidenceFound(question, evidence, self.published, self.now_s, self.now_us))

    def read_page(self, started: Incarnation) -> None:
        self.handle(PageRead(started, self.now_s))

    def reach_no_page(self) -> None:
        self.handle(PageUnreachable(self.now_s))

    def tick(self) -> None:
        self.identified |= self.connected_at_s is not None  # messages that have waited long decide alone
        self.handle(Tick(self.published, self.replays, self.now_s, self.now_us))

    def check(self) -> None:
        """Check what holds after every event."""
        machine = self.machine
        assert machine.connected_at_s == self.connected_at_s
        assert machine.question == self.question
        assert not machine.takes_live or (self.connected_at_s is not None and self.identified)
        assert not self.held or self.waits
        state = machine.feed_state(
            self.now_s, self.answered_from_s, is_behind=False, is_late=False, is_unconfirmed=False
        )
        if state is FeedState.LIVE:
            assert machine.takes_live and self.connected_at_s is not None
            assert self.known_batches or self.answered_from_s >= self.connected_at_s + SUBSCRIBED_AFTER_S
            assert not machine.is_unexplained
        if self.waits and not machine.takes_live:
            assert state is FeedState.CATCHING_UP


STARTS = st.sampled_from([None, STARTED, Incarnation(2_000), Incarnation(1_500_000_000)])
EVIDENCE = st.builds(
    lambda reachable, started, check, refused: Evidence(
        reachable, started if reachable else None, check, refused and not reachable
    ),
    st.booleans(),
    STARTS,
    st.sampled_from([*ReplayCheck, ReplayCheck.SAME, ReplayCheck.SAME]),
    st.booleans(),
)
RECOVERED = st.sampled_from([None, KNOWN, KnownIncarnation(STARTED, BEFORE_FIRST, 0)])


class FeedHistory(RuleBasedStateMachine):
    """Any sequence of events that a feed's sockets and engine can cause."""

    @initialize(recovered=RECOVERED)
    def start(self, recovered: KnownIncarnation | None) -> None:
        self.shell = Shell(recovered)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.1, 2.5, 11.0]))
    def wait(self, seconds: float) -> None:
        self.shell.now_s += seconds

    @rule()
    def tick(self) -> None:
        self.shell.tick()

    @precondition(lambda self: self.shell.connected_at_s is None)
    @rule()
    def connect(self) -> None:
        self.shell.connect()

    @precondition(lambda self: self.shell.connected_at_s is None)
    @rule()
    def fail(self) -> None:
        self.shell.fail()

    @precondition(lambda self: self.shell.connected_at_s is not None)
    @rule()
    def disconnect(self) -> None:
        self.shell.disconnect()

    @precondition(lambda self: self.shell.connected_at_s is not None)
    @rule()
    def queue(self) -> None:
        self.shell.queue()

    @precondition(lambda self: self.shell.may_take)
    @rule()
    def take_new(self) -> None:
        self.shell.take_new()

    @precondition(lambda self: self.shell.may_take and not self.shell.held)
    @rule()
    def empty(self) -> None:
        self.shell.empty()

    @precondition(lambda self: self.shell.may_differ and not self.shell.held)
    @rule(which=st.sampled_from(["repeated", "other", "unknown"]))
    def take_old(self, which: str) -> None:
        {"repeated": self.shell.take_repeated, "other": self.shell.take_other, "unknown": self.shell.take_unknown}[
            which
        ]()

    @precondition(lambda self: self.shell.replays and self.shell.machine.may_replay)
    @rule(brings_batch=st.booleans())
    def end_replay(self, brings_batch: bool) -> None:
        self.shell.end_replay(brings_batch=brings_batch)

    @precondition(lambda self: self.shell.replays and self.shell.machine.may_replay)
    @rule(is_too_short=st.booleans())
    def end_replay_badly(self, is_too_short: bool) -> None:
        if is_too_short:
            self.shell.end_replay_too_early()
        else:
            self.shell.contradict_by_replay()

    @precondition(lambda self: self.shell.question is not None)
    @rule(evidence=EVIDENCE)
    def answer(self, evidence: Evidence) -> None:
        self.shell.answer(evidence)

    @rule(started=STARTS.filter(lambda started: started is not None))
    def read_page(self, started: Incarnation) -> None:
        self.shell.read_page(started)

    @rule()
    def reach_no_page(self) -> None:
        self.shell.reach_no_page()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "shell"):
            self.shell.check()


TestFeedHistory = FeedHistory.TestCase
TestFeedHistory.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


def walk(seed: int, n_steps: int) -> None:
    """Let a random sequence of events happen, as `FeedHistory` does, in less time."""
    chance = random.Random(seed)
    shell = Shell(chance.choice([None, KNOWN, KnownIncarnation(STARTED, BEFORE_FIRST, 0)]))
    for _ in range(n_steps):
        shell.now_s += chance.choice([0.0, 0.0, 0.01, 0.3, 1.1, 2.5, 11.0])
        moves: list[Callable[[], None]] = [shell.tick, partial(shell.read_page, Incarnation(2_000))]
        if shell.connected_at_s is None:
            moves += [shell.connect, shell.fail]
        else:
            moves += [shell.queue, shell.disconnect]
        if shell.may_take:
            moves += [shell.take_new]
        if shell.may_take and not shell.held:
            moves += [shell.empty]
        if shell.may_differ and not shell.held:
            moves += [shell.take_repeated, shell.take_other, shell.take_unknown]
        if shell.replays and shell.machine.may_replay:
            moves += [shell.contradict_by_replay, shell.end_replay_too_early]
            moves += [partial(shell.end_replay, brings_batch=True)]
        if shell.question is not None:
            for evidence in (SAME_START, SAME_BYTES, OTHER_START, SILENT, Evidence(False, None, ReplayCheck.OTHER)):
                moves.append(partial(shell.answer, evidence))
        chance.choice(moves)()
        shell.check()


def test_random_sequences_reach_every_rule_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule is there for nothing, and no sequence reaches a pair that cannot occur."""
    reached: set[tuple[FeedPhase, Signal]] = set()

    def recording(phase: FeedPhase, signal: Signal) -> PhaseRule:
        reached.add((phase, signal))
        return rule_of(phase, signal)

    monkeypatch.setattr(feed_machine, "rule_of", recording)
    for seed in range(600):
        walk(seed, n_steps=120)
    rules = {(phase, signal) for phase in FeedPhase for signal in RULES[phase]}
    assert reached == rules, (rules - reached, reached - rules)


def connected(evidence: Evidence = SAME_START, recovered: KnownIncarnation | None = KNOWN) -> Shell:
    """Return a shell whose machine has decided this evidence through its connection, and feeds."""
    shell = Shell(recovered)
    shell.connect()
    shell.tick()
    shell.now_s += 0.1
    shell.answer(evidence)
    assert shell.is_in(FeedPhase.FEEDING)
    return shell


def test_a_machine_that_found_out_too_early_asks_again_once_it_is_connected() -> None:
    """Evidence from before the connection was complete shows nothing about the process behind it."""
    shell = Shell(KNOWN)
    shell.tick()
    shell.answer(SAME_START)
    assert shell.published == KNOWN and shell.is_in(FeedPhase.CONNECTING)
    shell.tick()
    first = shell.question
    shell.now_s += 1.0
    shell.connect()
    assert shell.question is None
    shell.tick()
    assert shell.question is not None and shell.question is not first
    shell.answer(SAME_START)
    assert shell.is_in(FeedPhase.FEEDING)


def test_a_replay_that_contradicts_before_the_connection_is_complete_identifies_no_connection() -> None:
    """Even if the process turns out to be the same one, the connection still has to be identified."""
    shell = Shell(KNOWN)
    shell.tick()
    shell.answer(SAME_START)
    shell.tick()
    assert shell.replays
    shell.contradict_by_replay()
    shell.tick()
    shell.answer(SAME_BYTES)
    assert shell.is_in(FeedPhase.CONNECTING)


def test_foreign_batches_do_not_identify_a_connection() -> None:
    """A replay that does not reach the buffered batches leaves open whose connection it is."""
    shell = Shell(KNOWN)
    shell.tick()
    shell.answer(SAME_START)
    shell.connect()
    shell.tick()
    assert shell.replays
    shell.end_replay_too_early()
    assert shell.is_in(FeedPhase.CONNECTING)
    shell.tick()
    shell.answer(Evidence(reachable=True, started=None))
    assert shell.is_in(FeedPhase.FEEDING) and shell.published.incarnation > KNOWN.incarnation


def test_a_batch_that_differs_after_known_ones_is_dropped_if_the_process_is_the_same() -> None:
    """The feed is behind until a known batch arrives; another one that differs in a row begins an incarnation."""
    shell = connected()
    shell.queue()
    shell.take_new()
    shell.queue()
    shell.take_other()
    assert shell.is_in(FeedPhase.STRAY_BATCH) and shell.held
    shell.tick()
    shell.answer(SAME_START)
    assert shell.is_in(FeedPhase.FEEDING) and not shell.held
    shell.take_other()
    assert shell.is_in(FeedPhase.BATCHES_DIFFER)
    shell.now_s += RETRY_S
    shell.tick()
    shell.answer(SAME_START)
    assert shell.is_in(FeedPhase.CONNECTING) and shell.published.incarnation > KNOWN.incarnation
    assert shell.connected_at_s is None


def test_an_incarnation_begins_with_the_batch_that_was_held_back() -> None:
    """A connection that has brought nothing but a batch that differs is to the new process, so it is kept."""
    shell = connected()
    shell.queue()
    shell.take_other()
    assert shell.is_in(FeedPhase.FIRST_BATCH_DIFFERS)
    shell.tick()
    shell.answer(Evidence(reachable=True, started=STARTED, replay_check=ReplayCheck.OTHER))
    assert shell.is_in(FeedPhase.FEEDING) and shell.held and shell.connected_at_s is not None
    assert shell.published == KnownIncarnation(Incarnation(STARTED + 1), BEFORE_FIRST, 0)
    shell.take_new()
    assert not shell.held


def test_contradictions_are_examined_at_most_once_a_second() -> None:
    """Two processes may contradict each other for as long as both run."""
    shell = connected()
    asked_at_s = []
    for _ in range(3):
        shell.queue()
        shell.take_other()
        shell.tick()
        while shell.question is None:
            shell.now_s += 0.0625  # a binary fraction, so that sums are exact
            shell.tick()
        asked_at_s.append(shell.now_s)
        shell.answer(SAME_BYTES)
    assert [later - earlier for earlier, later in pairwise(asked_at_s)] == [RETRY_S, RETRY_S]


def test_messages_that_have_waited_long_decide_without_other_evidence() -> None:
    """They show that an engine runs; which process it is remains unknown, so another incarnation begins."""
    shell = Shell(KNOWN)
    shell.connect()
    shell.queue()
    shell.now_s += 0.1
    shell.tick()
    shell.now_s += EVIDENCE_WAIT_S - 0.2
    shell.tick()
    assert shell.is_in(FeedPhase.STARTING)
    shell.now_s += 0.2
    shell.tick()
    assert shell.is_in(FeedPhase.FEEDING) and shell.published.incarnation > KNOWN.incarnation


def test_messages_that_wait_in_the_socket_make_the_feed_late() -> None:
    """A live feed is behind once messages have waited without a pause, and live again when the socket is empty."""
    shell = connected()
    shell.queue()
    shell.take_new()

    def state() -> FeedState:
        return shell.machine.feed_state(
            shell.now_s, float("-inf"), is_behind=False, is_late=False, is_unconfirmed=False
        )

    assert state() is FeedState.LIVE
    shell.now_s += BACKLOG_S
    assert state() is FeedState.CATCHING_UP
    shell.empty()
    assert state() is FeedState.LIVE


def test_a_page_that_shows_the_same_process_saves_a_question() -> None:
    """One that shows another process has the engine asked at once."""
    shell = connected()
    shell.now_s += 10.0
    shell.read_page(STARTED)
    shell.tick()
    assert shell.question is None
    shell.read_page(Incarnation(2_000))
    shell.tick()
    assert shell.question is not None


def test_a_page_that_cannot_be_reached_has_the_engine_asked_at_once() -> None:
    shell = connected()
    shell.read_page(STARTED)
    shell.reach_no_page()
    shell.tick()
    assert shell.question is not None
