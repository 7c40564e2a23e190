"""A TCP endpoint whose answers pass at a limited rate, or not at all, as over a bad link of a bridge to an engine."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


@contextmanager
def slow_link(address: str, bytes_per_s: float, cut: threading.Event | None = None) -> Iterator[str]:
    """Give another address of a TCP endpoint, whose answers pass at this rate.

    cut: while it is set, nothing passes in either direction, and connections stay open, as if all packets were lost.
    """
    target = urlsplit(address)
    stopping = threading.Event()

    def is_cut() -> bool:
        return cut is not None and cut.is_set() and not stopping.wait(0.1)

    def pump(source: socket.socket, sink: socket.socket, rate: float) -> None:
        with source, sink, selectors.DefaultSelector() as readable:
            readable.register(source, selectors.EVENT_READ)
            while not stopping.is_set():
                if not readable.select(0.1) or is_cut():
                    continue
                try:
                    part = source.recv(2048)
                    sink.sendall(part)
                except OSError:
                    part = b""
                if not part:
                    break
                stopping.wait(len(part) / rate)
            with suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)  # the pump of the other direction has this socket as well

    def accept() -> None:
        while not stopping.is_set():
            if is_cut():
                continue
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            try:
                server = socket.create_connection((target.hostname, target.port))
            except OSError:  # the endpoint's process has ended
                client.close()
                continue
            for source, sink, rate in ((client, server, 1e9), (server, client, bytes_per_s)):
                pumps.append(threading.Thread(target=pump, args=(source.dup(), sink.dup(), rate)))
                pumps[-1].start()
            client.close()
            server.close()

    pumps: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"{target.scheme}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stopping.set()
            accepting.join()
            for thread in pumps:
                thread.join()
