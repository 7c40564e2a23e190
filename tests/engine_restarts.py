"""Kills and restarts an engine every few seconds under load: `make chaos`, or `python -m tests.engine_restarts`.

What lives here: the load, the restarts on the same ports, and the comparison of the router with the engine's own cache,
block by block. What must not: faults of workers (chaos) and of the bridge (tests/kafka/test_bridge_faults.py).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from streams.errors import KvStreamsError
from streams.kafka.clients import ensure_topics
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.broker import LocalKafka, LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import Engine, RouterProcess, Stack, get_json, wait_workers
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.support import assert_known

#: Small, so that blocks are evicted all the time.
CACHE = EngineConfig(block_size=16, n_blocks=256)

#: An engine lives this long before it is killed.
LIFE_S = (1.0, 3.0)

#: Restarts on a machine that is so busy that each takes many seconds.
RESTARTS_MIN = 3

_CLIENTS = 2


class Load:
    """Clients that send prompts with shared prefixes to an engine, whatever it answers."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._url, self._model, self._seed = url, model, seed
        self._stopping = threading.Event()
        self.answered = 0
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        rng = random.Random(self._seed + number)
        while not self._stopping.is_set():
            family, tail = rng.randrange(20), rng.randrange(1_000)
            prompt = [family * 1000 + n for n in range(96)] + [100_000 + tail * 100 + n for n in range(64)]
            body = json.dumps({"model": self._model, "prompt": prompt, "max_tokens": 20}).encode()
            headers = {"Content-Type": "application/json"}
            try:
                with urllib.request.urlopen(urllib.request.Request(self._url, body, headers), timeout=10.0):
                    self.answered += 1
            except (OSError, HTTPException):
                time.sleep(0.05)  # the engine is restarting


def restart_under_load(stack: Stack, worker: RouterProcess, engine: Engine, seconds: float, seed: int) -> str:
    """Restart an engine for this long; return what was done. Raises AssertionError if router and engine differ."""
    rng, n_restarts, ends_s = random.Random(seed), 0, time.monotonic() + seconds
    with Load(f"{engine.url}/v1/completions", "m", seed) as load:
        while time.monotonic() < ends_s or n_restarts < RESTARTS_MIN:
            time.sleep(rng.uniform(*LIFE_S))
            engine = stack.restart_engine(engine, CACHE, "m", time_scale=100.0)
            n_restarts += 1
        time.sleep(2.0)
    held = assert_known(worker, [engine])
    (rank,) = get_json(f"{worker.url}/state")["ranks"]
    assert rank["health"] == "exact", rank
    assert len(held) > 10, "the last engine served nothing"
    return f"{n_restarts} restarts, {load.answered} requests answered, {len(held)} blocks in the end, all equal"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once; if anything differs, keep the files and return 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine_restarts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="kvstreams-restarts-"))
    print(f"seed {seed}, {options.seconds:g} s, in {directory}", flush=True)
    broker = LocalKafka(LocalKafkaConfig(directory / "kafka"))
    try:
        settings = Settings(kafka=broker.up().bootstrap, partitions=4, data_dir=str(directory / "state"))
        ensure_topics(settings, topics(settings).all())
        with Children() as children:
            stack = Stack(settings, directory, children)
            worker, (engine,) = stack.worker(), stack.engines(1, CACHE, "m", time_scale=100.0)
            stack.bridge([engine])
            wait_workers(worker.url, 1)
            print(restart_under_load(stack, worker, engine, options.seconds, seed))
    except (AssertionError, KvStreamsError) as exc:
        print(f"{exc}\nrepeat it: python -m tests.engine_restarts --seconds {options.seconds:g} --seed {seed}")
        print(f"logs and data are kept in {directory}")
        return 1
    finally:
        broker.down()
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
