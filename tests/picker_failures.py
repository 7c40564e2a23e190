"""What becomes of requests when pickers fail, with each way of asking them: the table of docs/gateway.md.

    python -m tests.picker_failures                     # all of it, on a machine that runs nothing else
    python -m tests.picker_failures --setting buffered  # one row

A real Kafka, three pickers behind a real Envoy, and engines with half a second until their first byte. The load goes on
during each failure. A picker that ended is started again, and the next one fails once all are ready.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from streams.lab.kafka.broker import LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import Stack, get_bytes
from tests.helpers.broker import BreakableKafka
from tests.helpers.picker_fleet import RECOMMENDED, Outcome, PickerFleet, Setting, killing
from tests.replicas import settings_of

SETTINGS: Mapping[str, Setting] = {
    "buffered": RECOMMENDED,
    "duplex-ends": Setting(buffers=False, ends_stream=True),
    "duplex-stays": Setting(buffers=False, ends_stream=False),
}

#: Requests per second, the time of one failure's load, and the time between two failures in it.
RATE, SECONDS, PAUSE_S = 40.0, 20.0, 3.0

#: Kafka is away for this long.
AWAY_S = 12.0

Failure = Callable[[], Awaitable[None]]


def failures(fleet: PickerFleet, broker: BreakableKafka, spans: list[tuple[float, float]]) -> Mapping[str, Failure]:
    """What happens during a load, by its name. spans: get an entry for each failure of one picker."""

    async def kafka_away() -> None:
        await asyncio.sleep(PAUSE_S)
        await asyncio.to_thread(broker.kill)
        await asyncio.sleep(AWAY_S)
        await asyncio.to_thread(broker.up)

    async def all_at_once() -> None:
        await asyncio.sleep(PAUSE_S)
        await asyncio.gather(*(fleet.end(number, signal.SIGKILL) for number in range(len(fleet.pickers))))

    signals = {
        how.name: killing(fleet, how, PAUSE_S, spans) for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
    }
    return {**signals, "Kafka away": kafka_away, "all at once": all_at_once}


def cell(outcome: Outcome) -> str:
    """One cell of the table."""
    slowest_s = max(answer["ms"] for answer in outcome.answers) / 1000
    failed = ", ".join(f"{n} x {status}" for status, n in outcome.statuses.items() if status != "200")
    undecided = len(outcome.undecided)
    return (
        f"{outcome.n_failed} failed{f' ({failed})' if failed else ''}, {undecided} undecided, slowest {slowest_s:.1f} s"
    )


def n_early(fleet: PickerFleet) -> int:
    """Streams that pickers got since their last start while they were not ready."""
    pages = [get_bytes(f"{picker.url}/metrics").decode().splitlines() for picker in fleet.pickers]
    name = 'kvstreams_picker_calls_total{status="unavailable"} '
    return sum(int(float(line.removeprefix(name))) for page in pages for line in page if line.startswith(name))


def measure(name: str, broker: BreakableKafka, directory: Path, only: Sequence[str]) -> None:
    """Measure one row, and print each cell."""
    settings = replace(settings_of(broker.up().bootstrap, topic_prefix=f"{name}-", kv_events=True))
    with Children() as children:
        fleet = PickerFleet(Stack(settings, directory / name, children), SETTINGS[name])
        spans: list[tuple[float, float]] = []
        for failure, happens in failures(fleet, broker, spans).items():
            if only and failure not in only:
                continue
            spans.clear()
            outcome = asyncio.run(fleet.load(RATE, SECONDS, happens))
            fleet.wait_healthy()
            asked_early = f"{n_early(fleet)} to a picker that was not ready"
            times = f"{failure} x {len(spans)}" if spans else failure
            print(f"| {name} | {times} | of {outcome.n_requests}: {cell(outcome)}, {asked_early} |")
            print(f"  not exact: {dict(outcome.doubts)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.picker_failures", description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, action="append")
    parser.add_argument("--failure", action="append", default=[], help="by its name in the output; all by default")
    options = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="kvstreams-pickers-"))
    broker = BreakableKafka(LocalKafkaConfig(directory / "kafka", {"group.min.session.timeout.ms": "1000"}))
    try:
        for name in options.setting or SETTINGS:
            measure(name, broker, directory, options.failure)
    finally:
        broker.down()
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
