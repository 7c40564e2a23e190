"""Garbage collection in processes that answer others."""

from __future__ import annotations

import subprocess
import sys

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
