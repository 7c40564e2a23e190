"""Compiled kernels of the agents' store of runs: `layout` is the format, tables.run_table the interface."""
