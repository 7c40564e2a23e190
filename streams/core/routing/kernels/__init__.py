"""Compiled kernels of the cost of a request on each candidate."""

#: What Python calls, as module and kernel.
ENTRY_POINTS = ("price.price_ranks", "price_times.price_times")
