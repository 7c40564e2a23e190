"""A fleet of real processes for tests of trust, and a client that watches what the router answers.

What lives here: starting bridges and engines for one test, and recording answers with their times. What must not: the
faults themselves (tests/trust).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from streams.core.events import EngineBatch, Heartbeat
from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.kafka.clients import partition_of, producer, worker_key
from streams.kafka.records import encode_batch
from streams.lab.processes import Child, Children
from streams.lab.stack import RouterProcess, Stack, get_json
from streams.process.waiting import wait_for
from streams.settings import as_environ
from streams.topics import topics
from tests.helpers.api import Answer, Api
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble

#: Time between two requests of a watcher.
WATCH_EVERY_S = 0.01

#: How long a test waits for something that takes well under a second on a quiet machine.
PATIENCE_S = 30.0

#: Longer than any test, so that a forged heartbeat does not make the rank silent.
LEASE_MS = 60_000

_names = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of POST /route, with the monotonic times before it was sent and after it arrived."""

    sent_s: float
    received_s: float
    answer: dict[str, Any]

    @property
    def mode(self) -> str:
        """The trust in the answer as a whole."""
        return str(self.answer["mode"])

    @property
    def overlap(self) -> int:
        """Leading blocks of the request that the chosen rank holds, as answered."""
        return int(self.answer["overlap_blocks"])


@dataclass
class Watch:
    """What a watcher has received so far. failed: requests that were refused, or that no server answered."""

    samples: list[Sample] = field(default_factory=list)
    failed: int = 0

    def wrong_while_exact(self, truth: int) -> list[Sample]:
        """The answers that claim to be exact, and whose overlap is not `truth`."""
        return [sample for sample in self.samples if sample.mode == "exact" and sample.overlap != truth]


class TrustFleet:
    """One worker with its router, and what a test adds to it. Models and worker ids are unique to each test."""

    def __init__(self, stack: Stack, worker: RouterProcess, children: Children) -> None:
        self.stack = stack
        self.worker = worker
        self.api = Api(worker.url)
        self._children = children

    def model(self) -> str:
        """A model that no other test uses."""
        return f"m{next(_names)}"

    def worker_id(self) -> int:
        """A worker id that no other test uses."""
        return next(_names)

    def bridge(self, *engines: str, env: dict[str, str] | None = None) -> Child:
        """Start a bridge for engines, each written as the option `--engine` has it; the test's end stops it."""
        arguments = ["-m", "streams.cli", "bridge"]
        for engine in engines:
            arguments += ["--engine", engine]
        log = self.stack.directory / "logs" / f"bridge-{next(_names)}.log"
        child = Child("bridge", arguments, log, {**as_environ(self.stack.settings), **(env or {})})
        return self._children.add(child).start()

    def route(self, model: str, token_ids: Sequence[int], **asked: Any) -> dict[str, Any]:
        """Route a request without booking it, and return the answer with every candidate's terms."""
        return self.api.ask(model=model, token_ids=list(token_ids), **asked)

    def answered(self, model: str, token_ids: Sequence[int], **asked: Any) -> Answer:
        """Like `route`, but return the answer whatever its status."""
        body = {"model": model, "token_ids": list(token_ids), "update_states": False, "explain": True, **asked}
        return self.api.call("POST", "/route", body)

    def wait_answer(
        self,
        model: str,
        token_ids: Sequence[int],
        condition: Callable[[dict[str, Any]], bool],
        what: str,
        **asked: Any,
    ) -> dict[str, Any]:
        """Wait until an answer meets a condition, and return it. Refused requests count as not meeting it."""
        last: dict[str, Any] = {}

        def met() -> bool:
            answer = self.answered(model, token_ids, **asked)
            if answer.status != 200:
                return False
            last.clear()
            last.update(answer.json)
            return condition(last)

        wait_for(met, PATIENCE_S, what)
        return last

    def wait_exact(self, model: str, token_ids: Sequence[int], n_blocks: int) -> dict[str, Any]:
        """Wait until an answer is exact with this overlap."""
        return self.wait_answer(
            model,
            token_ids,
            lambda answer: (answer["overlap_blocks"], answer["mode"]) == (n_blocks, "exact"),
            f"an exact answer with {n_blocks} blocks",
        )

    @contextmanager
    def watching(self, model: str, token_ids: Sequence[int], url: str | None = None) -> Iterator[Watch]:
        """Ask for the same prompt again and again while the block runs, and record every answer."""
        watch, stopping = Watch(), threading.Event()
        api = Api(url or self.worker.url)
        body = {"model": model, "token_ids": list(token_ids), "update_states": False}

        def run() -> None:
            while not stopping.wait(WATCH_EVERY_S):
                sent_s = time.monotonic()
                try:
                    answer = api.call("POST", "/route", body)
                except (OSError, HTTPException):
                    watch.failed += 1
                    continue
                if answer.status == 200:
                    watch.samples.append(Sample(sent_s, time.monotonic(), answer.json))
                else:
                    watch.failed += 1

        thread = threading.Thread(target=run, name="watch")
        thread.start()
        try:
            yield watch
        finally:
            stopping.set()
            thread.join()


def engine_option(worker_id: int, engine: EngineDouble, **more: str) -> str:
    """An engine as the option `--engine` has it; `more` adds parts or replaces them, and "" removes one."""
    parts = {"id": str(worker_id), "url": engine.url, "events": engine.events, "replay": engine.replay, **more}
    return ",".join(f"{name}={value}" for name, value in parts.items() if value)


def state_of(fleet: TrustFleet, worker_id: int) -> dict[str, Any]:
    """Return what the router has of a worker's rank."""
    (state,) = [rank for rank in get_json(f"{fleet.worker.url}/state")["ranks"] if rank["worker_id"] == worker_id]
    return dict(state)


def claim_a_batch_that_never_arrived(fleet: TrustFleet, worker_id: int, model: str) -> None:
    """Write a heartbeat that names a batch after the rank's last one, as if that batch had been lost in Kafka."""
    settings = fleet.stack.settings
    state = state_of(fleet, worker_id)
    claim = EngineBatch(
        rank=RankId(WorkerId(worker_id), DpRank(0)),
        model=model,
        block_size=BLOCK_SIZE,
        incarnation=Incarnation(int(state["incarnation"])),
        sequence=int(state["sequence"]) + 1,
        digest=0,
        emitted_at_ms=0,
        body=Heartbeat("a test", LEASE_MS),
    )
    kafka = producer(settings)
    kafka.produce(
        topics(settings).kv_events.name,
        key=worker_key(WorkerId(worker_id)),
        value=encode_batch(claim),
        partition=partition_of(WorkerId(worker_id), settings.partitions),
    )
    kafka.flush(10.0)
