"""What live simulations share: model time from wall time, and serving until a signal comes.

What lives here: `ScaledClock`, the limits of its scale, and the loop's end. What must not: what is simulated.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from streams.errors import SettingsError

#: Slower than this nothing would ever happen, faster than this a step is more than a minute.
TIME_SCALE_MAX = 100_000.0
#: Wall time between two steps at least. vLLM steps every 10 to 20 ms; a large `time_scale` would otherwise wake for
#: every block of every request, 10,000 times a second at 100 model ms per wall ms.
STEP_WALL_S = 0.002


class Stoppable(Protocol):
    """A server that can be stopped."""

    def stop(self) -> Awaitable[Any]:
        """Close everything."""


_Server = TypeVar("_Server", bound=Stoppable)


def check_time_scale(time_scale: float) -> None:
    """Raise SettingsError for one that cannot be."""
    if not 0.0 < time_scale <= TIME_SCALE_MAX:
        raise SettingsError(f"time_scale is {time_scale}; it must be above 0, at most {TIME_SCALE_MAX}")


class ScaledClock:
    """Model milliseconds since this was made; they never turn back. scale: of them in one wall ms."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._started_s = time.monotonic()

    def now_ms(self) -> float:
        """Model time."""
        return (time.monotonic() - self._started_s) * 1000.0 * self._scale

    def wall_s_until(self, model_ms: float) -> float:
        """Wall seconds until then, 0.0 for what is past."""
        return max(0.0, (model_ms - self.now_ms()) / 1000.0 / self._scale)


def run_until_signalled(
    serve: Callable[[], Awaitable[_Server]], on_started: Callable[[_Server], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. on_started: called once it listens."""

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        server = await serve()
        try:
            if on_started is not None:
                on_started(server)
            await stop.wait()
        finally:
            await server.stop()

    asyncio.run(main())
