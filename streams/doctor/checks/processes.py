"""Clocks, memory and versions of everything that reports them (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streams.core.loads.bookings import BOOKINGS_BYTES_MAX
from streams.doctor.findings import Finding, Group, listed
from streams.doctor.observations import ClockReading, Observations, PageSeen
from streams.version import __version__

#: How far a clock may be off. Nothing compares clocks of two machines more finely than this, but tokens, certificates
#: and the reading of logs need them.
CLOCK_OFF_S = 3.0

#: The share of its memory limit from which on a process may be killed any moment.
MEMORY_SHARE_MAX = 0.9

_MEMORY = "kvstreams_resident_memory_bytes"
_MEMORY_LIMIT = "kvstreams_memory_limit_bytes"
BUILD_INFO = "kvstreams_build_info"

#: Metrics that are above 0 while a process lacks what did not fit, and what that is. Counts of bookings that were
#: dropped are no such metrics: the bookings have ended since, and the counts stay until the process ends.
OVER_CAPACITY = {
    "kvstreams_records_over_capacity_total": "records of the index",
    "kvstreams_pooled_over_capacity": "rows of pooled blocks",
    "kvstreams_labels_over_capacity": "labels of blocks",
}


def check_clocks(seen: Observations) -> Iterator[Finding]:
    """The clocks of engines, routers, workers, bridges and the broker agree with this machine's."""
    logs = None if seen.kafka is None else seen.kafka.logs
    clocks: dict[str, ClockReading] = {} if logs is None else dict(logs.clocks)
    for engine in seen.engines:
        if engine.clock is not None:
            clocks[f"engine {engine.worker.url}"] = engine.clock
    for router in seen.routers:
        if router.clock is not None:
            clocks[f"router {router.url}"] = router.clock
    for subject, clock in sorted(clocks.items()):
        off_s = clock.least_s if clock.least_s > 0 else min(clock.most_s, 0.0)
        if abs(off_s) > CLOCK_OFF_S:
            direction = "ahead of" if off_s > 0 else "behind"
            yield Finding(
                Group.CLOCKS,
                "clock_off",
                subject,
                f"its clock is about {abs(off_s):.0f} s {direction} this machine's",
                "Synchronise both machines with NTP. If many clocks are off by the same time, this machine's is wrong",
            )


def check_memory(seen: Observations) -> Iterator[Finding]:
    """No process is near its memory limit or had to drop anything for lack of capacity."""
    for page in _pages(seen):
        subject = f"process {page.url}"
        if page.error is not None:
            yield Finding(
                Group.MEMORY,
                "metrics_unreachable",
                subject,
                f"its metrics cannot be read: {page.error}",
                "Check the address, metrics_port, and the right `read` of the token",
            )
        used, limit = page.total(_MEMORY), page.total(_MEMORY_LIMIT)
        if used is not None and limit and used > MEMORY_SHARE_MAX * limit:
            yield Finding(
                Group.MEMORY,
                "memory_low",
                subject,
                f"it uses {used / 1e6:.0f} MB of the {limit / 1e6:.0f} MB that it may use",
                "Give it more memory, or fewer engines and bookings; the system kills it at the limit",
            )
        bookings = page.total("kvstreams_bookings_bytes") or 0.0
        if bookings > MEMORY_SHARE_MAX * BOOKINGS_BYTES_MAX:
            yield Finding(
                Group.MEMORY,
                "bookings_near_limit",
                subject,
                f"its bookings use {bookings / 1e6:.0f} MB of at most {BOOKINGS_BYTES_MAX / 1e6:.0f} MB; beyond that, "
                "the oldest ones are dropped",
                "Clients must end their requests with DELETE /loads/{request_id}; booking_ttl_s ends those that they "
                "forget",
            )
        for name, what in OVER_CAPACITY.items():
            number = page.total(name)
            if number:
                yield Finding(
                    Group.MEMORY,
                    "over_capacity",
                    subject,
                    f"it dropped {number:.0f} {what}, because they were over its limit ({name})",
                    "docs/prefix-index.md and docs/bookings.md have the limits. Divide the fleet into several scopes",
                )


def versions_of(seen: Observations) -> Mapping[str, str]:
    """The versions that were read, by subject; this command's own is one of them."""
    versions = {"doctor": __version__}
    for page in _pages(seen):
        version = page.label(BUILD_INFO, "version")
        if version is not None:
            versions[f"process {page.url}"] = version
    for engine in seen.engines:
        if engine.version is not None:
            versions[f"engine {engine.worker.url}"] = engine.version
    return versions


def check_versions(seen: Observations) -> Iterator[Finding]:
    """All processes run one version of kvstreams, and the engines of a model one version of the engine."""
    versions = versions_of(seen)
    ours = {subject: version for subject, version in versions.items() if not subject.startswith("engine ")}
    if len(set(ours.values())) > 1:
        yield Finding(
            Group.VERSIONS,
            "versions_differ",
            "kvstreams",
            f"processes run different versions: {_by_version(ours)}",
            "Upgrade Faust workers and routers first, then bridges and publishers (docs/tables.md)",
        )
    by_model: dict[str, dict[str, str]] = {}
    for engine in seen.engines:
        if engine.version is not None:
            by_model.setdefault(engine.worker.model, {})[f"worker {engine.worker.worker_id}"] = engine.version
    for model, of_model in sorted(by_model.items()):
        if len(set(of_model.values())) > 1:
            yield Finding(
                Group.VERSIONS,
                "engine_versions_differ",
                f"model {model}",
                f"its engines run different versions: {_by_version(of_model)}",
                "Run one version, or check that chat template and tokenizer are the same in all of them",
            )


def _by_version(versions: Mapping[str, str]) -> str:
    by_version: dict[str, list[str]] = {}
    for subject, version in versions.items():
        by_version.setdefault(version, []).append(subject)
    return "; ".join(f"{version} in {listed(subjects)}" for version, subjects in sorted(by_version.items()))


def _pages(seen: Observations) -> tuple[PageSeen, ...]:
    return (*(router.page for router in seen.routers if router.page is not None), *seen.pages)
