"""Benchmarks of the hot paths beside their peers; `python -m benchmarks.index --help`."""
