"""The version of kvstreams.

What lives here: the version, on its own so that any module can import it. What must not: imports.
"""

from __future__ import annotations

__version__ = "0.1.0"
