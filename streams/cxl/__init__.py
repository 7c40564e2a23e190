"""CXL memory pools: blocks that several hosts can address, which outlive the worker that wrote them (docs/cxl.md)."""
