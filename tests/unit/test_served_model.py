"""The name of an engine's model, from whatever its HTTP server answers."""

from __future__ import annotations

import pytest

from streams.engines.bridged_engine import first_model
from streams.errors import KvStreamsError


def test_the_first_model_is_used() -> None:
    """An engine lists its base model first, and its adapters after it."""
    assert first_model(b'{"object": "list", "data": [{"id": "m"}, {"id": "adapter"}]}') == "m"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{}", b'{"data": null}', b'{"data": {}}', b'{"data": []}', b'{"data": [1]}',
     b'{"data": [{}]}', b'{"data": [{"id": 1}]}', b'{"data": [{"id": ""}]}', b'{"data": [{"id": "x\\u0000y\\n"}]}',
     b"not json", b"\xff", b"[" * 100_000],
)  # fmt: skip
def test_an_answer_that_names_no_model_is_refused(body: bytes) -> None:
    """Whatever the answer is, the caller gets one kind of error."""
    with pytest.raises(KvStreamsError):
        first_model(body)
