"""100,000 malformed requests over every call of a router: `python -m tests.http_fuzz_soak [REQUESTS [SEED]]`.

Prints how many requests were answered with each status. Fails at a 500, at an error in another shape than that of all
errors, and if the router's state has changed.
"""

from __future__ import annotations

import sys
import time

from tests.helpers.http_fuzz import Fuzzer, send_all
from tests.helpers.http_state import SETTINGS, state_of
from tests.helpers.local_router import local_router


def main(n_requests: int = 100_000, seed: int = 0) -> None:
    """Send the requests and judge."""
    with local_router(SETTINGS) as served:
        before, began = state_of(served.api), time.monotonic()
        statuses = send_all(served.api, Fuzzer(seed), n_requests)
        print(f"seed {seed}: {n_requests} requests in {time.monotonic() - began:.0f} s")
        for status, count in sorted(statuses.items()):
            print(f"{status or 'no answer':>9} {count:>7}")
        assert state_of(served.api) == before, "the state has changed"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
