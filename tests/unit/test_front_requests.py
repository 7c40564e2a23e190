"""What the front reads of requests and answers, without sockets."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import InvalidRequest, SettingsError, UnknownId
from streams.frontend.answers import StreamWatch, error_event, may_be_served_elsewhere, usage_tokens
from streams.frontend.fleet import FLEET_STALE_S, Fleet
from streams.frontend.headers import FORWARDED, client_headers, engine_headers
from streams.frontend.usage import usage_of_page
from streams.prompts.calls import Kind
from streams.prompts.engine_keys import parse_by_model
from streams.prompts.error_pages import error_page
from streams.prompts.request_fields import PromptPart
from streams.prompts.requests import read_request
from streams.prompts.route_fields import route_options
from streams.security.tokens import ANONYMOUS, Grant, Right


def read(kind: Kind = Kind.COMPLETION, **body: Any) -> Any:
    return read_request(kind, orjson.dumps(body))


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"7", b'{"prompt": ', b'"\xff"'])
def test_a_body_that_is_not_a_json_object_is_refused_without_quoting_it(body: bytes) -> None:
    """The message names what is wrong and contains nothing of the body."""
    with pytest.raises(InvalidRequest, match="the body is not") as refused:
        read_request(Kind.COMPLETION, body)
    assert "prompt" not in str(refused.value)


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    """The decoder counts levels also in fields that it skips."""
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        read_request(Kind.COMPLETION, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_fields_of_wrong_types_are_left_to_the_engine() -> None:
    """The front reads what it can use; an engine refuses the rest with its own error."""
    request = read(model=7, stream="perhaps", max_tokens="many", cache_salt=[1], prompt={"a": 1}, other=[{}])
    assert (request.model, request.stream, request.expected_output_tokens, request.cache_salt) == (
        None,
        False,
        None,
        None,
    )
    assert not request.has_token_ids


@pytest.mark.parametrize(
    ("prompt", "are_ids"),
    [("text", False), ([1, 2], True), ([[1, 2], [3]], True), (["a"], False), ([], False), (None, False)],
)
def test_token_ids_are_recognised_by_their_form(prompt: Any, are_ids: bool) -> None:
    """A list of numbers, or of lists of numbers, needs no tokenizer."""
    assert read(prompt=prompt).has_token_ids == are_ids


def test_the_limit_of_a_chat_is_max_completion_tokens_if_it_is_given() -> None:
    """OpenAI's API has two names for it, of which max_tokens is the older one."""
    assert read(Kind.CHAT, max_tokens=5).expected_output_tokens == 5
    assert read(Kind.CHAT, max_tokens=5, max_completion_tokens=7).expected_output_tokens == 7


@pytest.mark.parametrize("space", [b"", b" ", b"\n" + b" " * 200], ids=["none", "one", "indented"])
def test_several_prompts_are_recognised_in_indented_json(space: bytes) -> None:
    """Each of them is booked, and an answer that compares one is not exact."""
    for first, second in ((b"[1, 2]", b"[3]"), (b'"a"', b'"b"')):
        prompt = b"[" + space + first + b"," + space + second + space + b"]"
        request = read_request(Kind.COMPLETION, b'{"prompt":' + space + prompt + b"}")
        assert (request.prompts.n, request.sequences, request.part) == (2, 2, PromptPart.BEGINNING)


def test_a_completion_has_no_limit_of_that_name() -> None:
    """Engines do not read it there."""
    assert read(max_tokens=5, max_completion_tokens=7).expected_output_tokens == 5
    assert read(max_completion_tokens=7).expected_output_tokens is None


@pytest.mark.parametrize("stream", [True, 1, "true", "Yes", "on", "1"])
def test_fields_are_read_as_engines_read_them(stream: Any) -> None:
    """A stream is one in every spelling, and numbers may be texts or have a decimal point."""
    request = read(stream=stream, max_tokens="9", n="3", best_of=2.0)
    assert (request.stream, request.expected_output_tokens, request.sequences) == (True, 9, 3)
    assert not read(stream="false").stream and read(max_tokens=9.0).expected_output_tokens == 9


def test_headers_become_fields_of_the_route_request() -> None:
    """Priority, session, tenant, taints and trace context come by header, the rest from the body."""
    headers = {
        "X-Priority": "-3",
        "X-Session-Id": "s",
        "X-Tenant": "t",
        "X-Required-Taints": "gold, eu,",
        "traceparent": "00-1-2-01",
        "Authorization": "Bearer secret",
    }
    assert route_options(read(model="m", max_tokens=9, cache_salt="salt"), headers, ANONYMOUS) == {
        "model": "m",
        "expected_output_tokens": 9,
        "cache_salt": "salt",
        "priority": -3,
        "session_id": "s",
        "tenant": "t",
        "required_taints": ["gold", "eu"],
        "traceparent": "00-1-2-01",
    }
    assert route_options(read(), {}, ANONYMOUS) == {}


@pytest.mark.parametrize(("asked", "given_priority"), [("9", 5), ("5", 5), ("2", 2), (None, None)])
def test_a_token_limits_priority_and_decides_the_tenant(asked: str | None, given_priority: int | None) -> None:
    """A client cannot act for another tenant, and a higher priority than its token's becomes the token's."""
    grant = Grant("team", frozenset({Right.GENERATE}), "its-own", 5)
    headers = {"X-Tenant": "another", **({} if asked is None else {"X-Priority": asked})}
    options = route_options(read(), headers, grant)
    assert (options["tenant"], options.get("priority")) == ("its-own", given_priority)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Priority": "high"},
        {"X-Priority": str(1 << 40)},
        {"X-Tenant": "t" * 513},
        {"X-Required-Taints": "a," * 65},
        {"X-Required-Taints": "gold,\udcff"},
        {"X-Session-Id": "\udcff"},
        {"X-Moe-Query": "{" + '"a":' + "[" * 252 + "]" * 252 + "}"},
        {"X-Moe-Query": "[" * 2000},
        {"X-Moe-Query": '{"layer_id": 1' + "0" * 40 + "}"},
    ],
)
def test_a_header_that_cannot_be_used_is_refused(headers: dict[str, str]) -> None:
    """The message names the header."""
    with pytest.raises(InvalidRequest, match=next(iter(headers))):
        route_options(read(), headers, ANONYMOUS)


def test_no_credential_of_a_client_reaches_an_engine() -> None:
    """Only listed headers are forwarded, and Authorization is the engine's own key."""
    headers = dict.fromkeys(
        ("Authorization", "Cookie", "X-Api-Key", "Proxy-Authorization", "X-Tenant", *FORWARDED), "v"
    )
    assert set(engine_headers(headers, "id", None)) == set(FORWARDED)
    sent = engine_headers(headers, "id", "key")
    assert (sent["Authorization"], sent["X-Request-Id"]) == ("Bearer key", "id")


def test_headers_of_one_connection_stay_there() -> None:
    """All other headers of an engine reach the client, also those that occur twice."""
    headers = {"Connection": "close, X-Once", "X-Once": "1", "Transfer-Encoding": "chunked", "X-Kept": "2"}
    assert client_headers(headers) == [("X-Kept", "2")]


def test_what_one_engine_would_have_to_keep_is_refused() -> None:
    """No request can depend on the engine that answered an earlier one. Other fields of that kind are the engine's."""
    with pytest.raises(UnknownId, match="previous_response_id is not possible here"):
        read(Kind.RESPONSES, input="a", previous_response_id="resp_1")
    with pytest.raises(InvalidRequest, match="background is not possible here"):
        read(Kind.RESPONSES, input="a", background=True)
    fields = {"previous_response_id": None, "background": False, "store": True}
    assert read(Kind.RESPONSES, input="a", **fields).part is PromptPart.WHOLE
    assert read(Kind.CHAT, messages=[], previous_response_id="resp_1").part is PromptPart.BEGINNING


@pytest.mark.parametrize(
    ("kind", "fields", "part"),
    [
        (Kind.RESPONSES, {"truncation": "disabled", "max_output_tokens": 9, "text": {"verbosity": "low"}}, "whole"),
        (Kind.RESPONSES, {"truncation": "auto"}, "none"),
        (Kind.RESPONSES, {"conversation": "conv_1"}, "none"),
        (Kind.RESPONSES, {"previous_input_messages": [{}]}, "none"),
        (Kind.RESPONSES, {"a_field_of_next_year": 1}, "beginning"),
        (Kind.MESSAGES, {"thinking": {"type": "disabled"}, "max_tokens": 9, "cache_control": {}}, "whole"),
        (Kind.MESSAGES, {"a_field_of_next_year": 1}, "beginning"),
        (Kind.CHAT, {"thinking": {"type": "disabled"}}, "none"),
    ],
)
def test_each_call_has_fields_of_its_own(kind: Kind, fields: dict[str, Any], part: str) -> None:
    """The same name may have no effect in one call and change the prompt in another."""
    request = read(kind, **fields)
    assert request.part == part
    assert request.expected_output_tokens == (9 if part == "whole" else None)


# -- answers -----------------------------------------------------------------------------------------------------------


def chat(delta: dict[str, Any], **more: Any) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None, **more}]})


ROLE = chat({"role": "assistant", "content": ""})
TOKEN = chat({"content": "a"})


@pytest.mark.parametrize(
    "event",
    [
        TOKEN,
        chat({"reasoning_content": "a"}),
        chat({"tool_calls": [{"index": 0}]}),
        chat({}, finish_reason="stop"),
        orjson.dumps({"choices": [{"text": "a"}]}),
        orjson.dumps({"choices": [{"text": "", "token_ids": [1]}]}),
        orjson.dumps({"choices": [], "usage": {"completion_tokens": 1}}),
        b"[DONE]",
        b"no JSON at all",
        b'["something", "else"]',
    ],
)
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_the_first_token_is_found_wherever_the_stream_is_cut(event: bytes, line: bytes) -> None:
    """The role, comments and empty chunks come before it; every event from it on is counted once."""
    end = line * 2
    before = b": comment" + end + b"data: " + ROLE + end + b"data:" + orjson.dumps({"choices": [{"text": ""}]}) + end
    stream = before + (b"data: " + event + end) + (b"data: " + TOKEN + end) * 3
    for at in range(1, len(stream)):
        watch = StreamWatch()
        watch.feed(stream[:at])
        if at <= len(before):
            assert not watch.has_token
        watch.feed(stream[at:])
        assert (watch.has_token, watch.n_events, watch.at_boundary, watch.error_status) == (True, 4, True, 0)


@given(st.lists(st.integers(1, 400), max_size=40))
def test_events_are_counted_once_however_the_stream_is_cut(lengths: list[int]) -> None:
    """An end of an event that two reads share is neither missed nor counted twice."""
    stream = (b"data: " + TOKEN + b"\n\n") * 30
    cuts = [0, *itertools.takewhile(lambda at: at < len(stream), itertools.accumulate(lengths)), len(stream)]
    watch = StreamWatch()
    for start, stop in itertools.pairwise(cuts):
        watch.feed(stream[start:stop])
        if watch.has_token:
            assert watch.n_events == stream[:stop].count(b"\n\n")
            assert watch.at_boundary == stream[:stop].endswith(b"\n\n")
    assert watch.n_events == 30


@pytest.mark.parametrize(
    ("error", "status"),
    [({"message": "x", "code": 503}, 503), ({"message": "x", "code": 400}, 400), ({"code": "odd"}, 500), ("text", 500)],
)
def test_an_error_before_the_first_token_has_a_status(error: Any, status: int) -> None:
    """vLLM reports errors of a request whose HTTP status has been sent as an event."""
    watch = StreamWatch()
    watch.feed(b"data: " + orjson.dumps({"error": error}) + b"\n\n")
    assert (watch.has_token, watch.error_status) == (True, status)
    late = StreamWatch()
    late.feed(b"data: " + TOKEN + b"\n\ndata: " + orjson.dumps({"error": error}) + b"\n\n")
    assert late.error_status == 0


@pytest.mark.parametrize(
    ("status", "elsewhere"),
    [(200, False), (400, False), (404, False), (408, True), (422, False), (429, True), (500, True), (503, True)],
)
def test_faults_and_refusals_for_now_are_tried_on_another_engine(status: int, elsewhere: bool) -> None:
    """What one engine refuses as invalid, every engine refuses."""
    assert may_be_served_elsewhere(status) == elsewhere


def test_errors_have_openais_shape() -> None:
    """The page and the event that ends a broken stream carry message, type, parameter and code."""
    assert error_page(404, "no such model", "unknown_model")["error"] == {
        "message": "no such model",
        "type": "NotFoundError",
        "param": None,
        "code": "unknown_model",
    }
    first, last, rest = error_event(502, "x", "engine_failed").split(b"\n\n")
    assert orjson.loads(first.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    assert (last, rest) == (b"data: [DONE]", b"")


def test_the_length_of_a_whole_answer_is_its_usage() -> None:
    """Answers without a usage, and pages that are not JSON, count no tokens."""
    assert usage_tokens(usage_of_page(b'{"usage": {"completion_tokens": 5}}')) == 5
    assert [
        usage_tokens(usage_of_page(page))
        for page in (b"", b"[]", b'{"usage": null}', b'{"usage": {"completion_tokens": "x"}}')
    ] == [0] * 4


# -- the fleet and the command line ------------------------------------------------------------------------------------


def worker(
    model: str, url: str | None, *, state: str = "active", silent: int = 0, registered_ms: int = 5000
) -> dict[str, Any]:
    return {
        "model": model,
        "url": url,
        "state": state,
        "dp_size": 1,
        "worker_id": 1,
        "role": "both",
        "block_size": 16,
        "silent_dp_ranks": [0] * silent,
        "registered_at_ms": registered_ms,
    }


def test_models_are_those_of_the_registry_and_silent_engines_are_not_asked_to_tokenize() -> None:
    """A model is listed once, while an engine may get its requests; engines are asked by turns."""
    fleet = Fleet(router=None)  # type: ignore[arg-type]  # nothing is read
    fleet._take(
        [
            worker("m", "http://a/", registered_ms=9000),
            worker("m", "http://b"),
            worker("m", "http://c", silent=1),
            worker("m", "http://d", state="cordoned"),
            worker("n", None),
        ]
    )
    assert [(row["id"], row["created"]) for row in fleet.page()["data"]] == [("m", 5)]
    assert {fleet.engine("m") for _ in range(4)} == {"http://a", "http://b"}
    assert fleet.engine(None) in ("http://a", "http://b")  # the only model with an engine
    assert fleet.engine("n") is None and fleet.engine("other") is None


def test_adapters_are_listed_and_requested_like_models() -> None:
    """A request for an adapter goes to its model, and a model's own name is never an adapter's."""
    fleet = Fleet(router=None)  # type: ignore[arg-type]  # nothing is read
    fleet._take(
        [{**worker("m", "http://a"), "lora_names": ["tuned", "n"]}, {**worker("n", "http://b"), "lora_names": None}]
    )
    assert [(row["id"], row["parent"]) for row in fleet.page()["data"]] == [("m", None), ("n", None), ("tuned", "m")]
    assert fleet.resolve("tuned") == ("m", "tuned")
    assert [fleet.resolve(name) for name in ("m", "n", "other", None)] == [
        (name, None) for name in ("m", "n", "other", None)
    ]


def test_a_front_is_ready_while_a_router_answers_and_engines_are_registered() -> None:
    """It says why it is not."""
    now_s = [0.0]
    fleet = Fleet(router=None, clock=lambda: now_s[0])  # type: ignore[arg-type]  # nothing is read
    assert "not been read" in (fleet.not_ready() or "")
    fleet._read_s = 0.0
    assert fleet.not_ready() == "no engine is registered"
    fleet._take([worker("m", "http://a")])
    assert fleet.not_ready() is None
    now_s[0] = FLEET_STALE_S + 1
    assert "no router has answered" in (fleet.not_ready() or "")


def test_values_by_model_may_have_equals_signs_in_the_models_name() -> None:
    """The last equals sign separates; a value alone is for all other models."""
    assert parse_by_model("--tokenizer", ["a=/x", "b=c=/y", "/z"]) == {"a": "/x", "b=c": "/y", "": "/z"}
    for wrong in (["a="], ["=/x"], ["a=/x", "a=/y"], [""]):
        with pytest.raises(SettingsError, match="--tokenizer"):
            parse_by_model("--tokenizer", wrong)
