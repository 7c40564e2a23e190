"""`python -m tests.real.failures`: a hundred streams whose real engine is killed, stops or breaks the connection.

What lives here: the failures and the comparison. What must not: single cases (test_deaths). Each stream is compared
with an undisturbed answer: text and token ids are equal, or the stream ended with a reason. Afterwards no booking is
left.
"""

from __future__ import annotations

import random
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from streams.process.waiting import wait_for
from tests.real.engine import BLOCK_SIZE, RealEngine
from tests.real.environment import FULL, missing
from tests.real.fleet import NOTICE_S, Fleet, Streamed, running

STALL_TIMEOUT_S = 3.0
SETTINGS: dict[str, Any] = {"front_migration": True, "front_stall_timeout_s": STALL_TIMEOUT_S}

#: A stopped engine continues this long after it was stopped.
STOPPED_S = 2 * STALL_TIMEOUT_S

PROMPT_TOKENS = (20, 400)
ANSWER_TOKENS = (40, 150)

#: What fails: the engine's processes, its scheduling, or the connection to it.
KILL, STOP, BREAK = "kill", "stop", "break"


@dataclass
class Link:
    """The address at which the front reaches an engine. `cut` breaks every connection, and new ones are accepted."""

    target: str
    url: str = ""
    _pairs: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)

    def cut(self) -> None:
        """Break what is open, as a network does."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):  # it broke before
                    end.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def open(self) -> Iterator[Link]:
        """Accept connections until the block ends."""
        target = urlsplit(self.target)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

            def accept() -> None:
                while True:
                    try:
                        client, _ = listener.accept()
                    except OSError:
                        return
                    try:
                        server = socket.create_connection((target.hostname, target.port), 5.0)
                        server.settimeout(None)
                    except OSError:
                        client.close()
                        continue
                    self._pairs.append((client, server))
                    for ends in ((client, server), (server, client)):
                        threading.Thread(target=_pump, args=ends, daemon=True).start()

            threading.Thread(target=accept, daemon=True).start()
            yield self
            listener.shutdown(socket.SHUT_RDWR)
        self.cut()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            sink.sendall(part)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class LinkedEngine(RealEngine):
    """An engine that the product reaches through a link."""

    def __init__(self, worker_id: int, directory: Path, stack: ExitStack) -> None:
        super().__init__(worker_id, FULL, directory)
        self.own_url = self.url
        self.link = stack.enter_context(Link(self.url).open())
        self.url = self.link.url


def _fail(kind: str, engine: LinkedEngine) -> None:
    if kind == KILL:
        engine.kill()
    elif kind == STOP:
        engine.signal(signal.SIGSTOP)
    else:
        engine.link.cut()


def _repair(kind: str, engine: LinkedEngine, fleet: Fleet, began_s: float) -> None:
    if kind == KILL:
        engine.start()
        engine.wait_ready()
    elif kind == STOP:
        time.sleep(max(0.0, began_s + STOPPED_S - time.monotonic()))
        engine.signal(signal.SIGCONT)
    fleet.wait_exact(FULL)


def _until_no_candidate(fleet: Fleet, engine: RealEngine, noticed_s: list[float]) -> None:
    """Add how long an engine that has just ended is still a candidate of the router."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + NOTICE_S:
        try:
            candidates = fleet.route([1] * BLOCK_SIZE, FULL, explain=True)["candidates"]
        except OSError:
            candidates = []
        if all(row["worker_id"] != engine.worker_id for row in candidates):
            break
        time.sleep(0.05)
    noticed_s.append(time.monotonic() - began_s)


def run(fleet: Fleet, kind: str, rng: random.Random, noticed_s: list[float]) -> str:
    """One stream whose engine fails at a random token. Returns how it ended; raises AssertionError if that is wrong.

    noticed_s: gets how long an engine that was killed is still a candidate.
    """
    first = rng.randrange(3, 60)
    prompt = [first + place * 3 % 1900 for place in range(rng.randrange(*PROMPT_TOKENS))]
    n_tokens = rng.randrange(*ANSWER_TOKENS)
    body = {
        "model": FULL,
        "prompt": prompt,
        "max_tokens": n_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    undisturbed = fleet.stream("/v1/completions", body)
    assert undisturbed.error is None, undisturbed.error
    fleet.settle()
    fails_after = rng.randrange(1, n_tokens - 5)
    hit: list[tuple[LinkedEngine, float]] = []
    watching: list[threading.Thread] = []

    def fail(streamed: Streamed) -> None:
        if streamed.n_tokens >= fails_after and not hit:
            engine = fleet.engines[streamed.worker_id]
            assert isinstance(engine, LinkedEngine)
            hit.append((engine, time.monotonic()))
            _fail(kind, engine)
            if kind == KILL:
                watching.append(threading.Thread(target=_until_no_candidate, args=(fleet, engine, noticed_s)))
                watching[0].start()

    disturbed = fleet.stream("/v1/completions", body, fail)
    engine, began_s = hit[0]
    for thread in watching:
        thread.join()
    _repair(kind, engine, fleet, began_s)
    if disturbed.error is not None:
        assert undisturbed.text.startswith(disturbed.text), (kind, disturbed)
        return f"ended: {disturbed.error.get('code') or disturbed.error.get('message')}"
    assert (disturbed.tokens, disturbed.text) == (undisturbed.tokens, undisturbed.text), (kind, disturbed)
    return "equal, migrated" if disturbed.migration.get("migrations") else "equal, not hit"


@click.command()
@click.option("--failures", default=100, show_default=True)
@click.option("--kills", default=20, show_default=True, help="those that end an engine, and need it to start again")
@click.option("--seed", default=1, show_default=True)
def main(failures: int, kills: int, seed: int) -> None:
    """Run until so many streams have met a failure. Exits with 1 if one of them is wrong or a booking is left."""
    reason = missing()
    if reason is not None:
        raise click.ClickException(reason)
    rng = random.Random(seed)
    kinds = [KILL] * kills + [(STOP, BREAK)[number % 2] for number in range(failures - kills)]
    rng.shuffle(kinds)
    ends: Counter[tuple[str, str]] = Counter()
    noticed_s: list[float] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvstreams-real-") as name, ExitStack() as stack:
        engines = [LinkedEngine(number, Path(name) / "engines", stack) for number in (1, 2)]
        with running(engines, Path(name), **SETTINGS) as fleet:
            for number, kind in enumerate(kinds, 1):
                ended = run(fleet, kind, rng, noticed_s)
                ends[kind, ended] += 1
                click.echo(f"{number} of {failures}: {kind}, {ended}")
            wait_for(lambda: not fleet.n_active(), NOTICE_S, "every booking to end", 0.5)
    click.echo(f"{failures} failures in {time.monotonic() - began_s:.0f} s, no booking is left: {dict(ends)}")
    if noticed_s:
        median_s = statistics.median(noticed_s)
        click.echo(f"engines that ended were candidates for {median_s:.2f} s, at most {max(noticed_s):.2f} s")


if __name__ == "__main__":
    main()
