"""Compiled kernels that read and write the bytes of records; they need numba and a little-endian machine."""

# What Python calls, as module and kernel, the slowest to compile first.

#: Run records decoded: what a router does.
DECODING = ("runs.decode_records", "runs.decode_labels")
#: Events decoded, and run records loaded and encoded: what an agent does.
STORING = (
    "runs.load_records",
    "runs.drop_records",
    "runs.encode_dirty",
    "events.decode_batches",
    "runs.encode_stale",
    "runs.encode_emptied",
)
ENTRY_POINTS = DECODING + STORING
