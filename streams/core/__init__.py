"""The pure core: ids, events, hashing, the prefix index, loads, cost and selection.

Nothing here does I/O or reads a clock: time, randomness and settings arrive as arguments. An import-linter contract in
pyproject.toml holds this.
"""
