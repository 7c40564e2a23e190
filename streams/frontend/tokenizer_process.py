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
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from streams.client.payloads import pack_tokens
from streams.errors import InvalidRequest, KvStreamsError, SettingsError
from streams.frontend.requests import Kind

_LENGTH = struct.Struct("<I")

#: Of a request: what it is, and the length of the model's name, which follows; then the body.
_REQUEST = struct.Struct("<BH")
#: Of an answer: whether it is tokens, whether they are the whole prompt, its characters, and how many were cached.
_ANSWER = struct.Struct("<??II")

_IDS = 255
_KINDS = list(Kind)

COMMAND = (sys.executable, "-m", "streams.frontend.tokenizer_process")


class TokenizerEnded(KvStreamsError):
    """A tokenizer process ended, or was killed because it took too long."""

    code = "tokenizer_ended"


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt's tokens as u32 LE; the others as in tokenizer.Encoded."""

    tokens: bytes
    whole: bool
    n_characters: int
    n_cached: int


class TokenizerProcess:
    """The front's side of one process. Used on one loop."""

    def __init__(self, paths: Mapping[str, Path], cache_bytes: int) -> None:
        self._config = orjson.dumps({"paths": {name: str(path) for name, path in paths.items()}, "cache": cache_bytes})
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._reading: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Requests that it has not answered."""
        return len(self._waiting)

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether it takes requests."""
        return self._reading is not None and not self._reading.done()

    async def start(self) -> None:
        """Start the process, and wait until it has loaded the tokenizers. Raises SettingsError, TokenizerEnded."""
        # Pool threads of the library would compete with the front; each process tokenizes one prompt at a time.
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        self._process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=env, start_new_session=True
        )
        self._write(self._config)
        try:
            error = await self._read()
        except asyncio.IncompleteReadError as exc:
            raise TokenizerEnded("a tokenizer process ended while it loaded its files") from exc
        if error:
            raise SettingsError(error.decode())
        self._reading = asyncio.create_task(self._read_forever())

    async def kill(self) -> None:
        """End the process. Its requests fail with TokenizerEnded."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def ids(self, raw: bytes) -> Tokens:
        """Return the JSON of a prompt of token ids as tokens. Raises InvalidRequest, TokenizerEnded."""
        return await self._ask(_REQUEST.pack(_IDS, 0), raw)

    async def encode(self, model: str, kind: Kind, body: bytes) -> Tokens:
        """Return the tokens of a request's prompt. Raises InvalidRequest, TokenizerEnded."""
        name = model.encode()
        return await self._ask(_REQUEST.pack(_KINDS.index(kind), len(name)) + name, body)

    async def _ask(self, head: bytes, body: bytes) -> Tokens:
        if not self.running:
            raise TokenizerEnded("the tokenizer process is being started again")
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answered)
        self._write(head, body)
        answer = await answered
        found, whole, n_characters, n_cached = _ANSWER.unpack_from(answer)
        rest = answer[_ANSWER.size :]
        if not found:
            raise InvalidRequest(rest.decode())
        return Tokens(rest, whole, n_characters, n_cached)

    def _write(self, *parts: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.writelines((_LENGTH.pack(sum(map(len, parts))), *parts))

    async def _read(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
        return await self._process.stdout.readexactly(length)

    async def _read_forever(self) -> None:
        """Hand out answers until the process ends."""
        try:
            while True:
                answer = await self._read()
                answered = self._waiting.popleft()
                if not answered.done():  # a caller that was cancelled
                    answered.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            while self._waiting:
                answered = self._waiting.popleft()
                if not answered.done():
                    answered.set_exception(TokenizerEnded("the tokenizer process ended"))


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
        from streams.frontend.tokenizer import ModelTokenizer

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
        kind, n_name = _REQUEST.unpack_from(request)
        name_end = _REQUEST.size + n_name
        try:
            if kind == _IDS:
                _send(sent, _ANSWER.pack(True, True, 0, 0), packed_ids(request[name_end:]))
                continue
            model = request[_REQUEST.size : name_end].decode()
            found = tokenizers[model].encode(_KINDS[kind], request[name_end:])
            _send(sent, _ANSWER.pack(True, found.whole, found.n_characters, found.n_cached), found.tokens)
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
