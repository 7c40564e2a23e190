"""Workers, cordons, avoidances, render parities and models as the registry has them.

What lives here: the records of the registry as values. What must not: Kafka, HTTP, which workers a request may go to
(routing.eligibility), and who may write a model's record (model_registry).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter

from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.errors import InvalidRequest

#: Device class of workers without an accelerator. Mode device-aware-weighted treats all other classes alike.
CPU_CLASS = "cpu"

#: Ranks that a worker may have. The largest deployments run a few hundred, so that a greater number is a mistake.
DP_SIZE_MAX = 4096

#: The greatest number of a worker's first rank: more ranks than any deployment has.
DP_START_MAX = 65_536

#: LoRA adapters that a worker may list, and the characters of a name. Engines that swap adapters serve some hundred.
#: The list is part of every renewal of the worker's lease.
LORA_NAMES_MAX = 1024
LORA_NAME_CHARS_MAX = 512


#: Further names of a model that a worker may have.
ALIASES_MAX = 64

#: The longest time for which one record makes routers avoid a worker. What fails for longer is removed by other means.
AVOID_MS_MAX = 600_000


class Role(enum.StrEnum):
    """Which phases of a request a worker serves."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.StrEnum):
    """Whether a worker gets new requests.

    A cordon is a record of its own. A router shows it here; in a worker's record, only earlier versions wrote it.
    """

    ACTIVE = "active"
    CORDONED = "cordoned"


@dataclass(frozen=True, slots=True)
class BridgeLease:
    """The bridge that feeds a worker's events, and how long its lease is valid (the rules are in engines.lease).

    lease_ms: 0 once the bridge has given the lease up. renewal: counts this bridge's writes, so that a copy of the
    lease, as a cordon writes it, is not taken for a renewal.
    """

    bridge: str
    term: int
    lease_ms: int
    renewal: int

    @property
    def is_released(self) -> bool:
        """Return whether the bridge has given the lease up."""
        return self.lease_ms == 0


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine.

    dp_start: the number of the first rank, as the engine counts them. aliases: further names under which it serves the
    model. max_model_len: tokens of the longest request that it takes, if known. kv_total_blocks: capacity of each
    rank's cache, if known. lora_names: the LoRA adapters that it serves; None if they are not listed, so that it may
    serve any. lmcache: the instance of LMCache that it uses, if that is known. lease: its bridge's, if it has a bridge.
    """

    worker_id: WorkerId
    url: str
    model: str
    block_size: int
    dp_size: int = 1
    dp_start: int = 0
    role: Role = Role.BOTH
    state: WorkerState = WorkerState.ACTIVE
    kv_total_blocks: int | None = None
    max_requests: int | None = None
    device_class: str = "cuda"
    taints: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = None
    lora_names: tuple[str, ...] | None = None
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    registered_at_ms: int = 0
    lmcache: str | None = None
    lease: BridgeLease | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidRequest(f"worker {self.worker_id}: block_size is {self.block_size}, but must be at least 1")
        if not 1 <= self.dp_size <= DP_SIZE_MAX:
            raise InvalidRequest(f"worker {self.worker_id}: dp_size is {self.dp_size}, but must be 1 to {DP_SIZE_MAX}")
        if not 0 <= self.dp_start <= DP_START_MAX:
            raise InvalidRequest(
                f"worker {self.worker_id}: dp_start is {self.dp_start}, but must be 0 to {DP_START_MAX}"
            )
        if not self.model:
            raise InvalidRequest(f"worker {self.worker_id}: model is empty")

    @property
    def names(self) -> tuple[str, ...]:
        """Every name under which the engine serves the model."""
        return (self.model, *self.aliases)

    def may_serve(self, lora_name: str | None) -> bool:
        """Whether requests for an adapter may go to this worker. None and "" stand for the model itself."""
        return not lora_name or self.lora_names is None or lora_name in self.lora_names

    def ranks(self) -> Iterator[RankId]:
        """The worker's ranks, in order."""
        return (RankId(self.worker_id, DpRank(self.dp_start + n)) for n in range(self.dp_size))


#: Every field of a worker except those that the renewal of a lease changes.
_KEPT_BY_A_RENEWAL = attrgetter(
    *(field.name for field in fields(Worker) if field.name not in ("lease", "registered_at_ms"))
)


def differs_in_lease_only(before: Worker, after: Worker) -> bool:
    """Whether two records of a worker differ in nothing but its lease and its time of registration, or not at all."""
    same: bool = _KEPT_BY_A_RENEWAL(before) == _KEPT_BY_A_RENEWAL(after)
    return same


@dataclass(frozen=True, slots=True)
class Cordon:
    """A mark that keeps new requests from a worker. It outlives registrations of the worker, until it is deleted."""

    worker_id: WorkerId
    cordoned_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Avoidance:
    """A mark that requests avoid a worker for `ttl_ms`, since one that was sent there has failed.

    avoided_at_ms: by the clock of the router that wrote it. It identifies the mark; readers count `ttl_ms` from when
    they read it.
    """

    worker_id: WorkerId
    avoided_at_ms: int
    ttl_ms: int

    def __post_init__(self) -> None:
        if not 1 <= self.ttl_ms <= AVOID_MS_MAX:
            raise InvalidRequest(
                f"worker {self.worker_id} is avoided for {self.ttl_ms} ms, but it must be 1 to {AVOID_MS_MAX}"
            )


class RenderOutcome(enum.StrEnum):
    """Whether an engine makes the same tokens of prompts as a front does."""

    EQUAL = "equal"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


class RenderReason(enum.StrEnum):
    """Why it is unknown whether an engine makes the same tokens as a front.

    NOT_PROBED: no front has probed this incarnation, URL and model. NO_TOKENIZER: the front has no files of the model's
    tokenizer. NO_TOKENIZE: the engine has no /tokenize. ENGINE_FAILED, FRONT_FAILED: one of them did not answer, and is
    asked again later. ENGINE_REFUSED, FRONT_REFUSED: only one of them makes tokens of a prompt.
    """

    NOT_PROBED = "not_probed"
    NO_TOKENIZER = "no_tokenizer"
    NO_TOKENIZE = "no_tokenize"
    ENGINE_FAILED = "engine_failed"
    FRONT_FAILED = "front_failed"
    ENGINE_REFUSED = "engine_refused"
    FRONT_REFUSED = "front_refused"


class RenderPart(enum.StrEnum):
    """The prompts of a probe, in order (prompts.parity)."""

    COMPLETION = "completion"
    CHAT = "chat"
    CHAT_WITH_SYSTEM = "chat_with_a_system_message"
    CHAT_WITH_TOOLS = "chat_with_tools"
    PARTS = "content_of_several_parts"
    PART_FIELDS = "parts_with_fields_of_a_client"
    REASONING = "reasoning_of_a_past_turn"
    REASONING_CONTENT = "reasoning_content_of_a_past_turn"
    TWO_REASONINGS = "reasoning_under_both_names"
    TOOL_CALL = "a_tool_call_without_text"
    TOOL_CALL_ARGUMENTS = "a_tool_call_whose_arguments_are_a_list"
    NO_TOOL_CALLS = "an_empty_list_of_tool_calls"
    TOOL_RESULT = "the_result_of_a_tool"
    TOOL_RESULT_PARTS = "the_result_of_a_tool_in_parts"
    EMPTY_TOOL_RESULT = "an_empty_result_of_a_tool"
    OTHER_ROLE = "a_role_that_is_not_known"
    DEVELOPER = "a_developer_message"
    LATE_DEVELOPER = "a_developer_message_after_others"
    FIELDS = "fields_that_are_not_known"
    BILLING_LINE = "a_billing_line_in_the_system_message"
    TOOL_FIELDS = "tools_with_fields_of_a_client"
    CONTINUED = "a_message_that_is_continued"
    VARIABLES = "variables_of_the_template"
    EFFORT = "a_reasoning_effort"
    DOCUMENTS = "documents"
    TOOL_CHOICE = "tools_that_may_not_be_called"

    @property
    def words(self) -> str:
        """Its name for people."""
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class RenderResult:
    """The result of one probe.

    reason: of `unknown` only. part: the prompt that differs, or that could not be compared. from_token: of `differs`
    only: the position of the first token that differs.
    """

    outcome: RenderOutcome
    reason: RenderReason | None = None
    part: RenderPart | None = None
    from_token: int | None = None

    def __post_init__(self) -> None:
        differs = self.outcome is RenderOutcome.DIFFERS
        if (self.reason is not None) != (self.outcome is RenderOutcome.UNKNOWN):
            raise InvalidRequest(f"outcome is {self.outcome.value}; reason belongs to `unknown`, and to nothing else")
        if differs and self.part is None:
            raise InvalidRequest("outcome is differs; part must name the prompt that differs")
        if self.part is not None and self.outcome is RenderOutcome.EQUAL:
            raise InvalidRequest("outcome is equal; part belongs to `differs` and `unknown`")
        if (self.from_token is not None) != differs or (self.from_token or 0) < 0:
            raise InvalidRequest("from_token is a position, which belongs to `differs`, and to nothing else")


#: The result for workers that no front has probed.
NOT_PROBED = RenderResult(RenderOutcome.UNKNOWN, RenderReason.NOT_PROBED)


@dataclass(frozen=True, slots=True)
class RenderParity:
    """What a front found when it probed an engine: a record about one incarnation, URL and model of a worker.

    incarnation: None if no events of the engine were known. probed_by: the front, for people.
    """

    worker_id: WorkerId
    incarnation: Incarnation | None
    url: str
    model: str
    result: RenderResult
    probed_at_ms: int = 0
    probed_by: str = ""

    def is_about(self, worker: Worker, incarnation: Incarnation | None) -> bool:
        """Whether the engine that was probed is the one that the worker is now."""
        return (self.url, self.model, self.incarnation) == (worker.url, worker.model, incarnation)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What all processes of a scope must agree on about a model. writer: who wrote the record, shown to people."""

    name: str
    block_size: int
    writer: str = ""
    written_at_ms: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidRequest(f"model {self.name}: block_size is {self.block_size}, but must be at least 1")
        if not self.name:
            raise InvalidRequest("a model's name is empty")
