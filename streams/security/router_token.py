"""The token that a front or a gateway sends to routers.

What lives here: reading its file. What must not: tokens that a server accepts (tokens, access).

State: the token.
"""

from __future__ import annotations

import asyncio

from streams.security.access import CHECK_S
from streams.security.files import watched_secret


class RouterToken:
    """The token in the file of --router-token-file, which is read again when it changes."""

    def __init__(self, file: str) -> None:
        """file: "" for none. Raises SettingsError for a file that cannot be used."""
        self._watched = watched_secret("--router-token-file", file) if file else None

    def __call__(self) -> str:
        """Return the token."""
        assert self._watched is not None
        return self._watched.value

    @property
    def exists(self) -> bool:
        """Whether routers are sent a token."""
        return self._watched is not None

    async def check_forever(self) -> None:
        """Read the file again when it has changed, until cancelled."""
        while self._watched is not None:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(self._watched.check)
