"""Traffic of known shapes (pure).

What lives here: generators by name, whose parameters have defaults. What must not: hidden randomness (the seed is a
parameter) and files. The same parameters give the same workload.

The ids of a generated prompt stand for ID_TOKENS tokens each. A prompt's last id may be partial; a longer prompt that
continues it has the same id there, so that engines share every full block of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from types import MappingProxyType

import numpy as np

from streams.errors import SettingsError
from streams.sim.lab.workload import NO_REQUEST, RawRequest, Workload, build

#: Tokens of a content id.
ID_TOKENS = 512

#: Parameters by name. requests: about how many. rate: per second, for runs by time. prompt, output: mean tokens of what
#: is new in each request. prefix: tokens of a shared beginning. prefixes: how many of these there are. working_set, for
#: agents: tokens of all histories divided by the tokens that the fleet's caches hold together.
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
            "requests": 5000.0,
            "seed": 1.0,
            "prompt": 900.0,
            "output": 350.0,
            "prefix": 14000.0,
            "prefixes": 4.0,
            "turns": 60.0,
            "working_set": 0.75,
            "pause_s": 4.0,
            "pause_sigma": 1.4,
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

    As many sessions are alive at a time as the working set allows. A session that ends is followed by another one.
    """
    ids = count()
    n_prefix = int(given["prefix"]) // ID_TOKENS
    tools = [[next(ids) for _ in range(n_prefix)] for _ in range(int(given["prefixes"]))]
    grows = given["prompt"] + given["output"]
    mean_history = min(_HISTORY_MAX, given["prefix"] + grows * given["turns"])
    n_alive = max(1, round(given["working_set"] * fleet_tokens / mean_history))
    n_requests = int(given["requests"])
    n_each = -(-n_requests // n_alive)
    turn_ms = _FIRST_TOKEN_MS + given["output"] * _ANSWER_MS_PER_TOKEN + 1000.0 * given["pause_s"]
    requests: list[RawRequest] = []
    for _ in range(n_alive):
        # Sessions are at different turns when the run begins, as in a fleet that has been running for long.
        at_ms = float(rng.random()) * turn_ms
        left = n_each
        n_before = int(rng.integers(0, max(1, int(given["turns"]))))
        while left > 0:
            content = list(tools[int(rng.integers(len(tools)))])
            n_in = n_prefix * ID_TOKENS + _log_normal(rng, given["prompt"]) + round(n_before * grows)
            n_turns = max(1, int(rng.geometric(1.0 / given["turns"])) - n_before)
            n_before = 0
            previous = NO_REQUEST
            for _ in range(min(n_turns, left)):
                if n_in > _HISTORY_MAX:
                    break
                content = content + [next(ids) for _ in range(-(-n_in // ID_TOKENS) - len(content))]
                n_out = _log_normal(rng, given["output"])
                requests.append(RawRequest(at_ms, n_in, n_out, content, previous))
                previous = len(requests) - 1
                left -= 1
                pause_s = min(_PAUSE_S_MAX, _log_normal(rng, 1000.0 * given["pause_s"], given["pause_sigma"]) / 1000.0)
                at_ms += _FIRST_TOKEN_MS + n_out * _ANSWER_MS_PER_TOKEN + 1000.0 * pause_s
                n_in += n_out + _log_normal(rng, given["prompt"])
    return requests
