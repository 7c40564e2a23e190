"""Benchmarks of the hot paths, compared with peers where there are any; see `python -m benchmarks.index --help`."""
