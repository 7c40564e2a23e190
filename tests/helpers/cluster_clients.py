"""Clients of a fleet that is broken under them: they book at one router, compute at the engine and free at another.

What lives here: the threads that send requests. What must not: the faults, and what must hold at the end (tests).
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException

from tests.helpers.api import Api

#: Of so many bookings, one is never freed, so that routers have a load to agree on.
KEPT_EVERY = 7


class Clients:
    """Clients that route, send prompts to the chosen engine and free their bookings, at any router."""

    def __init__(self, routers: Sequence[str], engines: Mapping[int, str], seed: int) -> None:
        self.routers, self.engines, self.seed = routers, engines, seed
        self.n_kept = 0
        self.failures: list[str] = []
        self.n_answered = 0
        self._numbers = itertools.count()

    @contextmanager
    def running(self, n: int = 2, pause_s: float = 0.02) -> Iterator[None]:
        """Send requests while the block runs, from n threads that pause after each."""
        stopping = threading.Event()
        numbers = itertools.islice(self._numbers, n)
        threads = [threading.Thread(target=self._run, args=(number, stopping, pause_s)) for number in numbers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopping.set()
            for thread in threads:
                thread.join()

    def _run(self, number: int, stopping: threading.Event, pause_s: float) -> None:
        rng = random.Random(self.seed + number)
        for count in itertools.count(1):
            if stopping.wait(pause_s):
                return
            name, prompt = f"{number}-{count}", prompt_of(rng)
            try:
                self.request(rng, name, prompt, keep=count % KEPT_EVERY == 0)
                self.n_answered += 1
            except (OSError, HTTPException, AssertionError) as exc:
                self.failures.append(f"{name}: {exc!r}")

    def request(self, rng: random.Random, name: str, prompt: list[int], *, keep: bool) -> None:
        """Send one request. keep: never free it. Raises OSError, HTTPException or AssertionError if a call fails."""
        booked, freed = rng.choice(self.routers), rng.choice(self.routers)
        answer = Api(booked).route(model="m", token_ids=prompt, request_id=name)
        post(f"{self.engines[answer['worker_id']]}/v1/completions", {"prompt": prompt})
        if keep:
            self.n_kept += 1
        else:
            # 202: this router does not have the booking yet, and keeps the call until it has.
            assert Api(freed).call("DELETE", f"/loads/{name}").status in (200, 202)


def prompt_of(rng: random.Random) -> list[int]:
    """Ten blocks of 16 tokens, of which one in twenty prompts shares the first six."""
    family, tail = rng.randrange(20), rng.randrange(1_000)
    return [family * 1000 + n for n in range(96)] + [100_000 + tail * 100 + n for n in range(64)]


def post(url: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Send a request of OpenAI's API, and return the headers of its answer. Raises OSError if it fails."""
    raw = json.dumps({"model": "m", "max_tokens": 8, **body}).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    with urllib.request.urlopen(urllib.request.Request(url, raw, sent), timeout=30) as response:
        response.read()
        received: Mapping[str, str] = response.headers
        return received
