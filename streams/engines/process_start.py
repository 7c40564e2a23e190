"""What an engine's HTTP server reports about its process: when it started, and which models it serves.

What lives here: reading `process_start_time_seconds` and `/v1/models`, and which answers of an HTTP server are a sign
of life. What must not: what follows from them (continuity, feed, bridged_engine).

A proxy in front of an engine answers in its place while the engine is away: 502 or 503, and some proxies 404. So only
a page with status 200 shows that the engine is running. An engine that serves no metrics answers 404 itself; it is then
asked for its models.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import time
from collections.abc import Callable

import aiohttp

from streams.core.ids import Incarnation, WorkerId
from streams.engines.continuity import Evidence
from streams.engines.model_list import ListedFacts, ModelEntry, facts_of, model_entries
from streams.errors import KvStreamsError

log = logging.getLogger(__name__)

#: Bytes of a page. vLLM's page of eight ranks with all its histograms is about 500 KB.
PAGE_BYTES_MAX = 8 * 1024 * 1024

#: Bytes of an answer of /v1/models; one with a hundred adapters has 50 KB.
MODELS_BYTES_MAX = 1024 * 1024

#: /v1/models is given up after this time, and asked for again after the pause.
MODELS_TIMEOUT_S = 5.0
MODELS_RETRY_S = 1.0

#: The list is read at this interval while the engine is fed: adapters come and go without a restart.
LIST_CHECK_S = 10.0

#: A feed is not live for at most this long because /v1/models does not answer. It is as long as batches wait for
#: evidence about their process: an engine without HTTP is fed from its events alone then.
MODEL_WAIT_S = 10.0

#: Names of a list in a log line.
NAMES_LOGGED_MAX = 5

_START_TIME = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)

_OK, _CLIENT_ERRORS, _KEY_REQUIRED = 200, range(400, 500), (401, 403)


async def read_process_start(http: aiohttp.ClientSession, metrics_url: str, models_url: str) -> Evidence:
    """Read the start time from an engine's metrics; a page without one still shows that the engine is reachable.

    Raises ClientError, TimeoutError.
    """
    async with http.get(metrics_url) as response:
        if response.status == _OK:
            return parse_process_start((await read_body(response, PAGE_BYTES_MAX)).decode(errors="replace"))
        if response.status not in _CLIENT_ERRORS:
            return Evidence(reachable=False, started=None)
    async with http.get(models_url) as response:
        return Evidence(reachable=response.status == _OK, started=None)


async def refuses_connections(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether nothing listens at an address, as while a process starts, and after it has ended."""
    try:
        async with http.get(url):
            return False
    except aiohttp.ClientConnectorError as exc:
        return exc.os_error.errno == errno.ECONNREFUSED
    except (aiohttp.ClientError, TimeoutError):
        return False


async def read_body(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read a body, and stop after `bytes_max` bytes or slightly more. Raises ClientError, TimeoutError."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > bytes_max:
            break
    return bytes(body)


def parse_process_start(page: str) -> Evidence:
    """Find the start time on a Prometheus page, converted to microseconds."""
    match = _START_TIME.search(page)
    try:
        return Evidence(True, Incarnation(round(float(match[1]) * 1_000_000)) if match else None)
    except (ValueError, OverflowError):
        return Evidence(True, None)


class KeyRequired(KvStreamsError):
    """The engine's HTTP server does not answer without its key, or with this one."""

    code = "key_required"


async def read_models(http: aiohttp.ClientSession, url: str) -> bytes:
    """Read an engine's /v1/models. Raises ClientError, TimeoutError, KeyRequired."""
    async with http.get(url) as response:
        if response.status in _KEY_REQUIRED:
            raise KeyRequired(
                f"it answers {response.status}, so it requires an API key, or another one",
                remedy="Add key=FILE to its --engine",
            )
        response.raise_for_status()
        return await read_body(response, MODELS_BYTES_MAX)


class ModelChanged(KvStreamsError):
    """Another process runs at the engine's address, and serves another model."""

    code = "model_changed"

    def __init__(self, model: str) -> None:
        super().__init__(f"the engine serves {model} now", model=model)
        self.model = model


class ListedModel:
    """Whether an engine lists the model that it is fed under. Shared by the feeds of its ranks.

    A model that the operator has set is never replaced by another. Some engines never list it, and nothing follows
    from that. If the engine has listed it before, another process without it must not get its requests.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        worker_id: WorkerId,
        models_url: str,
        model: str,
        on_list: Callable[[ListedFacts], None] = lambda _: None,
        *,
        is_set: bool,
    ) -> None:
        """on_list: takes what each list says about the model. is_set: whether the operator has set the model; otherwise
        it is from the engine's list.
        """
        self._http = http
        self._on_list = on_list
        self._worker_id = worker_id
        self._url = models_url
        self._model = model
        self._is_set = is_set
        self._was_listed = not is_set
        self._is_refused = False  # whether the list was last refused for want of a key
        #: Whether the engine's last list lacks the model that the operator has set, or requires another key, and an
        #: earlier list had the model.
        self.is_missing = False

    @property
    def wait_s(self) -> float:
        """How long a feed is not live at most if the engine's list cannot be read."""
        return MODEL_WAIT_S if self._was_listed else 0.0

    async def check(self) -> str | None:
        """Return None once the engine lists the model, or the name of the model that it serves instead.

        Asks until it is answered, since an engine's events may arrive before its HTTP server is up. An engine that has
        not listed its model before is asked for a short time only: it may have no such list.
        """
        give_up_at_s = time.monotonic() + MODEL_WAIT_S
        while True:
            names = await self._read()
            if names is None and not self._was_listed and time.monotonic() >= give_up_at_s:
                return None
            if names is not None:
                other = self._replacement(names)
                if other is not None or not self.is_missing:
                    return other
            await asyncio.sleep(MODELS_RETRY_S)

    async def follow(self) -> None:
        """Read the list again and again, so that its names, adapters and lengths are followed; until cancelled."""
        while True:
            await asyncio.sleep(LIST_CHECK_S)
            await self._read()

    async def ask_once(self) -> str | None:
        """Return the name of the model that the engine serves instead; None if there is none, or no answer."""
        names = await self._read()
        return None if names is None or self._is_set else self._replacement(names)

    async def _read(self) -> tuple[str, ...] | None:
        """Return the names that the engine lists, None if they cannot be read."""
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S):
                return self._names(model_entries(await read_models(self._http, self._url)))
        except KeyRequired as exc:
            self._note_refused(exc)
            return None
        except Exception:  # whatever an HTTP server sends, it must not end the feed
            log.debug("worker %d: %s cannot be read", self._worker_id, self._url, exc_info=True)
            return None

    def _names(self, entries: tuple[ModelEntry, ...]) -> tuple[str, ...]:
        """Return the names in a list, and report what it says about the model."""
        names = tuple(entry.name for entry in entries)
        if self._model in names:
            self._on_list(facts_of(entries, self._model))
        return names

    def _note_refused(self, refused: KeyRequired) -> None:
        """Note that the list is there and cannot be read: another process may have another key, and another model."""
        if not self._is_refused:
            self._is_refused = True
            log.warning("worker %d: it is not known what %s lists: %s", self._worker_id, self._url, refused)
        self.is_missing = self.is_missing or self._was_listed

    def _replacement(self, names: tuple[str, ...]) -> str | None:
        """Return the model that takes the place of this one, None if none does; note whether this one is missing."""
        if self._model in names:
            if self.is_missing:
                log.info("worker %d: %s lists %s again", self._worker_id, self._url, self._model)
            self._was_listed, self.is_missing, self._is_refused = True, False, False
            return None
        if not self._is_set:
            return names[0]
        if self._was_listed and not self.is_missing:
            self.is_missing = True
            log.warning(
                "worker %d: the engine was restarted, and %s is not among the models that %s lists: %s. Its answers "
                "are not exact until it is. Restart the engine with this model, or change model= of its --engine",
                self._worker_id,
                self._model,
                self._url,
                ", ".join(map(repr, names[:NAMES_LOGGED_MAX])),
            )
        return None
