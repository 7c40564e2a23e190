"""Report cache events from inside an engine, without a bridge.

    kvstreams kafka up && kvstreams topics create
    python examples/embed_the_publisher.py

The settings come from the environment and `kvstreams.toml`, as for every other process.
"""

from __future__ import annotations

from streams.engines.publisher import KvEventPublisher
from streams.settings import load


def main() -> None:
    """Store two blocks of a prompt and evict the second one."""
    settings = load().settings
    tokens = list(range(2 * settings.block_size))
    with KvEventPublisher(settings, worker_id=7, model="m") as publisher:
        publisher.stored([11, 12], token_ids=tokens, parent=None)  # engine hashes of the two blocks
        publisher.removed([12])
    print("worker 7 now holds block 11; register it with PUT /workers/7, so that it gets requests")


if __name__ == "__main__":
    main()
