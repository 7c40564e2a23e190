"""200,000 damaged event messages of every dialect: `python -m tests.event_fuzz_soak [MESSAGES [SEED]]`.

Each is decoded, written as a record of `kv-events` and indexed, by one process without Kafka. Prints how many payloads
or events could not be used, by reason. Fails at any exception but a refusal, at a batch without its record, and if the
index differs from what the engine holds once it has reported an empty cache and its blocks.
"""

from __future__ import annotations

import sys
import time

from tests.helpers.event_fuzz import fuzz
from tests.helpers.event_mutations import payloads

#: Damaged messages between two checks of the index.
N_BETWEEN_CHECKS = 250


def main(n_messages: int = 200_000, seed: int = 0) -> None:
    """Send the messages and judge."""
    began = time.monotonic()
    refused = fuzz(payloads(), seed, n_messages, N_BETWEEN_CHECKS)
    print(f"seed {seed}: {n_messages} damaged messages in {time.monotonic() - began:.0f} s")
    for reason, count in refused.most_common():
        print(f"{reason:>20} {count:>7}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
