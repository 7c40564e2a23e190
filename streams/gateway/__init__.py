"""A real Envoy in front of engines and pickers, without Kubernetes (docs/gateway.md)."""
