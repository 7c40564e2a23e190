"""Tokenizing without long waits: on the event loop, in a pool of processes, or by the engines themselves.

What lives here: the processes, what may wait for them, and which rules, or which engine, render the prompts of a model.
What must not: how a text becomes tokens (tokenizer), the calls of engines (engine_tokens), and which prompts are short
enough for the event loop (loop_tokenizer). A request that cannot be tokenized is not refused: the front routes it by
load, and the engine says what is wrong with it.

State: the rules by which a model's prompts are rendered.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from streams.client.payloads import pack_tokens, unpack_tokens
from streams.client.plain_http import PlainHttp
from streams.errors import InvalidRequest, KvStreamsError, SettingsError
from streams.prompts.calls import CALLS, Kind
from streams.prompts.conversation import NEWEST, Rule
from streams.prompts.engine_tokens import LACKING, EngineTokens
from streams.prompts.requests import ClientRequest
from streams.prompts.tokenizer_process import PackedTokens, TokenizerEnded, TokenizerProcess, packed_ids

if TYPE_CHECKING:
    from streams.prompts.loop_tokenizer import LoopTokenizer

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

#: Interval at which it is checked whether the processes run. One that has ended is started again.
CHECK_PROCESSES_S = 0.5

#: Models whose rules are known to be others than the newest.
MODELS_MAX = 4096

#: Stands for a prompt whose tokens are not known: no worker holds a block of it, so the load decides.
UNKNOWN_TOKENS = b"\0\0\0\0"

#: Where a prompt's tokens came from: they are the values of a label. `ids`: from the client. `none`: routed by load.
IDS, FILES, ENGINE, NONE = "ids", "files", "engine", "none"
SOURCES = (IDS, FILES, ENGINE, NONE)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens as u32 LE, and where they came from.

    whole: whether they are the whole prompt. Otherwise they are its beginning, or stand for unknown tokens, and serve
    only to choose a worker.
    """

    tokens: bytes
    source: str
    whole: bool = True


class Tokenizing:
    """Tokenizes for one front. Used on one loop.

    sources: requests by the source of their tokens. characters: of texts, by whether they were found in a cache.
    """

    def __init__(self, paths: Mapping[str, Path], processes: int, cache_bytes: int) -> None:
        """paths: folders of tokenizers by model; "" is for every model without one of its own."""
        self._paths = dict(paths)
        n = processes if paths else 0
        # The processes and the event loop have caches of the same size.
        self._cache_bytes = cache_bytes // (n + 1)
        self._processes = [TokenizerProcess(paths, self._cache_bytes) for _ in range(n)]
        self._on_loop: dict[str, LoopTokenizer] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._waiting = 0
        self.sources: Counter[str] = Counter()
        self.characters: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._engine_tokens = EngineTokens(TOKENIZE_TIMEOUT_S, TOKENIZED_BYTES_MAX)
        # Of models whose engines follow other rules than the newest; None for those that have to be asked.
        self._rules: dict[str, Rule | None] = {}

    async def start(self) -> None:
        """Start the processes, if there are tokenizers. Raises SettingsError if one cannot be loaded."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*(process.start() for process in self._processes))
        except (TokenizerEnded, TimeoutError, OSError) as exc:
            raise SettingsError(f"--tokenizer: the tokenizers cannot be loaded: {exc!r}") from exc
        # The processes have loaded the same files, so these can be used, and the package is installed.
        self._on_loop = await asyncio.to_thread(_load, self._paths, self._cache_bytes)
        self._keeping = asyncio.create_task(self._keep_running())

    async def close(self) -> None:
        """End the processes."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        await asyncio.gather(*(process.kill() for process in self._processes))

    async def _keep_running(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PROCESSES_S)
            for process in self._processes:
                if process.running:
                    continue
                log.error("a tokenizer process ended; it is started again")
                try:
                    async with asyncio.timeout(START_TIMEOUT_S):
                        await process.kill()
                        await process.start()
                except (KvStreamsError, TimeoutError, OSError) as exc:
                    log.error("a tokenizer process cannot be started, trying again: %s", exc)

    async def prompt(
        self,
        request: ClientRequest,
        body: bytes,
        model: str | None,
        engine: str | None,
        http: PlainHttp,
        key: str | None,
    ) -> Prompt:
        """Return a request's tokens. model: whose tokenizer it is. engine: URL of one that serves it. key: its API key.

        Never raises for what a client sent: what cannot be tokenized is routed by load.
        """
        known = await self._known_prompt(request, body, model, engine, http, key)
        prompt = known or Prompt(UNKNOWN_TOKENS, NONE, whole=False)
        self.sources[prompt.source] += 1
        return prompt

    async def text(
        self, text: str, model: str | None, engine: str | None, http: PlainHttp, key: str | None
    ) -> bytes | None:
        """Return the tokens of a text that continues another one, as u32 LE; None if that is not possible."""
        body = {"prompt": text, "add_special_tokens": False, **({} if model is None else {"model": model})}
        raw = orjson.dumps(body["prompt"])
        request = ClientRequest(Kind.COMPLETION, model, False, None, None, raw)
        prompt = await self._known_prompt(request, orjson.dumps(body), model, engine, http, key)
        return None if prompt is None else prompt.tokens

    async def _known_prompt(
        self,
        request: ClientRequest,
        body: bytes,
        model: str | None,
        engine: str | None,
        http: PlainHttp,
        key: str | None,
    ) -> Prompt | None:
        if not CALLS[request.kind].is_routed_by_prompt:
            return None
        try:
            if request.has_token_ids:
                if len(request.prompt) <= IDS_ON_LOOP_BYTES or not self._processes:
                    return _known(packed_ids(request.prompt), IDS)
                return _known((await self._in_process(lambda process: process.ids(request.prompt))).tokens, IDS)
            name = model if model in self._paths else ""
            rules = self.rules(model)
            # How other versions make chats of such requests is not known.
            is_known = rules == NEWEST or (rules is not None and not CALLS[request.kind].becomes_chat)
            if name in self._paths and (is_known or engine is None):
                encoded = await self._by_files(request.kind, name, body, NEWEST if rules is None else rules)
                self.characters["cached"] += encoded.n_cached
                self.characters["encoded"] += encoded.n_characters - encoded.n_cached
                return _known(encoded.tokens, FILES, whole=encoded.whole)
            if engine is not None:
                return _known(await self._by_engine(request, body, engine, http, key), ENGINE)
        except InvalidRequest:
            return None  # the engine says what is wrong
        except (TokenizerEnded, TimeoutError, OSError, _TooMany) as exc:
            self._log_once(type(exc).__name__, "requests are routed by load, since tokenizing failed: %s", repr(exc))
        return None

    def has_files(self, model: str) -> bool:
        """Whether prompts for a model are tokenized with files."""
        return model in self._paths or "" in self._paths

    def rules(self, model: str | None) -> Rule | None:
        """Return the rules that prompts for a model are rendered by; None if its engines render them.

        model: None for requests that name none, which only a fleet with one model serves.
        """
        if model is None and len(self._rules) == 1:
            (model,) = self._rules
        return self._rules.get(model or "", NEWEST)

    def set_rules(self, model: str, rules: Rule | None) -> None:
        """Render prompts for a model by these rules from now on; None: ask its engines for their tokens instead."""
        if rules == NEWEST:
            self._rules.pop(model, None)
        elif model in self._rules or len(self._rules) < MODELS_MAX:
            self._rules[model] = rules

    async def tokens_of_files(self, model: str, kind: Kind, body: bytes, rules: Rule) -> list[int]:
        """Return the tokens of a prompt that is not a client's, with the files of a model that has some.

        Raises InvalidRequest if the files cannot make them, and TokenizingFailed.
        """
        try:
            name = model if model in self._paths else ""
            return unpack_tokens((await self._by_files(kind, name, body, rules)).tokens)
        except (TokenizerEnded, TimeoutError, OSError, _TooMany) as exc:
            raise TokenizingFailed(type(exc).__name__) from exc

    async def _by_files(self, kind: Kind, name: str, body: bytes, rules: Rule) -> PackedTokens:
        """Tokenize with a model's files: on the event loop if that is quick, otherwise in a process."""
        tokenizer = self._on_loop.get(name)
        rendered = None if tokenizer is None else tokenizer.render(kind, body, rules)
        if tokenizer is None or rendered is None:
            return await self._in_process(lambda process: process.encode(name, kind, body, rules))
        known, n_cached = {}, 0
        missing = tokenizer.missing(rendered)
        if missing:
            tokens, n_cached = await self._in_process(lambda process: process.pieces(name, missing))
            known = dict(zip(missing, tokens, strict=True))
        joined = tokenizer.join(rendered, known)
        return PackedTokens(joined.tokens, joined.whole, joined.n_characters, joined.n_cached + n_cached)

    async def _in_process(self, call: Callable[[TokenizerProcess], Awaitable[_T]]) -> _T:
        """Ask the process that has the fewest requests."""
        if self._waiting >= TOKENIZING_MAX:
            raise _TooMany(f"{self._waiting} requests wait for the tokenizers")
        running = [process for process in self._processes if process.running]
        process = min(running or self._processes, key=len)
        self._waiting += 1
        try:
            async with asyncio.timeout(TOKENIZE_TIMEOUT_S):
                return await call(process)
        except TimeoutError:
            log.error("a tokenizer process is killed, since it took more than %g s", TOKENIZE_TIMEOUT_S)
            await process.kill()
            raise
        finally:
            self._waiting -= 1

    async def _by_engine(
        self, request: ClientRequest, body: bytes, engine: str, http: PlainHttp, key: str | None
    ) -> bytes:
        """Ask an engine. It gets the request's own body, whose other fields it ignores. Raises InvalidRequest."""
        answer = await self._engine_tokens.ask(http, engine, request.kind, body, key)
        try:
            if answer.tokens is not None:
                return pack_tokens(answer.tokens)
        except (TypeError, ValueError) as exc:
            raise InvalidRequest(f"the engine's answer to {answer.call} has no tokens") from exc
        if answer.status in LACKING:
            self._log_once(
                engine,
                "requests for model %s are routed by load: its engine has no %s (status %d). Set --tokenizer",
                request.model,
                answer.call,
                answer.status,
            )
        raise InvalidRequest(f"the engine answered {answer.status} to {answer.call}")

    def _log_once(self, what: str, text: str, *arguments: Any) -> None:
        if what not in self._logged and len(self._logged) < TOKENIZING_MAX:
            self._logged.add(what)
            log.warning(text, *arguments)


class TokenizingFailed(Exception):
    """The processes did not answer; they may do so later."""


class _TooMany(Exception):
    """More requests wait for the processes than may."""


def _load(paths: Mapping[str, Path], cache_bytes: int) -> dict[str, LoopTokenizer]:
    """Load the tokenizers for the event loop. A front without tokenizers need not have their package."""
    if not paths:
        return {}
    from streams.prompts.loop_tokenizer import LoopTokenizer
    from streams.prompts.tokenizer import ModelTokenizer

    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # its threads would compete with the loop for prompts of 1 KB
    share = cache_bytes // len(paths)
    return {model: LoopTokenizer(ModelTokenizer(path, share)) for model, path in paths.items()}


def _known(tokens: bytes, source: str, *, whole: bool = True) -> Prompt | None:
    """Return a prompt; one without tokens cannot be routed by them."""
    return Prompt(tokens, source, whole) if tokens else None
