"""LMCache's cache events as pools: which blocks its instances have in host memory, CXL memory and storage.

Importing this package imports neither Kafka nor anything else with I/O.
"""
