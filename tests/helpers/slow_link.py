"""A TCP endpoint whose answers pass at a limited rate, as over a slow link between a bridge and an engine."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def slow_link(address: str, bytes_per_s: int) -> Iterator[str]:
    """Give another address of a TCP endpoint, whose answers pass at this rate."""
    target = urlsplit(address)
    stopping = threading.Event()

    def pump(source: socket.socket, sink: socket.socket, rate: float) -> None:
        with source, sink, selectors.DefaultSelector() as readable:
            readable.register(source, selectors.EVENT_READ)
            while not stopping.is_set():
                if not readable.select(0.1):
                    continue
                try:
                    part = source.recv(2048)
                    if not part:
                        return
                    sink.sendall(part)
                except OSError:
                    return
                stopping.wait(len(part) / rate)

    def accept() -> None:
        while not stopping.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            server = socket.create_connection((target.hostname, target.port))
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
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stopping.set()
            accepting.join()
            for thread in pumps:
                thread.join()
