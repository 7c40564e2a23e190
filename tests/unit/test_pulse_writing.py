"""What a bridge says in its pulses after it was stopped."""

from __future__ import annotations

import asyncio
import time

from streams.core.ids import WorkerId
from streams.engines.connection import PING_INTERVAL_S, PING_TIMEOUT_S
from streams.engines.pulse import Pulse
from streams.kafka.records import PULSES
from tests.helpers.recording_producer import RecordingProducer

TOLERATED_S = 0.75
BRIDGE = "b"


def test_after_a_pause_workers_are_listed_once_routers_have_read_what_came_meanwhile() -> None:
    """A bridge that continues passes on old events at once, but a router whose lag is tolerated does not have them."""
    kafka = RecordingProducer(acknowledges=True)
    pulse = Pulse(kafka, "metrics", BRIDGE, lambda: True, lambda: [WorkerId(1)], TOLERATED_S)

    def listed() -> list[bool]:
        key = PULSES.keys.pack(BRIDGE)
        return [PULSES.decode_row(key, value, None).fed == (1,) for value in kafka.values("metrics")]

    async def run() -> tuple[int, float]:
        running = asyncio.create_task(pulse.run())
        await asyncio.sleep(0.6)
        n_before = len(listed())
        time.sleep(2 * TOLERATED_S)  # the whole process is stopped
        continued_s = time.monotonic()
        while not any(listed()[n_before:]):
            await asyncio.sleep(0.01)
        running.cancel()
        return n_before, time.monotonic() - continued_s

    n_before, after_s = asyncio.run(run())
    assert n_before >= 2 and all(listed()[:n_before])
    # By then the connections that went dead during the pause have ended, and routers have read that.
    assert after_s >= PING_INTERVAL_S + PING_TIMEOUT_S + TOLERATED_S
    assert not any(listed()[n_before:-1]) and len(listed()) > n_before + 2
