"""Routing of your own: send each request to the worker that would have the fewest tokens to compute.

    kvstreams up                                           # Kafka, engines, a bridge and a router, in a terminal
    python examples/least_prefill.py http://127.0.0.1:8000 # the router's address, as `kvstreams up` prints it

The router says what each worker's load would be. This program chooses, and lets the router book its choice.
"""

from __future__ import annotations

import argparse
import asyncio

from streams.client import KvRouterClient
from streams.errors import KvStreamsError

PROMPTS = [[*range(1, 101)], [*range(1, 101)], [*range(500, 700)]]


async def main(url: str) -> None:
    """Route a few prompts, of which two are equal, and print where they went."""
    async with KvRouterClient(url) as router:
        for token_ids in PROMPTS:
            loads = await router.get_potential_loads(token_ids)
            best = min(loads, key=lambda load: load["potential_prefill_tokens"])
            stream = await router.generate(
                token_ids, worker_id=best["worker_id"], dp_rank=best["dp_rank"], stop_conditions={"max_tokens": 8}
            )
            tokens = [token async for chunk in stream for token in chunk["token_ids"]]
            print(f"worker {best['worker_id']}: {best['potential_prefill_tokens']} to compute, {len(tokens)} generated")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a router")
    try:
        asyncio.run(main(parser.parse_args().url))
    except KvStreamsError as exc:  # no router answers there, for example
        raise SystemExit(str(exc)) from None
