"""Tests that start real processes, servers and sockets, but no Kafka."""
