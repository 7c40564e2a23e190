"""The registry without Kafka: cordons, block sizes of models, and the bodies of PUT /workers."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streams.core.events import BEFORE_FIRST, BlocksStored, EngineBatch, EngineEvents, Heartbeat
from streams.core.ids import Epoch, Incarnation, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.eligibility import FilterReason, WorkerFilter
from streams.core.workers import BridgeLease, Cordon, Role, ServedModel, Worker, WorkerState
from streams.engines.block_size import EngineBlockSize
from streams.engines.metrics import parse_block_size
from streams.errors import BadRecord, BlockSizeContradicted, InvalidRequest, NoEligibleWorker
from streams.kafka.clients import worker_key
from streams.kafka.records import CORDONS, MODELS, encode_batch, encode_worker
from streams.router_api.knowledge.view import View
from streams.router_api.messages.requests import parse_route_query, parse_worker
from streams.settings import Settings
from streams.tables.index_reducer import IndexReducer
from streams.tables.records import PROGRESS_KEY, encode_progress
from streams.tables.reducer import SourceRecord
from tests.helpers.api import TOKENS, packed
from tests.helpers.routers import ask, router_of
from tests.helpers.views import BLOCK_SIZE, LOCAL, Clock, hold, rank, register, view_of

EVERY_RANK = WorkerFilter("m", block_size=BLOCK_SIZE)


def cordon(view: View, worker_id: int, *, ends: bool = False) -> None:
    key = CORDONS.keys.pack(WorkerId(worker_id))
    view.fold_worker(key, None if ends else CORDONS.encode(Cordon(WorkerId(worker_id), 5)))


def serve(view: View, block_size: int | None, model: str = "m") -> None:
    value = None if block_size is None else MODELS.encode(ServedModel(model, block_size, "bridge host:1", 5))
    view.fold_worker(MODELS.keys.pack(model), value)


def progress(view: View, worker_id: int, block_size: int, health: Health = Health.EXACT) -> None:
    record = Progress(rank(worker_id), Epoch(Incarnation(1), 0), 3, health=health, model="m", block_size=block_size)
    view.fold_index(PROGRESS_KEY.pack(record.rank), encode_progress(record))


# -- cordons -----------------------------------------------------------------------------------------------------------


def test_a_cordon_outlives_registrations_and_comes_in_any_order() -> None:
    """A cordon is a record of its own: neither a registration before or after it nor a removal ends it."""
    view = view_of(Clock())
    cordon(view, 1)  # compaction may leave it before the worker's own record
    register(view, 1)
    register(view, 2)
    assert view.fleet.eligible(EVERY_RANK) == (rank(2),)
    register(view, 1, url="http://again", taints=("x",))
    assert (view.fleet.workers[WorkerId(1)].state, view.fleet.workers[WorkerId(1)].url) == (
        WorkerState.CORDONED,
        "http://again",
    )
    view.fold_worker(b"1", None)
    register(view, 1)
    assert view.fleet.refusals(EVERY_RANK) == {FilterReason.CORDONED: 1}
    cordon(view, 1, ends=True)
    assert view.fleet.eligible(EVERY_RANK) == (rank(1), rank(2))
    cordon(view, 2)
    assert view.fleet.eligible(EVERY_RANK) == (rank(1),)
    assert view.rank_counts().cordoned == 1


def test_a_cordon_of_an_earlier_version_is_still_read() -> None:
    """Earlier versions wrote the cordon into the worker's own record."""
    view = view_of(Clock())
    register(view, 1, state=WorkerState.CORDONED)
    assert view.fleet.eligible(EVERY_RANK) == ()
    assert not view.fleet.has_cordon(WorkerId(1))


def test_the_registration_is_kept_without_the_cordon() -> None:
    """What a router writes back after a cordon does not contain it."""
    view = view_of(Clock())
    register(view, 1)
    cordon(view, 1)
    kept = view.fleet.registration(WorkerId(1))
    assert kept is not None and kept.state is WorkerState.ACTIVE


@pytest.mark.parametrize("key", [b"cordon/", b"cordon/x", b"cordon/01", b"cordon/-1", b"cordon/" + b"9" * 30])
def test_a_bad_key_of_a_cordon_is_refused(key: bytes) -> None:
    """A cordon's key ends with the worker's id in decimal, as the worker's own key has it."""
    view = view_of(Clock())
    with pytest.raises(BadRecord):
        view.fold_worker(key, CORDONS.encode(Cordon(WorkerId(1))))
    with pytest.raises(BadRecord):
        view.fold_worker(key, None)
    with pytest.raises(BadRecord, match="not that of the cordon"):
        view.fold_worker(b"cordon/2", CORDONS.encode(Cordon(WorkerId(1))))


# -- block sizes of models ---------------------------------------------------------------------------------------------


def test_the_first_record_of_a_model_wins_until_its_tombstone(caplog: pytest.LogCaptureFixture) -> None:
    """A later record with another size has no effect, and a model that agrees with the settings is served."""
    view = view_of(Clock())
    serve(view, 16)
    serve(view, 32)
    assert view.fleet.block_size_of("m") == 16
    assert not caplog.records
    serve(view, None)
    serve(view, 32)
    with pytest.raises(BlockSizeContradicted):
        view.fleet.block_size_of("m")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_router_refuses_a_model_whose_record_contradicts_its_settings() -> None:
    """Requests for that model are refused with both sizes; other models are served."""
    router = router_of(1)
    assert ask(router, update_states=False)["worker_id"] == 1
    serve(router.view, 32)
    with pytest.raises(BlockSizeContradicted, match=r"blocks of 16 tokens.* has blocks of 32 \(written by bridge host"):
        ask(router)
    with pytest.raises(BlockSizeContradicted):
        router.potential(parse_route_query({}), packed(TOKENS))
    with pytest.raises(BlockSizeContradicted):
        router.view.fleet.check_block_sizes()
    assert router.view.fleet.ranks_of_wrong_block_size(router.view.fleet.workers[WorkerId(1)]) == [0]
    assert router.view.rank_counts().wrong_block_size == 1
    register(router.view, 2, model="other")
    assert ask(router, model="other")["worker_id"] == 2


def test_an_engine_with_another_block_size_is_no_candidate() -> None:
    """A rank whose worker, or whose events, have another block size than the scope is refused with its own reason."""
    router = router_of(3)
    view = router.view
    register(view, 1, block_size=32)
    progress(view, 2, 32)
    hold(view, rank(3), LOCAL)
    assert ask(router, update_states=False)["worker_id"] == 3
    assert view.fleet.refusals(EVERY_RANK) == {FilterReason.WRONG_BLOCK_SIZE: 2}
    assert [view.fleet.ranks_of_wrong_block_size(view.fleet.workers[WorkerId(each)]) for each in (1, 2, 3)] == [
        [0],
        [0],
        [],
    ]
    assert view.rank_counts().wrong_block_size == 2
    with pytest.raises(NoEligibleWorker, match="wrong_block_size 2"):
        ask(router, allowed_worker_ids="1,2", excluded_worker_ids="3")
    view.fold_worker(b"3", None)
    with pytest.raises(NoEligibleWorker, match="wrong_block_size_dp_ranks"):
        ask(router)
    progress(view, 2, 16)
    assert ask(router, update_states=False)["worker_id"] == 2


def test_a_removed_rank_has_no_block_size() -> None:
    """What a removed rank last reported does not keep its worker from being used when it is registered again."""
    view = view_of(Clock())
    register(view, 1)
    progress(view, 1, 32, Health.REMOVED)
    assert view.fleet.eligible(EVERY_RANK) == (rank(1),)


# -- bodies of PUT /workers --------------------------------------------------------------------------------------------

REGISTERED = Worker(
    WorkerId(9),
    "http://old",
    "m",
    16,
    dp_size=2,
    role=Role.DECODE,
    kv_total_blocks=7,
    taints=("a",),
    lease=BridgeLease("b", 3, 6000, 5),
)


def parsed(known: Worker | None = None, **fields: Any) -> Worker:
    body = {"url": "http://new:8000/v1", "model": "m", "block_size": 16, **fields}
    return parse_worker(WorkerId(9), json.dumps(body).encode(), 5, known)


def test_a_put_keeps_the_fields_that_it_does_not_name() -> None:
    """A registered worker keeps what the body leaves out; null clears a field, and a new worker has defaults."""
    assert parsed(REGISTERED) == replace(REGISTERED, url="http://new:8000/v1", registered_at_ms=5)
    named = parsed(REGISTERED, taints=["b"], kv_total_blocks=None, role="both")
    assert (named.taints, named.kv_total_blocks, named.role, named.dp_size) == (("b",), None, Role.BOTH, 2)
    listed = parsed(REGISTERED, lora_names=["x", "y"])
    assert (listed.lora_names, parsed(listed).lora_names, parsed(listed, lora_names=None).lora_names) == (
        ("x", "y"),
        ("x", "y"),
        None,
    )
    assert parsed() == Worker(WorkerId(9), "http://new:8000/v1", "m", 16, registered_at_ms=5)


@pytest.mark.parametrize(
    "url",
    [
        "not a url",
        "engine:8000",
        "//engine",
        "http://",
        "http:///path",
        "http://:8000",
        "ftp://engine",
        "file:///etc/passwd",
        "http://engine\n",
        "http://engine\r\nX: y",
        "http://en gine",
        "http://engine\u00a0",
        "http://engine/\x00",
        "http://engine/\u202e",
        "http://engine:x",
        "http://engine:99999",
        "http://engine:0",
        "http://[::1",
    ],
)
def test_an_url_that_no_client_can_use_is_refused(url: str) -> None:
    """The address must be http or https with a host, without whitespace and control characters."""
    with pytest.raises(InvalidRequest, match="url is"):
        parsed(url=url)


@pytest.mark.parametrize(
    "url", ["http://engine", "https://engine:8443/v1", "HTTP://10.0.0.1:1", "http://[::1]:8000", "http://ü.example"]
)
def test_an_url_that_a_client_can_use_is_kept_as_it_is(url: str) -> None:
    """Whatever is a URL of an HTTP server is accepted."""
    assert parsed(url=url).url == url


def test_addresses_for_people_have_no_control_characters() -> None:
    """Endpoints are only shown, but a line break in them would fake a line of a log."""
    with pytest.raises(InvalidRequest, match="events_endpoint"):
        parsed(events_endpoint="tcp://e:1\nfake")


# -- an engine's own block size ----------------------------------------------------------------------------------------


def test_an_engines_block_size_is_that_of_its_events_and_else_that_of_its_page() -> None:
    """Events decide until a restart. A page counts unless its size divides the scope's, as with context parallelism."""
    size = EngineBlockSize(16)
    assert (size.size, size.is_wrong) == (16, False)
    size.on_page(None)
    size.on_page(8)
    assert size.size == 16
    size.on_page(32)
    assert (size.size, size.is_wrong) == (32, True)
    size.on_stored(16)
    assert not size.is_wrong
    size.on_stored(8)
    assert size.size == 8
    size.on_incarnation(page_is_read=True)
    assert size.size == 32
    size.on_incarnation(page_is_read=False)
    assert size.size == 16


@pytest.mark.parametrize(
    ("page", "size"),
    [
        (b'vllm:cache_config_info{block_size="32",engine="0"} 1.0\n', 32),
        (b'# HELP x\nsglang:cache_config_info{page_size="64",num_pages="9"} 1.0\n', 64),
        (b'vllm:cache_config_info{block_size="None"} 1.0\n', None),
        (b'vllm:cache_config_info{block_size="0"} 1.0\n', None),
        (b'vllm:cache_config_info{engine="0"} 1.0\n', None),
        (b"vllm:cache_config_info{block_size= 1.0\n", None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_the_block_size_of_a_page(page: bytes, size: int | None) -> None:
    """vLLM and SGLang report the size of their blocks as a label; anything else is no size."""
    assert parse_block_size(page) == size


# -- agents ------------------------------------------------------------------------------------------------------------

SETTINGS = Settings(partitions=1)


def batch(sequence: int, block_size: int, incarnation: int = 1, body: Any = None) -> EngineBatch:
    if body is None:
        hashes = np.array([100 * sequence + 1, 100 * sequence + 2], dtype=np.uint64)
        body = EngineEvents((BlocksStored(None, hashes, hashes),))
    return EngineBatch(rank(1), "m", block_size, Incarnation(incarnation), sequence, 0, 0, body)


class Reduced:
    """An IndexReducer, fed with batches."""

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter()
        self.reducer = IndexReducer(SETTINGS, self.verdicts)
        self.dead: list[str] = []

    def take(self, *batches: EngineBatch) -> None:
        for each in batches:
            raw = encode_batch(each)
            record = SourceRecord("kv-events", 0, 0, 0, worker_key(each.rank.worker_id), raw, ())
            (decoded,) = self.reducer.decode([record])
            try:
                self.reducer.apply(record, decoded)
            except BadRecord as exc:
                self.dead.append(exc.reason)

    @property
    def progress(self) -> Progress:
        return self.reducer.holdings.progress[rank(1)]


def test_a_new_incarnation_with_another_block_size_ends_the_blocks_of_the_former_one() -> None:
    """A publisher was restarted with another size: its blocks are refused, and the former ones are gone."""
    agent = Reduced()
    agent.take(batch(BEFORE_FIRST, 16, body=EngineEvents(())), batch(0, 16))
    agent.take(batch(BEFORE_FIRST, 32, 2, EngineEvents(())))
    assert (agent.progress.block_size, agent.progress.n_blocks, agent.progress.epoch.incarnation) == (32, 0, 2)
    assert not agent.dead
    agent.take(*(batch(sequence, 32, 2) for sequence in range(5)), batch(4, 32, 2, Heartbeat("b", 6000)))
    assert (agent.progress.health, agent.progress.block_size) == (Health.DEGRADED, 32)
    assert agent.dead == ["wrong_block_size"]  # one for the incarnation; the others are counted
    assert agent.verdicts["wrong_block_size"] == 5
    agent.take(batch(0, 32, 1))
    assert agent.verdicts["stale"] == 1
    agent.take(batch(0, 32, 3))  # a writer that does not announce its incarnation
    assert (agent.progress.epoch.incarnation, len(agent.dead)) == (3, 2)
    agent.take(batch(BEFORE_FIRST, 16, 4, EngineEvents(())), batch(0, 16, 4))
    assert (agent.progress.health, agent.progress.block_size) == (Health.EXACT, 16)


def test_a_batch_of_another_size_within_an_incarnation_degrades_the_rank() -> None:
    """The rank lacks the batch's events, whose number stays missing."""
    agent = Reduced()
    agent.take(batch(0, 16), batch(1, 32))
    assert (agent.progress.health, agent.progress.sequence) == (Health.DEGRADED, 0)
    agent.take(batch(2, 16))
    assert (agent.progress.n_gaps, agent.progress.block_size) == (1, 16)


def test_worker_records_round_trip_with_their_new_neighbours() -> None:
    """The three kinds of records have keys that no other kind has."""
    view = View(Settings(), Clock())
    serve(view, 16)
    cordon(view, 3)
    view.fold_worker(b"3", encode_worker(replace(REGISTERED, worker_id=WorkerId(3))))
    assert (view.fleet.has_cordon(WorkerId(3)), view.fleet.served_model("m") is not None, list(view.fleet.workers)) == (
        True,
        True,
        [3],
    )
