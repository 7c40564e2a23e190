"""Compiling the kernels before whoever needs them serves, with a word where it takes long; it needs numba.

What lives here: when to say something. What must not: which kernels there are (core.kernels.warm), progress bars (cli).
"""

from __future__ import annotations

import sys
import time

from streams.core.kernels.warm import warm

#: From the cache it takes a tenth of a second. Whoever waits for longer wants to know what for.
SAY_AFTER_S = 2.0


def warm_kernels() -> None:
    """Compile or load every kernel, the calling thread's work."""
    began = time.monotonic()
    told = False
    for _ in warm():
        if not told and time.monotonic() - began > SAY_AFTER_S:
            told = True
            # Not a log: a worker imports this before Faust has set up its logs.
            sys.stderr.write(
                "kvstreams: compiling kernels, half a minute of a core, once an installation; "
                "`kvstreams warm` does it ahead\n"
            )
            sys.stderr.flush()
    if told:
        sys.stderr.write(f"kvstreams: kernels are compiled, after {time.monotonic() - began:.0f} s\n")
