"""Every fault that kvstreams reports, one class for each kind.

What lives here: the exceptions, their HTTP status and what the operator does next. What must not: logic. A verdict
(duplicate, gap) is a value and lives with the code that gives it.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KvStreamsError(Exception):
    """Base of all; `detail` holds the ids and numbers, `remedy` what the operator does next."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, remedy: str = "", **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message


class SettingsError(KvStreamsError):
    """A knob has a value that cannot be used; the message names the knob and where the value came from."""

    code = "bad_setting"


class InvalidRequest(KvStreamsError):
    """The caller's request cannot be understood or breaks a documented rule."""

    code = "invalid_request"
    http_status = 400


class BlockSizeMismatch(InvalidRequest):
    """A block size that is not this model's, or not a whole number of at least one token."""

    code = "wrong_block_size"


class UnknownModel(KvStreamsError):
    """No registered worker serves this model."""

    code = "unknown_model"
    http_status = 404


class UnknownId(KvStreamsError):
    """No such worker, rank or booking."""

    code = "unknown_id"
    http_status = 404


class EpochConflict(KvStreamsError):
    """A CXL pool was to begin an epoch that is over already."""

    code = "epoch_conflict"
    http_status = 409


class BookingConflict(KvStreamsError):
    """The request id is booked already, on another rank."""

    code = "booking_conflict"
    http_status = 409


class RequestTooLarge(KvStreamsError):
    """More tokens or bytes than the router accepts."""

    code = "too_large"
    http_status = 413


class NoEligibleWorker(KvStreamsError):
    """Every worker is unknown, excluded, busy or filtered out."""

    code = "no_eligible_worker"
    http_status = 503


class AllWorkersBusy(NoEligibleWorker):
    """Workers that might serve the request are there, and all of them are busy or full."""

    code = "all_workers_busy"


class NotReady(KvStreamsError):
    """The process has not read its topics to their ends yet."""

    code = "not_ready"
    http_status = 503


class InvalidEvent(InvalidRequest):
    """What an engine is said to have told cannot be: hashes of a wrong type or number, an id out of range."""

    code = "invalid_event"


class UnknownParent(KvStreamsError):
    """An index was to hold blocks behind one that the rank does not hold; `detail` names `rank` and `parent`.

    Raised by an index that is fed events directly; on Kafka the agents' holdings count such stores and go on.
    """

    code = "unknown_parent"
    http_status = 409


class IndexFull(KvStreamsError):
    """The index has no room left for this event and is as it was before it."""

    code = "index_full"
    http_status = 507


class TooManyRanks(KvStreamsError):
    """More ranks, or ranks in more tiers, than an index has columns for."""

    code = "too_many_ranks"


class IndexCorrupt(KvStreamsError, AssertionError):
    """An index found one of its own invariants broken: a bug of kvstreams, and the answers since then are in doubt."""

    code = "index_corrupt"


class BadRecord(KvStreamsError):
    """A Kafka record or engine message that cannot be used; it goes to the dead letters with `reason`."""

    code = "bad_record"

    def __init__(self, reason: str, message: str, **detail: Any) -> None:
        super().__init__(message, **detail)
        self.reason = reason


class TopicMismatch(KvStreamsError):
    """A topic exists with another number of partitions or other settings than this scope needs."""

    code = "topic_mismatch"


class TableError(KvStreamsError):
    """A table partition cannot go on: fenced, unreadable, or its store belongs to something else."""

    code = "table"


class ScopeInUse(KvStreamsError):
    """A scope is to be emptied while somebody works in it."""

    code = "scope_in_use"
    http_status = 409


class OffsetLost(TableError):
    """A log has no record at the offset that a reader wants: it begins later, or ends before."""


class LocalKafkaError(KvStreamsError):
    """The Kafka for one machine could not be fetched, started or stopped."""

    code = "local_kafka"


class ProcessError(KvStreamsError):
    """A child process ended, or did not become ready in time."""

    code = "process"


#: What the HTTP API answers with, each as docs/http.md tells it. Any other error there is a fault of ours, `internal`,
#: or one of these by inheritance.
API_ERRORS: tuple[type[KvStreamsError], ...] = (
    KvStreamsError,
    InvalidRequest,
    BlockSizeMismatch,
    UnknownModel,
    UnknownId,
    EpochConflict,
    BookingConflict,
    RequestTooLarge,
    NoEligibleWorker,
    AllWorkersBusy,
    NotReady,
)


#: Codes of refusals by the HTTP server itself, by status; HTTP_ERROR is the code of all others.
HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
HTTP_ERROR = "http_error"


def api_error(exc: KvStreamsError) -> type[KvStreamsError]:
    """The error as which the HTTP API tells of one: its class, or the nearest above it that the API knows."""
    return next(kind for kind in type(exc).__mro__ if kind in API_ERRORS)
