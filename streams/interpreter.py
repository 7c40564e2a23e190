"""Settings of the Python interpreter for processes that answer others: no long pauses.

What lives here: when threads take turns, and what the garbage collector examines. What must not: what these processes
do.
"""

from __future__ import annotations

import gc
import sys

#: Threads that fold records share the interpreter with the thread that answers. With Python's default of 5 ms, a query
#: waits that long for each busy thread. With one busy thread, the p99 is 5 to 7 ms; this interval reduces it to 0.3 ms.
SWITCH_INTERVAL_S = 1e-4


def prefer_request_threads() -> None:
    """Make busy threads release the interpreter soon. Bridges and all processes that serve the API call this."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def exempt_from_collection() -> None:
    """Exempt everything that exists now from garbage collection. Called once, when a process has loaded its modules.

    A router's modules and compiled kernels are 125,000 objects that live as long as the process. Examining them stops
    every thread for 75 to 150 ms, and happened every few seconds under load.
    """
    gc.collect()
    gc.freeze()
