"""`python -m benchmarks.failover`: one of two workers is killed under load, and its partitions move to the other.

What lives here: the time from SIGKILL until the survivor has opened every partition and the router's view is complete
again. What must not: recovery without a fleet (recovery). Exits 1 if a published record is lost.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from functools import partial
from pathlib import Path

import click

from benchmarks.machinery import machinery
from benchmarks.pipeline import BLOCK_SIZE, Fleet, mixed
from benchmarks.recovery import READY_TIMEOUT_S, Written, all_open, opened, write
from benchmarks.report import OURS, Bar, Report, Samples, wide_console
from streams.core.ids import DpRank, RankId, WorkerId
from streams.kafka.clients import partition_of
from streams.process.waiting import wait_for

#: Compaction starts when a fifth of the log is dirty, so each run has little more than one record.
TIMES_WRITTEN = 2
#: The first id of the workers whose caches are in the changelog; others publish during the measurement.
FIRST_SETTLED = 100_001


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report there too.")
@click.option(
    "--blocks", default=2_000_000, show_default=True, help="Blocks held by ranks of the killed worker's partitions."
)
@click.option("--rate", default=1000.0, show_default=True, help="Records per second.")
@click.option("--session", "session_s", default=6.0, show_default=True, help="Session timeout of the group, seconds.")
@click.option("--ranks", default=64, show_default=True)
@click.option("--partitions", default=8, show_default=True)
def main(json_path: Path | None, blocks: int, rate: float, session_s: float, ranks: int, partitions: int) -> None:
    """Measure a fail-over."""
    samples, report, console = Samples(), Report("failover", {}, []), wide_console()
    settled = [RankId(WorkerId(FIRST_SETTLED + n), DpRank(0)) for n in range(ranks)]
    written = Written(partitions, settled, 2 * blocks, None, seed=1)
    with machinery(partitions=partitions, block_size=BLOCK_SIZE, session_timeout_s=session_s) as parts:
        write(parts, written, TIMES_WRITTEN, seed=2)
        fleet = Fleet(parts, ranks, seed=1)
        survivor = parts.stack.worker("survivor", router=False)
        wait_for(lambda: bool(opened(survivor)), READY_TIMEOUT_S, "partitions of the second worker")
        time.sleep(2.0 * session_s)  # the group is at rest
        log = survivor.child.log_path.read_text()
        since = log.rindex("partitions assigned")
        moving = set(range(partitions)) - opened(survivor, since)
        on_them = sum(
            n for p in moving for rank, n in written.n_blocks.items() if partition_of(rank.worker_id, partitions) == p
        )
        published = mixed(fleet.engines, int(rate * (session_s + 25.0)), random.Random(1))
        sender = threading.Thread(target=fleet.send, args=(published, rate))
        sender.start()
        time.sleep(5.0)
        fleet.worker.child.kill()
        began = time.perf_counter()
        wait_for(partial(all_open, survivor, len(log)), READY_TIMEOUT_S, "every partition at the survivor", 0.01)
        moved = time.perf_counter() - began
        sender.join()
        fleet.await_visible()
        report.wrong += fleet.wrong()
        add = samples.add
        add("failover", "partitions that moved", "", OURS, float(len(moving)))
        add("failover", "blocks on them", "", OURS, float(on_them))
        add("failover", "from SIGKILL until all are open", "s", OURS, moved)
        add("failover", "of it after the session timeout", "s", OURS, moved - session_s)
        report.bars.append(
            Bar("moved at most 3 s after the session timeout", moved - session_s <= 3.0, f"{moved - session_s:.1f}")
        )
    report.rows = samples.rows()
    report.print(console)
    if json_path is not None:
        report.write(json_path)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
