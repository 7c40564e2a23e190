"""An engine's replay socket in the frames of different versions, and the window of batches after a gap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import xxhash
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from streams.engines import replay as module
from streams.engines.continuity import ReplayCheck
from streams.engines.replay import SEQUENCE, Batch, ReplaySilent, Window, check_last_batch, read_answer, replay

END = b"\xff" * 8


@pytest.mark.parametrize(
    "frames",
    [[SEQUENCE.pack(5), b"p"], [b"", SEQUENCE.pack(5), b"p"], [b"", b"topic", SEQUENCE.pack(5), b"p"]],
    ids=["2", "3", "4"],
)
def test_an_answer_of_any_version_is_read(frames: list[bytes]) -> None:
    """Number and payload are the last two frames, whatever precedes them."""
    assert read_answer(frames) == Batch(5, b"p")


@pytest.mark.parametrize("frames", [[END], [END, b""], [b"", END], [b"", END, b""], [b"", b"t", END, b""]])
def test_the_end_of_any_version_is_read(frames: list[bytes]) -> None:
    """The number -1 ends a replay, with or without a payload."""
    assert read_answer(frames) is None


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"x", b"p"], [b"", b"short", b"p"], [b""] * 4 + [SEQUENCE.pack(1), b"p"]]
)
def test_frames_that_are_not_an_answer_end_the_replay_as_silence_does(frames: list[bytes]) -> None:
    """The batches received before such frames remain valid."""
    with pytest.raises(ReplaySilent):
        read_answer(frames)


class Engine:
    """A replay socket with chosen answers. kept: batches by number. prefix: frames before the number."""

    def __init__(self, kept: dict[int, bytes], prefix: list[bytes], *, ends: bool = True) -> None:
        self.kept, self.prefix, self.ends = kept, prefix, ends
        self.requested: list[int] = []

    async def serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            client, empty, start = await socket.recv_multipart()
            assert empty == b""
            self.requested.append(SEQUENCE.unpack(start)[0])
            for sequence, payload in self.kept.items():
                if sequence >= self.requested[-1]:
                    await socket.send_multipart([client, *self.prefix, SEQUENCE.pack(sequence), payload])
            if self.ends:
                await socket.send_multipart([client, *self.prefix, END, b""])


def with_engine(engine: Engine, act: Callable[[zmq.asyncio.Context, str], Awaitable[None]]) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        with context.socket(zmq.ROUTER) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            serving = asyncio.ensure_future(engine.serve(socket))
            try:
                await act(context, f"tcp://127.0.0.1:{port}")
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
        context.destroy(linger=0)

    asyncio.run(main())


@pytest.mark.parametrize("prefix", [[b""], [b"", b"kv"]], ids=["three frames", "four frames"])
def test_a_replay_yields_the_kept_batches_in_order(prefix: list[bytes]) -> None:
    """A replay over a real socket yields the batches from the requested number to the end marker."""
    engine = Engine({n: b"p%d" % n for n in range(3, 8)}, prefix)

    async def act(context: zmq.asyncio.Context, address: str) -> None:
        assert [batch async for batch in replay(context, address, 5)] == [Batch(n, b"p%d" % n) for n in (5, 6, 7)]
        assert [batch.sequence async for batch in replay(context, address, 0)] == [3, 4, 5, 6, 7]
        assert [batch async for batch in replay(context, address, 8)] == []

    with_engine(engine, act)
    assert engine.requested == [5, 0, 8]


def test_a_replay_without_an_end_yields_its_batches_and_then_raises() -> None:
    """A ROUTER socket drops answers when its queue is full; the batches received before that can be used."""
    engine = Engine({1: b"a", 2: b"b"}, [b""], ends=False)

    async def act(context: zmq.asyncio.Context, address: str) -> None:
        got: list[Batch] = []

        async def collect() -> None:
            async for batch in replay(context, address, 0, timeout_s=0.2):
                got.append(batch)  # noqa: PERF401 - the batches before the exception are checked

        with pytest.raises(ReplaySilent):
            await collect()
        assert got == [Batch(1, b"a"), Batch(2, b"b")]

    with_engine(engine, act)


async def test_a_replay_whose_request_cannot_be_sent_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a socket of another type has refused a connection, ZMQ sends nothing for a while; this ends in time."""

    # As if the connection had just been refused; that happens once in some hundred times.
    monkeypatch.setattr(zmq.asyncio.Socket, "connect", lambda *_: None)
    context = zmq.asyncio.Context()
    batches = replay(context, "tcp://127.0.0.1:1", 0, timeout_s=0.1)
    with pytest.raises(ReplaySilent, match="takes no request"):
        await asyncio.wait_for(anext(batches), 10)
    context.destroy(linger=0)


def test_the_last_batch_shows_whether_it_is_the_same_incarnation() -> None:
    """The check distinguishes identical bytes, other bytes, an unsent number, a dropped batch and no answer."""
    digest = xxhash.xxh3_64_intdigest(b"p5")

    async def act(context: zmq.asyncio.Context, address: str) -> None:
        assert await check_last_batch(context, address, 5, digest) is ReplayCheck.SAME
        assert await check_last_batch(context, address, 5, digest + 1) is ReplayCheck.OTHER
        assert await check_last_batch(context, address, 7, digest) is ReplayCheck.UNSENT
        assert await check_last_batch(context, address, 2, digest) is ReplayCheck.FORGOTTEN
        assert await check_last_batch(context, None, 5, digest) is ReplayCheck.SILENT

    with_engine(Engine({4: b"p4", 5: b"p5", 6: b"p6"}, [b""]), act)
    assert module.REPLAY_TIMEOUT_S >= 1.0  # vLLM checks the socket every 100 ms


@given(order=st.permutations(range(12)), lost=st.sets(st.integers(0, 11), max_size=4), first=st.integers(0, 3))
def test_a_window_returns_batches_in_order(order: list[int], lost: set[int], first: int) -> None:
    """Each batch is returned once and in turn, and giving up a gap returns the number of lost batches."""
    window = Window(first)
    out: list[int] = []

    def drain() -> None:
        while (batch := window.take()) is not None:
            assert batch.payload == b"%d" % batch.sequence
            out.append(batch.sequence)

    for sequence in [*order, *order]:
        if sequence not in lost:
            window.offer(Batch(sequence, b"%d" % sequence))
            drain()
    n_lost = 0
    while (until := window.gap_until) is not None:
        n_lost += window.skip_to(until)
        drain()
    assert out == [n for n in range(first, 12) if n not in lost]
    assert n_lost == len([n for n in lost if first <= n < max(out, default=first)])


def test_a_window_is_full_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is full at either limit, and no longer once batches have left it."""
    monkeypatch.setattr(module, "BUFFERED_BATCHES_MAX", 3)
    monkeypatch.setattr(module, "BUFFERED_BYTES_MAX", 100)
    window = Window(0)
    window.offer(Batch(1, b"x"))
    window.offer(Batch(2, b"x"))
    assert not window.full
    window.offer(Batch(3, b"x"))
    assert window.full
    window.skip_to(1)
    assert window.take() == Batch(1, b"x")
    assert not window.full
    window.offer(Batch(9, b"x" * 100))
    assert window.full
    assert window.drop() == 3
    assert not window.full and window.gap_until is None
