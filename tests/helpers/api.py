"""The HTTP API for tests: a client, two routers, and a stand-in for the agents.

The stand-in writes the records that agents would write to the changelog, so that routers are tested without Faust. A
router is a replica of topics, and it does not matter which process wrote them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import DpRank, Epoch, HashArray, Incarnation, RankId, Tier, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.kafka.clients import ensure_topics, partition_of, producer
from streams.lab.engines.held_chains import runs_of_chain
from streams.lab.kafka.ports import free_port
from streams.lab.stack import READY_TIMEOUT_S, is_ready
from streams.process.waiting import wait_for
from streams.router_api.processes.server import Door, serve
from streams.settings import Settings
from streams.tables.records import (
    PARTITION_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    PartitionRecord,
    SourceProgress,
    encode_partition,
    encode_progress,
    encode_run,
)
from streams.topics import topics
from tests.helpers.background import repeated
from tests.helpers.openapi import check_answer

#: Long enough for a busy machine; only a hang takes longer.
PATIENCE_S = 30.0

#: Settings of the fleet's routers.
BLOCK_SIZE = 16
TOKENS_MAX = 4096
BODY_BYTES_MAX = 64 * 1024

#: Four blocks of a prompt.
TOKENS = list(range(100, 100 + 4 * BLOCK_SIZE))

#: Partitions by the state of their owner: it is running, never existed, has become silent, or lags.
LIVE, NEVER, SILENT, BEHIND = range(4)

JSON = "application/json"
OCTETS = "application/octet-stream"

#: The offset that the stand-in says is applied, beyond any that a test writes, so that it never lags by its offset.
APPLIED_OFFSET = 1_000_000

#: How often the stand-in writes the partition records that it keeps fresh; owners do so at least every second.
KEEP_FRESH_S = 0.25


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the API."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def refused(self, status: int, code: str) -> str:
        """Check that this is an error in the shape of all errors; return its message."""
        assert self.status == status, self.body
        assert self.headers["content-type"].partition(";")[0] == JSON
        assert ("retry-after" in self.headers) == (status == 503)
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"code", "message", "detail"}
        assert error["code"] == code
        assert isinstance(error["detail"], dict)
        message: str = error["message"]
        assert message
        return message

    def given(self, status: int = 200) -> Any:
        """Check the status; return the body."""
        assert self.status == status, self.body
        return self.json


class Api:
    """One router's API. token: sent with each call. tls: for https."""

    def __init__(self, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self._address = urlsplit(url).netloc
        self._own_headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._tls = tls

    def _connection(self) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._address, timeout=PATIENCE_S)
        return HTTPSConnection(self._address, timeout=PATIENCE_S, context=self._tls)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str | None = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send bytes as they are and everything else as JSON. Check that the OpenAPI document allows the answer."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        typed = {} if content_type is None or raw is None else {"Content-Type": content_type}
        sent = {**self._own_headers, **typed, **(headers or {})}
        with closing(self._connection()) as connection:
            connection.request(method, path, raw, sent)
            response = connection.getresponse()
            answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        if method != "HEAD":
            check_answer(method, path, answer.status, answer.headers["content-type"], answer.body)
        return answer

    def get(self, path: str) -> Any:
        return self.call("GET", path).given()

    def route(self, **asked: Any) -> dict[str, Any]:
        """Route a request and return the answer."""
        answer: dict[str, Any] = self.call("POST", "/route", asked).given()
        return answer

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Route without booking, with every candidate's terms."""
        return self.route(**asked, update_states=False, explain=True)

    def loads(self, worker_ids: Sequence[int]) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Active prefill tokens, decode blocks and requests of these workers' ranks."""
        return {
            (row["worker_id"], row["dp_rank"]): (
                row["active_prefill_tokens"],
                row["active_decode_blocks"],
                row["active_requests"],
            )
            for row in self.get("/loads")["loads"]
            if row["worker_id"] in worker_ids
        }

    def workers(self) -> dict[int, dict[str, Any]]:
        """The registry by worker id."""
        return {row["worker_id"]: row for row in self.get("/workers")["workers"]}


@contextmanager
def served(settings: Settings, door: Door | None = None) -> Iterator[Api]:
    """A router inside this process, on a free port: ready when the block begins, stopped when it ends.

    door: gets the router.
    """
    own = replace(settings, port=free_port())
    ensure_topics(own, topics(own).all())
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(own, door=door))

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    thread = threading.Thread(target=run, name=f"router-{own.port}")
    thread.start()
    api = Api(f"http://{own.host}:{own.port}")
    try:
        wait_for(lambda: task.done() or is_ready(api.url), READY_TIMEOUT_S, "the router to be ready")
        if task.done():
            task.result()
        yield api
    finally:
        if not task.done():
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


class Agents:
    """Writes a scope's index changelog as its agents would. fresh: partitions whose records `keeping_fresh` writes."""

    def __init__(self, settings: Settings, fresh: Sequence[int]) -> None:
        self.settings = settings
        self.fresh = fresh
        self._ids = itertools.count(1000)
        self._kafka = producer(settings)

    @cached_property
    def _offsets(self) -> dict[str, tuple[str, int]]:
        """By topic that an owner reads or writes, its id, which a router compares with the broker's, and an offset."""
        names = topics(self.settings)
        sources, changelogs = (names.kv_events, names.cxl_events), (names.index_changelog, names.cxl_changelog)
        states = ensure_topics(self.settings, (*sources, *changelogs))
        applied = dict.fromkeys((spec.name for spec in sources), APPLIED_OFFSET)
        return {name: (state.topic_id, applied.get(name, -1)) for name, state in states.items()}

    def worker_ids(self, n: int, partition: int) -> list[int]:
        """Unused worker ids that all belong to one partition."""
        ours = (each for each in self._ids if partition_of(WorkerId(each), self.settings.partitions) == partition)
        return list(itertools.islice(ours, n))

    def write(self, rank: RankId, key: bytes, value: bytes | None) -> None:
        self._send(partition_of(rank.worker_id, self.settings.partitions), key, value)

    def progress(self, rank: RankId, health: Health = Health.EXACT, incarnation: int = 1, generation: int = 0) -> None:
        epoch = Epoch(Incarnation(incarnation), generation)
        progress = Progress(rank, epoch, 0, health=health, model="", block_size=16)
        self.write(rank, PROGRESS_KEY.pack(rank), encode_progress(progress))

    def hold(
        self,
        rank: RankId,
        tokens: Sequence[int],
        tier: Tier = Tier.DEVICE,
        absent: Sequence[int] = (),
        incarnation: int = 1,
    ) -> HashArray:
        """Make a rank hold the full blocks of `tokens`, except those at the positions `absent`.

        Returns the sequence hashes of all of them.
        """
        local = local_hashes(list(tokens), self.settings.block_size)
        sequence = sequence_hashes(local)
        epoch = Epoch(Incarnation(incarnation), 0)
        for run in runs_of_chain(rank, local, epoch=epoch, tier=tier, absent=absent):
            self.write(rank, RUN_KEY.pack(run.key), encode_run(run))
        return sequence

    def state_partition(self, partition: int, behind_ms: int = 0) -> None:
        """Write a partition record, as the partition's owner does at least every second."""
        sources = [
            SourceProgress(name, topic_id, offset, 0, offset + 1, behind_ms)
            for name, (topic_id, offset) in self._offsets.items()
        ]
        record = PartitionRecord(partition, 0, "tests", tuple(sources))
        self._send(partition, PARTITION_KEY.pack(partition), encode_partition(record))

    @contextmanager
    def keeping_fresh(self) -> Iterator[None]:
        """Keep an owner without lag for the partitions in `fresh` while the block runs."""

        def state_all() -> None:
            for partition in self.fresh:
                self.state_partition(partition)

        with repeated(state_all, KEEP_FRESH_S):
            yield

    def _send(self, partition: int, key: bytes, value: bytes | None) -> None:
        self._kafka.produce(topics(self.settings).index_changelog.name, key=key, value=value, partition=partition)
        assert self._kafka.flush(PATIENCE_S) == 0


def rank_of(worker_id: int, dp_rank: int = 0) -> RankId:
    return RankId(WorkerId(worker_id), DpRank(dp_rank))


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens as u32 little-endian."""
    return np.array(tokens, dtype="<u4").tobytes()


@dataclass(slots=True)
class Fleet:
    """Two routers of one scope, and the stand-in for its agents."""

    settings: Settings
    main: Api
    peer: Api
    agents: Agents
    _models: Iterator[int]

    def model(self) -> str:
        """Return a model that no other test uses."""
        return f"model-{next(self._models)}"

    def register(self, model: str, n: int = 1, partition: int = LIVE, **body: Any) -> list[int]:
        """Register n workers of a model with both routers; return their ids, ascending."""
        ids = self.agents.worker_ids(n, partition)
        for worker_id in ids:
            self.put(worker_id, model, **body)
        self.wait(lambda: set(ids) <= self.peer.workers().keys(), "the peer to know the workers")
        return ids

    def put(self, worker_id: int, model: str, **body: Any) -> dict[str, Any]:
        asked = {"url": f"http://engine-{worker_id}:8000", "model": model, "block_size": BLOCK_SIZE, **body}
        answer: dict[str, Any] = self.main.call("PUT", f"/workers/{worker_id}", asked).given()
        return answer

    def holds(self, worker_id: int, n_blocks: int) -> None:
        """Wait until both routers have n_blocks blocks of a worker."""

        def known(api: Api) -> int:
            ranks = api.get("/state")["ranks"]
            return sum(rank["blocks"] for rank in ranks if rank["worker_id"] == worker_id)

        self.wait(lambda: known(self.main) == known(self.peer) == n_blocks, f"{n_blocks} blocks of {worker_id}")

    def same_loads(self, worker_ids: Sequence[int], requests: int) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Wait until both routers have the same loads, with this number of requests; return the loads."""

        def same() -> bool:
            here = self.main.loads(worker_ids)
            return here == self.peer.loads(worker_ids) and sum(load[2] for load in here.values()) == requests

        self.wait(same, f"the same loads of {requests} requests on both routers")
        return self.main.loads(worker_ids)

    @staticmethod
    def wait(condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, PATIENCE_S, what)


def metrics(api: Api) -> dict[str, float]:
    """Return every sample of /metrics. The key is its name, then the values of its labels in order of the labels."""
    answer = api.call("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        "/".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
        if "le" not in sample.labels
    }
