"""`kvstreams`: the command line. Every command is a thin shell around one call.

Every knob of the settings is an option of the commands that use settings; what is not given comes from `KVSTREAMS_*`,
then from a TOML file, then from the default (`kvstreams config` shows which).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from streams import __version__, log
from streams.core.ids import U64_MASK, WorkerId
from streams.core.routing.selection import RouterMode
from streams.errors import InvalidRequest, KvStreamsError, SettingsError
from streams.settings import ENV_PREFIX, UNNEEDED_KNOBS, Resolved, Settings, as_environ, load, unknown_variables
from streams.topics import topics as scope_topics

if TYPE_CHECKING:
    from streams.cxl.events import CxlPool
    from streams.cxl.verdicts import TransitionVerdict

_F = TypeVar("_F", bound=Callable[..., Any])

KAFKA_DIRECTORY = Path(".kvstreams/kafka")
DEMO_DIRECTORY = Path(".kvstreams/demo")

#: A verdict is there within a second, or nobody gives one; a script that hangs for longer has lost its terminal.
WAIT_MAX_S = 3600.0


#: Knobs that most commands need; --help shows them before all others.
ESSENTIAL = (
    "kafka",
    "topic_prefix",
    "partitions",
    "replication",
    "block_size",
    "host",
    "port",
    "router_mode",
    "data_dir",
)

_SECTIONS = (
    "Options",
    "Settings",
    f"Other settings; all also by environment, {ENV_PREFIX}..., or file (kvstreams config)",
)


class GroupedCommand(click.Command):
    """A command whose help shows its own options first, and then the knobs, the essential ones before the others."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in three sections, of which a command without settings has one."""
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in _SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                knob = (param.name or "").removeprefix("knob_")
                essential = knob in ESSENTIAL or knob == "config"
                rows[_SECTIONS[0 if knob == param.name and not essential else 1 if essential else 2]].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class GroupedGroup(click.Group):
    """A group whose commands, and those of its groups, are such."""

    command_class = GroupedCommand
    group_class = type


def with_settings(command: _F) -> _F:
    """Give a command every knob as an option; it is called with `resolved`."""

    def run(config: Path | None, **options: Any) -> Any:
        knobs = {
            name: options.pop(f"knob_{name}") for name in (*(knob.name for knob in fields(Settings)), *UNNEEDED_KNOBS)
        }
        resolved = load(knobs, config_file=config)
        for warning in resolved.warnings:
            click.echo(f"kvstreams: {warning}", err=True)
        return command(resolved=resolved, **options)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    # A command's own options were attached to it by decorators below ours; they belong to the wrapper now.
    run.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    wrapped: Any = run
    for knob in reversed(fields(Settings)):
        flag = knob.name.replace("_", "-")
        text = str(knob.metadata["help"])
        if knob.type == "bool":
            # Dynamo has a name for the contrary of this one.
            contrary = "router-persist-states" if knob.name == "router_reset_states" else f"no-{flag}"
            option = click.option(f"--{flag}/--{contrary}", f"knob_{knob.name}", default=None, help=text)
        else:
            option = click.option(f"--{flag}", f"knob_{knob.name}", default=None, metavar="VALUE", help=text)
        wrapped = option(wrapped)
    for name in UNNEEDED_KNOBS:
        flag = name.replace("_", "-")
        # Switches take no value, in Dynamo's own command line as well.
        form = f"--{flag}" if name == "router_snapshot_threshold" else f"--{flag}/--no-{flag}"
        wrapped = click.option(form, f"knob_{name}", default=None, hidden=True)(wrapped)
    wrapped = click.option("--config", type=click.Path(path_type=Path), default=None, help="TOML file of knobs")(
        wrapped
    )
    result: _F = wrapped
    return result


@click.group(cls=GroupedGroup, context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """kvstreams: routes LLM requests to the engine that already holds their KV cache, on Kafka."""
    for name, words in unknown_variables(os.environ).items():
        click.echo(f"kvstreams: {words}", err=True)
        del os.environ[name]  # for children, who would say it again


@cli.command()
@with_settings
def config(resolved: Resolved) -> None:
    """Print every knob, its value, and where the value came from."""
    table = Table(box=None, pad_edge=False)
    for column in ("knob", "value", "from", "environment", "meaning"):
        table.add_column(column, overflow="fold")
    for knob in fields(Settings):
        value = getattr(resolved.settings, knob.name)
        table.add_row(
            knob.name,
            str(value),
            resolved.sources[knob.name],
            ENV_PREFIX + knob.name.upper(),
            str(knob.metadata["help"]),
        )
    _console().print(table)


@cli.group()
def kafka() -> None:
    """A real Kafka for this machine, for development and the demo."""


_directory = click.option(
    "--directory", type=click.Path(path_type=Path), default=KAFKA_DIRECTORY, show_default=True, help="data, logs, state"
)


@kafka.command("up")
@_directory
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="broker property, as in log.cleaner.threads=2"
)
def kafka_up(directory: Path, overrides: tuple[str, ...]) -> None:
    """Start it, or say that it runs; what is missing is fetched first."""
    state = start_kafka(directory, dict(_pair(text) for text in overrides))
    verb = "runs already" if state.reused else "is up"
    click.echo(f"Kafka {state.version} {verb} at {state.bootstrap} (pid {state.pid}, {state.java})")
    for note in state.notes:
        click.echo(note)
    click.echo(f"use it:   export {ENV_PREFIX}KAFKA={state.bootstrap}")
    click.echo("stop it:  kvstreams kafka down")


@kafka.command("down")
@_directory
def kafka_down(directory: Path) -> None:
    """Stop it; data and ports stay for the next start."""
    from streams.local.kafka import LocalKafka, LocalKafkaConfig

    was_running = LocalKafka(LocalKafkaConfig(directory)).down()
    click.echo("Kafka is down" if was_running else "no Kafka was running here")


@kafka.command("status")
@_directory
def kafka_status(directory: Path) -> None:
    """Say whether it runs, and where; exit status 1 where it does not."""
    from streams.local.kafka import LocalKafka, LocalKafkaConfig

    local = LocalKafka(LocalKafkaConfig(directory))
    state = local.status()
    if state is None:
        click.echo(f"no Kafka runs in {directory}")
        raise SystemExit(1)
    word = "answers" if local.answers() else "runs but does not answer"
    click.echo(f"Kafka {state.version} {word} at {state.bootstrap} (pid {state.pid}, {state.java})")


@cli.group("topics")
def topics_group() -> None:
    """The topics of a scope."""


@topics_group.command("create")
@with_settings
def topics_create(resolved: Resolved) -> None:
    """Create what is missing and check what is there; nothing that exists is altered."""
    from streams.kafka import ensure_topics

    states = ensure_topics(resolved.settings, scope_topics(resolved.settings).all())
    for state in states.values():
        click.echo(f"{state.name}: {state.partitions} partitions, {state.replication} replicas")


@topics_group.command("describe")
@with_settings
def topics_describe(resolved: Resolved) -> None:
    """Show every topic as the settings want it and as the broker has it; exit status 1 where they differ."""
    from streams.errors import TopicMismatch
    from streams.kafka import check_topic, describe_topics

    specs = scope_topics(resolved.settings).all()
    states = describe_topics(resolved.settings, specs)
    table = Table(box=None, pad_edge=False)
    for column in ("topic", "key", "schema", "partitions", "settings", "broker"):
        table.add_column(column, overflow="fold")
    remedies: list[str] = []
    wrong = False
    for spec in specs:
        state = states[spec.name]
        verdict = "as wanted"
        if state is None:
            verdict = "missing: kvstreams topics create"
        else:
            try:
                check_topic(spec, state)
            except TopicMismatch as exc:
                verdict = "differs, see below"
                remedies.append(str(exc))
        wrong = wrong or verdict != "as wanted"
        settings = " ".join(f"{key}={value}" for key, value in spec.config.items())
        table.add_row(spec.name, spec.key, spec.schema or "as received", str(spec.partitions), settings, verdict)
    _console().print(table)
    for remedy in remedies:  # not in the table: a command that is folded cannot be copied
        click.echo(remedy)
    if wrong:
        raise SystemExit(1)


@cli.command()
def warm() -> None:
    """Compile the kernels, once after an installation; a start without it does the same, and takes longer."""
    warm_up()


def warm_up() -> None:
    """Compile or load the kernels behind a progress bar; without numba there are none."""
    try:
        from streams.core.kernels.warm import ENTRIES, warm
    except ImportError as exc:
        _console().print(f"no kernels here, plain Python serves: {exc}")
        return
    columns = (TextColumn("kernels"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=_console(), transient=True) as progress:
        task = progress.add_task("", total=len(ENTRIES))
        for done, name in enumerate(warm()):
            progress.update(task, completed=done, description=name)


@cli.command()
@with_settings
def worker(resolved: Resolved) -> None:
    """Run the Faust worker: `faust -A streams worker` with these settings."""
    os.environ.update(as_environ(resolved.settings))
    os.execv(sys.executable, [sys.executable, *resolved.settings.faust_arguments])


@cli.command()
@with_settings
def router(resolved: Resolved) -> None:
    """Run a router alone; as many as are needed, behind any load balancer."""
    from streams.router_api.server import serve

    log.configure(resolved.settings)
    if resolved.settings.router_reset_states:
        _reset(resolved.settings, resolved.settings.router_reset_force)
    _run(serve(resolved.settings))


@cli.command()
@with_settings
@click.option("--force", is_flag=True, help="although another member of the scope lives")
def reset(resolved: Resolved, force: bool) -> None:
    """Empty the scope: its index, loads and events. Registry and dead letters stay; another topic prefix is safer."""
    log.configure(resolved.settings)
    _reset(resolved.settings, force or resolved.settings.router_reset_force)


def _reset(settings: Settings, force: bool) -> None:
    from streams.kafka import ensure_topics
    from streams.reset import reset_scope

    ensure_topics(settings, scope_topics(settings).all())
    done = reset_scope(settings, force=force)
    click.echo(
        f"{settings.app_id} is empty: {done.records} records of the index deleted, "
        f"{done.partitions} partitions of events, loads and requests cut, {done.copies} local copies removed"
    )


@cli.command()
@with_settings
@click.option(
    "--engine",
    "engines",
    multiple=True,
    required=True,
    metavar="id=1,url=http://HOST:PORT,events=tcp://HOST:PORT[,replay=tcp://HOST:PORT][,dp=N][,model=NAME][,metrics=URL]",
    help="one engine; give it again for each",
)
def bridge(resolved: Resolved, engines: tuple[str, ...]) -> None:
    """Bridge engines' ZMQ events to Kafka and register the engines."""
    from streams.engines.bridge import Bridge, engine_address
    from streams.kafka import ensure_topics

    log.configure(resolved.settings)
    addresses = [engine_address(text) for text in engines]  # first: a typing error need not wait for Kafka
    ensure_topics(resolved.settings, scope_topics(resolved.settings).all())
    _run(Bridge(resolved.settings, addresses).run())


@cli.group()
def cxl() -> None:
    """CXL pools, and what scripts tell of the blocks in them."""


@cxl.command("pool")
@with_settings
@click.argument("pool_id")
@click.option(
    "--member", "members", type=int, multiple=True, help="worker whose host reaches it; again for each, all of them"
)
@click.option("--no-members", is_flag=True, help="no worker's host reaches it")
@click.option(
    "--latency-class", default=None, help="a name for people to see; routing does not read it  [new pools: default]"
)
@click.option(
    "--capacity-blocks", type=int, default=None, help="blocks it has room for, shown and no more; 0: not known"
)
@click.option("--epoch", type=int, default=None, help="greater than before where what it held is lost")
@click.option("--lost", is_flag=True, help="it is not there any more, with all that it held")
def cxl_pool(
    resolved: Resolved,
    pool_id: str,
    members: tuple[int, ...],
    no_members: bool,
    latency_class: str | None,
    capacity_blocks: int | None,
    epoch: int | None,
    lost: bool,
) -> None:
    """Register a pool, or change what is named of it; without an option only show it.

    What is left out stays as it is. A new pool, and one that is lost, needs --member or --no-members.
    """
    from streams.cxl.pool_registry import PoolChange, change_pool, lose_pool

    if members and no_members:
        raise click.UsageError("--member and --no-members contradict each other")
    named = worker_ids(tuple(sorted(set(members)))) if members or no_members else None
    change = PoolChange(named, latency_class, capacity_blocks, epoch)
    if lost and change != PoolChange():
        raise click.UsageError("--lost goes with no other change")
    pool = lose_pool(resolved.settings, pool_id) if lost else change_pool(resolved.settings, pool_id, change)
    click.echo(_pool_line(pool))


def _pool_line(pool: CxlPool) -> str:
    words = "lost" if pool.lost else f"members {', '.join(map(str, pool.members)) or 'none'}"
    room = "" if pool.capacity_blocks is None else f", room for {pool.capacity_blocks} blocks"
    return f"pool {pool.pool_id}: epoch {pool.epoch}, {words}, latency class {pool.latency_class}{room}"


@cxl.command("transition")
@with_settings
@click.option("--worker-id", type=int, required=True)
@click.option("--dp-rank", type=int, default=0, show_default=True)
@click.option("--event-id", type=int, default=0, show_default=True, help="number told to people")
@click.option(
    "--state", type=click.Choice(["local_gpu", "in_transit", "cxl_pooled", "evicted"]), required=True, help="entered"
)
@click.option("--pool-id", default=None, help="where to; in_transit needs it")
@click.option("--accessible-worker", "workers", type=int, multiple=True, help="who reaches it; left out, all members")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0.0, WAIT_MAX_S),
    default=None,
    metavar="SECONDS",
    help="wait so long at most for the agents' verdict, and tell it",
)
@click.option("--force", is_flag=True, help="although the registry does not have the pool, or has it as lost")
@click.argument("hashes", type=int, nargs=-1, required=True)
def cxl_transition(
    resolved: Resolved,
    worker_id: int,
    dp_rank: int,
    event_id: int,
    state: str,
    pool_id: str | None,
    workers: tuple[int, ...],
    wait_s: float | None,
    force: bool,
    hashes: tuple[int, ...],
) -> None:
    """Tell that blocks, by their engine's own HASHES, enter a state.

    Whether they may is for the agents to judge, behind this. Exit status 1 where hashes are unknown, or where --wait
    finds that it was refused or not judged in time.
    """
    from streams.core.ids import DpRank, RankId
    from streams.cxl.events import state_changed
    from streams.engines.script_transitions import send_transition

    (owner,) = worker_ids((worker_id,))
    changed = state_changed(event_id, hashes, state, pool_id, worker_ids(workers))
    rank = RankId(owner, DpRank(dp_rank))
    sent = send_transition(resolved.settings, rank, changed, any_pool=force, wait_s=wait_s)
    n_sent = len(hashes) - len(sent.unknown)
    if n_sent:
        judged = "" if sent.verdict is not None else "; the agents judge it, and --wait tells how"
        click.echo(f"sent: {n_sent} blocks of worker {worker_id} rank {dp_rank} to {state}{judged}")
    wrong = _verdict_lines(sent.verdict, wait_s or 0.0)
    if sent.unknown:
        wrong.append(f"{len(sent.unknown)} hashes name no block of it: {' '.join(map(str, sent.unknown[:10]))}")
    if sent.verdict is not None and sent.verdict.applied:
        click.echo("applied")
    for line in wrong:
        click.echo(line, err=True)
    if wrong:
        raise SystemExit(1)


def _verdict_lines(verdict: TransitionVerdict | None, wait_s: float) -> list[str]:
    """What is wrong with a transition, for people; nothing where it was applied, or nobody waited."""
    from streams.cxl.verdicts import VerdictStatus

    if verdict is None:
        return []
    lines = [f"refused: {reason}: {message}" for reason, message in verdict.refused]
    if verdict.status is VerdictStatus.PARKED:
        lines.append(
            f"not judged within {wait_s:g} s: it waits for its batch of kv-events, or behind another that does"
        )
    elif verdict.status is VerdictStatus.UNKNOWN:
        lines.append(f"not judged within {wait_s:g} s: no agent has read it; does a worker run in this scope?")
    return lines


def worker_ids(values: tuple[int, ...]) -> tuple[WorkerId, ...]:
    """Worker ids of a command line; raises InvalidRequest."""
    for value in values:
        if not 0 <= value <= U64_MASK:
            raise InvalidRequest(f"worker {value} is outside 0..2^64-1")
    return tuple(map(WorkerId, values))


@cli.command()
@click.option("--worker", "worker_name", default="1", help="name, for the logs")
@click.option("--model", default="demo-model", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on; 0.0.0.0 for all")
@click.option("--port", default=8100, show_default=True, help="HTTP; 0 takes a free one")
@click.option("--events-port", default=5557, show_default=True, help="ZMQ PUB; 0 takes a free one")
@click.option("--replay-port", default=5558, show_default=True, help="ZMQ ROUTER; 0 takes a free one")
@click.option("--block-size", default=16, show_default=True, help="tokens a block")
@click.option("--blocks", default=16384, show_default=True, help="blocks of the cache")
@click.option("--time-scale", default=1.0, show_default=True, help="model seconds a second")
@click.option(
    "--pool", default=None, metavar="URL", help="shared pool that it offloads to and loads from: kvstreams sim-pool"
)
@click.option("--moe-layer", type=int, default=None, help="layer that its blocks are labelled with")
@click.option("--moe-expert", type=int, default=None, help="expert that its blocks are labelled with")
@click.option("--moe-group", type=int, default=None, help="group of experts that its blocks are labelled with")
@click.option("--info", type=click.Path(path_type=Path), default=None, help="file to write the addresses to, as JSON")
def sim(
    worker_name: str,
    model: str,
    host: str,
    port: int,
    events_port: int,
    replay_port: int,
    block_size: int,
    blocks: int,
    time_scale: float,
    pool: str | None,
    moe_layer: int | None,
    moe_expert: int | None,
    moe_group: int | None,
    info: Path | None,
) -> None:
    """Run a simulated engine that a router cannot tell from vLLM."""
    from streams.core.events import MoeLabels
    from streams.sim.model import EngineConfig
    from streams.sim.server import SimServerConfig, run

    log.configure(Settings())
    labels = (moe_layer, moe_expert, moe_group)
    moe = None if labels == (None, None, None) else MoeLabels(*labels)
    sim_config = SimServerConfig(
        host=host,
        port=port,
        events_port=events_port,
        replay_port=replay_port,
        worker=worker_name,
        model=model,
        engine=EngineConfig(block_size=block_size, n_blocks=blocks),
        time_scale=time_scale,
        pool=pool,
        moe=moe,
        event_dialect="array" if moe is None else "map",  # events that are arrays have no room for labels
    )
    run(sim_config, lambda server: _print_addresses(server.info(), info))


@cli.command("sim-pool")
@click.option("--pool-id", default="pool", show_default=True, help="its name, as it is registered")
@click.option("--model", default="demo-model", show_default=True, help="of the engines that share it")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on; 0.0.0.0 for all")
@click.option("--port", default=8200, show_default=True, help="HTTP; 0 takes a free one")
@click.option("--block-size", default=16, show_default=True, help="tokens a block, as the engines have it")
@click.option("--bytes-per-token", default=131072, show_default=True, help="of KV cache")
@click.option("--capacity-blocks", default=65536, show_default=True, help="blocks that it has room for")
@click.option(
    "--offload-gb-per-s", default=25.0, show_default=True, help="bandwidth towards it, of all engines together"
)
@click.option("--load-gb-per-s", default=25.0, show_default=True, help="bandwidth from it, of all engines together")
@click.option("--latency-us", default=20.0, show_default=True, help="of each transfer, beside its bytes")
@click.option("--latency-class", default="default", show_default=True, help="told at /pool/info, to be registered")
@click.option("--time-scale", default=1.0, show_default=True, help="model seconds a second, as the engines have it")
@click.option("--info", type=click.Path(path_type=Path), default=None, help="file to write the address to, as JSON")
def sim_pool(
    pool_id: str,
    model: str,
    host: str,
    port: int,
    block_size: int,
    bytes_per_token: int,
    capacity_blocks: int,
    offload_gb_per_s: float,
    load_gb_per_s: float,
    latency_us: float,
    latency_class: str,
    time_scale: float,
    info: Path | None,
) -> None:
    """Run a CXL pool that simulated engines share."""
    from streams.sim.pool import PoolConfig
    from streams.sim.pool_server import PoolServerConfig, run

    log.configure(Settings())
    pool = PoolConfig(
        pool_id=pool_id,
        block_size=block_size,
        bytes_per_token=bytes_per_token,
        capacity_blocks=capacity_blocks,
        offload_gb_per_s=offload_gb_per_s,
        load_gb_per_s=load_gb_per_s,
        latency_us=latency_us,
        latency_class=latency_class,
    )
    run(
        PoolServerConfig(host=host, port=port, model=model, pool=pool, time_scale=time_scale),
        lambda server: _print_addresses(server.info(), info),
    )


def _print_addresses(addresses: dict[str, str], path: Path | None) -> None:
    """Print where a process listens, and write it to a file where one is named."""
    text = orjson.dumps(addresses).decode()
    click.echo(text)
    if path is not None:
        # In one step: whoever waits for the file must never read half of it.
        half = path.with_suffix(".half")
        half.write_text(text)
        half.replace(path)


@cli.command()
@click.option(
    "--trace", type=click.Path(path_type=Path), default=None, help="Mooncake-format trace; generated if left out"
)
@click.option("--workers", default=8, show_default=True, help="simulated engines")
@click.option("--requests", default=400, show_default=True, help="requests of each policy")
@click.option("--speedup", default=None, type=float, help="model seconds a second; chosen for this machine if left out")
@click.option("--blocks", default=16384, show_default=True, help="blocks of 16 tokens of each engine's cache")
@click.option("--policy", "policies", multiple=True, help="kv, round-robin or random; again for more; all if left out")
@click.option("--directory", type=click.Path(path_type=Path), default=DEMO_DIRECTORY, show_default=True)
@click.option("--kafka-directory", type=click.Path(path_type=Path), default=KAFKA_DIRECTORY, show_default=True)
def demo(
    trace: Path | None,
    workers: int,
    requests: int,
    speedup: float | None,
    blocks: int,
    policies: tuple[str, ...],
    directory: Path,
    kafka_directory: Path,
) -> None:
    """Run everything on this machine and show what it does."""
    from streams.local.demo import DEMO_POLICIES, DemoConfig, require_extra, run_demo

    require_extra("psutil", "matplotlib")
    try:
        modes = tuple(RouterMode(policy) for policy in policies) or DEMO_POLICIES
        if not set(modes) <= set(DEMO_POLICIES):
            raise ValueError(f"{next(mode for mode in modes if mode not in DEMO_POLICIES)!s} is none of the demo's")
    except ValueError as exc:
        raise SettingsError(f"--policy: {exc}", remedy="One of kv, round-robin, random") from exc
    if RouterMode.KV not in modes:
        raise SettingsError("--policy: kv is what the demo is about; name it too")
    config = DemoConfig(
        trace=trace,
        workers=workers,
        requests=requests,
        speedup=speedup,
        directory=directory,
        kafka_directory=kafka_directory,
        blocks=blocks,
        policies=tuple(mode for mode in DEMO_POLICIES if mode in modes),
    )
    warm_up()  # once and not in each of the demo's processes
    run_demo(config, start_kafka)


@cli.command()
@click.option("--workers", default=2, show_default=True, help="simulated engines")
@click.option("--directory", type=click.Path(path_type=Path), default=Path(".kvstreams/up"), show_default=True)
@click.option("--kafka-directory", type=click.Path(path_type=Path), default=KAFKA_DIRECTORY, show_default=True)
def up(workers: int, directory: Path, kafka_directory: Path) -> None:
    """Run everything on this machine in the foreground, to be tried with curl."""
    from streams.local.demo import require_extra, run_up

    require_extra("psutil")
    warm_up()
    run_up(workers, directory, kafka_directory, start_kafka)


def start_kafka(directory: Path, overrides: dict[str, str] | None = None) -> Any:
    """Bring the local Kafka up, with a progress bar while it is fetched."""
    from streams.local.kafka import LocalKafka, LocalKafkaConfig

    local = LocalKafka(LocalKafkaConfig(directory, overrides or {}))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("fetching Kafka", total=None, visible=False)

        def fetched(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, visible=True, description=f"fetching Kafka  {name}")

        return local.up(fetched)


def _console() -> Console:
    """For tables; without markup, which would take `[compact]` in a setting for a style and swallow it."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set {text!r} is not KEY=VALUE")
    return key, value


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end; Ctrl-C and SIGTERM are ordinary ends, upon which it is cancelled and cleans up."""

    async def until_signalled() -> None:
        task = asyncio.ensure_future(main)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(until_signalled())


def _exit_for(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Entry point: errors of ours are one line with the remedy, everything else keeps its trace."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Ends by way of every `finally`, so that no child outlives `demo` or `up`.
        signal.signal(number, _exit_for)
    try:
        cli()
    except KvStreamsError as exc:
        click.echo(f"kvstreams: {exc}", err=True)
        raise SystemExit(1) from exc


if __name__ == "__main__":
    main()
