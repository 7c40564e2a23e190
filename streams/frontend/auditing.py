"""What a front does with the usage of an answer: the report to the router, and the comparison of prompts.

What lives here: the end of a request as the audit sees it, and asking an engine for its version. What must not: reading
answers (usage, resuming), the comparison itself (render_audit), and the router's part (core.routing.audit).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import orjson

from streams.client.payloads import prompt_usage
from streams.client.plain_http import PlainHttp
from streams.frontend.exchange import Exchange
from streams.frontend.render_audit import DIFFERENT_MAX, MODELS_MAX, WINDOW, RenderAudit, Rendering, compare
from streams.prompts.engine_keys import KeyOf
from streams.prompts.tokenizing import ENGINE, FILES

log = logging.getLogger(__name__)

#: How long an engine's version is taken to be the same: another engine may be started under its URL.
VERSION_S = 600.0

#: Time for an engine to answer with its version, and bytes of that answer.
VERSION_TIMEOUT_S = 5.0
VERSION_BYTES_MAX = 4096

#: Characters of a version that become the value of a label.
VERSION_CHARS_MAX = 64


class Auditing:
    """The audit of one front. Used on one loop."""

    def __init__(
        self,
        http: PlainHttp,
        key_of: KeyOf,
        renders: RenderAudit,
    ) -> None:
        """http: for calls of engines."""
        self._http = http
        self._key_of = key_of
        self._renders = renders
        #: Called with each model whose prompts differ too often.
        self.on_different: Callable[[str], None] = lambda _: None
        self._versions: dict[str, tuple[float, str]] = {}  # by URL, with the time when it was asked
        self._tasks: set[asyncio.Task[None]] = set()

    def ended(self, exchange: Exchange) -> None:
        """Take in the usage of a request that has ended, before its booking does."""
        booking, usage = exchange.booking, prompt_usage(exchange.usage)
        if booking is None or usage is None:
            return
        prompt, stream = exchange.prompt, exchange.migrating
        rendering: Rendering | None = None
        if prompt is not None and prompt.whole and prompt.source in (FILES, ENGINE) and not exchange.resumed_tokens:
            relay = None if stream is None else stream.relay
            rendering = compare(prompt.tokens, usage.prompt_tokens, None if relay is None else relay.prompt_ids)
            self._note(exchange.model or "", prompt.source, rendering, booking.url)
        # An overlap of other tokens says nothing about the index, even if there are as many of them. Blocks that came
        # from another engine are not of this one's cache.
        other = rendering is Rendering.OTHER_TOKENS
        elsewhere = exchange.prefilled_on is not None or exchange.pulls_from is not None
        booking.note_usage(exchange.usage, is_cached_here=not elsewhere and not other)

    def _note(self, model: str, source: str, rendering: Rendering, url: str | None) -> None:
        self._renders.renderings[rendering] += 1
        if rendering.differs and len(self._tasks) < MODELS_MAX:
            task = asyncio.create_task(self._count(model, url or ""), name="kvstreams-engine-version")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if source == FILES and self._renders.note(model, rendering):
            log.warning(
                "%d of the last %d prompts for model %s were others in the engine than this front computed. Its "
                "engines tokenize the prompts from now on, until a probe of all kinds of turns is equal again",
                DIFFERENT_MAX,
                WINDOW,
                model,
            )
            self.on_different(model)

    async def _count(self, model: str, url: str) -> None:
        """Count a prompt that differs by the version of its engine."""
        asked_s, version = self._versions.get(url, (-VERSION_S, ""))
        now_s = time.monotonic()
        if now_s - asked_s >= VERSION_S:
            version = await self._version(model, url) if url else ""
            if len(self._versions) >= MODELS_MAX:
                self._versions.clear()
            self._versions[url] = (now_s, version)
        self._renders.note_different(model, version)

    async def _version(self, model: str, url: str) -> str:
        """Ask an engine for its version; "" if it does not say. vLLM and TensorRT-LLM have this call."""
        key = self._key_of(model)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            response = await self._http.request("GET", url, "/version", headers, None, VERSION_TIMEOUT_S, is_short=True)
            try:
                page = orjson.loads(await response.read(VERSION_BYTES_MAX))
            finally:
                response.close()
        except (TimeoutError, OSError, ValueError):
            return ""
        version = page.get("version") if isinstance(page, dict) else None
        return version[:VERSION_CHARS_MAX] if isinstance(version, str) and version.isprintable() else ""

    async def close(self) -> None:
        """End what is being asked."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
