"""`python -m benchmarks.booking_memory`: the memory of routers while bookings begin and end, with a real Kafka.

What lives here: a router in this process that books and frees at a steady rate, a second one that reads its records
(`kvstreams router`), and their resident memory over time. What must not: HTTP (its memory does not depend on bookings),
and the memory of an index (memory).

Each booking lives for a while, so that its records are sent and do not cancel out. Exits with 1 if a router grew by
more than the bar from the first tenth to the end, or if any load is left in the end.

Ends of bookings are known until the TTL, so memory grows until then. A run that is longer than that also shows how much
it grows afterwards.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

import click
import numpy as np
import psutil

from benchmarks.machinery import machinery
from benchmarks.memory import resident_bytes
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import Booking, BookingPhase
from streams.lab.stack import get_json
from streams.process.interpreter import exempt_from_collection
from streams.process.waiting import wait_for
from streams.router_api.deciding.router import Router
from streams.settings import Settings

#: The bar: how much a router may grow per million pairs, in MiB. Their ends are known until the TTL: 50 bytes each.
GROWTH_MIB_MAX = 100.0

#: The bar for what is measured after STEADY_TTLS, when as many ends are forgotten as are added.
STEADY_GROWTH_MIB_MAX = 10.0
STEADY_TTLS = 2.0

_SAMPLES = 20
_MIB = 1024 * 1024


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


@click.command(help=__doc__)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--pairs", default=1_000_000, show_default=True)
@click.option("--rate", default=3000.0, show_default=True, help="Pairs per second.")
@click.option("--lives", default=0.2, show_default=True, help="Seconds from a booking to its free.")
@click.option("--blocks", default=128, show_default=True, help="Blocks of each prompt.")
@click.option("--ranks", default=64, show_default=True)
@click.option("--ttl", default=Settings().booking_ttl_s, show_default=True, help="booking_ttl_s of both routers.")
def main(json_path: Path | None, pairs: int, rate: float, lives: float, blocks: int, ranks: int, ttl: float) -> None:
    samples, rng = Samples(), np.random.default_rng(1)
    with machinery(partitions=8, booking_ttl_s=ttl) as parts:
        other = parts.stack.router("other")
        router = Router(parts.settings)
        router.start()
        wait_for(lambda: not router.feeds.pending(), 60, "the topics to be read")
        exempt_from_collection()
        alive: deque[tuple[float, str]] = deque()
        first: dict[str, float] = {}
        steady: dict[str, float] = {}
        n_steady = 0
        last: dict[str, float] = {}
        began = time.perf_counter()
        late_s = 0.0
        for number in range(pairs):
            due = began + number / rate
            while (now := time.perf_counter()) < due:
                router.tick()
                time.sleep(min(due - now, 0.002))
            late_s = max(late_s, now - due)
            name = f"request-{number:012}"
            sequence = pack_hashes(rng.integers(1, 1 << 63, size=blocks, dtype=np.uint64))
            rank = RankId(WorkerId(1 + number % ranks), DpRank(0))
            router.loads.book(name, Booking(rank, "m", 16 * blocks, sequence, 0, blocks))
            alive.append((now + lives, name))
            while alive and alive[0][0] <= now:
                router.loads.report_phase(alive.popleft()[1], BookingPhase.FREE)
            if number % max(1, pairs // _SAMPLES) == 0:
                with router.loads.locked() as loads:
                    known, n_bytes = len(loads), loads.n_bytes
                last = {"this router": resident_bytes() / _MIB, "the other": _resident_mib(other.child.pid)}
                if number * 10 >= pairs and not first:
                    first = last
                if now - began >= STEADY_TTLS * ttl and not steady:
                    steady, n_steady = last, number
                for series, mib in last.items():
                    samples.add(f"after {number:,} pairs", series, "MiB", OURS, mib)
                sys.stderr.write(
                    f"{number:>9,} pairs, {number / (now - began + 1e-9):,.0f}/s: "
                    f"{', '.join(f'{series} {mib:.0f} MiB' for series, mib in last.items())}; {known:,} bookings known "
                    f"({n_bytes / _MIB:.0f} MiB), {router.loads.unacknowledged:,} records unacknowledged\n"
                )
        for _, name in alive:
            router.loads.report_phase(name, BookingPhase.FREE)
        took_s = time.perf_counter() - began
        router.loads.flush(60)
        report = Report("booking_memory", {}, [])
        for series in first:
            grown = (last[series] - first[series]) * 1e6 / (0.85 * pairs)
            figures = f"{grown:.1f} MiB: from {first[series]:.0f} to {last[series]:.0f} MiB"
            bar = f"{series} grows by at most {GROWTH_MIB_MAX:g} MiB per million pairs"
            report.bars.append(Bar(bar, grown <= GROWTH_MIB_MAX, figures))
        for series in steady:
            grown = (last[series] - steady[series]) * 1e6 / (pairs - pairs // _SAMPLES - n_steady)
            figures = (
                f"{grown:.1f} MiB: from {steady[series]:.0f} to {last[series]:.0f} MiB in {pairs - n_steady:,} pairs"
            )
            bar = f"{series}, after {STEADY_TTLS:g} TTLs: at most {STEADY_GROWTH_MIB_MAX:g} MiB more per million pairs"
            report.bars.append(Bar(bar, grown <= STEADY_GROWTH_MIB_MAX, figures))
        samples.add("all", "pairs per second", "/s", OURS, pairs / took_s)
        cpu = psutil.Process(other.child.pid).cpu_times()
        samples.add("all", "the other's processor time per pair", "us", OURS, (cpu.user + cpu.system) / pairs * 1e6)
        time.sleep(1.0)
        with router.loads.locked() as loads:
            report.wrong += [f"load is left on rank {rank}: {load}" for rank, load in loads.ranks().items()]
        for row in get_json(f"{other.url}/loads")["loads"]:
            if row["active_requests"]:
                report.wrong.append(f"the other router has load left: {row}")
        router.stop()
    report.rows = samples.rows()
    report.print(wide_console())
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong or not all(bar.held for bar in report.bars) else 0)


if __name__ == "__main__":
    main()
