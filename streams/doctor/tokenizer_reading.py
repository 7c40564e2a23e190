"""`--tokenizer`: whether each engine tokenizes as a model's files do, chat template included.

What lives here: asking engines' /tokenize and the files of --tokenizer for the same prompts. What must not: the prompts
and the comparison (frontend.parity), and what is wrong with the result (checks). No text and no token id is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from streams.client.payloads import unpack_tokens
from streams.core.workers import RenderPart
from streams.doctor.http_reading import call
from streams.doctor.observations import EngineSeen
from streams.errors import InvalidRequest, SettingsError
from streams.frontend.parity import PROMPTS, compare

if TYPE_CHECKING:
    from streams.frontend.tokenizer import ModelTokenizer

#: Engines that are asked at a time.
ENGINES_AT_ONCE = 8

#: Bytes that a tokenizer may cache; the prompts are few and short.
_CACHE_BYTES = 1 << 20

#: By prompt, its tokens by the files; None if the files cannot make them.
TokensOfFiles = Mapping[RenderPart, list[int] | None]


async def read_files(paths: Mapping[str, str]) -> Mapping[str, TokensOfFiles]:
    """Return the tokens of the prompts by path. paths: by model. Raises SettingsError for a bad file."""
    return {path: await asyncio.to_thread(_tokens_of_files, path) for path in set(paths.values())}


async def read_tokenizers(
    http: aiohttp.ClientSession,
    engines: Sequence[EngineSeen],
    paths: Mapping[str, str],
    ours: Mapping[str, TokensOfFiles],
    headers: Mapping[str, str],
) -> tuple[EngineSeen, ...]:
    """Compare the engines that answer. paths: by model, "" for all others. ours: of `read_files`."""
    turns = asyncio.Semaphore(ENGINES_AT_ONCE)

    async def one(engine: EngineSeen) -> EngineSeen:
        path = paths.get(engine.worker.model, paths.get(""))
        if path is None or engine.error is not None:
            return engine
        async with turns:
            return replace(engine, tokens=await _differences(http, engine, ours[path], headers))

    return tuple(await asyncio.gather(*map(one, engines)))


def _tokens_of_files(path: str) -> TokensOfFiles:
    tokenizer = _load(path)
    ours: dict[RenderPart, list[int] | None] = {}
    for part, (kind, body) in PROMPTS.items():
        try:
            ours[part] = unpack_tokens(tokenizer.encode(kind, orjson.dumps(body)).tokens)
        except InvalidRequest:  # no chat template, or one that refuses a system message or tools
            ours[part] = None
    return ours


def _load(path: str) -> ModelTokenizer:
    try:
        from streams.frontend.tokenizer import ModelTokenizer
    except ImportError as exc:
        raise SettingsError(
            f"--tokenizer needs {exc.name}", remedy="`pip install 'kvstreams[front]'` installs it"
        ) from exc
    return ModelTokenizer(Path(path), _CACHE_BYTES)


async def _differences(
    http: aiohttp.ClientSession, engine: EngineSeen, ours: TokensOfFiles, headers: Mapping[str, str]
) -> Mapping[str, str]:
    """What differs, by the name of the prompt; "" if nothing does."""
    differing: dict[str, str] = {}
    for part, tokens in ours.items():
        name = part.words
        answer = await call(
            http, f"{engine.worker.url}/tokenize", headers, {"model": engine.worker.model, **PROMPTS[part][1]}
        )
        theirs = _token_ids(answer.json()) if answer.ok else None
        if answer.error is not None:
            differing[name] = answer.error
        elif answer.status in (404, 405, 501):
            return {}  # an engine without /tokenize
        elif (theirs is None) != (tokens is None):
            refuses = "the files make" if theirs is None else "the engine makes"
            differing[name] = f"only {refuses} tokens of it (the status of the engine's answer is {answer.status})"
        elif tokens is not None and theirs is not None:
            differing[name] = str(compare(tokens, theirs) or "")
    return differing


def _token_ids(answer: Any) -> list[int] | None:
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tokens if isinstance(tokens, list) else None
