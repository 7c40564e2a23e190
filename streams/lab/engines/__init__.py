"""Simulated LLM engines and a CXL pool that they share: pure models that take time as an argument, and processes.

What lives here:
- pure: `model` (one engine's scheduler) on `block_cache`, with `engine_config`, `engine_messages` and
  `synthetic_tokens`; `pool` (the shared pool); `openai` (the shapes of OpenAI's API)
- processes: `server` (an engine over HTTP and ZMQ) with `event_publisher`, `prometheus_page` and `pool_client`;
  `pool_server`; `clock` (model time from wall time)

What must not: routing.
"""
