"""Engines from a TOML file, which is read again when it changes.

What lives here: parsing the file, and noticing changes. What must not: the parts of an address (address).

    [[engine]]
    id = 1
    url = "http://gpu1:8000"
    events = "tcp://gpu1:5557"
    taints = ["spot"]
"""

from __future__ import annotations

import asyncio
import tomllib
from typing import Any

from streams.engines.address import EngineAddress, address_of, check_distinct
from streams.engines.sources.interface import Wanted
from streams.errors import SettingsError
from streams.security.files import Watched, read_text

#: How often it is checked whether the file has changed; this costs one call of the file system.
CHECK_EVERY_S = 1.0

#: Bytes of the file: more than ENGINES_MAX engines with long names.
FILE_BYTES_MAX = 4 * 1024 * 1024

_OPTION = "engines-file"


class EnginesFile:
    """The engines of one file. A changed file that cannot be used leaves the engines as they were."""

    is_fixed = False

    def __init__(self, path: str) -> None:
        """Read the file. Raises SettingsError that names the entry that cannot be used."""
        self._path = path
        self._watched = Watched(f"the engines of {path}", [path], lambda: engines_of(path))

    def __str__(self) -> str:
        return self._path

    async def run(self, wanted: Wanted) -> None:
        """See EngineSource."""
        wanted(self._watched.value)
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if await asyncio.to_thread(self._watched.check):
                wanted(self._watched.value)


def engines_of(path: str) -> tuple[EngineAddress, ...]:
    """Read the engines of a file. Raises SettingsError."""
    text = read_text(_OPTION, path, FILE_BYTES_MAX)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise SettingsError(f"{_OPTION}: {path} is not TOML: {exc}") from exc
    entries = content.pop("engine", [])
    if content or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError(f"{_OPTION}: {path} must consist of [[engine]] tables")
    engines = tuple(address_of(_texts(entry), f"{path}, engine {n}") for n, entry in enumerate(entries, start=1))
    check_distinct(engines)
    return engines


def _texts(entry: dict[str, Any]) -> dict[str, str]:
    """Return an entry in the form of `--engine`'s parts; a list is joined as that of taints is."""
    return {name: "+".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in entry.items()}
