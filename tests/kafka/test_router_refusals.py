"""What routers refuse: all errors have one shape, and an invalid request is never reported as a fault of the router."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streams.core.ids import U32_MAX, U64_MASK
from streams.router_api.messages.requests import COUNT_MAX, NAME_CHARS_MAX, TAINTS_MAX
from streams.settings import WEIGHT_MAX, Settings
from tests.helpers.api import (
    BLOCK_SIZE,
    BODY_BYTES_MAX,
    JSON,
    OCTETS,
    TOKENS,
    TOKENS_MAX,
    Answer,
    Api,
    Fleet,
    packed,
    served,
)

# --- what is refused ---------------------------------------------------------------------------------------------


def test_without_workers_requests_are_503(scope: Settings) -> None:
    """With an empty registry, every request is 503 with Retry-After; while one model is served, it may be left out."""
    with served(scope) as api:
        for asked in ({"token_ids": TOKENS}, {"token_ids": TOKENS, "model": "m"}):
            for path in ("/route", "/loads/potential", "/matches"):
                message = api.call("POST", path, asked).refused(503, "no_eligible_worker")
                assert "PUT /workers" in message
        assert api.get("/loads") == {"loads": [], "in_sync": True}
        assert api.get("/state") == {"blocks": 0, "applied_offsets": {}, "ranks": []}
        body = {"url": "http://e", "model": "only", "block_size": BLOCK_SIZE}
        api.call("PUT", "/workers/1", body).given()
        assert api.route(token_ids=TOKENS)["worker_id"] == 1
        api.call("POST", "/route", {"token_ids": TOKENS, "model": "other"}).refused(404, "unknown_model")
        api.call("PUT", "/workers/2", {**body, "model": "second"}).given()
        api.call("POST", "/route", {"token_ids": TOKENS}).refused(404, "unknown_model")


def test_an_unknown_model_is_404(fleet: Fleet, model: str) -> None:
    """A model that no worker serves is 404, and the answer lists the models that are served."""
    for path in ("/route", "/loads/potential", "/matches"):
        answer = fleet.main.call("POST", path, {"model": "nobody's", "token_ids": TOKENS})
        answer.refused(404, "unknown_model")
        assert model in answer.json["error"]["detail"]["models"]


WRONG_TOKENS: list[Any] = [
    "123",
    "",
    {},
    {"0": 1},
    1,
    True,
    [[1]],
    [None],
    ["1"],
    [1.0],
    [1.5],
    [True],
    [-1],
    [U32_MAX + 1],
    [U64_MASK],
    [1 << 64],
    [10**400],
    [-(10**400)],
    [1, 2, [3]],
    [math.nan],
    [math.inf],
    [{"a": 1}],
]
WRONG_HASHES: list[Any] = [
    "1",
    1,
    {},
    [None],
    [1.0],
    [True],
    [-1],
    [1 << 64],
    [10**400],
    ["-1"],
    [str(1 << 64)],
    ["9" * 400],
    ["1.0"],
    ["0x1"],
    [" 1"],
    [""],
    ["²"],
    ["\u0661"],
    ["1_000"],
    [[1]],
    [1, None],
]

#: Fields that, together with a model, make a request to POST /route or POST /loads/potential invalid.
WRONG_FIELDS: list[dict[str, Any]] = [
    {},
    {"token_ids": [1], "block_hashes": [1]},
    {"token_ids": None},
    {"token_ids": None, "block_hashes": None},
    {"token_ids": []},
    {"block_hashes": []},
    *[{"token_ids": tokens} for tokens in WRONG_TOKENS],
    *[{"block_hashes": hashes} for hashes in WRONG_HASHES],
    *[
        {"token_ids": [1], name: value}
        for name, values in {
            "request_id": (1, "", "x" * (NAME_CHARS_MAX + 1), [], {}, True, 1.5),
            "model": (1, "", "x" * (NAME_CHARS_MAX + 1), [], True),
            "lora_name": (1, [], {}, True),
            "namespace": (1, [], {}, True),
            "cache_salt": (1, [], {}, True),
            "session_id": (1, "", [], "x" * (NAME_CHARS_MAX + 1)),
            "priority": ("1", 1.5, [], True, None),
            "required_taints": ("a", {}, 1, [1], [None], True, [""], ["a"] * (TAINTS_MAX + 1)),
            "phase": ("x", 1, "", [], "PREFILL"),
            "worker_id": (-1, 1 << 64, 10**400, "-1", "x", "", str(1 << 64), 1.0, True, [], {}),
            "dp_rank": (-1, U32_MAX + 1, "0", 1.0, True, []),
            "allowed_worker_ids": (1, "1", [None], [-1], ["x"], [1 << 64], [[1]], {}, True),
            "excluded_worker_ids": (1, "1", [None], [-1], ["x"], [1 << 64], [1.5], {}, True),
            "expected_output_tokens": (-1, COUNT_MAX + 1, 1 << 63, 10**400, "1", 1.5, True, []),
            "update_states": (0, 1, "true", None, []),
            "explain": (0, 1, "true", None, []),
            "kv_sources": (0, 1, 3, "true", None, []),
            "router_config_override": (
                1,
                "x",
                [],
                {"x": 1},
                {"overlap_score_weight": -1},
                {"overlap_score_weight": "1"},
                {"overlap_score_weight": WEIGHT_MAX * 1.001},
                {"overlap_score_weight": 1e308},
                {"overlap_score_weight": math.nan},
                {"overlap_score_weight": math.inf},
                {"router_temperature": -0.1},
                {"router_temperature": WEIGHT_MAX * 1.001},
                {"router_temperature": True},
                {"track_active_blocks": 1},
                {"router_mode": "fastest"},
                {"tier_weights": [1, 1, 1]},
                {"tier_weights": [1, 1, 1, -1]},
                {"tier_weights": 1},
                {"moe_query": 1},
                {"moe_query": {"x": 1}},
                {"moe_query": {"expert_ids": [None]}},
                {"moe_query": {"fallback_to_unlabeled": "no"}},
            ),
            "unknown_field": (1,),
            "Token_ids": ([1],),
        }.items()
        for value in values
    ],
]


def shown(value: object) -> str:
    """Return a parameter as the id of its test."""
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:50]}…{len(text)}"


@pytest.mark.parametrize("path", ["/route", "/loads/potential", "/matches"])
@pytest.mark.parametrize("fields", WRONG_FIELDS, ids=shown)
def test_a_wrong_field_is_400(path: str, fields: dict[str, Any], fleet: Fleet, model: str) -> None:
    """A field of a wrong type or out of range is 400, and the message names it."""
    fleet.main.call("POST", path, {"model": model, **fields}).refused(400, "invalid_request")


BROKEN_BODIES: dict[str, bytes] = {
    "empty": b"",
    "space": b"  ",
    "null": b"null",
    "list": b"[]",
    "string": b'"x"',
    "number": b"1",
    "cut off": b'{"token_ids": [1',
    "after the end": b'{"token_ids": [1]} x',
    "comma": b'{"token_ids": [1,]}',
    "single quotes": b"{'token_ids': [1]}",
    "comment": b'{"token_ids": [1] /* x */}',
    "NaN": b'{"token_ids": [NaN]}',
    "float out of range": b'{"token_ids": [1], "router_config_override": {"overlap_score_weight": 1e400}}',
    "5000 digits": b'{"token_ids": [' + b"9" * 5000 + b"]}",
    "4300 digits": b'{"token_ids": [1], "worker_id": ' + b"9" * 4300 + b"}",
    "-4000 digits": b'{"token_ids": [1], "worker_id": -' + b"9" * 4000 + b"}",
    "binary": bytes(range(256)),
    "utf-16": '{"token_ids": [1]}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"token_ids": [1]}',
    "no utf-8 in a value": b'{"model": "\xff", "token_ids": [1]}',
    "no utf-8 in a name": b'{"mod\xffel": "x", "token_ids": [1]}',
    "cut utf-8": b'{"model": "\xc3"}',
    "half a surrogate": b'{"model": "\\ud800", "token_ids": [1]}',
    "bad escape": b'{"model": "\\x00", "token_ids": [1]}',
    "control character": b'{"model": "a\nb", "token_ids": [1]',
    "deep lists": b"[" * 60_000,
    "deep objects": b'{"a":' * 10_000,
    "deep tokens": b'{"token_ids": ' + b"[" * 60_000,
    "deep override": b'{"router_config_override": ' * 2_000,
    "a form": b"token_ids=1&model=x",
}


@pytest.mark.parametrize("call", ["POST /route", "POST /loads/potential", "POST /loads/broken", "PUT /workers/5"])
@pytest.mark.parametrize("body", BROKEN_BODIES.values(), ids=BROKEN_BODIES.keys())
def test_a_broken_body_is_400(call: str, body: bytes, fleet: Fleet) -> None:
    """A body that is not a valid JSON object is 400, however it is broken."""
    method, path = call.split(" ")
    fleet.main.call(method, path, body).refused(400, "invalid_request")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"worker_id": None},
        {"worker_id": "x"},
        {"worker_id": -1},
        {"worker_id": 1 << 64},
        {"dp_rank": -1},
        {"dp_rank": U32_MAX + 1},
        {"dp_rank": None},
        {"token_ids": TOKENS, "block_hashes": [1]},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [1], "overlap_blocks": -1},
        {"token_ids": [1], "overlap_blocks": COUNT_MAX + 1},
        {"token_ids": [1], "overlap_blocks": 10**400},
        {"token_ids": [1], "overlap_blocks": 0.5},
        {"token_ids": [1], "expected_output_tokens": COUNT_MAX + 1},
        {"token_ids": [1], "expected_output_tokens": 10**400},
        {"token_ids": [1], "model": "x"},
        {"token_ids": [1], "update_states": True},
    ],
    ids=shown,
)
def test_a_wrong_booking_is_400_and_books_nothing(fields: dict[str, Any], fleet: Fleet, model: str) -> None:
    """An invalid booking is refused before it is charged."""
    worker_id = next(each for each, worker in fleet.main.workers().items() if worker["model"] == model)
    answer = fleet.main.call("POST", "/loads/wrong-booking", {"worker_id": worker_id, **fields})
    answer.refused(400, "invalid_request")
    assert set(fleet.main.loads([worker_id]).values()) == {(0, 0, 0)}


@pytest.mark.parametrize(
    "fields",
    [
        {"url": None},
        {"url": ""},
        {"url": 1},
        {"url": "u" * 5000},
        {"model": ""},
        {"model": None},
        {"model": "x" * (NAME_CHARS_MAX + 1)},
        {"block_size": None},
        {"block_size": 0},
        {"block_size": -1},
        {"block_size": 16.0},
        {"block_size": "16"},
        {"block_size": 10**400},
        {"dp_size": 0},
        {"dp_size": 4097},
        {"dp_size": 1 << 80},
        {"role": "x"},
        {"role": None},
        {"kv_total_blocks": 0},
        {"kv_total_blocks": COUNT_MAX + 1},
        {"kv_total_blocks": 10**400},
        {"max_requests": 0},
        {"max_requests": COUNT_MAX + 1},
        {"max_requests": 1 << 63},
        {"device_class": ""},
        {"device_class": 1},
        {"taints": "x"},
        {"taints": [1]},
        {"taints": [""]},
        {"taints": ["x"] * 257},
        {"lora_names": "x"},
        {"lora_names": [1]},
        {"lora_names": [""]},
        {"lora_names": ["x"] * 1025},
        {"taints": ["x" * (NAME_CHARS_MAX + 1)]},
        {"events_endpoint": ""},
        {"events_endpoint": 1},
        {"replay_endpoint": "x" * 5000},
        {"url": "not a url"},
        {"url": "file:///etc/passwd"},
        {"url": "http://e\nx"},
        {"model": "m\n\0"},
        {"state": "cordoned"},
        {"worker_id": 1},
    ],
    ids=shown,
)
def test_a_wrong_worker_is_400_and_not_registered(fields: dict[str, Any], fleet: Fleet) -> None:
    """An invalid worker is refused before it is written to Kafka."""
    body = {"url": "http://e", "model": "m", "block_size": BLOCK_SIZE, **fields}
    body = {name: value for name, value in body.items() if value is not None or name == "role"}
    fleet.main.call("PUT", "/workers/5", body).refused(400, "invalid_request")
    assert 5 not in fleet.main.workers()


def test_a_block_size_that_is_not_the_models_is_refused(fleet: Fleet) -> None:
    """A model has one block size within a scope; another one is refused, and the error names the setting."""
    body = {"url": "http://e", "model": "m", "block_size": BLOCK_SIZE * 2}
    message = fleet.main.call("PUT", "/workers/5", body).refused(400, "wrong_block_size")
    assert "model_block_sizes" in message
    assert 5 not in fleet.main.workers()


@pytest.mark.parametrize(
    "call",
    [
        "PUT /workers/{}",
        "DELETE /workers/{}",
        "PUT /workers/{}/cordon",
        "DELETE /workers/{}/cordon",
        "PUT /workers/{}/avoid",
        "PUT /workers/{}/render",
    ],
)
@pytest.mark.parametrize("worker_id", ["-1", "x", str(1 << 64), "9" * 1000, "1.5", "0x1", "%C2%B2", "%ff", "1%20"])
def test_a_worker_id_is_a_u64(call: str, worker_id: str, fleet: Fleet) -> None:
    """A worker id in a path is a decimal u64 and nothing else."""
    method, path = call.format(worker_id).split(" ")
    body = {"url": "http://e", "model": "m", "block_size": BLOCK_SIZE}
    fleet.main.call(method, path, body).refused(400, "invalid_request")


def test_a_worker_that_is_not_registered_is_404(fleet: Fleet) -> None:
    """Calls for a worker that is not registered are 404."""
    fleet.main.call("DELETE", "/workers/5").refused(404, "unknown_id")
    fleet.main.call("PUT", "/workers/5/cordon").refused(404, "unknown_id")
    fleet.main.call("DELETE", "/workers/5/cordon").refused(404, "unknown_id")
    fleet.main.call("PUT", "/workers/5/avoid").refused(404, "unknown_id")
    fleet.main.call("POST", "/loads/r", {"worker_id": 5, "token_ids": [1]}).refused(404, "unknown_id")


@pytest.mark.parametrize(
    ("n", "status"), [(TOKENS_MAX - 1, 200), (TOKENS_MAX, 200), (TOKENS_MAX + 1, 413), (TOKENS_MAX * 2, 413)]
)
def test_more_tokens_than_the_limit_are_413(n: int, status: int, fleet: Fleet, model: str) -> None:
    """The limit applies to tokens as JSON, as octets and as hashes, and exactly the limit is allowed."""
    asked = {"model": model, "update_states": False}
    worker_id = next(each for each, worker in fleet.main.workers().items() if worker["model"] == model)
    answers = [
        fleet.main.call("POST", "/route", {**asked, "token_ids": [1] * n}),
        fleet.main.call("POST", "/loads/potential", {**asked, "token_ids": [1] * n}),
        fleet.main.call("POST", f"/route?model={model}&update_states=false", packed([1] * n), OCTETS),
        fleet.main.call("POST", "/route", {**asked, "block_hashes": [1] * -(-n // BLOCK_SIZE)}),
    ]
    if status == 413:
        answers.append(fleet.main.call("POST", "/loads/too-long", {"worker_id": worker_id, "token_ids": [1] * n}))
    for answer in answers:
        if status == 200:
            answer.given()
        else:
            answer.refused(413, "too_large")


@pytest.mark.parametrize("call", ["POST /route", "POST /loads/potential", "POST /loads/big", "PUT /workers/5"])
def test_a_body_beyond_the_limit_is_413(call: str, fleet: Fleet) -> None:
    """A body beyond the limit is refused, even if it exceeds the limit only after decompression."""
    method, path = call.split(" ")
    big = b'{"token_ids": [' + b" " * (2 * BODY_BYTES_MAX)
    fleet.main.call(method, path, big).refused(413, "too_large")
    bomb = gzip.compress(b" " * (100 * BODY_BYTES_MAX))
    assert len(bomb) < BODY_BYTES_MAX
    fleet.main.call(method, path, bomb, headers={"Content-Encoding": "gzip"}).refused(413, "too_large")


def test_a_compressed_body_is_read(fleet: Fleet, model: str) -> None:
    """A body that is compressed with gzip is accepted."""
    body = gzip.compress(json.dumps({"model": model, "token_ids": TOKENS, "update_states": False}).encode())
    fleet.main.call("POST", "/route", body, headers={"Content-Encoding": "gzip"}).given()


def test_a_body_that_contradicts_its_content_encoding_is_400(scope: Settings) -> None:
    """A body that does not match its Content-Encoding is 400."""
    with served(scope) as api:
        answer = api.call("POST", "/route", b"plain", headers={"Content-Encoding": "gzip"})
        answer.refused(400, "invalid_request")


@pytest.mark.parametrize("content_type", [None, "", JSON, "application/json; charset=utf-8", "text/plain", ";;", "x"])
def test_a_body_is_json_unless_its_type_is_octet_stream(content_type: str | None, fleet: Fleet, model: str) -> None:
    """Only application/octet-stream means packed tokens; a JSON body with any other type, or none, is read as JSON."""
    body = json.dumps({"model": model, "token_ids": TOKENS, "update_states": False})
    padded = (body + " " * (-len(body) % 4)).encode()  # padded to a length that packed tokens could have
    answer = fleet.main.call("POST", "/route", padded, content_type).given()
    assert answer["request_blocks"] == 4


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/route", {"POST"}),
        ("PUT", "/route", {"POST"}),
        ("POST", "/loads", {"GET", "HEAD"}),
        ("GET", "/loads/x", {"POST", "DELETE"}),
        ("GET", "/loads/x/prefill-complete", {"POST"}),
        ("POST", "/workers/1", {"PUT", "DELETE"}),
        ("DELETE", "/workers", {"GET", "HEAD"}),
        ("POST", "/healthz", {"GET", "HEAD"}),
        ("POST", "/metrics", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_405_with_the_allowed_ones(method: str, path: str, allow: set[str], fleet: Fleet) -> None:
    """The answer to a wrong method lists the methods of the path."""
    answer = fleet.main.call(method, path)
    answer.refused(405, "method_not_allowed")
    assert set(answer.headers["allow"].split(",")) == allow


@pytest.mark.parametrize("path", ["/nowhere", "/routes", "/route/x", "/loads/a/b", "/x%ff", "/v1/route", "//"])
def test_an_unknown_path_is_404(path: str, fleet: Fleet) -> None:
    """The answer to an unknown path has the shape of all errors."""
    for method in ("GET", "POST", "DELETE"):
        fleet.main.call(method, path).refused(404, "not_found")


# --- fuzz --------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)  # including single surrogates
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(10**30), 10**30), st.floats(), TEXT)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
#: Workers of the fuzzed model.
FUZZED_IDS = (0, 1, U64_MASK)
IDS = st.one_of(st.sampled_from([0, 1, U64_MASK, 1 << 64, -1, "0", "1", str(U64_MASK), "x", None, 1.5]), SCALARS)
#: Values of each field that are likely to be valid; otherwise a field gets anything. Temperatures come
#: from a list, since the smallest ones that a float can hold are for the selection's own tests.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "request_id": TEXT,
    "token_ids": st.lists(st.integers(0, U32_MAX) | SCALARS, max_size=40),
    "block_hashes": st.lists(IDS, max_size=10),
    "lora_name": TEXT,
    "namespace": TEXT,
    "cache_salt": TEXT,
    "session_id": TEXT,
    "priority": st.integers(),
    "required_taints": st.lists(TEXT, max_size=1),
    "phase": st.sampled_from(["prefill", "decode", "both"]),
    "worker_id": st.sampled_from([*FUZZED_IDS, str(U64_MASK), 2, 1 << 64]),
    "dp_rank": st.sampled_from([0, 0, 1, 2, -1]),
    "allowed_worker_ids": st.lists(st.sampled_from([*FUZZED_IDS, "0", 2]) | IDS, min_size=1, max_size=3),
    "excluded_worker_ids": st.lists(IDS, max_size=3),
    "expected_output_tokens": st.integers(-1, 1 << 40),
    "overlap_blocks": st.integers(-1, 1 << 40),
    "update_states": st.booleans(),
    "explain": st.booleans(),
    "kv_sources": st.booleans(),
    "router_config_override": st.fixed_dictionaries(
        {},
        optional={
            "overlap_score_weight": st.sampled_from([0, -0.0, 0.5, 1, WEIGHT_MAX, 1e7, "1", None]),
            "router_temperature": st.sampled_from([0, 1e-3, 1, WEIGHT_MAX, -1, None]),
            "moe_query": VALUES,
        },
    ),
    "dp_size": st.integers(-1, 5000),
    "taints": st.lists(TEXT, max_size=3),
    "kv_total_blocks": st.integers(),
    "max_requests": st.integers(),
}


CONTENT: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, U32_MAX), min_size=1, max_size=70)}),
    st.fixed_dictionaries({"block_hashes": st.lists(st.integers(0, U64_MASK), min_size=1, max_size=5)}),
)
#: Valid bodies of each call.
RIGHT_ROUTE = CONTENT.map(lambda content: {"model": "fuzzed", **content})
RIGHT_BOOKING = st.tuples(CONTENT, st.sampled_from(FUZZED_IDS)).map(lambda drawn: {**drawn[0], "worker_id": drawn[1]})
RIGHT_WORKER = st.just({"url": "http://e", "model": "fuzzed too", "block_size": BLOCK_SIZE})


@st.composite
def bodies(draw: st.DrawFn, right: st.SearchStrategy[dict[str, Any]], fields: Sequence[str]) -> bytes:
    """Bodies of all kinds: valid ones with additional fields, ones with an arbitrary field, any JSON, and any bytes."""
    kind = draw(st.sampled_from(["likely", "likely", "likely", "likely", "json", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "json":
        return json.dumps(draw(VALUES)).encode()
    chosen = draw(st.lists(st.sampled_from(fields), unique=True, max_size=3))
    body = {**draw(right), **{name: draw(LIKELY[name]) for name in chosen}}
    if draw(st.booleans()):
        body[draw(st.sampled_from([*body, "x"]))] = draw(VALUES)
    return json.dumps(body).encode()


ROUTE_FIELDS = [*list(LIKELY)[:15], "update_states", "explain", "kv_sources", "router_config_override"]
BOOK_FIELDS = ["dp_rank", "token_ids", "block_hashes", "lora_name", "namespace", "cache_salt", "overlap_blocks"]
WORKER_FIELDS = ["dp_size", "taints", "kv_total_blocks", "max_requests"]

#: Number of bodies for each call. A failure prints the body and how to reproduce it.
fuzzing = settings(max_examples=120, deadline=None, print_blob=True)


@pytest.fixture(scope="module")
def fuzzed(fleet: Fleet) -> Api:
    """A router with a model named `fuzzed`, whose workers have the ids that the fuzzer uses."""
    for worker_id in FUZZED_IDS:
        fleet.put(worker_id, "fuzzed", dp_size=2)
    return fleet.main


def assert_answered(answer: Answer, body: bytes, allowed: Sequence[int]) -> None:
    """Check that the answer has one of these statuses, the shape of an answer or error, and no fault of the router."""
    assert answer.status in allowed, (answer.status, answer.body, body)
    if answer.status >= 400:
        answer.refused(answer.status, answer.json["error"]["code"])


@pytest.mark.parametrize("path", ["/route", "/loads/potential", "/matches"])
def test_no_body_is_a_fault_of_the_router(path: str, fuzzed: Api) -> None:
    """Whatever JSON or bytes a routing call receives, the router chooses a rank or explains what is wrong."""
    statuses = set()

    @fuzzing
    @example(b'{"model": "fuzzed", "token_ids": [1]}')
    @given(bodies(RIGHT_ROUTE, ROUTE_FIELDS))
    def send(body: bytes) -> None:
        answer = fuzzed.call("POST", path, body)
        assert_answered(answer, body, (200, 400, 404, 413, 503))
        statuses.add(answer.status)

    send()
    assert 200 in statuses


def test_no_query_is_a_fault_of_the_router(fuzzed: Api) -> None:
    """Whatever query parameters come with packed tokens, the router chooses a rank or explains what is wrong."""

    @fuzzing
    @given(
        st.dictionaries(st.sampled_from([*ROUTE_FIELDS, "overlap_score_weight", "x"]), SCALARS, max_size=4),
        st.binary(max_size=64),
    )
    def send(query: dict[str, Any], body: bytes) -> None:
        text = "&".join(f"{name}={quote(str(value).encode(errors='surrogatepass'))}" for name, value in query.items())
        answer = fuzzed.call("POST", f"/route?model=fuzzed&{text}", body, OCTETS)
        assert_answered(answer, f"{text} {body!r}".encode(), (200, 400, 404, 413, 503))

    send()


def test_no_booking_is_a_fault_of_the_router(fuzzed: Api) -> None:
    """Any booking of any id is either made or refused, and a later DELETE of the id is accepted."""
    statuses = set()

    @fuzzing
    @example("r", b'{"worker_id": 1, "token_ids": [1]}')
    @given(st.text(min_size=1, max_size=20), bodies(RIGHT_BOOKING, BOOK_FIELDS))
    def send(request_id: str, body: bytes) -> None:
        path = f"/loads/{quote(request_id, safe='')}"
        if request_id == "potential":  # this path is a different call
            return
        answer = fuzzed.call("POST", path, body)
        assert_answered(answer, body, (200, 400, 404, 409, 413))
        statuses.add(answer.status)
        assert_answered(fuzzed.call("DELETE", path), body, (200, 202))

    send()
    assert 200 in statuses


def test_no_worker_is_a_fault_of_the_router(fuzzed: Api) -> None:
    """Any worker is either registered or refused."""

    @fuzzing
    @example(b'{"url": "http://e", "model": "fuzzed too", "block_size": 16}')
    @given(bodies(RIGHT_WORKER, WORKER_FIELDS))
    def send(body: bytes) -> None:
        assert_answered(fuzzed.call("PUT", "/workers/3", body), body, (200, 400))

    send()
    fuzzed.call("DELETE", "/workers/3").given()
