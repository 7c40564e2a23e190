"""Tokens that a kernel takes out of a JSON body are those that msgspec finds there; otherwise msgspec parses it all."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from streams.core.hashing import KERNELS_AVAILABLE, pack_tokens
from streams.core.ids import U32_MAX
from streams.errors import InvalidRequest, KvStreamsError
from streams.router_api import token_bodies
from streams.router_api.token_bodies import parse_with_tokens, split_tokens
from streams.router_api.wire import RouteRequest, blocks_of, parse_route
from tests.helpers.api import packed

TOKENS_MAX = 64

needs_kernels = pytest.mark.skipif(not KERNELS_AVAILABLE, reason="without numba, msgspec parses every body")


def outcome(body: bytes, *, by_kernel: bool) -> tuple[Any, ...]:
    """What a request with this body is: its fields, its tokens and its hashes, or its error's class and message."""
    try:
        if by_kernel:
            request, tokens = parse_with_tokens(parse_route, body, TOKENS_MAX)
        else:
            request, tokens = parse_route(body), None
        found: Any = request.token_ids if tokens is None else tokens
        blocks = blocks_of(
            found,
            request.block_hashes,
            block_size=4,
            lora_name=request.lora_name,
            namespace=request.namespace,
            cache_salt=request.cache_salt,
            tokens_max=TOKENS_MAX,
        )
        fields = tuple(getattr(request, name) for name in RouteRequest.__struct_fields__ if name != "token_ids")
        return fields, None if found is None else pack_tokens(found), blocks.chain.tolist(), blocks.n_tokens
    except KvStreamsError as exc:
        return type(exc), str(exc)


@needs_kernels
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
    body = f'{{"token_ids": {array}{rest}}}'.encode()
    assert split_tokens(body, TOKENS_MAX) == (f'{{"token_ids": null{rest}}}'.encode(), packed(tokens))


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
        '{"token_ids" [1]}',
        '{"token_ids":: [1]}',
        '{"token_ids": [1], "token_ids": [2, 3]}',
        '{"token_ids": [1], "token_ids": null, "block_hashes": [1]}',
        '{"token_ids": [1], "token\\u005fids": [2, 3]}',
        '{"token\\u005fids": [1]}',
        '{"token_ids": [1], "lora_name": "\\"token_ids\\": [1]"}',
        '{"lora_name": "\\"token_ids\\": [1]", "token_ids": [1]}',
        '{"lora_name": "token_ids", "token_ids": [1]}',
        '{"lora_name": "a"token_ids": [1]"}',
        '{"router_config_override": {"token_ids": [1]}}',
        '{"token_ids": [1], "router_config_override": {"token_ids": [1]}}',
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
    """Bodies that the kernel must not split give the same request, or the same error with the same message."""
    assert outcome(body.encode(), by_kernel=True) == outcome(body.encode(), by_kernel=False)


@pytest.mark.parametrize("seed", range(2))
def test_changed_bodies_mean_what_msgspec_says(seed: int) -> None:
    """Valid bodies with random changes give the same request, or the same error with the same message."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    pieces = [
        b"[",
        b"]",
        b",",
        b" ",
        b"0",
        b"9",
        b"-",
        b".",
        b"e",
        b'"',
        b"\\",
        b"{",
        b"}",
        b":",
        b"null",
        b"token_ids",
    ]
    pieces += [b'"token_ids":[1]', b"\xff", b"\x00", b"4294967295", b"4294967296", b"00000001", b"\t", b"\n"]
    n_split = n_refused = 0
    for _ in range(1500):
        n_tokens = rng.randrange(0, 12)
        tokens = [rng.choice((0, 9, 10_000_000, U32_MAX, rng.randrange(1 << 17))) for _ in range(n_tokens)]
        fields: list[tuple[str, Any]] = [("token_ids", tokens), ("model", "m"), ("priority", rng.randrange(3))]
        rng.shuffle(fields)
        separators = rng.choice(((",", ":"), (", ", ": "), (" ,\n", " : ")))
        body = bytearray(json.dumps(dict(fields[: rng.randrange(1, 4)]), separators=separators).encode())
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            at = rng.randrange(len(body) + 1)
            body[at : at + rng.randrange(3)] = rng.choice(pieces)
        expected = outcome(bytes(body), by_kernel=False)
        assert outcome(bytes(body), by_kernel=True) == expected, bytes(body)
        n_split += split_tokens(bytes(body), TOKENS_MAX) is not None
        n_refused += isinstance(expected[0], type)
    assert n_refused > 300
    assert n_split > 300 or not KERNELS_AVAILABLE


@needs_kernels
def test_the_kernel_reads_nothing_beyond_the_end_of_a_body() -> None:
    """A body that is cut off anywhere is never split, whatever follows it in memory."""
    whole = b'{"token_ids": [12345678, 1234567, 1234567890, 1]}'
    assert split_tokens(whole, TOKENS_MAX) is not None
    for n in range(len(whole) - 1):
        assert split_tokens(whole[:n], TOKENS_MAX) is None


def test_without_kernels_msgspec_parses_every_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numba is missing, requests and errors are the same."""
    monkeypatch.setattr(token_bodies, "KERNELS_AVAILABLE", False)
    request, tokens = parse_with_tokens(parse_route, b'{"token_ids": [1, 2]}', TOKENS_MAX)
    assert (request.token_ids, tokens) == ([1, 2], None)
    with pytest.raises(InvalidRequest, match="Expected `int`"):
        parse_with_tokens(parse_route, b'{"token_ids": [1, "2"]}', TOKENS_MAX)
