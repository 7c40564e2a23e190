"""One run of the doctor: read everything that is asked for, then check it.

What lives here: the order of reading, and the table of checks. What must not: a single check (checks/) or call (the
readers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from streams.core.workers import Worker
from streams.doctor.checks import engines, index, kafka, lmcache, processes, registry, routers
from streams.doctor.engine_reading import read_engines
from streams.doctor.findings import DoctorReport, Finding, Group
from streams.doctor.kafka_reading import read_kafka
from streams.doctor.observations import EngineSeen, KafkaSeen, Observations, StateSeen
from streams.doctor.probe import probe_engines
from streams.doctor.router_reading import read_pages, read_routers
from streams.doctor.state_reading import read_states
from streams.doctor.tokenizer_reading import read_files, read_tokenizers
from streams.errors import SchemasIncompatible
from streams.kafka.schema_compatibility import check_schemas
from streams.settings import AgentSettings, RouterServerSettings

#: Every check by its group, in the order of the report: what others follow from comes first.
CHECKS: Sequence[tuple[Group, Callable[[Observations], Iterable[Finding]]]] = (
    (Group.KAFKA, kafka.check_kafka),
    (Group.TOPICS, kafka.check_topics),
    (Group.SCHEMAS, kafka.check_schemas_read),
    (Group.INDEX, index.check_owners),
    (Group.INDEX, index.check_lag),
    (Group.REGISTRY, registry.check_registry),
    (Group.LEASES, registry.check_leases),
    (Group.LMCACHE, lmcache.check_feeds),
    (Group.LMCACHE, lmcache.check_connectors),
    (Group.DEAD_LETTERS, registry.check_dead_letters),
    (Group.ENGINES, engines.check_engines),
    (Group.TOKENIZERS, engines.check_tokenizers),
    (Group.PROBE, engines.check_probe),
    (Group.ROUTERS, routers.check_routers),
    (Group.ROUTERS, routers.check_states),
    (Group.CLOCKS, processes.check_clocks),
    (Group.MEMORY, processes.check_memory),
    (Group.VERSIONS, processes.check_versions),
)

#: Groups that need no Kafka, those that need no logs, and those that need no waiting for owners and bridges. What the
#: groups that are not skipped do not need is not read.
_WITHOUT_KAFKA = frozenset({Group.ROUTERS, Group.MEMORY, Group.VERSIONS})
_WITHOUT_LOGS = _WITHOUT_KAFKA | {Group.KAFKA, Group.TOPICS}
_WITHOUT_WAITING = _WITHOUT_LOGS | {
    Group.SCHEMAS,
    Group.REGISTRY,
    Group.DEAD_LETTERS,
    Group.ENGINES,
    Group.TOKENIZERS,
    Group.PROBE,
}


@dataclass(frozen=True, slots=True)
class Order:
    """What is examined. routers, pages: URLs of routers, and of metrics pages of other processes.

    tokenizers: paths of tokenizers by model, "" for all others. token: for routers and pages. engine_key: for the
    engines. probe: whether to send each engine a prompt. skip: groups to leave out. watch_s: the longest watch of the
    logs, None for as long as silence needs to show. verify: the routers' settings, to compare their states with the
    topics; None does not.
    """

    routers: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    token: str | None = None
    engine_key: str | None = None
    probe: bool = False
    skip: frozenset[Group] = frozenset()
    watch_s: float | None = None
    verify: RouterServerSettings | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that are checked, in order."""
        asked = {Group.PROBE: self.probe, Group.TOKENIZERS: bool(self.tokenizers)}
        return tuple(group for group in Group if group not in self.skip and asked.get(group, True))


def examine(settings: AgentSettings, order: Order) -> DoctorReport:
    """Read and check everything. It changes nothing, except that engines compute a prompt with `probe`."""
    seen = asyncio.run(_read(settings, order))
    groups = order.groups
    findings = [finding for group, check in CHECKS if group in groups for finding in check(seen)]
    return DoctorReport((*_own_schemas(groups), *findings), groups, processes.versions_of(seen))


def _own_schemas(groups: Sequence[Group]) -> tuple[Finding, ...]:
    if Group.SCHEMAS in groups:
        try:
            check_schemas()
        except SchemasIncompatible as exc:
            return (Finding(Group.SCHEMAS, exc.code, "this installation", exc.message, exc.remedy),)
    return ()


async def _read(settings: AgentSettings, order: Order) -> Observations:
    token, key = _bearer(order.token), _bearer(order.engine_key)
    groups = frozenset(order.groups)
    # First, because a file that cannot be read ends the run.
    files = await read_files(order.tokenizers) if Group.TOKENIZERS in groups else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        reading = asyncio.create_task(_read_kafka(settings, order)) if groups - _WITHOUT_KAFKA else None
        found_routers = await read_routers(http, order.routers, token)
        found_pages = await read_pages(http, order.pages, token)
        found_kafka = None if reading is None else await reading
        found_engines: tuple[EngineSeen, ...] = ()
        if {Group.ENGINES, Group.TOKENIZERS, Group.PROBE, Group.CLOCKS} & groups:
            found_engines = await read_engines(http, _workers(found_kafka), key)
        if Group.TOKENIZERS in groups:
            found_engines = await read_tokenizers(http, found_engines, order.tokenizers, files, key)
        if Group.PROBE in groups:
            answering = [router.url for router in found_routers if router.workers]
            found_engines = await probe_engines(http, found_engines, answering, key, token)
    models = tuple(sorted(filter(None, order.tokenizers)))
    states: tuple[StateSeen, ...] = ()
    if order.verify is not None and Group.ROUTERS in groups:
        states = await asyncio.to_thread(read_states, order.verify, order.routers, order.token)
    return Observations(settings, found_kafka, found_engines, found_routers, found_pages, models, states)


async def _read_kafka(settings: AgentSettings, order: Order) -> KafkaSeen:
    groups = frozenset(order.groups)
    return await asyncio.to_thread(
        read_kafka,
        settings,
        order.watch_s,
        with_logs=bool(groups - _WITHOUT_LOGS),
        until_heard=bool(groups - _WITHOUT_WAITING),
    )


def _workers(seen: KafkaSeen | None) -> list[Worker]:
    logs = None if seen is None else seen.logs
    return [] if logs is None else [registration.worker for registration in logs.workers.values()]


def _bearer(token: str | None) -> Mapping[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}
