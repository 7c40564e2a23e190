"""Free ports: which ones are given, and when there are none."""

from __future__ import annotations

import socket
from collections import deque

import pytest

from streams.errors import KvStreamsError
from streams.lab.kafka import ports


def test_a_port_is_not_given_again_while_its_server_may_not_listen_yet() -> None:
    """Two calls one after the other never agree, although nothing listens on the ports of the first one."""
    given = [ports.free_port() for _ in range(ports.GIVEN_KEPT // 2)] + ports.free_ports(ports.GIVEN_KEPT // 2)
    assert len(set(given)) == ports.GIVEN_KEPT


def test_a_port_that_is_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all ports are in use, the error says which ones were tried."""
    free, taken = ports.free_ports(2)
    monkeypatch.setattr(ports, "_given", deque())
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr(ports, "PORTS", range(taken, taken + 1))
        with pytest.raises(KvStreamsError, match=f"between {taken} and {taken}"):
            ports.free_port()
    monkeypatch.setattr(ports, "PORTS", range(free, free + 1))
    assert ports.free_port() == free


def test_ports_in_a_row_are_free_and_are_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are within the range, and none of them is given afterwards."""
    first = ports.free_ports_in_a_row(3)
    monkeypatch.setattr(ports, "_given", deque(maxlen=ports.GIVEN_KEPT))
    monkeypatch.setattr(ports, "PORTS", range(first, first + 3))
    assert ports.free_ports_in_a_row(3) == first
    with pytest.raises(KvStreamsError, match="no free port"):
        ports.free_port()
    monkeypatch.setattr(ports, "_given", deque([first + 1], maxlen=ports.GIVEN_KEPT))
    with pytest.raises(KvStreamsError, match="no free port"):
        ports.free_ports_in_a_row(2)
