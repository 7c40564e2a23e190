"""An engine that is killed and restarted again and again under load, on the same ports."""

from __future__ import annotations

from streams.lab.stack import Stack, wait_workers
from tests.engine_restarts import CACHE, restart_under_load


def test_after_many_restarts_under_load_the_router_has_exactly_the_engines_blocks(stack: Stack) -> None:
    """10 s of what `make chaos` does for two minutes; the last incarnation's blocks are known one by one."""
    worker, (engine,) = stack.worker(), stack.engines(1, CACHE, "m", time_scale=100.0)
    stack.bridge([engine])
    wait_workers(worker.url, 1)
    print(restart_under_load(stack, worker, engine, seconds=10.0, seed=7))
