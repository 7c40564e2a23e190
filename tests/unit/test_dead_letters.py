"""What a dead letter of an agent keeps of a record, and that errors of records do not quote them."""

from __future__ import annotations

import json
import traceback
from dataclasses import replace

import pytest

from streams.core.events import EngineBatch, EngineEvents
from streams.core.hashing import local_hashes
from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.errors import BadRecord, InvalidRequest
from streams.kafka.avro_frames import codec
from streams.kafka.records import decode_batch, encode_batch
from streams.tables.transactions import dead_letter_value
from streams.topics import EVENT_BYTES_MAX

BATCH = EngineBatch(RankId(WorkerId(7), DpRank(0)), "m", 16, Incarnation(1), 3, 4, 5, EngineEvents(()))
GOOD = encode_batch(BATCH)


@pytest.mark.parametrize("value", [GOOD, encode_batch(replace(BATCH, block_size=0)), None])
def test_a_record_of_the_topics_schema_is_kept(value: bytes | None) -> None:
    """Its fields are known, also if their values make no sense; a record without a value remains one."""
    assert dead_letter_value(value, "kv-events") == value


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (b"4100001 4200003", "kv-events"),
        (b"", "kv-events"),
        (GOOD[:-1], "kv-events"),
        (GOOD + b"secret", "kv-events"),
        (GOOD, "cxl-events"),
        (GOOD, None),
        (GOOD[:10] + b"x" * EVENT_BYTES_MAX, "kv-events"),
    ],
)
def test_only_the_length_of_any_other_record_is_kept(value: bytes, schema: str | None) -> None:
    """It may be an engine's own message, with the tokens of a prompt."""
    letter = dead_letter_value(value, schema)
    assert letter is not None and json.loads(letter) == {"bytes": len(value)}


@pytest.mark.parametrize("content", [b"secret\xff", b"\xffsecret prompt", b"secret"])
def test_the_error_of_a_record_does_not_quote_it(content: bytes) -> None:
    """This holds with the header of a schema, where the Avro library's own errors quote text, and without one."""
    header = b"\xc3\x01" + codec("kv-events").fingerprint
    length = bytes([2 * len(content)])  # an Avro string: its length in zigzag, then its bytes
    for raw in (content, header + content, header + b"\x02\x00" + length + content + bytes(40)):
        with pytest.raises(BadRecord) as caught:
            decode_batch(raw)
        shown = "".join(traceback.format_exception(caught.value))
        assert "secret" not in shown and content.hex()[:8] not in shown


@pytest.mark.parametrize("tokens", [[1, [4_100_001, 4_200_003]], [1, "4100001"], [1, {"4100001": 1}]])
def test_the_error_of_tokens_in_a_wrong_shape_does_not_quote_them(tokens: list[object]) -> None:
    """A publisher inside an engine logs such errors."""
    with pytest.raises(InvalidRequest) as caught:
        local_hashes(tokens, 1)  # type: ignore[arg-type]
    assert "4100001" not in str(caught.value)
