"""`--tokenizer`: whether each engine tokenizes as a model's files do, chat template included.

What lives here: asking engines and the files of --tokenizer for the same prompts. What must not: the prompts
and the comparison (prompts.parity), and what is wrong with the result (checks). No text and no token id is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import orjson

from streams.client.payloads import unpack_tokens
from streams.core.workers import RenderPart
from streams.doctor.http_reading import call
from streams.doctor.observations import EngineSeen
from streams.errors import InvalidRequest, SettingsError
from streams.prompts.calls import Kind
from streams.prompts.conversation import NEWEST, Rule
from streams.prompts.engine_tokens import (
    LACKING,
    TOKENIZE,
    VERSION,
    for_tokenize,
    reads_more_than_tokenize,
    token_ids,
)
from streams.prompts.parity import NOT_OF_TOKENIZE, PROMPTS, TokensByPart, compare, compare_by_rules

if TYPE_CHECKING:
    from streams.prompts.tokenizer import ModelTokenizer

#: Engines that are asked at a time.
ENGINES_AT_ONCE = 8

#: Bytes that a tokenizer may cache; the prompts are few and short.
_CACHE_BYTES = 1 << 20


class FileTokens:
    """Tokens of the prompts by the files of one model, for each set of rules that engines may follow."""

    def __init__(self, path: str) -> None:
        """Raises SettingsError for a bad file."""
        self._tokenizer = _load(path)

    async def by_rules(self, rules: Rule) -> TokensByPart:
        """Return the tokens of the prompts."""
        return await asyncio.to_thread(self._made, rules)

    def _made(self, rules: Rule) -> TokensByPart:
        made: dict[RenderPart, list[int] | None] = {}
        for part, (kind, body) in PROMPTS.items():
            try:
                made[part] = unpack_tokens(self._tokenizer.encode(kind, orjson.dumps(body), rules).tokens)
            except InvalidRequest:  # no chat template, or one that refuses a system message or tools
                made[part] = None
        return made


async def read_files(paths: Mapping[str, str]) -> Mapping[str, FileTokens]:
    """Return what makes the tokens of the prompts, by path. paths: by model. Raises SettingsError for a bad file."""
    return {path: await asyncio.to_thread(FileTokens, path) for path in set(paths.values())}


async def read_tokenizers(
    http: aiohttp.ClientSession,
    engines: Sequence[EngineSeen],
    paths: Mapping[str, str],
    ours: Mapping[str, FileTokens],
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


def _load(path: str) -> ModelTokenizer:
    try:
        from streams.prompts.tokenizer import ModelTokenizer
    except ImportError as exc:
        raise SettingsError(
            f"--tokenizer needs {exc.name}", remedy="`pip install 'kvstreams[front]'` installs it"
        ) from exc
    return ModelTokenizer(Path(path), _CACHE_BYTES)


async def _differences(
    http: aiohttp.ClientSession, engine: EngineSeen, ours: FileTokens, headers: Mapping[str, str]
) -> Mapping[str, str]:
    """What differs, by the name of the prompt; "" if nothing does."""
    differing: dict[str, str] = {}
    theirs: dict[RenderPart, list[int] | None] = {}
    statuses: dict[RenderPart, int | None] = {}
    reads_more = reads_more_than_tokenize((await call(http, f"{engine.worker.url}{VERSION}", headers)).body)
    for part, (kind, prompt) in PROMPTS.items():
        sent = {"model": engine.worker.model, **prompt}
        if reads_more and kind is Kind.CHAT:
            sent = orjson.loads(for_tokenize(orjson.dumps(sent)))
        answer = await call(http, f"{engine.worker.url}{TOKENIZE}", headers, sent)
        if answer.error is not None:
            differing[part.words] = answer.error
            break  # it would not answer about the others either
        if answer.status in LACKING:
            return {}  # an engine without /tokenize
        if reads_more or part not in NOT_OF_TOKENIZE:
            theirs[part] = token_ids(answer.body) if answer.ok else None
            statuses[part] = answer.status
    compared = await compare_by_rules(theirs, ours.by_rules, NEWEST)
    for part, tokens in theirs.items():
        made = compared.ours[part]
        if made is not None and tokens is not None:
            differing[part.words] = str(compare(made, tokens) or "")
        elif made is not tokens:
            refuses = "the files make" if tokens is None else "the engine makes"
            differing[part.words] = (
                f"only {refuses} tokens of it (the status of the engine's answer is {statuses[part]})"
            )
    return differing
