"""The configuration of an Envoy that asks pickers, and the files with its engines and certificates (pure).

What lives here: these as values for JSON. What must not: processes and files (process), and how other gateways are
configured (docs/gateway.md).

Envoy buffers a request's body, and asks a picker while it has all of it: a picker that dies or hangs costs a decision
and no request (`failure_mode_allow`). Then it passes on the headers of the answer, and keeps the stream open until the
request ends, so that the picker sees both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streams.picker.addresses import Endpoint, is_address
from streams.picker.messages import DESTINATION, DETAILS, LB, SERVED, SUBSET_HINT

_TYPE = "@type"
_V3 = "type.googleapis.com/envoy"

#: Clusters, and the route configuration.
ENGINES, PICKERS = "engines", "pickers"

#: Time for a picker to answer a body. A request that waits longer goes on without a decision, so it is longer than a
#: request may wait in the picker's queue.
PICK_TIMEOUT_S = 35.0

#: Time to connect to a picker, and to an engine.
CONNECT_PICKER_S, CONNECT_ENGINE_S = 0.25, 2.0

#: A picker is not asked while it says that it is not ready, and after so many health checks in turn that it does not
#: answer in time. A busy machine answers late: with one check of 0.2 s, all pickers of such a machine were ejected.
HEALTH_S, HEALTH_ANSWER_S = 0.5, 1.0
UNANSWERED_MAX = 2

#: A picker that cannot be reached, or is not available for a request, is not asked for this long. Each time counts, so
#: that the second time in a row is twice as long.
EJECTED_S = 3.0

#: A picker that does not answer a PING of HTTP/2, which is sent at this interval, within this time loses its
#: connection.
KEEPALIVE_S, KEEPALIVE_ANSWER_S = 1.0, 1.0

#: As a limit of a circuit breaker: none.
CIRCUIT_BREAKER_OFF = 1 << 20

#: Times that Envoy asks another picker, and another engine, for one request.
PICKER_RETRIES, ENGINE_RETRIES = 3, 2


def address_config(endpoint: Endpoint) -> dict[str, Any]:
    """An endpoint as Envoy has it."""
    return {"socket_address": {"address": endpoint.host, "port_value": endpoint.port}}


#: What answers whether this gateway may get requests, on the port of clients.
READY_PATH = "/ready"

#: Names of the certificate, and of the authorities of clients' certificates.
SERVER_SECRET, CLIENTS_SECRET = "server", "clients"
_SECRET = f"{_V3}.extensions.transport_sockets.tls.v3.Secret"


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What differs between gateways. pickers: their hosts may be names, each with any number of addresses.

    engines_file, tls_file, clients_file: of `engines_config`, `tls_config` and `clients_config`, which Envoy reads
    again when they are replaced. With a clients_file, clients need certificates. access_log: a file. These three may be
    "". body_bytes_max: of a request. connections_max: of clients.

    buffers: whether Envoy keeps a body until its pick. Otherwise it streams the body to the picker in full duplex, as
    most gateways do, and a request whose picker dies meanwhile fails.
    """

    listens: Endpoint
    admin: Endpoint
    pickers: Sequence[Endpoint]
    engines_file: str
    body_bytes_max: int
    connections_max: int = 4096
    tls_file: str = ""
    clients_file: str = ""
    access_log: str = ""
    buffers: bool = True


def _endpoints(name: str, addresses: Iterable[Endpoint]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": address_config(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def engines_config(engines: Iterable[Endpoint]) -> dict[str, Any]:
    """The engines, as Envoy's endpoint discovery reads them from a file."""
    kind = f"{_V3}.config.endpoint.v3.ClusterLoadAssignment"
    return {"resources": [{_TYPE: kind, **_endpoints(ENGINES, sorted(set(engines)))}]}


def tls_config(certificate: str, key: str) -> dict[str, Any]:
    """A certificate and its key, as PEM texts: Envoy notices that this file was replaced, and no file that it names."""
    chain = {"certificate_chain": {"inline_string": certificate}, "private_key": {"inline_string": key}}
    return {"resources": [{_TYPE: _SECRET, "name": SERVER_SECRET, "tls_certificate": chain}]}


def clients_config(authorities: str) -> dict[str, Any]:
    """The authorities of clients' certificates, as a PEM text."""
    trusted = {"trusted_ca": {"inline_string": authorities}}
    return {"resources": [{_TYPE: _SECRET, "name": CLIENTS_SECRET, "validation_context": trusted}]}


def envoy_config(config: GatewayConfig) -> dict[str, Any]:
    """The whole configuration. Envoy reads JSON as it reads YAML."""
    return {
        "admin": {"address": address_config(config.admin)},
        "node": {"id": "kvstreams", "cluster": "kvstreams"},
        "overload_manager": {"resource_monitors": [_connections(config)]},
        "static_resources": {
            "listeners": [_listener(config)],
            "clusters": [_engines_cluster(config), _pickers_cluster(config)],
        },
    }


def _connections(config: GatewayConfig) -> dict[str, Any]:
    kind = "downstream_connections.v3.DownstreamConnectionsConfig"
    return {
        "name": "envoy.resource_monitors.global_downstream_max_connections",
        "typed_config": {
            _TYPE: f"{_V3}.extensions.resource_monitors.{kind}",
            "max_active_downstream_connections": config.connections_max,
        },
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:g}s"


def _listener(config: GatewayConfig) -> dict[str, Any]:
    filters = [
        _ready_filter(),
        _picking_filter(config),
        {
            "name": "envoy.filters.http.router",
            "typed_config": {_TYPE: f"{_V3}.extensions.filters.http.router.v3.Router"},
        },
    ]
    manager = {
        _TYPE: f"{_V3}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "codec_type": "AUTO",
        # An engine may compute for minutes before its first byte, and a client decides how long it waits.
        "stream_idle_timeout": "0s",
        "request_headers_timeout": "10s",
        "route_config": {
            "name": "engines",
            "virtual_hosts": [
                {
                    "name": "engines",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": ENGINES,
                                "timeout": "0s",
                                "retry_policy": {
                                    "retry_on": "connect-failure,refused-stream,reset-before-request",
                                    "num_retries": ENGINE_RETRIES,
                                },
                            },
                        }
                    ],
                }
            ],
        },
        "http_filters": filters,
    }
    if config.access_log:
        manager["access_log"] = [_access_log(config.access_log)]
    chain: dict[str, Any] = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    }
    if config.tls_file:
        chain["transport_socket"] = _tls_socket(config)
    return {
        "name": "gateway",
        "address": address_config(config.listens),
        "per_connection_buffer_limit_bytes": config.body_bytes_max,
        "filter_chains": [chain],
        # Another gateway on the port would otherwise share its clients.
        "enable_reuse_port": False,
    }


def _file_source(path: str) -> dict[str, Any]:
    """A file that Envoy reads again when another one replaces it."""
    watched = {"path": path, "watched_directory": {"path": path.rpartition("/")[0]}}
    return {"resource_api_version": "V3", "path_config_source": watched}


def _tls_socket(config: GatewayConfig) -> dict[str, Any]:
    common: dict[str, Any] = {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificate_sds_secret_configs": [{"name": SERVER_SECRET, "sds_config": _file_source(config.tls_file)}],
    }
    if config.clients_file:
        source = _file_source(config.clients_file)
        common["validation_context_sds_secret_config"] = {"name": CLIENTS_SECRET, "sds_config": source}
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            _TYPE: f"{_V3}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": common,
            "require_client_certificate": bool(config.clients_file),
        },
    }


#: The filter that asks pickers. What it notes of a request has this name as well.
_PICKING = "kvstreams.picking"

#: Fields of an access log. `picked` is missing in a request that passed without a decision; the gRPC statuses of the
#: picker's answers to its headers and to its body say why. `pick_us`: from the body to its answer. `details` are those
#: of `picker_details`.
_LOGGED = {
    "time": "%START_TIME%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(:PATH)%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "reason": "%RESPONSE_CODE_DETAILS%",
    "ms": "%DURATION%",
    "request_bytes": "%BYTES_RECEIVED%",
    "response_bytes": "%BYTES_SENT%",
    "picked": f"%DYNAMIC_METADATA({LB}:{DESTINATION})%",
    "served": "%UPSTREAM_HOST%",
    "headers_status": f"%FILTER_STATE({_PICKING}:FIELD:request_header_call_status)%",
    "pick_status": f"%FILTER_STATE({_PICKING}:FIELD:request_body_last_call_status)%",
    "pick_us": f"%FILTER_STATE({_PICKING}:FIELD:request_body_total_latency_us)%",
    "details": f"%DYNAMIC_METADATA({DETAILS})%",
}


def _access_log(path: str) -> dict[str, Any]:
    return {
        "name": "envoy.access_loggers.file",
        "filter": {"not_health_check_filter": {}},
        "typed_config": {
            _TYPE: f"{_V3}.extensions.access_loggers.file.v3.FileAccessLog",
            "path": path,
            "log_format": {"json_format": _LOGGED, "omit_empty_values": True},
        },
    }


def _ready_filter() -> dict[str, Any]:
    """Answers whether there are engines, and that there are none once this gateway is stopping.

    Pickers do not count: requests pass without them, and a load balancer would have no gateway left.
    """
    return {
        "name": "envoy.filters.http.health_check",
        "typed_config": {
            _TYPE: f"{_V3}.extensions.filters.http.health_check.v3.HealthCheck",
            "pass_through_mode": False,
            "cluster_min_healthy_percentages": {ENGINES: {"value": 1.0}},
            "headers": [{"name": ":path", "string_match": {"exact": READY_PATH}}],
        },
    }


def _picking_filter(config: GatewayConfig) -> dict[str, Any]:
    mode = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "BUFFERED" if config.buffers else "FULL_DUPLEX_STREAMED",
        "response_body_mode": "NONE",
        "request_trailer_mode": "SKIP" if config.buffers else "SEND",
        "response_trailer_mode": "SKIP",
    }
    # A picker's fault is not tried again: the request that causes it would reach all pickers.
    retries = "connect-failure,refused-stream,unavailable,reset,reset-before-request"
    return {
        "name": _PICKING,
        "typed_config": {
            _TYPE: f"{_V3}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {
                "envoy_grpc": {"cluster_name": PICKERS},
                # A limit of the whole stream would end requests that take longer.
                "timeout": "0s",
                "retry_policy": {
                    "num_retries": PICKER_RETRIES,
                    "retry_on": retries,
                    "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.02s"},
                    # One that has just died would otherwise be tried again, until it is known to be dead.
                    "retry_host_predicate": [
                        {
                            "name": "envoy.retry_host_predicates.previous_hosts",
                            "typed_config": {
                                _TYPE: f"{_V3}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                            },
                        }
                    ],
                    "host_selection_retry_max_attempts": PICKER_RETRIES,
                },
            },
            "processing_mode": mode,
            "failure_mode_allow": config.buffers,
            "message_timeout": _seconds(PICK_TIMEOUT_S),
            "metadata_options": {
                "forwarding_namespaces": {"untyped": [LB, SUBSET_HINT]},
                "receiving_namespaces": {"untyped": [LB, DETAILS]},
            },
        },
    }


def _no_circuit_breakers() -> dict[str, Any]:
    """Limits that are never reached: routers limit requests, and three retries at a time, the default, are too few."""
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(limits, CIRCUIT_BREAKER_OFF)]}


def _engines_cluster(config: GatewayConfig) -> dict[str, Any]:
    override = {
        _TYPE: f"{_V3}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        # The header of the same name is no source: a client could send it.
        "override_host_sources": [{"metadata": {"key": LB, "path": [{"key": DESTINATION}]}}],
        "selected_host_key": {"key": LB, "path": [{"key": SERVED}]},
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.least_request",
                        "typed_config": {
                            _TYPE: f"{_V3}.extensions.load_balancing_policies.least_request.v3.LeastRequest"
                        },
                    }
                }
            ]
        },
    }
    return {
        "name": ENGINES,
        "type": "EDS",
        "connect_timeout": _seconds(CONNECT_ENGINE_S),
        "eds_cluster_config": {"service_name": ENGINES, "eds_config": _file_source(config.engines_file)},
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": override,
                    }
                }
            ]
        },
        "circuit_breakers": _no_circuit_breakers(),
    }


def _pickers_cluster(config: GatewayConfig) -> dict[str, Any]:
    return {
        "name": PICKERS,
        "type": "STATIC" if all(is_address(picker.host) for picker in config.pickers) else "STRICT_DNS",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": _seconds(CONNECT_PICKER_S),
        "load_assignment": _endpoints(PICKERS, config.pickers),
        "typed_extension_protocol_options": {
            f"{_V3}.extensions.upstreams.http.v3.HttpProtocolOptions".removeprefix("type.googleapis.com/"): {
                _TYPE: f"{_V3}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {
                    "http2_protocol_options": {
                        # What a picker that hangs has goes on without a decision once its connection is closed.
                        "connection_keepalive": {
                            "interval": _seconds(KEEPALIVE_S),
                            "timeout": _seconds(KEEPALIVE_ANSWER_S),
                        }
                    }
                },
            }
        },
        "health_checks": [
            {
                "timeout": _seconds(HEALTH_ANSWER_S),
                "interval": _seconds(HEALTH_S),
                "no_traffic_interval": _seconds(HEALTH_S),
                "unhealthy_threshold": UNANSWERED_MAX,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        "outlier_detection": {
            # A fault of one request is none of the picker's.
            "enforcing_consecutive_5xx": 0,
            "consecutive_gateway_failure": 1,
            "enforcing_consecutive_gateway_failure": 100,
            "consecutive_local_origin_failure": 1,
            "split_external_local_origin_errors": True,
            "interval": _seconds(HEALTH_S),
            "base_ejection_time": _seconds(EJECTED_S),
            "max_ejection_percent": 100,
        },
        # Where no picker is healthy, none is asked.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "circuit_breakers": _no_circuit_breakers(),
    }
