"""The names, adapters and lengths of a model are those that its engines list, as they change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from streams.client.base import Attempt, CallRefused
from streams.client.http import KvRouterClient
from streams.core.ids import WorkerId
from streams.core.routing.eligibility import FilterReason, WorkerFilter
from streams.core.workers import BridgeLease, Worker, WorkerState
from streams.engines import process_start
from streams.engines.address import EngineAddress
from streams.engines.model_list import ListedFacts, facts_of, model_entries
from streams.errors import AllWorkersBusy, KvStreamsError, NoEligibleWorker, NotReady, UnknownModel
from streams.frontend.fleet import Fleet
from streams.kafka.records import decode_worker, encode_worker
from streams.settings import Settings
from tests.helpers import bridged_engine
from tests.helpers.bridged_engine import RANK, EngineUnderTest
from tests.helpers.engine_double import EngineDouble
from tests.helpers.fed_engine import bridging, fed_with_a_batch, registered
from tests.helpers.views import Clock, register, view_of

#: Time in which a registration that must not come would come.
SETTLED_S = 1.0


@pytest.fixture
def double() -> Iterator[EngineDouble]:
    with EngineDouble() as engine:
        yield engine


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read lists more often than usual."""
    monkeypatch.setattr(process_start, "LIST_CHECK_S", 0.2)


def entry(name: str, parent: str | None = None, root: str | None = "/w", **more: Any) -> dict[str, Any]:
    return {"id": name, "parent": parent, "root": root, **more}


def body(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"data": entries}).encode()


def lists(engine: EngineDouble, *entries: dict[str, Any]) -> None:
    engine.models_body = body(*entries).decode()


def address_of(engine: EngineDouble, **changes: Any) -> EngineAddress:
    return replace(bridged_engine.address_of(engine), **{"model": None, **changes})


def worker_of(engine: EngineUnderTest) -> Worker | None:
    values = engine.producer.values("workers")
    return decode_worker(values[-1]) if values else None


async def registered_with(engine: EngineUnderTest, **wanted: Any) -> None:
    def is_registered() -> bool:
        worker = worker_of(engine)
        return worker is not None and {name: getattr(worker, name) for name in wanted} == wanted

    await engine.until(is_registered, f"{wanted} to be registered")


# -- lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "model", "aliases", "adapters"),
    [
        ((entry("a"), entry("b")), "a", ("b",), ()),
        ((entry("b"), entry("a")), "a", ("b",), ()),
        ((entry("a"), entry("ad", "a", "/lora"), entry("b"), entry("ad2", "b", "/w")), "a", ("b",), ("ad", "ad2")),
        ((entry("a"), entry("other", root="/other")), "a", (), ()),
        ((entry("a", root=None), entry("b", root=None)), "a", (), ()),
        ((entry("a", root="a"), entry("ad", "a")), "a", (), ("ad",)),
        ((entry("a"), entry("of another", "other")), "a", (), ()),
        ((entry("other", root="/o"), entry("a"), entry("b")), "b", ("a",), ()),
        ((entry("a"), {"id": 7}, "b", entry("a"), entry("x" * 600)), "a", (), ()),
    ],
)
def test_names_have_one_root_and_no_parent(
    listed: tuple[Any, ...], model: str, aliases: tuple[str, ...], adapters: tuple[str, ...]
) -> None:
    facts = facts_of(model_entries(body(*listed)), model)
    assert (facts.aliases, facts.adapters) == (aliases, adapters)


@pytest.mark.parametrize("length", [True, 0, -1, 1.5, "8192", 1 << 40])
def test_a_length_that_no_model_has_is_none(length: object) -> None:
    entries = model_entries(body(entry("a", max_model_len=length)))
    assert facts_of(entries, "a") == ListedFacts((), (), None)


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"data": []}', b'{"data": ["m"]}', b'{"data": [{"id": "a\\n"}]}'])
def test_an_answer_without_a_usable_first_name_is_refused(answer: bytes) -> None:
    with pytest.raises(KvStreamsError):
        model_entries(answer)


# -- bridges -----------------------------------------------------------------------------------------------------------


def test_all_names_are_registered_and_their_order_does_not_matter(double: EngineDouble) -> None:
    lists(double, entry("a"), entry("b"))

    async def act(engine: EngineUnderTest) -> None:
        old = await fed_with_a_batch(engine, double, "a")
        await registered_with(engine, model="a", aliases=("b",))
        lists(double, entry("b"), entry("a"))
        await asyncio.to_thread(double.restart)
        await engine.until(lambda: engine.bridged._feeds[RANK]._writer.incarnation > old, "the new process")
        await asyncio.sleep(SETTLED_S)
        assert registered(engine) == ["a"] and engine.claimed == ["a"]

    async def restarted(engine: EngineUnderTest) -> None:
        await registered_with(engine, model="a", aliases=("b",))
        assert registered(engine) == ["a"]

    bridging(address_of(double), act)
    known = Worker(RANK.worker_id, double.url, "a", 16, aliases=("b",), lease=BridgeLease("other", 1, 0, 1))
    bridging(address_of(double), _knowing(known, restarted))


def _knowing(worker: Worker, act: Any) -> Any:
    """Let the registry have a worker before the bridge reads it to its end."""

    async def with_record(engine: EngineUnderTest) -> None:
        engine.bridged.lease_handle.on_record(decode_worker(encode_worker(worker)))
        await act(engine)

    return with_record


def test_adapters_and_lengths_are_followed_as_the_list_changes(double: EngineDouble) -> None:
    lists(double, entry("a", max_model_len=8192))

    async def act(engine: EngineUnderTest) -> None:
        await registered_with(engine, lora_names=None, max_model_len=8192)
        lists(double, entry("a", max_model_len=4096), entry("ad1", "a", "/lora"))
        await registered_with(engine, lora_names=("ad1",), max_model_len=4096)
        lists(double, entry("a", max_model_len=4096), entry("ad2", "a", "/lora"), entry("b"))
        await registered_with(engine, lora_names=("ad2",), aliases=("b",))
        lists(double, entry("a"))
        await registered_with(engine, lora_names=(), aliases=(), max_model_len=None)
        assert registered(engine) == ["a"]

    bridging(address_of(double), act)


@pytest.mark.parametrize("with_events", [True, False])
def test_an_adapter_of_the_operator_that_the_engine_drops_is_dropped(double: EngineDouble, with_events: bool) -> None:
    """One that it has never listed stays: some engines load adapters on request."""
    lists(double, entry("a"), entry("ad1", "a", "/lora"))
    changes = {} if with_events else {"events": None, "replay": None}

    async def act(engine: EngineUnderTest) -> None:
        await registered_with(engine, lora_names=("on request", "ad1"))
        lists(double, entry("a"))
        await registered_with(engine, lora_names=("on request",))

    bridging(address_of(double, lora_names=("ad1", "on request"), **changes), act)


def test_a_list_that_cannot_be_read_changes_nothing(double: EngineDouble) -> None:
    lists(double, entry("a", max_model_len=8192), entry("ad1", "a", "/lora"))

    async def act(engine: EngineUnderTest) -> None:
        await registered_with(engine, lora_names=("ad1",), max_model_len=8192)
        double.status = 503
        await asyncio.sleep(SETTLED_S)
        double.status, double.models_body = 200, "{}"
        await asyncio.sleep(SETTLED_S)
        await registered_with(engine, lora_names=("ad1",), max_model_len=8192)

    bridging(address_of(double), act)


# -- routers -----------------------------------------------------------------------------------------------------------


def workers_for(view: Any, model: str, lora_name: str | None = None) -> list[int]:
    name = view.fleet.model_of(model)
    return [rank.worker_id for rank in view.fleet.eligible(WorkerFilter(name, lora_name=lora_name))]


def test_requests_under_each_name_go_to_every_worker_that_has_it() -> None:
    view = view_of(Clock())
    register(view, 1, model="a", aliases=("b",))
    register(view, 2, model="b", aliases=("a",))
    register(view, 3, model="b")
    assert (workers_for(view, "a"), workers_for(view, "b")) == ([1, 2], [1, 2, 3])
    with pytest.raises(UnknownModel):
        view.fleet.model_of("c")
    register(view, 1, model="a", aliases=("c",))
    assert (view.fleet.model_of("c"), workers_for(view, "c"), workers_for(view, "b")) == ("a", [1, 2], [2, 3])


def test_one_model_with_two_names_is_the_only_one() -> None:
    view = view_of(Clock())
    register(view, 1, model="a", aliases=("b",))
    assert view.fleet.model_of(None) == "a"


def test_requests_for_an_adapter_go_to_the_workers_that_list_it() -> None:
    """Only if there is none do they go to a worker that lists no adapters, and may load any."""
    view = view_of(Clock())
    register(view, 1, lora_names=("ad1",))
    register(view, 2)
    register(view, 3, lora_names=())
    assert (workers_for(view, "m", "ad1"), workers_for(view, "m", "ad2")) == ([1], [2])
    register(view, 1, lora_names=("ad1",), state=WorkerState.CORDONED)
    assert workers_for(view, "m", "ad1") == [2]
    register(view, 2, lora_names=())
    assert workers_for(view, "m", "ad1") == []
    assert view.fleet.refusals(WorkerFilter("m", lora_name="ad1"))[FilterReason.LORA_MISSING] == 2


# -- the front ---------------------------------------------------------------------------------------------------------


def row(worker_id: int, **changes: Any) -> dict[str, Any]:
    """A worker as GET /workers returns it."""
    worker = Worker(WorkerId(worker_id), f"http://gpu{worker_id}", "m", 16)
    fields = {name: getattr(worker, name) for name in Worker.__dataclass_fields__}
    return {**fields, "silent_dp_ranks": [], **changes}


def fleet_of(*workers: dict[str, Any]) -> Fleet:
    class Registry:
        async def registry(self) -> dict[str, Any]:
            return {"workers": list(workers)}

    fleet = Fleet(cast(Any, Registry()))
    asyncio.run(fleet.poll())
    return fleet


def listed(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in fleet.page()["data"]}


def test_the_front_lists_all_names_with_the_length_that_every_engine_takes() -> None:
    fleet = fleet_of(
        row(1, aliases=["b"], max_model_len=8192, lora_names=["ad1"]), row(2, max_model_len=4096), row(3, model="other")
    )
    rows = listed(fleet)
    assert list(rows) == ["b", "m", "other", "ad1"]
    assert [rows[name].get("max_model_len") for name in rows] == [8192, 4096, None, 4096]
    assert (rows["ad1"]["parent"], rows["b"]["parent"]) == ("m", None)
    assert (fleet.resolve("b"), fleet.resolve("ad1"), fleet.resolve("no")) == (("m", None), ("m", "ad1"), ("no", None))


@pytest.mark.parametrize("away", [{"silent_dp_ranks": [0]}, {"state": "cordoned"}, {"url": ""}])
def test_the_front_lists_what_can_be_served_now(away: dict[str, Any]) -> None:
    """The list and the answer to a request agree."""
    fleet = fleet_of(row(1, model="a", aliases=["b"], lora_names=["ad1"], **away), row(2))
    assert list(listed(fleet)) == ["m"] and fleet.resolve("ad1") == ("a", "ad1")
    assert list(listed(fleet_of(row(1, dp_size=2, silent_dp_ranks=[0])))) == ["m"]


class Refused(KvRouterClient):
    """A client whose router refuses the first calls for this reason."""

    def __init__(self, error: KvStreamsError, n_refused: int, no_worker_timeout_s: float | None) -> None:
        super().__init__("http://router", no_worker_timeout_s=no_worker_timeout_s)
        self._error = error
        self.n_calls, self._n_refused = 0, n_refused

    async def _call(self, *_: Any) -> dict[str, Any]:
        self.n_calls += 1
        if self.n_calls <= self._n_refused:
            raise CallRefused(self._error, 0.0)
        return {}

    async def route_anything(self) -> None:
        await self._retrying("/route", {}, b"", Attempt())


@pytest.mark.parametrize(
    ("error", "wait_s", "is_served"),
    [
        (NoEligibleWorker("no engine is awake"), Settings().front_no_worker_wait_s, False),
        (NoEligibleWorker("no engine is awake"), 30.0, True),
        (NoEligibleWorker("no engine is awake"), None, True),
        (AllWorkersBusy("all are busy"), 0.0, True),
        (NotReady("the router starts"), 0.0, True),
    ],
)
async def test_a_request_that_no_worker_may_serve_waits_only_where_models_are_started_on_demand(
    error: KvStreamsError, wait_s: float | None, is_served: bool
) -> None:
    async with Refused(error, 3, wait_s) as client:
        if is_served:
            await client.route_anything()
        else:
            with pytest.raises(NoEligibleWorker):
                await client.route_anything()
        assert client.n_calls == (4 if is_served else 1)
