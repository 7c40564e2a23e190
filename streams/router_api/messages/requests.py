"""The requests of the HTTP API (docs/http.md): their fields, and their limits.

What lives here: request bodies and queries as types, their parsing and checks. What must not: how a body with tokens is
parsed (http/body_parsing), the JSON of answers (answer_json), decisions (deciding/router), and aiohttp (http/handlers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np

from streams.core.block_facts.moe_labels import MoeSelector
from streams.core.hashing import hash_seed, pack_tokens, request_hashes, salted_seed, sequence_hashes
from streams.core.ids import U32_MAX, U64_MASK, DpRank, HashArray, Incarnation, RankId, WorkerId
from streams.core.routing.eligibility import WorkerFilter
from streams.core.routing.selection import RouterMode
from streams.core.workers import (
    ALIASES_MAX,
    DP_SIZE_MAX,
    DP_START_MAX,
    LORA_NAME_CHARS_MAX,
    LORA_NAMES_MAX,
    RenderOutcome,
    RenderParity,
    RenderPart,
    RenderReason,
    RenderResult,
    Role,
    Worker,
)
from streams.cxl.events import POOL_EPOCH_GIVEN_MAX, POOL_MEMBERS_MAX, POOL_NAME_CHARS_MAX
from streams.errors import InvalidRequest, RequestTooLarge
from streams.router_api.messages.body_errors import decode_body, shortened, with_values
from streams.settings import NUMBER_MAX, WEIGHT_MAX

OCTET_STREAM = "application/octet-stream"

#: Characters of a request id, a model or a session. They are keys of records and of maps.
NAME_CHARS_MAX = 512

#: Characters of a URL or an address, and taints of a worker. A worker is one record on Kafka.
ADDRESS_CHARS_MAX = 4096
TAINTS_MAX = 256

#: Worker ids that a request may allow or exclude. Filtering by 700,000 ids stopped all other requests for 0.2 s.
WORKER_IDS_MAX = 16_384

#: Requests that one call of POST /route may have.
ROUTE_REQUESTS_MAX = 256

#: Experts that a request may name. Models have a few hundred in a layer.
EXPERTS_MAX = 4096

#: The greatest number of tokens, blocks or requests: these are Avro ints on Kafka.
COUNT_MAX = (1 << 31) - 1

#: Answers that an engine generates for one request at the same time.
SEQUENCES_MAX = 65_536

#: Further ranks that an answer may name, in case that the chosen one fails.
ALTERNATIVES_MAX = 16

#: The greatest priority; its negative is the least one.
PRIORITY_MAX = COUNT_MAX

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
#: A u64 as a JSON number or a decimal string, since numbers in JavaScript are exact only up to 2^53. The limits appear
#: only in the OpenAPI document; `u64` and `pack_tokens` check them, which takes less time for long lists than msgspec.
_U64 = (
    Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": U64_MASK})]
    | Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^[0-9]{1,20}$"})]
)
_Token = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": U32_MAX})]
_WorkerIds = Annotated[list[_U64], msgspec.Meta(max_length=WORKER_IDS_MAX)]
#: A LoRA's name, a namespace or a cache salt. Empty is the same as none.
_Salt = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Weight = Annotated[float, msgspec.Meta(ge=0.0, le=WEIGHT_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=ADDRESS_CHARS_MAX)]


class MoeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The slice of a mixture of experts that a request will use.

    layer_id: only labels of this layer
    expert_ids: only labels of one of these experts
    expert_group: only labels of this group of experts
    fallback_to_unlabeled: if false and any rank holds a matching block, only ranks that hold one are candidates
    """

    layer_id: _Count | None = None
    expert_ids: Annotated[list[_Count], msgspec.Meta(max_length=EXPERTS_MAX)] = []
    expert_group: _Count | None = None
    fallback_to_unlabeled: bool = True

    def selector(self) -> MoeSelector:
        """The query as the label index takes it."""
        return MoeSelector(self.layer_id, frozenset(self.expert_ids), self.expert_group)

    def counts(self, moe_score_weight: float) -> bool:
        """Whether labels can change the choice: the query selects labels, and matches have a weight or are required."""
        selects = self.layer_id is not None or bool(self.expert_ids) or self.expert_group is not None
        return selects and (moe_score_weight > 0.0 or not self.fallback_to_unlabeled)


class ConfigOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of the router's policy that one request overrides.

    router_mode: the routing policy. Without it, a request that overrides a setting of `kv` alone is decided by `kv`, if
        the router's mode is `expected-time`
    overlap_score_weight: mode `kv`: weight of prefill against decode load; with 0, the index is not read
    router_temperature: mode `kv`: 0 takes the lowest cost, more draws at random by a softmax of the costs
    track_active_blocks: whether the blocks that active requests use count in the cost
    tier_weights: value of a cached block on device, host, disk and external storage
    cxl_score_weight: value of a block that the rank can read from a CXL pool
    moe_score_weight: additional value of a block whose labels match `moe_query`
    moe_query: the experts that the request will use; as a query parameter, it is JSON
    """

    router_mode: RouterMode | None = None
    overlap_score_weight: _Weight | None = None
    router_temperature: _Weight | None = None
    track_active_blocks: bool | None = None
    tier_weights: tuple[_Weight, _Weight, _Weight, _Weight] | None = None
    cxl_score_weight: _Weight | None = None
    moe_score_weight: _Weight | None = None
    moe_query: MoeQuery | None = None


class RouteRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /route, POST /loads/potential and POST /matches.

    request_id: identifies the booking; if it is left out, the router generates one. Repeating the id of an active
        booking returns the same choice
    model: may be left out while only one model is served
    token_ids: the prompt's tokens; exactly one of this and `block_hashes`
    block_hashes: the local hashes of the prompt's full blocks
    lora_name: changes the hashes. Only workers that list this adapter are candidates; if no worker does, those that
        list none at all (`lora_names` is null)
    namespace: changes the hashes; empty is the same as leaving it out
    cache_salt: changes the hashes: the salt that the engine is given with the request
    session_id: with `router_session_affinity_ttl_s`: requests of one session, model and phase go to the rank of the
        previous one, while it is a candidate
    priority: requests with a greater one leave the queue first
    priority_jump: changes the place among requests of equal priority (docs/queue.md)
    queue: `on`: wait in the router until a rank has capacity
    queue_timeout_ms: the longest time to wait; `router_queue_timeout_s` is the default and the limit
    required_taints: only workers that have all of these taints
    phase: only workers of this role or of role `both`; without it, roles are ignored. A request may have one booking
        for `prefill` and one for `decode`
    router_config_override: parts of the router's policy, for this request only
    worker_id: only this worker. Mode `direct` requires it
    dp_rank: only ranks with this number
    allowed_worker_ids: only these workers; an empty list allows none
    excluded_worker_ids: none of these workers
    expected_output_tokens: tokens that the answer will probably have
    prompt_part: what the tokens are of the prompt: all of it; its `beginning`, so that the answer is at most
        `approximate`; or `none`: they are booked but not compared, because the engine does not read its cache for this
        request or computes another prompt, and the answer is `fallback`
    more_tokens: tokens of the prompt, or of further prompts, that are not in `token_ids`; they are booked too, up to
        `request_tokens_max` in all
    sequences: answers that the engine generates at the same time. If there are several, each is booked with one more
        block
    update_states: `false`: choose a rank, but book nothing and bind no session
    explain: `true`: return the terms of every candidate
    alternatives: how many further ranks the answer names, the cheapest first, each on another worker. A client that
        turns to one of them reassigns its booking
    kv_sources: `true`: name up to three ranks and pools from which the chosen rank's engine may read blocks of the
        prompt that the rank does not have in device memory
    """

    request_id: _Name | None = None
    model: _Name | None = None
    token_ids: list[_Token] | None = None
    block_hashes: list[_U64] | None = None
    lora_name: _Salt | None = None
    namespace: _Salt | None = None
    cache_salt: _Salt | None = None
    session_id: _Name | None = None
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0
    priority_jump: _Weight = 0.0
    queue: Literal["on", "off"] = "off"
    queue_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] | None = None
    required_taints: Annotated[list[_Name], msgspec.Meta(max_length=TAINTS_MAX)] | None = None
    phase: Role | None = None
    router_config_override: ConfigOverride | None = None
    worker_id: _U64 | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=U32_MAX)] | None = None
    allowed_worker_ids: _WorkerIds | None = None
    excluded_worker_ids: _WorkerIds | None = None
    expected_output_tokens: _Count | None = None
    prompt_part: Literal["whole", "beginning", "none"] = "whole"
    more_tokens: _Count = 0
    sequences: Annotated[int, msgspec.Meta(ge=1, le=SEQUENCES_MAX)] = 1
    update_states: bool = True
    explain: bool = False
    alternatives: Annotated[int, msgspec.Meta(ge=0, le=ALTERNATIVES_MAX)] = 0
    kv_sources: bool = False


class BookRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /loads/{request_id}: a choice that was made elsewhere.

    worker_id: the worker that was chosen
    dp_rank: the rank that was chosen
    token_ids: the prompt's tokens; exactly one of this and `block_hashes`
    block_hashes: the local hashes of the prompt's full blocks
    overlap_blocks: how many of the leading blocks the rank holds; their tokens are not charged. More than the request
        has means all of them
    expected_output_tokens: tokens that the answer will probably have
    lora_name, namespace, cache_salt, phase: as for `POST /route`
    """

    worker_id: _U64
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=U32_MAX)] = 0
    token_ids: list[_Token] | None = None
    block_hashes: list[_U64] | None = None
    lora_name: _Salt | None = None
    namespace: _Salt | None = None
    cache_salt: _Salt | None = None
    overlap_blocks: _Count = 0
    expected_output_tokens: _Count | None = None
    phase: Role | None = None


class OutputBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /loads/{request_id}/output.

    output_tokens: all tokens that the request has generated so far; a number below an earlier one changes nothing
    """

    output_tokens: _Count


class ReportQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query parameters of the calls that report on a booking.

    phase: the booking's phase, as its request to /route gave it. Without it, every booking of the request id is meant
    """

    phase: Literal["prefill", "decode"] | None = None


class PhaseReportQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query parameters of POST /loads/{request_id}/prefill-complete and DELETE /loads/{request_id}.

    phase: the booking's phase; without it, every booking of the request id is meant
    prompt_tokens: tokens of the prompt, as the engine's usage has them; the router that decided compares this and
        `cached_tokens` with the overlap that it promised
    cached_tokens: tokens of the prompt that the engine found in its cache
    """

    phase: Literal["prefill", "decode"] | None = None
    prompt_tokens: _Count | None = None
    cached_tokens: _Count | None = None


#: The adapters that a worker lists.
_LoraNames = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1, max_length=LORA_NAME_CHARS_MAX)]],
    msgspec.Meta(max_length=LORA_NAMES_MAX),
]


class WorkerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT /workers/{worker_id}. A field that is left out keeps its value; null clears one that may be empty.

    url: where the engine takes requests; `/route` returns it. It begins with `http://` or `https://`
    model: the model that the worker serves
    block_size: tokens per block. A model has one block size within a scope; another one is refused with
        `wrong_block_size`
    dp_size: number of data-parallel ranks; 1 by default
    dp_start: the number of the first rank, as the engine counts them; 0 by default. A bridge sets it
    role: `both` by default
    kv_total_blocks: blocks of each rank, used if its engine does not report them
    max_requests: requests that each rank computes at the same time, used if its engine does not report them
    device_class: `cuda` by default; `cpu` matters in mode `device-aware-weighted`
    taints: names that a request can require
    aliases: further names of the model, as the engine lists them. A bridge sets them
    max_model_len: tokens of the longest request that the engine takes. A bridge sets it
    lora_names: the adapters that the worker serves. Null, the default: they are not listed, and the worker gets
        requests for adapters that no worker lists. A bridge sets them
    events_endpoint: the ZMQ address of its events, shown to people
    replay_endpoint: the ZMQ address of its replay socket, shown to people
    """

    url: _Address
    model: _Name
    block_size: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=DP_SIZE_MAX)] | msgspec.UnsetType = msgspec.UNSET
    dp_start: Annotated[int, msgspec.Meta(ge=0, le=DP_START_MAX)] | msgspec.UnsetType = msgspec.UNSET
    role: Role | msgspec.UnsetType = msgspec.UNSET
    kv_total_blocks: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] | msgspec.UnsetType | None = msgspec.UNSET
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] | msgspec.UnsetType | None = msgspec.UNSET
    device_class: _Name | msgspec.UnsetType = msgspec.UNSET
    taints: Annotated[list[_Name], msgspec.Meta(max_length=TAINTS_MAX)] | msgspec.UnsetType = msgspec.UNSET
    aliases: Annotated[list[_Name], msgspec.Meta(max_length=ALIASES_MAX)] | msgspec.UnsetType = msgspec.UNSET
    max_model_len: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] | msgspec.UnsetType | None = msgspec.UNSET
    lora_names: _LoraNames | msgspec.UnsetType | None = msgspec.UNSET
    events_endpoint: _Address | msgspec.UnsetType | None = msgspec.UNSET
    replay_endpoint: _Address | msgspec.UnsetType | None = msgspec.UNSET


class RenderBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT /workers/{worker_id}/render: what a front found when it probed the engine. It has no tokens.

    url: of the engine that was probed, as `GET /workers` returned it when the probe began; likewise `model` and
        `incarnation`
    reason: why the outcome is `unknown`
    part: the prompt that differs or could not be compared
    from_token: position of the first token that differs
    probed_by: a name for people
    """

    url: _Address
    model: _Name
    outcome: RenderOutcome
    incarnation: _U64 | None = None
    reason: RenderReason | None = None
    part: RenderPart | None = None
    from_token: _Count | None = None
    probed_by: _Name = "unnamed"


class PoolBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT /pools/{pool_id}.

    members: ids of the workers that can address the pool
    latency_class: of pools whose blocks are loaded at the same speed (`pool_class_load_gb_per_s`)
    capacity_blocks: shown, and not used for decisions
    epoch: a greater one means that the contents were lost. Without it, the pool keeps its epoch, or begins the next one
        if it was lost
    """

    members: Annotated[list[_U64], msgspec.Meta(max_length=POOL_MEMBERS_MAX)]
    latency_class: Annotated[str, msgspec.Meta(min_length=1, max_length=POOL_NAME_CHARS_MAX)] = "default"
    capacity_blocks: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)] | None = None
    epoch: Annotated[int, msgspec.Meta(ge=0, le=POOL_EPOCH_GIVEN_MAX)] | None = None


class Blocks(NamedTuple):
    """A request's blocks. It is a tuple because one is made for every request.

    local: uint64[n], the local hashes of its full blocks. chain: uint64[n], their sequence hashes. n_tokens,
    request_blocks: including a partial last block.
    """

    local: HashArray
    chain: HashArray
    n_tokens: int
    request_blocks: int


#: Fields of router_config_override that change the policy.
POLICY_OVERRIDES = (
    "router_mode",
    "overlap_score_weight",
    "router_temperature",
    "track_active_blocks",
    "tier_weights",
    "cxl_score_weight",
    "moe_score_weight",
)

#: Fields of router_config_override that may be given as query parameters, under their own names.
_OVERRIDES = (*POLICY_OVERRIDES, "moe_query")

#: Fields of a request that cannot be given as query parameters: the body contains the tokens, and overrides have their
#: own names.
NO_PARAMETERS = ("token_ids", "block_hashes", "router_config_override")

#: The query parameters of requests with packed tokens, in order.
_ROUTE_PARAMETERS = dict.fromkeys(
    name for name in (*RouteRequest.__struct_fields__, *_OVERRIDES) if name not in NO_PARAMETERS
)

#: Fields that are lists, separated by commas as query parameters.
LIST_PARAMETERS = ("allowed_worker_ids", "excluded_worker_ids", "required_taints", "tier_weights")

_route_decoder = msgspec.json.Decoder(RouteRequest)
_requests_decoder = msgspec.json.Decoder(
    Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=ROUTE_REQUESTS_MAX)]
)
_moe_query_decoder = msgspec.json.Decoder(MoeQuery)
_book_decoder = msgspec.json.Decoder(BookRequest)
_output_decoder = msgspec.json.Decoder(OutputBody)
_worker_decoder = msgspec.json.Decoder(WorkerBody)
_pool_decoder = msgspec.json.Decoder(PoolBody)
_render_decoder = msgspec.json.Decoder(RenderBody)


def parse_route(body: bytes) -> RouteRequest:
    """Parse the body of POST /route, POST /loads/potential or POST /matches; raises InvalidRequest."""
    return decode_body(_route_decoder, body)


def is_list(body: bytes) -> bool:
    """Whether a JSON body is an array, so that POST /route answers each of its items."""
    return body[:1] == b"[" or body.lstrip(b" \t\r\n")[:1] == b"["


def parse_requests(body: bytes) -> list[bytes]:
    """Split a body of POST /route that is an array into its items, which are not parsed. Raises InvalidRequest."""
    return [bytes(item) for item in decode_body(_requests_decoder, body)]


_Report = TypeVar("_Report", ReportQuery, PhaseReportQuery)


def parse_report_query(query: Mapping[str, str], kind: type[_Report]) -> _Report:
    """Parse the query parameters of a report. Raises InvalidRequest."""
    values = dict(query)
    if len(values) < len(query):
        raise InvalidRequest("a query parameter is repeated")
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(
            f"query parameters: {with_values(str(exc), kind)}",
            remedy=f"The known parameters are {', '.join(kind.__struct_fields__)}",
        ) from exc


def parse_route_query(query: Mapping[str, str]) -> RouteRequest:
    """Parse a request from query parameters, for tokens sent as application/octet-stream. Raises InvalidRequest."""
    values: dict[str, Any] = dict(query)
    if len(values) < len(query):
        raise InvalidRequest("a query parameter is repeated; separate the items of a list by commas")
    if not values.keys() <= _ROUTE_PARAMETERS.keys():
        unknown = next(name for name in values if name not in _ROUTE_PARAMETERS)
        raise InvalidRequest(
            f"unknown query parameter {shortened(unknown)!r}; the known ones are {', '.join(_ROUTE_PARAMETERS)}. The "
            "body contains the tokens"
        )
    for name in LIST_PARAMETERS:
        if name in values:
            parts = values[name].split(",")
            values[name] = parts if name == "tier_weights" else [part for part in parts if part]
    if "moe_query" in values:
        values["moe_query"] = decode_body(_moe_query_decoder, values["moe_query"].encode())
    if not values.keys().isdisjoint(_OVERRIDES):
        values["router_config_override"] = {name: values.pop(name) for name in _OVERRIDES if name in values}
    try:
        return msgspec.convert(values, RouteRequest, strict=False)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(with_values(str(exc), RouteRequest)) from exc


def parse_book(body: bytes) -> BookRequest:
    """Parse the body of POST /loads/{request_id}; raises InvalidRequest."""
    return decode_body(_book_decoder, body)


def parse_output(body: bytes) -> OutputBody:
    """Parse the body of POST /loads/{request_id}/output; raises InvalidRequest."""
    return decode_body(_output_decoder, body)


def parse_worker(worker_id: WorkerId, body: bytes, registered_at_ms: int, known: Worker | None = None) -> Worker:
    """Parse the body of PUT /workers/{worker_id}; raises InvalidRequest.

    known: the worker as it is registered, None if it is not. It keeps the values of fields that the body leaves out.
    """
    parsed = decode_body(_worker_decoder, body)
    given = {name: getattr(parsed, name) for name in parsed.__struct_fields__}
    given = {name: value for name, value in given.items() if value is not msgspec.UNSET}
    for name in ("taints", "aliases", "lora_names"):
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    _check_url(parsed.url)
    if not parsed.model.isprintable():
        raise InvalidRequest(f"model is {parsed.model!r}, which contains control characters")
    for name in ("events_endpoint", "replay_endpoint"):
        _check_printable(name, given.get(name) or "")
    base = known or Worker(worker_id, parsed.url, parsed.model, parsed.block_size)
    return replace(base, **given, registered_at_ms=registered_at_ms)


def _check_url(url: str) -> None:
    """Raise InvalidRequest for an address that no HTTP client can use."""
    _check_printable("url", url)
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as exc:  # brackets without an IPv6 address, or a port that is not a number up to 65535
        raise InvalidRequest(f"url is {url!r}, which is not a URL: {exc}") from exc
    if not usable:
        raise InvalidRequest(f"url is {url!r}; it must be http://HOST:PORT or https://HOST:PORT, with an optional path")


def _check_printable(name: str, value: str) -> None:
    """Raise InvalidRequest for whitespace and control characters, which could end a header or a line of a log."""
    if any(character.isspace() or not character.isprintable() for character in value):
        raise InvalidRequest(f"{name} is {value!r}, which contains whitespace or control characters")


def parse_render(worker_id: WorkerId, body: bytes, probed_at_ms: int) -> RenderParity:
    """Parse the body of PUT /workers/{worker_id}/render; raises InvalidRequest."""
    parsed = decode_body(_render_decoder, body)
    if parsed.reason is RenderReason.NOT_PROBED:
        raise InvalidRequest("reason is not_probed, which is not the result of a probe")
    if not parsed.probed_by.isprintable():
        raise InvalidRequest(f"probed_by is {parsed.probed_by!r}, which contains control characters")
    given = parsed.incarnation
    return RenderParity(
        worker_id,
        None if given is None else Incarnation(u64(given, "incarnation")),
        parsed.url,
        parsed.model,
        RenderResult(parsed.outcome, parsed.reason, parsed.part, parsed.from_token),
        probed_at_ms,
        parsed.probed_by,
    )


def parse_pool(body: bytes) -> PoolBody:
    """Parse the body of PUT /pools/{pool_id}; raises InvalidRequest."""
    return decode_body(_pool_decoder, body)


def pool_members(body: PoolBody) -> tuple[WorkerId, ...]:
    """Return the members of a pool, each once and in order; raises InvalidRequest."""
    return tuple(sorted({worker_id(member, f"members[{index}]") for index, member in enumerate(body.members)}))


def blocks_of(
    token_ids: list[int] | bytes | None,
    block_hashes: list[int | str] | None,
    *,
    block_size: int,
    lora_name: str | None,
    namespace: str | None,
    cache_salt: str | None = None,
    tokens_max: int,
) -> Blocks:
    """Hash a request's tokens, or use its hashes.

    Raises InvalidRequest for both, for neither, for empty lists and for wrong values; RequestTooLarge for more than
    tokens_max tokens.
    """
    if (token_ids is None) == (block_hashes is None):
        raise InvalidRequest("give exactly one of token_ids and block_hashes")
    if token_ids is not None:
        n_tokens = len(token_ids) // 4 if isinstance(token_ids, bytes) else len(token_ids)
        if n_tokens > tokens_max:
            raise RequestTooLarge(f"{n_tokens} tokens; the limit of this router is {tokens_max}", limit=tokens_max)
        if n_tokens == 0:
            raise InvalidRequest("token_ids is empty")
        packed = token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids)
        seed = hash_seed(lora_name, namespace)
        local, chain = request_hashes(packed, block_size, seed, first_seed=salted_seed(seed, cache_salt))
        return Blocks(local, chain, n_tokens, -(-n_tokens // block_size))
    assert block_hashes is not None
    if not block_hashes:
        raise InvalidRequest("block_hashes is empty")
    n_tokens = len(block_hashes) * block_size
    if n_tokens > tokens_max:
        raise RequestTooLarge(
            f"{len(block_hashes)} blocks of {block_size} tokens; the limit of this router is {tokens_max} tokens"
        )
    values = [u64(value, f"block_hashes[{index}]") for index, value in enumerate(block_hashes)]
    local = np.array(values, dtype=np.uint64)
    return Blocks(local, sequence_hashes(local), n_tokens, len(block_hashes))


def u64(value: int | str, name: str) -> int:
    """Read a u64; raises InvalidRequest, which names the field."""
    if isinstance(value, str):
        if not value.isascii() or not value.isdigit():
            raise InvalidRequest(f"{name} is {value[:40]!r}, not a decimal number")
        if len(value) > 20:  # 2^64 - 1 has 20 digits, and reading a much longer number takes time
            raise InvalidRequest(f"{name} is outside 0..2^64-1")
        value = int(value)
    if not 0 <= value <= U64_MASK:
        raise InvalidRequest(f"{name} is outside 0..2^64-1")
    return value


def worker_id(value: int | str, name: str = "worker_id") -> WorkerId:
    """Read a worker id; raises InvalidRequest."""
    return WorkerId(u64(value, name))


def rank_of(body: BookRequest) -> RankId:
    """The rank that a booking names; raises InvalidRequest."""
    return RankId(worker_id(body.worker_id), DpRank(body.dp_rank))


#: What most requests require of their worker, except for the model.
UNFILTERED = WorkerFilter(model="")


def worker_filter(request: RouteRequest) -> WorkerFilter:
    """Return what a request requires of its worker, except for the model; raises InvalidRequest."""
    if (
        request.worker_id is None
        and request.dp_rank is None
        and request.allowed_worker_ids is None
        and not request.excluded_worker_ids
        and request.phase is None
        and not request.required_taints
        and not request.lora_name
    ):
        return UNFILTERED
    return WorkerFilter(
        model="",
        worker_id=None if request.worker_id is None else worker_id(request.worker_id),
        dp_rank=None if request.dp_rank is None else DpRank(request.dp_rank),
        allowed=_worker_ids(request.allowed_worker_ids, "allowed_worker_ids"),
        excluded=_worker_ids(request.excluded_worker_ids, "excluded_worker_ids") or frozenset(),
        phase=request.phase,
        required_taints=frozenset(request.required_taints or ()),
        lora_name=request.lora_name or None,
    )


def _worker_ids(values: list[int | str] | None, name: str) -> frozenset[WorkerId] | None:
    if values is None:
        return None
    return frozenset(worker_id(value, f"{name}[{index}]") for index, value in enumerate(values))
