"""What live simulations share: model time from wall time, and serving until a signal arrives.

What lives here: `ScaledClock`, the limits of its scale, and the main loop of a process. What must not: what is
simulated.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from streams.errors import SettingsError
from streams.process.interpreter import exempt_from_collection

#: At this scale, one step of the loop is already more than three model minutes.
TIME_SCALE_MAX = 100_000.0
#: Minimum wall time between two steps. vLLM steps every 10 to 20 ms. Without a limit, a large `time_scale` would wake
#: the loop for every block of every request, 10,000 times per second at 100 model ms per wall ms.
STEP_WALL_S = 0.002


class Stoppable(Protocol):
    """A server that can be stopped."""

    def stop(self) -> Awaitable[Any]:
        """Close everything."""


_Server = TypeVar("_Server", bound=Stoppable)


def check_time_scale(time_scale: float) -> None:
    """Raise SettingsError for an impossible scale."""
    if not 0.0 < time_scale <= TIME_SCALE_MAX:
        raise SettingsError(f"time_scale is {time_scale}; it must be above 0, at most {TIME_SCALE_MAX}")


class ScaledClock:
    """Model milliseconds since the clock was created; they never go back. scale: model ms per wall ms."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._started_s = time.monotonic()

    def now_ms(self) -> float:
        """Return the model time."""
        return (time.monotonic() - self._started_s) * 1000.0 * self._scale

    def wall_s_until(self, model_ms: float) -> float:
        """Return the wall seconds until a model time, 0.0 if it is past."""
        return max(0.0, (model_ms - self.now_ms()) / 1000.0 / self._scale)


def run_until_signalled(
    serve: Callable[[], Awaitable[_Server]], on_started: Callable[[_Server], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. on_started: called once the server listens."""

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

    exempt_from_collection()
    asyncio.run(main())
