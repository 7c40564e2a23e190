"""Tests without Kafka; `make fast` runs them."""
