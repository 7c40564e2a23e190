"""A whole system on one machine, as real processes: engines, bridge, Faust workers, routers.

What lives here: which processes are started with which settings, and when each is ready. What must not: what is then
done with them (demo, tests). Every port is a free one on the loopback interface.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from streams.kafka.clients import ensure_topics
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.pool import PoolConfig
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Child, Children
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from streams.topics import topics

#: A process imports everything, connects to Kafka and reads its topics within seconds; ten of them share two cores.
READY_TIMEOUT_S = 60.0

#: An answer with a million facts takes seconds on a machine that also runs everything else.
_HTTP_TIMEOUT_S = 60.0


#: Worker id, rank, tier and sequence hash: one row of GET /state/blocks.
Fact = tuple[int, int, int, int]
_FACT = np.dtype([("worker", "<u8"), ("rank", "<u4"), ("tier", "u1"), ("block", "<u8")])


@dataclass(frozen=True, slots=True)
class Engine:
    """One simulated engine: its child process, and where it listens."""

    worker_id: int
    child: Child
    url: str
    events: str
    replay: str


@dataclass(frozen=True, slots=True)
class PoolProcess:
    """A pool that simulated engines share: its child process, and where it listens."""

    child: Child
    url: str


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """A process that serves the HTTP API, with the whole settings that it was started with."""

    child: Child
    url: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class PickerProcess:
    """A router that gateways ask: its HTTP API, and where it answers picks and health checks, as HOST:PORT."""

    router: RouterProcess
    picks: str
    health: str


@dataclass(frozen=True, slots=True)
class FrontProcess:
    """A process that serves OpenAI's API."""

    child: Child
    url: str


class EngineAddresses(Protocol):
    """An engine that a bridge can listen to, simulated or real."""

    @property
    def worker_id(self) -> int: ...
    @property
    def url(self) -> str: ...
    @property
    def events(self) -> str: ...
    @property
    def replay(self) -> str: ...


class Stack:
    """Starts the processes of one scope; `children` stops them.

    It takes the whole settings, since it hands them on to processes of every kind.
    """

    def __init__(self, settings: Settings, directory: Path, children: Children) -> None:
        """directory: the folder of logs and tables."""
        self.settings = settings
        self.directory = directory
        self._children = children

    def pool(
        self, config: PoolConfig, model: str, time_scale: float, port: str = "0", options: Sequence[str] = ()
    ) -> PoolProcess:
        """Start a pool that engines share. options: additional options of `kvstreams sim-pool`."""
        path = self._info_path(f"pool-{config.pool_id}")
        arguments = [
            *("-m", "streams.cli", "sim-pool", "--model", model, "--time-scale", str(time_scale)),
            *("--port", port, "--info", str(path)),
            *options,
        ]
        for name, value in asdict(config).items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        path.unlink(missing_ok=True)
        child = self._start(f"pool-{config.pool_id}", arguments, as_environ(self.settings))
        child.wait_ready(path.exists, READY_TIMEOUT_S)
        return PoolProcess(child, json.loads(path.read_text())["pool"])

    def engines(
        self,
        n: int,
        config: EngineConfig,
        model: str,
        time_scale: float,
        first_worker_id: int = 1,
        options: Sequence[str] = (),
        own_options: Mapping[int, Sequence[str]] | None = None,
    ) -> list[Engine]:
        """Start n engines at once.

        options: additional options of `kvstreams sim`, for each of them. own_options: more of them, by worker id.
        """
        ids = range(first_worker_id, first_worker_id + n)
        own = own_options or {}
        started = [
            (
                worker_id,
                self._start_engine(worker_id, config, model, time_scale, options=[*options, *own.get(worker_id, ())]),
            )
            for worker_id in ids
        ]
        return [self._await_engine(worker_id, child) for worker_id, child in started]

    def restart_engine(
        self, engine: Engine, config: EngineConfig, model: str, time_scale: float, options: Sequence[str] = ()
    ) -> Engine:
        """Kill an engine and start another on its ports: its cache is lost, and its batch numbers start at 0 again."""
        engine.child.kill()
        ports = [str(urlsplit(address).port) for address in (engine.url, engine.events, engine.replay)]
        return self._await_engine(
            engine.worker_id, self._start_engine(engine.worker_id, config, model, time_scale, ports, options)
        )

    def _start_engine(
        self,
        worker_id: int,
        config: EngineConfig,
        model: str,
        time_scale: float,
        ports: Sequence[str] = ("0", "0", "0"),
        options: Sequence[str] = (),
    ) -> Child:
        http, events, replay = ports
        arguments = [
            *("-m", "streams.cli", "sim", "--worker", str(worker_id), "--model", model),
            *("--port", http, "--events-port", events, "--replay-port", replay),
            *("--block-size", str(config.block_size), "--blocks", str(config.n_blocks)),
            *("--prefill-ms-base", str(config.prefill_ms_base)),
            *("--prefill-us-per-token", str(config.prefill_us_per_token)),
            *("--decode-ms-per-token", str(config.decode_ms_per_token)),
            *("--in-place-us-per-token", str(config.in_place_us_per_token)),
            *("--time-scale", str(time_scale)),
            *("--info", str(self._info_path(worker_id))),
            *options,
        ]
        self._info_path(worker_id).unlink(missing_ok=True)
        return self._start(f"engine-{worker_id}", arguments)

    def _await_engine(self, worker_id: int, child: Child) -> Engine:
        path = self._info_path(worker_id)
        child.wait_ready(path.exists, READY_TIMEOUT_S)
        info = json.loads(path.read_text())
        return Engine(worker_id, child, info["http"], info["events"], info["replay"])

    def bridge(
        self,
        engines: Sequence[EngineAddresses],
        name: str = "bridge",
        roles: Mapping[int, str] | None = None,
        options: Sequence[str] = (),
        instances: Mapping[int, str] | None = None,
    ) -> Child:
        """Start one bridge for these engines; it is ready when they are in the registry (`wait_workers`).

        roles: of engines by worker id; the others have both roles. options: further ones of the command. instances: of
        LMCache, by worker id.
        """
        arguments = ["-m", "streams.cli", "bridge"]
        for engine in engines:
            address = f"id={engine.worker_id},url={engine.url},events={engine.events},replay={engine.replay}"
            if roles and engine.worker_id in roles:
                address += f",role={roles[engine.worker_id]}"
            if instances and engine.worker_id in instances:
                address += f",lmcache={instances[engine.worker_id]}"
            arguments += ["--engine", address]
        return self._start(name, [*arguments, *options], as_environ(self.settings))

    def worker(self, name: str = "worker", router: bool = True, env: Mapping[str, str] | None = None) -> RouterProcess:
        """Start a Faust worker, with a router in its process, or with its health and metrics alone at its url."""
        port = free_port()
        settings = replace(
            self.settings,
            router=router,
            port=port,
            metrics_port=self.settings.metrics_port or (0 if router else port),
            data_dir=str(self.directory / "state" / name),
        )
        child = self._start(
            name,
            settings.faust_arguments,
            {**as_environ(settings), **(env or {})},
        )
        process = RouterProcess(child, f"http://{settings.host}:{settings.port}", settings)
        if router:
            self.wait_ready(process)
        return process

    def restart_worker(self, process: RouterProcess) -> None:
        """Restart a worker that was killed, with the same settings, folder and port."""
        process.child.start()
        if process.settings.router:
            self.wait_ready(process)

    def router(self, name: str, wait: bool = True, **changes: Any) -> RouterProcess:
        """Start a router alone. changes: settings that differ from the scope's."""
        settings = replace(self.settings, port=free_port(), **changes)
        ensure_topics(settings, topics(settings).all())  # no worker may have started yet
        child = self._start(name, ["-m", "streams.cli", "router"], as_environ(settings))
        process = RouterProcess(child, f"http://{settings.host}:{settings.port}", settings)
        if wait:
            self.wait_ready(process)
        return process

    def picker(self, name: str, options: Sequence[str] = (), wait: bool = True, **changes: Any) -> PickerProcess:
        """Start an endpoint picker. options: additional options of `kvstreams picker`. changes: as of `router`."""
        ports: dict[str, Any] = {"port": free_port(), "picker_port": free_port(), "picker_health_port": free_port()}
        settings = replace(self.settings, **ports, **changes)
        child = self._start(name, ["-m", "streams.cli", "picker", *options], as_environ(settings))
        router = RouterProcess(child, f"http://{settings.host}:{settings.port}", settings)
        picks, health = (f"{settings.host}:{ports[name]}" for name in ("picker_port", "picker_health_port"))
        if wait:
            self.wait_ready(router)
        return PickerProcess(router, picks, health)

    def front(
        self, name: str, routers: Sequence[RouterProcess], options: Sequence[str] = (), **changes: Any
    ) -> FrontProcess:
        """Start a front of these routers. options: additional options of `kvstreams front`."""
        settings = replace(self.settings, port=free_port(), **changes)
        urls = [argument for router in routers for argument in ("--router-url", router.url)]
        child = self._start(name, ["-m", "streams.cli", "front", *urls, *options], as_environ(settings))
        url = f"http://{settings.host}:{settings.port}"
        child.wait_ready(lambda: is_ready(url), READY_TIMEOUT_S)
        return FrontProcess(child, url)

    def _start(self, name: str, arguments: list[str], env: Mapping[str, str] | None = None) -> Child:
        child = Child(name, arguments, self.directory / "logs" / f"{name}.log", env or {})
        return self._children.add(child).start()

    def _info_path(self, name: int | str) -> Path:
        path = self.directory / "engines" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @staticmethod
    def wait_ready(process: RouterProcess) -> None:
        """Wait until a router that was started answers requests."""
        process.child.wait_ready(lambda: is_ready(process.url), READY_TIMEOUT_S)


def is_ready(url: str) -> bool:
    """Whether a router has read its topics to their ends."""
    try:
        return bool(get_json(f"{url}/ready")["ready"])
    except (OSError, ValueError, KeyError):
        return False


def wait_workers(url: str, n: int, token: str | None = None) -> None:
    """Wait until a router has n workers in its registry. While it starts, its answer is an error."""

    def has_them() -> bool:
        return len(get_json(f"{url}/workers", token).get("workers", ())) >= n

    wait_for(has_them, READY_TIMEOUT_S, f"{n} workers at {url}")


def bearer(token: str | None) -> dict[str, str]:
    """The header that carries a token, if there is one."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def get_json(url: str, token: str | None = None) -> Any:
    """GET a JSON answer, whatever its status; raises OSError if no server answers."""
    return json.loads(get_bytes(url, token))


def get_bytes(url: str, token: str | None = None) -> bytes:
    """GET the body of an answer, whatever its status; raises OSError if no server answers."""
    request = urllib.request.Request(url, headers=bearer(token))
    try:
        with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as exc:
        with exc:
            body = exc.read()
    return body


def facts(url: str, token: str | None = None) -> set[Fact]:
    """All facts in a router's view."""
    table = np.frombuffer(get_bytes(f"{url}/state/blocks", token), dtype=_FACT)
    return set(zip(*(table[name].tolist() for name in _FACT.names or ()), strict=True))


def known_blocks(url: str, token: str | None = None) -> set[tuple[int, int]]:
    """(worker, sequence hash) of every block in a router's view."""
    return {(worker_id, block) for worker_id, _, _, block in facts(url, token)}


def held_blocks(engines: Sequence[Engine]) -> set[tuple[int, int]]:
    """(worker, sequence hash) of every block that simulated engines hold, as the engines themselves answer."""
    return {
        (engine.worker_id, int(block))
        for engine in engines
        for block in get_json(f"{engine.url}/sim/cache")["sequence_hashes"]
    }
