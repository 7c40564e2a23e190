"""`python -m benchmarks.foreign_bookings`: what bookings of other routers cost one router.

What lives here: one router (`kvstreams router`), a process that writes bookings of others to `router-loads` at a steady
rate, and a client that asks the router. For each rate: the router's processor time per booking and its free, and the
latencies of `POST /route`. At the end: the memory of a booking that is active. What must not: own bookings (http).

Two checkouts can be compared by turns: copy this file into the other one (up to b056d23, `streams.lab.stack` is
`streams.local.stack` there).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import click
import numpy as np

from benchmarks.http_load import ask as ask_router
from benchmarks.machinery import cpu_seconds, machinery
from benchmarks.report import OURS, Report, Samples, wide_console
from benchmarks.steady_client import Run
from benchmarks.under_load import ask, percentile, steady_client
from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.kafka.clients import producer
from streams.kafka.load_records import request_partition
from streams.kafka.records import encode_load
from streams.lab.stack import get_json, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics

MODEL = "m"
BLOCK_SIZE = 16
N_RANKS = 64
N_BLOCKS = 128

#: Bookings begin with one of so many shared prefixes, a quarter of the prompt.
N_PREFIXES = 20

#: How long a booking is held, and how many records are sent together.
HELD_S = 1.0
TOGETHER_S = 0.010

#: How long bookings are sent before their cost is measured.
SETTLED_S = 3.0

#: How long the router has to read what was sent.
PATIENCE_S = 120.0


class Sender:
    """Writes bookings of another router. Prompts are made in advance, so that making them takes no time."""

    def __init__(self, settings: Settings) -> None:
        self._topic = topics(settings).router_loads
        self._kafka = producer(settings, **{"linger.ms": 2, "queue.buffering.max.messages": 1_000_000})
        rng = np.random.default_rng(1)
        prefixes = rng.integers(1, 1 << 63, size=(N_PREFIXES, N_BLOCKS // 4), dtype=np.uint64)
        self._chains = []
        for number in range(2048):
            own = rng.integers(1, 1 << 63, size=N_BLOCKS - N_BLOCKS // 4, dtype=np.uint64)
            self._chains.append(np.concatenate([prefixes[number % N_PREFIXES], own]))
        self._n = 0

    def add(self) -> BookingId:
        """Send a booking."""
        self._n += 1
        booking_id = BookingId(f"{self._n:032x}", "r" * 32, self._n)
        chain = self._chains[self._n % len(self._chains)].copy()
        chain[N_BLOCKS // 4 :] += np.uint64(self._n)  # no two bookings share more than the prefix
        rank = RankId(WorkerId(1 + self._n % N_RANKS), DpRank(0))
        booking = Booking(rank, MODEL, N_BLOCKS * BLOCK_SIZE, pack_hashes(chain), 0, N_BLOCKS)
        self._send(booking_id, BookingPhase.ADD, booking)
        return booking_id

    def free(self, booking_id: BookingId) -> None:
        """Send its end."""
        self._send(booking_id, BookingPhase.FREE, None)

    def flush(self) -> None:
        """Wait until Kafka has everything."""
        self._kafka.flush()

    def send_at(self, rate: float, seconds: float) -> None:
        """Send so many bookings per second, each of which ends after HELD_S."""
        active: deque[tuple[float, BookingId]] = deque()
        began_s = time.monotonic()
        n_sent = 0
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            while n_sent < elapsed_s * rate:
                active.append((elapsed_s + HELD_S, self.add()))
                n_sent += 1
            while active and active[0][0] <= elapsed_s:
                self.free(active.popleft()[1])
            self._kafka.poll(0)
            time.sleep(TOGETHER_S)
        for _, booking_id in active:
            self.free(booking_id)
        self.flush()

    def _send(self, booking_id: BookingId, phase: BookingPhase, booking: Booking | None) -> None:
        key, value = encode_load(booking_id, phase, booking, time.time_ns() // 1_000_000)
        partition = request_partition(booking_id.request_id, self._topic.partitions)
        self._kafka.produce(self._topic.name, key=key, value=value, partition=partition)


def _requests(url: str) -> int:
    return sum(row["active_requests"] for row in get_json(f"{url}/loads")["loads"])


def _resident_bytes(pid: int) -> int:
    line = next(row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _register(url: str) -> None:
    for number in range(1, N_RANKS + 1):
        body = json.dumps({"url": f"http://engine-{number}", "model": MODEL, "block_size": BLOCK_SIZE}).encode()
        ask_router(url, "PUT", f"/workers/{number}", body)


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--rate", "rates", multiple=True, default=(0.0, 1000.0, 3000.0), show_default=True, help="Bookings/s.")
@click.option("--seconds", default=10.0, show_default=True, help="Duration of a measurement.")
@click.option("--repeats", default=3, show_default=True, help="Measurements of each rate, by turns.")
@click.option("--asked", default=100.0, show_default=True, help="Requests per second.")
@click.option("--tokens", default=2048, show_default=True, help="Tokens of each request.")
@click.option("--held", default=50_000, show_default=True, help="Active bookings whose memory is measured.")
@click.option("--send-to", hidden=True, help="Only send bookings: the address of Kafka and the topic prefix.")
def main(
    json_path: Path | None,
    rates: tuple[float, ...],
    seconds: float,
    repeats: int,
    asked: float,
    tokens: int,
    held: int,
    send_to: str | None,
) -> None:
    if send_to is not None:
        kafka, prefix = send_to.split(",")
        Sender(Settings(kafka=kafka, topic_prefix=prefix, partitions=8)).send_at(rates[0], seconds)
        return
    samples, report = Samples(), Report("foreign_bookings", {}, [])
    with machinery(8, block_size=BLOCK_SIZE) as parts, steady_client() as client:
        router = parts.stack.router("router")
        pid = router.child.pid
        _register(router.url)
        wait_workers(router.url, N_RANKS)
        idle_us = 0.0
        for repeat in range(-1, repeats):  # the first one warms up
            for rate in rates:
                sender = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "benchmarks.foreign_bookings"),
                        *("--send-to", f"{parts.settings.kafka},{parts.settings.topic_prefix}"),
                        *("--rate", str(rate), "--seconds", str(2 * seconds + SETTLED_S + HELD_S + 5.0)),
                    ]
                )
                time.sleep(SETTLED_S + HELD_S + 1.0)
                before_s = cpu_seconds(pid)
                time.sleep(seconds)
                used_us = (cpu_seconds(pid) - before_s) / seconds * 1e6
                answers = ask(client, Run(router.url, MODEL, asked, seconds, tokens))
                sender.wait()  # until it has freed its bookings
                wait_for(lambda: _is_settled(router.url), PATIENCE_S, "bookings to be read")
                if repeat < 0:
                    continue
                case = f"{rate:g} bookings/s of other routers"
                if rate:
                    samples.add(case, "processor time per booking and its free", "us", OURS, (used_us - idle_us) / rate)
                else:
                    idle_us = used_us
                    samples.add(case, "processor time", "ms/s", OURS, used_us / 1e3)
                for name, share in (("p50", 0.5), ("p99", 0.99)):
                    samples.add(case, f"POST /route, {name}", "ms", OURS, percentile(answers.latencies_ms, share))
                samples.add(case, "the client's own lateness, p99", "ms", OURS, percentile(answers.late_ms, 0.99))
        _measure_memory(samples, parts.settings, router.url, pid, held)
    report.rows = samples.rows()
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)


def _is_settled(url: str) -> bool:
    """Whether the number of bookings stays the same for a second."""
    before = _requests(url)
    time.sleep(1.0)
    return _requests(url) == before


def _measure_memory(samples: Samples, settings: Settings, url: str, pid: int, n_held: int) -> None:
    before_n, before_bytes = _requests(url), _resident_bytes(pid)
    sender = Sender(settings)
    sender._n = 1 << 32  # ids that were not used before
    for _ in range(n_held):
        sender.add()
    sender.flush()
    wait_for(lambda: _requests(url) == before_n + n_held, PATIENCE_S, "all bookings to be read")
    per_booking = (_resident_bytes(pid) - before_bytes) / n_held
    samples.add(f"active bookings of {N_BLOCKS} blocks", "memory of one", "bytes", OURS, per_booking)


if __name__ == "__main__":
    main()
