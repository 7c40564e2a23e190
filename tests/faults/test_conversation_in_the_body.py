"""A conversation and a priority that clients put into the body count if a setting says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from streams.core.routing.selection import RouterMode
from streams.errors import SettingsError
from streams.prompts.calls import Kind
from streams.prompts.requests import read_request
from streams.prompts.route_fields import route_options
from streams.security.tokens import ANONYMOUS, Grant, Right
from streams.settings import BodyPriority, Settings
from tests.helpers.front_stage import Backend, Stage, on_stage
from tests.helpers.local_router import local_router, register
from tests.helpers.scripted_engine import ScriptedEngine, scripted_engines


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """Give a router that binds sessions, and three engines."""
    settings = Settings(router_session_affinity_ttl_s=60.0, router_mode=RouterMode.LEAST_LOADED)
    with local_router(settings, n_workers=0) as router, scripted_engines(3, ScriptedEngine) as engines:
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)
        yield router, engines


async def workers(stage: Stage, n: int = 12, fields: Any = None, **headers: str) -> Counter[str]:
    """Return which workers got requests."""
    used: Counter[str] = Counter()
    for number in range(n):
        body = {"model": "m", "prompt": [number] * 40, "stream": True, **(fields or {})}
        _, answered, _ = await stage.post(body, "/v1/completions", **{"X-Kvstreams-Details": "1"}, **headers)
        used[answered["X-Kvstreams-Worker"]] += 1
    return used


@pytest.mark.parametrize(
    ("setting", "fields"),
    [
        ("prompt_cache_key", {"prompt_cache_key": "conv-1"}),
        ("prompt_cache_key,user", {"user": "conv-2"}),
        ("prompt_cache_key, user", {"prompt_cache_key": "", "user": "conv-3"}),
        ("prompt_cache_key", {"prompt_cache_key": "é" * 2000}),
        ("session_id", {"session_id": "conv-4"}),
    ],
)
async def test_requests_of_one_conversation_go_to_one_worker(backend: Backend, setting: str, fields: Any) -> None:
    """The first listed field that has a value names it."""
    async with on_stage(backend, session_fields=setting) as stage:
        assert len(await workers(stage, fields=fields)) == 1


@pytest.mark.parametrize(
    ("setting", "fields"),
    [
        ("", {"prompt_cache_key": "conv-1"}),
        ("user", {"prompt_cache_key": "conv-1"}),
        ("prompt_cache_key", {"prompt_cache_key": 7}),
        ("prompt_cache_key", {"prompt_cache_key": None}),
    ],
)
async def test_other_requests_are_not_bound(backend: Backend, setting: str, fields: Any) -> None:
    """Without the setting the field is left to the engine, and so is a value that is no text."""
    async with on_stage(backend, session_fields=setting) as stage:
        assert len(await workers(stage, 24, fields)) > 1


def options(body: Any, headers: dict[str, str] | None = None, grant: Grant = ANONYMOUS, **settings: Any) -> Any:
    return route_options(read_request(Kind.CHAT, orjson.dumps(body)), headers or {}, grant, Settings(**settings))


def test_a_header_comes_before_the_body() -> None:
    """A client that sets both means the header."""
    body = {"prompt_cache_key": "body", "priority": 9}
    given = options(
        body,
        {"X-Session-Id": "header", "X-Priority": "2"},
        session_fields="prompt_cache_key",
        body_priority=BodyPriority.HIGHER_FIRST,
    )
    assert (given["session_id"], given["priority"]) == ("header", 2)


@pytest.mark.parametrize(
    ("how", "priority", "expected"),
    [
        (BodyPriority.OFF, 5, None),
        (BodyPriority.HIGHER_FIRST, 5, 5),
        (BodyPriority.LOWER_FIRST, 5, -5),
        (BodyPriority.LOWER_FIRST, -5, 5),
        (BodyPriority.HIGHER_FIRST, "5", None),
        (BodyPriority.HIGHER_FIRST, True, None),
        (BodyPriority.HIGHER_FIRST, 0.5, None),
        (BodyPriority.HIGHER_FIRST, 1 << 40, None),
        (BodyPriority.HIGHER_FIRST, None, None),
    ],
)
def test_the_priority_of_a_body_is_read_as_its_engine_reads_it(how: BodyPriority, priority: Any, expected: Any) -> None:
    """vLLM serves the lowest number first, SGLang the highest; what is no whole number is left to the engine."""
    assert options({"priority": priority}, body_priority=how).get("priority") == expected


def test_a_token_limits_the_priority_of_a_body_as_well() -> None:
    """A client cannot pass others by putting it elsewhere."""
    grant = Grant("team", frozenset({Right.GENERATE}), None, 3)
    given = options({"priority": 100}, grant=grant, body_priority=BodyPriority.HIGHER_FIRST)
    assert given["priority"] == 3


def test_a_field_that_names_no_session_is_refused_as_a_setting() -> None:
    """A typo would otherwise be noticed by nobody."""
    with pytest.raises(SettingsError, match="prompt_cache_keys"):
        Settings(session_fields="prompt_cache_keys")
