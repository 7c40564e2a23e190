"""The table of pooled blocks, without Kafka: both topics read in any order, cut anywhere, delivered again.

A history is two logs, `kv-events` and `cxl-events` of one partition, bytes as they lie on Kafka. The reference looks at
both as wholes and knows nothing of the order in which they are read; an agent reads them side by side, a transaction of
a few records at a time, and is killed between any two.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.codec import encode_batch
from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import BEFORE_FIRST, AllBlocksCleared, EngineBatch, EngineEvents, WorkerRemoved
from streams.core.ids import DpRank, EngineHash, Epoch, Incarnation, RankId, SequenceHash, WorkerId
from streams.core.reducer.ordering import Progress
from streams.cxl.events import BlockAddress, CxlTransition, addressed
from streams.cxl.pooled_view import PooledBlock, PooledView
from streams.cxl.records import (
    OWNER_PREFIX,
    PARKED_PREFIX,
    decode_parked,
    decode_transition,
    encode_transition,
    parse_owner_key,
)
from streams.errors import BadRecord
from streams.settings import Settings
from streams.tables.cxl_reducer import PartitionReducer, partition_plan
from streams.tables.pooled_block_table import PARKED_MAX, PooledBlockTable
from streams.tables.reducer import SourceRecord
from streams.topics import topics
from tests.helpers.reference import ReferenceFleet, input_history

SETTINGS = Settings(partitions=1)
KV, CXL = (source.name for source in partition_plan(SETTINGS).sources)
TABLES = partition_plan(SETTINGS).tables

LOCAL, TRANSIT, POOLED, EVICTED = CxlMemoryState
RANK = RankId(WorkerId(1), DpRank(0))
WORKERS = (WorkerId(7), WorkerId(8))

#: Append time of the first record of a log; the others follow a millisecond apart.
BEGUN_MS = 1_000_000

seeds = st.integers(0, 2**32)


# -- histories -----------------------------------------------------------------------------------------------------


def address_of(block: int) -> BlockAddress:
    """Blocks 1 to 6 are one chain."""
    return BlockAddress(SequenceHash(block), SequenceHash(block - 1) if block > 1 else None, block - 1)


def told(
    state: CxlMemoryState,
    *blocks: int,
    follows: int = 0,
    life: int = 1,
    pool: str | None = None,
    rank: RankId = RANK,
    workers: tuple[WorkerId, ...] = (),
    epoch: int = 0,
    event_id: int = 0,
) -> CxlTransition:
    places = addressed([(address_of(block), EngineHash(100 + block)) for block in blocks])
    return CxlTransition(rank, "m", Incarnation(life), follows, event_id, state, pool, epoch, workers, 0, places)


def batch(sequence: int, life: int = 1, rank: RankId = RANK, *events: AllBlocksCleared) -> EngineBatch:
    return EngineBatch(rank, "m", 16, Incarnation(life), sequence, 0, 0, EngineEvents(events))


def removal(life: int = 1) -> EngineBatch:
    return replace(batch(0, life), body=WorkerRemoved("a test says so"))


@dataclass
class History:
    """Both logs of a partition."""

    kv: list[EngineBatch]
    cxl: list[CxlTransition]

    def records(self) -> dict[str, list[SourceRecord]]:
        return {
            KV: [record(KV, at, told.rank, encode_batch(told)) for at, told in enumerate(self.kv)],
            CXL: [record(CXL, at, told.rank, encode_transition(told)) for at, told in enumerate(self.cxl)],
        }


def record(topic: str, offset: int, rank: RankId, value: bytes) -> SourceRecord:
    return SourceRecord(topic, 0, offset, BEGUN_MS + offset, str(rank.worker_id).encode(), value, ())


def random_cxl(rng: random.Random, kv: list[EngineBatch], n_transitions: int) -> list[CxlTransition]:
    """What ranks tell: mostly behind their batches and in order, and sometimes not."""
    lives: dict[RankId, dict[int, int]] = {}
    for each in kv:
        known = lives.setdefault(each.rank, {})
        known[each.incarnation] = max(known.get(each.incarnation, BEFORE_FIRST), each.sequence)
    at = {rank: (min(known), BEFORE_FIRST) for rank, known in lives.items()}
    events_so_far: list[CxlTransition] = []
    for number in range(n_transitions):
        rank = rng.choice(sorted(lives))
        life, follows = at[rank]
        if rng.random() < 0.15:
            life = rng.choice([each for each in lives[rank] if each >= life] or [life + 1])
            follows = BEFORE_FIRST
        follows = min(follows + rng.randint(0, 3), lives[rank].get(life, 5) + (rng.random() < 0.05))
        at[rank] = (life, follows)
        strays = rng.random()
        if strays < 0.05:
            follows = max(follows - rng.randint(0, 5), BEFORE_FIRST)
        elif strays < 0.08:
            life = max(life + rng.choice((-1, 1)), 0)
        events_so_far.append(
            told(
                rng.choices(list(CxlMemoryState), (1, 5, 5, 2))[0],
                *rng.sample(range(1, 7), rng.randint(1, 3)),
                follows=follows,
                life=life,
                pool=rng.choice((None, "a", "a", "a", "b")),
                rank=rank,
                workers=WORKERS[: rng.randint(0, 2)],
                epoch=rng.randint(0, 2),
                event_id=number,
            )
        )
    return events_so_far


def random_history(seed: int, n_batches: int, n_transitions: int) -> History:
    rng = random.Random(seed)
    announced = seed % 2 == 1
    kv = input_history(rng, n_batches, 3, n_blocks_max=60, begins=announced, bridged=announced)
    batches = [each for each in kv if isinstance(each, EngineBatch)]
    return History(batches, random_cxl(rng, batches, n_transitions))


# -- the reference: both logs as wholes ----------------------------------------------------------------------------


@dataclass
class ExpectedRank:
    """What kv-events say of one rank in the end: its life, whether it was removed, and how far each life came."""

    life: int = 0
    removed: bool = False
    reached: dict[int, int] = field(default_factory=dict)


@dataclass
class Row:
    """A block of one owner."""

    state: CxlMemoryState
    pool: str
    workers: tuple[WorkerId, ...]
    epoch: int
    life: int


@dataclass
class Reference:
    """Rows by owner and block; refusals by reason; transitions that wait, in order for each rank."""

    rows: dict[tuple[RankId, int], Row] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    waiting: dict[RankId, list[int]] = field(default_factory=dict)


def expected_ranks(kv: list[EngineBatch]) -> dict[RankId, ExpectedRank]:
    fleet, found = ReferenceFleet(), dict[RankId, ExpectedRank]()
    for each in kv:
        fleet.apply(each)
        for rank, state in fleet.ranks.items():
            expected_rank = found.setdefault(rank, ExpectedRank())
            expected_rank.life, expected_rank.removed = state.epoch.incarnation, state.removed
            if not state.removed:
                known = expected_rank.reached.get(expected_rank.life, BEFORE_FIRST)
                expected_rank.reached[expected_rank.life] = max(known, state.sequence)
    return found


def reference_of(history: History) -> Reference:
    found = Reference()
    lives = expected_ranks(history.kv)
    newest: dict[RankId, int] = {}
    for each in history.cxl:
        if each.incarnation < newest.get(each.rank, 0):
            found.refused["older_incarnation"] += 1
            continue
        newest[each.rank] = each.incarnation
        expected_rank = lives.get(each.rank, ExpectedRank())
        reached = expected_rank.reached.get(each.incarnation)
        counts = reached is not None and each.follows <= reached
        if each.rank in found.waiting or (not counts and each.incarnation >= expected_rank.life):
            found.waiting.setdefault(each.rank, []).append(each.event_id)
        elif counts:
            enter(found, each)
    for (rank, _), row in found.rows.items():
        over = row.life < lives[rank].life or (row.life == lives[rank].life and lives[rank].removed)
        if row.state is TRANSIT and over:
            row.state = EVICTED
    return found


def enter(found: Reference, each: CxlTransition) -> None:
    reasons = []
    for address, _ in each.blocks.rows():
        at = (each.rank, address.sequence)
        row = found.rows.get(at)
        state = LOCAL if row is None else row.state
        if row is not None and state is TRANSIT and row.life < each.incarnation:
            state = EVICTED
        elsewhere = row is not None and each.pool_id not in (None, row.pool) and state in (TRANSIT, POOLED)
        if each.state is TRANSIT and each.pool_id is None:
            reasons.append("no_pool")
        elif each.state is TRANSIT:
            assert each.pool_id is not None
            found.rows[at] = Row(TRANSIT, each.pool_id, each.accessible_workers, each.pool_epoch, each.incarnation)
        elif each.state is POOLED and state is not TRANSIT:
            reasons.append("not_in_transit")
        elif elsewhere:
            reasons.append("other_pool")
        elif row is None:
            pass  # nobody's: plain already, or nothing to evict
        elif each.state is LOCAL:
            del found.rows[at]
        elif state is not each.state:
            row.state, row.life = each.state, each.incarnation
    if reasons:
        found.refused[reasons[0]] += 1


def wanted_blocks(reference: Reference) -> dict[tuple[RankId, int], tuple[CxlMemoryMetadata, int, BlockAddress]]:
    return {
        (rank, block): (CxlMemoryMetadata(row.state, row.pool, row.workers), row.epoch, address_of(block))
        for (rank, block), row in reference.rows.items()
    }


# -- an agent ------------------------------------------------------------------------------------------------------


class Agent:
    """Reads both logs, a transaction of some records at a time. table, dead, applied: as its transactions left them."""

    def __init__(self, history: History) -> None:
        self.logs = history.records()
        self.table: dict[tuple[str, bytes], bytes] = {}
        self.log: list[tuple[bytes, bytes | None]] = []  # of the table of pooled blocks, as readers see it
        self.dead: Counter[str] = Counter()
        self.applied = {KV: -1, CXL: -1}
        self.killed()

    def killed(self) -> None:
        """Begin anew from the table."""
        self.reducer = PartitionReducer(SETTINGS, Counter())
        for table in TABLES:
            items = sorted((key, value) for (name, key), value in self.table.items() if name == table.name)
            self.reducer.load(table, iter(items))

    def transact(self, offered: list[SourceRecord], commits: bool = True) -> None:
        """Take records; those that were applied are told by their offsets, as a partition tells them."""
        news = [each for each in offered if each.offset > self.applied[each.topic]]
        dead = []
        for each, decoded in zip(news, self.reducer.decode(news), strict=True):
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
        self.applied.update({each.topic: each.offset for each in news})

    @property
    def waiting(self) -> dict[RankId, list[int]]:
        """Event ids of parked transitions, by rank and in order."""
        found: dict[RankId, list[int]] = {}
        for (name, key), value in sorted(self.table.items()):
            if name == TABLES[1].name and key.startswith(PARKED_PREFIX):
                where, row = decode_parked(key, value)
                found.setdefault(where.owner, []).append(decode_transition(row.raw).event_id)
        return found

    def rows(self) -> dict[bytes, bytes]:
        """Rows of blocks and owners, bytes as they lie in the table."""
        return {
            key: value
            for (name, key), value in self.table.items()
            if name == TABLES[1].name and not key.startswith(PARKED_PREFIX)
        }


def interleaved(logs: dict[str, list[SourceRecord]], rng: random.Random, kv_share: float) -> Iterator[SourceRecord]:
    """Both logs, each in its order; kv_share: how often kv-events have the turn."""
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
    assert blocks_of(folded(agent.log)) == wanted_blocks(reference)
    assert agent.waiting == reference.waiting
    assert agent.dead == reference.refused


@settings(max_examples=25, deadline=None)
@given(seed=seeds, kv_share=st.sampled_from((0.0, 0.05, 0.5, 0.95, 1.0)), n_max=st.integers(1, 6))
def test_every_interleaving_of_the_topics_gives_the_same_rows(seed: int, kv_share: float, n_max: int) -> None:
    """As the reference, which reads no order between them; and the same bytes whichever was read first."""
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
def test_killed_behind_or_before_every_commit_an_agent_ends_with_the_same_rows(
    seed: int, kv_share: float, n_max: int
) -> None:
    """What was not committed is judged again, from the table; what was is delivered again, and known by its offset."""
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
def test_cut_at_every_transaction_an_heir_goes_on_to_the_same_rows(seed: int, kv_share: float) -> None:
    """From the table as it was there, whoever goes on and in whatever order he reads the rest."""
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
    """A router reads what compaction leaves, in any order, some of it twice."""
    history, rng = random_history(seed, 40, 60), random.Random(seed + 1)
    agent = Agent(history)
    for taken in transactions(interleaved(agent.logs, rng, 0.5), rng, 4):
        agent.transact(taken)
    compacted = list({key: (key, value) for key, value in agent.log}.values())
    records = [each for each in compacted if tombstones or each[1] is not None]
    rng.shuffle(records)
    assert blocks_of(folded([*records, *rng.sample(records, len(records) // 2)])) == wanted_blocks(
        reference_of(history)
    )


def test_the_random_histories_have_everything_in_them() -> None:
    """A property of nothing would hold: transitions that count, wait, are dropped and refused for every reason."""
    states: Counter[CxlMemoryState] = Counter()
    refused: Counter[str] = Counter()
    n_waiting = 0
    verdicts: Counter[str] = Counter()
    for seed in range(12):
        history = random_history(seed, 60, 80)
        reference = reference_of(history)
        states.update(row.state for row in reference.rows.values())
        refused.update(reference.refused)
        n_waiting += sum(map(len, reference.waiting.values()))
        agent = Agent(history)
        for taken in transactions(interleaved(agent.logs, random.Random(seed), 0.5), random.Random(seed), 4):
            agent.transact(taken)
        verdicts.update(agent.reducer.pooled.counts)
    assert min(states[each] for each in (TRANSIT, POOLED, EVICTED)) >= 5
    assert refused.keys() == {"no_pool", "not_in_transit", "other_pool", "older_incarnation"}
    assert n_waiting
    assert verdicts["parked_applied"] > 50
    assert verdicts["parked_dropped"] > 5


# -- one thing at a time -------------------------------------------------------------------------------------------


def ended(kv: list[EngineBatch], cxl: list[CxlTransition], kv_first: bool) -> Agent:
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
    """Read behind its batch or before it, a transition does the same, or is refused for the same reason."""
    steps = {LOCAL: [], TRANSIT: [TRANSIT], POOLED: [TRANSIT, POOLED], EVICTED: [TRANSIT, EVICTED]}[source]
    cxl = [told(step, 1, pool="a" if step is TRANSIT else None) for step in steps]
    cxl.append(told(target, 1, 2, pool=pool))  # block 2 nobody knows
    history = History([batch(0)], cxl)
    agent = ended(history.kv, history.cxl, kv_first)
    reference = reference_of(history)
    check(agent, reference)
    legal = (
        (target is LOCAL and (pool != "b" or source not in (TRANSIT, POOLED)))
        or (target is TRANSIT and pool is not None)
        or (target is EVICTED and (pool != "b" or source not in (TRANSIT, POOLED)))
    )
    assert (not agent.dead) == legal  # cxl_pooled is always illegal for the unknown block


@both_orders
def test_a_restart_evicts_what_was_in_transit_and_keeps_what_is_pooled(kv_first: bool) -> None:
    """And what was told of the old life before it ended counts, though it is read behind the new one."""
    cxl = [told(TRANSIT, 1, 2, pool="a"), told(POOLED, 1)]
    assert states_of(ended([batch(0), batch(0, 2)], cxl, kv_first)) == {1: POOLED, 2: EVICTED}


@both_orders
def test_removal_and_clear_take_nothing_out_of_a_pool(kv_first: bool) -> None:
    """A pooled block outlives its owner."""
    cxl = [told(TRANSIT, 1, 2, pool="a"), told(POOLED, 1)]
    cleared = replace(batch(1), body=EngineEvents((AllBlocksCleared(),)))
    assert states_of(ended([batch(0), cleared], cxl, kv_first)) == {1: POOLED, 2: TRANSIT}
    assert states_of(ended([batch(0), cleared, removal()], cxl, kv_first)) == {1: POOLED, 2: EVICTED}


@both_orders
def test_a_removed_worker_that_comes_back_in_its_life_goes_on(kv_first: bool) -> None:
    """Its transit was not over after all, and what it told in between counts once its batch has come."""
    kv = [batch(0), batch(1), removal(), batch(BEFORE_FIRST), batch(0), batch(1), batch(2)]
    cxl = [told(TRANSIT, 1, pool="a", follows=1), told(POOLED, 1, follows=2)]
    assert states_of(ended(kv[:4], cxl, kv_first)) == {1: TRANSIT}
    assert states_of(ended(kv, cxl, kv_first)) == {1: POOLED}


@both_orders
def test_what_follows_a_batch_that_never_came_is_dropped_with_its_life(kv_first: bool) -> None:
    """And does not hold up what the next life tells."""
    cxl = [told(TRANSIT, 1, pool="a", follows=5), told(TRANSIT, 2, pool="a", life=2)]
    agent = ended([batch(0), batch(0, 2)], cxl, kv_first)
    assert states_of(agent) == {2: TRANSIT}
    assert agent.waiting == {}
    assert not agent.dead


def test_another_owners_copy_of_a_block_is_a_row_of_its_own() -> None:
    """Owners know nothing of each other."""
    other = RankId(WorkerId(1), DpRank(1))
    kv = [batch(0), batch(0, 1, other), batch(0, 2)]
    cxl = [told(TRANSIT, 1, pool="a"), told(TRANSIT, 1, pool="b", rank=other), told(POOLED, 1, rank=other)]
    agent = ended(kv, cxl, kv_first=True)
    found = {owner.dp_rank: block[0] for (owner, _), block in blocks_of(folded(agent.log)).items()}
    assert found == {0: CxlMemoryMetadata(EVICTED, "a"), 1: CxlMemoryMetadata(POOLED, "b")}


def test_a_block_that_goes_to_another_pool_leaves_the_first() -> None:
    """Its row there gets a tombstone in the same transaction."""
    agent = ended([batch(0)], [told(TRANSIT, 1, pool="a"), told(TRANSIT, 1, pool="b")], kv_first=True)
    assert [found[0].pool_id for found in blocks_of(folded(agent.log)).values()] == ["b"]
    assert len([key for key in agent.rows() if key.startswith(b"B")]) == 1


@pytest.mark.parametrize("room", [1, 2, 3])
def test_what_has_no_room_to_wait_is_refused(room: int) -> None:
    """One more than there is room for, and the first ones count all the same."""
    pooled = PooledBlockTable(lambda _: None, evicted_ttl_ms=1, parked_ttl_ms=1, owner_ttl_ms=1, parked_max=room)
    for number in range(room):
        pooled.apply(told(TRANSIT, 1, pool="a"), b"raw", number, 0)
    with pytest.raises(BadRecord) as caught:
        pooled.apply(told(TRANSIT, 1, pool="a"), b"raw", room, 0)
    assert caught.value.reason == "over_capacity"
    assert pooled.n_parked == room < PARKED_MAX


def test_evicted_rows_expire_and_nothing_else_does() -> None:
    """After their time, be it that they were told so or that their owner's life ended; over the log's own times."""
    ttl_ms = int(SETTINGS.cxl_evicted_ttl_s * 1000)
    cxl = [told(TRANSIT, 1, 2, 3, pool="a"), told(POOLED, 1), told(EVICTED, 2)]
    agent = ended([batch(0), batch(0, 2)], cxl, kv_first=True)
    assert states_of(agent) == {1: POOLED, 2: EVICTED, 3: EVICTED}
    for now_ms, left in ((0, {1, 2, 3}), (1, {1, 2}), (2, {1})):  # the restart has offset 1, the eviction 2
        agent.reducer.tick(0, BEGUN_MS + ttl_ms + now_ms, lambda: 0)
        agent.transact([])
        assert states_of(agent).keys() == left
        agent.killed()


def test_evicted_rows_beyond_their_number_expire_before_their_time() -> None:
    """The oldest first; a pool that turns over faster than rows expire fills no memory."""
    pooled = PooledBlockTable(lambda _: None, evicted_ttl_ms=10**9, parked_ttl_ms=1, owner_ttl_ms=1, evicted_max=2)
    rows = ended([batch(0)], [told(TRANSIT, 1, 2, 3, 4, pool="a")], kv_first=True).reducer.pooled
    placed = [(key, row) for key, row in rows.rows()]
    pooled.load(
        [(key, replace(row, placement=replace(row.placement, state=EVICTED, entered_at_ms=key.sequence)))
         for key, row in placed],
        (),
        (),
    )  # fmt: skip
    pooled.expire(0)
    assert sorted(key.sequence for key, _ in pooled.rows()) == [3, 4]


def restarted(pooled: PooledBlockTable, progress: dict[RankId, Progress], life: int, at_ms: int) -> None:
    """A rank begins a life."""
    before = progress.get(RANK)
    progress[RANK] = Progress(RANK, Epoch(Incarnation(life), 0), 0, model="m", block_size=16)
    pooled.kv_moved(RANK, before, progress[RANK], at_ms)


@pytest.mark.parametrize("killed", [False, True])
def test_further_restarts_do_not_renew_what_was_in_transit_when_its_own_life_ended(killed: bool) -> None:
    """A rank that restarts more often than rows expire would keep them for ever."""
    progress: dict[RankId, Progress] = {}

    def begun() -> PooledBlockTable:
        return PooledBlockTable(progress.get, evicted_ttl_ms=100, parked_ttl_ms=1, owner_ttl_ms=10**9)

    pooled = begun()
    restarted(pooled, progress, 1, 0)
    pooled.apply(told(TRANSIT, 1, 2, pool="a"), b"raw", 0, 0)
    restarted(pooled, progress, 2, 10)
    pooled.apply(told(TRANSIT, 2, pool="a", life=2), b"raw", 1, 20)
    restarted(pooled, progress, 3, 90)
    if killed:
        rows, owners = list(pooled.rows()), pooled.take_changes().owners
        pooled = begun()
        pooled.load(rows, [(rank, row) for rank, row in owners if row is not None], ())
    for now_ms, left in ((109, [1, 2]), (110, [2]), (189, [2]), (190, [])):
        pooled.expire(now_ms)
        assert [key.sequence for key, _ in pooled.rows()] == left


def test_what_was_in_transit_when_its_life_ended_is_in_the_number_of_evicted_rows() -> None:
    """And is not any more when it comes back, or its owner does in that life."""
    progress: dict[RankId, Progress] = {}
    pooled = PooledBlockTable(progress.get, evicted_ttl_ms=10**9, parked_ttl_ms=1, owner_ttl_ms=10**9, evicted_max=3)
    for life in range(1, 8):
        restarted(pooled, progress, life, life)
        pooled.apply(told(TRANSIT, life, life + 10, pool="a", life=life), b"raw", 0, life)
    pooled.apply(told(TRANSIT, 6, pool="a", life=7), b"raw", 0, 9)
    pooled.expire(9)
    ended = [row.placement.incarnation for _, row in pooled.rows() if row.placement.incarnation < 7]
    assert sorted(ended) == [5, 5, 6]


@both_orders
@pytest.mark.parametrize("killed", [False, True])
def test_rows_of_a_pools_older_epochs_go_some_time_after_a_newer_one_was_told(kv_first: bool, killed: bool) -> None:
    """Of that pool and no other; what is told of them until then finds them, whichever was read first."""
    cxl = [
        told(TRANSIT, 1, 2, pool="a", epoch=1),
        told(TRANSIT, 3, pool="b", epoch=1),
        told(POOLED, 1),
        told(TRANSIT, 4, pool="a", epoch=2),
        told(POOLED, 2, 4),
    ]
    agent = ended([batch(0)], cxl, kv_first)
    assert not agent.dead
    newer_ms = BEGUN_MS + 4 + int(SETTINGS.cxl_evicted_ttl_s * 1000)  # block 4 was entered again by the fifth
    looked(agent, newer_ms - 2)
    assert states_of(agent).keys() == {1, 2, 3, 4}
    if killed:
        agent.killed()
    looked(agent, newer_ms)
    assert states_of(agent) == {3: TRANSIT, 4: POOLED}


def test_rows_of_an_older_epoch_go_though_no_row_of_the_newer_one_is_left() -> None:
    """What was told of it was true."""
    cxl = [told(TRANSIT, 1, pool="a", epoch=1), told(TRANSIT, 2, pool="a", epoch=2), told(LOCAL, 2)]
    agent = Agent(History([batch(0)], cxl))
    for topic in (KV, CXL):
        agent.transact(agent.logs[topic])
    looked(agent, BEGUN_MS + 1 + int(SETTINGS.cxl_evicted_ttl_s * 1000))
    assert states_of(agent) == {}


def test_a_block_beyond_the_rows_of_a_partition_is_refused_and_what_is_known_goes_on() -> None:
    """The others of its record enter the state."""
    progress = {RANK: Progress(RANK, Epoch(Incarnation(1), 0), 0, model="m", block_size=16)}
    pooled = PooledBlockTable(progress.get, evicted_ttl_ms=1, parked_ttl_ms=1, owner_ttl_ms=1, rows_max=2)
    with pytest.raises(BadRecord) as caught:
        pooled.apply(told(TRANSIT, 1, 2, 3, pool="a"), b"raw", 0, 0)
    assert caught.value.reason == "table_full"
    pooled.apply(told(POOLED, 1, 2), b"raw", 1, 0)
    pooled.apply(told(LOCAL, 1), b"raw", 2, 0)
    pooled.apply(told(TRANSIT, 3, pool="a"), b"raw", 3, 0)
    assert sorted(key.sequence for key, _ in pooled.rows()) == [2, 3]


def owners_of(agent: Agent) -> list[RankId]:
    """Of the table, and of what whoever loads it holds."""
    in_table = [parse_owner_key(key) for key in agent.rows() if key.startswith(OWNER_PREFIX)]
    agent.killed()
    assert agent.reducer.pooled.n_owners == len(in_table)
    return in_table


def looked(agent: Agent, now_ms: int) -> None:
    agent.reducer.tick(0, now_ms, lambda: 0)
    agent.transact([])


@both_orders
def test_an_owners_row_goes_when_no_transition_can_be_unread_that_it_says_anything_of(kv_first: bool) -> None:
    """Whether the rank never told a thing, or its blocks are pooled: those stay, and count for nobody else's life."""
    quiet = RankId(WorkerId(1), DpRank(1))
    kv = [batch(0), batch(0, rank=quiet), batch(0, 2), batch(0, 2, rank=quiet), removal(2)]
    agent = ended(kv, [told(TRANSIT, 1, pool="a"), told(POOLED, 1)], kv_first)
    last_ms = BEGUN_MS + len(kv) - 1  # the removal is of both
    looked(agent, last_ms + SETTINGS.retention_ms - 1)
    assert owners_of(agent) == [RANK, quiet]
    looked(agent, last_ms + SETTINGS.retention_ms)
    assert owners_of(agent) == []
    assert states_of(agent) == {1: POOLED}


def test_an_owners_row_stays_while_it_says_what_became_of_a_block_on_its_way() -> None:
    """Without it the block would be in transit again."""
    progress = {RANK: Progress(RANK, Epoch(Incarnation(1), 0), 0, model="m", block_size=16)}
    pooled = PooledBlockTable(progress.get, evicted_ttl_ms=100, parked_ttl_ms=1, owner_ttl_ms=10)
    pooled.apply(told(TRANSIT, 1, pool="a"), b"raw", 0, 0)
    before, progress[RANK] = progress[RANK], replace(progress[RANK], epoch=Epoch(Incarnation(2), 0))
    pooled.kv_moved(RANK, before, progress[RANK], 1)
    for now_ms, left in ((99, (1, 1)), (101, (0, 1)), (111, (0, 0))):
        pooled.expire(now_ms)
        assert (len(pooled), pooled.n_owners) == left


def test_a_transition_of_a_life_whose_owners_row_is_gone_is_dropped_and_the_next_life_goes_on() -> None:
    """As one read behind more restarts than are remembered."""
    agent = Agent(History([batch(0), batch(0, 2)], [told(TRANSIT, 1, pool="a"), told(TRANSIT, 2, pool="a", life=2)]))
    agent.transact(agent.logs[KV])
    looked(agent, BEGUN_MS + 1 + SETTINGS.retention_ms)
    agent.killed()
    agent.transact(agent.logs[CXL])
    assert states_of(agent) == {2: TRANSIT}
    assert not agent.dead


def test_owners_rows_beyond_their_number_go_before_their_time() -> None:
    """The oldest first, and none that has something on its way."""
    progress: dict[RankId, Progress] = {}
    pooled = PooledBlockTable(progress.get, evicted_ttl_ms=10**9, parked_ttl_ms=10**9, owner_ttl_ms=10**9, owners_max=2)
    ranks = [RankId(WorkerId(1), DpRank(number)) for number in range(4)]
    for at_ms, rank in enumerate(ranks):
        before = Progress(rank, Epoch(Incarnation(1), 0), 0, model="m", block_size=16)
        progress[rank] = before
        if rank == ranks[0]:
            pooled.apply(told(TRANSIT, 1, pool="a", rank=rank), b"raw", 0, at_ms)
        progress[rank] = replace(before, epoch=Epoch(Incarnation(2), 0))
        pooled.kv_moved(rank, before, progress[rank], at_ms)
    pooled.take_changes()
    pooled.expire(10)
    assert pooled.take_changes().owners == [(ranks[1], None), (ranks[2], None)]
    assert pooled.n_owners == 2


def test_what_waits_for_longer_than_events_are_kept_is_a_dead_letter() -> None:
    """Its batch cannot come any more; what waited behind it gets its turn."""
    cxl = [told(TRANSIT, 1, pool="a", follows=5), told(TRANSIT, 2, pool="a"), told(TRANSIT, 3, pool="a", follows=6)]
    agent = ended([batch(0)], cxl, kv_first=False)
    assert agent.waiting == {RANK: [0, 0, 0]}
    agent.reducer.tick(0, BEGUN_MS + SETTINGS.retention_ms, lambda: 0)
    agent.transact([])
    assert agent.dead == {"batch_never_came": 1}
    assert states_of(agent) == {2: TRANSIT}
    assert agent.waiting == {RANK: [0]}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"2", encode_transition(told(LOCAL, 1)), "wrong_key"),
        (b"1", b"no record", "not_avro"),
        (b"1", None, "not_avro"),
    ],
)
def test_what_cannot_be_used_is_a_dead_letter(key: bytes, value: bytes | None, reason: str) -> None:
    """With its reason, and nothing else is held up."""
    reducer = PartitionReducer(SETTINGS, Counter())
    stray = SourceRecord(topics(SETTINGS).cxl_events.name, 0, 0, 0, key, value, ())
    (decoded,) = reducer.decode([stray])
    with pytest.raises(BadRecord) as caught:
        reducer.apply(stray, decoded)
    assert caught.value.reason == reason
