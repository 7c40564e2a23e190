"""A simulated LLM engine: one pure model with the clock passed in, and shells around it.

What lives here: `model` (one engine's scheduler and paged KV cache, pure), `trace` (workloads, pure), `server` (the
live engine: OpenAI HTTP, vLLM's events over ZMQ). What must not: routing; a simulator asks a policy, it never is one.
"""
