"""`python -m benchmarks.slow_broker`: processor time of producers while one of three brokers is slow, and is paused.

What lives here: the producers of bridges and routers, and a client to which every record is handed at once, in turn in
one process. What must not: what becomes of the records (tests.cluster_chaos).
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
from confluent_kafka import Producer

from benchmarks.report import OURS, Report, Samples, wide_console
from streams.engines.rank_records import LINGER_MS, event_producer
from streams.kafka.clients import ensure_topics, producer, worker_key
from streams.process.waiting import wait_for
from streams.router_api.sharing.outbox import Outbox
from streams.settings import Settings
from streams.topics import Topics, topics
from tests.helpers.broken_cluster import FAILOVER_S, N_BROKERS, breakable_cluster, in_sync, paused, slowed

#: Bridges at a time, each with one engine, so that its records are in one partition; and records per second of each.
BRIDGES = 6
EVENTS_PER_S = 50
#: Routers at a time, and records per second of each, in all partitions.
ROUTERS = 2
BOOKINGS_PER_S = 1000
EVENT_BYTES, BOOKING_BYTES = 300, 200
#: Seconds before a measurement, of one, and of an outage.
WARM_S, CALM_S, OUTAGE_S = 3.0, 3.0, 6.0

#: Produces until the event is set. Its number tells several of them apart.
Load = Callable[[threading.Event, int], None]


def as_bridge(topic: str, make: Callable[[], Producer]) -> Load:
    """Return the load of a bridge. make: its client."""

    def run(stop: threading.Event, number: int) -> None:
        kafka = make()
        while not stop.wait(1.0 / EVENTS_PER_S):
            kafka.produce(topic, key=worker_key(number), value=bytes(EVENT_BYTES))
            kafka.poll(0)
        kafka.flush(FAILOVER_S)

    return run


def as_router(settings: Settings, of: Topics) -> Load:
    """Return the load of a router's bookings."""

    def run(stop: threading.Event, number: int) -> None:
        kafka, lock = producer(settings, **{"linger.ms": 0.5}), threading.RLock()
        outbox: Outbox[bytes] = Outbox(
            kafka,
            of.router_loads.name,
            lambda: time.monotonic_ns() // 1_000_000,
            lambda: lock,
            lambda records: [content for _, content in records],
        )

        async def book() -> None:
            outbox.send_on(asyncio.get_running_loop())
            began_s, n = time.monotonic(), 0
            while not stop.is_set():
                await asyncio.sleep(0.02)
                with lock:
                    while n < (time.monotonic() - began_s) * BOOKINGS_PER_S:
                        key = b"%d-%d" % (number, n)
                        outbox.put(key, bytes(BOOKING_BYTES), n % of.router_loads.partitions, BOOKING_BYTES)
                        n += 1
            while len(outbox):
                await asyncio.sleep(0.02)

        asyncio.run(book())

    return run


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
def main(json_path: Path | None) -> None:
    """Measure the processor time of producers beside a broker that is slow or paused."""
    samples, report = Samples(), Report("slow_broker", {}, [])

    def cores(seconds: float) -> float:
        used_s, began_s = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return (time.process_time() - used_s) / (time.monotonic() - began_s)

    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="kvstreams-slow-broker-")))
        cluster = ending.enter_context(breakable_cluster(folder / "kafka"))
        settings = Settings(**cluster.up().settings)
        of = topics(settings)
        ensure_topics(settings, [of.kv_events, of.router_loads])
        bare = {"linger.ms": LINGER_MS, "message.timeout.ms": 0}
        loads: dict[str, tuple[int, Load]] = {
            "the client alone": (BRIDGES, as_bridge(of.kv_events.name, lambda: producer(settings, **bare))),
            "bridges": (BRIDGES, as_bridge(of.kv_events.name, lambda: event_producer(settings))),
            "routers": (ROUTERS, as_router(settings, of)),
        }
        for name, (n, load) in loads.items():
            for what, fault in (("slow", slowed), ("paused", paused)):
                stop = threading.Event()
                threads = [threading.Thread(target=load, args=(stop, number)) for number in range(n)]
                for thread in threads:
                    thread.start()
                time.sleep(WARM_S)
                samples.add(f"{n} x {name}", "all brokers well", "cores", OURS, cores(CALM_S))
                with fault(cluster, N_BROKERS):
                    time.sleep(1.0)
                    samples.add(f"{n} x {name}", f"one broker is {what}", "cores", OURS, cores(OUTAGE_S))
                stop.set()
                for thread in threads:
                    thread.join()
                wait_for(lambda: in_sync(settings), FAILOVER_S, "all replicas to be in sync")
    report.rows = samples.rows()
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)


if __name__ == "__main__":
    main()
