"""The metrics of a picker, under the names of the Gateway API Inference Extension and under ours.

What lives here: their declarations. What must not: counting. The router in the same process has metrics of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streams.picker.grpc.limits import Reason
from streams.picker.grpc.server import GrpcServer
from streams.picker.grpc.words import Status
from streams.picker.lifetimes import Lifetimes
from streams.picker.picks import Picks
from streams.picker.serving import PICKED, ExtProc
from streams.process.metrics import Label, Metric, counter, gauge, histogram
from streams.prompts.tokenizing import SOURCES, Tokenizing
from streams.router_api.deciding.router import Router

#: Codes of errors that a client may get.
OUTCOMES_MAX = 64

#: How calls end without a status: the gateway reset them or its connection broke; and no service got them.
_RESET, _REFUSED = "reset", "refused"


@dataclass(frozen=True, slots=True)
class PickerParts:
    """What the metrics are read from."""

    router: Router
    service: ExtProc
    picks: Picks
    lifetimes: Lifetimes
    tokenizing: Tokenizing
    servers: Sequence[GrpcServer]


def _calls(parts: PickerParts) -> Mapping[str, float]:
    """Calls that have ended, by their status, or by how they ended without one."""
    ended: Counter[str] = Counter({Status.OK.name.lower(): 0})
    for server in parts.servers:
        ended.update({status.name.lower(): n for status, n in server.tally.finished.items()})
        ended.update({_RESET: server.tally.reset_calls, _REFUSED: server.tally.refused_calls})
    return ended


def _ended_connections(parts: PickerParts) -> Mapping[str, float]:
    """Connections that a limit ended or refused, by the reason."""
    return {reason: sum(server.tally.connections_ended[reason] for server in parts.servers) for reason in Reason}


def _utilization(parts: PickerParts) -> float:
    """The mean use of the caches of all engines that report it."""
    metrics = parts.router.view.fleet.engines.fleet().metrics.values()
    return sum(found.gpu_cache_usage_perc for found in metrics) / max(1, len(metrics))


def _waiting(parts: PickerParts) -> float:
    """The mean number of requests that wait in an engine."""
    metrics = parts.router.view.fleet.engines.fleet().metrics.values()
    return sum(found.num_requests_waiting for found in metrics) / max(1, len(metrics))


PICKER_METRICS: tuple[Metric[PickerParts], ...] = (
    counter(
        "kvstreams_picker_requests_total",
        "Requests of gateways by what became of them: `picked`, or the code of the error that their client got "
        "(docs/errors.md).",
        lambda parts: dict(parts.picks.outcomes) or {PICKED: 0},
        Label("outcome", values_max=OUTCOMES_MAX),
    ),
    counter(
        "kvstreams_picker_calls_total",
        "gRPC calls of gateways that have ended, health checks included, by their status; `reset` if the gateway ended "
        "them, `refused` if they were too many or no gRPC. `unavailable` are those that came while the picker was not "
        "ready.",
        _calls,
        Label("status", (*(status.name.lower() for status in Status), _RESET, _REFUSED)),
    ),
    gauge(
        "kvstreams_picker_connections",
        "gRPC connections of gateways.",
        lambda parts: sum(server.held().connections for server in parts.servers),
    ),
    counter(
        "kvstreams_picker_connections_ended_total",
        "gRPC connections that a limit ended or refused, by the reason.",
        _ended_connections,
        Label("reason", tuple(Reason)),
    ),
    gauge(
        "kvstreams_picker_buffered_bytes",
        "Bytes of incomplete messages, and of messages that gateways have not read yet.",
        lambda parts: sum(server.held().buffered_bytes for server in parts.servers),
    ),
    gauge(
        "kvstreams_picker_streams",
        "Streams of gateways that are open.",
        lambda parts: len(parts.service.streams),
    ),
    counter(
        "kvstreams_picker_broken_streams_total",
        "Streams that ended because a gateway sent what ext_proc does not allow.",
        lambda parts: parts.service.counts.broken_streams,
    ),
    counter(
        "kvstreams_picker_served_elsewhere_total",
        "Requests that another endpoint served than the first one of their pick, since the gateway tried again.",
        lambda parts: parts.lifetimes.n_served_elsewhere,
    ),
    counter(
        "kvstreams_picker_assumed_ends_total",
        "Bookings whose ends were assumed, since the gateway's stream had ended with the pick.",
        lambda parts: parts.lifetimes.n_assumed,
    ),
    gauge(
        "kvstreams_picker_unseen_requests",
        "Bookings whose ends will be assumed.",
        lambda parts: parts.lifetimes.n_open,
    ),
    counter(
        "kvstreams_picker_prompts_total",
        "Prompts by where their tokens came from: the client (`ids`), the model's files, an engine, or nowhere "
        "(`none`), so that the load decided.",
        lambda parts: {source: parts.tokenizing.sources[source] for source in SOURCES},
        Label("source", SOURCES),
    ),
    histogram(
        "inference_extension_scheduler_e2e_duration_seconds",
        "Time from the last byte of a request to its pick, its time in the queue included.",
        read=lambda parts: parts.service.counts.pick_seconds,
    ),
    gauge(
        "inference_pool_ready_pods",
        "Endpoints that the picker knows.",
        lambda parts: len(parts.picks.endpoints()),
    ),
    gauge(
        "inference_pool_average_kv_cache_utilization",
        "The mean use of the caches of all engines, 0 to 1.",
        _utilization,
    ),
    gauge(
        "inference_pool_average_queue_size",
        "The mean number of requests that wait in an engine.",
        _waiting,
    ),
)
