"""Metrics of the process itself, which every page has: its version, its memory, and how much it may use.

What lives here: reading them from the system, and the answer of GET /metrics, which has them after the metrics of what
the process does. What must not: those (router_api.http.metrics, agent_metrics, engines.bridge_metrics).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from streams.process.metrics import Label, Metric, MetricsRegistry, gauge
from streams.version import __version__

#: Files with the memory limit of the container, of both versions of control groups. "max", or a number beyond the
#: machine's memory, is no limit.
_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """What the declarations read. Bytes; 0 where the system does not say."""

    resident_bytes: int
    limit_bytes: int


PROCESS_METRICS: tuple[Metric[ProcessSnapshot], ...] = (
    gauge(
        "kvstreams_build_info",
        "1; its label has the version of kvstreams",
        lambda _: {__version__: 1},
        Label("version", values_max=1),
    ),
    gauge(
        "kvstreams_resident_memory_bytes",
        "Memory that the process uses, in bytes",
        lambda now: now.resident_bytes,
    ),
    gauge(
        "kvstreams_memory_limit_bytes",
        "Memory that the process may use at most, in bytes: the limit of its container, or the machine's memory",
        lambda now: now.limit_bytes,
    ),
)


def process_snapshot() -> ProcessSnapshot:
    """Read the memory of this process, which takes some 20 us."""
    return ProcessSnapshot(_resident_bytes(), _limit_bytes())


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no Linux
        return 0


def _limit_bytes() -> int:
    try:
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        limit = 0
    for file in _LIMIT_FILES:
        try:
            limit = min(limit, int(file.read_text())) if limit else int(file.read_text())
        except (OSError, ValueError):  # no such control group, or no limit
            continue
    return limit


def metrics_response(*registries: MetricsRegistry[Any]) -> web.Response:
    """Answer GET /metrics with these registries and the process's own metrics; all metrics have different names."""
    process = registries[0].process if registries else ""
    own = MetricsRegistry(PROCESS_METRICS, process_snapshot, process)
    page = b"".join(registry.page() for registry in (*registries, own))
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})
