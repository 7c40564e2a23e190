"""Every error that kvstreams raises, one class for each kind.

What lives here: the exceptions, with their codes and HTTP status. What must not: logic. A verdict such as a duplicate
or a gap is a value and lives with the code that returns it.
"""

from __future__ import annotations

from typing import Any, ClassVar

#: Why a record or batch is refused whose blocks have another size than the scope's. Writers report it once and then
#: count it, since an engine with another size causes it with every batch.
WRONG_BLOCK_SIZE = "wrong_block_size"


class KvStreamsError(Exception):
    """Base class. `detail` contains the ids and numbers, `remedy` what the operator does next."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, remedy: str = "", **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message.removesuffix('.')}. {self.remedy}" if self.remedy else self.message


class SettingsError(KvStreamsError):
    """A setting has a value that cannot be used; the message names the setting and where the value came from."""

    code = "bad_setting"


class SchemasIncompatible(KvStreamsError):
    """The schemas of this version cannot read the records of the last release."""

    code = "schemas_incompatible"


class Unauthorized(KvStreamsError):
    """The call needs a bearer token, and the request has none or one that is not known."""

    code = "unauthorized"
    http_status = 401


class Forbidden(KvStreamsError):
    """The bearer token does not have the right that the call needs; `detail.right` names it."""

    code = "forbidden"
    http_status = 403


class InvalidRequest(KvStreamsError):
    """The request is not valid: its body, a value out of range, or both or neither of tokens and hashes."""

    code = "invalid_request"
    http_status = 400


class BlockSizeMismatch(InvalidRequest):
    """A block size differs from the model's, or is not a whole number of at least one token."""

    code = "wrong_block_size"


class UnknownModel(KvStreamsError):
    """No registered worker serves this model, or this router does not (setting `models`)."""

    code = "unknown_model"
    http_status = 404


class UnknownId(KvStreamsError):
    """There is no such worker, rank, booking, pool or response."""

    code = "unknown_id"
    http_status = 404


class EpochConflict(KvStreamsError):
    """A CXL pool cannot begin an epoch that has already ended."""

    code = "epoch_conflict"
    http_status = 409


class WorkerChanged(KvStreamsError):
    """A report is about an engine that the worker no longer is: another URL, model or incarnation."""

    code = "worker_changed"
    http_status = 409


class BookingConflict(KvStreamsError):
    """The request id is already booked on another rank."""

    code = "booking_conflict"
    http_status = 409


class RequestTooLarge(KvStreamsError):
    """The request has more tokens than `request_tokens_max`, or a larger body than the call accepts."""

    code = "too_large"
    http_status = 413


class RequestTimeout(KvStreamsError):
    """The body did not arrive within `body_timeout_s`."""

    code = "request_timeout"
    http_status = 408


class UnsupportedEncoding(KvStreamsError):
    """The body's `Content-Encoding` is not `gzip` or `deflate`."""

    code = "unsupported_encoding"
    http_status = 415


class Overloaded(KvStreamsError):
    """The router has as many connections, bytes of bodies or inspections of its state as it is allowed to have."""

    code = "overloaded"
    http_status = 503


class NoEligibleWorker(KvStreamsError):
    """No rank passes the request's filters. `detail.refused_ranks` has the number that each filter refused."""

    code = "no_eligible_worker"
    http_status = 503


class AllWorkersBusy(NoEligibleWorker):
    """All ranks that pass the filters are over a busy threshold, or their engines report that they are full."""

    code = "all_workers_busy"


class QueueFull(AllWorkersBusy):
    """The queue is full. `detail.retry_after_s`, also in `Retry-After`, follows from the rate at which it drains."""

    code = "queue_full"


class QueueTimeout(AllWorkersBusy):
    """A request waited in the queue until its deadline. `detail.retry_after_s` is also in `Retry-After`."""

    code = "queue_timeout"


class NotReady(KvStreamsError):
    """The process cannot answer yet: topics are missing or being read, or too few workers are registered; or it cannot
    make a change, because Kafka did not accept it or its outcome is unknown; or the scope has another block size for
    the model than this router's settings, in which case `detail` has `model`, `block_size` and `scope_block_size`.
    """

    code = "not_ready"
    http_status = 503


class OutcomeUnknown(NotReady):
    """Kafka did not confirm a change in time. It may have taken effect, and repeating it is safe."""


class BlockSizeContradicted(NotReady):
    """This process's settings have another block size for a model than its scope; `detail` contains both."""


class RouterUnavailable(KvStreamsError):
    """No router answered a client: connections were refused, broke, or took too long."""

    code = "router_unavailable"
    http_status = 503


class EngineFailed(KvStreamsError):
    """An engine did not answer, or broke off its answer. `detail` contains `worker_id` and `output_tokens`.

    A client raises it after it has tried other engines, or if the caller already has a part of the answer.
    """

    code = "engine_failed"
    http_status = 502


class EngineRefused(KvStreamsError):
    """An engine refused a request as invalid, so that another engine would refuse it too. `detail` has `status`."""

    code = "engine_refused"
    http_status = 400


class InvalidEvent(InvalidRequest):
    """An engine event contains impossible values: hashes of a wrong type or number, or an id out of range."""

    code = "invalid_event"


class IndexFull(KvStreamsError):
    """The index is over capacity. It has not applied any part of the event."""

    code = "index_full"
    http_status = 507


class TooManyRanks(KvStreamsError):
    """There are more ranks, or ranks in more tiers, than the index has columns for."""

    code = "too_many_ranks"


class BadRecord(KvStreamsError):
    """A Kafka record or engine message cannot be used; it goes to the dead letters with `reason`."""

    code = "bad_record"

    def __init__(self, reason: str, message: str, **detail: Any) -> None:
        super().__init__(message, **detail)
        self.reason = reason


class KafkaUnreachable(KvStreamsError):
    """No broker answers at the address that the settings name."""


class KafkaRefused(KvStreamsError):
    """A broker refuses this process: its credentials, its certificate, or an operation that no ACL allows."""


class TopicMismatch(KvStreamsError):
    """A topic exists, but its number of partitions or its settings differ from what this scope needs."""

    code = "topic_mismatch"


class TableError(KvStreamsError):
    """A table partition cannot continue: it was fenced, is unreadable, or its local copy belongs to another scope."""

    code = "table"


class ScopeInUse(KvStreamsError):
    """A scope cannot be emptied while a process uses it."""

    code = "scope_in_use"
    http_status = 409


class OffsetLost(TableError):
    """A log does not contain the offset that a reader needs: it starts later, or ends earlier."""


class OutsideWindow(KvStreamsError):
    """The topics do not have everything since the moment that is to be replayed; `detail.earliest` is the earliest."""

    code = "outside_window"


class LocalKafkaError(KvStreamsError):
    """The Kafka for one machine could not be downloaded, started or stopped."""

    code = "local_kafka"


class ProcessError(KvStreamsError):
    """A child process exited, or did not become ready in time."""

    code = "process"


#: Errors that the HTTP API returns; docs/http.md documents each. Any other error is returned as its nearest base class
#: among these, which may be KvStreamsError itself (`internal`).
API_ERRORS: tuple[type[KvStreamsError], ...] = (
    KvStreamsError,
    Unauthorized,
    Forbidden,
    InvalidRequest,
    BlockSizeMismatch,
    UnknownModel,
    UnknownId,
    EpochConflict,
    WorkerChanged,
    BookingConflict,
    RequestTooLarge,
    RequestTimeout,
    UnsupportedEncoding,
    Overloaded,
    NoEligibleWorker,
    AllWorkersBusy,
    QueueFull,
    QueueTimeout,
    NotReady,
)


#: Codes of refusals by the HTTP server itself, by status; HTTP_ERROR is the code of all others.
HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
HTTP_ERROR = "http_error"


def api_error(exc: KvStreamsError) -> type[KvStreamsError]:
    """The class as which the HTTP API returns an error: its own, or the nearest base class in API_ERRORS."""
    return next(kind for kind in type(exc).__mro__ if kind in API_ERRORS)
