"""Tokenizing without waiting: a pool of processes with the models' tokenizers, or the engines themselves.

What lives here: the processes, what may wait for them, and the calls of an engine's `/tokenize`. What must not: how a
text becomes tokens (tokenizer). A request that cannot be tokenized is not refused: the front routes it by load, and the
engine says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from streams.client.payloads import pack_tokens
from streams.errors import InvalidRequest, SettingsError
from streams.frontend.requests import FrontRequest, Kind

if TYPE_CHECKING:
    from streams.frontend.tokenizer import Encoded, ModelTokenizer

log = logging.getLogger(__name__)

#: Requests that wait for the processes. Beyond it they are routed by load.
TOKENIZING_MAX = 1024

#: Time for one request in the processes, waiting included; and for an engine's answer to `/tokenize`.
TOKENIZE_TIMEOUT_S = 10.0

#: Bytes of a prompt of token ids that are read on the event loop, which takes 0.1 ms; longer ones go to the processes.
IDS_ON_LOOP_BYTES = 64 << 10

#: Bytes of an engine's answer to `/tokenize`: about 7 for each token.
TOKENIZED_BYTES_MAX = 64 << 20

#: How long starting waits until the processes have loaded the tokenizers.
START_TIMEOUT_S = 120.0

#: Stands for a prompt whose tokens are not known: no worker holds a block of it, so the load decides.
UNKNOWN_TOKENS = b"\0\0\0\0"

#: Where a prompt's tokens came from: they are the values of a label. `ids`: from the client. `none`: routed by load.
IDS, FILES, ENGINE, NONE = "ids", "files", "engine", "none"
SOURCES = (IDS, FILES, ENGINE, NONE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens as u32 LE, and where they came from."""

    tokens: bytes
    source: str


class Tokenizing:
    """Tokenizes for one front. Used on one loop.

    sources: requests by the source of their tokens. characters: of texts, by whether they were found in a cache.
    """

    def __init__(self, paths: Mapping[str, Path], processes: int, cache_bytes: int) -> None:
        """paths: folders of tokenizers by model; "" is for every model without one of its own."""
        self._paths = dict(paths)
        self._processes = processes
        self._cache_bytes = cache_bytes // max(1, processes)
        self._pool: ProcessPoolExecutor | None = None
        self._waiting = 0
        self.sources: Counter[str] = Counter()
        self.characters: Counter[str] = Counter()
        self._logged: set[str] = set()

    async def start(self) -> None:
        """Start the processes, if there are tokenizers. Raises SettingsError if one cannot be loaded."""
        if not self._paths:
            return
        self._pool = self._new_pool()
        loop = asyncio.get_running_loop()
        for _ in range(self._processes):  # each submission starts another process
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    error = await loop.run_in_executor(self._pool, _loading_error)
            except (BrokenProcessPool, TimeoutError) as exc:
                raise SettingsError(f"--tokenizer: the tokenizers cannot be loaded: {exc!r}") from exc
            if error is not None:
                raise SettingsError(error)

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    async def prompt(
        self, request: FrontRequest, body: bytes, engine: str | None, http: aiohttp.ClientSession, key: str | None
    ) -> Prompt:
        """Return a request's tokens. engine: URL of one that serves the model. key: its API key."""
        found = await self._found(request, body, engine, http, key)
        prompt = found or Prompt(UNKNOWN_TOKENS, NONE)
        self.sources[prompt.source] += 1
        return prompt

    async def _found(
        self, request: FrontRequest, body: bytes, engine: str | None, http: aiohttp.ClientSession, key: str | None
    ) -> Prompt | None:
        try:
            if request.has_token_ids:
                if len(request.prompt) <= IDS_ON_LOOP_BYTES or self._pool is None:
                    return _known(_packed_ids(request.prompt), IDS)
                return _known(await self._in_pool(_packed_ids, request.prompt), IDS)
            name = request.model if request.model in self._paths else ""
            if name in self._paths:
                encoded: Encoded = await self._in_pool(_encode, name, request.kind, body)
                self.characters["cached"] += encoded.n_cached
                self.characters["encoded"] += encoded.n_characters - encoded.n_cached
                return _known(encoded.tokens, FILES)
            if engine is not None:
                return _known(await self._by_engine(request, body, engine, http, key), ENGINE)
        except InvalidRequest:
            return None  # the engine says what is wrong
        except (BrokenProcessPool, TimeoutError, aiohttp.ClientError, OSError, _TooMany) as exc:
            self._log_once(type(exc).__name__, "requests are routed by load, since tokenizing failed: %s", repr(exc))
        return None

    async def _in_pool(self, function: Callable[..., Any], *arguments: Any) -> Any:
        pool = self._pool
        if pool is None or self._waiting >= TOKENIZING_MAX:
            raise _TooMany(f"{self._waiting} requests wait for the tokenizers")
        self._waiting += 1
        try:
            async with asyncio.timeout(TOKENIZE_TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        except BrokenProcessPool:
            if self._pool is pool:  # the first request that notices it
                log.error("a tokenizer process ended; all of them are started again")
                pool.shutdown(wait=False, cancel_futures=True)
                self._pool = self._new_pool()
            raise
        finally:
            self._waiting -= 1

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._processes,
            # A forked process would have the front's sockets, and uvloop's state.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_load,
            initargs=(self._paths, self._cache_bytes),
        )

    async def _by_engine(
        self, request: FrontRequest, body: bytes, engine: str, http: aiohttp.ClientSession, key: str | None
    ) -> bytes:
        """Ask an engine. It gets the request's own body, whose other fields it ignores."""
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        timeout = aiohttp.ClientTimeout(total=TOKENIZE_TIMEOUT_S)
        async with http.post(f"{engine}/tokenize", data=body, headers=headers, timeout=timeout) as response:
            raw = await response.content.read(TOKENIZED_BYTES_MAX)
            while not response.content.at_eof() and len(raw) < TOKENIZED_BYTES_MAX:
                raw += await response.content.read(TOKENIZED_BYTES_MAX - len(raw))
        try:
            if response.status == 200:
                return pack_tokens(orjson.loads(raw)["tokens"])
        except (KeyError, TypeError, ValueError) as exc:
            raise InvalidRequest("the engine's answer to /tokenize has no tokens") from exc
        if response.status in (404, 405, 501):
            self._log_once(
                engine,
                "requests for model %s are routed by load: its engine has no /tokenize (status %d). Set --tokenizer",
                request.model,
                response.status,
            )
        raise InvalidRequest(f"the engine answered {response.status} to /tokenize")

    def _log_once(self, what: str, text: str, *arguments: Any) -> None:
        if what not in self._logged and len(self._logged) < TOKENIZING_MAX:
            self._logged.add(what)
            log.warning(text, *arguments)


class _TooMany(Exception):
    """More requests wait for the processes than may."""


def _known(tokens: bytes, source: str) -> Prompt | None:
    """Return a prompt; one without tokens cannot be routed by them."""
    return Prompt(tokens, source) if tokens else None


def _packed_ids(raw: bytes) -> bytes:
    """Return the JSON of a prompt of token ids as u32 LE. Raises InvalidRequest."""
    try:
        ids = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest("prompt is not JSON") from exc
    return pack_tokens(ids[0] if ids and isinstance(ids[0], list) else ids)


# -- in the processes --------------------------------------------------------------------------------------------------

_tokenizers: dict[str, ModelTokenizer] = {}
_error: str | None = None


def _load(paths: Mapping[str, Path], cache_bytes: int) -> None:
    """Load the tokenizers of one process. An error is kept: raised here, it would be lost in the pool."""
    global _error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the front, which then ends this process
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool has one process per core that it may use
    try:
        from streams.frontend.tokenizer import ModelTokenizer

        for model, path in paths.items():
            _tokenizers[model] = ModelTokenizer(path, cache_bytes // len(paths))
    except ImportError as exc:
        _error = f"--tokenizer needs {exc.name}. `pip install 'kvstreams[front]'` installs it"
    except SettingsError as exc:
        _error = str(exc)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _loading_error() -> str | None:
    return _error


def _encode(model: str, kind: Kind, body: bytes) -> Encoded:
    return _tokenizers[model].encode(kind, body)
