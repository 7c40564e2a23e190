"""Files with secrets: reading them with a limit, and noticing that they have changed.

What lives here: reading, and one line of the log per change that cannot be used. What must not: what the files contain
(tokens, tls).

State: tokens and certificates of one server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from streams.errors import SettingsError

log = logging.getLogger(__name__)

#: A password or a token of Kafka's. More is not one: the setting names another file.
SECRET_BYTES_MAX = 64 * 1024

_Value = TypeVar("_Value")


def read_text(setting: str, path: str, bytes_max: int) -> str:
    """The text of a file that a setting names; raises SettingsError, which names both and shows no content."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(bytes_max + 1)
    except (OSError, ValueError) as exc:  # ValueError: a null character in the path
        reason = getattr(exc, "strerror", None) or str(exc)
        raise SettingsError(f"{setting}: {path} cannot be read: {reason}") from exc
    if len(content) > bytes_max:
        raise SettingsError(f"{setting}: {path} has more than {bytes_max} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:  # not as the cause, since it holds the content
        raise SettingsError(f"{setting}: {path} is not UTF-8 text") from None


def read_secret(setting: str, path: str) -> str:
    """A secret that is a file's only content. Spaces and line breaks around it are dropped, as editors add one."""
    text = read_text(setting, path, SECRET_BYTES_MAX).strip()
    if not text:
        raise SettingsError(f"{setting}: {path} is empty")
    return text


class Watched(Generic[_Value]):
    """A value that is loaded from files, and loaded again when one of them changes. Used by one thread at a time.

    value: the last one that could be loaded. A change that cannot be used keeps it and is logged once.
    """

    def __init__(self, what: str, paths: Sequence[str], load: Callable[[], _Value]) -> None:
        """what: for the log, as in "the tokens". Raises what `load` raises."""
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        # Before the files are read: a change while they are read is noticed at the next check.
        self._seen = self._signatures()
        self.value = load()

    def check(self) -> bool:
        """Load the value again if a file has changed since the last check; returns whether the value is a new one."""
        now = self._signatures()
        if now == self._seen:
            return False
        self._seen = now
        try:
            self.value = self._load()
        except SettingsError as exc:
            log.error("%s stay as they were, since their files cannot be used: %s", self._what, exc)
            return False
        log.info("%s were read again, since their files have changed", self._what)
        return True

    def _signatures(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What differs after a file was written or replaced; a mounted secret of Kubernetes is a link to another one.

        None for a file that cannot be found.
        """
        signatures: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                stat = os.stat(path)
            except OSError:
                signatures.append(None)
            else:
                signatures.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(signatures)


def watched_secret(option: str, file: str) -> Watched[str]:
    """Return the secret in a file. Raises SettingsError, which names the option."""
    return Watched(f"the secret of {option}", [file], lambda: read_secret(option, file))
