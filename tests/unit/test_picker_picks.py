"""A picker without gRPC and Kafka: what becomes of a gateway's request, its booking and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from streams.client.plain_http import PlainHttp
from streams.core.hashing import local_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import NUMBER_MAX, Booking, BookingPhase
from streams.core.loads.observations import LEASE, LEASE_MS, Forecast
from streams.core.routing.selection import RouterMode
from streams.core.routing.sources import KvSource, SourceTier
from streams.errors import InvalidRequest, KvStreamsError, NoEligibleWorker, QueueTimeout, SettingsError, UnknownModel
from streams.kubernetes import watching
from streams.lab.kafka.ports import free_port
from streams.picker import assumed_ends
from streams.picker.assumed_ends import ON_ITS_WAY_MS, Assumed, AssumedEnds, RankReport, unseen
from streams.picker.fleet import PickerFleet
from streams.picker.grpc.health import ServingStatus
from streams.picker.lifetimes import Booked, Lifetimes
from streams.picker.messages import DESTINATION
from streams.picker.picks import (
    FAIRNESS,
    MODEL_REWRITE,
    OBJECTIVE,
    RANK_HEADER,
    Decided,
    Picks,
    details_of,
    refused_by,
    with_model,
)
from streams.picker.process import PickerDoor, PickerOptions
from streams.picker.protocol import Pick
from streams.prompts.tokenizing import Tokenizing
from streams.router_api.deciding.admission import Admission
from streams.router_api.deciding.router import Router
from streams.router_api.messages.requests import COUNT_MAX, parse_route
from streams.settings import Settings
from tests.helpers.api import TOKENS
from tests.helpers.kubernetes_api import Pools, serving, write_account
from tests.helpers.routers import router_of
from tests.helpers.views import BLOCK_SIZE, hold, rank, register

A, B = RankId(WorkerId(1), DpRank(0)), RankId(WorkerId(2), DpRank(0))
BLOCKS = local_hashes(TOKENS, BLOCK_SIZE)
POST = {":method": "POST", ":path": "/v1/completions"}


class Picker:
    """The parts of one picker, with a router whose registry is folded by hand."""

    def __init__(self, n_workers: int = 3, **knobs: Any) -> None:
        self.router: Router = router_of(n_workers=0, **knobs)
        for n in range(1, n_workers + 1):
            register(self.router.view, n, url=f"http://10.0.0.{n}:8000")
        fleet = self.router.view.fleet
        self.fleet = PickerFleet(lambda: fleet.workers.copy(), lambda: fleet.changes)
        self.avoided: list[WorkerId] = []
        self.lifetimes = Lifetimes(self.router, self.fleet, self.avoided.append)

    def asks(
        self,
        body: Mapping[str, Any] | bytes | None,
        headers: Mapping[str, str] = POST,
        subset: tuple[str, ...] | None = None,
    ) -> Decided:
        """Ask for one pick."""
        raw = orjson.dumps(body) if isinstance(body, Mapping) else body

        async def decide() -> Decided:
            router = self.router
            http = PlainHttp(keepalive_s=1.0, connect_timeout_s=1.0)
            tokenizing = Tokenizing({}, 1, 1 << 20)
            picks = Picks(
                router.settings,  # type: ignore[arg-type]  # they are the whole settings
                router,
                Admission(router),
                tokenizing,
                self.fleet,
                lambda _: None,
                http,
            )
            try:
                return await picks.decide(Pick(headers, raw, subset), lambda: False)
            finally:
                http.close()

        return asyncio.run(decide())

    def is_prefilled(self, decided: Decided) -> bool:
        """Whether it was reported that the prompt of a pick is computed."""
        assert decided.booked is not None
        with self.router.loads.locked() as loads:
            live = loads.live(decided.booked.request_id, decided.booked.phase)
            assert live is not None
            return loads.is_prefilled(live[0])

    def requests(self) -> dict[int, int]:
        """Active requests by worker."""
        return {each["worker_id"]: each["active_requests"] for each in self.router.rank_loads()["loads"]}


def prompt(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": TOKENS, "max_tokens": 8, **fields}


# -- picks -------------------------------------------------------------------------------------------------------------


def test_a_request_goes_to_the_engine_that_holds_its_prompt() -> None:
    """Header and metadata name the same endpoint, and the request is booked there."""
    picker = Picker()
    hold(picker.router.view, rank(2), BLOCKS)
    decided = picker.asks(prompt())
    assert decided.picked.headers == {DESTINATION: "10.0.0.2:8000"}
    assert b"10.0.0.2:8000" in decided.picked.metadata and decided.picked.body is None
    assert picker.requests() == {1: 0, 2: 1, 3: 0}


def test_fallbacks_are_listed_in_order() -> None:
    """The endpoint that holds the prompt is the first one."""
    picker = Picker(picker_fallbacks=2)
    hold(picker.router.view, rank(2), BLOCKS)
    decided = picker.asks(prompt())
    endpoints = decided.picked.headers[DESTINATION].split(",")
    assert endpoints[0] == "10.0.0.2:8000" and set(endpoints[1:]) == {"10.0.0.1:8000", "10.0.0.3:8000"}
    assert decided.booked is not None and list(decided.booked.ranks) == endpoints


def test_only_endpoints_of_the_subset_are_picked() -> None:
    """A subset of which nothing is registered, or that is empty, leaves none."""
    picker = Picker()
    hold(picker.router.view, rank(2), BLOCKS)
    assert picker.asks(prompt(), subset=("10.0.0.3:8000", "10.9.9.9:1")).picked.headers[DESTINATION] == "10.0.0.3:8000"
    for subset in ((), ("10.9.9.9:1",)):
        with pytest.raises(NoEligibleWorker) as refused:
            picker.asks(prompt(), subset=subset)
        assert refused_by(refused.value, "/v1/completions").status == 503


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({":method": "POST", ":path": "/v1/unknown"}, b"{}"),
        (POST, None),  # its body is not known
        ({":method": "POST", ":path": "/v1/embeddings?x=1"}, b'{"model": "m", "input": "x"}'),
    ],
)
def test_other_calls_are_booked_by_load(headers: dict[str, str], body: bytes | None) -> None:
    """What computes has a booking, of a prompt that nobody shares."""
    picker = Picker()
    assert picker.asks(body, headers).booked is not None
    assert sum(picker.requests().values()) == 1


@pytest.mark.parametrize(
    "headers", [{":method": "GET", ":path": "/v1/models"}, {":method": "POST", ":path": "/tokenize"}]
)
def test_calls_that_compute_nothing_are_not_booked(headers: dict[str, str]) -> None:
    """They get an endpoint, even where several models are served and none is named."""
    picker = Picker()
    register(picker.router.view, 9, url="http://10.0.0.9:8000", model="other")
    assert picker.asks(b"", headers).booked is None
    assert sum(picker.requests().values()) == 0


def test_a_rank_of_several_is_named_in_a_header() -> None:
    """vLLM's ranks share one address. A fallback, which would get the same header, is not listed."""
    picker = Picker(n_workers=0, picker_fallbacks=1)
    register(picker.router.view, 2, url="http://10.0.0.2:8000")
    register(picker.router.view, 1, url="http://10.0.0.1:8000", dp_size=2)
    hold(picker.router.view, rank(1, 1), BLOCKS)
    assert picker.asks(prompt()).picked.headers == {DESTINATION: "10.0.0.1:8000", RANK_HEADER: "1"}


def test_a_rewritten_model_is_routed_and_sent() -> None:
    """The engine gets the body with the other name; a LoRA adapter is a name as well."""
    picker = Picker()
    register(picker.router.view, 2, url="http://10.0.0.2:8000", lora_names=("adapter",))
    decided = picker.asks(prompt(model="public"), {**POST, MODEL_REWRITE: "adapter"})
    assert decided.picked.body is not None
    assert orjson.loads(decided.picked.body) == prompt(model="adapter")
    assert decided.picked.headers[DESTINATION] == "10.0.0.2:8000"
    with pytest.raises(UnknownModel):
        picker.asks(prompt(model="m"), {**POST, MODEL_REWRITE: "nope"})
    with pytest.raises(InvalidRequest, match="is not UTF-8"):
        picker.asks(prompt(model="m"), {**POST, MODEL_REWRITE: "nope\udcff"})


def test_the_gateways_headers_say_tenant_and_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fairness id is the tenant, and an objective has a priority by the settings; our own headers go first."""
    seen: list[tuple[int, str]] = []

    async def route(_: Admission, prepared: Any, tenant: str, is_gone: Callable[[], bool]) -> Any:
        seen.append((prepared.request.priority, tenant))
        return picker.router.try_book(prepared)

    monkeypatch.setattr(Admission, "route", route)
    picker = Picker(picker_objectives="interactive=5, batch=-3")
    named = {FAIRNESS: "team", OBJECTIVE: "batch"}
    picker.asks(prompt(), {**POST, **named})
    picker.asks(prompt(), {**POST, **named, "x-tenant": "ours", "x-priority": "7"})
    picker.asks(prompt(), {**POST, OBJECTIVE: "unknown"})
    assert seen == [(-3, "team"), (7, "ours"), (0, "")]


@pytest.mark.parametrize("wrong", ["interactive", "a=b", "=3", "a=1,b"])
def test_objectives_have_priorities(wrong: str) -> None:
    """The setting is checked when it is read."""
    with pytest.raises(SettingsError, match="picker_objectives"):
        Settings(picker_objectives=wrong)


def test_a_request_does_not_wait_while_the_router_is_stopping() -> None:
    """A gateway in full duplex could not ask another picker: the best rank gets the request, however much it has."""
    picker = Picker(n_workers=1, router_queue_timeout_s=0.001)
    picker.asks(prompt(prompt=list(range(50_000))))
    with pytest.raises(QueueTimeout):
        picker.asks(prompt())
    picker.router.stopping = True
    assert picker.asks(prompt()).booked is not None
    assert picker.requests() == {1: 2}


def test_an_engine_whose_host_has_no_address_is_not_picked() -> None:
    """Others are; with an address it is as well."""
    picker = Picker(n_workers=1)
    register(picker.router.view, 2, url="http://engine.example:8000")
    hold(picker.router.view, rank(2), BLOCKS)
    assert picker.asks(prompt()).picked.headers[DESTINATION] == "10.0.0.1:8000"
    picker.fleet._addresses._addresses["engine.example"] = "fd00::1"
    picker.fleet._addresses.changes += 1
    assert picker.asks(prompt()).picked.headers[DESTINATION] == "[fd00::1]:8000"


def test_host_names_are_resolved_and_forgotten() -> None:
    """localhost has an address; a name without one is tried again later."""
    picker = Picker(n_workers=0)
    register(picker.router.view, 1, url="http://localhost:8000")
    register(picker.router.view, 2, url="http://no-such-host.invalid:8000")

    async def resolve(until: Callable[[], bool]) -> None:
        task = asyncio.create_task(picker.fleet.resolve_forever())
        try:
            async with asyncio.timeout(20):
                while not until():
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(resolve(lambda: bool(picker.fleet.endpoints())))
    assert list(picker.fleet.endpoints()) == ["127.0.0.1:8000"]
    assert list(picker.fleet.allowed(None) or ()) == [WorkerId(1)]


def test_only_endpoints_of_the_pool_are_picked() -> None:
    """Of two pools with one model, the picker's counts; a subset limits it further, and an empty pool has none."""
    picker = Picker()
    hold(picker.router.view, rank(2), BLOCKS)
    picker.fleet.limit_to(["10.0.0.1:8000", "10.0.0.3:8000", "10.9.9.9:1"])
    assert picker.asks(prompt()).picked.headers[DESTINATION] in ("10.0.0.1:8000", "10.0.0.3:8000")
    assert (
        picker.asks(prompt(), subset=("10.0.0.2:8000", "10.0.0.3:8000")).picked.headers[DESTINATION] == "10.0.0.3:8000"
    )
    assert picker.asks(None).picked.headers[DESTINATION] in ("10.0.0.1:8000", "10.0.0.3:8000")
    picker.fleet.limit_to(())
    for subset in (None, ("10.0.0.1:8000",)):
        with pytest.raises(NoEligibleWorker):
            picker.asks(prompt(), subset=subset)


@pytest.mark.parametrize("body", [None, prompt()], ids=["no body", "a prompt"])
def test_without_an_engine_nothing_is_picked(body: dict[str, Any] | None) -> None:
    """The client gets 503, and not that its model is unknown: it may have engines soon."""
    with pytest.raises(NoEligibleWorker) as refused:
        Picker(n_workers=0).asks(body)
    assert refused_by(refused.value, "/v1/completions").status == 503


def test_a_picker_with_a_pool_is_ready_once_it_has_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it picks nothing; afterwards the endpoints are those of the pool, also while they change."""
    monkeypatch.setattr(watching, "RETRY_S_MIN", 0.05)
    api, port = Pools(), free_port()
    tls = write_account(tmp_path, "llm", api.pools.token)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
    monkeypatch.setenv("KUBERNETES_SERVICE_ACCOUNT_FOLDER", str(tmp_path))
    router = Picker().router
    door = PickerDoor(Settings(), PickerOptions(pool="engines"))

    async def until(endpoints: list[str]) -> None:
        picks = door._service.picks  # type: ignore[union-attr]
        async with asyncio.timeout(20):
            while sorted(picks.endpoints()) != endpoints:
                await asyncio.sleep(0.01)

    async def main() -> None:
        await door.open(router, Admission(router))
        try:
            await until([])
            assert door._status("readiness") is ServingStatus.NOT_SERVING
            api.put_pool("engines", {"app": "llm"}, [8000])
            api.put_pod("a", {"app": "llm"}, "10.0.0.1")
            async with serving(api, tls=tls, port=port):
                await until(["10.0.0.1:8000"])
                assert door._status("readiness") is ServingStatus.SERVING
                api.put_pod("b", {"app": "llm"}, "10.0.0.2")
                await until(["10.0.0.1:8000", "10.0.0.2:8000"])
        finally:
            await door.close(0.1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("exc", "path", "status", "kind"),
    [
        (QueueTimeout("late", retry_after_s=2.6), "/v1/chat/completions", 429, "param"),
        (NoEligibleWorker("none"), "/v1/messages", 503, "overloaded_error"),
        (InvalidRequest("bad"), "/other", 400, "param"),
    ],
)
def test_refusals_have_the_shape_of_the_call(exc: KvStreamsError, path: str, status: int, kind: str) -> None:
    """What was shed says when to try again."""
    refused = refused_by(exc, path)
    assert (refused.status, refused.details) == (status, exc.code) and kind in refused.body.decode()
    assert refused.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


def test_details_say_what_decided() -> None:
    """They are texts and numbers, for metadata."""
    picker = Picker(picker_details=True)
    decided = picker.asks(prompt())
    assert b"chosen_mode" in decided.picked.metadata and b"overlap_blocks" in decided.picked.metadata
    answer = picker.router.route(parse_route(orjson.dumps({"token_ids": TOKENS})))
    details = details_of(answer)
    assert {type(value) for value in details.values()} <= {str, float, bool} and "kv_sources" not in details
    elsewhere = details_of(answer._replace(kv_sources=(KvSource(3, SourceTier.HOST, rank(7)),)))["kv_sources"]
    assert orjson.loads(str(elsewhere)) == [{"worker_id": 7, "dp_rank": 0, "blocks": 3, "tier": "host"}]


def test_a_body_keeps_its_bytes_but_the_model() -> None:
    """Numbers that Python would write in another way stay as they are."""
    assert with_model(b'{"model": "a", "seed": 1e2, "x": 0.10}', 'b"') == b'{"model":"b\\"","seed":1e2,"x":0.10}'


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_request_that_is_seen_ends_with_its_stream() -> None:
    """Its prompt is computed at the first byte, and an error is none."""
    picker = Picker(picker_ends_stream=False)  # otherwise its booking ages by itself
    decided = picker.asks(prompt())
    assert decided.booked is not None
    picker.lifetimes.first_byte(decided.booked, 503, None)
    assert sum(each["active_prefill_tokens"] for each in picker.router.rank_loads()["loads"]) > 0
    picker.lifetimes.first_byte(decided.booked, 200, None)
    assert sum(each["active_prefill_tokens"] for each in picker.router.rank_loads()["loads"]) == 0
    picker.lifetimes.ended(decided.booked, is_seen=True)
    assert sum(picker.requests().values()) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_learnt_from_the_headers_of_generated_text(stream: bool) -> None:
    """They come before the first token or after the last one, so they do not show how long the prompt took."""
    picker = Picker(router_mode=RouterMode.EXPECTED_TIME)
    decided = picker.asks(prompt(stream=stream))
    assert decided.booked is not None
    picker.lifetimes.first_byte(decided.booked, 200, None)
    assert not picker.is_prefilled(decided)
    picker.lifetimes.ended(decided.booked, is_seen=True)
    assert sum(picker.requests().values()) == 0


def test_the_headers_of_an_embedding_show_that_its_prompt_is_computed() -> None:
    """There is nothing else to compute."""
    picker = Picker(router_mode=RouterMode.EXPECTED_TIME)
    decided = picker.asks({"model": "m", "input": TOKENS}, {":method": "POST", ":path": "/v1/embeddings"})
    assert decided.booked is not None
    picker.lifetimes.first_byte(decided.booked, 200, None)
    assert picker.is_prefilled(decided)


def test_a_request_that_another_endpoint_served_is_charged_there() -> None:
    """The booking moves to the fallback that the gateway turned to."""
    picker = Picker(picker_fallbacks=1)
    decided = picker.asks(prompt())
    assert decided.booked is not None
    first, second = decided.booked.ranks
    picker.lifetimes.first_byte(decided.booked, 200, second)
    assert picker.requests()[decided.booked.ranks[second].worker_id] == 1
    assert picker.lifetimes.n_served_elsewhere == 1
    assert picker.avoided == [decided.booked.ranks[first].worker_id]


def test_a_request_that_an_endpoint_without_a_pick_served_is_charged_there() -> None:
    """A gateway chooses by itself if the chosen endpoint does not answer; an unknown one changes no booking."""
    picker = Picker()
    hold(picker.router.view, rank(2), BLOCKS)
    decided = picker.asks(prompt())
    assert decided.booked is not None
    picker.lifetimes.first_byte(decided.booked, 200, "10.9.9.9:1")
    assert picker.requests() == {1: 0, 2: 1, 3: 0}
    picker.lifetimes.first_byte(decided.booked, 200, "10.0.0.3:8000")
    assert picker.requests() == {1: 0, 2: 0, 3: 1}


def booking_of(picker: Picker, booked: Booked) -> Booking:
    with picker.router.loads.locked() as loads:
        live = loads.live(booked.request_id, booked.phase)
    assert live is not None
    return live[1]


@pytest.mark.parametrize("ends_stream", [True, False])
@pytest.mark.parametrize("mode", ["kv", "expected-time"])
def test_a_request_that_is_not_seen_ends_by_its_forecast(
    mode: str, ends_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its prompt counts as computed, then it is over: by the record, which every router has."""
    now_ms = [1e6]
    monkeypatch.setattr("streams.picker.lifetimes.monotonic_ms", lambda: now_ms[0])
    picker = Picker(router_mode=RouterMode(mode), picker_ends_stream=ends_stream)
    decided = picker.asks(prompt())
    assert decided.booked is not None
    picker.lifetimes.picked(decided.booked)
    picker.lifetimes.ended(decided.booked, is_seen=False)
    forecast = booking_of(picker, decided.booked).forecast
    assert 0 < forecast.prefilled_within_ms < forecast.over_within_ms and forecast.prefill_us
    assert picker.lifetimes.n_open == 1
    picker.lifetimes.tick()
    assert picker.lifetimes.n_open == 1
    now_ms[0] += forecast.over_within_ms
    picker.lifetimes.tick()
    assert sum(picker.requests().values()) == picker.lifetimes.n_open == 0
    assert picker.lifetimes.n_assumed == 1


def test_what_is_expected_of_an_unseen_request_fits_its_record() -> None:
    """A prompt takes the setting's time per token, and an answer as many steps as the client allows."""
    one = Booking(A, "m", 1000, b"", 0, 63, expected_output_tokens=10)
    assert unseen(one, 20.0) == Forecast(20_000, 20, 100)
    assert unseen(one._replace(prefill_tokens=0, expected_output_tokens=None), 20.0) == Forecast(1, 1, 2401)
    most = unseen(one._replace(prefill_tokens=NUMBER_MAX, expected_output_tokens=COUNT_MAX), 1e6)
    assert max(most) <= NUMBER_MAX


def test_the_booking_of_an_open_stream_has_a_lease_that_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is renewed when half of it has passed, a limited number at once, and not after the end of the stream."""
    now_ms = [1e6]
    renewed: list[str] = []
    monkeypatch.setattr("streams.picker.lifetimes.monotonic_ms", lambda: now_ms[0])
    monkeypatch.setattr("streams.picker.lifetimes.RENEWED_TOGETHER_MAX", 2)
    picker = Picker(router_mode=RouterMode.KV, picker_ends_stream=False)
    monkeypatch.setattr(picker.router.loads, "renew", lambda request_id, _: renewed.append(request_id))
    running = [picker.asks(prompt()).booked for _ in range(4)]
    for booked in running:
        assert booked is not None and booking_of(picker, booked).forecast == LEASE
        picker.lifetimes.picked(booked)
    ids = [booked.request_id for booked in running if booked is not None]
    now_ms[0] += LEASE_MS / 2 - 1
    assert not picker.lifetimes.renew() and renewed == []
    assert running[1] is not None
    picker.lifetimes.ended(running[1], is_seen=True)
    now_ms[0] += 1
    assert picker.lifetimes.renew() and renewed == [ids[0], ids[2]]
    assert not picker.lifetimes.renew() and renewed == [ids[0], ids[2], ids[3]]
    assert not picker.lifetimes.renew()
    now_ms[0] += LEASE_MS / 2
    assert picker.lifetimes.renew() and renewed[3:] == [ids[0], ids[2]]


def test_assumed_ends_come_when_they_are_forecast_or_reported() -> None:
    """What was ended by a report is not due any more."""
    ends = AssumedEnds()
    assert ends.add(Assumed("a", None), A, 0.0, 100.0) == []
    assert ends.add(Assumed("b", None), A, 0.0, 50.0) == []
    assert ends.add(Assumed("c", None), A, 0.0, 90.0) == []
    assert ends.over(49.0, {}) == []
    assert ends.over(50.0, {A: RankReport(1, ON_ITS_WAY_MS)}) == [Assumed("b", None), Assumed("a", None)]
    assert ends.over(200.0, {}) == [Assumed("c", None)]
    assert len(ends) == 0


def test_a_report_ends_only_what_had_arrived() -> None:
    """The oldest end, as many as the engine does not report; those on their way and other ranks do not."""
    ends = AssumedEnds()
    for n in range(4):
        ends.add(Assumed(str(n), None), A, float(n), 1e9)
    ends.add(Assumed("late", None), A, 5_000.0, 1e9)
    ends.add(Assumed("other", None), B, 0.0, 1e9)
    assert ends.over(0.0, {A: RankReport(1, ON_ITS_WAY_MS + 100.0)}) == [Assumed(str(n), None) for n in range(3)]
    assert ends.over(0.0, {A: RankReport(7, 1e6)}) == []
    assert len(ends) == 3


def test_there_is_a_limit_of_assumed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it the oldest of the rank counts as over; an id that comes again replaces its former one."""
    monkeypatch.setattr(assumed_ends, "BOOKINGS_MAX", 2)
    ends = AssumedEnds()
    ends.add(Assumed("a", None), A, 0.0, 1.0)
    ends.add(Assumed("a", None), A, 0.0, 9.0)
    assert len(ends) == 1
    ends.add(Assumed("b", None), A, 0.0, 9.0)
    assert ends.add(Assumed("c", None), A, 0.0, 9.0) == [Assumed("a", None)]
    assert ends.over(5.0, {}) == []


def test_at_the_limit_the_only_booking_of_a_rank_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one ends as well."""
    monkeypatch.setattr(assumed_ends, "BOOKINGS_MAX", 1)
    ends = AssumedEnds()
    ends.add(Assumed("a", None), A, 0.0, 9.0)
    assert ends.add(Assumed("b", None), A, 0.0, 9.0) == [Assumed("a", None)]
    assert ends.over(10.0, {}) == [Assumed("b", None)] and len(ends) == 0


def test_bookings_whose_phase_is_reported_twice_stay_as_they_are() -> None:
    """A gateway may repeat what it says."""
    picker = Picker()
    decided = picker.asks(prompt())
    assert decided.booked is not None
    picker.router.report_phase(decided.booked.request_id, BookingPhase.FREE)
    picker.lifetimes.first_byte(decided.booked, 200, None)
    picker.lifetimes.ended(decided.booked, is_seen=False)
    assert picker.lifetimes.n_open == 0
