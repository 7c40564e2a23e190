"""From the headers and the body of a request to the endpoint that serves it.

What lives here: the order of the steps, which are those of the front and of POST /route, and what a gateway's headers
mean for them. What must not: ext_proc (protocol, messages), and every step itself: reading requests and making tokens
(streams.prompts), preparing, waiting and booking (streams.router_api.deciding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson
from multidict import CIMultiDict

from streams.client import engine
from streams.client.plain_http import PlainHttp
from streams.core.ids import RankId, WorkerId
from streams.errors import AllWorkersBusy, InvalidRequest, KvStreamsError, NoEligibleWorker, NotReady, Overloaded
from streams.picker.fleet import PickerFleet
from streams.picker.lifetimes import Booked, expecting
from streams.picker.messages import DESTINATION, Details, metadata
from streams.picker.protocol import Pick, Picked, Refused
from streams.prompts.calls import CALLS, Kind, call_of
from streams.prompts.engine_keys import KeyOf
from streams.prompts.error_pages import error_page
from streams.prompts.request_fields import estimated_tokens, read_fields
from streams.prompts.requests import ClientRequest, read_request
from streams.prompts.route_fields import load_options, route_options, utf_8
from streams.prompts.tokenizing import UNKNOWN_TOKENS, Tokenizing
from streams.router_api.deciding.admission import Admission, may_wait
from streams.router_api.deciding.prepared_request import PreparedRequest
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer import RouteAnswer
from streams.router_api.messages.answer_json import source_json
from streams.router_api.messages.requests import RouteRequest
from streams.security.tokens import ANONYMOUS
from streams.settings import PickerServerSettings, listed

#: Headers of the Gateway API Inference Extension.
FAIRNESS = "x-gateway-inference-fairness-id"
OBJECTIVE = "x-gateway-inference-objective"
MODEL_REWRITE = "x-gateway-model-name-rewrite"

#: Selects the data-parallel rank in vLLM, where several share one address. Envoy has headers in lower case.
RANK_HEADER = engine.RANK_HEADER.lower()

PATH, METHOD = ":path", ":method"

#: The status with which a request is shed.
SHED = 429


@dataclass(frozen=True, slots=True)
class Decided:
    """A pick. booked: None for calls that book nothing."""

    picked: Picked
    booked: Booked | None


class Picks:
    """The picks of one picker. Used on one loop. outcomes: requests by `picked` or the code of their error."""

    def __init__(
        self,
        settings: PickerServerSettings,
        router: Router,
        admission: Admission,
        tokenizing: Tokenizing,
        fleet: PickerFleet,
        key_of: KeyOf,
        http: PlainHttp,
    ) -> None:
        """http: for engines that make tokens. key_of: their API keys."""
        self._settings = settings
        self._router = router
        self._admission = admission
        self._tokenizing = tokenizing
        self._fleet = fleet
        self._key_of = key_of
        self._http = http
        self._objectives = objectives(settings.picker_objectives)
        self._expect = expecting(settings)
        self.outcomes: Counter[str] = Counter()

    def endpoints(self) -> Collection[str]:
        """Return every endpoint that may be picked."""
        return self._fleet.endpoints()

    async def decide(self, pick: Pick, is_gone: Callable[[], bool]) -> Decided:
        """Pick an endpoint. is_gone: whether nobody waits for it any more. Raises KvStreamsError."""
        self._router.readiness.check()
        headers = CIMultiDict(pick.headers)
        allowed = self._fleet.allowed(pick.subset)
        if not (self._fleet.endpoints() if allowed is None else allowed):
            raise NoEligibleWorker("no engine is registered at an endpoint that may be picked")
        kind = call_of(headers.get(PATH, ""))
        rewritten = utf_8(MODEL_REWRITE, headers.get(MODEL_REWRITE)) or None
        if kind is None or not pick.body:
            return await self._by_load(headers, kind, rewritten, allowed, is_gone)
        request = read_request(kind, pick.body)
        body, replaced = pick.body, None
        if rewritten is not None and rewritten != request.model:
            body = replaced = with_model(body, rewritten)
            request = replace(request, model=rewritten)
        model, adapter = self._fleet.resolve(request.model)
        model = self._router.view.fleet.model_of(model)
        prompt = await self._tokenizing.prompt(
            request, body, model, self._fleet.engine(model), self._http, self._key_of(model)
        )
        options = {**self._options(request, headers), **load_options(request, body, prompt), "model": model}
        if adapter is not None:
            options["lora_name"] = adapter
        call = CALLS[kind]
        if not call.generates:
            options.pop("expected_output_tokens", None)
        elif self._fleet.has_roles(model):
            options["phase"] = "decode"
        if not call.computes:
            options["update_states"] = False
        elif self._settings.picker_queue:
            options["queue"] = "on"
        return await self._route(options, prompt.tokens, allowed, is_gone, replaced, shows_prefill=not call.generates)

    async def _by_load(
        self,
        headers: Mapping[str, str],
        kind: Kind | None,
        model: str | None,
        allowed: frozenset[WorkerId] | None,
        is_gone: Callable[[], bool],
    ) -> Decided:
        """Pick for a call without a prompt that is known: the load decides. What only reads is not booked."""
        request = ClientRequest(kind or Kind.TOKENIZE, model, False, None, None, b"")
        options = self._options(request, headers)
        try:
            model, adapter = self._fleet.resolve(model)
            options["model"] = self._router.view.fleet.model_of(model)
            if adapter is not None:
                options["lora_name"] = adapter
        except KvStreamsError:
            if model is not None:
                raise
            options["model"] = self._fleet.any_model()
        is_counted = headers.get(METHOD, "").upper() == "POST" and (kind is None or CALLS[kind].computes)
        length = headers.get("content-length", "")
        n_tokens = estimated_tokens(b"") if not length.isdecimal() else max(1, int(length[:12]) // 4)
        options |= {"prompt_part": "none", "more_tokens": n_tokens - 1, "update_states": is_counted}
        return await self._route(options, UNKNOWN_TOKENS, allowed, is_gone, None)

    def _options(self, request: ClientRequest, headers: Mapping[str, str]) -> dict[str, Any]:
        options = route_options(request, headers, ANONYMOUS, self._settings)
        fairness = headers.get(FAIRNESS)
        if fairness:
            options.setdefault("tenant", fairness)
        priority = self._objectives.get(headers.get(OBJECTIVE, ""))
        if priority:
            options.setdefault("priority", priority)
        return options

    async def _route(
        self,
        options: dict[str, Any],
        tokens: bytes,
        allowed: frozenset[WorkerId] | None,
        is_gone: Callable[[], bool],
        body: bytes | None,
        *,
        shows_prefill: bool = False,
    ) -> Decided:
        settings, router = self._settings, self._router
        tenant = options.pop("tenant", "")
        for name in ("traceparent", "tracestate"):
            options.pop(name, None)
        options |= {"alternatives": settings.picker_fallbacks, "kv_sources": settings.picker_details}
        if allowed is not None:
            options["allowed_worker_ids"] = list(allowed)
        try:
            request = msgspec.convert(options, RouteRequest)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(f"the request cannot be routed: {exc}") from exc
        prepared = router.prepare(request, tokens)._replace(expect=self._expect)
        if may_wait(prepared):
            answer = await self._wait(prepared, tenant, is_gone)
        else:
            answer = router.try_book(prepared)
        return self._decided(prepared, answer, body, shows_prefill=shows_prefill)

    async def _wait(self, prepared: PreparedRequest, tenant: str, is_gone: Callable[[], bool]) -> RouteAnswer:
        """Wait for a rank, but not while the router is stopping: a gateway in full duplex asks no other picker."""
        try:
            return await self._admission.route(prepared, tenant, is_gone)
        except NotReady:
            if not self._router.stopping:
                raise
            return self._router.try_book(prepared)

    def _decided(
        self, prepared: PreparedRequest, answer: RouteAnswer, body: bytes | None, *, shows_prefill: bool
    ) -> Decided:
        ranks: dict[str, RankId] = {}
        has_ranks = answer.dp_size is not None and answer.dp_size > 1
        # The header with the rank would reach a fallback as well, which has other ranks.
        for rank in (answer.rank, *(() if has_ranks else answer.alternatives)):
            endpoint = self._fleet.endpoint(rank.worker_id)
            if endpoint is not None:
                ranks.setdefault(endpoint, rank)
        is_booked = prepared.request.update_states
        if not ranks or ranks.get(next(iter(ranks))) != answer.rank:
            if is_booked:
                self._router.end_unreported(answer.request_id, prepared.booked_phase)
            raise NoEligibleWorker(f"worker {answer.rank.worker_id} has no address")
        destination = ",".join(ranks)
        added = {DESTINATION: destination}
        if has_ranks:
            added[RANK_HEADER] = str(answer.rank.dp_rank)
        details = details_of(answer) if self._settings.picker_details else None
        booked = Booked(answer.request_id, prepared.booked_phase, ranks, shows_prefill) if is_booked else None
        return Decided(Picked(added, metadata(destination, details), body), booked)


def details_of(answer: RouteAnswer) -> Details:
    """What a picker says about a decision, as metadata: for the access log of a gateway, or its other filters."""
    details: dict[str, str | float | bool] = {
        "request_id": answer.request_id,
        "worker_id": str(answer.rank.worker_id),  # a number of JSON has 53 bits
        "dp_rank": float(answer.rank.dp_rank),
        "overlap_blocks": float(answer.overlap_blocks),
        "request_blocks": float(answer.request_blocks),
        "mode": answer.trust.mode.value,
        "chosen_mode": answer.chosen_trust.mode.value,
        "router_mode": answer.router_mode.value,
    }
    if answer.cost is not None:
        details["cost"] = answer.cost
    if answer.queued_ms is not None:
        details["queued_ms"] = answer.queued_ms
    if answer.chosen_trust.reason is not None:
        details["chosen_degraded_because"] = answer.chosen_trust.reason.value
    if answer.kv_sources:
        details["kv_sources"] = orjson.dumps([source_json(source) for source in answer.kv_sources]).decode()
    return details


def with_model(body: bytes, model: str) -> bytes:
    """Return a body with another model. The other fields keep their bytes. The body is a JSON object."""
    return msgspec.json.encode({**read_fields(body), "model": msgspec.Raw(orjson.dumps(model))})


def refused_by(exc: KvStreamsError, path: str) -> Refused:
    """What a client gets for an error: 429 where the engines are full, and the error's own status otherwise.

    It has the shape of the call with this path.
    """
    kind = call_of(path)
    page = error_page if kind is None else CALLS[kind].error_page
    status = SHED if isinstance(exc, AllWorkersBusy | Overloaded) else exc.http_status
    headers = {"content-type": "application/json"}
    retry_after_s = exc.detail.get("retry_after_s")
    if retry_after_s is not None or status in (SHED, 503):
        headers["retry-after"] = str(max(1, round(float(retry_after_s or 1))))
    return Refused(status, headers, orjson.dumps(page(status, str(exc), exc.code)), exc.code)


def objectives(text: str) -> dict[str, int]:
    """Read `name=priority` separated by commas; the setting was checked before."""
    pairs = (item.partition("=") for item in listed(text))
    return {name.strip(): int(priority) for name, _, priority in pairs}
