"""Tests of what survives the failure of engines, pools and routers, on a real Kafka with real processes."""
