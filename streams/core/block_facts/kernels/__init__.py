"""Compiled kernels of the fact sets."""

#: What Python calls, as module and kernel, the slowest to compile first.
ENTRY_POINTS = (
    "fact_sets.weigh",
    "fact_sets.walk",
    "fact_sets.count_groups",
    "fact_sets.find_rows",
    "fact_sets.drop_set",
    "fact_sets.put_set",
    "fact_sets.move_segment",
    "fact_sets.get_set",
)
