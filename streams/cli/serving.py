"""`kvstreams worker`, `router` and `bridge`: the processes of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import click

from streams.cli.scope import prepare_scope
from streams.process import log
from streams.process.options import GroupedCommand, with_settings
from streams.settings import Resolved, as_environ


@click.command(cls=GroupedCommand)
@with_settings
def worker(resolved: Resolved) -> None:
    """Run a Faust worker: `faust -A streams worker` with these settings."""
    os.environ.update(as_environ(resolved.settings))
    os.execv(sys.executable, [sys.executable, *resolved.settings.faust_arguments])


@click.command(cls=GroupedCommand)
@with_settings
@click.option("--ends-with-parent", is_flag=True, hidden=True, help="end when standard input ends")
@click.option("--process-number", type=int, hidden=True, help="which of several processes this one is")
@click.option("--process-joins", type=click.Choice(["at-once", "when-ready"]), default="at-once", hidden=True)
def router(resolved: Resolved, ends_with_parent: bool, process_number: int | None, process_joins: str) -> None:
    """Run a router alone. Run as many as you need, behind any load balancer.

    With --processes, several of them share one port of this machine.
    """
    from streams.process.kept_processes import end_with_parent
    from streams.router_api.processes.process_group import ProcessGroup, ProcessPlace

    settings = resolved.settings
    log.configure(settings, process_number)
    place = None if process_number is None else ProcessPlace(process_number, process_joins == "at-once")
    if ends_with_parent:
        end_with_parent()
    else:
        prepare_scope(settings)
        if settings.processes > 1:
            run_until_signalled(ProcessGroup(settings).run())
            return
    from streams.router_api.processes.server import (
        serve,  # not in the parent of several processes, which needs 150 MB less
    )

    run_until_signalled(serve(settings, place))


@click.command(cls=GroupedCommand)
@with_settings
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="id=1,url=http://HOST:PORT[,events=tcp://HOST:PORT][,replay=tcp://HOST:PORT][,dp=N][,dp_start=N][,model=NAME]"
    "[,metrics=URL][,key=FILE][,dialect=NAME][,role=ROLE][,device_class=NAME][,taints=NAME+NAME]"
    "[,lora=NAME+NAME][,lmcache=INSTANCE]",
    help="one engine; repeat the option for each. events: address of its event socket; without one, routers predict "
    "what the engine holds; bind:tcp://ADDRESS:PORT listens there, for an engine that connects. replay: address of its "
    "replay socket. dp: number of data-parallel ranks. dp_start: number of the first one, by default as the engine "
    "reports it. model: name of its model, by default as the engine reports it. metrics: its Prometheus page, if not "
    "at URL/metrics. key: file with the API key that it requires; read again when it changes. dialect: "
    "format of its events, by default recognised from them; an unknown name is refused with a list of all. role "
    "(prefill, decode or both), device_class, taints: how it is registered, by default as the registry has it. lora: "
    "LoRA adapters that it serves, in addition to those that it lists. lmcache: id of the instance of LMCache that it "
    "uses",
)
@click.option(
    "--engines-file",
    metavar="FILE",
    default=None,
    help="TOML file with an [[engine]] table per engine, with the keys of --engine; read again when it changes",
)
@click.option(
    "--engines-registry",
    is_flag=True,
    help="the workers of the registry that have an address of events and no bridge",
)
@click.option(
    "--engines-dns",
    metavar="NAME",
    default=None,
    help="one engine at each address of a name, which is resolved every 5 s; needs --engine-template",
)
@click.option(
    "--engines-kubernetes",
    metavar="[NAMESPACE/]SERVICE",
    default=None,
    help="one engine at each ready endpoint of a service, by the pod's service account; needs --engine-template",
)
@click.option(
    "--engines-inference-pool",
    metavar="[NAMESPACE/]POOL",
    default=None,
    help="one engine at each target port of each ready pod of an InferencePool, by the pod's service account; needs "
    "--engine-template with {port} in its url",
)
@click.option(
    "--engine-template",
    metavar="url=http://{host}:PORT[,events=tcp://{host}:PORT]...",
    default=None,
    help="what --engine would say of each engine that was found at an address, without its id, which is derived from "
    "the url. In an InferencePool, events and replay are those of the first target port, and one port higher for each "
    "further one",
)
@click.option(
    "--lmcache",
    metavar="TOPIC",
    default=None,
    help="topic to which instances of LMCache publish their cache events; their pools count for the engines that name "
    "them (lmcache= in --engine)",
)
@click.option(
    "--lmcache-kafka",
    metavar="HOST:PORT[,HOST:PORT]...",
    default=None,
    help="the Kafka that has that topic, by default the scope's; with the same credentials",
)
def bridge(
    resolved: Resolved,
    engines: tuple[str, ...],
    engines_file: str | None,
    engines_registry: bool,
    engines_dns: str | None,
    engines_kubernetes: str | None,
    engines_inference_pool: str | None,
    engine_template: str | None,
    lmcache: str | None,
    lmcache_kafka: str | None,
) -> None:
    """Forward engines' ZMQ events, and LMCache's cache events, to the scope's topics, and register the engines."""
    found_by = (engines_file, engines_registry, engines_dns, engines_kubernetes, engines_inference_pool)
    if lmcache_kafka and not lmcache:
        raise click.UsageError("--lmcache-kafka without --lmcache, which names the topic")
    if not (engines or any(found_by) or lmcache):
        raise click.UsageError(
            "the bridge has no engines. Use --engine, --engines-file, --engines-registry, --engines-dns, "
            "--engines-kubernetes or --engines-inference-pool; or --lmcache for a bridge of LMCache's events alone"
        )
    from streams.engines.bridge_metrics import run_bridge
    from streams.engines.sources.interface import EngineSource
    from streams.engines.sources.named import sources_of
    from streams.kafka.schema_compatibility import check_schemas
    from streams.lmcache.event_log import LmcacheSource
    from streams.process.interpreter import prefer_request_threads

    log.configure(resolved.settings)
    check_schemas()
    # Parsed first, so that a typo is reported without waiting for Kafka.
    sources: list[EngineSource] = []
    if engines or any(found_by):
        sources += sources_of(
            resolved.settings,
            engines,
            file=engines_file,
            registry=engines_registry,
            dns=engines_dns,
            kubernetes=engines_kubernetes,
            inference_pool=engines_inference_pool,
            template=engine_template,
        )
    prefer_request_threads()  # batches wait while another thread reads tables, or parses a page of metrics
    source = None if lmcache is None else LmcacheSource(lmcache, lmcache_kafka)
    run_until_signalled(run_bridge(resolved.settings, sources, source))


def run_until_signalled(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end. Ctrl-C and SIGTERM cancel the coroutine, which then cleans up; no error is raised for them."""

    async def until_signalled() -> None:
        task = asyncio.ensure_future(main)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    import uvloop  # here, because every command imports this module

    from streams.process.interpreter import exempt_from_collection

    exempt_from_collection()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_signalled())


COMMANDS = (worker, router, bridge)
