"""Routers with `router_realtime`, as real processes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from streams.lab.processes import Child, Children
from streams.lab.stack import Stack
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.api import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this kind of real-time threads")


def policies(child: Child) -> set[int]:
    """How the kernel schedules the threads of a process."""
    found = set()
    for thread in Path(f"/proc/{child.pid}/task").iterdir():
        try:
            found.add(os.sched_getscheduler(int(thread.name)))
        except ProcessLookupError:  # it has ended
            continue
    return found


def is_allowed() -> bool:
    """Whether the processes that this one starts may have real-time threads."""
    before, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, before, priority)
    return True


def test_all_threads_of_a_router_are_real_time_threads_or_the_log_says_why_not(scope: Settings, tmp_path: Path) -> None:
    """Also in a worker that serves a router. A router alone without the setting has none."""
    with Children() as children:
        stack = Stack(replace(scope, router_realtime=True), tmp_path, children)
        worker, router = stack.worker(), stack.router("router")
        plain = stack.router("plain", router_realtime=False)
        for child in (worker.child, router.child):
            if is_allowed():
                # A client of Kafka starts threads at any time, which are real-time threads from their beginning.
                wait_for(lambda: policies(child) == {os.SCHED_RR}, PATIENCE_S, f"{child.name}'s threads")  # noqa: B023
            else:
                assert "CAP_SYS_NICE" in child.log_path.read_text()
        assert policies(plain.child) == {os.SCHED_OTHER}
