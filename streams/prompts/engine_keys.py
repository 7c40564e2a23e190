"""The API keys of engines, and options that have a value for each model.

What lives here: reading them. What must not: calls of engines (engine_tokens).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from streams.errors import SettingsError
from streams.security.access import CHECK_S
from streams.security.files import watched_secret

#: Returns the API key for the engines of a model, None if they need none.
KeyOf = Callable[[str | None], str | None]


class EngineKeys:
    """The keys by model, from files that are read again when they change."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """files: by model; "" is for all other models. Raises SettingsError for a file that cannot be used."""
        self._keys = {model: watched_secret("--engine-key", file) for model, file in files.items()}

    def of(self, model: str | None) -> str | None:
        """Return the API key for engines of a model, None if they need none."""
        watched = self._keys.get(model or "") or self._keys.get("")
        return None if watched is None else watched.value

    async def check_forever(self) -> None:
        """Read files again that have changed, until cancelled."""
        while self._keys:
            await asyncio.sleep(CHECK_S)
            for watched in self._keys.values():
                await asyncio.to_thread(watched.check)


def parse_by_model(option: str, values: Sequence[str]) -> dict[str, str]:
    """Read repeated MODEL=VALUE; a value without a model is for all other models, under "". Raises SettingsError."""
    by_model: dict[str, str] = {}
    for text in values:
        model, equals, value = text.rpartition("=")
        if not value or (equals and not model):
            raise SettingsError(f"{option} {text!r} is not MODEL=PATH or PATH")
        if model in by_model:
            raise SettingsError(f"{option} names {model or 'no model'} twice")
        by_model[model] = value
    return by_model
