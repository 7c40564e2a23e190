"""Settings of the interpreter and of its threads for processes that answer others: no long pauses.

What lives here: when threads take turns, with each other and with other processes, and what the garbage collector
examines. What must not: what these processes do.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys

log = logging.getLogger(__name__)

#: Threads that fold records share the interpreter with the thread that answers. With Python's default of 5 ms, a query
#: waits that long for each busy thread. With one busy thread, the p99 is 5 to 7 ms; this interval reduces it to 0.3 ms.
SWITCH_INTERVAL_S = 1e-4

#: The priority of a process that runs in real time: the lowest, which is above that of all ordinary processes.
REALTIME_PRIORITY = 1

#: A full collection of a bridge with 200 engines takes 60 to 100 ms, in which no batch is published. Left to Python,
#: there is about one per second, since a bridge creates as many objects as it drops. What they find are the ledgers of
#: feeds that have ended, which may remain for this long. In a front there would be one every few hundred requests.
FULL_COLLECTION_EVERY_S = 60.0

#: After so many new objects, the youngest ones are examined (0.2 ms); after ten times as many, those that remained; and
#: in effect never all objects, which `collect_by_the_clock` does instead.
COLLECTION_THRESHOLDS = (2_000, 10, 1_000_000)


def prefer_request_threads() -> None:
    """Make busy threads release the interpreter soon.

    Bridges and every process that serves the API call this.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def run_in_real_time() -> bool:
    """Let all threads of this process run before those of all ordinary processes; returns whether the kernel allows it.

    Threads that are started later inherit it. If the kernel refuses, nothing changes, and that is logged. Without real
    time, a thread that a request wakes up waits while all processors are busy: until a running thread's slice is over
    (1.4 ms with two processors), and up to 10 ms after other threads of its process have used their group's share.
    """
    if not hasattr(os, "sched_setscheduler"):
        log.warning("this system has no real-time threads: answers may wait for processors that others use")
        return False
    try:
        while left := [thread for thread in _thread_ids() if not _is_realtime(thread)]:  # some may be started meanwhile
            for thread_id in left:
                _make_realtime(thread_id)
    except OSError as exc:
        log.warning("the kernel refuses real-time threads; they need CAP_SYS_NICE or an rtprio limit: %s", exc.strerror)
        return False
    return True


def _thread_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _is_realtime(thread_id: int) -> bool:
    try:
        return os.sched_getscheduler(thread_id) in (os.SCHED_RR, os.SCHED_FIFO)
    except ProcessLookupError:  # it has ended
        return True


def _make_realtime(thread_id: int) -> None:
    try:
        os.sched_setscheduler(thread_id, os.SCHED_RR, os.sched_param(REALTIME_PRIORITY))
    except ProcessLookupError:
        pass


def exempt_from_collection() -> None:
    """Exempt everything that exists now from garbage collection. Called once, when a process has loaded its modules.

    A router's modules and compiled kernels are 125,000 objects that live as long as the process. Examining them stops
    every thread for 75 to 150 ms, and happened every few seconds under load.
    """
    gc.collect()
    gc.freeze()


async def collect_by_the_clock() -> None:
    """Examine all objects every FULL_COLLECTION_EVERY_S, and not whenever Python would, until cancelled."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    try:
        while True:
            await asyncio.sleep(FULL_COLLECTION_EVERY_S)
            gc.collect()
    finally:
        gc.set_threshold(*before)
