"""Settings of the interpreter and of its threads for processes that answer others: no long pauses.

What lives here: when threads take turns, with each other and with other processes, and what the garbage collector
examines. What must not: what these processes do.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import platform
import sys

log = logging.getLogger(__name__)

#: Threads that fold records share the interpreter with the thread that answers. With Python's default of 5 ms, a query
#: waits that long for each busy thread. With one busy thread, the p99 is 5 to 7 ms; this interval reduces it to 0.3 ms.
SWITCH_INTERVAL_S = 1e-4


#: The time slice that threads which answer others ask the kernel for. If all processors are busy, a thread that a
#: request wakes up waits until the slice of a running one is over, 1.4 ms with two processors. Linux lets a thread with
#: a shorter slice run at once. It gets no more processor time than with a longer one. 0.1 ms is the least that the
#: kernel takes.
SLICE_NS = 100_000

#: The priority of a process that runs in real time: the lowest, which is above that of all ordinary processes.
REALTIME_PRIORITY = 1

#: A full collection of a bridge with 200 engines takes 60 to 100 ms, in which no batch is published. Left to Python,
#: there is about one per second, since a bridge creates as many objects as it drops. What they find are the ledgers of
#: feeds that have ended, which may remain for this long. In a front there would be one every few hundred requests.
FULL_COLLECTION_EVERY_S = 60.0

#: After so many new objects, the youngest ones are examined (0.2 ms); after ten times as many, those that remained; and
#: in effect never all objects, which `collect_by_the_clock` does instead.
COLLECTION_THRESHOLDS = (2_000, 10, 1_000_000)

#: Numbers of the system calls sched_setattr and sched_getattr, for which the C library has no functions, by machine.
_SCHED_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}


class _SchedAttr(ctypes.Structure):
    """struct sched_attr of Linux, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def prefer_request_threads() -> None:
    """Make busy threads release the interpreter soon, and this thread run soon when it wakes up.

    Bridges and every process that serves the API call this, on the thread that answers.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    run_soon_after_waking()


def run_soon_after_waking() -> None:
    """Ask the kernel for short slices for the calling thread, and for the threads that it starts from now on.

    These may have the interpreter that the calling thread waits for. Nothing changes where the kernel does not know
    slices, where it does not allow this, and for real-time threads.
    """
    attributes = _sched_attributes()
    if attributes is not None and attributes.runtime_ns > SLICE_NS and not attributes.deadline_ns:
        attributes.runtime_ns = SLICE_NS
        ctypes.CDLL(None).syscall(_SCHED_CALLS[platform.machine()][0], 0, ctypes.byref(attributes), 0)


def run_in_real_time() -> bool:
    """Let all threads of this process run before those of all ordinary processes; returns whether the kernel allows it.

    Threads that are started later inherit it. If the kernel refuses, nothing changes, and that is logged. Without real
    time, a short slice is not enough while all processors are busy: the kernel is fair to groups of processes, so a
    thread that answers waits (up to 10 ms) after other threads of its process have used the group's share.
    """
    if not hasattr(os, "sched_setscheduler"):
        log.warning("this system has no real-time threads: answers may wait for processors that others use")
        return False
    try:
        while left := [each for each in _thread_ids() if not _is_realtime(each)]:  # some may be started meanwhile
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


def slice_ns() -> int | None:
    """The time slice of the calling thread; None where threads have none of their own (before Linux 6.12)."""
    attributes = _sched_attributes()
    return None if attributes is None else int(attributes.runtime_ns) or None


def _sched_attributes() -> _SchedAttr | None:
    calls = _SCHED_CALLS.get(platform.machine()) if sys.platform == "linux" else None
    attributes = _SchedAttr()
    size = ctypes.sizeof(attributes)
    if calls is None or ctypes.CDLL(None).syscall(calls[1], 0, ctypes.byref(attributes), size, 0):
        return None
    return attributes


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
