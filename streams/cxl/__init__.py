"""CXL memory pools: blocks that several hosts can address, and that outlive the worker that wrote them (docs/cxl.md).

Importing this package imports neither Kafka nor anything else with I/O.
"""

from __future__ import annotations

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState

__all__ = ["CxlMemoryMetadata", "CxlMemoryState"]
