"""Traffic of known shapes (pure).

What lives here: generators by name, whose parameters have defaults. What must not: hidden randomness (the seed is a
parameter) and files. The same parameters give the same workload.

The ids of a generated prompt stand for ID_TOKENS tokens each. A prompt's last id may be partial; a longer prompt that
continues it has the same id there, so that engines share every full block of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import count
from types import MappingProxyType

import numpy as np

from streams.errors import SettingsError
from streams.lab.simulation.workload import NO_REQUEST, RawRequest, Workload, build

#: Tokens of a content id.
ID_TOKENS = 512

#: Parameters by name. requests: about how many. rate: per second, for runs by time. prompt, output: mean tokens of what
#: is new in each request. prefix: tokens of a shared beginning. prefixes: how many of these there are. working_set, for
#: agents: tokens of the histories of all sessions that are alive, divided by the tokens that the fleet's caches hold
#: together. turns: mean length of a session. pause_s: mean pause between an answer and the next turn, log-normal with
#: pause_sigma, at most 60 s.
_COMMON = {"requests": 4000.0, "seed": 1.0, "rate": 20.0, "prompt": 2000.0, "output": 250.0}
_CHAT = _COMMON | {"prefix": 3000.0, "prefixes": 300.0}

#: Names of the generators and their parameters.
PARAMETERS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "uniform": _CHAT,
        "hot": _CHAT | {"prefix": 8000.0, "prefixes": 1.0},
        "cold": _COMMON | {"prompt": 6000.0, "rate": 12.0},
        "bursts": _CHAT | {"burst": 100.0},
        "agentic": {
            "requests": 6000.0,
            "seed": 1.0,
            "prompt": 1200.0,
            "prompt_sigma": 1.3,
            "output": 350.0,
            "prefix": 14000.0,
            "prefixes": 8.0,
            "turns": 40.0,
            "working_set": 0.75,
            "pause_s": 6.0,
            "pause_sigma": 1.6,
        },
    }
)

#: A history does not grow beyond this; the session ends.
_HISTORY_MAX = 120_000
_PAUSE_S_MAX = 60.0
#: What an answer takes until its user or tool sees it, for the times of a session's turns.
_ANSWER_MS_PER_TOKEN, _FIRST_TOKEN_MS = 20.0, 400.0
_SIGMA = 0.8


def generate(name: str, parameters: Mapping[str, float], block_size: int, fleet_tokens: int) -> Workload:
    """Generate the workload of this name. fleet_tokens: what the caches hold together. Raises SettingsError."""
    if name not in PARAMETERS:
        raise SettingsError(f"there is no generator {name!r}; there are {', '.join(PARAMETERS)}")
    unknown = parameters.keys() - PARAMETERS[name].keys()
    if unknown:
        known = ", ".join(PARAMETERS[name])
        raise SettingsError(f"generator {name} has no parameter {min(unknown)!r}; it has {known}")
    given = dict(PARAMETERS[name]) | dict(parameters)
    for parameter, value in given.items():
        if not (math.isfinite(value) and value > 0.0):
            raise SettingsError(f"{parameter} of generator {name} is {value}; it must be above 0")
    rng = np.random.default_rng(int(given["seed"]))
    requests = _agentic(given, rng, fleet_tokens) if name == "agentic" else _chat(name, given, rng)
    return build(name, requests, ID_TOKENS, block_size)


def _log_normal(rng: np.random.Generator, mean: float, sigma: float = _SIGMA) -> int:
    """Draw a length of at least 1 whose distribution has this mean."""
    return max(1, round(float(rng.lognormal(math.log(mean) - sigma * sigma / 2.0, sigma))))


def _chat(name: str, given: Mapping[str, float], rng: np.random.Generator) -> list[RawRequest]:
    """Single requests, of which those of one family begin alike."""
    ids = count()
    n_prefixes = int(given.get("prefixes", 0))
    n_prefix = int(given.get("prefix", 0)) // ID_TOKENS
    prefixes = [[next(ids) for _ in range(n_prefix)] for _ in range(n_prefixes)]
    requests: list[RawRequest] = []
    at_ms = 0.0
    for number in range(int(given["requests"])):
        content = list(prefixes[int(rng.integers(n_prefixes))]) if n_prefixes else []
        n_in = len(content) * ID_TOKENS + _log_normal(rng, given["prompt"])
        content += [next(ids) for _ in range(-(-n_in // ID_TOKENS) - len(content))]
        requests.append(RawRequest(at_ms, n_in, _log_normal(rng, given["output"]), content))
        if name == "bursts":  # all of a burst at once, then a pause, with the same mean rate
            ends = not (number + 1) % int(given["burst"])
            at_ms += float(rng.exponential(1000.0 * given["burst"] / given["rate"])) if ends else 0.0
        else:
            at_ms += float(rng.exponential(1000.0 / given["rate"]))
    return requests


def _agentic(given: Mapping[str, float], rng: np.random.Generator, fleet_tokens: int) -> list[RawRequest]:
    """Sessions of agents: long prompts of tools, histories that grow turn by turn, and pauses with a heavy tail.

    Each lane is one session after the other. There are as many lanes as the working set allows.
    """
    ids = count()
    n_prefix = int(given["prefix"]) // ID_TOKENS
    tools = [[next(ids) for _ in range(n_prefix)] for _ in range(int(given["prefixes"]))]
    sessions = _Sessions(given, rng, tools, ids)
    # A session's history when it is looked at: drawn as often as needed for a stable mean, from another generator.
    probe = _Sessions(given, np.random.default_rng(0), tools, ids)
    own_tokens = probe.mean_history() - n_prefix * ID_TOKENS
    room = given["working_set"] * fleet_tokens - len(tools) * n_prefix * ID_TOKENS
    n_lanes = max(1, round(room / own_tokens))
    n_each = -(-int(given["requests"]) // n_lanes)
    requests: list[RawRequest] = []
    for _ in range(n_lanes):
        at_ms, left, previous, is_first = float(rng.random()) * 1000.0 * given["pause_s"], n_each, NO_REQUEST, True
        while left > 0:
            # The first session of a lane has begun before the run, as in a fleet that has been running for long.
            for content, n_in, n_out in sessions.draw(is_first):
                pause_s = min(_PAUSE_S_MAX, _log_normal(rng, 1000.0 * given["pause_s"], given["pause_sigma"]) / 1000.0)
                pause_ms = None if previous == NO_REQUEST else 1000.0 * pause_s
                at_ms += pause_ms or 0.0
                requests.append(RawRequest(at_ms, n_in, n_out, content, previous, pause_ms))
                previous = len(requests) - 1
                at_ms += _FIRST_TOKEN_MS + n_out * _ANSWER_MS_PER_TOKEN
                left -= 1
                if not left:
                    break
            is_first = False
    return requests


class _Sessions:
    """Draws sessions of agents."""

    def __init__(
        self, given: Mapping[str, float], rng: np.random.Generator, tools: list[list[int]], ids: Iterator[int]
    ) -> None:
        self._given, self._rng, self._tools, self._ids = given, rng, tools, ids

    def draw(self, has_begun: bool = False) -> Iterator[tuple[list[int], int, int]]:
        """Give content, prompt and answer of each turn. has_begun: turns before a random one are left out."""
        lengths = self._lengths()
        first = int(self._rng.integers(len(lengths))) if has_begun else 0
        content = list(self._tools[int(self._rng.integers(len(self._tools)))])
        for n_in, n_out in lengths[first:]:
            content = content + [next(self._ids) for _ in range(-(-n_in // ID_TOKENS) - len(content))]
            yield content, n_in, n_out

    def mean_history(self) -> float:
        """The mean prompt of sessions, each turn counted once."""
        lengths = [n_in for _ in range(200) for n_in, _ in self._lengths()]
        return sum(lengths) / len(lengths)

    def _lengths(self) -> list[tuple[int, int]]:
        """Prompt and answer of each turn."""
        given, rng = self._given, self._rng
        n_in = len(self._tools[0]) * ID_TOKENS
        lengths: list[tuple[int, int]] = []
        for _ in range(_log_normal(rng, given["turns"], 1.0)):
            n_in += _log_normal(rng, given["prompt"], given["prompt_sigma"])
            if n_in > _HISTORY_MAX:
                break
            n_out = _log_normal(rng, given["output"])
            lengths.append((n_in, n_out))
            n_in += n_out
        return lengths or self._lengths()
