"""A real LMCache: what its server has counts for every engine that uses it, and the engine finds exactly that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from streams.lab.kafka.broker import LocalKafka
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, get_json, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.broker import broker_config
from tests.helpers.cxl_fleet import ask, supplementary
from tests.helpers.lmcache_events import EventTopic
from tests.real.engine import BLOCK_SIZE, RealEngine
from tests.real.environment import FULL, model_folder
from tests.real.fleet import NOTICE_S
from tests.real.lmcache_server import RealLmcache

#: Two engines and a server start.
pytestmark = pytest.mark.timeout(1200)

#: Of LMCache, by default.
CHUNK_TOKENS = 256


@dataclass
class Stored:
    """Two engines with one server."""

    server: RealLmcache
    engines: tuple[RealEngine, RealEngine]
    worker: RouterProcess

    def cached_tokens(self, engine: int, prompt: list[int]) -> int:
        """Send a prompt to an engine, and return how many of its tokens the engine did not compute."""
        asked = {"model": FULL, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        usage = self.engines[engine].call("POST", "/v1/completions", asked)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def await_blocks(self, expected: dict[int, tuple[int, int]], prompt: list[int]) -> None:
        """Wait until a decision counts these blocks by worker: the rank's own, and those in pools after them."""

        def counted() -> dict[int, tuple[int, int]]:
            return {worker: found[:2] for worker, found in supplementary(ask(self.worker, prompt)).items()}

        try:
            wait_for(lambda: counted() == expected, NOTICE_S, "a decision's blocks", 0.2)
        finally:
            assert counted() == expected


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """Two engines, one server of LMCache, and the processes of the product."""
    directory = tmp_path_factory.mktemp("real-lmcache")
    broker = LocalKafka(broker_config(directory / "kafka"))
    engines: list[RealEngine] = []
    try:
        scope = Settings(
            kafka=broker.up().bootstrap,
            block_size=BLOCK_SIZE,
            partitions=4,
            topic_prefix="real-",
            lmcache_models={str(model_folder(FULL)): FULL},  # LMCache has the name that vLLM was started with
        )
        topic = EventTopic(scope)
        server = RealLmcache("node-a", scope.kafka, topic.name, directory)
        with Children() as children:
            try:
                server.start()
                engines += [RealEngine(n, FULL, directory / "engines", server.engine_flags()) for n in (1, 2)]
                for engine in engines:
                    engine.start()
                for engine in engines:
                    engine.wait_ready()
                stack = Stack(scope, directory, children)
                worker = stack.worker()
                names = {engine.worker_id: server.name for engine in engines}
                stack.bridge(engines, options=["--lmcache", topic.name], instances=names)
                wait_workers(worker.url, len(engines))
                yield Stored(server, (engines[0], engines[1]), worker)
            finally:
                for engine in engines:
                    engine.kill()
                server.kill()
    finally:
        broker.down()


def test_an_engine_loads_what_another_one_has_stored_as_the_router_says(stored: Stored) -> None:
    """After the first engine has computed a prompt, the second one loads its whole chunks, and computes the rest.

    The router says so before. Once LMCache is cleared, it says that nothing can be loaded.
    """
    prompt = [5 + place * 7 % 1900 for place in range(4 * CHUNK_TOKENS + 70)]
    assert stored.cached_tokens(0, prompt) == 0
    blocks, pooled = len(prompt) // BLOCK_SIZE, 4 * CHUNK_TOKENS // BLOCK_SIZE
    stored.await_blocks({1: (blocks, 0), 2: (0, pooled)}, prompt)
    (pool,) = get_json(f"{stored.worker.url}/pools")["pools"]
    assert (pool["pool_id"], pool["members"]) == ("lmcache/node-a/dram", [1, 2])
    assert stored.cached_tokens(1, prompt) == 4 * CHUNK_TOKENS
    stored.await_blocks({1: (blocks, 0), 2: (blocks, 0)}, prompt)
    branch = [*prompt[: 2 * CHUNK_TOKENS + 40], *range(100, 400)]
    for engine in stored.engines:
        engine.call("POST", "/reset_prefix_cache")
    stored.server.call("POST", "/cache/clear")
    other = [9 + place * 11 % 1900 for place in range(CHUNK_TOKENS)]
    for n in (0, 1):  # vLLM reports its clear with the next step
        stored.cached_tokens(n, other)
    stored.await_blocks({1: (0, 0), 2: (0, 0)}, branch)
    assert stored.cached_tokens(1, branch) == 0


def test_a_prompt_that_grows_is_loaded_as_the_router_says(stored: Stored) -> None:
    """The engines take turns. Each one loads what the other has added, as far as chunks are whole."""
    prompt, own, chunks = [3 + place * 13 % 1900 for place in range(150)], {1: 0, 2: 0}, 0
    for turn in range(8):
        worker = turn % 2 + 1
        stored.await_blocks({each: (blocks, max(chunks - blocks, 0)) for each, blocks in own.items()}, prompt)
        assert stored.cached_tokens(worker - 1, prompt) == max(own[worker], chunks) * BLOCK_SIZE
        own[worker] = len(prompt) // BLOCK_SIZE
        chunks = len(prompt) // CHUNK_TOKENS * (CHUNK_TOKENS // BLOCK_SIZE)
        prompt = [*prompt, *(3 + (turn * 1009 + place * 17) % 1900 for place in range(150))]
