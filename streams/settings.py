"""Every knob, in one frozen, validated object.

What lives here: the settings, and where their values come from: command line over `KVSTREAMS_*` environment over a TOML
file over defaults. What must not: reading them behind a caller's back; whoever needs settings is given them.

Faust's command line refuses options that it does not know, so a worker's settings come by environment or file.
"""

from __future__ import annotations

import difflib
import enum
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from streams.core.routing.cost import CXL_SCORE_WEIGHT, MOE_SCORE_WEIGHT
from streams.core.routing.selection import CUDA_TO_CPU_RATIO, RouterMode
from streams.errors import SettingsError
from streams.faults import FAULT_ENV

ENV_PREFIX = "KVSTREAMS_"

#: Names the TOML file; without it `kvstreams.toml` in the current folder is read if it is there.
CONFIG_ENV = "KVSTREAMS_CONFIG"
CONFIG_FILE_DEFAULT = "kvstreams.toml"

_TESTS_PREFIX = "KVSTREAMS_TEST_"

#: A weight or a temperature beyond this drowns every other term of a cost; near the end of floats it makes costs
#: infinite, and an infinite cost chooses nothing.
WEIGHT_MAX = 1e6

#: Numbers of ours reach Kafka and Avro as signed longs.
NUMBER_MAX = (1 << 63) - 1

#: What Kafka allows in a topic's name; its 249 characters less room for the longest name behind the prefix.
_TOPIC_PREFIX = re.compile(r"[a-zA-Z0-9._-]{0,200}")


def _knob(default: Any, text: str, *, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class Settings:
    """All knobs. Each field's help is what `kvstreams config` and `--help` print."""

    kafka: str = _knob("127.0.0.1:9092", "bootstrap servers, host:port, separated by commas")
    topic_prefix: str = _knob("", "put before every topic's name: one scope, one fleet")
    partitions: int = _knob(8, "partitions of every topic; fixed for a scope", low=1, high=1024)
    replication: int = _knob(1, "replicas of every topic; 3 on a Kafka of three brokers or more", low=1, high=7)
    data_dir: str = _knob(".kvstreams/state", "RocksDB of the tables; one folder a process, locked")
    block_size: int = _knob(
        16, "tokens of a KV block, for models that model_block_sizes does not name", low=1, high=4096
    )
    model_block_sizes: dict[str, int] = field(
        default_factory=dict, metadata={"help": "tokens of a KV block by model, as in llama=64,qwen=16"}
    )
    router: bool = _knob(True, "serve the HTTP API in the Faust worker's process")
    host: str = _knob("127.0.0.1", "address the HTTP API listens on; 0.0.0.0 for every interface")
    port: int = _knob(8000, "port of the HTTP API", low=0, high=65535)
    metrics_port: int = _knob(
        0,
        "port of /metrics and /healthz in a bridge, and in a Faust worker that does not serve the HTTP API, on "
        "the address `host`; 0 serves neither",
        low=0,
        high=65535,
    )
    router_mode: RouterMode = _knob(RouterMode.KV, f"how a rank is chosen: {', '.join(RouterMode)}")
    kv_overlap_score_weight: float = _knob(
        1.0, "weight of prefill against decode load; 0 balances load only", low=0.0, high=WEIGHT_MAX
    )
    router_temperature: float = _knob(0.0, "0 takes the cheapest rank, more samples", low=0.0, high=WEIGHT_MAX)
    encoder_cuda_to_cpu_ratio: float = _knob(
        CUDA_TO_CPU_RATIO,
        "mode device-aware-weighted: throughput of a worker on another device in those of one on a CPU",
        low=0.001,
        high=WEIGHT_MAX,
    )
    kv_events: bool = _knob(True, "know what ranks hold from their events; off predicts it from own decisions")
    router_ttl_s: float = _knob(120.0, "with --no-kv-events: a prediction lasts this long", low=0.01, high=86_400.0)
    router_predicted_ttl_s: float = _knob(
        0.0, "with events: a decision counts as held for this long, until they come; 0 does not", low=0.0, high=86_400.0
    )
    router_replica_sync: bool = _knob(True, "tell other routers of bookings and hear of theirs")
    track_active_blocks: bool = _knob(True, "count blocks in use in the cost; off for workers that only prefill")
    active_decode_blocks_threshold: float = _knob(
        0.0, "a rank with a greater share of its blocks in use is busy and gets nothing; 0: never", low=0.0, high=100.0
    )
    active_prefill_tokens_threshold: int = _knob(
        0, "a rank with more tokens still to be computed is busy and gets nothing; 0: never", low=0
    )
    router_min_initial_workers: int = _knob(
        0, "a router that starts is not ready before so many workers are registered", low=0, high=1_000_000
    )
    router_session_affinity_ttl_s: float = _knob(
        0.0, "a session stays on its rank until idle for this long; 0: no affinity", low=0.0, high=31_536_000.0
    )
    router_event_threads: int = _knob(4, "threads that fold the topics' partitions into a router", low=1, high=64)
    router_seed: int = _knob(0, "seed of the router's generator; 0 takes one from the system", low=0)
    tier_weights: tuple[float, ...] = _knob(
        (1.0, 0.75, 0.25, 0.0), "worth of a cached block on device, host, disk, external"
    )
    cxl_score_weight: float = _knob(
        CXL_SCORE_WEIGHT,
        "worth of a block reached in a CXL pool; 0 looks for none",
        low=0.0,
        high=WEIGHT_MAX,
    )
    moe_score_weight: float = _knob(
        MOE_SCORE_WEIGHT,
        "worth of matching a moe_query, beside that of the cached block",
        low=0.0,
        high=WEIGHT_MAX,
    )
    booking_ttl_s: float = _knob(600.0, "a booking that nobody frees ends after this", low=1.0, high=30 * 86_400.0)
    request_tokens_max: int = _knob(1_048_576, "tokens of the longest request accepted", low=1)
    body_bytes_max: int = _knob(16 * 1024 * 1024, "bytes of the largest HTTP body accepted", low=1024)
    stale_after_ms: int = _knob(3000, "a partition record older than this makes answers degraded", low=100)
    behind_after_ms: int = _knob(1000, "an owner this far behind its source makes answers degraded", low=10)
    session_timeout_s: float = _knob(
        6.0, "a Faust worker silent for this long loses its partitions", low=1.0, high=1800.0
    )
    transaction_timeout_ms: int = _knob(10_000, "Kafka ends a transaction left open after this", low=1000)
    batch_records_max: int = _knob(500, "source records of one transaction", low=1)
    queue_records_high: int = _knob(4096, "records waiting for one partition before its source is paused", low=1)
    queue_bytes_high: int = _knob(
        64 * 1024 * 1024, "bytes of records waiting for one partition before its source is paused", low=1
    )
    rocksdb_cache_mb: int = _knob(8, "block cache of one partition's RocksDB", low=1)
    worker_grace_s: float = _knob(
        300.0, "a worker silent for this long beyond its lease is removed", low=1.0, high=30 * 86_400.0
    )
    clear_degraded_after_s: float = _knob(
        0.0, "a rank degraded for this long is cleared; 0 leaves it to its engine", low=0.0, high=30 * 86_400.0
    )
    retention_ms: int = _knob(3_600_000, "kv-events and cxl-events are kept this long", low=60_000)
    cxl_evicted_ttl_s: float = _knob(
        3600.0, "metadata of a block that a CXL pool evicted are kept this long", low=1.0, high=30 * 86_400.0
    )
    schema_ids: dict[str, int] = field(
        default_factory=dict, metadata={"help": "Confluent registry ids accepted by schema, as in kv-events=12"}
    )
    bridge_lease_s: float = _knob(
        6.0, "a bridge silent for this long has lost its engines to the next one", low=0.3, high=600.0
    )
    metrics_interval_s: float = _knob(
        1.0, "a bridge reads each engine's Prometheus page this often; 0 does not", low=0.0, high=180.0
    )
    router_reset_states: bool = _knob(
        False, "empty the scope's index, loads and events at start; refused while another member lives"
    )
    router_reset_force: bool = _knob(False, "reset although another member of the scope lives")
    log_level: str = _knob("info", "debug, info, warning or error")
    log_json: bool = _knob(False, "write logs as JSON, one object a line")

    def __post_init__(self) -> None:
        for knob in fields(self):
            _check_range(knob.name, getattr(self, knob.name), knob.metadata)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise SettingsError(f"log_level is {self.log_level!r}; one of debug, info, warning, error")
        weights, wanted = self.tier_weights, len(TIER_NAMES)
        if len(weights) != wanted or not all(0.0 <= weight <= WEIGHT_MAX for weight in weights):
            raise SettingsError(f"tier_weights is {weights}; {wanted} numbers of 0 to {WEIGHT_MAX:g}")
        for model, size in self.model_block_sizes.items():
            _check_range(f"model_block_sizes of {model}", size, {"low": 1, "high": 4096})
        if not self.kafka.strip():
            raise SettingsError("kafka is empty; give host:port of a broker")
        if not _TOPIC_PREFIX.fullmatch(self.topic_prefix):
            raise SettingsError(
                f"topic_prefix is {self.topic_prefix!r}; at most 200 of a-z, A-Z, 0-9, dot, hyphen, underscore"
            )

    @property
    def reads_index(self) -> bool:
        """Whether a router reads the index's changelog: not where overlap has no weight or is only predicted."""
        return self.kv_events and self.kv_overlap_score_weight > 0.0

    def block_size_of(self, model: str) -> int:
        """Tokens of a KV block of a model, one size for each model within a scope."""
        return self.model_block_sizes.get(model, self.block_size)

    @property
    def faust_arguments(self) -> list[str]:
        """The arguments behind the interpreter that run a Faust worker; its settings go by `as_environ`.

        Faust's own log level caps ours, and knows it as `warn`.
        """
        level = "warn" if self.log_level == "warning" else self.log_level
        return ["-m", "faust", "--quiet", "-A", "streams", "worker", "--loglevel", level]

    @property
    def app_id(self) -> str:
        """Faust's app id, which names consumer group and changelogs."""
        return f"{self.topic_prefix}kvstreams"


def tables_path(settings: Settings) -> Path:
    """Folder of the tables' local copies, a folder for each partition."""
    return Path(settings.data_dir) / "tables"


TIER_NAMES = ("device", "host", "disk", "external")

_DURABLE = "events are on Kafka, which is durable; there is no other way to switch on or off"

#: Knobs of NVIDIA Dynamo's router that mean nothing here, accepted from everywhere so that a launch script runs as it
#: is, and why they are needless. docs/from-dynamo.md maps all others.
UNNEEDED_OPTIONS = {
    "router_snapshot_threshold": "nothing is snapshotted; the compacted changelog is the snapshot",
    "durable_kv_events": _DURABLE,
    "router_durable_kv_events": _DURABLE,
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, for each knob where its value came from, and what whoever gave them should know."""

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def load(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Resolved:
    """Resolve every knob; raises SettingsError naming the knob and where its value came from.

    overrides: from the command line, None values are not given.
    """
    env = os.environ if environ is None else environ
    hints = get_type_hints(Settings)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(hints, "default")
    warnings: list[str] = []
    file = config_file or (Path(env[CONFIG_ENV]) if CONFIG_ENV in env else Path(CONFIG_FILE_DEFAULT))
    explicit = config_file is not None or CONFIG_ENV in env
    layers = [
        (str(file), _read_toml(file, explicit)),
        ("environment", _from_environ(env, hints)),
        ("command line", {name: value for name, value in (overrides or {}).items() if value is not None}),
    ]
    for source, layer in layers:
        for name, value in layer.items():
            label = f"{ENV_PREFIX}{name.upper()}" if source == "environment" else source
            if name in UNNEEDED_OPTIONS:
                warnings.append(f"{name} (from: {label}) is not needed: {UNNEEDED_OPTIONS[name]}")
                continue
            if name not in hints:
                raise SettingsError(f"{name} in {source} is no knob", remedy="`kvstreams config` prints all of them")
            values[name] = _convert(name, value, hints[name], label)
            sources[name] = label
    try:
        settings = Settings(**values)
        asked = sources["router_reset_states"]
        if asked != "default" and not settings.router_reset_states and not settings.reads_index:
            reason = "kv_events is off" if not settings.kv_events else "kv_overlap_score_weight is 0"
            warnings.append(
                f"state persists on Kafka (router_reset_states is off, from: {asked}), and this router reads no index, "
                f"since {reason}: what it predicts of caches ends with its process"
            )
        return Resolved(settings, sources, tuple(warnings))
    except SettingsError as exc:
        knob = exc.message.split(" ", 1)[0]
        raise SettingsError(exc.message, remedy=f"It came from: {sources.get(knob, 'default')}") from exc


def as_environ(settings: Settings) -> dict[str, str]:
    """Settings as `KVSTREAMS_*`, for a child process.

    Every knob, those with their default too: a child inherits our environment and folder, and must not take another
    value from there or from a file.
    """
    return {ENV_PREFIX + knob.name.upper(): _to_text(getattr(settings, knob.name)) for knob in fields(settings)}


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`KVSTREAMS_*` variables that nobody reads, each with what to say of it; those of our tests are passed over."""
    knobs = [*(ENV_PREFIX + knob.name.upper() for knob in fields(Settings)), CONFIG_ENV]
    read = {*knobs, FAULT_ENV, *(ENV_PREFIX + name.upper() for name in UNNEEDED_OPTIONS)}
    messages = {}
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in read and not name.startswith(_TESTS_PREFIX):
            nearest = difflib.get_close_matches(name, knobs, n=1, cutoff=0.0)[0]
            messages[name] = (
                f"{name} is set and is no knob; the nearest is {nearest}, and `kvstreams config` prints all"
            )
    return messages


def _read_toml(file: Path, explicit: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError as exc:
        if explicit:
            raise SettingsError(f"{file} is not there", remedy=f"Mend {CONFIG_ENV} or --config") from exc
        return {}
    except (OSError, ValueError) as exc:  # not TOML, not UTF-8, or a number of thousands of digits
        raise SettingsError(f"{file} cannot be read: {exc}") from exc


def _from_environ(env: Mapping[str, str], hints: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in env.items():
        name = key.removeprefix(ENV_PREFIX).lower()
        # Other KVSTREAMS_ variables belong to other parts (the tests, the demo); only a knob's own name is one.
        if key.startswith(ENV_PREFIX) and (name in hints or name in UNNEEDED_OPTIONS):
            found[name] = value
    return found


_SWITCH = {"on": True, "off": False, "true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def _convert(name: str, value: Any, kind: Any, source: str) -> Any:
    parsed = value
    if isinstance(value, str):
        if kind is bool:
            parsed = _SWITCH.get(value.lower(), value)
        elif kind == dict[str, int]:
            parsed = _parse_dict(value)
        elif kind == tuple[float, ...]:
            parsed = [part.strip() for part in value.split(",")]
    try:
        return msgspec.convert(parsed, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise SettingsError(
            f"{name} is {value!r}, not {_expected_kind(kind)}", remedy=f"It came from: {source}"
        ) from exc


def _parse_dict(text: str) -> Any:
    """`name=1,other=2`, or a JSON object for names with a comma or an equals sign; what is neither is given back."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): number.strip() for name, _, number in pairs}


def _expected_kind(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(str(member) for member in kind)}"
    if kind is bool:
        return "on or off"
    if kind == dict[str, int]:
        return "whole numbers by name, as in a=1,b=2"
    if kind == tuple[float, ...]:
        return "numbers separated by commas"
    return {"int": "a whole number", "float": "a number", "str": "text"}.get(getattr(kind, "__name__", ""), str(kind))


def _to_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    low, high = metadata.get("low"), metadata.get("high")
    if low is None:
        return
    if high is None:
        high = NUMBER_MAX
    if not value >= low:  # this way round, since NaN compares as false
        raise SettingsError(f"{name} is {value}; at least {low}")
    if not value <= high:
        raise SettingsError(f"{name} is {value}; at most {high}")
