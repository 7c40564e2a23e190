"""Compiled kernels of bookings; `layout` is the format of their memory."""

#: What Python calls, as module and kernel, the slowest to compile first.
ENTRY_POINTS = (
    "plain.fold",
    "prefixes.add_bytes",
    "plain.set_ranks",
    "prefixes.match_bytes",
    "prefixes.remove_chain",
    "plain.put_freed",
    "plain.expire",
    "plain.end",
    "plain.take_out",
    "plain.note",
    "plain.find",
    "prefixes.find_child",
    "plain.copy_chain",
)
