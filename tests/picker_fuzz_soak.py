"""100,000 malformed or hostile ext_proc streams to a picker: `python -m tests.picker_fuzz_soak [STREAMS [SEED]]`.

Prints how many streams ended in which way. Fails at an answer that Envoy cannot read, at a fault of the picker, and if
a stream, a body, a task, a buffer or a booking without an end is left.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time

from tests.helpers.picker_fuzz import StreamFuzzer, fuzz

#: Streams after which everything must be gone.
_ROUND = 10_000


def main(n_streams: int = 100_000, seed: int = 0) -> None:
    """Send the streams in rounds, in which the picker ends streams with its picks or does not, and judge."""
    for n in range(-(-n_streams // _ROUND)):
        began_s = time.monotonic()
        size = min(_ROUND, n_streams - n * _ROUND)
        outcomes = asyncio.run(fuzz(StreamFuzzer(seed + n), size, ends_stream=n % 2 == 0))
        rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"seed {seed + n}: {size} streams in {time.monotonic() - began_s:.0f} s, at most {rss_mib} MiB so far")
        for outcome, count in sorted(outcomes.items()):
            print(f"{count:>7} {outcome}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
