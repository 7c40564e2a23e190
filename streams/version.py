"""The version of kvstreams, on its own so that any module can import it."""

from __future__ import annotations

__version__ = "0.1.0"
