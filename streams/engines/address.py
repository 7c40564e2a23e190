"""The address of one engine, and how `--engine` and files of engines write it (pure).

What lives here: the address, its text forms, templates of addresses, and the addresses of further ranks. What must not:
connections (feed), and where a list of engines comes from (sources).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit

import xxhash

from streams.core.ids import U64_MASK, WorkerId
from streams.core.workers import DP_SIZE_MAX, DP_START_MAX, LORA_NAME_CHARS_MAX, LORA_NAMES_MAX, Role
from streams.engines.dialects.interface import Dialect
from streams.engines.dialects.registry import DEFAULT_DIALECT, DIALECTS
from streams.errors import KvStreamsError, SettingsError

_PARTS = frozenset(
    {
        "id",
        "lmcache",
        "url",
        "events",
        "replay",
        "dp",
        "dp_start",
        "model",
        "metrics",
        "key",
        "dialect",
        "role",
        "device_class",
        "taints",
        "lora",
    }
)
_REQUIRED = frozenset({"id", "url"})

#: The schemes that each URL of an engine may have, and an example of the URL.
_SCHEMES = {
    "url": (("http", "https"), "http://HOST:PORT"),
    "metrics": (("http", "https"), "http://HOST:PORT/metrics"),
    "events": (
        ("tcp", "ipc", "http", "https"),
        "tcp://HOST:PORT, bind:tcp://ADDRESS:PORT, or http://HOST:PORT/kv_cache_events",
    ),
    "replay": (("tcp", "ipc"), "tcp://HOST:PORT"),
}

#: The schemes of an address at which the bridge listens.
_BOUND_SCHEMES = ("tcp", "ipc")

#: What separates taints, and names of adapters, in `--engine`, whose parts are separated by commas.
_SEPARATOR = "+"

#: The beginning of an address on the loopback interface, without the port.
_LOOPBACK = re.compile(r"^(\w+:)//(?:localhost|127\.0\.0\.1|\[::1\]):", re.IGNORECASE)

#: How an address of events begins at which the bridge listens, for an engine that connects.
BIND = "bind:"

#: What a template has in place of an engine's host, and of its HTTP port in an InferencePool.
HOST, PORT = "{host}", "{port}"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where one engine is, which dialect it speaks, and how it is registered.

    events, replay: ZMQ addresses of the first rank; the nth rank after it has those n ports above, as in vLLM. events
    may also begin with `bind:`, for an engine that connects to the bridge, or be an HTTP URL, which is polled for all
    ranks, or None for an engine that publishes none. dp_start: the number of the first rank; None to learn it from the
    engine. model: None to ask the engine. metrics: the URL of its Prometheus page, if that is not /metrics of `url`.
    key_file: with the key that its HTTP server requires. role, device_class, taints: None to leave what the registry
    has, or the default. lora_names: the adapters that it serves, None to take those that it lists. lmcache: the
    instance of LMCache that it uses.
    """

    worker_id: WorkerId
    url: str
    events: str | None
    replay: str | None = None
    dp_size: int = 1
    dp_start: int | None = None
    model: str | None = None
    metrics: str | None = None
    key_file: str | None = None
    dialect: Dialect = DEFAULT_DIALECT
    role: Role | None = None
    device_class: str | None = None
    taints: tuple[str, ...] | None = None
    lora_names: tuple[str, ...] | None = None
    lmcache: str | None = None

    @property
    def metrics_url(self) -> str:
        """The URL of its Prometheus page."""
        return self.metrics or f"{self.url}/metrics"

    @property
    def models_url(self) -> str:
        """The URL at which an engine with OpenAI's API lists its models."""
        return f"{self.url}/v1/models"


def engine_address(text: str) -> EngineAddress:
    """Parse `id=1,url=…[,events=…][,replay=…][,dp=…][,model=…][,metrics=…][,dialect=…][,role=…][,device_class=…]`.

    `dp_start=…`, `key=…`, `taints=a+b`, `lora=a+b` and `lmcache=…` are also parts. Raises SettingsError that names the
    part that cannot be used.
    """
    where = f"--engine {text!r}"
    return address_of(_parts_of(text, where), where)


def _parts_of(text: str, where: str) -> dict[str, str]:
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    parts = dict(pairs)
    if len(parts) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise SettingsError(
            f"{where}: {', '.join(repeated)} given more than once", remedy="Repeat the option for each engine"
        )
    return parts


def address_of(parts: Mapping[str, str], where: str) -> EngineAddress:
    """Return the address with these parts. where: begins the text of the SettingsError for a part that is unusable."""
    unknown = parts.keys() - _PARTS
    missing = _REQUIRED - {name for name, value in parts.items() if value}
    if unknown or missing:
        faults = [f"{', '.join(sorted(missing))} missing"] if missing else []
        faults += [f"{', '.join(sorted(unknown))} unknown"] if unknown else []
        raise SettingsError(f"{where}: {'; '.join(faults)}")
    if parts.get("replay") and not parts.get("events"):
        raise SettingsError(f"{where}: replay without events", remedy="Add events=tcp://HOST:PORT")
    try:
        worker_id, dp_size = int(parts["id"]), int(parts.get("dp", "1"))
        dp_start = int(parts["dp_start"]) if parts.get("dp_start") else None
    except ValueError as exc:
        raise SettingsError(f"{where}: id, dp and dp_start must be whole numbers") from exc
    if not 0 <= worker_id <= U64_MASK or not 1 <= dp_size <= DP_SIZE_MAX:
        raise SettingsError(f"{where}: id must be 0 to 2^64-1, dp 1 to {DP_SIZE_MAX}")
    if dp_start is not None and not 0 <= dp_start <= DP_START_MAX:
        raise SettingsError(f"{where}: dp_start must be 0 to {DP_START_MAX}")
    _check_urls(where, parts)
    engine = EngineAddress(
        worker_id=WorkerId(worker_id),
        url=parts["url"].rstrip("/"),
        events=parts.get("events") or None,
        replay=parts.get("replay") or None,
        dp_size=dp_size,
        dp_start=dp_start,
        model=parts.get("model") or None,
        metrics=parts.get("metrics") or None,
        key_file=parts.get("key") or None,
        dialect=_dialect(where, parts.get("dialect")),
        role=_role(where, parts.get("role")),
        device_class=parts.get("device_class") or None,
        taints=tuple(filter(None, parts["taints"].split(_SEPARATOR))) if "taints" in parts else None,
        lora_names=_lora_names(where, parts.get("lora")),
        lmcache=parts.get("lmcache") or None,
    )
    _check_ports(where, engine)
    return engine


def is_polled(engine: EngineAddress) -> bool:
    """Whether an engine's events are polled over HTTP."""
    return engine.events is not None and urlsplit(engine.events).scheme in ("http", "https")


@dataclass(frozen=True, slots=True)
class EngineTemplate:
    """The address of every engine of a group, with `{host}` in place of its host, and `{port}` of its HTTP port.

    parts: without an id.
    """

    parts: Mapping[str, str]

    def at(self, host: str, port: int | None = None, index: int = 0) -> EngineAddress:
        """Return the address of the engine on a host. Its id is a hash of its URL, so it is always the same.

        port: of its HTTP server, where the template has `{port}`. index: of the engine among those of its host, which
        is its data-parallel rank there. The template's events and replays are those of the first; an engine adds its
        rank to both ports, as vLLM does.
        """
        written = f"[{host}]" if ":" in host else host
        parts = {name: value.replace(HOST, written).replace(PORT, str(port)) for name, value in self.parts.items()}
        if "lmcache" in parts:  # a name, and no part of a URL
            parts["lmcache"] = self.parts["lmcache"].replace(HOST, host)
        for name in ("events", "replay"):
            if parts.get(name, "").startswith((f"{BIND}tcp:", "tcp:", f"{BIND}ipc:", "ipc:")):
                parts[name] = port_above(parts[name], index)
        return address_of({**parts, "id": str(worker_id_of(parts["url"]))}, f"the engine at {host}")


def engine_template(text: str, *, ports: bool = False) -> EngineTemplate:
    """Parse `url=http://{host}:8000,events=tcp://{host}:5557`, with the parts of `--engine` except id.

    ports: whether the URL has `{port}`. Raises SettingsError that names the part that cannot be used.
    """
    where = f"--engine-template {text!r}"
    parts = _parts_of(text, where)
    if "id" in parts:
        raise SettingsError(f"{where}: id unknown", remedy="Leave it out: each engine's id is derived from its URL")
    for name in ("url", "events", "replay", "metrics"):
        if (name == "url" or parts.get(name)) and HOST not in parts.get(name, ""):
            raise SettingsError(f"{where}: {name} does not contain {HOST}", remedy=f"{HOST} stands for each engine's")
    if ports and PORT not in parts["url"]:
        raise SettingsError(f"{where}: url does not contain {PORT}", remedy=f"{PORT} stands for each target port")
    if not ports and any(PORT in value for value in parts.values()):
        raise SettingsError(f"{where}: only an InferencePool has a {PORT}", remedy="Give the port as a number")
    template = EngineTemplate(parts)
    template.at("host", 1)
    return template


def worker_id_of(url: str) -> WorkerId:
    """Return the id of an engine that is known by its URL alone: xxh3_64 of the URL."""
    return WorkerId(xxhash.xxh3_64_intdigest(url.rstrip("/").encode()))


def port_above(endpoint: str, offset: int) -> str:
    """Return the ZMQ address `offset` ports above; an ipc address gets the offset as a suffix.

    Raises KvStreamsError for a tcp address without a port.
    """
    if offset == 0:
        return endpoint
    if endpoint.startswith(BIND):
        return BIND + port_above(endpoint.removeprefix(BIND), offset)
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return f"{endpoint}_{offset}"
    if parts.port is None or parts.hostname is None:
        raise KvStreamsError(f"{endpoint} has no port", remedy="Give it as tcp://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return urlunsplit(("tcp", f"{host}:{parts.port + offset}", "", "", ""))


def rank_endpoints(endpoint: str, dp_size: int) -> list[str]:
    """Return the addresses of all ranks; only that of rank 0 if the others cannot be computed.

    A page that is polled over HTTP has all ranks. The registry may have any text as an address, and connecting shows
    what is wrong with it.
    """
    if endpoint.startswith(("http://", "https://")):
        return [endpoint]
    try:
        return [port_above(endpoint, dp_rank) for dp_rank in range(dp_size)]
    except (KvStreamsError, ValueError):
        return [endpoint]


def needs_lookup(engine: EngineAddress) -> bool:
    """Whether an address of an engine's sockets contains a name that must be resolved."""
    return any(_has_name(endpoint) for endpoint in (engine.events, engine.replay) if endpoint is not None)


def _has_name(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return False  # a local socket, one at which the bridge listens, or a page that is polled over HTTP
    try:
        ip_address((parts.hostname or "").partition("%")[0])
    except ValueError:
        return True
    return False


def _dialect(where: str, name: str | None) -> Dialect:
    if not name:
        return DEFAULT_DIALECT
    dialect = DIALECTS.get(name)
    if dialect is None:
        known = ", ".join(sorted(DIALECTS))
        raise SettingsError(f"{where}: dialect {name!r} is unknown", remedy=f"The known ones are: {known}")
    return dialect


def _role(where: str, name: str | None) -> Role | None:
    if not name:
        return None
    try:
        return Role(name)
    except ValueError as exc:
        raise SettingsError(f"{where}: role {name!r} is unknown", remedy=f"Use one of {', '.join(Role)}") from exc


def _lora_names(where: str, value: str | None) -> tuple[str, ...] | None:
    """Read the names of adapters. An empty value lists none, so that none is served."""
    if value is None:
        return None
    names = tuple(value.split(_SEPARATOR)) if value else ()
    if len(names) > LORA_NAMES_MAX or any(not 1 <= len(name) <= LORA_NAME_CHARS_MAX for name in names):
        raise SettingsError(
            f"{where}: lora lists at most {LORA_NAMES_MAX} names of 1 to {LORA_NAME_CHARS_MAX} characters",
            remedy="It must look like lora=NAME+NAME",
        )
    return names


def _check_urls(where: str, parts: Mapping[str, str]) -> None:
    """Raise SettingsError for a URL that no client can use: the bridge would retry it for ever, and log each time."""
    for name, (schemes, example) in _SCHEMES.items():
        value = parts.get(name)
        if not value:
            continue
        try:
            is_bound = name == "events" and value.startswith(BIND)
            url = urlsplit(value.removeprefix(BIND) if is_bound else value)
            fits = url.scheme in (_BOUND_SCHEMES if is_bound else schemes)
            fits = fits and (url.scheme == "ipc" or bool(url.hostname))
            # ZMQ has no default port. `url.port` raises ValueError for a port that is not a number.
            fits = fits and (url.port is not None or url.scheme != "tcp")
        except ValueError:
            fits = False
        if not fits:
            raise SettingsError(f"{where}: {name} is {value!r}", remedy=f"It must look like {example}")
    if parts.get("replay") and urlsplit(parts.get("events", "")).scheme in ("http", "https"):
        raise SettingsError(f"{where}: events that are polled have no replay socket", remedy="Remove replay=")


def _check_ports(where: str, engine: EngineAddress) -> None:
    """Raise SettingsError if a rank would have its replays where another one has its events."""
    if engine.events is None or engine.replay is None:
        return
    events = set(rank_endpoints(engine.events.removeprefix(BIND), engine.dp_size))
    both = sorted(events.intersection(rank_endpoints(engine.replay, engine.dp_size)))
    if both:
        raise SettingsError(
            f"{where}: {both[0]} would be the address of one rank's events and of another one's replays",
            remedy=f"{engine.dp_size} ranks use {engine.dp_size} ports from each address on. Choose addresses that are "
            "further apart, for the engine as well",
        )


def check_distinct(engines: Sequence[EngineAddress]) -> None:
    """Raise SettingsError if two engines have the same id, or the same address of events.

    One of them would be given the events of the other.
    """
    clash = first_clash(engines)
    if clash is not None:
        raise SettingsError(f"two engines have {clash[1]}", remedy="Correct one of the engines' addresses")


def first_clash(engines: Sequence[EngineAddress]) -> tuple[EngineAddress, str] | None:
    """Return the first engine whose id or address of events an earlier one has, and which it is; None without one."""
    ids: set[WorkerId] = set()
    sockets: set[str] = set()
    for engine in engines:
        if engine.worker_id in ids:
            return engine, f"id={engine.worker_id}"
        own = _event_sockets(engine)
        for normal, endpoint in own.items():
            if normal in sockets:
                return engine, f"events={endpoint}" + (f" (rank 0 at {engine.events})" if engine.dp_size > 1 else "")
        ids.add(engine.worker_id)
        sockets.update(own)
    return None


def _event_sockets(engine: EngineAddress) -> dict[str, str]:
    """The addresses of the events of all ranks, by a form that is the same for `localhost` and its addresses.

    Other names are not resolved: their addresses may change, and a name server that is away must not stop a bridge.
    """
    if engine.events is None:
        return {}
    endpoints = rank_endpoints(engine.events, engine.dp_size)
    return {_LOOPBACK.sub(r"\1//localhost:", endpoint): endpoint for endpoint in endpoints}
