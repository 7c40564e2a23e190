"""`python -m benchmarks.failover`: one of two workers ends under load, and its partitions move to the other.

What lives here: the time from its SIGKILL, or with `--planned` from its SIGTERM, until the survivor owns every
partition, has opened them, and answers are exact again for all ranks. What must not: recovery without a fleet
(recovery). Exits 1 if a published record is lost.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path

import click
import psutil

from benchmarks.machinery import machinery
from benchmarks.pipeline import BLOCK_SIZE, MODEL, Fleet, mixed
from benchmarks.recovery import READY_TIMEOUT_S, Written, all_open, opened, write
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams.core.ids import DpRank, RankId, WorkerId
from streams.kafka.clients import partition_of
from streams.lab.stack import RouterProcess
from streams.process.waiting import wait_for

#: Compaction starts when a fifth of the log is dirty, so each run has little more than one record.
TIMES_WRITTEN = 2
#: The first id of the workers whose caches are in the changelog; others publish during the measurement.
FIRST_SETTLED = 100_001

_CURRENT = re.compile(r"standby of partition (\d+) is up to date")


def followed(process: RouterProcess) -> set[int]:
    """Return the partitions that a worker follows and has read, from its log."""
    return set(map(int, _CURRENT.findall(process.child.log_path.read_text())))


def mode(router: RouterProcess) -> str:
    """Return the mode of an answer for which every rank is eligible."""
    body = json.dumps({"model": MODEL, "block_hashes": [1, 2], "update_states": False}).encode()
    request = urllib.request.Request(f"{router.url}/route", data=body, method="POST")
    with urllib.request.urlopen(request) as answer:
        return str(json.loads(answer.read())["mode"])


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option("--blocks", default=5_000_000, show_default=True, help="Blocks in the changelog, over all partitions.")
@click.option("--standbys", default=1, show_default=True, help="The setting table_standbys.")
@click.option("--rate", default=1000.0, show_default=True, help="Records per second.")
@click.option("--session", "session_s", default=6.0, show_default=True, help="Session timeout of the group, seconds.")
@click.option("--ranks", default=64, show_default=True)
@click.option("--partitions", default=8, show_default=True)
@click.option("--planned", is_flag=True, help="The worker gets SIGTERM, and hands over first.")
def main(
    json_path: Path | None,
    blocks: int,
    standbys: int,
    rate: float,
    session_s: float,
    ranks: int,
    partitions: int,
    planned: bool,
) -> None:
    """Measure a fail-over."""
    samples, report, console = Samples(), Report("failover", {}, []), wide_console()
    settled = [RankId(WorkerId(FIRST_SETTLED + n), DpRank(0)) for n in range(ranks)]
    written = Written(partitions, settled, blocks, None, seed=1)
    with machinery(
        partitions=partitions, block_size=BLOCK_SIZE, session_timeout_s=session_s, table_standbys=standbys
    ) as parts:
        write(parts, written, TIMES_WRITTEN, seed=2)
        fleet = Fleet(parts, ranks, seed=1)
        survivor = parts.stack.worker("survivor", router=False)
        wait_for(lambda: bool(opened(survivor)), READY_TIMEOUT_S, "partitions of the second worker")
        time.sleep(2.0 * session_s)  # the group is at rest
        log = survivor.child.log_path
        before = log.read_text()
        moving = set(range(partitions)) - opened(survivor, before.rindex("partitions assigned"))
        if standbys:
            wait_for(lambda: moving <= followed(survivor), READY_TIMEOUT_S, "standbys that are up to date")
        on_them = sum(
            n for p in moving for rank, n in written.n_blocks.items() if partition_of(rank.worker_id, partitions) == p
        )
        memory = psutil.Process(survivor.child.pid).memory_info().rss
        disk = sum(path.stat().st_size for path in Path(survivor.settings.data_dir).rglob("*") if path.is_file())
        published = mixed(fleet.engines, int(rate * (session_s + 25.0)), random.Random(1))
        sender = threading.Thread(target=fleet.send, args=(published, rate))
        sender.start()
        time.sleep(5.0)
        wait_for(lambda: mode(fleet.router) == "exact", READY_TIMEOUT_S, "exact answers", 0.02)
        since = len(log.read_text())
        began = time.perf_counter()
        fleet.worker.child.signal(signal.SIGTERM if planned else signal.SIGKILL)
        wait_for(lambda: mode(fleet.router) != "exact", READY_TIMEOUT_S, "answers without an owner", 0.01)
        not_exact = time.perf_counter() - began
        wait_for(lambda: "partitions assigned" in log.read_text()[since:], READY_TIMEOUT_S, "an assignment", 0.01)
        assigned = time.perf_counter() - began
        wait_for(partial(all_open, survivor, len(before)), READY_TIMEOUT_S, "every partition at the survivor", 0.01)
        moved = time.perf_counter() - began
        wait_for(lambda: mode(fleet.router) == "exact", READY_TIMEOUT_S, "exact answers", 0.01)
        exact = time.perf_counter() - began
        sender.join()
        fleet.await_visible()
        report.wrong += fleet.wrong()
        add, case = samples.add, f"{standbys} standbys"
        add(case, "partitions that moved", "", OURS, float(len(moving)))
        add(case, "blocks on them", "", OURS, float(on_them))
        add(case, "memory of the survivor before", "MB", OURS, memory / 1e6)
        add(case, "disk of the survivor before", "MB", OURS, disk / 1e6)
        end = "SIGTERM" if planned else "SIGKILL"
        add(case, f"from {end} until the group has reassigned", "s", OURS, assigned)
        add(case, "from then until all partitions are open", "s", OURS, moved - assigned)
        add(case, "from then until all ranks are exact", "s", OURS, exact - assigned)
        add(case, f"from {end} until all ranks are exact", "s", OURS, exact)
        add(case, "answers were not exact for", "s", OURS, exact - not_exact)
        if standbys:
            after = exact - assigned
            report.bars.append(Bar("exact at most 2 s after Kafka has reassigned", after <= 2.0, f"{after:.2f}"))
    report.rows = samples.rows()
    report.print(console)
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
