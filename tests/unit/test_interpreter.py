"""Garbage collection in processes that answer others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from streams.interpreter import SLICE_NS, slice_ns

_SCRIPT = """
import gc
import streams.router_api.router
from streams.interpreter import exempt_from_collection

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


_SLICES = """
import threading
from streams.interpreter import prefer_request_threads, slice_ns

def answer():
    prefer_request_threads()
    print(slice_ns())
    started = threading.Thread(target=lambda: print(slice_ns()))
    started.start()
    started.join()

before = slice_ns()
answering = threading.Thread(target=answer)
answering.start()
answering.join()
print(slice_ns() == before)
"""


@pytest.mark.skipif(slice_ns() is None, reason="threads have no slices of their own here (before Linux 6.12)")
def test_threads_that_answer_and_those_that_they_start_ask_for_short_slices() -> None:
    """A thread that answers and the threads that it starts have a short slice; other threads keep theirs."""
    shown = subprocess.run([sys.executable, "-c", _SLICES], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [str(SLICE_NS), str(SLICE_NS), "True"]
