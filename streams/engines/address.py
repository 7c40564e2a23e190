"""The address of one engine, and how `--engine` writes it (pure).

What lives here: the address, its text form, and the addresses of further ranks. What must not: connections (feed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from streams.core.ids import U64_MASK, WorkerId
from streams.core.workers import DP_SIZE_MAX, LORA_NAME_CHARS_MAX, LORA_NAMES_MAX
from streams.engines.dialects.interface import Dialect
from streams.engines.dialects.registry import DEFAULT_DIALECT, DIALECTS
from streams.errors import KvStreamsError, SettingsError

_PARTS = frozenset({"id", "url", "events", "replay", "dp", "model", "metrics", "dialect", "lora"})
_REQUIRED = frozenset({"id", "url", "events"})

#: The schemes that each URL of an engine may have, and an example of the URL.
_SCHEMES = {
    "url": (("http", "https"), "http://HOST:PORT"),
    "metrics": (("http", "https"), "http://HOST:PORT/metrics"),
    "events": (("tcp", "ipc", "http", "https"), "tcp://HOST:PORT, or http://HOST:PORT/kv_cache_events"),
    "replay": (("tcp", "ipc"), "tcp://HOST:PORT"),
}


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where one engine is, and which dialect it speaks.

    events, replay: ZMQ addresses of rank 0; rank n listens n ports above, as in vLLM. events may also be an HTTP URL,
    which is polled for all ranks. model: None to ask the engine. metrics: the URL of its Prometheus page, if that is
    not /metrics of `url`. lora_names: the adapters that it serves, None if they are not listed.
    """

    worker_id: WorkerId
    url: str
    events: str
    replay: str | None = None
    dp_size: int = 1
    model: str | None = None
    metrics: str | None = None
    dialect: Dialect = DEFAULT_DIALECT
    lora_names: tuple[str, ...] | None = None

    @property
    def metrics_url(self) -> str:
        """The URL of its Prometheus page."""
        return self.metrics or f"{self.url}/metrics"

    @property
    def models_url(self) -> str:
        """The URL at which an engine with OpenAI's API lists its models."""
        return f"{self.url}/v1/models"


def engine_address(text: str) -> EngineAddress:
    """Parse `id=1,url=…,events=…[,replay=…][,dp=…][,model=…][,metrics=…][,dialect=…][,lora=a+b]`.

    Raises SettingsError that names the part that cannot be used.
    """
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = parts.keys() - _PARTS
    missing = _REQUIRED - {name for name, value in parts.items() if value}
    if unknown or missing:
        faults = [f"{', '.join(sorted(missing))} missing"] if missing else []
        faults += [f"{', '.join(sorted(unknown))} unknown"] if unknown else []
        raise SettingsError(f"--engine {text!r}: {'; '.join(faults)}")
    try:
        worker_id, dp_size = int(parts["id"]), int(parts.get("dp", "1"))
    except ValueError as exc:
        raise SettingsError(f"--engine {text!r}: id and dp must be whole numbers") from exc
    if not 0 <= worker_id <= U64_MASK or not 1 <= dp_size <= DP_SIZE_MAX:
        raise SettingsError(f"--engine {text!r}: id must be 0 to 2^64-1, dp 1 to {DP_SIZE_MAX}")
    _check_urls(text, parts)
    return EngineAddress(
        worker_id=WorkerId(worker_id),
        url=parts["url"].rstrip("/"),
        events=parts["events"],
        replay=parts.get("replay") or None,
        dp_size=dp_size,
        model=parts.get("model") or None,
        metrics=parts.get("metrics") or None,
        dialect=_dialect(text, parts.get("dialect")),
        lora_names=_lora_names(text, parts.get("lora")),
    )


def is_polled(engine: EngineAddress) -> bool:
    """Whether an engine's events are polled over HTTP."""
    return urlsplit(engine.events).scheme in ("http", "https")


def port_above(endpoint: str, offset: int) -> str:
    """Return the ZMQ address `offset` ports above; an ipc address gets the offset as a suffix.

    Raises KvStreamsError for a tcp address without a port.
    """
    if offset == 0:
        return endpoint
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return f"{endpoint}_{offset}"
    if parts.port is None or parts.hostname is None:
        raise KvStreamsError(f"{endpoint} has no port", remedy="Give it as tcp://host:port")
    return urlunsplit(("tcp", f"{parts.hostname}:{parts.port + offset}", "", "", ""))


def _dialect(text: str, name: str | None) -> Dialect:
    if not name:
        return DEFAULT_DIALECT
    dialect = DIALECTS.get(name)
    if dialect is None:
        known = ", ".join(sorted(DIALECTS))
        raise SettingsError(f"--engine {text!r}: dialect {name!r} is unknown", remedy=f"The known ones are: {known}")
    return dialect


def _lora_names(text: str, value: str | None) -> tuple[str, ...] | None:
    """Read the names of adapters, which "+" separates. An empty value lists none, so that none is served."""
    if value is None:
        return None
    names = tuple(value.split("+")) if value else ()
    if len(names) > LORA_NAMES_MAX or any(not 1 <= len(name) <= LORA_NAME_CHARS_MAX for name in names):
        raise SettingsError(
            f"--engine {text!r}: lora lists at most {LORA_NAMES_MAX} names of 1 to {LORA_NAME_CHARS_MAX} characters",
            remedy="It must look like lora=NAME+NAME",
        )
    return names


def _check_urls(text: str, parts: dict[str, str]) -> None:
    """Raise SettingsError for a URL that no client can use: the bridge would retry it for ever, and log each time."""
    for name, (schemes, example) in _SCHEMES.items():
        value = parts.get(name)
        if not value:
            continue
        try:
            url = urlsplit(value)
            fits = url.scheme in schemes and (url.scheme == "ipc" or bool(url.hostname))
            # ZMQ has no default port. `url.port` raises ValueError for a port that is not a number.
            fits = fits and (url.port is not None or url.scheme != "tcp")
        except ValueError:
            fits = False
        if not fits:
            raise SettingsError(f"--engine {text!r}: {name} is {value!r}", remedy=f"It must look like {example}")
    if parts.get("replay") and urlsplit(parts["events"]).scheme in ("http", "https"):
        raise SettingsError(f"--engine {text!r}: events that are polled have no replay socket", remedy="Remove replay=")


def check_distinct(engines: Sequence[EngineAddress]) -> None:
    """Raise SettingsError if two engines have the same id, or the same address of events.

    One of them would be given the events of the other.
    """
    for what in ("worker_id", "events"):
        seen: set[object] = set()
        for engine in engines:
            value = getattr(engine, what)
            if value in seen:
                name = "id" if what == "worker_id" else what
                raise SettingsError(f"two engines have {name}={value}", remedy="Correct one of the --engine options")
            seen.add(value)
