"""A front that probes one engine with a given chat template, and then tokenizes prompts for it.

What lives here: the model's files, with one token for each byte, and an engine that renders as a function says. What
must not: the rules by which engines render; each test has its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from streams.client.payloads import unpack_tokens
from streams.client.plain_http import PlainHttp
from streams.lab.engines.chat_template import tokenizer_files
from streams.prompts.calls import Kind
from streams.prompts.engine_tokens import RENDER, TOKENIZE
from streams.prompts.parity_probes import ParityProbes
from streams.prompts.requests import read_request
from streams.prompts.tokenizing import Tokenizing
from streams.router_api.messages.answer_json import render_json
from tests.helpers.http_double import HttpDouble

#: The prompt that an engine makes of the body of a chat.
Renders = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Probed:
    """outcome: of the probe, with the prompt that differs. prompts: text of each chat's tokens, and their source."""

    outcome: tuple[str, str | None]
    prompts: list[tuple[str, str]]


def byte_model(folder: Path, template: str) -> Path:
    """Write a model with this chat template and one token for each byte."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer_files().items():
        (folder / name).write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def probe(
    model: Path, renders: Renders, chats: Sequence[Mapping[str, Any]], renders_chats: Renders | None = None
) -> Probed:
    """Probe an engine, and tokenize chats for it.

    renders: what its /tokenize makes of a chat. renders_chats: the same of its render call; None if it lacks one.
    """

    def tokenize(body: Any) -> dict[str, Any]:
        text = renders(body) if "messages" in body else body["prompt"]
        return {"tokens": list(text.encode())}

    pages: dict[str, Any] = {TOKENIZE: tokenize}
    if renders_chats is not None:
        pages[Kind.CHAT + RENDER] = lambda body: {"token_ids": list(renders_chats(body).encode())}
    with HttpDouble(pages) as engine:
        return asyncio.run(_probe(model, engine.url, chats))


async def _probe(model: Path, url: str, chats: Sequence[Mapping[str, Any]]) -> Probed:
    reports: list[dict[str, Any]] = []
    tokenizing = Tokenizing({"m": model}, 1, 1 << 20)
    http = PlainHttp(keepalive_s=5.0, connect_timeout_s=5.0)
    await tokenizing.start()
    probes = ParityProbes(_Router(reports).report_render, tokenizing, lambda _: None)
    try:
        row = {"worker_id": 1, "url": url, "model": "m", "incarnation": 1, "dp_size": 1, "silent_dp_ranks": []}
        probes.note([{**row, "render": render_json(None)}])
        while not reports:
            await asyncio.sleep(0.005)
        prompts = []
        for chat in chats:
            body = orjson.dumps({"model": "m", **chat})
            prompt = await tokenizing.prompt(read_request(Kind.CHAT, body), body, "m", url, http, None)
            prompts.append((bytes(unpack_tokens(prompt.tokens)).decode(), prompt.source))
        return Probed((reports[0]["outcome"], reports[0]["part"]), prompts)
    finally:
        http.close()
        await probes.close()
        await tokenizing.close()


class _Router:
    def __init__(self, reports: list[dict[str, Any]]) -> None:
        self._reports = reports

    async def report_render(self, _: int, body: dict[str, Any]) -> dict[str, Any]:
        self._reports.append(body)
        return {}
