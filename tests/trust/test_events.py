"""What answers say after events that cannot be used, and that nothing of a prompt is on Kafka or in a log."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

from streams.kafka.clients import partition_of, producer, reader, worker_key
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble, offload_placeholder
from tests.helpers.trust import PATIENCE_S, TrustFleet, Watch, engine_option

N_BLOCKS = 20
FIRST = 1000
PROMPT = list(range(FIRST, FIRST + N_BLOCKS * BLOCK_SIZE))
#: The engine's names of the prompt's blocks.
HELD = [FIRST * 1000 + n for n in range(N_BLOCKS)]
EVICT = ["BlockRemoved", HELD, "GPU"]

PLACEHOLDER = offload_placeholder(HELD[0])
PARTIAL = ["BlockStored", [7], HELD[-1], [1] * 8, 8, None, "GPU"]
MASKED = [
    "BlockStored",
    [7],
    HELD[-1],
    [1] * 3 * BLOCK_SIZE,
    BLOCK_SIZE,
    None,
    "GPU",
    None,
    None,
    0,
    "sliding_window",
    48,
]


def after(fleet: TrustFleet, *events: Any, payload: bytes | None = None) -> tuple[dict[str, Any], Watch]:
    """Answer for a prompt that an engine has stored, after one more batch, which the engine publishes last.

    Returns the answer as soon as it differs from the first one, and all answers of the next moments.
    """
    model, worker_id = fleet.model(), fleet.worker_id()
    with EngineDouble(model=model) as engine:
        engine.store(FIRST, N_BLOCKS)
        fleet.bridge(engine_option(worker_id, engine))
        first = fleet.wait_answer(
            model, PROMPT, lambda found: found["overlap_blocks"] == N_BLOCKS and found["mode"] == "exact", "the blocks"
        )
        if payload is None:
            engine.publish(*events)
        else:
            engine.send(payload)

        def differs(found: dict[str, Any]) -> bool:
            return (found["overlap_blocks"], found["mode"]) != (first["overlap_blocks"], first["mode"])

        answer = fleet.wait_answer(model, PROMPT, differs, "another answer")
        with fleet.watching(model, PROMPT) as watch:
            wait_for(lambda: len(watch.samples) >= 20, PATIENCE_S, "20 answers")
        return answer, watch


def test_evictions_next_to_an_offload_placeholder_are_applied(fleet: TrustFleet) -> None:
    """vLLM's placeholder names a block that a lower tier holds now; it may stand for a chunk of several."""
    answer, watch = after(fleet, PLACEHOLDER, EVICT)
    assert (answer["overlap_blocks"], answer["mode"]) == (1, "approximate")
    assert not watch.wrong_while_exact(1)


def test_evictions_next_to_a_masked_group_are_applied(fleet: TrustFleet) -> None:
    """An event with fewer hashes than its tokens have blocks does not say which blocks it means."""
    answer, watch = after(fleet, MASKED, EVICT)
    assert (answer["overlap_blocks"], answer["mode"]) == (0, "approximate")
    assert not watch.wrong_while_exact(0)


def test_evictions_next_to_a_partial_block_are_applied(fleet: TrustFleet) -> None:
    """The beginning of a block is no block of a prefix, so that the answer is exact."""
    answer, watch = after(fleet, PARTIAL, EVICT)
    assert (answer["overlap_blocks"], answer["mode"]) == (0, "exact")
    assert not watch.wrong_while_exact(0)


def test_an_event_of_an_unknown_type_degrades_its_rank(fleet: TrustFleet) -> None:
    """It may have removed blocks; the rest of its batch is applied."""
    answer, watch = after(fleet, ["BlockMoved", HELD], ["BlockRemoved", HELD[10:], "GPU"])
    assert (answer["overlap_blocks"], answer["mode"], answer["degraded_because"]) == (10, "degraded", "events_lost")
    assert {sample.mode for sample in watch.samples} == {"degraded"}


def test_a_removal_with_an_unusable_field_removes_the_blocks_that_it_names(fleet: TrustFleet) -> None:
    """From every tier, so that the rank may hold more than is reported."""
    answer, watch = after(fleet, ["BlockRemoved", HELD, ["GPU"]])
    assert (answer["overlap_blocks"], answer["mode"]) == (0, "approximate")
    assert not watch.wrong_while_exact(0)


def test_a_payload_that_cannot_be_read_degrades_its_rank_at_once(fleet: TrustFleet) -> None:
    """Also if it is the last batch before the engine falls idle."""
    answer, watch = after(fleet, payload=b"\xc1")
    assert (answer["mode"], answer["degraded_because"]) == ("degraded", "events_lost")
    assert {sample.mode for sample in watch.samples} == {"degraded"}


def test_blocks_hashed_with_the_tokens_after_them_are_not_exact(fleet: TrustFleet) -> None:
    """With an EAGLE drafter, a prompt that continues differently does not match the last block that it shares."""
    model, worker_id = fleet.model(), fleet.worker_id()
    event = {
        "type": "BlockStored",
        "block_hashes": HELD,
        "parent_block_hash": None,
        "token_ids": PROMPT,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "lookahead_token_ids": [[PROMPT[at] if at < len(PROMPT) else 7] for at in range(16, len(PROMPT) + 1, 16)],
    }
    continued = [*PROMPT, 8, *PROMPT]
    with EngineDouble(model=model) as engine:
        engine.publish(event)
        fleet.bridge(engine_option(worker_id, engine))
        # The engine's cache has N_BLOCKS - 1 blocks for this prompt.
        fleet.wait_answer(
            model,
            continued,
            lambda found: (found["overlap_blocks"], found["mode"]) == (N_BLOCKS, "approximate"),
            "the blocks",
        )
        with fleet.watching(model, continued) as watch:
            wait_for(lambda: len(watch.samples) >= 20, PATIENCE_S, "20 answers")
        assert not watch.wrong_while_exact(N_BLOCKS - 1)


def test_nothing_of_a_prompt_is_on_kafka_or_in_a_log(fleet: TrustFleet) -> None:
    """Payloads of every kind go wrong in the bridge, and two reach an agent. Every topic and log is searched."""
    model, worker_id, well_id = fleet.model(), fleet.worker_id(), fleet.worker_id()
    rng = random.Random(5)
    secret = [rng.randrange(1 << 31, 1 << 32) for _ in range(2 * BLOCK_SIZE)]
    packed = b"".join(struct.pack("<I", token) for token in secret)
    text = "the prompt of a user"
    store = ["BlockStored", [1 << 40, 1 << 41], None, secret, BLOCK_SIZE, None, "GPU"]
    with EngineDouble(model=model) as engine, EngineDouble(model=model) as well:
        well.publish(store)
        for number in range(3):
            engine.publish([*store[:3], secret, 2 * BLOCK_SIZE << number, None, "GPU"])  # another block size
        engine.publish(store)
        for event in (
            ["BlockStored", secret, None, secret[:-1], BLOCK_SIZE, None, "GPU"],
            ["BlockStored", [1], None, [secret], BLOCK_SIZE, None, "GPU", text, [[text, *secret]], secret[0]],
            ["BlockRemoved", [secret], secret],
            ["BlockRemoved", [1 << 42], text],
            [text, *secret],
            {"type": "BlockStored", "block_hashes": [1], "token_ids": packed, "prompt": text, "moe": {text: secret}},
            secret[0],
            secret,
            text,
            packed,
        ):
            engine.publish(event)
        for payload in (packed, text.encode(), b"\x93" + packed):
            engine.send(payload)
        child = fleet.bridge(engine_option(worker_id, engine), engine_option(well_id, well))

        def applied() -> bool:
            ranks = {rank["worker_id"]: rank["sequence"] for rank in fleet.api.get("/state")["ranks"]}
            return (ranks.get(worker_id), ranks.get(well_id)) == (engine.sequence, well.sequence)

        wait_for(applied, PATIENCE_S, "the last batches")
        asked = {"model": model, "token_ids": secret, "allowed_worker_ids": [well_id]}
        booked = fleet.api.route(**asked, request_id=f"secret-{model}")
        assert (booked["worker_id"], booked["overlap_blocks"]) == (well_id, 2)
        settings = fleet.stack.settings
        kafka = producer(settings)
        home = partition_of(worker_id, settings.partitions)
        for key, value in ((worker_key(worker_id), packed), (text.encode(), packed + text.encode())):
            kafka.produce(
                topics(settings).kv_events.name, key=key, value=value, partition=home, headers=[("x", packed)]
            )
        assert kafka.flush(PATIENCE_S) == 0
        wait_for(lambda: n_dead_letters(settings, b"not_avro") == 2, PATIENCE_S, "two dead letters of an agent")
    own = topics(settings).kv_events.name
    for topic, content in everything(settings):
        if topic != own or packed not in content:  # what this test wrote there itself
            assert_nothing_of(secret, text, content, topic)
    for path in (child.log_path, fleet.worker.child.log_path):
        assert_nothing_of(secret, text, path.read_bytes(), str(path))


def assert_nothing_of(secret: list[int], text: str, content: bytes, where: str) -> None:
    """Check that neither a token as text, nor two neighbouring tokens in binary, nor the text is in some bytes."""
    assert text.encode() not in content, where
    for token, after in itertools.pairwise(secret):
        assert str(token).encode() not in content, where
        for form in ("<II", ">II"):
            assert struct.pack(form, token, after) not in content, where
        assert b"\xce" + struct.pack(">I", token) + b"\xce" not in content, where


def n_dead_letters(settings: Settings, reason: bytes) -> int:
    name = topics(settings).dead_letters.name
    return sum(
        topic == name and b"kvstreams.reason" in content and reason in content
        for topic, content in everything(settings)
    )


def everything(settings: Settings) -> Iterator[tuple[str, bytes]]:
    """Every record of every topic of the scope: the topic's name; and key, value and headers as one string."""
    consumer = reader(settings, **{"isolation.level": "read_uncommitted"})
    try:
        where = [
            TopicPartition(spec.name, partition, OFFSET_BEGINNING)
            for spec in topics(settings).all()
            for partition in range(spec.partitions)
        ]
        consumer.assign(where)
        left = {(each.topic, each.partition) for each in where}
        while left:
            for message in consumer.consume(1000, 1.0):
                error = message.error()
                if error is None:
                    pairs: Any = message.headers() or []
                    parts = [
                        message.key(),
                        message.value(),
                        *(part for name, value in pairs for part in (name.encode(), value)),
                    ]
                    yield message.topic() or "", b"|".join(part or b"" for part in parts)
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    left.discard((message.topic() or "", message.partition() or 0))  # repeated when it has grown
    finally:
        consumer.close()
