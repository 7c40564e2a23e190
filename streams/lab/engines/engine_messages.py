"""What goes into an engine model and what comes out of it: requests, outputs and statistics (pure).

What lives here: values only, and the hashing of a prompt. What must not: rules (model, block_cache), and wire formats
(openai, event_publisher).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from streams.core.hashing import hash_seed, local_hashes, sequence_hashes
from streams.core.ids import EngineHash, HashArray, SequenceHash
from streams.lab.engines.synthetic_tokens import BYTES_PER_TOKEN, answer_tokens

#: Where blocks are: on the GPU, or in a shared pool whose blocks a running request reads in place.
Medium = Literal["GPU", "SHARED"]


class PromptHashes(NamedTuple):
    """Hashes of a prompt's full blocks. local, sequence: uint64[n_tokens // block_size]."""

    local: HashArray
    sequence: HashArray


def hash_prompt(tokens: bytes, block_size: int, lora_name: str | None = None) -> PromptHashes:
    """Hash a packed prompt once, so that several engines and policies can share it through `ModelRequest.hashes`.

    tokens: u32 LE. Source: docs/architecture.md, Hashes.
    """
    local = local_hashes(tokens, block_size, hash_seed(lora_name))
    return PromptHashes(local, sequence_hashes(local))


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for one completion.

    tokens: the prompt as u32 LE, at least one token. n_output_tokens: exact length of the answer, at least 1.
    output_seed: u64; together with the position it determines each token of the answer. answer: these tokens as u32 LE
    [n_output_tokens], if the caller has chosen them otherwise. hashes: `hash_prompt` of this
    prompt with the engine's block size and this adapter, if the caller has it; otherwise computed by `submit`.
    reports_reuse: whether the cached blocks that the request reuses are reported (`KvReused`). n_transferred_blocks:
    leading blocks of the prompt that another engine has computed, and that are transferred from it.
    """

    request_id: str
    tokens: bytes
    n_output_tokens: int
    output_seed: int = 0
    lora_name: str | None = None
    hashes: PromptHashes | None = None
    reports_reuse: bool = False
    answer: bytes | None = None
    n_transferred_blocks: int = 0

    def answered(self, start: int, end: int) -> bytes:
        """Return the answer's tokens start..end as u32 LE."""
        if self.answer is not None:
            return self.answer[start * BYTES_PER_TOKEN : end * BYTES_PER_TOKEN]
        return answer_tokens(self.output_seed, len(self.tokens) // BYTES_PER_TOKEN + start, end - start)


@dataclass(frozen=True, slots=True)
class KvStored:
    """Consecutive full blocks can now be found in the cache.

    parent: engine hash of the preceding block, None at the root. engine, local, sequence: uint64[n].
    tokens: u32 LE of the n blocks. start: position of the first block on its chain, in blocks. generated: whether they
    filled while an answer was generated, and are not all of a prompt. medium: of blocks that a request reads in place,
    SHARED; nothing has changed in the cache then, and the blocks count until their removal. before: sequence hash of
    the preceding block, None at the root.
    """

    at_ms: float
    parent: EngineHash | None
    engine: HashArray
    local: HashArray
    sequence: HashArray
    tokens: bytes
    start: int
    lora_name: str | None
    generated: bool = False
    medium: Medium = "GPU"
    before: SequenceHash | None = None


@dataclass(frozen=True, slots=True)
class KvReused:
    """A request starts and reuses the cached blocks at the beginning of its prompt. Nothing has changed in the cache.

    engine: uint64[n], n >= 1. tokens: u32 LE of the n blocks.
    """

    at_ms: float
    engine: HashArray
    tokens: bytes
    lora_name: str | None


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Hashed blocks were evicted. engine: uint64[n], one entry per physical copy, in the order of eviction.

    medium: SHARED if a request has ended that read them in place.
    """

    at_ms: float
    engine: HashArray
    medium: Medium = "GPU"


@dataclass(frozen=True, slots=True)
class KvCleared:
    """The cache was reset and holds no blocks."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prefill ended.

    ttft_ms: since the arrival. cached_tokens: prompt tokens that were not computed. pooled_tokens: those of the cached
    tokens that were loaded from the shared pool.
    """

    request_id: str
    at_ms: float
    ttft_ms: float
    cached_tokens: int
    prompt_tokens: int
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token is out and the blocks were released. latency_ms: since the arrival; others as in FirstToken."""

    request_id: str
    at_ms: float
    n_output_tokens: int
    ttft_ms: float
    latency_ms: float
    cached_tokens: int
    prompt_tokens: int
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolAsked:
    """A request starts and asks how many of these blocks the shared pool can load; it waits for `pool_answered`.

    keys: sequence hashes, beginning with the first block that the cache does not hold; at least one.
    """

    request_id: str
    at_ms: float
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request can never fit in this engine's cache. It changed nothing."""

    request_id: str
    at_ms: float
    reason: str


KvOutput: TypeAlias = KvStored | KvReused | KvRemoved | KvCleared
RequestOutput: TypeAlias = FirstToken | Finished | Rejected
Output: TypeAlias = KvOutput | RequestOutput | PoolAsked


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters with vLLM's meaning.

    n_running: prefilling and decoding. n_waiting: submitted, not started. n_blocks_used: held by a running request.
    n_blocks_cached: can be found, held by none. queried_tokens: prompt tokens of all started requests. Of these,
    hit_tokens were cached and loaded_tokens came from the shared pool; the others are computed. pool_queried_tokens:
    tokens that the shared pool was asked for. n_blocks_used_max: most blocks used at a time since the start.
    in_place_tokens: of loaded_tokens, those that were read in the pool and took no blocks. generated_tokens: of
    finished requests. n_finished: how many those are.
    """

    n_running: int
    n_waiting: int
    n_blocks_used: int
    n_blocks_cached: int
    n_blocks_total: int
    hit_tokens: int
    queried_tokens: int
    loaded_tokens: int = 0
    pool_queried_tokens: int = 0
    n_blocks_used_max: int = 0
    in_place_tokens: int = 0
    generated_tokens: int = 0
    n_finished: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that a prefill computed, or is computing."""
        return self.queried_tokens - self.hit_tokens - self.loaded_tokens
