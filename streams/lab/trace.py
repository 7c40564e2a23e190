"""Workloads: reading, writing and generating Mooncake traces, and synthetic tokens for them (pure).

What lives here: the format of a trace, tokens for its block ids, a generator of chat traffic, and an upper bound on
what any cache could reuse. What must not: files, clocks, hidden randomness. Functions take and return lines of text,
and take the random generator as an argument.

The format is that of kvcache-ai/Mooncake, FAST'25: one JSON object per line, `timestamp` in ms, and in `hash_ids` one
id for each 512 tokens of the prompt, the last of which may be partial. Equal ids mean equal content. Since the ids
identify prefixes, equal ids also mean equal positions.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from streams.errors import InvalidRequest
from streams.lab.engines.synthetic_tokens import mix64

#: Tokens that one hash id stands for in Mooncake's published traces.
TRACE_BLOCK_TOKENS = 512

#: A Llama-3-sized vocabulary (128,256) rounded up, so that tokens look like a real tokenizer's on the wire.
TOKEN_VALUES_DISTINCT = 1 << 17

#: A prompt of 10 million tokens, longer than any engine accepts. The longest line of Mooncake's real trace is 2 kB.
HASH_IDS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. input_length, output_length: tokens. hash_ids: one per block; the last may be partial."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The parameters of a generated chat workload; lengths are in tokens.

    With the defaults, 400 requests arrive within about 30 s and have about 5,100 tokens each. One infinite cache reuses
    about 57 % of them; 8 default engines reuse 46 % with a simple kv routing and 25 % with round robin (means over four
    seeds).
    """

    rate_per_s: float = 14.0  # 8 default engines then prefill 50 % of the time with kv routing, 70 % with round robin
    n_system_prompts: int = 16  # applications behind one fleet
    system_prompt_skew: float = 1.0  # Zipf exponent: the first of 16 applications has 30 % of the conversations
    system_prompt_blocks_min: int = 1
    system_prompt_blocks_max: int = 4  # 2,048 tokens: instructions, tools and examples
    continue_share: float = 0.66  # share of arrivals that continue a ready conversation: about 3 turns in each
    first_text_mean: int = 3000  # text that a user pastes in the first turn; log-normal
    next_text_mean: int = 900
    text_sigma: float = 0.9  # of the log-normal: the longest of 100 texts is about 8 times the median
    output_mean: int = 240  # the real conversation trace has 343
    output_sigma: float = 0.7
    output_max: int = 2_000
    think_ms_mean: float = 4_000.0  # reading time after an answer; short, so that a run of 30 s has several turns
    answer_ms_per_token: float = 20.0  # a user reads an answer only once an engine has decoded it
    input_max: int = 24_000  # a conversation ends before its context exceeds this


def parse_trace(lines: Iterable[str], limit: int | None = None) -> list[TraceRequest]:
    """Read Mooncake lines, at most `limit` requests; blank lines are skipped.

    Raises InvalidRequest, which contains the number of the line, counted from 1.
    """
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        requests.append(_parse_line(number, line))
    return requests


def dump(requests: Iterable[TraceRequest]) -> Iterator[str]:
    """Write Mooncake lines without line ends; `parse_trace` reads the same requests back."""
    for request in requests:
        timestamp: float = request.timestamp_ms
        yield json.dumps(
            {
                "timestamp": int(timestamp) if timestamp == int(timestamp) else timestamp,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(request.hash_ids),
            }
        )


def tokens_for(request: TraceRequest, trace_block_tokens: int = TRACE_BLOCK_TOKENS) -> bytes:
    """Return synthetic tokens for a prompt, u32 LE [input_length].

    Each token is a pure function of its block's id and its position in the block. Two whole blocks are equal if and
    only if their ids are equal; a partial block is the beginning of the whole block with its id.
    """
    ids = np.array(request.hash_ids, dtype=np.uint64)
    # Outer sum of each block's first counter and the offsets in a block: 512 distinct counters per id.
    firsts, offsets = ids * np.uint64(trace_block_tokens), np.arange(trace_block_tokens, dtype=np.uint64)
    counters: npt.NDArray[np.uint64] = np.add.outer(firsts, offsets)
    mixed = mix64(counters.ravel()[: request.input_length])
    return (mixed % np.uint64(TOKEN_VALUES_DISTINCT)).astype("<u4").tobytes()


def infinite_cache_hit_share(
    requests: Sequence[TraceRequest], block_size: int, trace_block_tokens: int = TRACE_BLOCK_TOKENS
) -> float:
    """Return the share of all prompt tokens that one infinite cache would reuse: the upper bound for every policy.

    Tokens are counted as in an engine: in full blocks of `block_size` tokens, at most (n - 1) // block_size blocks of a
    prompt. Each request finds the prompts of all earlier requests, but no answers. Without requests the share is 0.0.
    """
    n_seen: dict[int, int] = {}  # id -> full engine blocks from the prompt's start to the end of the id's seen tokens
    n_tokens = n_hit_tokens = 0
    for request in requests:
        n_full = request.input_length // block_size
        ends = [min((index + 1) * trace_block_tokens // block_size, n_full) for index in range(len(request.hash_ids))]
        n_hit = 0
        for hash_id, end in zip(request.hash_ids, ends, strict=True):
            # Equal ids have equal prefixes, so an engine block that ends inside a seen id was seen with all before it.
            seen = n_seen.get(hash_id)
            if seen is None:
                break
            n_hit = min(seen, end)
            if n_hit < end:
                break
        n_tokens += request.input_length
        n_hit_tokens += min(n_hit, (request.input_length - 1) // block_size) * block_size
        for hash_id, end in zip(request.hash_ids, ends, strict=True):
            n_seen[hash_id] = max(n_seen.get(hash_id, 0), end)
    return n_hit_tokens / n_tokens if n_tokens else 0.0


def generate(n_requests: int, rng: np.random.Generator, shape: ChatShape | None = None) -> list[TraceRequest]:
    """Generate chat traffic: conversations of several turns that begin with one of a few shared system prompts.

    Arrivals are Poisson. Each arrival is the next turn of the conversation that has been ready longest, which means
    that its user has read the last answer. If none is ready, and sometimes at random, it begins a new one. A turn's
    prompt is the previous prompt, its answer, and new text. A block that this completes gets a new id, as in the
    published traces. The same state of `rng` gives the same trace. Returns requests by time, the first at 0.
    """
    shape = shape or ChatShape()
    ids = count()
    systems = [
        [next(ids) for _ in range(n_blocks)]
        for n_blocks in rng.integers(
            shape.system_prompt_blocks_min, shape.system_prompt_blocks_max + 1, shape.n_system_prompts
        ).tolist()
    ]
    weights = 1.0 / np.arange(1, shape.n_system_prompts + 1) ** shape.system_prompt_skew
    choice_of_system = (weights / weights.sum()).cumsum()
    thinking: list[tuple[float, int, int, list[int]]] = []  # heap: ready at, tie-break, context tokens, whole-block ids
    requests: list[TraceRequest] = []
    now_ms = 0.0
    for turn in range(n_requests):
        if thinking and thinking[0][0] <= now_ms and rng.random() < shape.continue_share:
            _, _, context, whole = heapq.heappop(thinking)
            length = context + _log_normal(rng, shape.next_text_mean, shape.text_sigma)
        else:
            system = min(int(np.searchsorted(choice_of_system, rng.random())), shape.n_system_prompts - 1)
            whole = list(systems[system])
            length = len(whole) * TRACE_BLOCK_TOKENS + _log_normal(rng, shape.first_text_mean, shape.text_sigma)
        length = min(length, shape.input_max)
        whole = whole + [next(ids) for _ in range(length // TRACE_BLOCK_TOKENS - len(whole))]
        partial = [next(ids)] if length % TRACE_BLOCK_TOKENS else []
        output = min(_log_normal(rng, shape.output_mean, shape.output_sigma), shape.output_max)
        requests.append(TraceRequest(round(now_ms), length, output, (*whole, *partial)))
        if length + output < shape.input_max:
            ready_ms = now_ms + output * shape.answer_ms_per_token + rng.exponential(shape.think_ms_mean)
            heapq.heappush(thinking, (ready_ms, turn, length + output, whole))
        now_ms += rng.exponential(1000.0 / shape.rate_per_s)
    return requests


def _log_normal(rng: np.random.Generator, mean: int, sigma: float) -> int:
    """Draw a length of at least 1 whose distribution has this mean. sigma: of the logarithm."""
    return max(1, round(float(rng.lognormal(np.log(mean) - sigma * sigma / 2.0, sigma))))


def _parse_line(number: int, line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise InvalidRequest(f"trace line {number} is not JSON: {exc.msg}", line=number) from exc
    if not isinstance(row, dict):
        raise InvalidRequest(f"trace line {number} is not a JSON object", line=number)
    timestamp = row.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < float("inf"):
        raise InvalidRequest(f"trace line {number}: timestamp is {timestamp!r}, not milliseconds", line=number)
    lengths = {name: row.get(name) for name in ("input_length", "output_length")}
    for name, length in lengths.items():
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise InvalidRequest(f"trace line {number}: {name} is {length!r}, not a number of tokens", line=number)
    hash_ids = row.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 53 for i in hash_ids
    ):
        raise InvalidRequest(f"trace line {number}: hash_ids is not a list of integers from 0 to 2^53 - 1", line=number)
    expected = -(-row["input_length"] // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != expected or expected > HASH_IDS_MAX:
        raise InvalidRequest(
            f"trace line {number}: {len(hash_ids)} hash_ids for {row['input_length']} tokens, expected {expected}"
            f" (at most {HASH_IDS_MAX})",
            line=number,
        )
    return TraceRequest(timestamp, row["input_length"], row["output_length"], tuple(hash_ids))
