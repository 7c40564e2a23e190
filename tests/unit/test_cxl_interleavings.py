"""The table of pooled blocks, without Kafka: both topics read in any order, cut anywhere, and delivered again.

A history is two logs, the `kv-events` and `cxl-events` of one partition, as bytes. The reference reads each log as a
whole and does not depend on the order in which they are read. An agent reads them interleaved, in transactions of a few
records, and is killed between any two transactions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import BEFORE_FIRST, AllBlocksCleared, EngineBatch, EngineEvents, WorkerRemoved
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Progress
from streams.cxl.events import BlockAddress, CxlTransition
from streams.cxl.pooled_view import PooledBlock, PooledView
from streams.cxl.records import OWNER_KEY, PARKED_KEY, decode_parked, decode_transition, encode_transition
from streams.errors import BadRecord
from streams.tables.cxl_reducer import PartitionReducer, partition_plan
from streams.tables.parked_transitions import PARKED_MAX
from streams.tables.pooled_block_table import PooledBlockTable, PooledTableCount
from streams.tables.reducer import SourceRecord
from streams.topics import topics
from tests.helpers.cxl_histories import (
    BEGUN_MS,
    CXL,
    EVICTED,
    KV,
    LOCAL,
    POOLED,
    RANK,
    SETTINGS,
    TRANSIT,
    History,
    Reference,
    expected_blocks,
    moved,
    random_history,
    reference_of,
)

TABLES = partition_plan(SETTINGS).tables


seeds = st.integers(0, 2**32)


# -- histories -----------------------------------------------------------------------------------------------------


def batch(sequence: int, incarnation: int = 1, rank: RankId = RANK, *events: AllBlocksCleared) -> EngineBatch:
    return EngineBatch(rank, "m", 16, Incarnation(incarnation), sequence, 0, 0, EngineEvents(events))


def removal(incarnation: int = 1) -> EngineBatch:
    return replace(batch(0, incarnation), body=WorkerRemoved("removed by a test"))


# -- the reference: each log as a whole -----------------------------------------------------------------------------


# -- an agent ------------------------------------------------------------------------------------------------------


class Agent:
    """Reads both logs in transactions of a few records. table, dead, applied: what the transactions committed."""

    def __init__(self, history: History) -> None:
        self.logs = history.records()
        self.table: dict[tuple[str, bytes], bytes] = {}
        self.log: list[tuple[bytes, bytes | None]] = []  # changelog of the table of pooled blocks
        self.dead: Counter[str] = Counter()
        self.applied = {KV: -1, CXL: -1}
        self.killed()

    def killed(self) -> None:
        """Start again from the table."""
        self.reducer = PartitionReducer(SETTINGS, Counter())
        for table in TABLES:
            items = sorted((key, value) for (name, key), value in self.table.items() if name == table.name)
            self.reducer.load(table, iter(items))

    def transact(self, offered: list[SourceRecord], commits: bool = True) -> None:
        """Process records except those applied before, which are recognised by their offsets, as in a partition."""
        fresh = [each for each in offered if each.offset > self.applied[each.topic]]
        dead = []
        for each, decoded in zip(fresh, self.reducer.decode(fresh), strict=True):
            try:
                self.reducer.apply(each, decoded)
            except BadRecord as exc:
                dead.append((each, exc))
        dead += self.reducer.take_refused()
        changes = self.reducer.take_changes()
        if not commits:
            self.killed()
            return
        for table, records in changes.items():
            for key, value in records:
                if value is None:
                    self.table.pop((table.name, key), None)
                else:
                    self.table[table.name, key] = value
        self.log += changes[TABLES[1]]
        self.dead.update(exc.reason for letter, exc in dead if letter.topic == CXL)
        assert all(letter.value == self.logs[CXL][letter.offset].value for letter, _ in dead if letter.topic == CXL)
        self.applied.update({each.topic: each.offset for each in fresh})

    @property
    def waiting(self) -> dict[RankId, list[int]]:
        """Event ids of the parked transitions of each rank, in order."""
        found: dict[RankId, list[int]] = {}
        for (name, key), value in sorted(self.table.items()):
            if name == TABLES[1].name and key.startswith(PARKED_KEY.prefix):
                parked_at, row = decode_parked(key, value)
                found.setdefault(parked_at.owner, []).append(decode_transition(row.raw).event_id)
        return found

    def rows(self) -> dict[bytes, bytes]:
        """Return the rows of blocks and owners, as bytes."""
        return {
            key: value
            for (name, key), value in self.table.items()
            if name == TABLES[1].name and not key.startswith(PARKED_KEY.prefix)
        }


def interleaved(logs: dict[str, list[SourceRecord]], rng: random.Random, kv_share: float) -> Iterator[SourceRecord]:
    """Yield both logs, each in its order. kv_share: probability that the next record is from kv-events."""
    left = {topic: list(records) for topic, records in logs.items()}
    while left[KV] or left[CXL]:
        topic = KV if (rng.random() < kv_share and left[KV]) or not left[CXL] else CXL
        yield left[topic].pop(0)


def transactions(records: Iterable[SourceRecord], rng: random.Random, n_max: int) -> Iterator[list[SourceRecord]]:
    taken: list[SourceRecord] = []
    for each in records:
        taken.append(each)
        if len(taken) >= rng.randint(1, n_max):
            yield taken
            taken = []
    if taken:
        yield taken


def blocks_of(view: PooledView) -> dict[tuple[RankId, int], tuple[CxlMemoryMetadata, int, BlockAddress]]:
    return {(each.owner, each.sequence): seen(each) for each in view.blocks()}


def seen(block: PooledBlock) -> tuple[CxlMemoryMetadata, int, BlockAddress]:
    assert block.engine == 100 + block.sequence
    assert block.model == "m"
    return block.metadata, block.pool_epoch, BlockAddress(block.sequence, block.parent, block.position)


def folded(records: Iterable[tuple[bytes, bytes | None]]) -> PooledView:
    view = PooledView()
    for key, value in records:
        view.fold(key, value)
    return view


def check(agent: Agent, reference: Reference) -> None:
    assert blocks_of(folded(agent.log)) == expected_blocks(reference)
    assert agent.waiting == reference.waiting
    assert agent.dead == reference.refused


@settings(max_examples=25, deadline=None)
@given(seed=seeds, kv_share=st.sampled_from((0.0, 0.05, 0.5, 0.95, 1.0)), n_max=st.integers(1, 6))
def test_every_interleaving_of_the_topics_gives_the_same_rows(seed: int, kv_share: float, n_max: int) -> None:
    """The rows equal the reference's, and have the same bytes as when kv-events is read first."""
    history, rng = random_history(seed, 60, 80), random.Random(seed + 1)
    agent, kv_first = Agent(history), Agent(history)
    for taken in transactions(interleaved(agent.logs, rng, kv_share), rng, n_max):
        agent.transact(taken)
    for topic in (KV, CXL):
        kv_first.transact(kv_first.logs[topic])
    reference = reference_of(history)
    check(agent, reference)
    check(kv_first, reference)
    assert agent.rows() == kv_first.rows()


@settings(max_examples=12, deadline=None)
@given(seed=seeds, kv_share=st.sampled_from((0.1, 0.5, 0.9)), n_max=st.integers(1, 4))
def test_an_agent_killed_before_or_after_every_commit_ends_with_the_same_rows(
    seed: int, kv_share: float, n_max: int
) -> None:
    """Uncommitted records are processed again from the table; committed ones are recognised by their offsets."""
    history, rng = random_history(seed, 40, 60), random.Random(seed + 1)
    agent = Agent(history)
    before: list[SourceRecord] = []
    for taken in transactions(interleaved(agent.logs, rng, kv_share), rng, n_max):
        agent.transact(taken, commits=False)
        agent.transact([*before, *taken])
        agent.killed()
        before = taken
    check(agent, reference_of(history))


@settings(max_examples=4, deadline=None)
@given(seed=seeds, kv_share=st.sampled_from((0.3, 0.7)))
def test_the_next_owner_after_any_transaction_ends_with_the_same_rows(seed: int, kv_share: float) -> None:
    """The next owner starts from the table, and may read the remaining records in a different order."""
    history, rng = random_history(seed, 30, 40), random.Random(seed + 1)
    reference = reference_of(history)
    order = list(transactions(interleaved(Agent(history).logs, rng, kv_share), rng, 3))
    for cut in range(len(order) + 1):
        agent = Agent(history)
        for taken in order[:cut]:
            agent.transact(taken)
        agent.killed()
        rest = {topic: log[agent.applied[topic] + 1 :] for topic, log in agent.logs.items()}
        for taken in transactions(interleaved(rest, rng, rng.random()), rng, 5):
            agent.transact(taken)
        check(agent, reference)


@settings(max_examples=15, deadline=None)
@given(seed=seeds, tombstones=st.booleans())
def test_any_permutation_of_the_compacted_log_gives_the_same_view(seed: int, tombstones: bool) -> None:
    """A router may read what compaction leaves in any order, and some records twice."""
    history, rng = random_history(seed, 40, 60), random.Random(seed + 1)
    agent = Agent(history)
    for taken in transactions(interleaved(agent.logs, rng, 0.5), rng, 4):
        agent.transact(taken)
    compacted = list({key: (key, value) for key, value in agent.log}.values())
    records = [each for each in compacted if tombstones or each[1] is not None]
    rng.shuffle(records)
    assert blocks_of(folded([*records, *rng.sample(records, len(records) // 2)])) == expected_blocks(
        reference_of(history)
    )


def test_the_random_histories_contain_every_case() -> None:
    """Transitions are applied, parked, dropped, and refused for every reason; otherwise the properties prove little."""
    states: Counter[CxlMemoryState] = Counter()
    refused: Counter[str] = Counter()
    n_waiting = 0
    counts: Counter[PooledTableCount] = Counter()
    n_dead: Counter[str] = Counter()
    for seed in range(12):
        history = random_history(seed, 60, 80)
        reference = reference_of(history)
        states.update(row.state for row in reference.rows.values())
        refused.update(reference.refused)
        n_waiting += sum(map(len, reference.waiting.values()))
        agent = Agent(history)
        for taken in transactions(interleaved(agent.logs, random.Random(seed), 0.5), random.Random(seed), 4):
            agent.transact(taken)
        counts.update(agent.reducer.pooled.counts)
        n_dead.update(agent.dead)
    assert min(states[each] for each in (TRANSIT, POOLED, EVICTED)) >= 5
    assert refused.keys() == {"no_pool", "not_in_transit", "other_pool", "older_incarnation"}
    assert n_waiting
    assert counts[PooledTableCount.PARKED_TRANSITIONS_APPLIED] > 50
    assert counts[PooledTableCount.PARKED_TRANSITIONS_DROPPED] > 5
    assert counts[PooledTableCount.BLOCKS_ENTERED] > 50
    assert counts[PooledTableCount.TRANSITIONS_REFUSED_OLDER_INCARNATION] == n_dead["older_incarnation"]
    for reason in ("no_pool", "not_in_transit", "other_pool"):  # a record can have several refused blocks
        assert counts[PooledTableCount(f"blocks_refused_{reason}")] >= n_dead[reason]


# -- one thing at a time -------------------------------------------------------------------------------------------


def read_all(kv: list[EngineBatch], cxl: list[CxlTransition], kv_first: bool) -> Agent:
    agent = Agent(History(kv, cxl))
    for topic in (KV, CXL) if kv_first else (CXL, KV):
        agent.transact(agent.logs[topic])
        agent.killed()
    return agent


def states_of(agent: Agent) -> dict[int, CxlMemoryState]:
    return {block: found[0].state for (_, block), found in blocks_of(folded(agent.log)).items()}


both_orders = pytest.mark.parametrize("kv_first", [True, False])


@both_orders
@pytest.mark.parametrize("target", CxlMemoryState)
@pytest.mark.parametrize("source", CxlMemoryState)
@pytest.mark.parametrize("pool", [None, "a", "b"])
def test_every_pair_of_states_of_blocks_known_and_early(
    source: CxlMemoryState, target: CxlMemoryState, pool: str | None, kv_first: bool
) -> None:
    """A transition has the same effect, or is refused for the same reason, whether read before or after its batch."""
    steps = {LOCAL: [], TRANSIT: [TRANSIT], POOLED: [TRANSIT, POOLED], EVICTED: [TRANSIT, EVICTED]}[source]
    cxl = [moved(step, 1, pool="a" if step is TRANSIT else None) for step in steps]
    cxl.append(moved(target, 1, 2, pool=pool))  # block 2 is unknown
    history = History([batch(0)], cxl)
    agent = read_all(history.kv, history.cxl, kv_first)
    reference = reference_of(history)
    check(agent, reference)
    legal = (
        (target is LOCAL and (pool != "b" or source not in (TRANSIT, POOLED)))
        or (target is TRANSIT and pool is not None)
        or (target is EVICTED and (pool != "b" or source not in (TRANSIT, POOLED)))
    )
    assert (not agent.dead) == legal  # cxl_pooled is always illegal for the unknown block


@both_orders
def test_a_restart_evicts_blocks_in_transit_and_keeps_pooled_ones(kv_first: bool) -> None:
    """Transitions of the old incarnation are applied, even if they are read after the new one has begun."""
    cxl = [moved(TRANSIT, 1, 2, pool="a"), moved(POOLED, 1)]
    assert states_of(read_all([batch(0), batch(0, 2)], cxl, kv_first)) == {1: POOLED, 2: EVICTED}


@both_orders
def test_removal_and_clear_take_nothing_out_of_a_pool(kv_first: bool) -> None:
    """A pooled block outlives its owner, while a block in transit is evicted with it."""
    cxl = [moved(TRANSIT, 1, 2, pool="a"), moved(POOLED, 1)]
    cleared = replace(batch(1), body=EngineEvents((AllBlocksCleared(),)))
    assert states_of(read_all([batch(0), cleared], cxl, kv_first)) == {1: POOLED, 2: TRANSIT}
    assert states_of(read_all([batch(0), cleared, removal()], cxl, kv_first)) == {1: POOLED, 2: EVICTED}


@both_orders
def test_a_removed_worker_that_returns_in_the_same_incarnation_continues(kv_first: bool) -> None:
    """Its block is in transit again, and a transition parked meanwhile is applied once its batch has been read."""
    kv = [batch(0), batch(1), removal(), batch(BEFORE_FIRST), batch(0), batch(1), batch(2)]
    cxl = [moved(TRANSIT, 1, pool="a", follows=1), moved(POOLED, 1, follows=2)]
    assert states_of(read_all(kv[:4], cxl, kv_first)) == {1: TRANSIT}
    assert states_of(read_all(kv, cxl, kv_first)) == {1: POOLED}


@both_orders
def test_a_transition_that_follows_a_missing_batch_is_dropped_when_its_incarnation_ends(kv_first: bool) -> None:
    """It does not delay the transitions of the next incarnation."""
    cxl = [moved(TRANSIT, 1, pool="a", follows=5), moved(TRANSIT, 2, pool="a", incarnation=2)]
    agent = read_all([batch(0), batch(0, 2)], cxl, kv_first)
    assert states_of(agent) == {2: TRANSIT}
    assert agent.waiting == {}
    assert not agent.dead


def test_another_owners_copy_of_a_block_is_a_row_of_its_own() -> None:
    """Each owner's transitions affect only its own rows."""
    other = RankId(WorkerId(1), DpRank(1))
    kv = [batch(0), batch(0, 1, other), batch(0, 2)]
    cxl = [moved(TRANSIT, 1, pool="a"), moved(TRANSIT, 1, pool="b", rank=other), moved(POOLED, 1, rank=other)]
    agent = read_all(kv, cxl, kv_first=True)
    found = {owner.dp_rank: block[0] for (owner, _), block in blocks_of(folded(agent.log)).items()}
    assert found == {0: CxlMemoryMetadata(EVICTED, "a"), 1: CxlMemoryMetadata(POOLED, "b")}


def test_a_block_that_enters_another_pool_leaves_the_first() -> None:
    """Its row in the first pool gets a tombstone in the same transaction."""
    agent = read_all([batch(0)], [moved(TRANSIT, 1, pool="a"), moved(TRANSIT, 1, pool="b")], kv_first=True)
    assert [found[0].pool_id for found in blocks_of(folded(agent.log)).values()] == ["b"]
    assert len([key for key in agent.rows() if key.startswith(b"B")]) == 1


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_transition_beyond_the_limit_of_parked_ones_is_refused(limit: int) -> None:
    """The transitions that were parked before it stay parked, and the refusal is counted."""
    pooled = PooledBlockTable(lambda _: None, evicted_ttl_ms=1, parked_ttl_ms=1, owner_ttl_ms=1, parked_max=limit)
    for number in range(limit):
        pooled.apply(moved(TRANSIT, 1, pool="a"), b"raw", number, 0)
    with pytest.raises(BadRecord) as caught:
        pooled.apply(moved(TRANSIT, 1, pool="a"), b"raw", limit, 0)
    assert caught.value.reason == "over_capacity"
    assert pooled.n_parked == limit < PARKED_MAX
    assert pooled.counts == {PooledTableCount.TRANSITIONS_REFUSED_OVER_CAPACITY: 1}


def test_evicted_rows_expire_and_no_others_do() -> None:
    """A row expires a fixed time after its eviction, or after its incarnation ended while it was in transit."""
    ttl_ms = int(SETTINGS.cxl_evicted_ttl_s * 1000)
    cxl = [moved(TRANSIT, 1, 2, 3, pool="a"), moved(POOLED, 1), moved(EVICTED, 2)]
    agent = read_all([batch(0), batch(0, 2)], cxl, kv_first=True)
    assert states_of(agent) == {1: POOLED, 2: EVICTED, 3: EVICTED}
    for now_ms, left in ((0, {1, 2, 3}), (1, {1, 2}), (2, {1})):  # the restart has offset 1, the eviction 2
        agent.reducer.tick(0, BEGUN_MS + ttl_ms + now_ms, lambda: 0)
        agent.transact([])
        assert states_of(agent).keys() == left
        agent.killed()


def test_evicted_rows_beyond_the_limit_expire_early() -> None:
    """The oldest expire first, so that a pool with a high turnover does not fill the memory."""
    pooled = PooledBlockTable(lambda _: None, evicted_ttl_ms=10**9, parked_ttl_ms=1, owner_ttl_ms=1, evicted_max=2)
    rows = read_all([batch(0)], [moved(TRANSIT, 1, 2, 3, 4, pool="a")], kv_first=True).reducer.pooled
    placed = [(key, row) for key, row in rows.rows()]
    pooled.load(
        [(key, replace(row, placement=replace(row.placement, state=EVICTED, entered_at_ms=key.sequence)))
         for key, row in placed],
        (),
        (),
    )  # fmt: skip
    pooled.expire(0)
    assert sorted(key.sequence for key, _ in pooled.rows()) == [3, 4]


def restarted(pooled: PooledBlockTable, progress: dict[RankId, Progress], incarnation: int, at_ms: int) -> None:
    """Let the rank begin an incarnation."""
    before = progress.get(RANK)
    progress[RANK] = Progress(RANK, Epoch(Incarnation(incarnation), 0), 0, model="m", block_size=16)
    pooled.progress_changed(RANK, before, progress[RANK], at_ms)


@pytest.mark.parametrize("killed", [False, True])
def test_later_restarts_do_not_renew_a_row_whose_incarnation_ended_in_transit(killed: bool) -> None:
    """Otherwise a rank that restarts more often than rows expire would keep them forever."""
    progress: dict[RankId, Progress] = {}

    def begun() -> PooledBlockTable:
        return PooledBlockTable(progress.get, evicted_ttl_ms=100, parked_ttl_ms=1, owner_ttl_ms=10**9)

    pooled = begun()
    restarted(pooled, progress, 1, 0)
    pooled.apply(moved(TRANSIT, 1, 2, pool="a"), b"raw", 0, 0)
    restarted(pooled, progress, 2, 10)
    pooled.apply(moved(TRANSIT, 2, pool="a", incarnation=2), b"raw", 1, 20)
    restarted(pooled, progress, 3, 90)
    if killed:
        rows, owners = list(pooled.rows()), pooled.take_changes().owners
        pooled = begun()
        pooled.load(rows, [(rank, row) for rank, row in owners if row is not None], ())
    for now_ms, left in ((109, [1, 2]), (110, [2]), (189, [2]), (190, [])):
        pooled.expire(now_ms)
        assert [key.sequence for key, _ in pooled.rows()] == left


def test_rows_in_transit_whose_incarnation_ended_count_towards_the_limit_of_evicted_rows() -> None:
    """A row no longer counts once its block enters transit again in a newer incarnation."""
    progress: dict[RankId, Progress] = {}
    pooled = PooledBlockTable(progress.get, evicted_ttl_ms=10**9, parked_ttl_ms=1, owner_ttl_ms=10**9, evicted_max=3)
    for incarnation in range(1, 8):
        restarted(pooled, progress, incarnation, incarnation)
        pooled.apply(
            moved(TRANSIT, incarnation, incarnation + 10, pool="a", incarnation=incarnation), b"raw", 0, incarnation
        )
    pooled.apply(moved(TRANSIT, 6, pool="a", incarnation=7), b"raw", 0, 9)
    pooled.expire(9)
    ended = [row.placement.incarnation for _, row in pooled.rows() if row.placement.incarnation < 7]
    assert sorted(ended) == [5, 5, 6]


@both_orders
@pytest.mark.parametrize("killed", [False, True])
def test_rows_of_a_pools_older_epochs_expire_some_time_after_a_newer_one_is_reported(
    kv_first: bool, killed: bool
) -> None:
    """Rows of other pools stay, and until the expiry a transition still finds the older rows."""
    cxl = [
        moved(TRANSIT, 1, 2, pool="a", epoch=1),
        moved(TRANSIT, 3, pool="b", epoch=1),
        moved(POOLED, 1),
        moved(TRANSIT, 4, pool="a", epoch=2),
        moved(POOLED, 2, 4),
    ]
    agent = read_all([batch(0)], cxl, kv_first)
    assert not agent.dead
    newer_ms = BEGUN_MS + 4 + int(SETTINGS.cxl_evicted_ttl_s * 1000)  # block 4 was entered again by the fifth
    tick(agent, newer_ms - 2)
    assert states_of(agent).keys() == {1, 2, 3, 4}
    if killed:
        agent.killed()
    tick(agent, newer_ms)
    assert states_of(agent) == {3: TRANSIT, 4: POOLED}


def test_rows_of_an_older_epoch_expire_even_if_no_row_of_the_newer_one_is_left() -> None:
    """The newer epoch was reported, so that the older rows are outdated."""
    cxl = [moved(TRANSIT, 1, pool="a", epoch=1), moved(TRANSIT, 2, pool="a", epoch=2), moved(LOCAL, 2)]
    agent = Agent(History([batch(0)], cxl))
    for topic in (KV, CXL):
        agent.transact(agent.logs[topic])
    tick(agent, BEGUN_MS + 1 + int(SETTINGS.cxl_evicted_ttl_s * 1000))
    assert states_of(agent) == {}


def test_a_block_beyond_the_rows_of_a_partition_is_refused() -> None:
    """The other blocks of its record enter the state, and existing rows continue to change."""
    progress = {RANK: Progress(RANK, Epoch(Incarnation(1), 0), 0, model="m", block_size=16)}
    pooled = PooledBlockTable(progress.get, evicted_ttl_ms=1, parked_ttl_ms=1, owner_ttl_ms=1, rows_max=2)
    with pytest.raises(BadRecord) as caught:
        pooled.apply(moved(TRANSIT, 1, 2, 3, pool="a"), b"raw", 0, 0)
    assert caught.value.reason == "table_full"
    pooled.apply(moved(POOLED, 1, 2), b"raw", 1, 0)
    pooled.apply(moved(LOCAL, 1), b"raw", 2, 0)
    pooled.apply(moved(TRANSIT, 3, pool="a"), b"raw", 3, 0)
    assert sorted(key.sequence for key, _ in pooled.rows()) == [2, 3]


def owners_of(agent: Agent) -> list[RankId]:
    """Return the owners that have a row in the table, which are those that a reducer loads from it."""
    in_table = [OWNER_KEY.parse(key) for key in agent.rows() if key.startswith(OWNER_KEY.prefix)]
    agent.killed()
    assert agent.reducer.pooled.n_owners == len(in_table)
    return in_table


def tick(agent: Agent, now_ms: int) -> None:
    agent.reducer.tick(0, now_ms, lambda: 0)
    agent.transact([])


@both_orders
def test_an_owners_row_expires_when_no_transition_that_needs_it_can_be_unread(kv_first: bool) -> None:
    """This holds for a rank without transitions and for one with pooled blocks, which stay."""
    quiet = RankId(WorkerId(1), DpRank(1))
    kv = [batch(0), batch(0, rank=quiet), batch(0, 2), batch(0, 2, rank=quiet), removal(2)]
    agent = read_all(kv, [moved(TRANSIT, 1, pool="a"), moved(POOLED, 1)], kv_first)
    last_ms = BEGUN_MS + len(kv) - 1  # the removal is of both
    tick(agent, last_ms + SETTINGS.retention_ms - 1)
    assert owners_of(agent) == [RANK, quiet]
    tick(agent, last_ms + SETTINGS.retention_ms)
    assert owners_of(agent) == []
    assert states_of(agent) == {1: POOLED}


def test_an_owners_row_stays_while_a_block_in_transit_depends_on_it() -> None:
    """Without the owner's row, the block would be in transit again."""
    progress = {RANK: Progress(RANK, Epoch(Incarnation(1), 0), 0, model="m", block_size=16)}
    pooled = PooledBlockTable(progress.get, evicted_ttl_ms=100, parked_ttl_ms=1, owner_ttl_ms=10)
    pooled.apply(moved(TRANSIT, 1, pool="a"), b"raw", 0, 0)
    before, progress[RANK] = progress[RANK], replace(progress[RANK], epoch=Epoch(Incarnation(2), 0))
    pooled.progress_changed(RANK, before, progress[RANK], 1)
    for now_ms, left in ((99, (1, 1)), (101, (0, 1)), (111, (0, 0))):
        pooled.expire(now_ms)
        assert (len(pooled), pooled.n_owners) == left


def test_a_transition_of_an_incarnation_whose_owners_row_expired_is_dropped() -> None:
    """Transitions of the next incarnation are applied."""
    agent = Agent(
        History([batch(0), batch(0, 2)], [moved(TRANSIT, 1, pool="a"), moved(TRANSIT, 2, pool="a", incarnation=2)])
    )
    agent.transact(agent.logs[KV])
    tick(agent, BEGUN_MS + 1 + SETTINGS.retention_ms)
    agent.killed()
    agent.transact(agent.logs[CXL])
    assert states_of(agent) == {2: TRANSIT}
    assert not agent.dead


def test_owners_rows_beyond_the_limit_expire_early() -> None:
    """The oldest expire first, except those with blocks in transit."""
    progress: dict[RankId, Progress] = {}
    pooled = PooledBlockTable(progress.get, evicted_ttl_ms=10**9, parked_ttl_ms=10**9, owner_ttl_ms=10**9, owners_max=2)
    ranks = [RankId(WorkerId(1), DpRank(number)) for number in range(4)]
    for at_ms, rank in enumerate(ranks):
        before = Progress(rank, Epoch(Incarnation(1), 0), 0, model="m", block_size=16)
        progress[rank] = before
        if rank == ranks[0]:
            pooled.apply(moved(TRANSIT, 1, pool="a", rank=rank), b"raw", 0, at_ms)
        progress[rank] = replace(before, epoch=Epoch(Incarnation(2), 0))
        pooled.progress_changed(rank, before, progress[rank], at_ms)
    pooled.take_changes()
    pooled.expire(10)
    assert pooled.take_changes().owners == [(ranks[1], None), (ranks[2], None)]
    assert pooled.n_owners == 2


def test_a_transition_parked_for_longer_than_events_are_retained_is_a_dead_letter() -> None:
    """Its batch cannot arrive any more, and the transitions parked after it are processed next."""
    cxl = [moved(TRANSIT, 1, pool="a", follows=5), moved(TRANSIT, 2, pool="a"), moved(TRANSIT, 3, pool="a", follows=6)]
    agent = read_all([batch(0)], cxl, kv_first=False)
    assert agent.waiting == {RANK: [0, 0, 0]}
    agent.reducer.tick(0, BEGUN_MS + SETTINGS.retention_ms, lambda: 0)
    agent.transact([])
    assert agent.dead == {"batch_never_came": 1}
    assert states_of(agent) == {2: TRANSIT}
    assert agent.waiting == {RANK: [0]}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"2", encode_transition(moved(LOCAL, 1)), "wrong_key"),
        (b"1", b"not a record", "not_avro"),
        (b"1", None, "not_avro"),
    ],
)
def test_an_unusable_record_is_a_dead_letter(key: bytes, value: bytes | None, reason: str) -> None:
    """The dead letter has the reason of the refusal."""
    reducer = PartitionReducer(SETTINGS, Counter())
    stray = SourceRecord(topics(SETTINGS).cxl_events.name, 0, 0, 0, key, value, ())
    (decoded,) = reducer.decode([stray])
    with pytest.raises(BadRecord) as caught:
        reducer.apply(stray, decoded)
    assert caught.value.reason == reason
