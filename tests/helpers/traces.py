"""Where the published trace is, on machines that have it.

What lives here: its path. What must not: reading it (streams.lab.trace, streams.lab.simulation.trace_files).
"""

from __future__ import annotations

from pathlib import Path

#: 12,031 requests in Mooncake's format. It is not part of a checkout.
REAL_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
