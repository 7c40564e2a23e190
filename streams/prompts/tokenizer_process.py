"""A process that tokenizes: what the front starts, and how the two talk over its standard input and output.

What lives here: the frames, the parent's side (TokenizerProcess) and the child's (main). What must not: which request
goes to which process (tokenizing), and how a text becomes tokens (tokenizer).

The pipes are read and written by the front's own event loop. A pool of Python's library has two threads in between,
each of which waits for the interpreter: on a busy front that takes longer than the tokens.

A frame is its length as u32 LE and its bytes. The child's first frame is an error, or empty once the tokenizers are
loaded; then it answers each request in order. It ends when its input does, so it never outlives the front.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import orjson

from streams.client.payloads import pack_tokens, token_array
from streams.errors import InvalidRequest, KvStreamsError, SettingsError
from streams.prompts.calls import Kind
from streams.prompts.conversation import Rule

_LENGTH = struct.Struct("<I")

#: Of a request: what it is, the rules for its messages, and the length of the model's name. Name and body follow.
_REQUEST = struct.Struct("<BBH")
#: Of an answer: whether it is tokens, whether they are the whole prompt, its characters, and how many were cached.
_ANSWER = struct.Struct("<??II")

#: In place of a kind: a prompt of token ids, and pieces of a text.
_IDS, _PIECES = 255, 254
_KINDS = list(Kind)

COMMAND = (sys.executable, "-m", "streams.prompts.tokenizer_process")


class TokenizerEnded(KvStreamsError):
    """A tokenizer process ended, or was killed because it took too long."""

    code = "tokenizer_ended"


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A prompt's tokens as u32 LE; the others as in tokenizer.Encoded."""

    tokens: bytes
    whole: bool
    n_characters: int
    n_cached: int


class TokenizerProcess:
    """The front's side of one process. Used on one loop."""

    def __init__(self, paths: Mapping[str, Path], cache_bytes: int) -> None:
        self._config = orjson.dumps({"paths": {name: str(path) for name, path in paths.items()}, "cache": cache_bytes})
        self._frames: _Frames | None = None

    def __len__(self) -> int:
        """Requests that it has not answered."""
        return 0 if self._frames is None else len(self._frames.waiting)

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        return None if self._frames is None else self._frames.pid

    @property
    def running(self) -> bool:
        """Whether it takes requests."""
        return self._frames is not None and self._frames.running

    async def start(self) -> None:
        """Start the process, and wait until it has loaded the tokenizers. Raises SettingsError, TokenizerEnded."""
        # Pool threads of the library would compete with the front; each process tokenizes one prompt at a time.
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        loop = asyncio.get_running_loop()
        _, frames = await loop.subprocess_exec(_Frames, *COMMAND, stderr=None, env=env, start_new_session=True)
        self._frames = frames
        loaded = frames.next()
        frames.send(self._config)
        error = await loaded
        if error:
            raise SettingsError(error.decode())
        frames.running = True

    async def kill(self) -> None:
        """End the process. Its requests fail with TokenizerEnded."""
        if self._frames is not None:
            self._frames.kill()
            await self._frames.ended.wait()

    async def ids(self, raw: bytes) -> PackedTokens:
        """Return the JSON of a prompt of token ids as tokens. Raises InvalidRequest, TokenizerEnded."""
        return await self._ask(_REQUEST.pack(_IDS, 0, 0), raw)

    async def encode(self, model: str, kind: Kind, body: bytes, rules: Rule) -> PackedTokens:
        """Return the tokens of a request's prompt. Raises InvalidRequest, TokenizerEnded."""
        name = model.encode()
        return await self._ask(_REQUEST.pack(_KINDS.index(kind), rules, len(name)) + name, body)

    async def pieces(self, model: str, texts: list[str]) -> tuple[list[array[int]], int]:
        """Return the tokens of each piece of a text (tokenizer.Rendered), and how many characters were cached.

        Raises InvalidRequest, TokenizerEnded.
        """
        name = model.encode()
        answer = await self._ask(_REQUEST.pack(_PIECES, 0, len(name)) + name, orjson.dumps(texts))
        lengths = token_array(answer.tokens[: 4 * len(texts)])
        tokens, position = token_array(answer.tokens[4 * len(texts) :]), 0
        parts = []
        for length in lengths:
            parts.append(tokens[position : position + length])
            position += length
        return parts, answer.n_cached

    async def _ask(self, head: bytes, body: bytes) -> PackedTokens:
        frames = self._frames
        if frames is None or not frames.running:
            raise TokenizerEnded("the tokenizer process is being started again")
        answered = frames.next()
        frames.send(head, body)
        answer = await answered
        succeeded, whole, n_characters, n_cached = _ANSWER.unpack_from(answer)
        rest = answer[_ANSWER.size :]
        if not succeeded:
            raise InvalidRequest(rest.decode())
        return PackedTokens(rest, whole, n_characters, n_cached)


class _Frames(asyncio.SubprocessProtocol):
    """The pipes of a process. Each frame that it sends resolves the future that has waited longest.

    No task is between them and a request: that would be two more steps of the event loop for each.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._transport: asyncio.SubprocessTransport | None = None
        self._input: asyncio.WriteTransport | None = None
        self.waiting: deque[asyncio.Future[bytes]] = deque()
        self._is_read = False
        #: Whether the tokenizers are loaded, and it takes requests.
        self.running = False
        self.ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._transport is None else self._transport.get_pid()

    def send(self, *parts: bytes) -> None:
        """Send a frame."""
        if self._input is not None and not self._input.is_closing():
            self._input.writelines((_LENGTH.pack(sum(map(len, parts))), *parts))

    def next(self) -> asyncio.Future[bytes]:
        """Return the future of the next frame."""
        expected: asyncio.Future[bytes] = self._loop.create_future()
        self.waiting.append(expected)
        return expected

    def kill(self) -> None:
        """End the process."""
        self._end()
        if self._transport is not None and self._transport.get_returncode() is None:
            self._transport.kill()

    # -- of the event loop ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._input = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002 - only its output is a pipe
        received = self._received
        received += data
        while len(received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if len(received) < end:
                return
            frame = bytes(memoryview(received)[_LENGTH.size : end])
            del received[:end]
            if self.waiting:
                expected = self.waiting.popleft()
                if not expected.done():  # otherwise its caller was cancelled
                    expected.set_result(frame)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if fd == 1:
            self._end()
            self._is_read = True
            self._close_if_ended()

    def process_exited(self) -> None:
        self._close_if_ended()

    def _close_if_ended(self) -> None:
        """The last frame may be read after the end of the process was noticed: it says what is wrong."""
        transport = self._transport
        if self._is_read and transport is not None and transport.get_returncode() is not None:
            transport.close()
            self.ended.set()

    def _end(self) -> None:
        """Take no further requests, and fail those that wait."""
        self.running = False
        while self.waiting:
            expected = self.waiting.popleft()
            if not expected.done():
                expected.set_exception(TokenizerEnded("the tokenizer process ended"))


def packed_ids(raw: bytes) -> bytes:
    """Return the JSON of a prompt of token ids as u32 LE, and of several prompts the first. Raises InvalidRequest."""
    try:
        ids = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest("prompt is not JSON") from exc
    return pack_tokens(ids[0] if ids and isinstance(ids[0], list) else ids)


# -- the process -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    received, sent = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not become a frame
    config = orjson.loads(_received(received) or b"{}")
    try:
        from streams.prompts.tokenizer import ModelTokenizer

        paths = config["paths"]
        cache_bytes = config["cache"] // max(1, len(paths))
        tokenizers = {model: ModelTokenizer(Path(path), cache_bytes) for model, path in paths.items()}
    except ImportError as exc:
        _send(sent, f"--tokenizer needs {exc.name}. `pip install 'kvstreams[front]'` installs it".encode())
        return
    except SettingsError as exc:
        _send(sent, str(exc).encode())
        return
    _send(sent, b"")
    while (request := _received(received)) is not None:
        kind, rules, n_name = _REQUEST.unpack_from(request)
        name_end = _REQUEST.size + n_name
        try:
            if kind == _IDS:
                _send(sent, _ANSWER.pack(True, True, 0, 0), packed_ids(request[name_end:]))
                continue
            model = request[_REQUEST.size : name_end].decode()
            if kind == _PIECES:
                texts = orjson.loads(request[name_end:])
                parts, n_cached = tokenizers[model].pieces(texts)
                lengths = pack_tokens([len(part) for part in parts])
                tokens = b"".join(map(pack_tokens, parts))
                _send(sent, _ANSWER.pack(True, True, sum(map(len, texts)), n_cached), lengths, tokens)
                continue
            encoded = tokenizers[model].encode(_KINDS[kind], request[name_end:], Rule(rules))
            _send(sent, _ANSWER.pack(True, encoded.whole, encoded.n_characters, encoded.n_cached), encoded.tokens)
        except InvalidRequest as exc:
            _send(sent, _ANSWER.pack(False, False, 0, 0), str(exc).encode())
        except Exception as exc:  # the request is routed by load; nothing may end this process for the others
            _send(sent, _ANSWER.pack(False, False, 0, 0), type(exc).__name__.encode())


def _received(pipe: BinaryIO) -> bytes | None:
    """Read a frame; None at the end of the input."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    frame = pipe.read(length)
    return frame if len(frame) == length else None


def _send(pipe: BinaryIO, *parts: bytes) -> None:
    pipe.write(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        pipe.write(part)
    pipe.flush()


if __name__ == "__main__":
    main()
