"""HTTP requests to one engine: with its API key, if it has one.

What lives here: the session of an engine, and its key, which is read again when its file changes. What must not: what
is asked (process_start, scraping, polling), and who else may know the key: it is in no log, metric or record.

The key is sent to the engine's own address only. Its metrics may be read from another host, and a redirection may lead
anywhere.

State: the API key.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
from yarl import URL

from streams.engines.address import EngineAddress
from streams.errors import SettingsError
from streams.security.files import Watched, read_secret

log = logging.getLogger(__name__)


def engine_session(shared: aiohttp.ClientSession, engine: EngineAddress) -> aiohttp.ClientSession:
    """Return a session for one engine, which uses the connections and timeouts of the shared one."""
    middlewares = () if engine.key_file is None else (EngineKey(engine.url, engine.key_file),)
    return aiohttp.ClientSession(
        connector=shared.connector, connector_owner=False, timeout=shared.timeout, middlewares=middlewares
    )


class EngineKey:
    """Adds an engine's API key to the requests that go to its address."""

    def __init__(self, url: str, file: str) -> None:
        """file: with the key. While it cannot be read, requests have no key."""
        self._origin = URL(url).origin()
        self._file = file
        self._watched: Watched[str] | None = None
        self._is_reported = False  # whether it was logged that the file cannot be read

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """See aiohttp's client middlewares."""
        if request.url.origin() == self._origin:
            key = await asyncio.to_thread(self._current)
            if key is not None:
                request.headers["Authorization"] = f"Bearer {key}"
        return await handler(request)

    def _current(self) -> str | None:
        """Return the key that the file has now, or the last one that could be read. Reads the file system."""
        if self._watched is None:
            try:
                self._watched = Watched(f"the key in {self._file}", [self._file], lambda: read_key(self._file))
            except SettingsError as exc:
                if not self._is_reported:
                    log.warning("requests to %s have no key: %s", self._origin, exc)
                self._is_reported = True
                return None
        self._watched.check()
        return self._watched.value


def read_key(file: str) -> str:
    """Read an engine's key. Raises SettingsError for a file that cannot be used, without its content."""
    key = read_secret("key of --engine", file)
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"key of --engine: {file} contains characters that no HTTP header can have")
    return key
