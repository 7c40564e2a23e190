"""CXL memory pools: blocks that several hosts can address, and that outlive the worker that wrote them (docs/cxl.md).

Importing this package imports neither Kafka nor anything else with I/O. Its classes are imported at their first use,
since clients, which have no numpy, import `streams.cxl.migration`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState

__all__ = ["CxlMemoryMetadata", "CxlMemoryState"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from streams.core import cxl_memory

        return getattr(cxl_memory, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
