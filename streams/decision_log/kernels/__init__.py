"""Compiled kernel that notes a decision for the log; it needs numba and a little-endian machine."""

#: What Python calls, as module and kernel.
ENTRY_POINTS = ("note.note_decision",)
