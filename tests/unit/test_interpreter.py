"""Garbage collection and real-time threads in processes that answer others."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import gc
import streams.router_api.deciding.router
from streams.process.interpreter import exempt_from_collection

exempt_from_collection()
class Cycle: pass
cycle = Cycle(); cycle.itself = cycle; del cycle
print(len(gc.get_objects()), gc.get_freeze_count(), gc.collect())
"""


def test_modules_are_exempt_from_collection_and_later_cycles_are_collected() -> None:
    """A full collection examines a small part of the objects, and still finds a cycle that was made afterwards."""
    shown = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    examined, exempt, collected = map(int, shown.stdout.split())
    assert examined < exempt / 10
    assert collected >= 1


_REALTIME = """
import os, threading
from streams.process.interpreter import run_in_real_time

go, policies = threading.Event(), []
def note():
    go.wait()
    policies.append(os.sched_getscheduler(threading.get_native_id()))
threads = [threading.Thread(target=note) for _ in range(3)]
for thread in threads[:2]:
    thread.start()
print(run_in_real_time())
threads[2].start()
go.set()
for thread in threads:
    thread.join()
print({*policies, os.sched_getscheduler(0)} == {os.SCHED_RR if run_in_real_time() else os.SCHED_OTHER})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this kind of real-time threads")
@pytest.mark.parametrize("allowed", [True, False])
def test_all_threads_of_a_process_run_in_real_time_if_the_kernel_allows_it(allowed: bool) -> None:
    """Threads that run already, and those that are started later. A refusal changes nothing, and is logged."""
    limited = (
        [] if allowed else ["prlimit", "--rtprio=0", "setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"]
    )
    command = [*limited, sys.executable, "-c", _REALTIME]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    if allowed and shown.stdout.startswith("False"):
        pytest.skip("this process may not have real-time threads")
    assert shown.stdout.split() == [str(allowed), "True"]
    assert ("CAP_SYS_NICE" in shown.stderr) is not allowed


_CLOCK_SCRIPT = """
import asyncio, gc
from streams.process import interpreter

class Cycle: pass

async def main():
    interpreter.FULL_COLLECTION_EVERY_S = 0.5
    full = []
    gc.callbacks.append(lambda phase, info: phase == "stop" and info["generation"] == 2 and full.append(info))
    before = gc.get_threshold()
    gc.collect(1)
    task = asyncio.create_task(interpreter.collect_by_the_clock())
    await asyncio.sleep(0)
    old = Cycle(); old.itself = old
    gc.collect(1)  # it is among the oldest objects now
    kept = [[n] for n in range(300_000)]  # Python would examine all objects several times
    n_young, found = len(full), 0
    del old
    while not found:
        await asyncio.sleep(0.1)
        found = sum(info["collected"] for info in full[n_young:])
    task.cancel()
    await asyncio.wait([task])
    print(n_young, found, gc.get_threshold() == before)

asyncio.run(main())
"""


def test_all_objects_are_examined_by_the_clock_only() -> None:
    """However many objects a process creates; old cycles are found at the next time, and the end restores the rest."""
    shown = subprocess.run(
        [sys.executable, "-c", _CLOCK_SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    n_full_before, found, is_restored = shown.stdout.split()
    assert n_full_before == "0" and int(found) >= 1 and is_restored == "True"
