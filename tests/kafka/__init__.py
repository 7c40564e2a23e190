"""Tests on a real Kafka, with real processes."""
