"""Promised overlaps and what engines found: the outcomes, and which ranks become approximate."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streams.core.events import EngineBatch, EngineEvents
from streams.core.hashing import local_hashes, pack_hashes, sequence_hashes
from streams.core.ids import Epoch, HashArray, Incarnation, RankId, Tier
from streams.core.reducer.ordering import Health, Progress, judge, removed, renew, restated
from streams.core.routing import audit as audits
from streams.core.routing.audit import Audit, AuditOutcome, Evidence, promised_blocks
from streams.core.routing.request import PromptBlocks
from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.engines.dialects.registry import DIALECTS
from streams.kafka.clients import partition_of
from streams.lab.engines.held_chains import FIRST_EPOCH, runs_of_chain
from streams.router_api.knowledge import run_changes
from streams.router_api.knowledge.rank_trust import cache_of
from streams.settings import Settings
from streams.tables.records import (
    PARTITION_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    PartitionRecord,
    encode_partition,
    encode_progress,
    encode_run,
)
from tests.helpers.views import BLOCK_SIZE, Clock, caught_up, rank, register, view_of

RANK, OTHER = rank(1), rank(2)
TTL_MS = 600_000
N_BLOCKS = 40  # two runs: 32 and 8 blocks
CHAIN = local_hashes(list(range(N_BLOCKS * BLOCK_SIZE)), BLOCK_SIZE)


class World:
    """A view, and the audit of the router that has it. `epoch` is that of RANK."""

    def __init__(self, *, alone: bool = True) -> None:
        self.clock = Clock()
        self.view = view_of(self.clock)
        self.alone = alone
        view = self.view
        evidence = Evidence(view.run_changes.fate, view.held_prefix, view.is_known, view.cache_of, lambda: self.alone)
        self.audit = Audit(evidence, view.disagreeing, TTL_MS)
        self.n = 0
        register(view, 1)
        register(view, 2)
        self.progress = Progress(RANK, FIRST_EPOCH, 0, health=Health.EXACT, model="m", block_size=BLOCK_SIZE)

    def fold(self, of: RankId = RANK, **changes: Any) -> None:
        """Fold a progress record, and the end of its transaction."""
        progress = self.progress = replace(self.progress, rank=of, **changes)
        self.view.fold_index(PROGRESS_KEY.pack(of), encode_progress(progress))
        self.commit()

    def commit(self) -> None:
        for worker in (1, 2):
            partition = partition_of(worker, Settings().partitions)
            self.view.fold_index(
                PARTITION_KEY.pack(partition), encode_partition(PartitionRecord(partition, 0, "test", ()))
            )
            caught_up(self.view, partition)

    def runs(
        self,
        local: HashArray = CHAIN,
        absent: Collection[int] = (),
        of: RankId = RANK,
        tier: Tier = Tier.DEVICE,
        epoch: Epoch | None = None,
    ) -> None:
        """Fold the runs of a chain as they are in the table now; a run without blocks is a tombstone."""
        for run in runs_of_chain(of, local, absent=absent, tier=tier, epoch=epoch or self.progress.epoch):
            self.view.fold_index(RUN_KEY.pack(run.key), encode_run(run) if run.present else None)

    def decide(
        self, local: HashArray = CHAIN, *, more_tokens: int = 1, of: RankId = RANK, exact: bool | None = None
    ) -> str:
        """Decide for a prompt of these blocks and further tokens; returns the request's id."""
        view = self.view
        snapshot = view.snapshot()
        scores, _ = view.overlap(local)
        n_tokens = len(local) * BLOCK_SIZE + more_tokens
        sequence = pack_hashes(sequence_hashes(local))
        prompt = PromptBlocks(sequence, n_tokens, -(-n_tokens // BLOCK_SIZE), BLOCK_SIZE)
        self.n += 1
        is_exact = view.assess([of], before=snapshot).mode is AnswerMode.EXACT if exact is None else exact
        request_id = f"r{self.n}"
        self.audit.promise(request_id, None, of, scores.scores.get(of, 0), prompt, is_exact, snapshot.run_changes)
        return request_id

    def report(self, request_id: str, found: int, *, n_blocks: int = N_BLOCKS, more_tokens: int = 1) -> None:
        self.audit.report(request_id, None, n_blocks * BLOCK_SIZE + more_tokens, found * BLOCK_SIZE, self.clock.now_ms)
        self.audit.ended(request_id, None)

    def judge(self) -> list[RankId]:
        self.clock.now_ms += audits.SETTLE_MS
        self.commit()  # the owner writes its record every second
        ranks = self.audit.judge_due(self.clock.now_ms)
        for disagreeing in ranks:
            self.view.trust.note_disagreeing(disagreeing)
        return ranks

    def outcome(self, request_id: str, found: int, **changes: int) -> AuditOutcome:
        """Report a request, and return how it was judged."""
        before = self.audit.outcomes.copy()
        self.report(request_id, found, **changes)
        self.judge()
        (outcome,) = (self.audit.outcomes - before).keys()
        return outcome

    def trust(self) -> tuple[AnswerMode, DegradedReason | None]:
        trust = self.view.assess([RANK])
        return trust.mode, trust.reason

    def contradict(self, times: int = audits.OVER_MIN) -> list[RankId]:
        """Let the engine find nothing of what was promised."""
        ranks: list[RankId] = []
        for _ in range(times):
            self.report(self.decide(), 0)
            ranks += self.judge()
        return ranks


@pytest.fixture
def world() -> World:
    """A rank that is exact and holds the chain."""
    world = World()
    world.fold()
    world.runs()
    world.commit()
    assert world.trust() == (AnswerMode.EXACT, None)
    return world


@pytest.mark.parametrize(
    ("overlap", "prompt_tokens", "expected"),
    [(4, 65, 4), (4, 64, 3), (4, 63, 3), (4, 1000, 4), (1, 16, 0), (1, 17, 1), (0, 500, 0), (3, 1, 0), (3, 0, 0)],
)
def test_the_last_token_of_a_prompt_is_never_served_from_the_cache(
    overlap: int, prompt_tokens: int, expected: int
) -> None:
    """A promise is the overlap, without the block that has the last token."""
    assert promised_blocks(overlap, prompt_tokens, 16) == expected


def test_every_dialect_states_the_rule_that_the_audit_applies() -> None:
    """An engine with another rule would be judged wrongly."""
    assert {dialect.computed_tokens_min for dialect in DIALECTS.values()} == {audits.COMPUTED_TOKENS_MIN}


@pytest.mark.parametrize(
    ("found", "expected"),
    [(N_BLOCKS, AuditOutcome.AGREED), (N_BLOCKS - 1, AuditOutcome.OVER), (0, AuditOutcome.OVER)],
)
def test_what_the_engine_found_is_compared_with_the_overlap(world: World, found: int, expected: AuditOutcome) -> None:
    """As many blocks agree; fewer contradict if nothing has happened since."""
    assert world.outcome(world.decide(), found) is expected
    assert world.audit.exact == world.audit.outcomes


def test_tokens_of_a_partial_block_do_not_count(world: World) -> None:
    """TensorRT-LLM reuses parts of blocks, and SGLang has pages of one token."""
    request_id = world.decide(CHAIN[:3], more_tokens=0)
    world.audit.report(request_id, None, 48, 47, 0)
    world.judge()
    assert world.audit.outcomes == {AuditOutcome.AGREED: 1}


@pytest.mark.parametrize("absent", [{0}, {31}, {39}, set(range(32, 40)), set(range(40))])
@pytest.mark.parametrize("again", [False, True])
def test_a_removal_since_the_decision_excuses(world: World, absent: set[int], again: bool) -> None:
    """Also if the request itself has stored the block again, as it does."""
    request_id = world.decide()
    world.runs(absent=absent)
    if again:
        world.runs()
    assert world.outcome(request_id, min(absent)) is AuditOutcome.EXCUSED


@pytest.mark.parametrize(
    "happen",
    [
        lambda world: world.runs(absent={3}, of=OTHER),
        lambda world: world.runs(local_hashes(list(range(5000, 5200)), BLOCK_SIZE), absent={3}),
        lambda _: None,
    ],
)
def test_a_removal_elsewhere_excuses_nothing(world: World, happen: Callable[[World], None]) -> None:
    """Neither of the same blocks on another rank, nor of other blocks, nor one before the decision."""
    world.fold(of=OTHER)
    world.runs(of=OTHER)
    world.progress = replace(world.progress, rank=RANK)
    world.runs(absent={30})
    world.runs()
    request_id = world.decide()
    happen(world)
    assert world.outcome(request_id, 5) is AuditOutcome.OVER


def test_a_removal_behind_the_promise_excuses_nothing(world: World) -> None:
    """The overlap ended before the block that was removed."""
    world.runs(absent={20})
    request_id = world.decide()
    world.runs(absent={20, 21})
    assert world.outcome(request_id, 19) is AuditOutcome.OVER


def test_a_request_that_extends_the_last_run_itself_is_not_excused(world: World) -> None:
    """Its own blocks follow those that were promised in the same record."""
    longer = local_hashes(list(range(50 * BLOCK_SIZE)), BLOCK_SIZE)
    request_id = world.decide(longer)
    world.runs(longer)
    assert world.outcome(request_id, 38, n_blocks=50) is AuditOutcome.OVER


@pytest.mark.parametrize("how", ["before", "after", "elsewhere", "ended before", "other router"])
def test_a_run_that_is_written_again_while_another_request_is_there_excuses(world: World, how: str) -> None:
    """Within one transaction the other one may have evicted a block, and this one has stored it again."""
    longer = local_hashes(list(range(50 * BLOCK_SIZE)), BLOCK_SIZE)
    others = [world.decide(CHAIN[:2], of=OTHER if how == "elsewhere" else RANK)] if how != "after" else []
    if how in ("ended before", "other router"):
        world.outcome(others.pop(), 2, n_blocks=2)
    world.alone = how != "other router"
    request_id = world.decide(longer)
    if how == "after":
        others.append(world.decide(CHAIN[:2]))
    world.runs(longer)
    excused = how in ("before", "after", "other router")
    expected = AuditOutcome.EXCUSED if excused else AuditOutcome.OVER
    assert world.outcome(request_id, 38, n_blocks=50) is expected


def test_what_another_request_has_stored_excuses_a_greater_find(world: World) -> None:
    """The index has the blocks by the time that the report is judged; otherwise the engine holds what it lacks."""
    longer = local_hashes(list(range(50 * BLOCK_SIZE)), BLOCK_SIZE)
    assert world.outcome(world.decide(longer), 44, n_blocks=50) is AuditOutcome.UNDER
    request_id = world.decide(longer)
    world.runs(longer[:44])
    assert world.outcome(request_id, 44, n_blocks=50) is AuditOutcome.EXCUSED
    request_id = world.decide(longer)
    world.runs(longer)
    world.runs(longer, absent=set(range(32, 50)))
    assert world.outcome(request_id, 48, n_blocks=50) is AuditOutcome.EXCUSED


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": Epoch(FIRST_EPOCH.incarnation, 1)},
        {"epoch": Epoch(FIRST_EPOCH.incarnation, 1), "n_restated": 1},
        {"epoch": Epoch(Incarnation(2), 0)},
    ],
)
def test_a_clear_a_restatement_and_a_restart_excuse(world: World, changes: dict[str, Any]) -> None:
    """What the rank held has ended, whatever it holds afterwards."""
    request_id = world.decide()
    world.fold(**changes)
    world.runs()
    world.commit()
    assert world.outcome(request_id, 3) is AuditOutcome.EXCUSED


def test_nothing_contradicts_while_records_of_the_rank_are_missing(world: World) -> None:
    """A removal may be among them."""
    request_id = world.decide()
    world.fold(health=Health.DEGRADED)
    assert world.outcome(request_id, 3) is AuditOutcome.EXCUSED


def test_a_prompt_of_another_length_contradicts_nothing(world: World) -> None:
    """The engine rendered other tokens, which says nothing about the index; the front counts it."""
    assert world.outcome(world.decide(), 3, more_tokens=7) is AuditOutcome.EXCUSED


def test_a_prompt_that_was_given_as_hashes_may_end_with_a_partial_block(world: World) -> None:
    """Hashes do not say how many tokens follow the last whole block."""
    request_id = world.decide(more_tokens=0)
    assert world.outcome(request_id, 3, more_tokens=BLOCK_SIZE - 1) is AuditOutcome.OVER


def test_records_that_left_the_ring_excuse(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happened before the oldest record is not known; the youngest ones are found across the ring's end."""
    monkeypatch.setattr(run_changes, "ROWS_MAX", 8)
    world.view.run_changes._rows = np.zeros((5, 8), dtype=np.int64)
    other = local_hashes(list(range(5000, 5016)), BLOCK_SIZE)
    for n_others, expected in [(9, AuditOutcome.EXCUSED), (8, AuditOutcome.OVER), (3, AuditOutcome.OVER)]:
        request_id = world.decide()
        for _ in range(n_others):
            world.runs(other)
        assert world.outcome(request_id, 3) is expected
    for n_before in range(8):
        for _ in range(n_before):
            world.runs(other)
        request_id = world.decide()
        world.runs(absent={5})
        world.runs()
        assert world.outcome(request_id, 5) is AuditOutcome.EXCUSED


@pytest.mark.parametrize("how", ["ended", "repeated", "expired", "too many"])
def test_requests_without_a_report_are_counted(world: World, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision has one outcome in the end, and nothing is kept of it."""
    monkeypatch.setattr(audits, "PROMISES_MAX", 1)
    request_id = world.decide()
    if how == "ended":
        world.audit.ended(request_id, None)
    elif how == "repeated":
        world.n -= 1
        world.decide()
        world.audit.ended(request_id, None)
    elif how == "expired":
        world.judge()
        world.clock.now_ms += TTL_MS
        world.judge()
    else:
        world.audit.ended(world.decide(), None)
    n = 1 if how in ("ended", "expired") else 2
    assert world.audit.outcomes == {AuditOutcome.NOT_REPORTED: n}
    assert len(world.audit) == 0
    world.audit.report(request_id, None, 641, 0, 0)  # of a request that is not known any more
    assert len(world.audit) == 0


def test_the_end_of_a_request_ends_the_promises_of_its_phases(world: World) -> None:
    """A report of one phase is not one of the other."""
    prompt = PromptBlocks(pack_hashes(sequence_hashes(CHAIN)), 641, 41, BLOCK_SIZE)
    for phase in ("prefill", "decode"):
        world.audit.promise("r", phase, RANK, 40, prompt, True, 0)
    world.audit.report("r", "prefill", 641, 640, 0)
    world.audit.ended("r", None)
    world.judge()
    assert world.audit.outcomes == {AuditOutcome.AGREED: 1, AuditOutcome.NOT_REPORTED: 1}


def test_contradictions_make_a_rank_approximate_until_it_clears_or_restarts(world: World) -> None:
    """A restatement of the same ledger, and reading all topics again, do not end it."""
    disagrees = (AnswerMode.APPROXIMATE, DegradedReason.AUDIT_DISAGREES)
    assert world.contradict(audits.OVER_MIN - 1) == []
    assert world.trust() == (AnswerMode.EXACT, None)
    assert world.contradict(1) == [RANK]
    assert world.trust() == disagrees
    assert world.view.assess([OTHER, RANK]).mode is AnswerMode.DEGRADED  # for the other one, which has no events
    world.fold(epoch=Epoch(FIRST_EPOCH.incarnation, 1), n_restated=1)
    world.runs()
    assert world.trust() == disagrees
    assert world.view.rank_counts().approximate == 1
    world.view.reset()
    register(world.view, 1)
    world.fold()
    world.runs()
    world.commit()
    assert world.trust() == disagrees
    world.fold(epoch=Epoch(FIRST_EPOCH.incarnation, 2))  # a clear
    assert world.trust() == (AnswerMode.EXACT, None)
    world.runs()
    assert world.contradict() == [RANK]
    world.fold(epoch=Epoch(Incarnation(2), 0), n_restated=0)
    assert world.trust() == (AnswerMode.EXACT, None)


def test_only_exact_answers_touch_trust(world: World) -> None:
    """Others are counted, and not in the share that agreed."""
    for _ in range(10):
        world.report(world.decide(exact=False), 0)
    assert world.judge() == []
    assert world.audit.outcomes == {AuditOutcome.OVER: 10}
    assert world.audit.share_agreed() is None
    world.outcome(world.decide(), N_BLOCKS)
    world.outcome(world.decide(), 3)
    assert world.audit.share_agreed() == 0.5


@pytest.mark.parametrize("outcome", [AuditOutcome.EXCUSED, AuditOutcome.UNDER, AuditOutcome.NOT_REPORTED])
def test_no_other_outcome_touches_trust(world: World, outcome: AuditOutcome) -> None:
    """However often it comes."""
    longer = local_hashes(list(range(50 * BLOCK_SIZE)), BLOCK_SIZE)
    for _ in range(3 * audits.OVER_MIN):
        request_id = world.decide(longer)
        if outcome is AuditOutcome.NOT_REPORTED:
            world.audit.ended(request_id, None)
        elif outcome is AuditOutcome.UNDER:
            world.report(request_id, 45, n_blocks=50)
        else:
            world.runs(absent={3})
            world.runs()
            world.report(request_id, 3, n_blocks=50)
        assert world.judge() == []
    assert set(world.audit.outcomes) == {outcome}
    assert world.trust() == (AnswerMode.EXACT, None)


def test_contradictions_count_among_the_last_reports_only(world: World) -> None:
    """One in fifty agrees with what races may cause; five of the last two hundred do not."""
    for number in range(4 * 60):
        world.report(world.decide(), 0 if number % 60 == 0 else N_BLOCKS)
        assert world.judge() == []
    assert world.contradict(3) == [RANK]  # the fifth one of the last 200


def test_a_report_waits_until_records_of_the_engines_step_can_have_come(world: World) -> None:
    """An engine reports a removal at the end of the step, and the answer may be faster."""
    world.report(world.decide(), 3)
    assert world.audit.judge_due(world.clock.now_ms + audits.SETTLE_MS - 1) == []
    assert not world.audit.outcomes
    world.runs(absent={3})
    world.judge()
    assert world.audit.outcomes == {AuditOutcome.EXCUSED: 1}


def test_one_tick_judges_a_limited_number_of_differences(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are judged in the next ticks, and beyond a limit the oldest count as not reported."""
    monkeypatch.setattr(audits, "DIFFERENT_PER_TICK_MAX", 2)
    monkeypatch.setattr(audits, "WAITING_MAX", 5)
    for _ in range(7):
        world.report(world.decide(exact=False), 0)
    for n in (2, 4, 5):
        world.judge()
        assert world.audit.outcomes == {AuditOutcome.NOT_REPORTED: 2, AuditOutcome.OVER: n}


def test_progress_counts_restatements_until_the_engine_restarts() -> None:
    """So that a router can tell the generations that they begin from those that a clear begins."""
    progress = Progress(RANK, FIRST_EPOCH, 5)
    batch = EngineBatch(RANK, "m", BLOCK_SIZE, FIRST_EPOCH.incarnation, 6, 0, 0, EngineEvents(()))
    again = restated(progress, replace(batch, sequence=5), exact=True, n_unindexed=0)
    assert (again.epoch.generation, again.n_restated) == (1, 1)
    assert cache_of(again) == cache_of(progress) == cache_of(judge(again, batch).progress)
    gone = removed(again, FIRST_EPOCH.incarnation, silent=True)
    assert gone is not None and cache_of(gone) is None
    back = renew(gone, batch, 6000).progress
    assert cache_of(back) not in (None, cache_of(progress))
    newer = judge(again, replace(batch, incarnation=Incarnation(2), sequence=0)).progress
    assert (newer.n_restated, cache_of(newer)) == (0, (2, 0))
