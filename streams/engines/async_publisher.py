"""The publisher inside an engine, for asyncio.

What lives here: the same calls as coroutines. What must not: anything that the publisher does itself.

A call of the publisher hashes tokens, and waits while Kafka's client has no space. So each runs on one thread that the
publisher owns, in the order of the calls; the event loop goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

from streams.engines.publisher import KvEventPublisher
from streams.settings import BridgeSettings

_Result = TypeVar("_Result")


class AsyncKvEventPublisher:
    """KvEventPublisher with the same methods as coroutines; by default it holds a lease of `bridge_lease_s`.

    async with AsyncKvEventPublisher(settings, worker_id=7, model="m") as publisher:
        await publisher.stored([11, 12], token_ids, parent=None)
    """

    def __init__(self, settings: BridgeSettings, worker_id: int, model: str, **options: Any) -> None:
        """options: those of KvEventPublisher. Kafka is connected to when the `async with` block begins."""
        options.setdefault("lease_s", settings.bridge_lease_s)
        self._open = partial(KvEventPublisher, settings, worker_id, model, **options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"publisher-{worker_id}")
        self._publisher: KvEventPublisher | None = None

    async def __aenter__(self) -> Self:
        self._publisher = await self._call(self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        publisher, self._publisher = self._publisher, None
        try:
            if publisher is not None:
                await self._call(publisher.close)
        finally:
            self._thread.shutdown(wait=False)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a public method of KvEventPublisher as a coroutine function."""
        if name.startswith("_") or not callable(getattr(KvEventPublisher, name, None)):
            raise AttributeError(f"{type(self).__name__} has no {name}")

        async def call(*args: Any, **options: Any) -> Any:
            if self._publisher is None:
                raise RuntimeError("the publisher is used outside of its `async with` block")
            return await self._call(partial(getattr(self._publisher, name), *args, **options))

        return call

    async def _call(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
