"""Tests that start no server and no Kafka; `make fast` runs them."""
