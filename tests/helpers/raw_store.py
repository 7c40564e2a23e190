"""A store's files, opened without the store."""

from __future__ import annotations

from pathlib import Path

from rocksdict import Options, Rdict


def raw(path: Path) -> Rdict:
    """Open a store's files without the store."""
    options = Options(raw_mode=True)
    options.set_allow_concurrent_memtable_write(False)  # the files name the memtable with which they were written
    return Rdict(str(path), options)
