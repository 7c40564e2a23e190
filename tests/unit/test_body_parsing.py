"""Tokens that a kernel reads from a JSON body are those that msgspec finds there; otherwise msgspec parses it all."""

from __future__ import annotations

import json
import random
from typing import Any, cast

import msgspec
import pytest

from streams.core.hashing import pack_tokens
from streams.core.ids import U32_MAX
from streams.errors import KvStreamsError
from streams.router_api.http.bodies import Bodies
from streams.router_api.http.body_parsing import BodyParser, read_array
from streams.router_api.messages.requests import RouteRequest, blocks_of, parse_route
from tests.helpers.api import packed

TOKENS_MAX = 64

PARSER = BodyParser(RouteRequest, parse_route, cast("Bodies", None), TOKENS_MAX)


def outcome(body: bytes, *, by_kernel: bool) -> tuple[Any, ...]:
    """What a request with this body is: its fields, its tokens and its hashes, or its error's class and message."""
    try:
        request, tokens = PARSER.parsed_at_once(body) if by_kernel else (parse_route(body), None)
        given: Any = request.token_ids if tokens is None else tokens
        blocks = blocks_of(
            given,
            request.block_hashes,
            block_size=4,
            lora_name=request.lora_name,
            namespace=request.namespace,
            cache_salt=request.cache_salt,
            tokens_max=TOKENS_MAX,
        )
        fields = tuple(getattr(request, name) for name in RouteRequest.__struct_fields__ if name != "token_ids")
        return fields, None if given is None else pack_tokens(given), blocks.chain.tolist(), blocks.n_tokens
    except KvStreamsError as exc:
        return type(exc), str(exc)


@pytest.mark.parametrize(
    ("array", "tokens"),
    [
        ("[]", []),
        ("[ ]", []),
        ("[0]", [0]),
        ("[0,0,10]", [0, 0, 10]),
        ("[ 1 , 2\t,\r\n3 ]", [1, 2, 3]),
        ("[9999999]", [9_999_999]),
        ("[99999999,999999999]", [99_999_999, 999_999_999]),
        (f"[{U32_MAX}]", [U32_MAX]),
        (f"[{U32_MAX},1,{U32_MAX}]", [U32_MAX, 1, U32_MAX]),
        (json.dumps(list(range(TOKENS_MAX))), list(range(TOKENS_MAX))),
    ],
)
@pytest.mark.parametrize("rest", ["", ', "model": "a name after the array, so that it does not end the body"'])
def test_a_valid_array_is_read(array: str, tokens: list[int], rest: str) -> None:
    """Every form in which JSON writes tokens is read, wherever the array ends in the body."""
    request, read = PARSER.parsed_at_once(f'{{"token_ids": {array}{rest}}}'.encode())
    assert (request.token_ids, read) == (None, packed(tokens))
    assert request == msgspec.structs.replace(request, model=parse_route(f'{{"token_ids": []{rest}}}'.encode()).model)


@pytest.mark.parametrize(
    "body",
    [
        '{"token_ids": [01]}',
        '{"token_ids": [-1]}',
        '{"token_ids": [-0]}',
        '{"token_ids": [1.0]}',
        '{"token_ids": [1e2]}',
        '{"token_ids": [4294967296]}',
        '{"token_ids": [99999999999999999999999999]}',
        '{"token_ids": [1,]}',
        '{"token_ids": [,1]}',
        '{"token_ids": [1 2]}',
        '{"token_ids": [true]}',
        '{"token_ids": ["1"]}',
        '{"token_ids": [[1]]}',
        '{"token_ids": [1',
        '{"token_ids": [',
        '{"token_ids": [1]',
        '{"token_ids": null}',
        '{"token_ids": {}}',
        '{"token_ids": 1}',
        '{"token_ids" [1]}',
        '{"token_ids": [1], "token_ids": [2, 3]}',
        '{"token_ids": [1], "token_ids": null, "block_hashes": [1]}',
        '{"token_ids": [1], "token\\u005fids": [2, 3]}',
        '{"token\\u005fids": [1]}',
        '{"router_config_override": {"token_ids": [1]}}',
        '{"token_ids": [1], "unknown": 1}',
        '{"token_ids": [1], "priority": 1.5}',
        '{"token_ids": [1]} 2',
        '{"token_ids": [1], "block_hashes": [1]}',
        '["token_ids", [1]]',
        "{}",
        json.dumps({"token_ids": list(range(TOKENS_MAX + 1))}),
        json.dumps({"token_ids": [1] * (TOKENS_MAX + 1) + [-1]}),
    ],
)
def test_an_unusual_body_means_what_msgspec_says(body: str) -> None:
    """Bodies that the kernel does not read give the same request, or the same error with the same message."""
    assert outcome(body.encode(), by_kernel=True) == outcome(body.encode(), by_kernel=False)


PIECES = [b"[", b"]", b",", b"0", b"9", b"-", b".", b"e", b'"', b"\\", b"{", b"}", b":", b"null", b"token_ids"]
PIECES += [b'"token_ids":[1]', b" ", b"\t", b"\n", b"\xff", b"\x00", b"4294967295", b"4294967296", b"00000001"]


def test_changed_bodies_mean_what_msgspec_says() -> None:
    """Valid bodies with random changes give the same request, or the same error with the same message."""
    rng = random.Random(7)
    n_read = n_refused = 0
    for _ in range(2000):
        n_tokens = rng.randrange(0, 12)
        tokens = [rng.choice((0, 9, 10_000_000, U32_MAX, rng.randrange(1 << 17))) for _ in range(n_tokens)]
        fields: list[tuple[str, Any]] = [("token_ids", tokens), ("model", "m"), ("priority", rng.randrange(3))]
        rng.shuffle(fields)
        separators = rng.choice(((",", ":"), (", ", ": "), (" ,\n", " : ")))
        body = bytearray(json.dumps(dict(fields[: rng.randrange(1, 4)]), separators=separators).encode())
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            place = rng.randrange(len(body) + 1)
            body[place : place + rng.randrange(3)] = rng.choice(PIECES)
        expected = outcome(bytes(body), by_kernel=False)
        assert outcome(bytes(body), by_kernel=True) == expected, bytes(body)
        n_refused += isinstance(expected[0], type)
        if not isinstance(expected[0], type):
            n_read += PARSER.parsed_at_once(bytes(body))[1] is not None
    assert n_refused > 300
    assert n_read > 300


def test_the_kernel_reads_nothing_beyond_the_end_of_an_array() -> None:
    """An array that is cut off anywhere is not read, whatever follows it in memory."""
    whole = b"[12345678, 1234567, 1234567890, 1]"
    assert read_array(msgspec.Raw(whole), TOKENS_MAX) == packed([12345678, 1234567, 1234567890, 1])
    for n in range(1, len(whole)):
        assert read_array(msgspec.Raw(memoryview(whole)[:n]), TOKENS_MAX) is None
