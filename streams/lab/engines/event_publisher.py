"""KV events as a simulated engine publishes them: wire forms of three engines, and the ZMQ sockets.

What lives here: the form of each event (`WireForm`, pure), deliberate damage (`damaged`), and vLLM's ZmqEventPublisher
as seen from outside (`EventPublisher`: PUB socket, sequence numbers, replay buffer), which SGLang's resembles. What
must not: which events there are (model, pool).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, assert_never, get_args

import msgspec
import numpy as np
import xxhash
import zmq
import zmq.asyncio

from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import MoeLabels
from streams.core.ids import EngineHash
from streams.errors import SettingsError
from streams.lab.engines.engine_messages import KvCleared, KvOutput, KvRemoved, KvReused, KvStored
from streams.lab.engines.pool import CxlChanged
from streams.lab.engines.synthetic_tokens import unpack_tokens

log = logging.getLogger(__name__)

HashDialect = Literal["int", "bytes32"]
EventDialect = Literal["array", "map", "map_batch", "sglang_array", "sglang_map", "trtllm"]
KvCacheReportMode = Literal["incremental", "full"]
#: Events that an engine publishes about its blocks.
BlockEvent: TypeAlias = KvOutput | CxlChanged

#: vLLM's `buffer_steps` default.
REPLAY_BUFFER_BATCHES = 10_000
#: vLLM's `hwm` default. Beyond it, PUB drops batches for a subscriber that does not read.
PUB_HWM_BATCHES = 100_000
#: The sequence number that ends a replay: -1.
REPLAY_END = (-1).to_bytes(8, "big", signed=True)
#: vLLM serves replays from a ROUTER to a REQ-like client: identity, empty delimiter, sequence.
REPLAY_REQUEST_FRAMES = 3
#: Labels of experts travel as 32-bit integers.
LABEL_MAX = (1 << 31) - 1
#: The engines' name of the device tier.
MEDIUM = "GPU"
#: Tokens of TensorRT-LLM's attention window, here that of a model with full attention.
TRTLLM_WINDOW = 131_072


@dataclass(frozen=True, slots=True)
class WireForm:
    """The form of an engine's events.

    hash_dialect: block hashes as u64, or as 32 bytes that end in the u64, big-endian; SGLang's are always signed 64-bit
    integers, TensorRT-LLM's always u64. event_dialect: `array` for events as tagged arrays; `map` for events with field
    names; `map_batch` if the batch has field names too, as in vLLM's main branch; `sglang_array` and `sglang_map` as
    SGLang wrote them until 0.5.17 and writes them since 0.5.20; `trtllm` for TensorRT-LLM's JSON. page_size: tokens of
    a page of SGLang and TensorRT-LLM, which divides the block size; 0 for whole blocks. moe: labels of every stored
    block, which only vLLM's events with field names can carry. accessible_workers: those that can read the blocks that
    this engine writes to a shared pool; () for all members of the pool. Raises SettingsError.
    """

    block_size: int
    dp_rank: int = 0
    hash_dialect: HashDialect = "int"
    event_dialect: EventDialect = "array"
    lora_names: tuple[str, ...] = ()
    moe: MoeLabels | None = None
    page_size: int = 0
    accessible_workers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.hash_dialect not in get_args(HashDialect):
            raise SettingsError(f"hash_dialect is {self.hash_dialect!r}, not one of {get_args(HashDialect)}")
        if self.event_dialect not in get_args(EventDialect):
            raise SettingsError(f"event_dialect is {self.event_dialect!r}, not one of {get_args(EventDialect)}")
        if self.moe is not None and self.event_dialect not in ("map", "map_batch"):
            raise SettingsError("events of this dialect cannot carry labels", remedy="Set event_dialect to map")
        if self.page_size and (self.block_size % self.page_size or not self.is_paged):
            raise SettingsError(
                f"page_size is {self.page_size}; it must divide {self.block_size}, and vLLM has no pages"
            )
        for name, label in () if self.moe is None else asdict(self.moe).items():
            if label is not None and not 0 <= label <= LABEL_MAX:
                raise SettingsError(f"{name} is {label}; it must be 0 to {LABEL_MAX}")

    @property
    def is_paged(self) -> bool:
        return self.event_dialect in ("sglang_array", "sglang_map", "trtllm")

    def events(self, event: BlockEvent, event_id: int = 0) -> list[Any]:
        """Return the wire's events for one event of the model, in order. event_id: of a CXL transition."""
        if self.is_paged:
            return self._paged_events(event)
        match event:
            case KvStored():
                return [self._stored(event, event.parent)]
            case KvReused():
                # As vLLM does it: the event is that of a store, and the reused prefix always begins at the root.
                return [self._stored(event, None)]
            case KvRemoved():
                # One event per block, as vLLM's block pool emits them.
                hashes = self._hashes(event.engine.tolist())
                medium = event.medium
                return [self._tagged("BlockRemoved", {"block_hashes": [name], "medium": medium}) for name in hashes]
            case KvCleared():
                return [self._tagged("AllBlocksCleared", {})]
            case CxlChanged():
                moved: dict[str, Any] = {
                    "event_id": event_id,
                    "block_hashes": self._hashes(event.engine.tolist()),
                    "new_state": event.state.value,
                    "pool_id": event.pool_id,
                }
                # Later states keep the workers that this one names.
                if self.accessible_workers and event.state is CxlMemoryState.IN_TRANSIT:
                    moved["accessible_workers"] = list(self.accessible_workers)
                return [self._tagged("CxlStateTransition", moved)]
            case _:
                assert_never(event)

    def encode(self, at_s: float, events: Sequence[Any]) -> bytes:
        """Return the payload of a batch that carries these wire events. at_s: Unix time."""
        batch = self.batch(at_s, events)
        return msgspec.json.encode(batch) if self.event_dialect == "trtllm" else msgspec.msgpack.encode(batch)

    def _paged_events(self, event: BlockEvent) -> list[Any]:
        """Return the events of SGLang or TensorRT-LLM, whose pages may be smaller than the model's blocks.

        They report no reuse, and no copies of a block (see CopyCounter). They read no blocks in place.
        """
        match event:
            case KvStored():
                return [self._paged_store(event)]
            case KvReused():
                return []  # SGLang repeats a store when it inserts a page again, which changes nothing either
            case KvRemoved():
                names = [name for block in event.engine.tolist() for name in self._page_names(block)]
                if self.event_dialect == "trtllm":
                    return [self._numbered({"type": "removed", "block_hashes": names})]
                return [self._tagged("BlockRemoved", {"block_hashes": names, "medium": MEDIUM})]
            case KvCleared():
                if self.event_dialect == "trtllm":
                    return [self._numbered({"type": "created", "num_blocks_per_cache_level": [0, 0]})]
                return [self._tagged("AllBlocksCleared", {})]
            case CxlChanged():
                return []  # neither engine reports blocks in CXL memory
            case _:
                assert_never(event)

    def _paged_store(self, event: KvStored) -> Any:
        names = [name for block in event.engine.tolist() for name in self._page_names(block)]
        parent = None if event.parent is None else self._page_names(event.parent)[-1]
        tokens, size = unpack_tokens(event.tokens), self.page_size or self.block_size
        if self.event_dialect == "trtllm":
            lora_id = None if event.lora_name is None else self.lora_names.index(event.lora_name) + 1
            blocks = [
                {
                    "type": "stored_block",
                    "block_hash": name,
                    "tokens": [
                        {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                        for token in tokens[index * size : (index + 1) * size]
                    ],
                    "lora_id": lora_id,
                    "cache_level": 0,
                    "priority": 35,
                }
                for index, name in enumerate(names)
            ]
            return self._numbered({"type": "stored", "parent_hash": parent, "blocks": blocks})
        stored: dict[str, Any] = {
            "block_hashes": names,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": size,
            "lora_id": None,
            "medium": MEDIUM,
        }
        if event.lora_name is not None and self.event_dialect == "sglang_map":
            stored["lora_name"] = event.lora_name
        return self._tagged("BlockStored", stored)

    def _page_names(self, block: int) -> list[int]:
        """Return the names of a block's pages; the last one is the block's own. Signed for SGLang."""
        n_pages = self.block_size // (self.page_size or self.block_size)
        names = [xxhash.xxh3_64_intdigest(block.to_bytes(8, "big"), page) for page in range(1, n_pages)]
        return [self._signed(name) for name in (*names, block)]

    def _signed(self, name: int) -> int:
        return name - (1 << 64) if name >> 63 and self.event_dialect != "trtllm" else name

    def _numbered(self, data: dict[str, Any]) -> dict[str, Any]:
        return {"event_id": 0, "data": data, "window_size": TRTLLM_WINDOW, "attention_dp_rank": self.dp_rank}

    def batch(self, at_s: float, events: Sequence[Any]) -> Any:
        """Return the batch that carries these wire events. at_s: Unix time."""
        if self.event_dialect == "trtllm":
            return events
        if self.event_dialect == "map_batch":
            return {"ts": at_s, "events": events, "data_parallel_rank": self.dp_rank}
        return [at_s, events, self.dp_rank]

    def _stored(self, event: KvStored | KvReused, parent: EngineHash | None) -> Any:
        name = event.lora_name
        stored: dict[str, Any] = {
            "block_hashes": self._hashes(event.engine.tolist()),
            "parent_block_hash": None if parent is None else self._hashes([parent])[0],
            "token_ids": unpack_tokens(event.tokens),
            "block_size": self.block_size,
            "lora_id": None if name is None else self.lora_names.index(name) + 1,
            "medium": event.medium if isinstance(event, KvStored) else MEDIUM,
            "lora_name": name,
        }
        if self.moe is not None:
            stored["moe"] = asdict(self.moe)
        return self._tagged("BlockStored", stored)

    def _tagged(self, tag: str, fields: dict[str, Any]) -> Any:
        return [tag, *fields.values()] if self.event_dialect.endswith("array") else {"type": tag, **fields}

    def _hashes(self, hashes: list[int]) -> list[int] | list[bytes]:
        """Return engine hashes in the dialect. The last 8 of 32 bytes are the u64 (docs/architecture.md)."""
        if self.hash_dialect == "int":
            return hashes
        raw = [value.to_bytes(8, "big") for value in hashes]
        return [xxhash.xxh3_128_digest(tail) + xxhash.xxh3_64_digest(tail) + tail for tail in raw]


class CopyCounter:
    """Counts the copies of blocks, for engines that report a block's removal only when the last copy is gone."""

    def __init__(self) -> None:
        self._copies: Counter[int] = Counter()

    def reported(self, event: BlockEvent) -> BlockEvent | None:
        """Return the event as such an engine reports it, None if it does not."""
        match event:
            case KvStored():
                self._copies.update(event.engine.tolist())
            case KvRemoved():
                self._copies.subtract(event.engine.tolist())
                gone = [name for name in dict.fromkeys(event.engine.tolist()) if self._copies[name] <= 0]
                for name in gone:
                    del self._copies[name]
                return replace(event, engine=np.array(gone, dtype=np.uint64)) if gone else None
            case KvCleared():
                self._copies.clear()
            case _:
                pass
        return event


def damaged(payload: bytes, number: int) -> bytes:
    """Return a payload with one byte changed, cut off or inserted, which depends on its number."""
    offset = xxhash.xxh3_64_intdigest(payload, number) % len(payload)
    match number % 3:
        case 0:
            return payload[:offset] + bytes([payload[offset] ^ 0xFF]) + payload[offset + 1 :]
        case 1:
            return payload[:offset]
        case _:
            return payload[:offset] + b"\xc1" + payload[offset:]


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """How an engine publishes its events. Ports of 0 are chosen by the system.

    damage_every: every how many batches one is damaged; 0 for none.
    """

    events_port: int = 0
    replay_port: int = 0
    topic: str = ""
    replay_buffer_batches: int = REPLAY_BUFFER_BATCHES
    damage_every: int = 0


class EventPublisher:
    """vLLM's ZmqEventPublisher as seen from outside. Owns the ZMQ context, the sockets and the replay buffer.

    Raises SettingsError if a socket cannot be bound.
    """

    def __init__(self, form: WireForm, host: str, config: PublisherConfig) -> None:
        self._form = form
        self._damage_every = config.damage_every
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.replay_buffer_batches)
        self._n_transitions = 0
        self._copies = CopyCounter() if form.is_paged else None
        self.next_sequence = 0
        self._context = zmq.Context()
        # Not an asyncio socket: sending to PUB never blocks, and without an await no batch can overtake another.
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, PUB_HWM_BATCHES)
        self._replay = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
        # ROUTER silently drops what exceeds its mark, 1,000 by default. A replay is the whole buffer and the end.
        self._replay.setsockopt(zmq.SNDHWM, config.replay_buffer_batches + 1)
        try:
            self.events_endpoint = _bind(self._pub, host, config.events_port)
            self.replay_endpoint = _bind(self._replay, host, config.replay_port)
        except zmq.ZMQError as exc:
            self.close()
            raise SettingsError(f"cannot bind a ZMQ socket on {host}: {exc}") from exc

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Send events as one batch and keep it for replay; does nothing without events."""
        if not events:
            return
        wire_events: list[Any] = []
        for event in events:
            self._n_transitions += isinstance(event, CxlChanged)
            reported = event if self._copies is None else self._copies.reported(event)
            if reported is not None:
                wire_events += self._form.events(reported, self._n_transitions)
        if not wire_events:
            return
        payload = self._form.encode(time.time(), wire_events)
        sequence = self.next_sequence
        if self._damage_every and (sequence + 1) % self._damage_every == 0:
            payload = damaged(payload, sequence)
        self.next_sequence += 1
        self._buffer.append((sequence, payload))
        self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != REPLAY_REQUEST_FRAMES:
                log.warning("ignored a replay request of %d frames; vLLM expects client, empty, sequence", len(frames))
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            # A copy, because batches are published while the replay is being sent.
            for sequence, payload in [kept for kept in self._buffer if kept[0] >= first]:
                await self._replay.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", REPLAY_END, b""])

    def close(self) -> None:
        """Close the sockets without waiting for unsent batches."""
        self._pub.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> str:
    socket.bind(f"tcp://{host}:{port or '*'}")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")
