"""Compiling the kernels before whoever needs them serves, with a word where it takes long; it needs numba.

What lives here: when to say something. What must not: which kernels there are (core.kernels.warm), progress bars (cli).
"""

from __future__ import annotations

import sys
import time

from streams.core.kernels.warm import warm

#: From the cache it takes a tenth of a second. Whoever waits for longer wants to know what for.
ANNOUNCE_AFTER_S = 2.0


def warm_kernels() -> None:
    """Compile or load every kernel, the calling thread's work."""
    began = time.monotonic()
    logged = False
    for _ in warm():
        if not logged and time.monotonic() - began > ANNOUNCE_AFTER_S:
            logged = True
            # Not a log: a worker imports this before Faust has set up its logs.
            sys.stderr.write(
                "kvstreams: compiling kernels, half a minute of a core, once an installation; "
                "`kvstreams warm` does it ahead\n"
            )
            sys.stderr.flush()
    if logged:
        sys.stderr.write(f"kvstreams: kernels are compiled, after {time.monotonic() - began:.0f} s\n")
