"""Reading traces from files: Mooncake's format, recorded sessions of agents, and LMCache's traces of agents.

What lives here: the three formats. What must not: simulation. These are the only functions of the laboratory that read
files.

Mooncake (kvcache-ai/Mooncake, FAST'25): JSON lines with `timestamp` in ms, `input_length`, `output_length` and
`hash_ids`, one per 512 tokens. Sessions: JSON objects with `requests`, a list of `{t, in, out, hash_ids}` with `t` in
seconds; one object per file of a folder, one per line of a file, or a list of objects in one file. `block_size` (64) is
the tokens of an id. The ids of a session are its own (`hash_id_scope` is `local`), except those of its tools and system
prompt if it says how long they are (`tool_tokens`, `system_tokens`), or global.

LMCache's traces of agents (lmcache-agentic-traces): JSON lines with `session_id`, `input` (the messages so far, as in a
chat request), `output_length` in tokens and `pre_gap`, the seconds between the answer before it and the request. The
text stands for its tokens, CHARACTERS_PER_TOKEN for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streams.errors import InvalidRequest
from streams.lab.simulation.workload import NO_REQUEST, RawRequest, Workload, build
from streams.lab.trace import TRACE_BLOCK_TOKENS, parse_trace

#: A pause within a session is cut to this: what a user did overnight is no load.
PAUSE_S_MAX = 60.0

#: Tokens of an id in sessions that do not say so, and in traces that have text.
SESSION_ID_TOKENS = 64

#: About what English text and code have with the tokenizers of today's models.
CHARACTERS_PER_TOKEN = 4

#: A member of LMCache's traces. Within the text of a message, its quotes would be escaped.
_MESSAGES = re.compile(r'"input"\s*:\s*\[')


def read_workload(path: Path, block_size: int) -> Workload:
    """Read a trace of any of the formats. Raises InvalidRequest, SettingsError; OSError if it cannot be read."""
    if path.is_dir():
        files = sorted(path.glob("*.json")) + sorted(path.glob("*.jsonl"))
        return sessions_workload(path.name, [session for file in files for session in _objects(file)], block_size)
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(1 << 16).lstrip()
    if _MESSAGES.search(head):
        return _agents_workload(path.name, _objects(path), block_size)
    if path.suffix == ".json" or head.startswith("[") or '"requests"' in head.partition("\n")[0]:
        return sessions_workload(path.name, list(_objects(path)), block_size)
    with path.open(encoding="utf-8", errors="replace") as lines:
        requests = parse_trace(lines)
    raw = (
        RawRequest(request.timestamp_ms, request.input_length, request.output_length, request.hash_ids)
        for request in requests
    )
    return build(path.name, raw, TRACE_BLOCK_TOKENS, block_size)


def sessions_workload(name: str, sessions: list[dict[str, Any]], block_size: int) -> Workload:
    """Interleave sessions: they start evenly over their mean length, each at its `start` in seconds if it has one."""
    parsed = [_session(number, session) for number, session in enumerate(sessions)]
    if not parsed:
        raise InvalidRequest(f"{name} has no sessions")
    sizes = {ids_tokens for ids_tokens, _, _ in parsed}
    if len(sizes) > 1:
        raise InvalidRequest(f"the sessions of {name} have ids of different numbers of tokens: {sorted(sizes)}")
    raw = _interleaved([(start_ms, requests) for _, start_ms, requests in parsed])
    return build(name, raw, sizes.pop(), block_size)


def _interleaved(sessions: list[tuple[float | None, list[RawRequest]]]) -> list[RawRequest]:
    """The requests of sessions with their starts in ms; those without one start evenly over the mean length."""
    mean_ms = sum(requests[-1].at_ms for _, requests in sessions) / len(sessions)
    raw: list[RawRequest] = []
    for number, (start_ms, requests) in enumerate(sessions):
        offset_ms = number * mean_ms / len(sessions) if start_ms is None else start_ms
        previous = NO_REQUEST
        for request in requests:
            raw.append(request._replace(at_ms=request.at_ms + offset_ms, previous=previous))
            previous = len(raw) - 1
    return raw


def _agents_workload(name: str, turns: Iterator[dict[str, Any]], block_size: int) -> Workload:
    """LMCache's traces of agents. A prompt's parts are equal if their text is, in whichever session."""
    sessions: dict[str, list[RawRequest]] = {}
    id_characters = SESSION_ID_TOKENS * CHARACTERS_PER_TOKEN
    for number, turn in enumerate(turns, start=1):
        try:
            text = "".join(f"<{message['role']}>{message.get('content')}" for message in turn["input"])
            pause_ms = min(max(0.0, float(turn["pre_gap"])), PAUSE_S_MAX) * 1000.0
            requests = sessions.setdefault(str(turn["session_id"]), [])
            at_ms = requests[-1].at_ms + pause_ms if requests else 0.0
            n_in = len(text) // CHARACTERS_PER_TOKEN
            ids = [hash(text[at : at + id_characters]) for at in range(0, len(text), id_characters)]
            requests.append(RawRequest(at_ms, n_in, int(turn["output_length"]), ids, pause_ms=pause_ms))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise InvalidRequest(
                f"object {number} of {name} has not session_id, input, output_length and pre_gap: {exc!r}"
            ) from exc
    return build(
        name, _interleaved([(None, requests) for requests in sessions.values()]), SESSION_ID_TOKENS, block_size
    )


def _session(number: int, session: dict[str, Any]) -> tuple[int, float | None, list[RawRequest]]:
    """Return the tokens of an id, the start in ms if the session has one, and its requests from time 0."""
    try:
        ids_tokens = int(session.get("block_size", SESSION_ID_TOKENS))
        start = session.get("start")
        is_local = session.get("hash_id_scope", "global") == "local"
        n_common = (int(session.get("tool_tokens", 0)) + int(session.get("system_tokens", 0))) // ids_tokens
        common = f"{session.get('tool_tokens')}/{session.get('system_tokens')}"
        requests: list[RawRequest] = []
        last_s = at_s = 0.0
        for turn in session["requests"]:
            at_s += min(max(0.0, float(turn["t"]) - last_s), PAUSE_S_MAX) if requests else 0.0
            last_s = float(turn["t"])
            ids = [int(value) for value in turn["hash_ids"]]
            if is_local:
                ids = [hash((common if position < n_common else number, value)) for position, value in enumerate(ids)]
            n_in = min(int(turn["in"]), len(ids) * ids_tokens)
            if n_in > 0:
                requests.append(RawRequest(at_s * 1000.0, n_in, int(turn["out"]), ids))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise InvalidRequest(
            f"session {number} is not an object with requests of t, in, out and hash_ids: {exc!r}"
        ) from exc
    if not requests:
        raise InvalidRequest(f"session {number} has no requests")
    return ids_tokens, None if start is None else float(start) * 1000.0, requests


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        whole = json.loads(text)
        if isinstance(whole, dict):
            whole = whole.get("sessions", [whole])
        yield from whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as exc:
                    raise InvalidRequest(f"line {number} of {path.name} is not JSON: {exc.msg}") from exc
