"""A pytest plugin: an aiohttp whose private parts have other names, as those of a later version may have.

aiohttp itself works as before: its modules are compiled from their sources with each of these names replaced. Its C
extensions are not used, as their names cannot be replaced.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import pytest

#: The parts of streams/process/aiohttp_internals.py that are not public in aiohttp.
MOVED = re.compile(
    rb"\b(_loop|_task_handler|_waiter|_messages|_parser|_paused|_reading_paused|_buffer_paused|_close|_force_close"
    rb"|_keepalive|_keepalive_timeout|_keepalive_handle|_next_keepalive_close_time|_manager|_request_factory"
    rb"|_process_keepalive|_handle_request|_make_request|_task|_buffer|_send_headers_immediately|message_consumed"
    rb"|RawRequestMessage|StreamWriter)\b"
)


class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname.startswith("aiohttp.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - the signature of a loader
        return self.source_to_code(MOVED.sub(rb"moved_\1", self.get_data(self.path)), self.path)


assert "aiohttp" not in sys.modules
os.environ["AIOHTTP_NO_EXTENSIONS"] = "1"
sys.meta_path.insert(0, _Finder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that count the requests which are served without aiohttp's task, as there are none."""
    counting = [item for item in items if {"fast", "direct"} & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=counting)
    items[:] = [item for item in items if item not in counting]
