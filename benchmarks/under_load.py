"""`python -m benchmarks.under_load`: how long a router's answers take while events arrive, with real processes.

What lives here: a fleet that reports its caches, a broker, agents and a router (`kvstreams router`, and the router
inside `faust worker`), and a client that asks at a steady rate with and without events. What must not: throughput
(pipeline). Exits 1 if the router does not hold in the end what the fleet holds.

Phases without and with events take turns, so that the machine's own changes reach both.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import psutil

from benchmarks.machinery import cpu_seconds, machinery
from benchmarks.pipeline import BLOCK_SIZE, MODEL, Fleet, mixed
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from benchmarks.steady_client import Run, command, prompts
from streams.core.hashing import request_hashes

#: The bar: the p99 with events is at most this many times the p99 without.
RATIO_MAX = 3.0

#: How long events arrive before the first phase. Caches fill, and a broker's JVM compiles: with events, its compiler
#: takes a quarter of a core for this long.
WARM_UP_S = 20.0

#: Event records that are sent at once. With 64 of them, as in benchmarks of throughput, broker and agents need half of
#: the processor time, since they have fewer batches and transactions.
TOGETHER = 4

_KINDS = {"router": "kvstreams router", "worker": "router inside faust worker"}
_PROMPTS_SEED = 1


@contextmanager
def steady_client() -> Iterator[subprocess.Popen[str]]:
    """Start the client's process."""
    arguments = [sys.executable, "-m", "benchmarks.steady_client"]
    client = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield client
    finally:
        client.kill()
        client.wait()


@dataclass(frozen=True, slots=True)
class Answers:
    """What the client measured, in milliseconds, and the number of answers of each mode. late_ms: see steady_client."""

    latencies_ms: list[float]
    late_ms: list[float]
    modes: dict[str, int]


def ask(client: subprocess.Popen[str], wanted: Run) -> Answers:
    """Run the client."""
    assert client.stdin is not None and client.stdout is not None  # both are pipes
    client.stdin.write(command(wanted))
    client.stdin.flush()
    return Answers(**json.loads(client.stdout.readline()))


def hold_prompts(fleet: Fleet, n_tokens: int) -> None:
    """Let the engines hold the prompts that the client asks for, so that the index has something to find."""
    for number, prompt in enumerate(prompts(_PROMPTS_SEED, 64, n_tokens)):
        local, names = request_hashes(prompt, BLOCK_SIZE)
        engine = fleet.engines[number % len(fleet.engines)]
        engine.n_blocks += len(local)
        fleet.kafka.produce(fleet.topics.kv_events.name, engine.store(np.asarray(names), local), engine.key)
    fleet.kafka.flush()
    fleet.await_visible()


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _router_pid(fleet: Fleet, *, apart: bool) -> int:
    """The process that answers. apart: it is a child of the worker."""
    pid = fleet.router.child.pid
    if not apart:
        return pid
    (router,) = psutil.Process(pid).children()
    return int(router.pid)


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(_KINDS)), help="Which router; both by default.")
@click.option("--seconds", default=10.0, show_default=True, help="Duration of a phase.")
@click.option("--repeats", default=3, show_default=True, help="Phases without, and as many with events.")
@click.option("--warm-up", "warm_up_s", default=WARM_UP_S, show_default=True, help="Seconds of events before.")
@click.option("--events", default=1000.0, show_default=True, help="Event records per second.")
@click.option("--together", default=TOGETHER, show_default=True, help="Event records that are sent at once.")
@click.option("--rate", default=200.0, show_default=True, help="Requests per second.")
@click.option("--tokens", default=2048, show_default=True)
@click.option("--book/--no-book", default=False, show_default=True, help="Book each request, and free it at once.")
@click.option("--realtime", is_flag=True, help="With the setting router_realtime.")
@click.option("--own-process", is_flag=True, help="The worker's router with the setting router_process.")
@click.option("--engines", default=64, show_default=True)
@click.option("--partitions", default=8, show_default=True)
def main(
    json_path: Path | None,
    kinds: tuple[str, ...],
    seconds: float,
    repeats: int,
    warm_up_s: float,
    events: float,
    together: int,
    rate: float,
    tokens: int,
    book: bool,
    realtime: bool,
    own_process: bool,
    engines: int,
    partitions: int,
) -> None:
    samples, report = Samples(), Report("under_load", {}, [])
    for kind in kinds or tuple(_KINDS):
        with (
            machinery(partitions, block_size=BLOCK_SIZE, router_realtime=realtime, router_process=own_process) as parts,
            steady_client() as client,
        ):
            fleet = Fleet(parts, engines, seed=1, router_in_worker=kind == "worker")
            hold_prompts(fleet, tokens)
            rng = random.Random(1)
            fleet.send(mixed(fleet.engines, int(warm_up_s * events), rng), events, together)
            fleet.await_visible()
            all_ms: dict[str, list[float]] = {"without events": [], "with events": []}
            for repeat in range(repeats):
                for phase, found_ms in all_ms.items():
                    wanted = Run(fleet.router.url, MODEL, rate, seconds, tokens, book, _PROMPTS_SEED)
                    n_events = int((seconds + 1.5) * events) if phase == "with events" else 0
                    published = mixed(fleet.engines, n_events, rng)
                    processes = {
                        "router": _router_pid(fleet, apart=own_process and kind == "worker"),
                        "agents": fleet.worker.child.pid,
                        "broker": parts.broker_pid,
                        "client": client.pid,
                        "producer": os.getpid(),
                    }
                    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
                    began_s = time.monotonic()
                    if phase == "with events":
                        sender = threading.Thread(target=fleet.send, args=(published, events, together))
                        sender.start()
                        time.sleep(0.5)
                        answers = ask(client, wanted)
                    else:
                        answers = ask(client, wanted)
                    took_s = time.monotonic() - began_s
                    used = {name: 100 * (cpu_seconds(pid) - before[name]) / took_s for name, pid in processes.items()}
                    if phase == "with events":
                        sender.join()
                        fleet.await_visible()
                    latencies_ms, modes = answers.latencies_ms, answers.modes
                    found_ms += latencies_ms
                    case = f"{_KINDS[kind]}, {phase}"
                    for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
                        samples.add(case, name, "ms", OURS, percentile(latencies_ms, share))
                    samples.add(case, "the client's own lateness, p99", "ms", OURS, percentile(answers.late_ms, 0.99))
                    for name, share in used.items():
                        if name != "agents" or kind == "router" or own_process:
                            samples.add(case, f"processor time, {name}", "% of a core", OURS, share)
                    exact = modes.get("exact", 0) / sum(modes.values())
                    samples.add(case, "exact answers", "%", OURS, 100 * exact)
                    sys.stderr.write(
                        f"{case} {repeat}: p50 {statistics.median(latencies_ms):.2f} p99 "
                        f"{percentile(latencies_ms, 0.99):.2f} max {max(latencies_ms):.2f} ms, client late p99 "
                        f"{percentile(answers.late_ms, 0.99):.2f} ms {modes} "
                        f"{ {name: round(share) for name, share in used.items()} }\n"
                    )
            quiet, busy = (percentile(found_ms, 0.99) for found_ms in all_ms.values())
            shown = _KINDS[kind] + (" with router_process" if own_process and kind == "worker" else "")
            shown += " with router_realtime" if realtime else ""
            bar = f"{shown}: p99 with {events:g} event records/s at most {RATIO_MAX:g} times that without"
            report.bars.append(
                Bar(bar, busy <= RATIO_MAX * quiet, f"{busy / quiet:.2f}: {busy:.2f} and {quiet:.2f} ms")
            )
            report.wrong += fleet.wrong()
    report.rows = samples.rows()
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
