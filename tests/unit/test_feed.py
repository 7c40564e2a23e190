"""The feed of one rank between an engine's real sockets and a recording producer: what its records say about itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaException

from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import (
    BEFORE_FIRST,
    ENDED_LEASE_MS,
    EngineBatch,
    EngineEvents,
    FeedState,
    Heartbeat,
    RestatementChunk,
    ResyncRequest,
)
from streams.core.ids import Epoch, Incarnation, RankId, SequenceHash, WorkerId
from streams.core.reducer.ordering import Progress
from streams.engines import evidence as evidence_module
from streams.engines import feed_machine, missing_events
from streams.engines import ledger as ledger_module
from streams.engines.address import EngineAddress
from streams.engines.cxl_names import PooledRows
from streams.engines.ledger import Ledger
from streams.engines.rank_writer import RankWriter
from streams.engines.recovery import RecoveredRank
from streams.lab.kafka.ports import free_port
from streams.settings import Settings
from tests.helpers.engine_double import EngineDouble
from tests.helpers.feeds import PATIENCE_S, FeedUnderTest, address_of, feeding

LIVE, UNPROVEN, CATCHING_UP = FeedState.LIVE, FeedState.UNPROVEN, FeedState.CATCHING_UP


def test_a_feed_is_live_only_once_what_the_engine_published_before_is_published() -> None:
    """No record says live before the batches of the replay socket, and the batches say that more may follow."""
    with EngineDouble() as engine:
        for n in range(100):
            engine.store(1 + 100 * n, live=False)

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is LIVE, "the feed to be live")

        batches = feeding(address_of(engine), act)
    assert (batches[0].sequence, batches[0].feed) == (BEFORE_FIRST, UNPROVEN)
    assert {batch.feed for batch in batches if isinstance(batch.body, EngineEvents) and batch.sequence >= 0} == {
        CATCHING_UP
    }
    assert all(batch.sequence == 99 for batch in batches if batch.feed is LIVE)


def test_an_engine_that_never_published_is_live_once_its_replay_socket_answered() -> None:
    """An empty rank is known exactly if the connection is complete and nothing was published before it."""
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is LIVE, "the feed to be live")

        batches = feeding(address_of(engine), act)
    assert [batch.feed for batch in batches][-2:] == [UNPROVEN, LIVE] and batches[-1].sequence == BEFORE_FIRST


def test_an_idle_engine_is_restated_as_empty_only_once_its_stream_is_proven() -> None:
    """Nothing is restated while batches may exist that have not arrived; later, the engine is known to be empty."""
    with EngineDouble() as engine:
        engine.stop_replays()

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is UNPROVEN, "the incarnation to begin")
            request = ResyncRequest(fed.feed.rank, fed.batches[-1].incarnation, BEFORE_FIRST, 1, "a test", 0)
            fed.feed.request_restatement(request)
            await asyncio.sleep(1.0)
            assert not any(isinstance(batch.body, RestatementChunk) for batch in fed.batches)
            engine.answer_replays()
            await fed.until(lambda: fed.state is LIVE, "the feed to be live")
            fed.feed.request_restatement(request)
            await fed.until(lambda: isinstance(fed.batches[-1].body, RestatementChunk), "the restatement")
            engine.store(1)
            await fed.until(lambda: fed.numbers() == [0], "the first batch")

        batches = feeding(address_of(engine), act)
    chunks = [batch for batch in batches if isinstance(batch.body, RestatementChunk)]
    assert [(each.sequence, each.n_unindexed, each.feed) for each in chunks] == [(BEFORE_FIRST, 0, LIVE)]
    assert isinstance(chunks[0].body, RestatementChunk) and chunks[0].body.exact and not chunks[0].body.runs


def test_a_page_that_shows_another_process_is_followed_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page was read for its metrics; one that shows the same process changes nothing."""
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            engine.store(1)
            await fed.until(lambda: fed.numbers() == [0] and fed.state is LIVE, "the feed to be live")
            monkeypatch.setattr(feed_machine, "INCARNATION_CHECK_S", 600.0)
            known = fed.batches[-1].incarnation
            fed.feed.note_start_on_page(known)
            await asyncio.sleep(3.0)  # what was asked for before
            assert fed.feed.counters.incarnations == 1
            engine.started_s += 10.0
            fed.feed.note_start_on_page(Incarnation(known + 10_000_000))
            await fed.until(lambda: fed.batches[-1].incarnation > known, "the next incarnation")

        feeding(address_of(engine), act)


@pytest.mark.parametrize("reason", ["cache_group", "unplaced"])
def test_a_bridge_that_rebuilds_its_ledger_from_the_engine_restates_the_rank_as_approximate(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """A rank with blocks that are not indexed, or after which no hit can end, does not become exact by a restart."""
    monkeypatch.setattr(ledger_module, "WAITING_STORES_MAX", 0)

    def restated(batches: list[EngineBatch]) -> list[tuple[int, bool]]:
        found = [(each, each.body) for each in batches if isinstance(each.body, RestatementChunk)]
        return [(each.n_unindexed, chunk.exact) for each, chunk in found]

    async def restate(fed: FeedUnderTest, last: int) -> None:
        await fed.until(lambda: bool(fed.batches) and fed.state is LIVE, "a feed that is live")
        request = ResyncRequest(fed.feed.rank, fed.batches[-1].incarnation, last, 1, "a test", 0)
        fed.feed.request_restatement(request)
        await fed.until(lambda: bool(restated(fed.batches)), "a restatement")

    with EngineDouble() as engine:
        if reason == "cache_group":
            engine.publish(group_store(0, "full_attention", None), group_store(1, "sliding_window", 17))
            last = engine.publish({"type": "BlockRemoved", "block_hashes": [102], "medium": "GPU", "group_idx": 1})
        else:
            last = engine.publish(["BlockStored", [9], 8, list(range(16)), 16, None, "CPU"])  # its parent is unknown

        async def first(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.numbers()[-1:] == [last], "the batches")
            await restate(fed, last)

        batches = feeding(address_of(engine), first)
        assert restated(batches) == [(1, True)]
        published = batches[-1]
        progress = Progress(published.rank, Epoch(published.incarnation, 0), last, published.digest)
        batches = feeding(
            address_of(engine), lambda fed: restate(fed, last), recovered=RecoveredRank(progress, Ledger(False))
        )
        assert restated(batches) == [(1, True)]


def group_store(group: int, kind: str, window: int | None) -> dict[str, Any]:
    """A store of four blocks in one cache group of a hybrid model."""
    return {
        "type": "BlockStored",
        "block_hashes": [101, 102, 103, 104],
        "parent_block_hash": None,
        "token_ids": list(range(64)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": window,
    }


def test_pooled_blocks_are_published_again_if_the_table_lacks_them() -> None:
    """After a restatement, and only those that are in another state there, or not at all."""
    first, second, third = 1000, 1001, 1002  # names of the blocks of the prompt that begins with token 1
    rows: dict[RankId, PooledRows] = {}
    n_reads: list[int] = []

    async def read_pooled(worker_id: WorkerId) -> Mapping[RankId, PooledRows]:
        n_reads.append(worker_id)
        return rows

    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            engine.store(1, 3)
            engine.publish(["CxlStateTransition", 1, [first, second, third], "in_transit", "p", [7]])
            engine.publish({"type": "CxlStateTransition", "block_hashes": [first, second], "new_state": "cxl_pooled"})
            engine.remove(1)
            await fed.until(lambda: fed.numbers() == [0, 1, 2, 3] and fed.state is LIVE, "the batches")
            sent = len(fed.transitions)
            incarnation = fed.batches[-1].incarnation
            pooled = fed.transitions[0].blocks.sequence.tolist()
            rows[fed.feed.rank] = {SequenceHash(pooled[1]): (incarnation, CxlMemoryState.CXL_POOLED, "p")}
            fed.feed.request_restatement(ResyncRequest(fed.feed.rank, incarnation, 3, 1, "a test", 0))
            await fed.until(lambda: len(fed.transitions) >= sent + 3, "the transitions")
            again = [(each.state.value, each.blocks.engine.tolist(), each.follows) for each in fed.transitions[sent:]]
            assert sorted(again) == [
                ("cxl_pooled", [first], 3),
                ("in_transit", [first], 3),
                ("in_transit", [third], 3),
            ]
            assert again.index(("in_transit", [first], 3)) < again.index(("cxl_pooled", [first], 3))
            assert {each.pool_id for each in fed.transitions[sent:]} == {"p"}
            assert n_reads == [7]

        feeding(address_of(engine), act, read_pooled=read_pooled)


async def move_into_pool(fed: FeedUnderTest, engine: EngineDouble, block: int = 1000) -> None:
    """Publish a batch with a transition, which is sent first. block: the first of a prompt that begins with token 1."""
    engine.store(1, 3)
    await fed.until(lambda: fed.numbers() == [0] and fed.state is LIVE, "the blocks")
    engine.publish(["CxlStateTransition", 1, [block], "in_transit", "p", [7]])
    await fed.until(lambda: len(fed.transitions) == 1, "the transition")


def test_a_batch_is_sent_as_soon_as_kafka_has_its_transitions_although_nothing_follows() -> None:
    """Each of several batches in a row is sent, in order, and so is one that is the last for a long time."""
    block = 1000  # the name of the first block of the prompt that begins with token 1

    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await move_into_pool(fed, engine, block)
            await fed.until(lambda: fed.numbers() == [0, 1], "the only batch")
            n_batches = 40
            for n in range(n_batches):
                state = "cxl_pooled" if n % 2 else "in_transit"
                engine.publish(["CxlStateTransition", 2 + n, [block], state, "p", [7]])
            await fed.until(lambda: fed.numbers() == list(range(2 + n_batches)), "all batches")
            assert len(fed.transitions) == 1 + n_batches

        feeding(address_of(engine), act, acknowledged_after_s=0.03)


def test_a_feed_that_ends_sends_its_last_batch_and_then_the_end() -> None:
    """Both wait for the batch's transitions; without the batch, agents would never apply these."""

    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await move_into_pool(fed, engine)
            assert fed.numbers() == [0]
            await fed.feed.finish()
            fed.feed.retire("its source no longer has it")
            assert fed.numbers() == [0, 1]
            assert fed.batches[-1].body == Heartbeat("test", ENDED_LEASE_MS)

        feeding(address_of(engine), act, acknowledged_after_s=0.3)


def test_an_engine_that_exits_while_a_batch_waits_is_silent_once_the_batch_is_sent() -> None:
    """The heartbeat that ends its lease comes with the next turn of heartbeats."""

    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await move_into_pool(fed, engine)
            heartbeats = fed.feed._heartbeats
            heartbeats.heard = lambda: None  # type: ignore[method-assign] # the engine's double still answers
            heartbeats.engine_exited("a test")
            ended = Heartbeat("test", ENDED_LEASE_MS)
            assert all(batch.body != ended for batch in fed.batches)
            await fed.until(lambda: fed.batches[-1].body == ended, "the end of the lease")
            assert fed.numbers() == [0, 1]

        feeding(address_of(engine), act, settings=Settings(bridge_lease_s=1.5), acknowledged_after_s=0.3)


@pytest.mark.parametrize("first", [0, 5])
def test_without_a_replay_socket_a_feed_is_unproven_until_a_batch_arrives(first: int) -> None:
    """An idle engine may hold blocks that it reported before; its first batch shows whether it did."""
    with EngineDouble() as engine:
        for n in range(first):
            engine.store(1 + 100 * n)

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is UNPROVEN, "the incarnation to begin")
            await asyncio.sleep(1.0)
            assert {batch.feed for batch in fed.batches} == {UNPROVEN}
            engine.store(10_000)
            await fed.until(lambda: fed.numbers() == [first], "the batch")
            assert fed.state is LIVE
            assert fed.feed.counters.gap_batches_lost == first

        feeding(address_of(engine, replay=None), act)


@pytest.mark.parametrize("swapped", [False, True], ids=["nothing listens", "ports swapped"])
def test_a_feed_without_a_connection_stays_unproven(swapped: bool) -> None:
    """The engine's HTTP server answers, but no event can arrive: nothing says that the rank is empty."""
    with EngineDouble() as engine:
        engine.store(1)
        replay = engine.events if swapped else None
        events = engine.replay if swapped else f"tcp://127.0.0.1:{free_port()}"
        address = EngineAddress(WorkerId(7), engine.url, events, replay)

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: len(fed.batches) >= 2, "the incarnation to begin")
            await asyncio.sleep(2.0)
            assert {batch.feed for batch in fed.batches} == {UNPROVEN}

        batches = feeding(address, act)
    assert all(batch.sequence == BEFORE_FIRST for batch in batches)


def test_a_known_gap_is_stated_at_once_and_live_batches_are_not_held_up_by_silent_replays() -> None:
    """While the replay socket is silent, the rank is catching up; after the gap is filled, it is live at once."""
    with EngineDouble() as engine:
        engine.store(1)

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is LIVE, "the feed to be live")
            engine.stop_replays()
            engine.store(100, live=False)
            engine.store(200)
            await fed.until(lambda: fed.state is CATCHING_UP, "the gap to be stated")
            assert isinstance(fed.batches[-1].body, Heartbeat) and fed.numbers() == [0]
            engine.answer_replays()
            await fed.until(lambda: fed.state is LIVE, "the gap to be filled")
            assert fed.numbers() == [0, 1, 2]

        feeding(address_of(engine), act)


def test_batches_that_arrive_during_a_restatement_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks are complete to the batch before them, so no batch may come between, however long they take."""
    began, may_end = threading.Event(), threading.Event()
    restatement = RankWriter.restatement

    def slow(writer: RankWriter, restatement_id: int) -> list[RestatementChunk]:
        began.set()
        assert may_end.wait(PATIENCE_S)
        return restatement(writer, restatement_id)

    monkeypatch.setattr(RankWriter, "restatement", slow)
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            engine.store(1)
            await fed.until(lambda: fed.state is LIVE and fed.numbers() == [0], "the first batch")
            incarnation = fed.batches[-1].incarnation
            fed.feed.request_restatement(ResyncRequest(fed.feed.rank, incarnation, 0, 1, "a test", 0))
            await fed.until(began.is_set, "the restatement to begin")
            for n in range(1, 20):
                engine.store(1 + 100 * n)
            await asyncio.sleep(0.3)
            assert fed.numbers() == [0]
            may_end.set()
            await fed.until(lambda: fed.numbers() == list(range(20)), "the batches")

        batches = feeding(address_of(engine), act)
    kinds = [batch.body for batch in batches if not isinstance(batch.body, Heartbeat)]
    at = next(n for n, body in enumerate(kinds) if isinstance(body, RestatementChunk))
    assert at == 2 and all(isinstance(body, EngineEvents) for body in kinds[at + 1 :])  # after the start and batch 0


def test_a_batch_that_cannot_be_published_on_arrival_ends_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its number would be missing on Kafka, although the bridge has taken it."""
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            engine.store(1)
            await fed.until(lambda: fed.state is LIVE and fed.numbers() == [0], "the first batch")

            def refuse(*_: object, **__: object) -> None:
                raise KafkaException("a test")

            monkeypatch.setattr(RankWriter, "write", refuse)
            engine.store(100)
            assert fed.running is not None
            with pytest.raises(BaseExceptionGroup) as ended:
                await asyncio.wait_for(fed.running, PATIENCE_S)
            assert ended.group_contains(KafkaException)

        feeding(address_of(engine), act, may_end=True)


def test_batches_are_published_while_the_http_server_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection shows that they come from the same process, so nothing has to be waited for."""
    monkeypatch.setattr(evidence_module, "HTTP_TIMEOUT_S", 10 * PATIENCE_S)
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is LIVE, "the feed to be live")
            engine.answers.clear()
            await asyncio.sleep(1.5 * feed_machine.INCARNATION_CHECK_S)  # the engine has been asked in the meantime
            for n in range(50):
                engine.store(1 + 100 * n)
            await fed.until(lambda: fed.numbers() == list(range(50)), "the batches")
            assert fed.state is LIVE

        feeding(address_of(engine), act)


@pytest.mark.parametrize("replay", ["", None], ids=["replay", "no replay"])
@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "refuses"])
def test_an_engine_whose_http_server_never_answers_is_fed_from_its_events(
    replay: str | None, hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Events prove that it is running. It is fed once other evidence was waited for, with one warning."""
    monkeypatch.setattr(feed_machine, "FIRST_EVIDENCE_WAIT_S", 1.0)
    with EngineDouble() as engine:
        engine.answers.clear()
        address = address_of(engine, replay=replay)
        if not hangs:
            address = replace(address, url=f"http://127.0.0.1:{free_port()}")

        async def act(fed: FeedUnderTest) -> None:
            while not fed.batches:
                engine.store(101 + 100 * engine.sequence)
                await asyncio.sleep(0.1)
            await fed.until(lambda: fed.state is LIVE and fed.numbers()[-1:] == [engine.sequence], "the batches")
            engine.store(1_000_000)
            await fed.until(lambda: fed.numbers()[-1] == engine.sequence, "a further batch")

        batches = feeding(address, act)
    assert len({batch.incarnation for batch in batches}) == 1
    warnings = [record for record in caplog.records if "from its events alone" in record.getMessage()]
    assert len(warnings) == 1


def test_an_idle_engine_whose_http_server_hangs_is_fed_from_its_replay_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it published before the bridge was connected is found without a later event."""
    monkeypatch.setattr(evidence_module, "HTTP_TIMEOUT_S", 0.5)
    with EngineDouble() as engine:
        engine.answers.clear()
        engine.store(1)
        engine.store(100)

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is LIVE, "the feed to be live")
            assert fed.numbers() == [0, 1]

        feeding(address_of(engine), act)


def test_after_a_broken_connection_only_proof_of_the_same_process_continues_the_incarnation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a start time and a replay socket, batches of another connection begin an incarnation."""
    monkeypatch.setattr(feed_machine, "EVIDENCE_WAIT_S", 1.0)
    with EngineDouble(reports_start=False) as engine:

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is UNPROVEN, "the incarnation to begin")
            await asyncio.sleep(0.5)
            engine.store(1)
            engine.store(100)
            await fed.until(lambda: fed.numbers() == [0, 1], "two batches")
            first = fed.batches[-1].incarnation
            engine.restart()
            engine.store(1000)
            engine.store(1100)  # neither may have arrived: the connection was not complete
            await fed.until(lambda: fed.state is UNPROVEN, "the broken connection to be stated")
            await fed.until(lambda: fed.batches[-1].incarnation > first, "another incarnation")
            await asyncio.sleep(0.5)
            engine.store(1200)  # its number follows that of the last batch published
            await fed.until(lambda: fed.numbers()[-1] == 2, "the third batch")
            assert fed.batches[-1].incarnation > first

        feeding(address_of(engine, replay=None), act)


def test_answers_of_a_proxy_are_no_sign_of_life() -> None:
    """A proxy answers 502 while the engine is away; the rank's heartbeats end with its lease."""
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is UNPROVEN, "the incarnation to begin")
            await asyncio.sleep(1.5)
            n_beats = len(fed.batches)
            assert n_beats >= 4  # its metrics answer
            engine.status = 502
            await asyncio.sleep(3.0)
            n_beats = len(fed.batches)
            await asyncio.sleep(1.5)
            assert len(fed.batches) == n_beats
            engine.status = 200
            await fed.until(lambda: len(fed.batches) > n_beats, "heartbeats")

        address = EngineAddress(WorkerId(7), engine.url, f"tcp://127.0.0.1:{free_port()}")
        # Heartbeats continue for one lease after the engine was heard from, and the metrics are read every second.
        feeding(address, act, Settings(bridge_lease_s=1.5))


def test_requests_without_events_are_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the likely causes; an engine that has reported an event is not suspected."""
    monkeypatch.setattr(missing_events, "MISSED_AFTER_S", 0.0)
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            for _ in range(10):
                fed.feed.note_requests_running()

        feeding(address_of(engine), act)
        warnings = [record.getMessage() for record in caplog.records if "requests are running" in record.getMessage()]
        assert len(warnings) == 1
        assert "enable_kv_cache_events" in warnings[0] and "swapped" in warnings[0] and engine.events in warnings[0]
        caplog.clear()
        engine.store(1)

        async def act_with_events(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.numbers() == [0], "the batch")
            await act(fed)

        feeding(address_of(engine), act_with_events)
        assert not [record for record in caplog.records if "requests are running" in record.getMessage()]


def test_an_engine_whose_batches_cannot_be_used_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each batch is a dead letter, and the first one of each reason is logged; further ones once a minute."""
    with EngineDouble() as engine:

        async def act(fed: FeedUnderTest) -> None:
            await fed.until(lambda: fed.state is LIVE, "the feed to be live")
            for n in range(100):
                engine.publish(["BlockStored", [n], None, [], 16, None, "GPU"])
            engine.send(b"\xc1")
            await fed.until(lambda: fed.feed.counters.dead_letters == 101, "a dead letter of each batch")

        feeding(address_of(engine), act)
    lines = [record.message for record in caplog.records if "dead letter from rank" in record.message]
    assert len(lines) == 2
    assert "0 tokens for 1 blocks" in lines[0]
