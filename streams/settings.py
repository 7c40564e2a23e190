"""All settings: a frozen group for each subject and each process, and one validated object that is all of them.

What lives here: the settings, their ranges and help, and where their values come from: the command line, then
`KVSTREAMS_*` variables, then a TOML file, then defaults. What must not: hidden reads. A function that needs settings
takes the group that it needs as an argument.

Faust's command line refuses options that it does not define, so a worker's settings come from the environment or a
file.
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

from streams.core.routing.cost import CXL_SCORE_WEIGHT, MOE_SCORE_WEIGHT, RECENT_PREFILL_WEIGHT
from streams.core.routing.policies.expected_time_defaults import (
    DECODE_WEIGHT,
    DISK_GB_PER_S,
    EXPECTED_TIME_QUEUE_MS,
    EXTERNAL_GB_PER_S,
    HOST_GB_PER_S,
    KV_BYTES_PER_TOKEN,
    POOL_GB_PER_S,
    UNCACHED_WEIGHT,
)
from streams.core.routing.queue import PREFILL_US_PER_TOKEN, QUEUE_BACKLOG_MS, QueuePolicy
from streams.core.routing.selection import CUDA_TO_CPU_RATIO, RouterMode
from streams.errors import SettingsError
from streams.process.faults import FAULT_ENV

ENV_PREFIX = "KVSTREAMS_"

#: Names the TOML file. Without it, `kvstreams.toml` in the current folder is read if it exists.
CONFIG_ENV = "KVSTREAMS_CONFIG"
CONFIG_FILE_DEFAULT = "kvstreams.toml"

_TESTS_PREFIX = "KVSTREAMS_TEST_"

#: A greater weight or temperature outweighs every other term of a cost. Near the largest float, costs become infinite,
#: and ranks with infinite costs cannot be compared.
WEIGHT_MAX = 1e6

#: Kafka keeps for a week since when a topic keeps its history (replay.window).
HISTORY_WINDOW_S_MAX = 7 * 86_400.0

#: Kafka and Avro take our numbers as signed 64-bit integers.
NUMBER_MAX = (1 << 63) - 1

#: Characters that Kafka allows in a topic's name. Of its 249 characters, 49 are left for the name after the prefix.
_TOPIC_PREFIX = re.compile(r"[a-zA-Z0-9._-]{0,200}")
_OBJECTIVE = re.compile(r"[^=\s]{1,253}\s*=\s*-?[0-9]{1,9}")


#: Properties of clients that kafka_properties must not have: other settings determine them, or answers would be wrong.
_SECURITY_PROPERTIES = ("security.", "ssl.", "sasl.", "enable.ssl.", "enable.sasl.")
_OWN_PROPERTIES = frozenset(
    {
        *("bootstrap.servers", "metadata.broker.list", "client.rack", "plugin.library.paths", "message.max.bytes"),
        *("group.id", "group.instance.id", "group.protocol", "isolation.level", "auto.offset.reset"),
        *("enable.auto.commit", "auto.commit.enable", "enable.auto.offset.store", "enable.partition.eof"),
        *("acks", "request.required.acks", "enable.idempotence", "partitioner", "allow.auto.create.topics"),
        *("transactional.id", "transaction.timeout.ms"),
    }
)


#: How `kvstreams config` and error messages show the value of a secret.
MASKED = "set, not shown"


class KafkaSecurity(enum.StrEnum):
    """How clients connect to Kafka; the values are Kafka's own names for `security.protocol`."""

    PLAINTEXT = "plaintext"
    SSL = "ssl"
    SASL_PLAINTEXT = "sasl_plaintext"
    SASL_SSL = "sasl_ssl"

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self in (KafkaSecurity.SSL, KafkaSecurity.SASL_SSL)

    @property
    def uses_sasl(self) -> bool:
        """Whether clients authenticate by SASL."""
        return self in (KafkaSecurity.SASL_PLAINTEXT, KafkaSecurity.SASL_SSL)


class SaslMechanism(enum.StrEnum):
    """How clients authenticate by SASL; the values are Kafka's own names."""

    PLAIN = "PLAIN"
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"
    OAUTHBEARER = "OAUTHBEARER"


class TopicProfile(enum.StrEnum):
    """The service that runs Kafka, which determines the settings that topics may have (streams.topics)."""

    STANDARD = "standard"
    MSK_SERVERLESS = "msk-serverless"
    CONFLUENT_CLOUD = "confluent-cloud"
    REDPANDA = "redpanda"


class KvTransfer(enum.StrEnum):
    """How the KV cache of a prompt gets from the worker that computed it to the one that decodes."""

    PARAMS = "params"  # vLLM: the prefill's answer has kv_transfer_params, which the decode request passes on
    BOOTSTRAP = "bootstrap"  # SGLang: both requests run at the same time, with the same bootstrap fields
    POOL = "pool"  # the prefill's blocks are written to a CXL pool, and the decode worker reads them there


def _setting(default: Any, text: str, *, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "low": low, "high": high})


def _secret(text: str) -> Any:
    """A setting that is no option, since other users see the arguments of a process, and whose value is not shown."""
    return field(default="", repr=False, metadata={"help": text, "secret": True})


@dataclass(frozen=True)
class KafkaSettings:
    """How clients connect to Kafka."""

    kafka: str = _setting("127.0.0.1:9092", "bootstrap servers, host:port, separated by commas")
    kafka_security: KafkaSecurity = _setting(
        KafkaSecurity.PLAINTEXT, f"how clients connect to Kafka: {', '.join(KafkaSecurity)}"
    )
    kafka_tls_ca: str = _setting(
        "", "PEM file with the authorities that sign the brokers' certificates; by default those of the system"
    )
    kafka_tls_certificate: str = _setting("", "PEM file with the client's certificate, for brokers that require one")
    kafka_tls_key: str = _setting("", "PEM file with its key, without a password; by default in kafka_tls_certificate")
    kafka_sasl_mechanism: SaslMechanism = _setting(
        SaslMechanism.SCRAM_SHA_512, f"how clients authenticate by SASL: {', '.join(SaslMechanism)}"
    )
    kafka_sasl_username: str = _setting("", "user name for PLAIN and SCRAM")
    kafka_sasl_password: str = _secret("its password, from the environment or a file of settings")
    kafka_sasl_password_file: str = _setting("", "file that contains the password, instead of kafka_sasl_password")
    kafka_oauth_token_file: str = _setting(
        "", "for OAUTHBEARER: file with a token, which is read again before the token expires"
    )
    kafka_oauth_provider: str = _setting(
        "",
        "for OAUTHBEARER: name of a provider of tokens, msk-iam or one of an installed package, instead of "
        "kafka_oauth_token_file",
    )
    kafka_oidc_token_url: str = _setting(
        "", "for OAUTHBEARER: token endpoint of an OpenID provider, instead of kafka_oauth_token_file"
    )
    kafka_oidc_client_id: str = _setting("", "client id at that endpoint")
    kafka_oidc_client_secret: str = _secret("its secret there, from the environment or a file of settings")
    kafka_oidc_client_secret_file: str = _setting(
        "", "file that contains the client secret, instead of kafka_oidc_client_secret"
    )
    kafka_oidc_scope: str = _setting("", "scope that is requested there")
    kafka_properties: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "further properties of librdkafka for all clients but those of Faust, for example "
            "socket.keepalive.enable=true (docs/kafka.md)"
        },
    )


@dataclass(frozen=True)
class TopicSettings:
    """What all processes of a scope agree on: its topics, the records in them, and how late these may be."""

    topic_prefix: str = _setting(
        "", "prefix of every topic's name; processes with the same prefix form one scope, that is one fleet"
    )
    partitions: int = _setting(
        8, "partitions of every topic; another number takes a move to another scope (docs/replay.md)", low=1, high=1024
    )
    replication: int = _setting(1, "replicas of every topic; use 3 with three or more brokers", low=1, high=7)
    topic_profile: TopicProfile = _setting(
        TopicProfile.STANDARD,
        f"which settings topics have, by the service that runs Kafka: {', '.join(TopicProfile)} (docs/kafka.md)",
    )
    retention_ms: int = _setting(3_600_000, "retention of kv-events and cxl-events", low=60_000)
    booking_ttl_s: float = _setting(
        600.0, "a booking that is not freed ends after this time", low=1.0, high=30 * 86_400.0
    )
    history_window_s: float = _setting(
        0.0,
        "for so long, topics keep every record that `kvstreams replay --until` needs; costs disk and recovery time",
        low=0.0,
        high=HISTORY_WINDOW_S_MAX,
    )
    decision_log_retention_ms: int = _setting(86_400_000, "retention of router-decisions", low=60_000)
    decision_log_bytes_max: int = _setting(
        2 * 1024 * 1024 * 1024,
        "most bytes of router-decisions before the oldest are deleted, all partitions together, without replicas",
        low=1024 * 1024 * 1024 // 16,
    )
    block_size: int = _setting(
        16, "tokens per KV block, for models that model_block_sizes does not name", low=1, high=4096
    )
    model_block_sizes: dict[str, int] = field(
        default_factory=dict, metadata={"help": "tokens per KV block by model, for example llama=64,qwen=16"}
    )
    schema_ids: dict[str, int] = field(
        default_factory=dict,
        metadata={"help": "ids that a Confluent schema registry gave our schemas, for example kv-events=12"},
    )
    stale_after_ms: int = _setting(
        3000, "answers are degraded if a partition's owner has been silent for longer than this", low=100
    )
    behind_after_ms: int = _setting(
        750, "answers are degraded if a partition's owner lags behind its events by more than this", low=10
    )

    def block_size_of(self, model: str) -> int:
        """Tokens per KV block of a model. Each model has one block size within a scope."""
        return self.model_block_sizes.get(model, self.block_size)

    @property
    def app_id(self) -> str:
        """Faust's app id, which names the consumer group and the changelogs."""
        return f"{self.topic_prefix}kvstreams"


@dataclass(frozen=True)
class ScopeSettings(TopicSettings, KafkaSettings):
    """What a client of a scope needs: the cluster, and the scope's topics on it."""


@dataclass(frozen=True)
class TableSettings:
    """The tables of a Faust worker."""

    data_dir: str = _setting(".kvstreams/state", "folder of the tables' RocksDB; each process needs its own")
    session_timeout_s: float = _setting(
        6.0, "a Faust worker that is silent for this long loses its partitions", low=1.0, high=1800.0
    )
    transaction_timeout_ms: int = _setting(10_000, "Kafka aborts a transaction that stays open for longer", low=1000)
    batch_records_max: int = _setting(500, "most source records in one transaction", low=1)
    queue_records_high: int = _setting(
        4096, "records that may wait for one partition before its source is paused", low=1
    )
    queue_bytes_high: int = _setting(
        64 * 1024 * 1024, "bytes of records that may wait for one partition before its source is paused", low=1
    )
    table_standbys: int = _setting(
        1,
        "number of other workers that keep each partition's tables up to date, so that one of them can take over",
        low=0,
        high=8,
    )
    rocksdb_cache_mb: int = _setting(8, "size of the block cache of one partition's RocksDB, in MiB", low=1)
    worker_grace_s: float = _setting(
        300.0,
        "a worker that stays silent for this long after its lease has expired is removed",
        low=1.0,
        high=30 * 86_400.0,
    )
    clear_degraded_after_s: float = _setting(
        0.0, "clear a rank that has been degraded for this long; 0 never does", low=0.0, high=30 * 86_400.0
    )
    cxl_evicted_ttl_s: float = _setting(
        3600.0, "how long metadata of a block evicted from a CXL pool are kept", low=1.0, high=30 * 86_400.0
    )


@dataclass(frozen=True)
class AgentSettings(TableSettings, ScopeSettings):
    """What the agents of a Faust worker need: their tables, and the scope whose events they apply."""


@dataclass(frozen=True)
class WorkerSettings:
    """What a Faust worker runs."""

    router: bool = _setting(True, "a Faust worker serves the HTTP API as well")
    router_process: bool = _setting(
        False,
        "a Faust worker serves the HTTP API by a process of its own, which starts and ends with it, so that requests "
        "do not wait for agents; `processes` is the number of these processes",
    )


@dataclass(frozen=True)
class ResetSettings:
    """What a worker or a router empties at its start."""

    router_reset_states: bool = _setting(
        False,
        "empty the scope's index, loads and events at start; refused while another process of the scope is running",
    )
    router_reset_force: bool = _setting(False, "reset even if another process of the scope is running")


@dataclass(frozen=True)
class AccessSettings:
    """Where a process listens for HTTP, and who may call it."""

    host: str = _setting("127.0.0.1", "address that the HTTP API listens on; 0.0.0.0 for all interfaces")
    port: int = _setting(8000, "port of the HTTP API", low=0, high=65535)
    metrics_port: int = _setting(
        0,
        "port of /healthz, /ready and /metrics in a bridge, and in a Faust worker with router off or router_process "
        "on; they listen on the same host as the API; 0 disables them",
        low=0,
        high=65535,
    )
    tokens_file: str = _setting(
        "",
        "TOML file with the bearer tokens of the HTTP API and their rights (docs/security.md); several are separated "
        "by commas; they are read again when they change",
    )
    allow_anonymous: bool = _setting(
        False, "listen on any address without tokens; otherwise only loopback addresses need none"
    )
    tls_certificate: str = _setting(
        "",
        "PEM file with the certificate chain of the HTTP API, which is then served over TLS only; read again when it "
        "changes",
    )
    tls_key: str = _setting("", "PEM file with its key, without a password; by default in tls_certificate")
    tls_client_ca: str = _setting(
        "", "PEM file with authorities; a client must have a certificate that one of them has signed (mTLS)"
    )


@dataclass(frozen=True)
class HttpSettings:
    """The limits of HTTP requests, and how a server stops."""

    request_tokens_max: int = _setting(1_048_576, "most tokens that a request may have", low=1)
    body_bytes_max: int = _setting(16 * 1024 * 1024, "most bytes that an HTTP body may have", low=1024)
    bodies_bytes_max: int = _setting(
        128 * 1024 * 1024, "most bytes of HTTP bodies over 64 KiB that are read at the same time", low=65_536
    )
    first_request_timeout_s: float = _setting(
        10.0, "time within which a new connection must send a request with all its headers", low=0.1, high=3600.0
    )
    body_timeout_s: float = _setting(10.0, "time within which an HTTP body must arrive", low=0.1, high=3600.0)
    connections_max: int = _setting(4096, "most HTTP connections that are open at the same time", low=1)
    drain_notice_s: float = _setting(
        0.0,
        "a stopping router answers for this long after /ready has said so, so that load balancers notice",
        low=0.0,
        high=3600.0,
    )
    drain_timeout_s: float = _setting(
        10.0, "a stopping router finishes its requests and sends its records within this time", low=0.1, high=3600.0
    )


@dataclass(frozen=True)
class ProcessSettings:
    """The processes of a router, and how they run."""

    processes: int = _setting(
        1,
        "processes of `kvstreams router`, or of a worker with router_process, that share one port; each has its own "
        "copy of the index",
        low=1,
        high=64,
    )
    process_port: int = _setting(
        0,
        "own port of the first of several processes, and the next port for each further one; 0 is port + 1",
        low=0,
        high=65535,
    )
    models: str = _setting(
        "",
        "models that a router serves, as workers register them, separated by commas; it keeps nothing of others and "
        "answers 404 for them; by default all models (docs/sizing.md)",
    )
    router_event_threads: int = _setting(4, "threads of a router that read topics", low=1, high=64)
    router_rack: str = _setting(
        "",
        "rack or zone of a router, which then reads from replicas there, if the brokers have a rack-aware replica "
        "selector (docs/kafka.md)",
    )
    router_min_initial_workers: int = _setting(
        0, "a starting router is not ready until this many workers are registered", low=0, high=1_000_000
    )
    router_realtime: bool = _setting(
        False,
        "let the threads of a router run before those of ordinary processes, so that answers do not wait while others "
        "use all processors; needs CAP_SYS_NICE (docs/more-routers.md)",
    )
    router_replica_sync: bool = _setting(True, "share bookings with other routers")


@dataclass(frozen=True)
class RoutingSettings:
    """How a router chooses a rank."""

    router_mode: RouterMode = _setting(
        RouterMode.EXPECTED_TIME,
        f"routing policy: {', '.join(RouterMode)}. Without it, a router that sets a value of kv alone decides by kv",
    )
    kv_overlap_score_weight: float = _setting(
        1.0, "weight of prefill load against decode load; 0 balances load only", low=0.0, high=WEIGHT_MAX
    )
    kv_overlap_score_credit: float = _setting(
        1.0,
        "for kv: how many blocks of prefill load a cached block takes off; above 1, also those of earlier requests",
        low=0.0,
        high=WEIGHT_MAX,
    )
    decode_active_request_weight: float = _setting(
        0.0, "for kv: cost of each request in flight, in blocks", low=0.0, high=WEIGHT_MAX
    )
    recent_prefill_weight: float = _setting(
        RECENT_PREFILL_WEIGHT,
        "for kv and expected-time: how much more a token costs on the rank that computed the most lately, while no "
        "requests are in flight; 0 disables this",
        low=0.0,
        high=WEIGHT_MAX,
    )
    router_policy: str = _setting("", "for policy: name of the policy, built-in or of an installed package")
    router_temperature: float = _setting(
        0.0,
        "0 chooses the cheapest rank; greater values choose at random, cheaper ranks more often",
        low=0.0,
        high=WEIGHT_MAX,
    )
    encoder_cuda_to_cpu_ratio: float = _setting(
        CUDA_TO_CPU_RATIO,
        "for device-aware-weighted: throughput of a worker on another device, relative to one on a CPU",
        low=0.001,
        high=WEIGHT_MAX,
    )
    kv_events: bool = _setting(
        True, "learn what ranks hold from their events; off predicts it from this router's own choices"
    )
    router_ttl_s: float = _setting(
        120.0, "with kv_events off: how long a routed prompt is assumed to be cached", low=0.01, high=86_400.0
    )
    router_predicted_ttl_s: float = _setting(
        0.0,
        "with kv_events on: how long a routed prompt is assumed to be cached, until its events arrive; 0 disables this",
        low=0.0,
        high=86_400.0,
    )
    track_active_blocks: bool = _setting(True, "include blocks in use in the cost; off for workers that only prefill")
    active_decode_blocks_threshold: float = _setting(
        0.0,
        "a rank with a greater share of its blocks in use is busy and gets no requests; 0 disables this",
        low=0.0,
        high=100.0,
    )
    active_prefill_tokens_threshold: int = _setting(
        0, "a rank with more tokens still to prefill is busy and gets no requests; 0 disables this", low=0
    )
    router_session_affinity_ttl_s: float = _setting(
        0.0,
        "a session stays on its rank until it has been idle for this long; 0 disables this",
        low=0.0,
        high=31_536_000.0,
    )
    router_avoid_s: float = _setting(
        5.0,
        "how long routers avoid a worker after PUT /workers/{id}/avoid, which fronts call when an engine fails; at "
        "most a third of a model's ranks, or one worker, is avoided at a time; 0 disables this",
        low=0.0,
        high=600.0,
    )
    router_kv_p2p_port: int = _setting(
        0,
        "port at which rank 0 of each vLLM engine serves blocks to others (tier p2p of the OffloadingConnector, by "
        "default 5710); kv_sources then have kv_transfer_params; 0 leaves them out",
        low=0,
        high=65535,
    )
    router_seed: int = _setting(0, "seed of the router's random generator; 0 takes one from the system", low=0)
    tier_weights: tuple[float, ...] = _setting(
        (1.0, 0.75, 0.25, 0.0), "value of a cached block on device, host, disk and external storage"
    )
    cxl_score_weight: float = _setting(
        CXL_SCORE_WEIGHT,
        "value of a block that a rank can read from a CXL pool; 0 ignores pools",
        low=0.0,
        high=WEIGHT_MAX,
    )
    moe_score_weight: float = _setting(
        MOE_SCORE_WEIGHT,
        "additional value of a cached block that matches the request's moe_query",
        low=0.0,
        high=WEIGHT_MAX,
    )

    @property
    def reads_index(self) -> bool:
        """Whether a router reads the index's changelog: not if overlap has no weight or is only predicted."""
        return self.kv_events and self.kv_overlap_score_weight > 0.0


@dataclass(frozen=True)
class ExpectedTimeSettings:
    """What the mode expected-time weighs."""

    expected_time_uncached_weight: float = _setting(
        UNCACHED_WEIGHT,
        "for expected-time: cost of evicting other blocks for uncached tokens, relative to computing them",
        low=0.0,
        high=WEIGHT_MAX,
    )
    expected_time_decode_weight: float = _setting(
        DECODE_WEIGHT,
        "for expected-time: cost of a millisecond of decoding, relative to one until the first token; 0.003 favours "
        "the first token, 0.03 throughput",
        low=0.0,
        high=WEIGHT_MAX,
    )
    expected_time_queue_ms: float = _setting(
        EXPECTED_TIME_QUEUE_MS,
        "for expected-time: requests with queue=on wait while the best rank is busy for longer than this",
        low=0.0,
        high=86_400_000.0,
    )
    kv_bytes_per_token: int = _setting(
        KV_BYTES_PER_TOKEN,
        "for expected-time: bytes of KV cache per token, for the time to load blocks",
        low=1,
        high=1 << 40,
    )
    kv_load_gb_per_s: tuple[float, ...] = _setting(
        (HOST_GB_PER_S, DISK_GB_PER_S, EXTERNAL_GB_PER_S),
        "for expected-time: GB/s at which a rank loads blocks from host memory, disk and external storage; 0 does not "
        "credit such blocks",
    )
    pool_load_gb_per_s: float = _setting(
        POOL_GB_PER_S,
        "for expected-time: GB/s at which a rank loads blocks from a CXL pool; 0 ignores pools",
        low=0.0,
        high=WEIGHT_MAX,
    )
    pool_class_load_gb_per_s: dict[str, float] = field(
        default_factory=dict,
        metadata={
            "help": "the same for pools of some latency classes, which are LMCache's backends, for example "
            "devdax=20,fs=2,redis=1; 0 ignores such pools"
        },
    )


@dataclass(frozen=True)
class QueueSettings:
    """Requests that wait in a router."""

    router_queue_policy: QueuePolicy = _setting(
        QueuePolicy.ARRIVAL_PLUS_PREFILL, f"order of waiting requests: {', '.join(QueuePolicy)}"
    )
    router_queue_backlog_ms: float = _setting(
        QUEUE_BACKLOG_MS,
        "requests with queue=on wait while the best rank would prefill for longer than this before it starts theirs; "
        "0 makes them wait for busy thresholds only",
        low=0.0,
        high=86_400_000.0,
    )
    prefill_us_per_token: float = _setting(
        PREFILL_US_PER_TOKEN, "time in which an engine computes one prompt token, in us", low=0.001, high=1e6
    )
    router_queue_timeout_s: float = _setting(
        30.0, "longest time that a request waits; its queue_timeout_ms may shorten it", low=0.001, high=3600.0
    )
    router_queue_requests_max: int = _setting(1024, "most requests that wait in one router", low=1)
    router_queue_tenant_requests_max: int = _setting(
        1024, "most requests of one tenant (header X-Tenant) that wait", low=1
    )
    router_queue_bytes_max: int = _setting(
        64 * 1024 * 1024, "most bytes of memory that waiting requests may use, by an estimate", low=65_536
    )


@dataclass(frozen=True)
class ScalingSettings:
    """What a router tells autoscalers."""

    scale_saturation_target: float = _setting(
        0.7,
        "saturation that worker pools should have: GET /scale and the metrics say how many replicas have it",
        low=0.05,
        high=1.0,
    )


@dataclass(frozen=True)
class DecisionLogSettings:
    """What a router records of its decisions."""

    decision_log: bool = _setting(
        False, "record every decision with its terms on the topic router-decisions (docs/decisions.md)"
    )
    decision_log_share: float = _setting(
        1.0,
        "share of the requests whose decisions are recorded, chosen by request id; a recorded trace needs all of them",
        low=0.0,
        high=1.0,
    )
    decision_log_candidates: int = _setting(
        4, "how many of the cheapest ranks are recorded with their terms, in addition to the chosen one", low=0, high=64
    )
    decision_log_salt: str = _secret(
        "secret with which families of prompts are hashed in the decision log, the same for all routers of a scope; "
        "without it, the scope's name is used"
    )


@dataclass(frozen=True)
class RouterSettings(
    DecisionLogSettings,
    ScalingSettings,
    QueueSettings,
    ExpectedTimeSettings,
    RoutingSettings,
    ProcessSettings,
    ScopeSettings,
):
    """What a router needs, apart from its HTTP server."""


#: Fields of a body that may name a session.
SESSION_FIELDS = ("prompt_cache_key", "session_id", "safety_identifier", "user")


def listed(text: str) -> tuple[str, ...]:
    """Return the items of a setting that are separated by commas."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


class BodyPriority(enum.StrEnum):
    """How the field `priority` of a body is read."""

    OFF = "off"
    LOWER_FIRST = "lower-first"  # as vLLM has it
    HIGHER_FIRST = "higher-first"  # as SGLang has it


@dataclass(frozen=True)
class PromptSettings:
    """How processes that read the requests of clients, fronts and pickers, make routed prompts of them."""

    session_fields: str = _setting(
        "",
        "fields of a body that name a session if X-Session-Id does not, separated by commas; the first one with a "
        "value counts: prompt_cache_key, session_id, safety_identifier, user",
    )
    body_priority: BodyPriority = _setting(
        BodyPriority.OFF,
        "how the field priority of a body is read if there is no X-Priority: off, lower-first as vLLM has it, or "
        "higher-first as SGLang has it",
    )
    tokenizer_processes: int = _setting(1, "processes that tokenize", low=1, high=64)
    tokenizer_cache_mb: int = _setting(
        64,
        "memory for the tokens of parts that prompts share, of the event loop and of these processes, in MiB",
        low=0,
    )


@dataclass(frozen=True)
class PickerSettings:
    """How an endpoint picker answers gateways over ext_proc."""

    picker_port: int = _setting(9002, "port on which a picker answers gateways over gRPC", low=0, high=65535)
    picker_health_port: int = _setting(
        9003,
        "port of gRPC health checks, which picker_port answers as well; 0 disables it",
        low=0,
        high=65535,
    )
    picker_self_signed: bool = _setting(
        False,
        "without tls_certificate, a picker makes a certificate of its own at each start, for gateways that use TLS "
        "without checking it",
    )
    picker_ends_stream: bool = _setting(
        True,
        "a picker ends the gateway's stream with its pick, so that its death fails no running request; it then learns "
        "the end of a request from forecasts and from the metrics of engines",
    )
    picker_fallbacks: int = _setting(
        0,
        "further endpoints that a pick lists for the gateway's retries, the cheapest first; only for gateways that "
        "take a list",
        low=0,
        high=16,
    )
    picker_queue: bool = _setting(
        True, "requests of a gateway wait in the picker until a rank has room for them (queue=on)"
    )
    picker_objectives: str = _setting(
        "",
        "priorities of InferenceObjectives (header x-gateway-inference-objective), as NAME=PRIORITY separated by "
        "commas",
    )
    picker_details: bool = _setting(
        False, "picks have the terms of their decisions as dynamic metadata, in the namespace kvstreams"
    )


@dataclass(frozen=True)
class GatewaySettings:
    """The Envoy of `kvstreams gateway`."""

    gateway_port: int = _setting(8080, "port on which `kvstreams gateway` serves clients", low=1, high=65535)
    gateway_admin_port: int = _setting(
        9901, "port of its Envoy's own pages, among them /stats/prometheus, on 127.0.0.1", low=1, high=65535
    )
    gateway_threads: int = _setting(0, "threads of its Envoy; 0 is one per processor", low=0, high=1024)
    gateway_access_log: str = _setting(
        "", "file to which its Envoy writes one JSON object per request; /dev/stdout is allowed; by default none"
    )


@dataclass(frozen=True)
class FrontSettings:
    """How a front between clients and engines serves requests."""

    front_requests_max: int = _setting(4096, "most requests that a front serves at the same time", low=1)
    front_attempts_max: int = _setting(
        3, "engines that a front sends one request to, if those before fail before their first token", low=1, high=64
    )
    front_no_worker_wait_s: float = _setting(
        0.0,
        "how long a front lets a request wait for an engine while no engine of its model may get requests, for models "
        "that are started on demand; 0 answers 503 at once",
        low=0.0,
        high=3600.0,
    )
    front_silence_timeout_s: float = _setting(
        600.0,
        "a stream of an engine that is silent for this long has failed, its wait for the first token included",
        low=0.1,
        high=86_400.0,
    )
    front_answer_timeout_s: float = _setting(
        3600.0,
        "the same for answers that are not streamed, which are silent until they are complete",
        low=0.1,
        high=86_400.0,
    )
    front_client_timeout_s: float = _setting(
        60.0,
        "a client that reads nothing for this long is disconnected, and its request cancelled",
        low=0.1,
        high=86_400.0,
    )
    front_cors_origins: str = _setting(
        "",
        "origins whose pages in browsers may call a front, such as https://chat.example.org, separated by commas; * is "
        "all of them",
    )
    front_migration: bool = _setting(
        False,
        "a stream whose engine fails after its first token goes on at another engine; the front then asks engines for "
        "token ids, so that requests and events are no longer the same bytes",
    )
    front_stall_timeout_s: float = _setting(
        30.0,
        "with front_migration, an engine that is silent for this long after a stream's first token has failed; set it "
        "above the time of the longest prefill",
        low=0.05,
        high=86_400.0,
    )
    front_migrations_max: int = _setting(3, "engines that one stream may migrate to", low=0, high=64)
    front_migration_timeout_s: float = _setting(
        60.0, "time that all migrations of one stream may take together", low=0.1, high=86_400.0
    )
    front_queue: bool = _setting(
        True, "requests of a front wait in the router until a rank has capacity for them (queue=on)"
    )
    front_disaggregation: bool = _setting(
        True, "where a model has prefill workers, a front computes long prompts there, and decodes on another worker"
    )
    front_kv_transfer: KvTransfer = _setting(
        KvTransfer.PARAMS,
        f"how the KV cache gets from the prefill worker to the decode worker: {', '.join(KvTransfer)}",
    )
    front_remote_prefill_tokens_min: int = _setting(
        1024, "a prompt with fewer tokens that its decode worker does not have is computed there", low=0
    )
    front_prefill_backlog_tokens_max: int = _setting(
        16_384,
        "a prefill worker with more tokens still to compute is busy, and prompts stay on their decode workers; "
        "0 disables this",
        low=0,
    )
    front_transfer_timeout_s: float = _setting(
        2.0, "with front_kv_transfer=pool: how long a computed prompt is awaited in the pool", low=0.0, high=60.0
    )
    front_bootstrap_port: int = _setting(
        8998, "with front_kv_transfer=bootstrap: bootstrap port of the prefill workers", low=1, high=65535
    )
    front_kv_pull_tokens_min: int = _setting(
        0,
        "an engine pulls blocks of a prompt from another one that has at least this many tokens more of it, if routers "
        "have router_kv_p2p_port; 0 disables this",
        low=0,
    )


@dataclass(frozen=True)
class BridgeSettings(ScopeSettings):
    """What a bridge between engines and Kafka needs, apart from its HTTP server."""

    bridge_lease_s: float = _setting(
        6.0, "a bridge that is silent for this long loses its engines to another bridge", low=0.3, high=600.0
    )
    metrics_interval_s: float = _setting(
        1.0, "interval at which a bridge reads each engine's Prometheus metrics; 0 disables this", low=0.0, high=180.0
    )

    lmcache_models: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "this scope's names of models that engines with LMCache were started with under other names, for "
            "example /models/llama=llama"
        },
    )
    lmcache_unconfirmed_ttl_s: float = _setting(
        600.0,
        "after events of LMCache were lost, chunks that were stored before count for this long unless they are stored "
        "again; 0 for ever",
        low=0.0,
        high=30 * 86_400.0,
    )


@dataclass(frozen=True)
class LogSettings:
    """What a process writes about itself."""

    tracing: bool = _setting(
        False,
        "send an OpenTelemetry trace of every decision by OTLP; needs kvstreams[otel]; OTEL_* variables configure it",
    )
    log_level: str = _setting("info", "debug, info, warning or error")
    log_json: bool = _setting(False, "write logs as JSON, one object per line")


# One group for each process. Fields come in the reverse order of the bases.
@dataclass(frozen=True)
class BridgeServerSettings(LogSettings, BridgeSettings, AccessSettings, ScopeSettings):
    """The process of a bridge."""


@dataclass(frozen=True)
class FrontServerSettings(LogSettings, FrontSettings, QueueSettings, HttpSettings, AccessSettings, PromptSettings):
    """The process of a front, which needs no Kafka."""


@dataclass(frozen=True)
class RouterServerSettings(LogSettings, RouterSettings, HttpSettings, AccessSettings, ResetSettings, ScopeSettings):
    """The process of a router."""


@dataclass(frozen=True)
class PickerServerSettings(RouterServerSettings, PickerSettings, PromptSettings):
    """The process of a picker."""


@dataclass(frozen=True)
class GatewayServerSettings(PickerServerSettings, GatewaySettings):
    """The process of a gateway, with the settings of the pickers that it starts."""


@dataclass(frozen=True)
class WorkerServerSettings(RouterServerSettings, WorkerSettings, AgentSettings):
    """The process of a Faust worker, with its agents and its router."""


@dataclass(frozen=True)
class Settings(BridgeServerSettings, FrontServerSettings, GatewayServerSettings, WorkerServerSettings):
    """All groups in one. `kvstreams config` and `--help` print each field's help."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check_range(setting.name, getattr(self, setting.name), setting.metadata)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise SettingsError(f"log_level is {self.log_level!r}; it must be one of debug, info, warning, error")
        weights, n_tiers = self.tier_weights, len(TIER_NAMES)
        if len(weights) != n_tiers or not all(0.0 <= weight <= WEIGHT_MAX for weight in weights):
            raise SettingsError(f"tier_weights is {weights}; it must be {n_tiers} numbers from 0 to {WEIGHT_MAX:g}")
        speeds = self.kv_load_gb_per_s
        if len(speeds) != n_tiers - 1 or not all(0.0 <= speed <= WEIGHT_MAX for speed in speeds):
            raise SettingsError(
                f"kv_load_gb_per_s is {speeds}; it must be {n_tiers - 1} numbers from 0 to {WEIGHT_MAX:g}"
            )
        for name in listed(self.session_fields):
            if name not in SESSION_FIELDS:
                raise SettingsError(f"session_fields has {name!r}; the known ones are {', '.join(SESSION_FIELDS)}")
        for item in listed(self.picker_objectives):
            if not _OBJECTIVE.fullmatch(item):
                raise SettingsError(f"picker_objectives has {item!r}, which is not NAME=PRIORITY")
        for model, size in self.model_block_sizes.items():
            _check_range(f"model_block_sizes of {model}", size, {"low": 1, "high": 4096})
        for latency_class, speed in self.pool_class_load_gb_per_s.items():
            _check_range(f"pool_class_load_gb_per_s of {latency_class}", speed, {"low": 0.0, "high": WEIGHT_MAX})
        for name in self.kafka_properties:
            if name in _OWN_PROPERTIES or name.startswith(_SECURITY_PROPERTIES):
                raise SettingsError(
                    f"kafka_properties has {name!r}, which other settings determine, or on which correctness depends"
                )
        if not self.kafka.strip():
            raise SettingsError("kafka is empty; give host:port of a broker")
        if not _TOPIC_PREFIX.fullmatch(self.topic_prefix):
            raise SettingsError(
                f"topic_prefix is {self.topic_prefix!r}; it must be at most 200 characters of a-z, A-Z, 0-9, dot, "
                "hyphen and underscore"
            )

    @property
    def faust_arguments(self) -> list[str]:
        """Arguments of the Python interpreter that run a Faust worker, whose settings come from `as_environ`.

        Faust's own log level caps ours, and its name for `warning` is `warn`.
        """
        level = "warn" if self.log_level == "warning" else self.log_level
        return ["-m", "faust", "--quiet", "-A", "streams", "worker", "--loglevel", level]


#: Settings whose values are never shown.
SECRETS = frozenset(setting.name for setting in fields(Settings) if setting.metadata.get("secret"))


def shown_value(settings: Settings, name: str) -> str:
    """The value of a setting as people may see it. It takes the whole settings, since any of them can be shown."""
    value = getattr(settings, name)
    return MASKED if name in SECRETS and value else str(value)


def tables_path(settings: TableSettings) -> Path:
    """Folder of the tables' local copies, with one folder per partition."""
    return Path(settings.data_dir) / "tables"


TIER_NAMES = ("device", "host", "disk", "external")

_DURABLE = "events are on Kafka, which is always durable"

#: Options of NVIDIA Dynamo's router that have no effect here, and why. They are accepted from every source, so that a
#: launch script runs unchanged. docs/from-dynamo.md maps all other options.
UNNEEDED_OPTIONS = {
    "router_snapshot_threshold": "there are no snapshots; the compacted changelog takes their place",
    "durable_kv_events": _DURABLE,
    "router_durable_kv_events": _DURABLE,
    "event_plane": "events, bookings and the registry are on Kafka, which is the only transport",
    "enable_local_indexer": "no worker keeps an index of its own; every router reads the whole index from Kafka",
}

#: Names that NVIDIA Dynamo has for a setting. They are accepted from every source. If a source has both, the setting's
#: own name counts: a child process gets that one, and may inherit the other one with an older value.
ALIASES = {"use_kv_events": "kv_events", "router_kv_events": "kv_events"}


#: Settings of mode kv alone. A router that sets one of them, and no mode, decides by kv: its launch script is older
#: than the default of today, or was written for Dynamo.
ONLY_OF_MODE_KV = (
    "kv_overlap_score_weight",
    "kv_overlap_score_credit",
    "decode_active_request_weight",
    "router_temperature",
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The whole settings for the command line, the source of each value, and warnings for the user."""

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def load(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Resolved:
    """Resolve every setting; raises SettingsError, which names the setting and the source of its value.

    overrides: values from the command line; None means that the option was not given.
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
            setting = ALIASES.get(name, name)
            if setting not in hints:
                raise SettingsError(f"{name} in {source} is not a setting", remedy="`kvstreams config` lists them all")
            if setting != name and setting in layer:
                continue
            values[setting] = _convert(name, value, hints[setting], label)
            sources[setting] = label
    of_kv = [name for name in ONLY_OF_MODE_KV if name in values]
    if of_kv and "router_mode" not in values:
        values["router_mode"], sources["router_mode"] = RouterMode.KV, f"{of_kv[0]} is set, which only kv has"
    try:
        settings = Settings(**values)
    except SettingsError as exc:
        name = exc.message.split(" ", 1)[0]
        raise SettingsError(exc.message, remedy=f"It came from: {sources.get(name, 'default')}") from exc
    source = sources["router_reset_states"]
    if source != "default" and not settings.router_reset_states and not settings.reads_index:
        reason = "kv_events is off" if not settings.kv_events else "kv_overlap_score_weight is 0"
        warnings.append(
            f"router_reset_states is off (from: {source}), which keeps state on Kafka, but this router reads no index "
            f"since {reason}: its predictions are lost when its process ends"
        )
    return Resolved(settings, sources, tuple(warnings))


def as_environ(settings: ScopeSettings) -> dict[str, str]:
    """All fields of a group as `KVSTREAMS_*`, for a child process.

    Settings with default values are included: a child inherits our environment and folder, and must not take another
    value from there or from a file.
    """
    return {
        ENV_PREFIX + setting.name.upper(): _to_text(getattr(settings, setting.name)) for setting in fields(settings)
    }


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`KVSTREAMS_*` variables that have no effect, each with a warning; those of our tests are skipped."""
    settings = [*(ENV_PREFIX + setting.name.upper() for setting in fields(Settings)), CONFIG_ENV]
    in_use = {*settings, FAULT_ENV, *(ENV_PREFIX + name.upper() for name in (*UNNEEDED_OPTIONS, *ALIASES))}
    warnings = {}
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in in_use and not name.startswith(_TESTS_PREFIX):
            nearest = difflib.get_close_matches(name, settings, n=1, cutoff=0.0)[0]
            warnings[name] = (
                f"{name} is set but is not a setting; the nearest is {nearest}, and `kvstreams config` lists them all"
            )
    return warnings


def _read_toml(file: Path, explicit: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError as exc:
        if explicit:
            raise SettingsError(f"{file} does not exist", remedy=f"Correct {CONFIG_ENV} or --config") from exc
        return {}
    except (OSError, ValueError) as exc:  # not TOML, not UTF-8, or a number with thousands of digits
        raise SettingsError(f"{file} cannot be read: {exc}") from exc


def _from_environ(env: Mapping[str, str], hints: Mapping[str, Any]) -> dict[str, str]:
    values = {}
    for key, value in env.items():
        name = key.removeprefix(ENV_PREFIX).lower()
        # Other KVSTREAMS_ variables belong to other parts, such as the tests.
        if key.startswith(ENV_PREFIX) and (name in hints or name in UNNEEDED_OPTIONS or name in ALIASES):
            values[name] = value
    return values


_SWITCH = {"on": True, "off": False, "true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def _convert(name: str, value: Any, kind: Any, source: str) -> Any:
    parsed = value
    if isinstance(value, str):
        if kind is bool:
            parsed = _SWITCH.get(value.lower(), value)
        elif kind in (dict[str, int], dict[str, float], dict[str, str]):
            parsed = _parse_dict(value)
        elif kind == tuple[float, ...]:
            parsed = [part.strip() for part in value.split(",")]
    try:
        return msgspec.convert(parsed, kind, strict=False)
    except msgspec.ValidationError as exc:
        if ALIASES.get(name, name) in SECRETS:
            # Without the cause, which quotes the value.
            raise SettingsError(f"{name} is not {_expected_kind(kind)}", remedy=f"It came from: {source}") from None
        raise SettingsError(
            f"{name} is {value!r}, not {_expected_kind(kind)}", remedy=f"It came from: {source}"
        ) from exc


def _parse_dict(text: str) -> Any:
    """Parse `name=1,other=2`, or a JSON object for names with a comma or an equals sign.

    Invalid JSON is returned unchanged, and its conversion fails later.
    """
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
        return "whole numbers by name, for example a=1,b=2"
    if kind == dict[str, str]:
        return "texts by name, for example a=x,b=y"
    if kind == dict[str, float]:
        return "numbers by name, for example a=1.5,b=2"
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
    if not value >= low:  # written this way because every comparison with NaN is false
        raise SettingsError(f"{name} is {value}; it must be at least {low}")
    if not value <= high:
        raise SettingsError(f"{name} is {value}; it must be at most {high}")
