"""Compare routing policies on a generated chat trace, in one process and without Kafka.

    python examples/compare_policies_offline.py

The engines are simulated, and the index sees every event at once. The routing code is the one that a router uses.
"""

from __future__ import annotations

import random

import numpy as np

from streams.core.routing.decision import RoutePolicy
from streams.core.routing.selection import RouterMode
from streams.sim.engine_config import EngineConfig
from streams.sim.offline import simulate
from streams.sim.trace import generate

N_REQUESTS, N_ENGINES, SEED = 200, 4, 1


def main() -> None:
    """Print the share of prompt tokens that each policy finds in a cache."""
    trace = generate(N_REQUESTS, np.random.default_rng(SEED))
    for mode in (RouterMode.KV, RouterMode.ROUND_ROBIN, RouterMode.RANDOM):
        engines = EngineConfig(n_blocks=4096)
        outcomes = simulate(trace, N_ENGINES, engines, RoutePolicy(mode), random.Random(SEED))
        prompt = sum(outcome.prompt_tokens for outcome in outcomes)
        cached = sum(outcome.cached_tokens for outcome in outcomes)
        print(f"{mode.value:<12} {cached / prompt:6.1%} of {prompt:,} prompt tokens were cached")


if __name__ == "__main__":
    main()
