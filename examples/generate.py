"""Generate with the engine that the fleet's router chooses, with a routing override for this request.

    kvstreams up                                          # Kafka, engines, a bridge and a router, in another terminal
    python examples/generate.py http://127.0.0.1:8000     # the router's address, as `kvstreams up` prints it

Prints the worker and each piece of the answer. With `KvPushRouter(settings)` in place of `KvRouterClient(url)`, the
router runs in this process.
"""

from __future__ import annotations

import argparse
import asyncio

from streams.client import KvRouterClient
from streams.errors import KvStreamsError


async def main(url: str, model: str | None = None) -> None:
    """Generate twenty tokens."""
    async with KvRouterClient(url) as router:
        stream = await router.generate(
            token_ids=list(range(1, 101)),
            model=model,
            stop_conditions={"max_tokens": 20, "ignore_eos": True},
            sampling_options={"temperature": 0.7, "top_p": 0.9},
            router_config_override={"overlap_score_weight": 2.0, "router_temperature": 0.5},
        )
        print(f"worker {stream.booking.worker_id} holds {stream.booking.overlap_blocks} blocks of the prompt")
        async for chunk in stream:
            print(chunk["token_ids"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a router")
    parser.add_argument("model", nargs="?", help="if the fleet serves several")
    given = parser.parse_args()
    try:
        asyncio.run(main(given.url, given.model))
    except KvStreamsError as exc:  # no router answers there, for example
        raise SystemExit(str(exc)) from None
