"""The OpenAI-compatible front: it tokenizes a request, asks a router for a worker, and copies the engine's answer."""
